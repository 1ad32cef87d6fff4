// pread and pwrite on worker threads. The owner keeps all accounts; a worker only makes the system
// call that it is handed and brings back the result.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "nvme/deadline.h"
#include "nvme/engines.h"
#include "nvme/file_table.h"
#include "nvme/transfers.h"

namespace terrace {
namespace {

constexpr Nanoseconds kDrainTurn = std::chrono::milliseconds(100);  // of the destructor's wait

class ThreadEngine final : public IoEngine {
 public:
  ThreadEngine(const IoEngineOptions& options, std::vector<std::string> notes)
      : notes_(std::move(notes)), table_(options.queue_depth, options.block) {
    // A worker holds one transfer at a time: more workers than transfers would only sleep.
    hire(std::clamp(options.threads, 1U, table_.depth()));
  }

  ~ThreadEngine() override {
    std::vector<Completion> ignored;
    while (table_.pending() > 0) reap(ignored, kDrainTurn);
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    filled_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  IoEngineInfo info() const override {
    return {"threads", false, false, files_.add_notes(notes_)};
  }
  FileId open(const IoFileOptions& options) override { return files_.open(options); }
  void close(FileId file) override {
    TERRACE_CHECK(!table_.uses(file));
    files_.close(file);
  }
  IoFileInfo file_info(FileId file) const override { return files_.at(file).info(); }
  void register_buffers(std::span<const std::span<std::byte>>) override {}

  bool submit(const IoRequest& request) override {
    return table_.submit(request, files_.at(request.file).info());
  }
  void flush() override { start_transfers(); }
  std::size_t pending() const override { return table_.pending(); }

  std::size_t reap(std::vector<Completion>& completions, Nanoseconds timeout) override {
    const auto deadline = deadline_after(steady_clock().now(), timeout);
    for (;;) {
      // 1. Keep the workers busy.
      start_transfers();
      // 2. Take what they have brought back.
      const bool woken = take_results(table_.has_completed() ? Nanoseconds{0} : deadline);
      // 3. Account for it; slots that it frees are filled again before anyone waits.
      const auto now = steady_clock().now();
      for (const auto& result : taken_) settle(result, now);
      if (table_.has_completed() || woken || now >= deadline) break;
    }
    start_transfers();
    return table_.collect(completions);
  }

  void wake() override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    returned_.notify_one();
  }

 private:
  struct Job {
    int slot = 0;
    int descriptor = -1;
    Transfer transfer;
  };
  struct Result {
    int slot = 0;
    std::int64_t value = 0;  // bytes, or -errno
  };

  // Fewer threads than wanted are enough; none is not.
  void hire(std::uint32_t count) {
    try {
      while (workers_.size() < count) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error& error) {
      const std::string reason = "only " + std::to_string(workers_.size()) + " of " +
                                 std::to_string(count) + " I/O threads could be started (" +
                                 error.what() + "): raise the limit of processes (ulimit -u)";
      if (workers_.empty()) throw Error(ErrorCode::unavailable, reason);
      notes_.push_back(reason);
    }
  }

  // Waits until there is a result, wake() or `deadline`; true for wake().
  bool take_results(Nanoseconds deadline) {
    taken_.clear();
    std::unique_lock lock(mutex_);
    returned_.wait_until(lock, std::chrono::steady_clock::time_point(deadline),
                         [&] { return !results_.empty() || woken_; });
    results_.swap(taken_);
    return std::exchange(woken_, false);
  }

  void start_transfers() {
    const auto now = steady_clock().now();
    for (int slot = table_.next(now); slot >= 0; slot = table_.next(now)) start(slot);
  }

  void start(int slot) {
    const auto& transfer = table_.at(slot);
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back({slot, files_.at(transfer.file).descriptor(), transfer});
    }
    filled_.notify_one();
  }

  void settle(const Result& result, Nanoseconds now) {
    if (table_.advance(result.slot, result.value, now)) start(result.slot);
  }

  void work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      filled_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      const Job job = jobs_.front();
      jobs_.pop_front();
      lock.unlock();
      const Result result{job.slot, call(job)};
      lock.lock();
      results_.push_back(result);
      lock.unlock();
      returned_.notify_one();
    }
  }

  static std::int64_t call(const Job& job) {
    const auto& transfer = job.transfer;
    const auto offset = static_cast<off_t>(transfer.offset);
    std::int64_t result = 0;
    switch (transfer.operation) {
      case IoOperation::read:
        result = ::pread(job.descriptor, transfer.data, transfer.bytes, offset);
        break;
      case IoOperation::write:
        result = ::pwrite(job.descriptor, transfer.data, transfer.bytes, offset);
        break;
      case IoOperation::flush: result = ::fdatasync(job.descriptor); break;
    }
    return result < 0 ? -errno : result;
  }

  std::vector<std::string> notes_;
  TransferTable table_;
  FileTable files_;
  std::vector<Result> taken_;  // by the owner, out of results_
  std::mutex mutex_;
  std::condition_variable filled_;
  std::condition_variable returned_;
  std::deque<Job> jobs_;         // guarded by mutex_
  std::vector<Result> results_;  // guarded by mutex_
  bool woken_ = false;           // guarded by mutex_
  bool stop_ = false;            // guarded by mutex_
  std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<IoEngine> make_thread_engine(const IoEngineOptions& options,
                                             std::vector<std::string> notes) {
  return std::make_unique<ThreadEngine>(options, std::move(notes));
}

}  // namespace terrace
