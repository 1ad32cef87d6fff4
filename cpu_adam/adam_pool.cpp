// Slices in the order in which they come, each cut over all workers.
#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>
#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "terrace/adam.h"
#include "terrace/pacer.h"

namespace terrace {
namespace {

constexpr std::uint64_t kTile = 1 << 15;  // elements that one worker takes at a time

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
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
        pacer_({options.gb_s, 0}) {
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
      jobs_.push_back({ticket, scalars, slice});
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
  };

  void drive() {
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

  Completion run(const Job& job) {
    const std::uint64_t bytes =
        job.slice.elements *
        adam_bytes_per_element(job.slice.gradient_dtype, job.slice.parameter_dtype);
    const auto start = steady_clock().now();
    const auto slot = pacer_.reserve(start, bytes);
    if (threads_ == 1 || job.slice.elements <= kTile) {
      adam_update(job.scalars, job.slice);
    } else {
      update_in_parallel(job);
    }
    if (pacer_.active()) steady_clock().sleep_until(slot.end);
    return {job.ticket, 0, bytes, start, steady_clock().now()};
  }

  // Elements do not depend on one another, so the cut never shows in the result.
  void update_in_parallel(const Job& job) {
    const tbb::blocked_range<std::uint64_t> elements(0, job.slice.elements, kTile);
    arena_.execute([&] {
      tbb::parallel_for(
          elements,
          [&](const tbb::blocked_range<std::uint64_t>& range) {
            adam_update(job.scalars, part(job.slice, range.begin(), range.end()));
          },
          tbb::simple_partitioner());
    });
  }

  const int threads_;
  tbb::task_arena arena_;
  Pacer pacer_;  // the driver's
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
  return std::make_unique<TbbAdamPool>(options);
}

}  // namespace terrace
