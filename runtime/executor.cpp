#include "runtime/executor.h"

#include <algorithm>
#include <cstring>

#include "terrace/error.h"

namespace terrace {
namespace {

// Operations of one lane that a port may hold at a time. More than one hides the executor's own
// latency; few keep the order of the plan.
constexpr std::array<std::size_t, kLaneCount> kMaxInFlight{16, 16, 8, 8, 4, 1, 1};

constexpr Nanoseconds kLastWords = std::chrono::seconds(5);  // of what is not stuck

std::size_t index_of(Lane lane) { return static_cast<std::size_t>(lane); }

}  // namespace

RunnablePlans::RunnablePlans(EnginePlan plan) : engine(std::move(plan)) {
  for (const auto before : kPassKinds) {
    if (!exists(before, engine.form)) continue;
    dependents_[index_of(before)] = dependents_of(engine.plan(before));
    for (const auto after : kPassKinds) {
      if (!may_follow(before, after, engine.form)) continue;
      const auto& boundary = engine.between(before, after);
      waits_across_[index_of(before)][index_of(after)] =
          boundary_waits(engine.plan(after), boundary);
      dependents_across_[index_of(before)][index_of(after)] =
          boundary_dependents(engine.plan(before), boundary);
    }
  }
}

Executor::Executor(const ExecutorContext& context, const ExecutorPorts& ports)
    : context_(context), ports_(ports) {}

Executor::~Executor() { TERRACE_CHECK(owed_ == 0); }

// ---- passes

std::uint64_t Executor::begin(const PassOptions& options) {
  TERRACE_CHECK(can_begin());
  TERRACE_CHECK(passes_.empty() || may_follow(passes_.back().options.kind, options.kind,
                                              context_.plans.engine.form));
  bad_gradient_.reset();
  Pass next;
  next.number = next_number_++;
  next.options = options;
  next.plan = &context_.plans.engine.plan(options.kind);
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

void Executor::finish_pass(std::string trainer) {
  if (passes_.empty()) return;  // there was nothing left to commit
  if (!passes_.back().options.trainer) passes_.back().options.trainer = std::move(trainer);
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
         context_.plans.waits_across(previous->options.kind, next.options.kind).of(op)) {
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
  for (const auto op : context_.plans.dependents(own.options.kind).of(ref.op)) satisfy(own, op);
  if (Pass* next = find_pass(ref.pass + 1)) {
    const auto& links = context_.plans.dependents_across(own.options.kind, next->options.kind);
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
  drop_unstarted(last);
  lease_wanted_ = false;
  // What is left may have been ordered by what was dropped: it goes on when all else has ended.
  quieting_ = true;
  const bool undone = !last.updates_started;
  retire_passes();
  return undone;
}

void Executor::drop_unstarted(Pass& last) {
  for (auto& queue : queues_) {
    std::deque<OpRef> kept;
    for (const OpRef ref : queue) {
      if (ref.pass != last.number || last.plan->operations[ref.op].pending) {
        kept.push_back(ref);
        continue;
      }
      last.ops[ref.op].stage = Stage::done;
      --last.open;
    }
    queue = std::move(kept);
  }
  last.open_results = 0;
  for (OpIndex op = 0; op < last.ops.size(); ++op) {
    const Lane lane = lane_of(last.plan->operations[op].kind);
    const bool result = lane == Lane::compute || lane == Lane::adam;
    if (result && last.ops[op].stage != Stage::done) ++last.open_results;
  }
}

// Nothing is in flight: only what has not started can be waited for.
void Executor::resume_pending() {
  quieting_ = false;
  if (passes_.empty()) return;
  Pass& last = passes_.back();
  const Pass* previous = passes_.size() > 1 ? &passes_.front() : nullptr;
  for (OpIndex op = 0; op < last.ops.size(); ++op) {
    auto& waits = last.ops[op].waits;
    waits = 0;
    for (const auto other : last.plan->dependencies_of(op)) {
      if (last.ops[other].stage != Stage::done) ++waits;
    }
    if (previous == nullptr) continue;
    const auto& links =
        context_.plans.waits_across(previous->options.kind, last.options.kind).of(op);
    for (const auto other : links) {
      if (previous->ops[other].stage != Stage::done) ++waits;
    }
  }
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
  collect(timeout);
  // 2. Act on them.
  for (const auto& result : results_) complete(result);
  for (const auto& completion : completions_) complete(completion);
  if (ports_.nvme.stuck()) fail(*ports_.nvme.stuck());
  if (ports_.nvme.broken()) fail(*ports_.nvme.broken());
  retire_passes();
  // 3. Start what is ready.
  start_ready();
  // 4. Hand it to the kernel.
  ports_.nvme.flush();
}

void Executor::collect(Nanoseconds timeout) {
  results_.clear();
  completions_.clear();
  ports_.nvme.reap(results_, timeout);
  ports_.device.poll(completions_);
  ports_.adam.poll(completions_);
}

bool Executor::settle() {
  if (leased_) release_lease();
  while (owed_ > 0 && !ports_.nvme.stuck()) {
    collect(std::chrono::milliseconds(100));
    for (const auto& result : results_) complete(result);
    for (const auto& completion : completions_) complete(completion);
  }
  if (owed_ == 0) return ports_.nvme.pending() == 0;
  // What is not stuck still ends.
  const auto deadline = steady_clock().now() + kLastWords;
  while (owed_ > ports_.nvme.pending() && steady_clock().now() < deadline) {
    collect(std::chrono::milliseconds(10));
    for (const auto& result : results_) complete(result);
    for (const auto& completion : completions_) complete(completion);
  }
  owed_ = 0;
  return false;
}

void Executor::start_ready() {
  if (quieting_) {
    if (owed_ > 0) return;
    resume_pending();
  }
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
  if (lane == Lane::commit && !pass(ref.pass).options.trainer) return false;
  if (!start(ref)) return false;
  queue.pop_front();
  return true;
}

// ---- completions

void Executor::complete(const Completion& completion) {
  const bool begin_mark = (completion.ticket.value & kBeginMark) != 0;
  const bool hash_mark = (completion.ticket.value & kHashMark) != 0;
  const std::uint64_t value = completion.ticket.value & ~(kBeginMark | kHashMark);
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
  if (hash_mark) {
    hash_done(ref);
  } else if (lane == Lane::compute) {
    account(ref, op.start, completion.end, {});
  } else {
    account(ref, completion.start, completion.end, {completion.bytes});
  }
  if (operation(ref).kind == OpKind::measure) note_bad_gradient(ref);
  if (operation(ref).kind == OpKind::update && op.hashes) check_and_stage(ref);
  if (op.parts == 0) finish(ref);
}

void Executor::complete(const StoreResult& result) {
  const OpRef ref{result.completion.ticket.value >> 32,
                  static_cast<OpIndex>(result.completion.ticket.value)};
  if (result.completion.error != 0) fail({ErrorCode::io, result.error});
  const bool check = operation(ref).kind == OpKind::read && operation(ref).hashed &&
                     ports_.nvme.checksums() && result.completion.error == 0;
  if (check) start_hash(ref);
  complete(Completion{result.completion.ticket, 0, result.completion.bytes,
                      result.completion.start, result.completion.end});
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
  ++operations_;
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
  if (what.kind == OpKind::commit) {
    return text.append(" step ").append(std::to_string(pass(ref.pass).options.step));
  }
  if (lane_of(what.kind) != Lane::compute && lane_of(what.kind) != Lane::adam) {
    const auto& operand = pass(ref.pass).plan->operands_of(ref.op)[0];
    text.append(" ").append(to_string(operand.content));
  }
  return text.append(" ").append(context_.layout.layer(what.layer).name);
}

void Executor::fail(const Error& error) {
  if (!failure_) failure_ = error;
}

void Executor::fail_operation(OpRef ref, const Completion& completion) {
  std::string why = std::strerror(completion.error);
  const bool device = on_device(operation(ref).kind);
  if (device && !ports_.device.failure().empty()) why = ports_.device.failure();
  fail({device ? ErrorCode::device : ErrorCode::io, describe(ref) + " failed: " + why});
}

}  // namespace terrace
