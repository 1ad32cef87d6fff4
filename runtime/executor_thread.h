// The thread on which an executor lives, and the calls by which the trainer's thread reaches it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "runtime/executor.h"

namespace terrace {

// Thread rule: one trainer thread makes all calls. Each call that waits ends with Error when the
// executor fails; the message is the executor's first one.
class ExecutorThread {
 public:
  // Makes the I/O engine on the new thread, lets `open` open the store with it, and starts the
  // executor. What either throws is thrown here.
  using MakeIo = std::function<std::unique_ptr<IoEngine>()>;
  using Open = std::function<std::unique_ptr<SegmentStore>(IoEngine&)>;
  ExecutorThread(const MakeIo& make_io, const Open& open, const ExecutorContext& context,
                 Device& device, AdamPool& adam, TraceSink* trace);
  ~ExecutorThread();  // see stop()

  // Waits for what is in flight and ends the thread. False when an operation never comes back: what
  // it may still touch must not be freed. Idempotent.
  bool stop();

  // Queues a pass as soon as at most one other is alive.
  void begin(const PassOptions& options);
  void finish_pass(std::string trainer);
  // Waits until the next layer's bytes are, or will be in stream order, on the device.
  void lease();
  void release();
  // Drops the pass that was begun last; see Executor::cancel().
  bool cancel();
  // After that: runs `task` when all that had started has ended. What it throws is sticky.
  void undo(const std::function<void(SegmentStore&)>& task);
  void fail(const Error& error);  // sticky as well
  void wait_for_updates();
  // Of the pass whose updates were waited for.
  std::optional<BadGradient> bad_gradient();
  void wait_until_idle();

  // Runs `task` on the executor's thread while nothing is in flight, and rethrows what it throws.
  void run_idle(const std::function<void(SegmentStore&)>& task);

  PerLane<LaneStats> stats();
  // Of the executor's thread, as of the last call that waited.
  struct Effort {
    std::uint64_t operations = 0;
    double user_seconds = 0;
  };
  Effort effort();
  // As of the last call that waited.
  IoEngineInfo io_info();
  std::vector<DriveStats> drive_stats();
  std::vector<std::string> store_notes();
  // Throws the first failure, if there was one.
  void check();

 private:
  using Predicate = std::function<bool(Executor&)>;
  // Has the executor's thread act as soon as `ready`, and waits for it.
  void perform(const Predicate& ready, const std::function<void(Executor&)>& action);
  void loop(const MakeIo& make_io, const Open& open);
  void serve(Executor& executor);
  void publish(const Executor& executor);

  const ExecutorContext context_;
  Device& device_;
  AdamPool& adam_;
  TraceSink* trace_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_: the one request that the trainer's thread may have open.
  Predicate ready_;
  std::function<void(Executor&)> action_;
  bool requested_ = false;
  bool started_ = false;
  bool stop_ = false;
  std::exception_ptr error_;      // of start-up or of the action
  std::optional<Error> failure_;
  PerLane<LaneStats> stats_{};
  Effort effort_;
  IoEngineInfo io_info_;
  std::vector<DriveStats> drives_;
  std::vector<std::string> notes_;
  IoEngine* io_ = nullptr;        // for wake() only
  SegmentStore* nvme_ = nullptr;  // the executor's thread only
  bool settled_ = true;           // false: something is stuck for ever

  std::thread thread_;  // last: uses everything above
};

}  // namespace terrace
