// Runs plans: starts each lane's next operation when what it waits for is there, and learns from
// the ports' completions.
//
// The executor owns no thread. Whoever drives it calls turn() in a loop (ExecutorThread, or a
// test); the numbered phases of turn() are the only places where its state changes.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nvme/segment_store.h"
#include "runtime/links.h"
#include "runtime/planner.h"
#include "terrace/adam.h"
#include "terrace/device.h"
#include "terrace/engine.h"
#include "terrace/error.h"
#include "terrace/io_engine.h"
#include "terrace/trace.h"
#include "tiers/tensor_store.h"

namespace terrace {

// A plan with the links that running it needs. Built once, shared by all steps.
struct RunnablePlans {
  explicit RunnablePlans(EnginePlan plan);

  EnginePlan engine;
  const Links& dependents(PassKind kind) const { return dependents_[index_of(kind)]; }
  // Across a boundary, by operation of `next` and by operation of `previous`.
  const Links& waits_across(PassKind previous, PassKind next) const {
    return waits_across_[index_of(previous)][index_of(next)];
  }
  const Links& dependents_across(PassKind previous, PassKind next) const {
    return dependents_across_[index_of(previous)][index_of(next)];
  }

 private:
  static std::size_t index_of(PassKind kind) { return static_cast<std::size_t>(kind); }

  Links dependents_[kPassKindCount];
  Links waits_across_[kPassKindCount][kPassKindCount];
  Links dependents_across_[kPassKindCount][kPassKindCount];
};

struct ExecutorPorts {
  Device& device;
  SegmentStore& nvme;
  AdamPool& adam;
  TraceSink* trace = nullptr;  // may be null
};

// What the executor acts on besides the plan.
struct ExecutorContext {
  const RunnablePlans& plans;
  const ModelLayout& layout;
  const TensorStore& store;
};

// One pass over the layers.
struct PassOptions {
  PassKind kind = PassKind::training;
  // Of the updates that it makes, which are the previous step's where they are deferred.
  AdamScalars scalars;
  std::uint64_t step = 0;  // that they make: from 1; the generation of what is written
  std::optional<std::string> trainer{};  // kept by the commit, which waits for it
};

// The first in the order of layers and elements.
struct BadGradient {
  LayerId layer;
  std::uint64_t element = 0;  // of the block
  friend auto operator<=>(const BadGradient&, const BadGradient&) = default;
};

// Thread rule: one thread makes all calls (the I/O engine's owner).
class Executor {
 public:
  Executor(const ExecutorContext& context, const ExecutorPorts& ports);
  ~Executor();  // nothing may be in flight: call settle() first

  // Two passes may be alive at a time: the tail of one overlaps the head of the next. After a
  // cancelled one the next waits until all of it has ended: what it left out can order nothing.
  bool can_begin() const {
    return passes_.size() < kMaxPasses && !failure_ &&
           (passes_.empty() || !passes_.back().cancelled);
  }
  // Queues a pass and returns its number.
  std::uint64_t begin(const PassOptions& options);
  // The trainer is done with the newest pass; a commit keeps `trainer` with the state.
  void finish_pass(std::string trainer);
  // What the newest pass measured so far.
  const std::optional<BadGradient>& bad_gradient() const { return bad_gradient_; }

  // The trainer wants the layer of the pass's next use.
  void request_lease();
  bool lease_granted() const { return leased_; }
  // The trainer has enqueued its work.
  void release_lease();

  // Drops every operation of the newest pass that has not started, pending ones apart. False when
  // an update of its own has started: then some layers are updated and some are not.
  bool cancel();

  // All layer functions and updates of the newest pass have ended.
  bool updates_done() const;
  bool idle() const { return passes_.empty(); }

  // The phases of one round: collect completions (waiting up to `timeout` for one), act on them,
  // start what is ready, hand it to the kernel.
  void turn(Nanoseconds timeout);
  // After a failure: waits for what the ports still owe. False when something never comes back,
  // be it a blocking call's: its memory must not be freed.
  bool settle();

  // The first error; sticky.
  const std::optional<Error>& failure() const { return failure_; }
  void fail(const Error& error);

  const PerLane<LaneStats>& stats() const { return stats_; }
  std::uint64_t operations() const { return operations_; }  // that have ended

 private:
  static constexpr std::size_t kMaxPasses = 2;

  // Hashes of the tiles that an operation moves or updates.
  struct OpHashes {
    std::uint64_t not_finite = 0;          // measurements: an element of the run
    std::vector<std::uint64_t> tiles;      // reads and writes
    std::array<std::vector<std::uint64_t>, kOptimizerStateCount> before;     // updates
    std::array<std::vector<std::uint64_t>, kOptimizerStateCount + 1> after;  // parameter last
  };

  enum class Stage : std::uint8_t {
    waiting,  // in its lane's queue
    leased,   // layer uses: the trainer is enqueueing work
    issued,   // a port owns it
    done,
  };

  struct OpState {
    Stage stage = Stage::waiting;
    bool has_event = false;     // device operations, while issued
    EventId event;
    std::uint32_t waits = 0;    // unmet dependencies
    std::uint32_t parts = 0;    // completions that are still owed
    Nanoseconds start{0};
    std::unique_ptr<OpHashes> hashes;  // while they are made
  };

  struct Pass {
    std::uint64_t number = 0;
    PassOptions options;
    const StepPlan* plan = nullptr;
    std::vector<OpState> ops;
    std::size_t open = 0;          // operations that are not done
    std::size_t open_results = 0;  // of them, layer uses and updates
    bool updates_started = false;
    bool cancelled = false;
  };

  struct OpRef {
    std::uint64_t pass = 0;
    OpIndex op = 0;
  };

  Pass& pass(std::uint64_t number);
  Pass* find_pass(std::uint64_t number);
  const Operation& operation(OpRef ref) { return pass(ref.pass).plan->operations[ref.op]; }
  OpState& state(OpRef ref) { return pass(ref.pass).ops[ref.op]; }

  void count_waits(Pass& next);
  void satisfy_dependents(OpRef ref, bool issued);
  void drop_unstarted(Pass& last);
  void resume_pending();

  void collect(Nanoseconds timeout);
  void start_ready();
  bool start_lane(Lane lane);
  bool start(OpRef ref);
  void start_io(OpRef ref, IoOperation operation);
  void submit_io(OpRef ref, IoOperation operation);
  void start_hash(OpRef ref);
  void hash_done(OpRef ref);
  void start_commit(OpRef ref);
  void start_copy(OpRef ref);
  void start_update(OpRef ref);
  void start_accumulate(OpRef ref);
  void start_measure(OpRef ref);
  std::vector<AdamRange> real_elements(const Operation& operation) const;
  void note_bad_gradient(OpRef ref);
  static void ask_for_hashes(OpState& op, std::span<const Operand> operands, AdamRun& run);
  void start_use(OpRef ref);
  void wait_for_device_dependencies(OpRef ref, StreamId stream);
  void mark_issued(OpRef ref, StreamId stream);

  void complete(const Completion& completion);
  void complete(const StoreResult& result);
  void check_and_stage(OpRef ref);
  void finish(OpRef ref);
  void account(OpRef ref, Nanoseconds start, Nanoseconds end, Bytes bytes);
  std::string describe(OpRef ref);
  void fail_operation(OpRef ref, const Completion& completion);
  void retire_passes();

  static constexpr std::uint64_t kBeginMark = 1ULL << 63;  // of a layer use's start
  static constexpr std::uint64_t kHashMark = 1ULL << 62;   // of a read's or write's hashing
  static Ticket ticket(OpRef ref) { return {(ref.pass << 32) | ref.op}; }

  const ExecutorContext context_;
  const ExecutorPorts ports_;
  std::deque<Pass> passes_;  // oldest first
  std::uint64_t next_number_ = 1;
  std::array<std::deque<OpRef>, kLaneCount> queues_;
  std::array<std::size_t, kLaneCount> in_flight_{};
  std::size_t owed_ = 0;  // completions
  std::optional<BadGradient> bad_gradient_;
  bool quieting_ = false;  // after a cancelled pass: nothing starts until all that has is done
  bool lease_wanted_ = false;
  bool leased_ = false;
  OpRef lease_;
  std::vector<Completion> completions_;
  std::vector<StoreResult> results_;
  std::array<Nanoseconds, kLaneCount> busy_until_{};
  PerLane<LaneStats> stats_{};
  std::uint64_t operations_ = 0;
  std::optional<Error> failure_;
};

}  // namespace terrace
