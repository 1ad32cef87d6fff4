#include "runtime/executor_thread.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "terrace/error.h"

namespace terrace {
namespace {

// The executor is woken for everything that happens; this only bounds a sleep.
constexpr Nanoseconds kLongestSleep = std::chrono::milliseconds(500);

}  // namespace

ExecutorThread::ExecutorThread(const MakeIo& make_io, const Open& open, Device& device,
                               AdamPool& adam, TraceSink* trace)
    : device_(device), adam_(adam), trace_(trace) {
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

ExecutorThread::~ExecutorThread() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    io_->wake();
  }
  thread_.join();
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
  std::unique_ptr<Executor> executor;
  try {
    io = make_io();
    const ExecutorContext context = open(*io);
    executor = std::make_unique<Executor>(context, ExecutorPorts{device_, *io, adam_, trace_});
  } catch (...) {
    executor.reset();
    io.reset();
    start(nullptr, std::current_exception());
    return;
  }
  device_.set_waker([engine = io.get()] { engine->wake(); });
  adam_.set_waker([engine = io.get()] { engine->wake(); });
  start(io.get(), nullptr);
  serve(*executor);
  // Nobody may wake an engine that is gone.
  device_.set_waker({});
  adam_.set_waker({});
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
        failure_ = executor.failure();
      }
      requested_ = false;
      changed_.notify_all();
      io_->wake();  // what the action queued is started in the next round, without a sleep
    }
    if (stop_ && (executor.idle() || failure_)) break;
  }
  try {
    executor.settle();
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

void ExecutorThread::begin(bool evaluation, const AdamScalars& scalars) {
  perform([](Executor& executor) { return executor.can_begin(); },
          [&](Executor& executor) { executor.begin(evaluation, scalars); });
}

void ExecutorThread::lease() {
  perform([](Executor&) { return true; }, [](Executor& executor) { executor.request_lease(); });
  perform([](Executor& executor) { return executor.lease_granted(); }, [](Executor&) {});
}

void ExecutorThread::release() {
  perform([](Executor&) { return true; }, [](Executor& executor) { executor.release_lease(); });
}

void ExecutorThread::cancel() {
  perform([](Executor&) { return true; },
          [](Executor& executor) {
            if (executor.lease_granted()) executor.release_lease();
            executor.cancel();
          });
}

void ExecutorThread::wait_for_updates() {
  perform([](Executor& executor) { return executor.updates_done(); }, [](Executor&) {});
}

void ExecutorThread::wait_until_idle() {
  perform([](Executor& executor) { return executor.idle(); }, [](Executor&) {});
}

void ExecutorThread::run_idle(const std::function<void(IoEngine&)>& task) {
  perform([](Executor& executor) { return executor.idle(); }, [&](Executor&) { task(*io_); });
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
