// Jobs in the order in which they come, each cut over all workers.
#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "cpu_adam/adam_run.h"
#include "terrace/adam.h"
#include "terrace/error.h"
#include "terrace/pacer.h"

namespace terrace {
namespace {

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));  // beyond 1024 cores
}

class TbbAdamPool final : public AdamPool {
 public:
  explicit TbbAdamPool(const AdamPoolOptions& options)
      : threads_(options.threads > 0 ? options.threads : usable_cores()),
        arena_(threads_),
        pacer_({.gb_s = options.gb_s}) {
    driver_ = std::thread([this] { drive(); });
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

  void submit(Ticket ticket, const AdamScalars& scalars, AdamRun run) override {
    check(run);
    enqueue({ticket, scalars, std::move(run), {}, steady_clock().now()});
  }

  void submit_hash(Ticket ticket, const HashJob& job) override {
    check(job);
    enqueue({ticket, {}, {}, job, steady_clock().now()});
  }

  std::size_t poll(std::vector<Completion>& completions) override {
    const std::lock_guard lock(mutex_);
    const auto count = completed_.size();
    completions.insert(completions.end(), completed_.begin(), completed_.end());
    completed_.clear();
    return count;
  }

  void set_waker(std::function<void()> waker) override {
    const std::lock_guard lock(waker_mutex_);
    waker_ = std::move(waker);
  }

 private:
  // A run, or a hash job where hashing.hash is set.
  struct Job {
    Ticket ticket;
    AdamScalars scalars;
    AdamRun run;
    HashJob hashing;
    Nanoseconds submitted;

    bool hashes() const { return hashing.hash != nullptr; }
    std::uint64_t tiles() const { return hashes() ? tiles_of(hashing) : tiles_of(run); }
    std::uint64_t bytes() const { return hashes() ? hashing.size.count : updated_bytes(run); }
    void work(std::uint64_t tile) const {
      if (hashes()) return hash_tile(hashing, tile);
      update_tile(scalars, run, tile);
    }
  };

  void enqueue(Job job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    filled_.notify_one();
  }

  void drive() {
    ::pthread_setname_np(::pthread_self(), "terrace-adam");
    ::prctl(PR_SET_TIMERSLACK, 1UL);  // wake up at the deadline, not the usual 50 us after it
    for (;;) {
      std::unique_lock lock(mutex_);
      filled_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      const Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      const auto completion = run(job);
      lock.lock();
      completed_.push_back(completion);
      lock.unlock();
      const std::lock_guard waker_lock(waker_mutex_);
      if (waker_) waker_();
    }
  }

  // The pacer counts from the submission, not from when this thread woke up for it: being late is
  // made up by the next run.
  Completion run(const Job& job) {
    const auto start = steady_clock().now();
    const auto tiles = job.tiles();
    if (threads_ == 1 || tiles <= 1) {
      for (std::uint64_t tile = 0; tile < tiles; ++tile) job.work(tile);
    } else {
      work_in_parallel(job, tiles);
    }
    if (pacer_.active() && !job.hashes()) {
      steady_clock().sleep_until(pacer_.reserve(job.submitted, job.bytes()).end);
    }
    return {job.ticket, 0, job.bytes(), start, steady_clock().now()};
  }

  // Elements do not depend on one another, so the cut never shows in the result.
  void work_in_parallel(const Job& job, std::uint64_t tiles) {
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
  Pacer pacer_;                        // the driver's
  const Job* shared_job_ = nullptr;    // the driver's; workers read it once they saw open_tiles_
  // Proves that every tile was worked on, and hands the memory to the workers and back in a way
  // that ThreadSanitizer understands: it cannot look into TBB.
  std::atomic<std::uint64_t> open_tiles_{0};
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<Job> jobs_;               // guarded by mutex_
  std::vector<Completion> completed_;  // guarded by mutex_
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
    throw refuse(std::to_string(options.threads) + " threads; 0 means one per usable core");
  }
  if (!std::isfinite(options.gb_s) || options.gb_s < 0) {
    throw refuse("a speed of " + std::to_string(options.gb_s) + " GB/s; 0 means unbounded");
  }
  return std::make_unique<TbbAdamPool>(options);
}

}  // namespace terrace
