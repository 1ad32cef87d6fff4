#include "runtime/executor_thread.h"

#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "terrace/error.h"

namespace terrace {
namespace {

// The executor is woken for everything that happens; this only bounds a sleep.
constexpr Nanoseconds kLongestSleep = std::chrono::milliseconds(500);

}  // namespace

ExecutorThread::ExecutorThread(const MakeIo& make_io, const Open& open,
                               const ExecutorContext& context, Device& device, AdamPool& adam,
                               TraceSink* trace)
    : context_(context), device_(device), adam_(adam), trace_(trace) {
  thread_ = std::thread([this, make_io, open] { loop(make_io, open); });
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return started_; });
  if (error_) {
    const auto error = std::exchange(error_, nullptr);
    lock.unlock();
    thread_.join();
    std::rethrow_exception(error);
  }
}

ExecutorThread::~ExecutorThread() { stop(); }

bool ExecutorThread::stop() {
  if (!thread_.joinable()) return settled_;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    io_->wake();
  }
  thread_.join();
  return settled_;
}

void ExecutorThread::loop(const MakeIo& make_io, const Open& open) {
  const auto start = [&](IoEngine* io, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    io_ = io;
    error_ = std::move(error);
    started_ = true;
    changed_.notify_all();
  };
  std::unique_ptr<IoEngine> io;
  std::unique_ptr<SegmentStore> nvme;
  std::unique_ptr<Executor> executor;
  try {
    io = make_io();
    nvme = open(*io);
    executor = std::make_unique<Executor>(context_, ExecutorPorts{device_, *nvme, adam_, trace_});
  } catch (...) {
    executor.reset();
    nvme.reset();
    // As below: what opening the store has asked for may never end.
    if (io && io->pending() > 0) [[maybe_unused]] const auto* engine_left = io.release();
    io.reset();
    start(nullptr, std::current_exception());
    return;
  }
  nvme_ = nvme.get();
  device_.set_waker([engine = io.get()] { engine->wake(); });
  adam_.set_waker([engine = io.get()] { engine->wake(); });
  start(io.get(), nullptr);
  serve(*executor);
  // Nobody may wake an engine that is gone.
  device_.set_waker({});
  adam_.set_waker({});
  if (settled_) return;
  // The kernel may still write to what a stuck operation was given: it is never freed.
  [[maybe_unused]] const auto* store_left = nvme.release();
  [[maybe_unused]] const auto* engine_left = io.release();
}

void ExecutorThread::publish(const Executor& executor) {
  io_info_ = io_->info();
  drives_ = nvme_->stats();
  notes_ = nvme_->notes();
  failure_ = executor.failure();
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  effort_ = {executor.operations(), static_cast<double>(usage.ru_utime.tv_sec) +
                                        1e-6 * static_cast<double>(usage.ru_utime.tv_usec)};
}

void ExecutorThread::serve(Executor& executor) {
  for (;;) {
    try {
      executor.turn(kLongestSleep);
    } catch (const Error& error) {
      executor.fail(error);
    }
    std::unique_lock lock(mutex_);
    stats_ = executor.stats();
    failure_ = executor.failure();
    if (requested_ && (failure_ || ready_(executor))) {
      if (!failure_) {
        try {
          action_(executor);
        } catch (...) {
          error_ = std::current_exception();
        }
      }
      publish(executor);
      requested_ = false;
      changed_.notify_all();
      io_->wake();  // what the action queued is started in the next round, without a sleep
    }
    if (stop_ && (executor.idle() || failure_)) break;
  }
  try {
    settled_ = executor.settle();
  } catch (const std::exception& error) {
    // The kernel still owns memory that is about to go: there is no way on.
    std::fprintf(stderr, "terrace: waiting for the last operations failed: %s\n", error.what());
    std::abort();
  }
}

void ExecutorThread::perform(const Predicate& ready,
                             const std::function<void(Executor&)>& action) {
  std::unique_lock lock(mutex_);
  ready_ = ready;
  action_ = action;
  requested_ = true;
  io_->wake();
  changed_.wait(lock, [&] { return !requested_; });
  if (failure_) throw *failure_;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ExecutorThread::begin(const PassOptions& options) {
  perform([](Executor& executor) { return executor.can_begin(); },
          [&](Executor& executor) { executor.begin(options); });
}

void ExecutorThread::finish_pass(std::string trainer) {
  perform([](Executor&) { return true; },
          [&](Executor& executor) { executor.finish_pass(std::move(trainer)); });
}

void ExecutorThread::lease() {
  perform([](Executor&) { return true; }, [](Executor& executor) { executor.request_lease(); });
  perform([](Executor& executor) { return executor.lease_granted(); }, [](Executor&) {});
}

void ExecutorThread::release() {
  perform([](Executor&) { return true; }, [](Executor& executor) { executor.release_lease(); });
}

bool ExecutorThread::cancel() {
  bool undone = true;
  perform([](Executor&) { return true; },
          [&](Executor& executor) {
            if (executor.lease_granted()) executor.release_lease();
            undone = executor.cancel();
          });
  return undone;
}

void ExecutorThread::undo(const std::function<void(SegmentStore&)>& task) {
  perform([](Executor& executor) { return executor.idle(); },
          [&](Executor& executor) {
            try {
              task(*nvme_);
            } catch (const Error& error) {
              executor.fail(error);
            }
          });
}

void ExecutorThread::fail(const Error& error) {
  perform([](Executor&) { return true; }, [&](Executor& executor) { executor.fail(error); });
}

void ExecutorThread::wait_for_updates() {
  perform([](Executor& executor) { return executor.updates_done(); }, [](Executor&) {});
}

std::optional<BadGradient> ExecutorThread::bad_gradient() {
  std::optional<BadGradient> bad;
  perform([](Executor&) { return true; },
          [&](Executor& executor) { bad = executor.bad_gradient(); });
  return bad;
}

void ExecutorThread::wait_until_idle() {
  perform([](Executor& executor) { return executor.idle(); }, [](Executor&) {});
}

void ExecutorThread::run_idle(const std::function<void(SegmentStore&)>& task) {
  perform([](Executor& executor) { return executor.idle(); }, [&](Executor&) { task(*nvme_); });
}

IoEngineInfo ExecutorThread::io_info() {
  const std::lock_guard lock(mutex_);
  return io_info_;
}

ExecutorThread::Effort ExecutorThread::effort() {
  const std::lock_guard lock(mutex_);
  return effort_;
}

std::vector<DriveStats> ExecutorThread::drive_stats() {
  const std::lock_guard lock(mutex_);
  return drives_;
}

std::vector<std::string> ExecutorThread::store_notes() {
  const std::lock_guard lock(mutex_);
  return notes_;
}

PerLane<LaneStats> ExecutorThread::stats() {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void ExecutorThread::check() {
  const std::lock_guard lock(mutex_);
  if (failure_) throw *failure_;
}

}  // namespace terrace
