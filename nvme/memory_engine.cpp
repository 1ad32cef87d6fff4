// Files in memory. No thread, no system call: what is submitted is done in the next reap().
#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>

#include "nvme/deadline.h"
#include "nvme/engines.h"
#include "nvme/transfers.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::uint32_t kAlignment = 4096;

class MemoryEngine final : public IoEngine {
 public:
  IoEngineInfo info() const override { return {"memory", false, false, {}}; }

  FileId open(const IoFileOptions& options) override {
    const auto free = std::find_if(files_.begin(), files_.end(),
                                   [](const auto& file) { return !file.has_value(); });
    if (free == files_.end()) {
      throw Error(ErrorCode::unavailable, "opening " + options.path + ": " +
                                              std::to_string(kMaxIoFiles) +
                                              " files are open already; close one first");
    }
    for (const auto& file : files_) {
      if (!options.scratch && file && !file->scratch && file->info.path == options.path) {
        throw Error(ErrorCode::io, "creating " + options.path +
                                       " in memory failed: it exists; choose another name");
      }
    }
    free->emplace(make_file(options));
    return {static_cast<std::uint32_t>(free - files_.begin())};
  }

  void close(FileId file) override {
    at(file);
    TERRACE_CHECK(std::none_of(queue_.begin(), queue_.end(),
                               [&](const IoRequest& request) { return request.file == file; }));
    files_[file.value].reset();
  }

  IoFileInfo file_info(FileId file) const override { return at(file).info; }

  void register_buffers(std::span<const std::span<std::byte>>) override {}

  bool submit(const IoRequest& request) override {
    at(request.file);
    if (queue_.size() == kMaxRequests) return false;
    queue_.push_back(request);
    return true;
  }
  void flush() override {}
  std::size_t pending() const override { return queue_.size(); }

  std::size_t reap(std::vector<Completion>& completions, Nanoseconds timeout) override {
    const auto deadline = deadline_after(steady_clock().now(), timeout);
    const auto count = queue_.size();
    for (; !queue_.empty(); queue_.pop_front()) completions.push_back(serve(queue_.front()));
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
    bool scratch = false;
    std::vector<std::byte> data;
  };

  static File make_file(const IoFileOptions& options) {
    File file;
    file.scratch = options.scratch;
    file.info = {options.path, round_up(options.size, Bytes{kAlignment}), false,
                 "the file is in memory", kAlignment};
    try {
      file.data.resize(file.info.size.count);
    } catch (const std::exception&) {  // bad_alloc, length_error
      throw Error(ErrorCode::io, "making " + options.path + " in memory failed: " +
                                     std::to_string(options.size.count) + " bytes (" +
                                     to_string(options.size) +
                                     ") are more than there is; lower the nvme budget or use an "
                                     "engine with real files");
    }
    return file;
  }

  const File& at(FileId file) const {
    TERRACE_CHECK(file.value < files_.size() && files_[file.value].has_value());
    return *files_[file.value];
  }

  Completion serve(const IoRequest& request) {
    const auto start = steady_clock().now();
    const int error = refusal(request, at(request.file).info);
    const bool moves = error == 0 && request.operation != IoOperation::flush && request.bytes > 0;
    if (moves) {
      std::byte* place = files_[request.file.value]->data.data() + request.offset;
      const bool read = request.operation == IoOperation::read;
      std::memcpy(read ? request.data : place, read ? place : request.data, request.bytes);
    }
    return {request.ticket, error, moves ? request.bytes : 0, start, steady_clock().now()};
  }

  std::array<std::optional<File>, kMaxIoFiles> files_;
  std::deque<IoRequest> queue_;
  std::mutex mutex_;
  std::condition_variable wakeable_;
  bool woken_ = false;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<IoEngine> make_memory_engine() { return std::make_unique<MemoryEngine>(); }

}  // namespace terrace
