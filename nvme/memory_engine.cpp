// Files in memory. No thread, no system call: what is submitted is done in the next reap().
#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>

#include "nvme/engines.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::uint32_t kAlignment = 4096;
constexpr std::size_t kMaxQueued = 64;

class MemoryEngine final : public IoEngine {
 public:
  IoEngineInfo info() const override { return {"memory", false, false, {}}; }

  FileId open(const IoFileOptions& options) override {
    if (files_.size() == kMaxIoFiles) {
      throw Error(ErrorCode::unavailable,
                  "opening " + options.path + ": too many files are open already");
    }
    files_.push_back(File{options, std::vector<std::byte>(options.size.count)});
    return {static_cast<std::uint32_t>(files_.size() - 1)};
  }
  void close(FileId file) override { at(file) = {}; }

  IoFileInfo file_info(FileId file) const override {
    const auto& options = files_.at(file.value).options;
    return {options.path, options.size, false, "the file is in memory", kAlignment};
  }

  void register_buffers(std::span<const std::span<std::byte>>) override {}

  bool submit(const IoRequest& request) override {
    if (queue_.size() == kMaxQueued) return false;
    queue_.push_back(request);
    return true;
  }
  void flush() override {}
  std::size_t pending() const override { return queue_.size(); }

  std::size_t reap(std::vector<Completion>& completions, Nanoseconds timeout) override {
    const auto count = queue_.size();
    for (; !queue_.empty(); queue_.pop_front()) {
      const auto start = steady_clock().now();
      const int error = perform(queue_.front());
      const std::uint64_t bytes = error == 0 ? queue_.front().bytes : 0;
      completions.push_back({queue_.front().ticket, error, bytes, start, steady_clock().now()});
    }
    std::unique_lock lock(mutex_);
    if (count == 0) wakeable_.wait_for(lock, timeout, [&] { return woken_; });
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
    IoFileOptions options;
    std::vector<std::byte> data;
  };

  File& at(FileId file) {
    TERRACE_CHECK(file.value < files_.size());
    return files_[file.value];
  }

  int perform(const IoRequest& request) {
    if (request.operation == IoOperation::flush) return 0;
    auto& data = at(request.file).data;
    if (request.offset % kAlignment != 0 || request.bytes % kAlignment != 0 ||
        reinterpret_cast<std::uintptr_t>(request.data) % kAlignment != 0) {
      return EINVAL;
    }
    if (request.bytes > data.size() || request.offset > data.size() - request.bytes) {
      return request.operation == IoOperation::read ? ENODATA : ENOSPC;
    }
    if (request.bytes == 0) return 0;
    std::byte* place = data.data() + request.offset;
    if (request.operation == IoOperation::read) {
      std::memcpy(request.data, place, request.bytes);
    } else {
      std::memcpy(place, request.data, request.bytes);
    }
    return 0;
  }

  std::vector<File> files_;
  std::deque<IoRequest> queue_;
  std::mutex mutex_;
  std::condition_variable wakeable_;
  bool woken_ = false;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<IoEngine> make_memory_engine() { return std::make_unique<MemoryEngine>(); }

}  // namespace terrace
