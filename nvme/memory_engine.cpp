// Files in memory. No thread, no system call: what is submitted is done in the next reap().
#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "nvme/deadline.h"
#include "nvme/engines.h"
#include "nvme/file_table.h"
#include "nvme/transfers.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::uint32_t kAlignment = 4096;

class MemoryEngine final : public IoEngine {
 public:
  explicit MemoryEngine(std::uint32_t drives) : drives_(drives) {}

  IoEngineInfo info() const override { return {"memory", false, false, {}}; }

  FileId open(const IoFileOptions& options) override {
    check_drive(options, drives_);
    const auto free = std::find_if(files_.begin(), files_.end(),
                                   [](const auto& file) { return !file.has_value(); });
    if (free == files_.end()) {
      throw Error(ErrorCode::unavailable, "opening " + options.path + ": " +
                                              std::to_string(kMaxIoFiles) +
                                              " files are open already; close one first");
    }
    const auto data = options.mode == IoFileMode::existing ? find(options.path) : make(options);
    if (options.mode == IoFileMode::create) names_[options.path] = data;
    free->emplace(File{{options.path, {data->size()}, false, "the file is in memory", kAlignment,
                        options.drive},
                       data});
    return {static_cast<std::uint32_t>(free - files_.begin())};
  }

  bool exists(const std::string& path) const override { return names_.contains(path); }
  void remove(const std::string& path) override {
    if (names_.erase(path) == 0) throw missing("removing", path);
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
    auto& taken = taken_[at(request.file).info.drive];
    if (taken == kMaxRequests) return false;
    ++taken;
    queue_.push_back(request);
    return true;
  }
  void flush() override {}
  std::size_t pending() const override { return queue_.size(); }

  std::size_t reap(std::vector<Completion>& completions, Nanoseconds timeout) override {
    const auto deadline = deadline_after(steady_clock().now(), timeout);
    const auto count = queue_.size();
    for (; !queue_.empty(); queue_.pop_front()) completions.push_back(serve(queue_.front()));
    taken_.fill(0);
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
  using Data = std::shared_ptr<std::vector<std::byte>>;
  struct File {
    IoFileInfo info;
    Data data;
  };

  static Error missing(const std::string& what, const std::string& path) {
    return {ErrorCode::io,
            what + " " + path + " in memory failed: there is no such file; check the path"};
  }

  Data find(const std::string& path) const {
    const auto found = names_.find(path);
    if (found == names_.end()) throw missing("opening", path);
    return found->second;
  }

  Data make(const IoFileOptions& options) const {
    if (options.mode == IoFileMode::create && exists(options.path)) {
      throw Error(ErrorCode::io, "creating " + options.path +
                                     " in memory failed: it exists; choose another name");
    }
    try {
      return std::make_shared<std::vector<std::byte>>(
          round_up(options.size, Bytes{kAlignment}).count);
    } catch (const std::exception&) {  // bad_alloc, length_error
      throw Error(ErrorCode::io, "making " + options.path + " in memory failed: " +
                                     std::to_string(options.size.count) + " bytes (" +
                                     to_string(options.size) +
                                     ") are more than there is; lower the nvme budget or use an "
                                     "engine with real files");
    }
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
      std::byte* place = at(request.file).data->data() + request.offset;
      const bool read = request.operation == IoOperation::read;
      std::memcpy(read ? request.data : place, read ? place : request.data, request.bytes);
    }
    return {request.ticket, error, moves ? request.bytes : 0, start, steady_clock().now()};
  }

  const std::uint32_t drives_;
  std::array<std::optional<File>, kMaxIoFiles> files_;
  std::map<std::string, Data> names_;
  std::array<std::size_t, kMaxDrives> taken_{};  // requests, by drive
  std::deque<IoRequest> queue_;
  std::mutex mutex_;
  std::condition_variable wakeable_;
  bool woken_ = false;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<IoEngine> make_memory_engine(std::uint32_t drives) {
  return std::make_unique<MemoryEngine>(std::clamp(drives, 1U, kMaxDrives));
}

}  // namespace terrace
