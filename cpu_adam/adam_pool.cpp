// Slices in the order in which they come, each cut over all workers.
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

#include "terrace/adam.h"
#include "terrace/error.h"
#include "terrace/pacer.h"

namespace terrace {
namespace {

// What one worker takes at a time: about a MiB of traffic, so that handing it over costs little and
// the last worker to finish is soon done.
constexpr std::uint64_t kTileElements = 1 << 15;

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));  // beyond 1024 cores
}

AdamSlice part(const AdamSlice& slice, std::uint64_t first, std::uint64_t end) {
  AdamSlice result = slice;
  result.gradient = static_cast<const std::byte*>(slice.gradient) +
                    first * size_of(slice.gradient_dtype).count;
  result.master_weight += first;
  result.momentum += first;
  result.variance += first;
  if (slice.parameter != nullptr) {
    result.parameter = static_cast<std::byte*>(slice.parameter) +
                       first * size_of(slice.parameter_dtype).count;
  }
  result.elements = end - first;
  return result;
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

  void submit(Ticket ticket, const AdamScalars& scalars, const AdamSlice& slice) override {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back({ticket, scalars, slice, steady_clock().now()});
    }
    filled_.notify_one();
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
  struct Job {
    Ticket ticket;
    AdamScalars scalars;
    AdamSlice slice;
    Nanoseconds submitted;
  };

  void drive() {
    ::pthread_setname_np(::pthread_self(), "terrace-adam");
    ::prctl(PR_SET_TIMERSLACK, 1UL);  // wake up at the deadline, not the usual 50 us after it
    for (;;) {
      std::unique_lock lock(mutex_);
      filled_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      const Job job = jobs_.front();
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
  // made up by the next slice.
  Completion run(const Job& job) {
    const std::uint64_t bytes =
        job.slice.elements *
        adam_bytes_per_element(job.slice.gradient_dtype, job.slice.parameter_dtype);
    const auto start = steady_clock().now();
    if (threads_ == 1 || job.slice.elements <= kTileElements) {
      adam_update(job.scalars, job.slice);
    } else {
      update_in_parallel(job);
    }
    if (pacer_.active()) {
      steady_clock().sleep_until(pacer_.reserve(job.submitted, bytes).end);
    }
    return {job.ticket, 0, bytes, start, steady_clock().now()};
  }

  // Elements do not depend on one another, so the cut never shows in the result.
  void update_in_parallel(const Job& job) {
    const auto tiles = (job.slice.elements + kTileElements - 1) / kTileElements;
    shared_job_ = &job;
    open_tiles_.store(tiles, std::memory_order_release);
    arena_.execute([&] {
      tbb::parallel_for(
          tbb::blocked_range<std::uint64_t>(0, tiles),
          [this](const auto& some) {
            for (auto tile = some.begin(); tile != some.end(); ++tile) update_tile(tile);
          },
          tbb::simple_partitioner());
    });
    TERRACE_CHECK(open_tiles_.load(std::memory_order_acquire) == 0);
  }

  void update_tile(std::uint64_t tile) {
    TERRACE_CHECK(open_tiles_.load(std::memory_order_acquire) > 0);
    const Job& job = *shared_job_;
    const std::uint64_t first = tile * kTileElements;
    const std::uint64_t end = std::min(first + kTileElements, job.slice.elements);
    adam_update(job.scalars, part(job.slice, first, end));
    open_tiles_.fetch_sub(1, std::memory_order_release);
  }

  const int threads_;
  tbb::task_arena arena_;
  Pacer pacer_;                        // the driver's
  const Job* shared_job_ = nullptr;    // the driver's; workers read it once they saw open_tiles_
  // Proves that every tile was updated, and hands the memory to the workers and back in a way that
  // ThreadSanitizer understands: it cannot look into TBB.
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
