// Files in memory. No thread, no system call: what is submitted is done in a later reap().
#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>

#include "nvme/deadline.h"
#include "nvme/engines.h"
#include "nvme/file_table.h"
#include "nvme/simulation.h"
#include "nvme/transfers.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::uint32_t kAlignment = 4096;

class MemoryEngine final : public IoEngine {
 public:
  MemoryEngine(std::shared_ptr<SimulatedDisk> disk, std::uint32_t drives)
      : disk_(std::move(disk)), epoch_(disk_->epoch()), drives_(drives) {}

  // What was taken is done, as real engines do it.
  ~MemoryEngine() override {
    while (!queue_.empty()) serve_next();
  }

  IoEngineInfo info() const override { return {"memory", false, false, {}}; }

  FileId open(const IoFileOptions& options) override {
    check_drive(options, drives_);
    const auto free = std::find_if(files_.begin(), files_.end(),
                                   [](const auto& file) { return !file.has_value(); });
    if (free == files_.end()) throw too_many_files(options);
    auto data = disk_->open(options, epoch_);
    const auto size = SimulatedDisk::size_of(*data);
    free->emplace(File{
        {options.path, size, false, "the file is in memory", kAlignment, options.drive},
        std::move(data)});
    return {static_cast<std::uint32_t>(free - files_.begin())};
  }

  void close(FileId file) override {
    at(file);
    TERRACE_CHECK(std::none_of(queue_.begin(), queue_.end(), [&](const Taken& taken) {
      return taken.request.file == file;
    }));
    files_[file.value].reset();
  }

  bool exists(const std::string& path) const override { return disk_->exists(path, epoch_); }
  void remove(const std::string& path) override { disk_->remove(path, epoch_); }
  IoFileInfo file_info(FileId file) const override { return at(file).info; }

  void register_buffers(std::span<const std::span<std::byte>>) override {}

  bool submit(const IoRequest& request) override {
    const auto& file = at(request.file);
    auto& waiting = waiting_[file.info.drive];
    if (waiting == kMaxRequests) return false;
    ++waiting;
    queue_.push_back({request, disk_->admit(*file.data, epoch_)});
    return true;
  }
  void flush() override {}
  std::size_t pending() const override { return queue_.size(); }

  std::size_t reap(std::vector<Completion>& completions, Nanoseconds timeout) override {
    const auto deadline = deadline_after(steady_clock().now(), timeout);
    const auto count = disk_->batch(queue_.size());
    for (std::size_t i = 0; i < count; ++i) completions.push_back(serve_next());
    std::unique_lock lock(mutex_);
    if (count == 0) {
      wakeable_.wait_until(lock, std::chrono::steady_clock::time_point(deadline),
                           [&] { return woken_; });
    }
    woken_ = false;
    return count;
  }

  void wake() override {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    wakeable_.notify_one();
  }

 private:
  struct File {
    IoFileInfo info;
    std::shared_ptr<SimulatedDisk::File> data;
  };
  struct Taken {
    IoRequest request;
    SimulatedDisk::Admission admission;
  };

  const File& at(FileId file) const {
    TERRACE_CHECK(file.value < files_.size() && files_[file.value].has_value());
    return *files_[file.value];
  }

  Completion serve_next() {
    const auto place = queue_.begin() + static_cast<std::ptrdiff_t>(disk_->pick(queue_.size()));
    const auto taken = *place;
    queue_.erase(place);
    const auto& request = taken.request;
    const auto& file = at(request.file);
    --waiting_[file.info.drive];
    const auto start = steady_clock().now();
    int error = refusal(request, file.info);
    if (error == 0) error = disk_->serve(request, *file.data, taken.admission);
    const bool moved = error == 0 && request.operation != IoOperation::flush;
    return {request.ticket, error, moved ? request.bytes : 0, start, steady_clock().now()};
  }

  const std::shared_ptr<SimulatedDisk> disk_;
  const std::uint64_t epoch_;
  const std::uint32_t drives_;
  std::array<std::optional<File>, kMaxIoFiles> files_;
  std::deque<Taken> queue_;
  std::array<std::size_t, kMaxDrives> waiting_{};  // requests in the queue, by drive
  std::mutex mutex_;
  std::condition_variable wakeable_;
  bool woken_ = false;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<IoEngine> make_memory_engine(std::shared_ptr<SimulatedDisk> disk,
                                             std::uint32_t drives) {
  return std::make_unique<MemoryEngine>(std::move(disk), std::clamp(drives, 1U, kMaxDrives));
}

std::unique_ptr<IoEngine> make_memory_engine(std::uint32_t drives) {
  const SimulatedDiskOptions plain{.write_cache = false, .shuffled = false};
  return make_memory_engine(std::make_shared<SimulatedDisk>(plain), drives);
}

}  // namespace terrace
