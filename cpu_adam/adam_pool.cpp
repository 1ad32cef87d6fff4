// Jobs in the order in which they come, each cut over all workers.
#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>
#include <oneapi/tbb/task_scheduler_observer.h>
#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "cpu_adam/adam_jobs.h"
#include "cpu_adam/cpu_set.h"
#include "terrace/adam.h"
#include "terrace/error.h"
#include "terrace/pacer.h"

namespace terrace {
namespace {

// Binds whoever works in the arena, for as long as it does: TBB lends its workers to others too.
class Binder final : public tbb::task_scheduler_observer {
 public:
  Binder(tbb::task_arena& arena, CpuSet cpus, CpuSet before)
      : task_scheduler_observer(arena), cpus_(std::move(cpus)), before_(std::move(before)) {
    observe(true);
  }
  // A worker without work leaves soon. Whoever has not yet would stay bound for ever.
  ~Binder() override {
    const auto deadline = steady_clock().now() + kLongestFarewell;
    while (inside_.load() > 0 && steady_clock().now() < deadline) {
      steady_clock().sleep_until(steady_clock().now() + std::chrono::microseconds(20));
    }
    observe(false);
  }
  Binder(const Binder&) = delete;
  Binder& operator=(const Binder&) = delete;

  void on_scheduler_entry(bool) override {
    ++inside_;
    cpus_.bind_this_thread();
  }
  void on_scheduler_exit(bool) override {
    before_.bind_this_thread();
    --inside_;
  }

 private:
  static constexpr std::chrono::seconds kLongestFarewell{1};

  std::atomic<int> inside_{0};
  const CpuSet cpus_;
  const CpuSet before_;
};

class TbbAdamPool final : public AdamPool {
 public:
  TbbAdamPool(const AdamPoolOptions& options, const CpuSet& allowed, const CpuSet& cpus)
      : threads_(options.threads > 0 ? options.threads
                                     : std::max(1, cpus.count() / options.ranks_on_node)),
        arena_(threads_),
        pacer_({.gb_s = options.gb_s}) {
    if (!options.cpus.empty()) binder_.emplace(arena_, cpus, allowed);
    driver_ = std::thread([this, bound = !options.cpus.empty(), cpus] {
      if (bound) cpus.bind_this_thread();
      drive();
    });
  }

  ~TbbAdamPool() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    filled_.notify_one();
    driver_.join();
  }

  int threads() const override { return threads_; }

  using AdamPool::submit;
  void submit(Ticket ticket, std::vector<AdamScalars> groups, std::vector<AdamRun> runs) override {
    enqueue(ticket, make_update_job(std::move(groups), std::move(runs)));
  }
  void submit_gradients(Ticket ticket, GradientJob job) override {
    enqueue(ticket, make_gradient_job(std::move(job)));
  }
  void submit_addition(Ticket ticket, const GradientAddition& addition) override {
    enqueue(ticket, make_addition_job(addition));
  }
  void submit_hash(Ticket ticket, const HashJob& job) override {
    enqueue(ticket, make_hash_job(job));
  }

  std::size_t poll(std::vector<Completion>& completions) override {
    const std::lock_guard lock(mutex_);
    const auto count = completed_.size();
    completions.insert(completions.end(), completed_.begin(), completed_.end());
    completed_.clear();
    return count;
  }

  std::vector<Completion> wait() override {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return entries_.empty() && !working_; });
    return std::exchange(completed_, {});
  }

  void set_waker(std::function<void()> waker) override {
    const std::lock_guard lock(waker_mutex_);
    waker_ = std::move(waker);
  }

 private:
  struct Entry {
    Ticket ticket;
    std::unique_ptr<const AdamJob> job;
    Nanoseconds submitted;
  };

  void enqueue(Ticket ticket, std::unique_ptr<const AdamJob> job) {
    {
      const std::lock_guard lock(mutex_);
      entries_.push_back({ticket, std::move(job), steady_clock().now()});
    }
    filled_.notify_one();
  }

  void drive() {
    ::pthread_setname_np(::pthread_self(), "terrace-adam");
    ::prctl(PR_SET_TIMERSLACK, 1UL);  // wake up at the deadline, not the usual 50 us after it
    alone_ = threads_ > 1 && !workers_start();
    for (;;) {
      std::unique_lock lock(mutex_);
      filled_.wait(lock, [&] { return stop_ || !entries_.empty(); });
      if (entries_.empty()) return;
      const Entry entry = std::move(entries_.front());
      entries_.pop_front();
      working_ = true;
      lock.unlock();
      const auto completion = run(entry);
      lock.lock();
      completed_.push_back(completion);
      working_ = false;
      lock.unlock();
      idle_.notify_one();
      const std::lock_guard waker_lock(waker_mutex_);
      if (waker_) waker_();
    }
  }

  // oneTBB starts its workers when they are first needed and throws when the system has no more
  // threads for this process: then this thread does all work.
  bool workers_start() {
    try {
      arena_.execute([&] {
        tbb::parallel_for(tbb::blocked_range<int>(0, 64 * threads_), [](const auto&) {},
                          tbb::simple_partitioner());
      });
    } catch (const std::exception&) {
      return false;
    }
    return true;
  }

  // The pacer counts from the submission, not from when this thread woke up for it: being late is
  // made up by the next job.
  Completion run(const Entry& entry) {
    const AdamJob& job = *entry.job;
    const auto start = steady_clock().now();
    const auto tiles = job.tiles();
    if (threads_ == 1 || tiles <= 1 || alone_) {
      for (std::uint64_t tile = 0; tile < tiles; ++tile) job.work(tile);
    } else {
      work_in_parallel(job, tiles);
    }
    job.finish();
    if (pacer_.active() && job.paced()) {
      steady_clock().sleep_until(pacer_.reserve(entry.submitted, job.bytes()).end);
    }
    return {entry.ticket, 0, job.bytes(), start, steady_clock().now()};
  }

  // Elements do not depend on one another, so the cut never shows in the result.
  void work_in_parallel(const AdamJob& job, std::uint64_t tiles) {
    shared_job_ = &job;
    open_tiles_.store(tiles, std::memory_order_release);
    arena_.execute([&] {
      tbb::parallel_for(
          tbb::blocked_range<std::uint64_t>(0, tiles),
          [this](const auto& some) {
            for (auto tile = some.begin(); tile != some.end(); ++tile) take(tile);
          },
          tbb::simple_partitioner());
    });
    TERRACE_CHECK(open_tiles_.load(std::memory_order_acquire) == 0);
  }

  void take(std::uint64_t tile) {
    TERRACE_CHECK(open_tiles_.load(std::memory_order_acquire) > 0);
    shared_job_->work(tile);
    open_tiles_.fetch_sub(1, std::memory_order_release);
  }

  const int threads_;
  tbb::task_arena arena_;
  std::optional<Binder> binder_;         // empty: workers are not bound
  Pacer pacer_;                          // the driver's
  bool alone_ = false;                   // the driver's: there are no workers
  const AdamJob* shared_job_ = nullptr;  // the driver's; workers read it once they saw open_tiles_
  // Proves that every tile was worked on, and hands the memory to the workers and back in a way
  // that ThreadSanitizer understands: it cannot look into TBB.
  std::atomic<std::uint64_t> open_tiles_{0};
  std::mutex mutex_;
  std::condition_variable filled_;     // for the driver
  std::condition_variable idle_;       // for wait()
  std::deque<Entry> entries_;          // guarded by mutex_
  std::vector<Completion> completed_;  // guarded by mutex_
  bool working_ = false;               // guarded by mutex_
  bool stop_ = false;                  // guarded by mutex_
  std::mutex waker_mutex_;             // held while the waker runs
  std::function<void()> waker_;        // guarded by waker_mutex_
  std::thread driver_;                 // last: uses everything above
};

}  // namespace

std::unique_ptr<AdamPool> make_adam_pool(const AdamPoolOptions& options) {
  const auto refuse = [](const std::string& what) {
    return Error(ErrorCode::invalid_argument, "the Adam pool cannot have " + what);
  };
  if (options.threads < 0) {
    throw refuse(std::to_string(options.threads) + " threads; 0 means one per core");
  }
  if (!std::isfinite(options.gb_s) || options.gb_s < 0) {
    throw refuse("a speed of " + std::to_string(options.gb_s) + " GB/s; 0 means unbounded");
  }
  if (options.ranks_on_node < 1) {
    throw refuse(std::to_string(options.ranks_on_node) + " ranks on its node; this one is there");
  }
  const auto allowed = CpuSet::of_this_thread();
  const auto cpus = options.cpus.empty() ? allowed : CpuSet(options.cpus, allowed);
  return std::make_unique<TbbAdamPool>(options, allowed, cpus);
}

}  // namespace terrace
