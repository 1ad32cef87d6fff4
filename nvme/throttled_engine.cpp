// Any engine, each drive at most so fast: the emulated speed of drives.
#include <algorithm>
#include <array>
#include <atomic>
#include <map>

#include "nvme/deadline.h"
#include "nvme/engines.h"
#include "nvme/transfers.h"
#include "terrace/error.h"

namespace terrace {
namespace {

class ThrottledEngine final : public IoEngine {
 public:
  ThrottledEngine(std::unique_ptr<IoEngine> engine, Throttle read, Throttle write, Clock& clock)
      : engine_(std::move(engine)),
        clock_(clock),
        drives_(kMaxDrives, {Pacer(read), Pacer(write), 0}) {}

  IoEngineInfo info() const override {
    auto info = engine_->info();
    info.notes.push_back("reads and writes are throttled on request");
    return info;
  }
  FileId open(const IoFileOptions& options) override {
    const FileId file = engine_->open(options);
    TERRACE_CHECK(file.value < kMaxIoFiles && options.drive < kMaxDrives);
    drive_of_[file.value] = options.drive;
    return file;
  }
  void close(FileId file) override { engine_->close(file); }
  IoFileInfo file_info(FileId file) const override { return engine_->file_info(file); }
  bool exists(const std::string& path) const override { return engine_->exists(path); }
  void remove(const std::string& path) override { engine_->remove(path); }
  void register_buffers(std::span<const std::span<std::byte>> buffers) override {
    engine_->register_buffers(buffers);
  }

  // The inner engine sees tickets of our own, which lead to the caller's and to the deadline.
  bool submit(const IoRequest& request) override {
    TERRACE_CHECK(request.file.value < kMaxIoFiles);
    const auto index = drive_of_[request.file.value];
    auto& drive = drives_[index];
    if (drive.held == kMaxRequests) return false;
    IoRequest inner = request;
    inner.ticket = {next_};
    if (!engine_->submit(inner)) return false;
    const auto now = clock_.now();
    Pacer::Slot slot{now, now};
    if (request.operation == IoOperation::read) slot = drive.read.reserve(now, request.bytes);
    if (request.operation == IoOperation::write) slot = drive.write.reserve(now, request.bytes);
    held_[next_++] = {{request.ticket, 0, 0, slot.start, slot.end}, index, false};
    ++drive.held;
    return true;
  }
  void flush() override { engine_->flush(); }
  std::size_t pending() const override { return held_.size(); }

  std::size_t reap(std::vector<Completion>& completions, Nanoseconds timeout) override {
    const auto until = deadline_after(clock_.now(), timeout);
    for (Nanoseconds wait{0};;) {
      // 1. What the inner engine has done.
      arrived_.clear();
      engine_->reap(arrived_, wait);
      for (const auto& completion : arrived_) hold(completion);
      // 2. What is due. A wake() counts even where it coincides with completions that are not.
      const auto count = release(completions);
      const bool woken = woken_.exchange(false);
      const auto now = clock_.now();
      if (count > 0 || woken || now >= until) return count;
      // 3. Sleep until something can be.
      wait = std::max(std::min(until, next_deadline()) - now, Nanoseconds{0});
    }
  }
  void wake() override {
    woken_ = true;
    engine_->wake();
  }

 private:
  struct Drive {
    Pacer read;
    Pacer write;
    std::size_t held = 0;  // requests taken and not yet given back
  };
  struct Held {
    Completion completion;  // end: the deadline
    std::uint32_t drive = 0;
    bool arrived = false;
  };

  void hold(const Completion& inner) {
    const auto found = held_.find(inner.ticket.value);
    TERRACE_CHECK(found != held_.end());
    auto& held = found->second;
    held.completion.error = inner.error;
    held.completion.bytes = inner.bytes;
    held.completion.end = std::max(held.completion.end, inner.end);
    held.arrived = true;
  }

  Nanoseconds next_deadline() const {
    auto next = Nanoseconds::max();
    for (const auto& [ticket, held] : held_) {
      if (held.arrived) next = std::min(next, held.completion.end);
    }
    return next;
  }

  std::size_t release(std::vector<Completion>& completions) {
    const auto now = clock_.now();
    std::size_t count = 0;
    for (auto it = held_.begin(); it != held_.end();) {
      if (it->second.arrived && it->second.completion.end <= now) {
        completions.push_back(it->second.completion);
        --drives_[it->second.drive].held;
        it = held_.erase(it);
        ++count;
      } else {
        ++it;
      }
    }
    return count;
  }

  std::unique_ptr<IoEngine> engine_;
  Clock& clock_;
  std::vector<Drive> drives_;
  std::array<std::uint32_t, kMaxIoFiles> drive_of_{};  // by file
  std::uint64_t next_ = 0;
  std::map<std::uint64_t, Held> held_;  // in order of submission
  std::atomic<bool> woken_ = false;
  std::vector<Completion> arrived_;
};

}  // namespace

std::unique_ptr<IoEngine> make_throttled_engine(std::unique_ptr<IoEngine> engine, Throttle read,
                                                Throttle write, Clock& clock) {
  return std::make_unique<ThrottledEngine>(std::move(engine), read, write, clock);
}

}  // namespace terrace
