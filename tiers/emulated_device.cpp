// A device on host threads: bounded memory, one thread per stream, real asynchrony. It enforces what
// hardware would punish: copies are between pinned host memory and the device's own.
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <variant>

#include "terrace/device.h"
#include "terrace/error.h"

namespace terrace {
namespace {

// CPU time of the calling thread: what a layer function would take on a core of its own.
Nanoseconds thread_time() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + Nanoseconds(time.tv_nsec);
}

// A point in a stream's order. Shared by the stream that reaches it and those that wait for it, so
// that it may be released while they still do.
class Event {
 public:
  void signal() {
    reached_.store(true, std::memory_order_release);
    reached_.notify_all();
  }
  void wait() const { reached_.wait(false, std::memory_order_acquire); }

 private:
  std::atomic<bool> reached_{false};
};
using SharedEvent = std::shared_ptr<Event>;

// Disjoint ranges of memory. Thread-safe.
class RangeSet {
 public:
  bool add(const std::byte* first, std::size_t size) {
    const std::lock_guard lock(mutex_);
    const auto next = ranges_.lower_bound(first);
    if (next != ranges_.end() && next->first < first + size) return false;
    if (next != ranges_.begin() && std::prev(next)->second > first) return false;
    ranges_.emplace_hint(next, first, first + size);
    return true;
  }
  // The size of the range that begins at `first`, which is removed; 0 when there is none.
  std::size_t remove(const std::byte* first) {
    const std::lock_guard lock(mutex_);
    const auto found = ranges_.find(first);
    if (found == ranges_.end()) return 0;
    const auto size = static_cast<std::size_t>(found->second - found->first);
    ranges_.erase(found);
    return size;
  }
  bool contains(const std::byte* first, std::size_t size) const {
    const std::lock_guard lock(mutex_);
    auto next = ranges_.upper_bound(first);
    if (next == ranges_.begin()) return false;
    return first + size <= std::prev(next)->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<const std::byte*, const std::byte*> ranges_;  // first → end
};

// What has completed and was not yet polled, and the first failure.
class Outbox {
 public:
  void push(Completion completion) {
    {
      const std::lock_guard lock(mutex_);
      if (!failure_.empty()) completion.error = EIO;
      completions_.push_back(completion);
    }
    const std::lock_guard lock(waker_mutex_);
    if (waker_) waker_();
  }
  std::size_t poll(std::vector<Completion>& completions) {
    const std::lock_guard lock(mutex_);
    const auto count = completions_.size();
    completions.insert(completions.end(), completions_.begin(), completions_.end());
    completions_.clear();
    return count;
  }
  // When it returns, the waker before is not running and will not be called again.
  void set_waker(std::function<void()> waker) {
    const std::lock_guard lock(waker_mutex_);
    waker_ = std::move(waker);
  }
  void fail(const std::string& message) {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = message;
  }
  std::string failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Completion> completions_;  // guarded by mutex_
  std::string failure_;                  // guarded by mutex_
  std::mutex waker_mutex_;               // held while the waker runs
  std::function<void()> waker_;          // guarded by waker_mutex_
};

// One in-order queue with its thread.
class Stream {
 public:
  struct Wait {
    SharedEvent event;
  };
  struct Record {
    SharedEvent event;
  };
  struct Notify {
    Ticket ticket;
  };
  using Item = std::variant<CopyRequest, HostFunction, Wait, Record, Notify>;

  Stream(Throttle throttle, double compute_delay, Clock& clock, Outbox& outbox)
      : pacer_(throttle), compute_delay_(compute_delay), clock_(clock), outbox_(outbox) {
    thread_ = std::thread([this] { serve(); });
  }
  // Ends what was enqueued.
  ~Stream() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    filled_.notify_one();
    thread_.join();
  }

  void push(Item item) {
    {
      const std::lock_guard lock(mutex_);
      items_.push_back(std::move(item));
    }
    filled_.notify_one();
  }

 private:
  void serve() {
    for (;;) {
      std::unique_lock lock(mutex_);
      filled_.wait(lock, [&] { return stop_ || !items_.empty(); });
      if (items_.empty()) return;
      Item item = std::move(items_.front());
      items_.pop_front();
      lock.unlock();
      std::visit([&](auto& what) { run(what); }, item);
    }
  }

  void run(const CopyRequest& copy) {
    const auto slot = pacer_.reserve(clock_.now(), copy.size.count);
    Completion completion{copy.ticket, 0, copy.size.count, clock_.now(), {}};
    std::memcpy(copy.destination, copy.source, copy.size.count);
    if (pacer_.active()) clock_.sleep_until(slot.end);
    completion.end = clock_.now();
    outbox_.push(completion);
  }

  void run(const HostFunction& function) {
    const auto begin = clock_.now();
    const auto busy = thread_time();
    try {
      function();
    } catch (const std::exception& error) {
      outbox_.fail(std::string("a function on the compute stream threw: ") + error.what());
    }
    if (compute_delay_ <= 0) return;
    const auto spent = to_seconds(thread_time() - busy);
    clock_.sleep_until(begin + from_seconds(spent * (1 + compute_delay_)));
  }

  void run(const Wait& wait) { wait.event->wait(); }
  void run(const Record& record) { record.event->signal(); }
  void run(const Notify& notify) {
    const auto now = clock_.now();
    outbox_.push({notify.ticket, 0, 0, now, now});
  }

  Pacer pacer_;  // the stream's thread alone
  const double compute_delay_;
  Clock& clock_;
  Outbox& outbox_;
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<Item> items_;  // guarded by mutex_
  bool stop_ = false;       // guarded by mutex_
  std::thread thread_;      // last: uses everything above
};

class EmulatedDevice final : public Device {
 public:
  explicit EmulatedDevice(const EmulatedDeviceOptions& options)
      : capacity_(options.memory), clock_(options.clock ? *options.clock : steady_clock()) {
    streams_.push_back(std::make_unique<Stream>(options.host_to_device, 0, clock_, outbox_));
    streams_.push_back(std::make_unique<Stream>(options.device_to_host, 0, clock_, outbox_));
    streams_.push_back(std::make_unique<Stream>(
        Throttle{}, options.compute_delay_per_second, clock_, outbox_));
  }

  // A stream may wait for another: none goes before all are empty.
  ~EmulatedDevice() override {
    for (std::uint32_t s = 0; s < kStreamCount; ++s) synchronize(StreamId{s});
  }

  DeviceInfo info() const override { return {"emulated", capacity_}; }

  std::byte* allocate(Bytes size) override {
    const Bytes rounded = round_up(size, Bytes{4096});
    const Bytes used = allocated_;
    if (rounded > capacity_ || used > capacity_ - rounded) {
      throw refusal(size, "the device has " + std::to_string(capacity_.count) + " bytes, of which " +
                              std::to_string(used.count) + " are in use");
    }
    void* memory = ::mmap(nullptr, rounded.count, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw refusal(size, std::strerror(errno));
    auto* first = static_cast<std::byte*>(memory);
    TERRACE_CHECK(device_memory_.add(first, rounded.count));
    allocated_ = used + rounded;
    peak_ = std::max(peak_, allocated_);
    return first;
  }

  void release(std::byte* memory) noexcept override {
    const std::size_t size = device_memory_.remove(memory);
    TERRACE_CHECK(size > 0);
    ::munmap(memory, size);
    allocated_ -= {size};
  }

  Bytes allocated() const override { return allocated_; }
  Bytes peak_allocated() const override { return peak_; }

  void pin(std::span<std::byte> host) override {
    if (host.empty() || !pinned_.add(host.data(), host.size())) {
      throw Error(ErrorCode::device, "pinning " + std::to_string(host.size()) +
                                         " bytes of host memory: part of it is pinned already");
    }
  }
  void unpin(std::span<std::byte> host) noexcept override {
    TERRACE_CHECK(pinned_.remove(host.data()) == host.size());
  }

  void copy(StreamId stream, const CopyRequest& request) override {
    const auto size = request.size.count;
    const bool up = device_memory_.contains(request.destination, size) &&
                    pinned_.contains(request.source, size);
    const bool down = device_memory_.contains(request.source, size) &&
                      pinned_.contains(request.destination, size);
    TERRACE_CHECK(up != down);
    of(stream).push(request);
  }

  void launch(StreamId stream, HostFunction function) override {
    of(stream).push(std::move(function));
  }

  EventId record(StreamId stream) override {
    auto event = std::make_shared<Event>();
    EventId id;
    {
      const std::lock_guard lock(events_mutex_);
      if (free_events_.empty()) {
        id = {static_cast<std::uint32_t>(events_.size())};
        events_.push_back(event);
      } else {
        id = free_events_.back();
        free_events_.pop_back();
        events_[id.value] = event;
      }
    }
    of(stream).push(Stream::Record{std::move(event)});
    return id;
  }

  void wait(StreamId stream, EventId event) override {
    of(stream).push(Stream::Wait{find(event)});
  }

  void release_event(EventId event) noexcept override {
    const std::lock_guard lock(events_mutex_);
    TERRACE_CHECK(events_[event.value] != nullptr);
    events_[event.value] = nullptr;
    free_events_.push_back(event);
  }

  void notify(StreamId stream, Ticket ticket) override {
    of(stream).push(Stream::Notify{ticket});
  }

  std::size_t poll(std::vector<Completion>& completions) override {
    return outbox_.poll(completions);
  }
  void set_waker(std::function<void()> waker) override { outbox_.set_waker(std::move(waker)); }

  void synchronize(StreamId stream) override {
    auto event = std::make_shared<Event>();
    of(stream).push(Stream::Record{event});
    event->wait();
  }

  std::string failure() const override { return outbox_.failure(); }
  void* native_stream(StreamId) override { return nullptr; }

 private:
  static Error refusal(Bytes size, const std::string& why) {
    return {ErrorCode::out_of_budget, "allocating " + std::to_string(size.count) + " bytes (" +
                                          to_string(size) + ") of device memory failed: " + why};
  }

  Stream& of(StreamId stream) {
    TERRACE_CHECK(stream.value < streams_.size());
    return *streams_[stream.value];
  }

  SharedEvent find(EventId event) {
    const std::lock_guard lock(events_mutex_);
    TERRACE_CHECK(event.value < events_.size() && events_[event.value] != nullptr);
    return events_[event.value];
  }

  const Bytes capacity_;
  Clock& clock_;
  Bytes allocated_;
  Bytes peak_;
  RangeSet device_memory_;
  RangeSet pinned_;
  Outbox outbox_;
  std::mutex events_mutex_;
  std::vector<SharedEvent> events_;     // guarded by events_mutex_; by id
  std::vector<EventId> free_events_;    // guarded by events_mutex_
  std::vector<std::unique_ptr<Stream>> streams_;  // last: their threads use the rest
};

}  // namespace

std::unique_ptr<Device> make_emulated_device(const EmulatedDeviceOptions& options) {
  return std::make_unique<EmulatedDevice>(options);
}

}  // namespace terrace
