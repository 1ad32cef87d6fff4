#include "runtime/executor.h"

#include <algorithm>
#include <cstring>

#include "terrace/error.h"

namespace terrace {
namespace {

// Operations of one lane that a port may hold at a time. More than one hides the executor's own
// latency; few keep the order of the plan.
constexpr std::array<std::size_t, kLaneCount> kMaxInFlight{16, 16, 8, 8, 4, 1};

StreamId stream_of(OpKind kind) {
  switch (kind) {
    case OpKind::upload: return kHostToDeviceStream;
    case OpKind::download: return kDeviceToHostStream;
    default: return kComputeStream;
  }
}

std::size_t index_of(Lane lane) { return static_cast<std::size_t>(lane); }

}  // namespace

RunnablePlans::RunnablePlans(EnginePlan plan) : engine(std::move(plan)) {
  for (const bool before : {false, true}) {
    dependents[before] = dependents_of(engine.plan(before));
    for (const bool after : {false, true}) {
      const auto& boundary = engine.boundary[before][after];
      waits_across[before][after] = boundary_waits(engine.plan(after), boundary);
      dependents_across[before][after] = boundary_dependents(engine.plan(before), boundary);
    }
  }
}

Executor::Executor(const ExecutorContext& context, const ExecutorPorts& ports)
    : context_(context), ports_(ports) {}

Executor::~Executor() { TERRACE_CHECK(owed_ == 0); }

// ---- passes

std::uint64_t Executor::begin(bool evaluation, const AdamScalars& scalars) {
  TERRACE_CHECK(can_begin());
  Pass next;
  next.number = next_number_++;
  next.evaluation = evaluation;
  next.plan = &context_.plans.engine.plan(evaluation);
  next.scalars = scalars;
  next.ops.resize(next.plan->operations.size());
  next.open = next.ops.size();
  passes_.push_back(std::move(next));
  Pass& added = passes_.back();
  count_waits(added);
  for (OpIndex op = 0; op < added.ops.size(); ++op) {
    const auto& operation = added.plan->operations[op];
    const Lane lane = lane_of(operation.kind);
    queues_[index_of(lane)].push_back({added.number, op});
    at(stats_, lane).planned_bytes += operation.bytes;
    if (lane == Lane::compute || lane == Lane::adam) ++added.open_results;
  }
  return added.number;
}

Executor::Pass* Executor::find_pass(std::uint64_t number) {
  for (auto& candidate : passes_) {
    if (candidate.number == number) return &candidate;
  }
  return nullptr;
}

Executor::Pass& Executor::pass(std::uint64_t number) {
  Pass* found = find_pass(number);
  TERRACE_CHECK(found != nullptr);
  return *found;
}

void Executor::count_waits(Pass& next) {
  const Pass* previous = passes_.size() > 1 ? &passes_[passes_.size() - 2] : nullptr;
  for (OpIndex op = 0; op < next.ops.size(); ++op) {
    auto& waits = next.ops[op].waits;
    waits = static_cast<std::uint32_t>(next.plan->dependencies_of(op).size());
    if (previous == nullptr) continue;
    const bool device = on_device(next.plan->operations[op].kind);
    for (const auto other :
         context_.plans.waits_across[previous->evaluation][next.evaluation].of(op)) {
      const auto stage = previous->ops[other].stage;
      const bool met = stage == Stage::done ||
                       (stage == Stage::issued && device &&
                        on_device(previous->plan->operations[other].kind));
      waits += met ? 0 : 1;
    }
  }
}

// Between two operations on the device an issued one is as good as done: the stream waits for its
// event. Everyone else waits for the completion.
void Executor::satisfy_dependents(OpRef ref, bool issued) {
  Pass& own = pass(ref.pass);
  const bool device = on_device(own.plan->operations[ref.op].kind);
  const auto satisfy = [&](Pass& waiting, OpIndex op) {
    const bool both_on_device = device && on_device(waiting.plan->operations[op].kind);
    if (both_on_device == issued && waiting.ops[op].stage != Stage::done) --waiting.ops[op].waits;
  };
  for (const auto op : context_.plans.dependents[own.evaluation].of(ref.op)) satisfy(own, op);
  if (Pass* next = find_pass(ref.pass + 1)) {
    const auto& links = context_.plans.dependents_across[own.evaluation][next->evaluation];
    for (const auto op : links.of(ref.op)) satisfy(*next, op);
  }
}

bool Executor::updates_done() const {
  return passes_.empty() || passes_.back().open_results == 0;
}

void Executor::retire_passes() {
  while (!passes_.empty() && passes_.front().open == 0) passes_.pop_front();
}

bool Executor::cancel() {
  if (passes_.empty()) return true;  // all of it has ended
  Pass& last = passes_.back();
  last.cancelled = true;
  if (last.updates_started) {
    fail({ErrorCode::cancelled,
          "the step was abandoned after some layers had been updated and before all were; the "
          "state in memory belongs to no step. Create the engine anew"});
    return false;
  }
  for (auto& queue : queues_) {
    while (!queue.empty() && queue.back().pass == last.number) {
      const OpRef ref = queue.back();
      queue.pop_back();
      last.ops[ref.op].stage = Stage::done;
      --last.open;
    }
  }
  last.open_results = 0;
  for (const auto& op : last.ops) last.open_results += op.stage == Stage::issued ? 1 : 0;
  lease_wanted_ = false;
  retire_passes();
  return true;
}

// ---- leases

void Executor::request_lease() {
  TERRACE_CHECK(!leased_);
  lease_wanted_ = true;
}

void Executor::release_lease() {
  TERRACE_CHECK(leased_);
  leased_ = false;
  ports_.device.notify(kComputeStream, ticket(lease_));
  ++owed_;
  ++state(lease_).parts;
  mark_issued(lease_, kComputeStream);
}

// ---- a round

void Executor::turn(Nanoseconds timeout) {
  // 1. Collect: only here completions enter.
  completions_.clear();
  ports_.io.reap(completions_, timeout);
  ports_.device.poll(completions_);
  ports_.adam.poll(completions_);
  // 2. Act on them.
  for (const auto& completion : completions_) complete(completion);
  retire_passes();
  // 3. Start what is ready.
  start_ready();
  // 4. Hand it to the kernel.
  ports_.io.flush();
}

void Executor::settle() {
  if (leased_) release_lease();
  while (owed_ > 0) {
    completions_.clear();
    ports_.io.flush();
    ports_.io.reap(completions_, std::chrono::milliseconds(100));
    ports_.device.poll(completions_);
    ports_.adam.poll(completions_);
    for (const auto& completion : completions_) complete(completion);
  }
}

void Executor::start_ready() {
  bool progress = true;
  while (progress && !failure_) {
    progress = false;
    for (const Lane lane : kLanes) {
      while (!failure_ && start_lane(lane)) progress = true;
    }
  }
}

bool Executor::start_lane(Lane lane) {
  auto& queue = queues_[index_of(lane)];
  if (queue.empty() || in_flight_[index_of(lane)] >= kMaxInFlight[index_of(lane)]) return false;
  const OpRef ref = queue.front();
  if (state(ref).waits > 0) return false;
  if (lane == Lane::compute && (!lease_wanted_ || leased_)) return false;
  if (!start(ref)) return false;
  queue.pop_front();
  return true;
}

bool Executor::start(OpRef ref) {
  switch (operation(ref).kind) {
    case OpKind::read: return start_io(ref, IoOperation::read);
    case OpKind::write: return start_io(ref, IoOperation::write);
    case OpKind::upload:
    case OpKind::download: start_copy(ref); return true;
    case OpKind::update: start_update(ref); return true;
    case OpKind::forward:
    case OpKind::backward: start_use(ref); return true;
  }
  TERRACE_CHECK(false);
}

bool Executor::start_io(OpRef ref, IoOperation kind) {
  const auto operands = pass(ref.pass).plan->operands_of(ref.op);
  const auto& file = kind == IoOperation::read ? operands[0] : operands[1];
  const auto& memory = kind == IoOperation::read ? operands[1] : operands[0];
  IoRequest request;
  request.ticket = ticket(ref);
  request.operation = kind;
  request.file = context_.file;
  request.offset = file.extent.offset.count;
  request.data = context_.store.address(memory.tier, memory.extent);
  request.bytes = file.extent.size.count;
  if (!ports_.io.submit(request)) return false;
  state(ref).stage = Stage::issued;
  state(ref).parts = 1;
  ++owed_;
  ++in_flight_[index_of(lane_of(operation(ref).kind))];
  return true;
}

void Executor::wait_for_device_dependencies(OpRef ref, StreamId stream) {
  Pass& own = pass(ref.pass);
  const auto wait = [&](const Pass& earlier, OpIndex op) {
    const auto& other = earlier.ops[op];
    const auto kind = earlier.plan->operations[op].kind;
    if (other.stage == Stage::issued && other.has_event && stream_of(kind) != stream) {
      ports_.device.wait(stream, other.event);
    }
  };
  for (const auto op : own.plan->dependencies_of(ref.op)) wait(own, op);
  if (const Pass* previous = find_pass(ref.pass - 1)) {
    const auto& links = context_.plans.waits_across[previous->evaluation][own.evaluation];
    for (const auto op : links.of(ref.op)) wait(*previous, op);
  }
}

// Enqueued on the device: followers in other streams wait for the event.
void Executor::mark_issued(OpRef ref, StreamId stream) {
  auto& op = state(ref);
  op.event = ports_.device.record(stream);
  op.has_event = true;
  op.stage = Stage::issued;
  satisfy_dependents(ref, true);
}

void Executor::start_copy(OpRef ref) {
  const auto operands = pass(ref.pass).plan->operands_of(ref.op);
  const StreamId stream = stream_of(operation(ref).kind);
  wait_for_device_dependencies(ref, stream);
  ports_.device.copy(stream, {ticket(ref),
                              context_.store.address(operands[1].tier, operands[1].extent),
                              context_.store.address(operands[0].tier, operands[0].extent),
                              operands[0].extent.size});
  state(ref).parts = 1;
  ++owed_;
  ++in_flight_[index_of(lane_of(operation(ref).kind))];
  mark_issued(ref, stream);
}

void Executor::start_use(OpRef ref) {
  wait_for_device_dependencies(ref, kComputeStream);
  ports_.device.notify(kComputeStream, {ticket(ref).value | kBeginMark});
  state(ref).parts = 1;
  ++owed_;
  state(ref).stage = Stage::leased;
  lease_ = ref;
  leased_ = true;
  lease_wanted_ = false;
}

// One slice for each tensor that the run touches; the padding between tensors is left alone.
void Executor::start_update(OpRef ref) {
  Pass& own = pass(ref.pass);
  own.updates_started = true;
  const auto& update = own.plan->operations[ref.op];
  const auto operands = own.plan->operands_of(ref.op);
  const auto pointer = [&](std::size_t operand, Content content, std::uint64_t element) {
    TERRACE_CHECK(operands[operand].content == content);
    return context_.store.address(Tier::dram, operands[operand].extent) +
           element * context_.layout.element_size(content).count;
  };
  auto& op = own.ops[ref.op];
  op.stage = Stage::issued;
  ++in_flight_[index_of(Lane::adam)];
  for (const auto& tensor : context_.layout.block(update.layer).tensors) {
    const auto first = std::max(tensor.first, update.elements.first);
    const auto end = std::min(tensor.end(), update.elements.end());
    if (first >= end) continue;
    const auto skip = first - update.elements.first;
    AdamSlice slice;
    slice.gradient = pointer(0, Content::gradient, skip);
    slice.gradient_dtype = context_.layout.model().gradient_dtype;
    slice.master_weight = reinterpret_cast<float*>(pointer(1, Content::master_weight, skip));
    slice.momentum = reinterpret_cast<float*>(pointer(2, Content::momentum, skip));
    slice.variance = reinterpret_cast<float*>(pointer(3, Content::variance, skip));
    slice.parameter = pointer(4, Content::parameter, skip);
    slice.parameter_dtype = context_.layout.model().parameter_dtype;
    slice.elements = end - first;
    ports_.adam.submit(ticket(ref), own.scalars, slice);
    ++op.parts;
    ++owed_;
  }
  if (op.parts == 0) finish(ref);
}

// ---- completions

void Executor::complete(const Completion& completion) {
  const bool begin_mark = (completion.ticket.value & kBeginMark) != 0;
  const std::uint64_t value = completion.ticket.value & ~kBeginMark;
  const OpRef ref{value >> 32, static_cast<OpIndex>(value)};
  TERRACE_CHECK(owed_ > 0);
  --owed_;
  auto& op = state(ref);
  TERRACE_CHECK(op.parts > 0);
  --op.parts;
  if (completion.error != 0) fail_operation(ref, completion);
  const Lane lane = lane_of(operation(ref).kind);
  if (begin_mark) {
    op.start = completion.end;
    return;
  }
  if (lane == Lane::compute) {
    account(ref, op.start, completion.end, {});
  } else {
    account(ref, completion.start, completion.end, {completion.bytes});
  }
  if (op.parts == 0) finish(ref);
}

void Executor::finish(OpRef ref) {
  Pass& own = pass(ref.pass);
  auto& op = own.ops[ref.op];
  const Lane lane = lane_of(own.plan->operations[ref.op].kind);
  if (lane != Lane::compute) --in_flight_[index_of(lane)];
  satisfy_dependents(ref, false);
  op.stage = Stage::done;
  if (op.has_event) {
    ports_.device.release_event(op.event);
    op.has_event = false;
  }
  --own.open;
  if (lane == Lane::compute || lane == Lane::adam) --own.open_results;
}

// Busy time is the union of a lane's intervals, since several operations may be in flight.
void Executor::account(OpRef ref, Nanoseconds start, Nanoseconds end, Bytes bytes) {
  const Lane lane = lane_of(operation(ref).kind);
  auto& until = busy_until_[index_of(lane)];
  auto& lane_stats = at(stats_, lane);
  lane_stats.bytes += bytes;
  lane_stats.busy_seconds += to_seconds(std::max(Nanoseconds{0}, end - std::max(start, until)));
  until = std::max(until, end);
  if (ports_.trace != nullptr) {
    const std::string name = describe(ref);
    try {
      ports_.trace->span({lane, name, start, end, bytes.count, ref.pass});
    } catch (const std::exception& error) {
      fail({ErrorCode::io, std::string("writing the trace failed: ") + error.what()});
    }
  }
}

std::string Executor::describe(OpRef ref) {
  const auto& what = operation(ref);
  std::string text = to_string(what.kind);
  if (lane_of(what.kind) != Lane::compute && what.kind != OpKind::update) {
    const auto& operand = pass(ref.pass).plan->operands_of(ref.op)[0];
    text.append(" ").append(to_string(operand.content));
  }
  return text.append(" ").append(context_.layout.layer(what.layer).name);
}

void Executor::fail(const Error& error) {
  if (!failure_) failure_ = error;
}

void Executor::fail_operation(OpRef ref, const Completion& completion) {
  std::string where;
  const auto kind = operation(ref).kind;
  if (kind == OpKind::read || kind == OpKind::write) {
    const auto operands = pass(ref.pass).plan->operands_of(ref.op);
    const auto& file = operands[kind == OpKind::read ? 0 : 1];
    where = " at offset " + std::to_string(file.extent.offset.count) + ", " +
            std::to_string(file.extent.size.count) + " bytes of " +
            ports_.io.file_info(context_.file).path;
  }
  std::string why = std::strerror(completion.error);
  if (on_device(kind) && !ports_.device.failure().empty()) why = ports_.device.failure();
  fail({on_device(kind) ? ErrorCode::device : ErrorCode::io,
        describe(ref) + where + " failed: " + why});
}

}  // namespace terrace
