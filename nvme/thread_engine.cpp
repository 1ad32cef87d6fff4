// pread and pwrite on worker threads. The owner keeps all accounts; a worker only makes the system
// call that it is handed and brings back the result.
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "nvme/engines.h"
#include "nvme/file_table.h"
#include "nvme/transfers.h"

namespace terrace {
namespace {

class ThreadEngine final : public IoEngine {
 public:
  ThreadEngine(const IoEngineOptions& options, std::vector<std::string> notes)
      : notes_(std::move(notes)), table_(options.queue_depth, options.block) {
    const auto count = std::max(1U, options.threads);
    for (std::uint32_t i = 0; i < count; ++i) workers_.emplace_back([this] { work(); });
  }

  ~ThreadEngine() override {
    std::vector<Completion> ignored;
    while (table_.pending() > 0) reap(ignored, std::chrono::milliseconds(100));
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    filled_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  IoEngineInfo info() const override { return {"threads", false, false, notes_}; }
  FileId open(const IoFileOptions& options) override { return files_.open(options); }
  void close(FileId file) override { files_.close(file); }
  IoFileInfo file_info(FileId file) const override { return files_.at(file).info(); }
  void register_buffers(std::span<const std::span<std::byte>>) override {}

  bool submit(const IoRequest& request) override {
    return table_.submit(request, files_.at(request.file).info().alignment);
  }
  void flush() override { start_transfers(); }
  std::size_t pending() const override { return table_.pending(); }

  std::size_t reap(std::vector<Completion>& completions, Nanoseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    for (;;) {
      start_transfers();
      if (table_.has_completed()) break;
      std::unique_lock lock(mutex_);
      const auto something = [&] { return !results_.empty() || woken_; };
      const bool happened = returned_.wait_until(lock, deadline, something);
      results_.swap(taken_);
      const bool woken = std::exchange(woken_, false);
      lock.unlock();
      const auto now = steady_clock().now();
      for (const auto& result : taken_) settle(result, now);
      taken_.clear();
      if (!happened || woken) break;
    }
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
    const auto alignment = files_.at(table_.at(result.slot).file).info().alignment;
    if (table_.advance(result.slot, result.value, alignment, now)) start(result.slot);
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

  const std::vector<std::string> notes_;
  TransferTable table_;
  FileTable files_;
  std::vector<Result> taken_;
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
