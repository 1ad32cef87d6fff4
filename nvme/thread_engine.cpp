// pread and pwrite on worker threads, some for each drive. The owner keeps all accounts; a worker
// only makes the system call that it is handed and brings back the result.
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
      : notes_(std::move(notes)),
        table_(options.queue_depth, options.block, options.drives),
        files_(table_.drives()),
        crews_(table_.drives()) {
    // A worker holds one transfer at a time: more workers than transfers would only sleep.
    hire(std::clamp(options.threads, 1U, table_.depth()));
  }

  ~ThreadEngine() override {
    std::vector<Completion> ignored;
    while (table_.pending() > 0) reap(ignored, kDrainTurn);
    dismiss();
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
  bool exists(const std::string& path) const override { return file_exists(path); }
  void remove(const std::string& path) override { remove_file(path); }
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
      for (const auto& result : taken_) {
        if (settle(table_, files_, result.slot, result.value, now)) start(result.slot);
      }
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

  // The workers of one drive: a drive that is slow keeps none of another's waiting.
  struct Crew {
    std::condition_variable filled;
    std::deque<Job> jobs;  // guarded by mutex_
  };

  // `count` for each drive. Fewer than wanted are enough; a drive without any is not.
  void hire(std::uint32_t count) {
    const auto wanted = count * crews_.size();
    try {
      while (workers_.size() < wanted) {
        auto& crew = crews_[workers_.size() % crews_.size()];
        workers_.emplace_back([this, &crew] { work(crew); });
      }
    } catch (const std::system_error& error) {
      const std::string reason = "only " + std::to_string(workers_.size()) + " of " +
                                 std::to_string(wanted) + " I/O threads could be started (" +
                                 error.what() + "): raise the limit of processes (ulimit -u)";
      notes_.push_back(reason);
      if (workers_.size() >= crews_.size()) return;
      dismiss();
      throw Error(ErrorCode::unavailable, reason);
    }
  }

  void dismiss() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    for (auto& crew : crews_) crew.filled.notify_all();
    for (auto& worker : workers_) worker.join();
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
    const auto& file = files_.at(transfer.file);
    auto& crew = crews_[file.info().drive];
    {
      const std::lock_guard lock(mutex_);
      crew.jobs.push_back({slot, file.descriptor(), transfer});
    }
    crew.filled.notify_one();
  }


  void work(Crew& crew) {
    for (;;) {
      std::unique_lock lock(mutex_);
      crew.filled.wait(lock, [&] { return stop_ || !crew.jobs.empty(); });
      if (crew.jobs.empty()) return;
      const Job job = crew.jobs.front();
      crew.jobs.pop_front();
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
  std::condition_variable returned_;
  std::vector<Result> results_;  // guarded by mutex_
  bool woken_ = false;           // guarded by mutex_
  bool stop_ = false;            // guarded by mutex_
  std::vector<Crew> crews_;      // by drive
  std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<IoEngine> make_thread_engine(const IoEngineOptions& options,
                                             std::vector<std::string> notes) {
  return std::make_unique<ThreadEngine>(options, std::move(notes));
}

}  // namespace terrace
