// The other half of Executor: how each kind of operation is started, and what it is checked for.
#include <algorithm>
#include <utility>

#include "nvme/checksum.h"
#include "runtime/executor.h"
#include "runtime/store_plan.h"

namespace terrace {
namespace {

StreamId stream_of(OpKind kind) {
  switch (kind) {
    case OpKind::upload: return kHostToDeviceStream;
    case OpKind::download: return kDeviceToHostStream;
    default: return kComputeStream;
  }
}

std::size_t index_of(Lane lane) { return static_cast<std::size_t>(lane); }

}  // namespace

bool Executor::start(OpRef ref) {
  switch (operation(ref).kind) {
    case OpKind::read: start_io(ref, IoOperation::read); return true;
    case OpKind::write: start_io(ref, IoOperation::write); return true;
    case OpKind::upload:
    case OpKind::download: start_copy(ref); return true;
    case OpKind::update: start_update(ref); return true;
    case OpKind::accumulate: start_accumulate(ref); return true;
    case OpKind::measure: start_measure(ref); return true;
    case OpKind::forward:
    case OpKind::backward: start_use(ref); return true;
    case OpKind::commit: start_commit(ref); return true;
  }
  TERRACE_CHECK(false);
}

// What is hashed on its way is hashed before a write and after a read.
void Executor::start_io(OpRef ref, IoOperation kind) {
  state(ref).stage = Stage::issued;
  ++in_flight_[index_of(lane_of(operation(ref).kind))];
  if (kind == IoOperation::write && operation(ref).hashed && ports_.nvme.checksums()) {
    return start_hash(ref);
  }
  submit_io(ref, kind);
}

void Executor::submit_io(OpRef ref, IoOperation kind) {
  const auto operands = pass(ref.pass).plan->operands_of(ref.op);
  const auto& file = kind == IoOperation::read ? operands[0] : operands[1];
  const auto& memory = kind == IoOperation::read ? operands[1] : operands[0];
  if (kind == IoOperation::write && !ports_.nvme.checksums()) {
    ports_.nvme.stage(file.extent, pass(ref.pass).options.step, {});
  }
  ports_.nvme.submit({ticket(ref), kind, file.extent,
                      context_.store.address(memory.tier, memory.extent)});
  ++state(ref).parts;
  ++owed_;
}

void Executor::start_hash(OpRef ref) {
  const bool read = operation(ref).kind == OpKind::read;
  const auto operands = pass(ref.pass).plan->operands_of(ref.op);
  const auto& file = operands[read ? 0 : 1];
  const auto& memory = operands[read ? 1 : 0];
  auto& op = state(ref);
  op.hashes = std::make_unique<OpHashes>();
  op.hashes->tiles.resize(ports_.nvme.tiles(file.extent));
  ports_.adam.submit_hash({ticket(ref).value | kHashMark},
                          {context_.store.address(memory.tier, memory.extent), file.extent.size,
                           ports_.nvme.tile(file.extent.offset), hash_bytes,
                           op.hashes->tiles.data()});
  ++op.parts;
  ++owed_;
}

void Executor::hash_done(OpRef ref) {
  auto& op = state(ref);
  const auto operands = pass(ref.pass).plan->operands_of(ref.op);
  if (operation(ref).kind == OpKind::read) {
    const auto wrong = ports_.nvme.mismatch(operands[0].extent, op.hashes->tiles);
    if (!wrong.empty()) fail({ErrorCode::corrupt, wrong});
  } else if (!failure_) {
    ports_.nvme.stage(operands[1].extent, pass(ref.pass).options.step, op.hashes->tiles);
    submit_io(ref, IoOperation::write);
  }
  op.hashes.reset();
}

void Executor::start_commit(OpRef ref) {
  Pass& own = pass(ref.pass);
  state(ref).stage = Stage::issued;
  state(ref).parts = 1;
  ++owed_;
  ++in_flight_[index_of(Lane::commit)];
  ports_.nvme.commit(ticket(ref), own.options.step,
                     *std::exchange(own.options.trainer, std::nullopt));
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
    const auto& links = context_.plans.waits_across(previous->options.kind, own.options.kind);
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

// Without the padding between tensors.
std::vector<AdamRange> Executor::real_elements(const Operation& operation) const {
  std::vector<AdamRange> ranges;
  for (const auto& tensor : context_.layout.block(operation.layer).tensors) {
    const auto first = std::max(tensor.first, operation.elements.first);
    const auto end = std::min(tensor.end(), operation.elements.end());
    if (first < end) ranges.push_back({first - operation.elements.first, end - first});
  }
  return ranges;
}

void Executor::start_accumulate(OpRef ref) {
  const auto operands = pass(ref.pass).plan->operands_of(ref.op);
  auto& op = state(ref);
  op.stage = Stage::issued;
  op.parts = 1;
  ++owed_;
  ++in_flight_[index_of(Lane::adam)];
  const auto& layout = context_.layout;
  ports_.adam.submit_addition(ticket(ref),
                              {context_.store.address(Tier::dram, operands[0].extent),
                               layout.dtype(operands[0].content),
                               context_.store.address(Tier::dram, operands[1].extent),
                               layout.dtype(operands[1].content), !reads(operands[1].access),
                               operation(ref).elements.count});
}

void Executor::start_measure(OpRef ref) {
  const auto& measured = operation(ref);
  const auto operands = pass(ref.pass).plan->operands_of(ref.op);
  auto& op = state(ref);
  op.hashes = std::make_unique<OpHashes>();
  GradientJob job;
  job.whole = {context_.store.address(Tier::dram, operands[0].extent),
               context_.layout.dtype(operands[0].content), measured.elements.count};
  job.counted = real_elements(measured);
  job.leaves = reinterpret_cast<double*>(context_.store.address(Tier::dram, operands[1].extent));
  job.first_not_finite = &op.hashes->not_finite;
  op.stage = Stage::issued;
  op.parts = 1;
  ++owed_;
  ++in_flight_[index_of(Lane::adam)];
  ports_.adam.submit_gradients(ticket(ref), std::move(job));
}

void Executor::note_bad_gradient(OpRef ref) {
  auto& op = state(ref);
  const auto& measured = operation(ref);
  const auto element = op.hashes->not_finite;
  op.hashes.reset();
  if (element == kAllFinite || ref.pass != passes_.back().number) return;
  const BadGradient bad{measured.layer, measured.elements.first + element};
  if (!bad_gradient_ || bad < *bad_gradient_) bad_gradient_ = bad;
}

void Executor::start_update(OpRef ref) {
  Pass& own = pass(ref.pass);
  const auto& update = own.plan->operations[ref.op];
  if (!update.pending) own.updates_started = true;
  const auto operands = own.plan->operands_of(ref.op);
  const auto pointer = [&](std::size_t operand, Content content) {
    TERRACE_CHECK(operands[operand].content == content);
    return context_.store.address(Tier::dram, operands[operand].extent);
  };
  AdamRun run;
  run.whole.gradient = pointer(0, kept_gradient(own.plan->schedule.accumulates));
  run.whole.gradient_dtype = context_.layout.dtype(operands[0].content);
  run.whole.master_weight = reinterpret_cast<float*>(pointer(1, Content::master_weight));
  run.whole.momentum = reinterpret_cast<float*>(pointer(2, Content::momentum));
  run.whole.variance = reinterpret_cast<float*>(pointer(3, Content::variance));
  run.whole.parameter = pointer(4, Content::parameter);
  run.whole.parameter_dtype = context_.layout.model().parameter_dtype;
  run.whole.elements = update.elements.count;
  run.tile = tile_elements(context_.layout);
  run.updated = real_elements(update);
  auto& op = own.ops[ref.op];
  if (ports_.nvme.checksums()) ask_for_hashes(op, operands, run);
  op.stage = Stage::issued;
  op.parts = 1;
  ++owed_;
  ++in_flight_[index_of(Lane::adam)];
  ports_.adam.submit(ticket(ref), own.options.scalars, std::move(run));
}

// Operands 1 to 3 are the states, 4 the parameter.
void Executor::ask_for_hashes(OpState& op, std::span<const Operand> operands, AdamRun& run) {
  op.hashes = std::make_unique<OpHashes>();
  run.hash = hash_bytes;
  for (std::size_t i = 0; i <= kOptimizerStateCount; ++i) {
    const auto& operand = operands[i + 1];
    if (operand.stored.size.count == 0) continue;
    op.hashes->after[i].resize(tiles_of(run));
    run.after[i] = op.hashes->after[i].data();
    if (!operand.check) continue;
    op.hashes->before[i].resize(tiles_of(run));
    run.before[i] = op.hashes->before[i].data();
  }
}

// What an update found must be what was written; what it made is what will be.
void Executor::check_and_stage(OpRef ref) {
  Pass& own = pass(ref.pass);
  auto& op = own.ops[ref.op];
  const auto operands = own.plan->operands_of(ref.op);
  for (std::size_t i = 0; i <= kOptimizerStateCount; ++i) {
    const auto& operand = operands[i + 1];
    if (operand.stored.size.count == 0) continue;
    if (operand.check) {
      const auto wrong = ports_.nvme.mismatch(operand.stored, op.hashes->before[i]);
      if (!wrong.empty()) return fail({ErrorCode::corrupt, wrong});
    }
    ports_.nvme.stage(operand.stored, own.options.step, op.hashes->after[i]);
  }
  op.hashes.reset();
}

}  // namespace terrace
