// A device on host threads: bounded memory and in-order streams that run beside the host, each a
// thread of its own. It enforces what hardware would punish (copies only between pinned host memory
// and device memory, inside one allocation and one pinned range). It can be slowed down to the
// speed of a link or a processor, so that overlap can be measured on any machine.
//
// make_emulated_device() is declared in terrace/device.h; the parts are here for those who read on.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "terrace/device.h"
#include "tiers/range_set.h"

namespace terrace::emulated {

// An event. It belongs to one stream for good, and is reused for one record after the other; since
// the stream is in order, so are the generations that it reaches.
struct EventSlot {
  std::atomic<std::uint32_t> reached{0};           // the last generation that was reached
  std::atomic<Nanoseconds::rep> reached_at_ns{0};  // and when, in the device's clock
  std::uint32_t recorded = 0;                      // guarded by the pool's mutex
  StreamId stream;
  bool live = false;                               // guarded by the pool's mutex
};

// One record of one event: what a stream reaches, or waits for. Stays valid, and keeps its meaning,
// after release_event().
class EventPoint {
 public:
  EventPoint(EventSlot& slot, std::uint32_t generation) : slot_(&slot), generation_(generation) {}

  bool reached() const;
  // Blocks until it is reached; returns a time that is no earlier than when.
  Nanoseconds wait() const;
  // By the stream whose order it is a point of.
  void reach(Nanoseconds now) const;

 private:
  // Generations wrap around; the sign of the difference orders them.
  bool reached_by(std::uint32_t last) const {
    return static_cast<std::int32_t>(last - generation_) >= 0;
  }

  EventSlot* slot_;
  std::uint32_t generation_;
};

// The events of a device. Thread rule: every call from any thread.
class EventPool {
 public:
  struct Recorded {
    EventId id;
    EventPoint point;
  };

  // The caller hands the point to `stream`, in the order of these calls.
  Recorded record(StreamId stream);
  // Both abort on an event that was released or never recorded.
  EventPoint find(EventId event);
  void release(EventId event) noexcept;

 private:
  EventSlot& live(EventId event);

  std::mutex mutex_;
  // Guarded by mutex_; a deque, because streams hold the addresses of slots.
  std::deque<EventSlot> slots_;
  std::array<std::vector<std::uint32_t>, kStreamCount> free_slots_;
};

// What has completed and was not yet polled, and the first failure.
// Thread rule: every call from any thread; the waker runs without a lock held.
class Outbox {
 public:
  void push(Completion completion);  // which carries EIO once the device has failed
  std::size_t poll(std::vector<Completion>& completions);
  // Waits until the waker before has returned; so it must not be called from within a waker.
  void set_waker(std::function<void()> waker);
  void fail(const std::string& message);  // the first one stays
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::string failure() const;

 private:
  struct Waker {
    std::function<void()> call;
    int running = 0;  // guarded by mutex_; threads inside call
  };

  mutable std::mutex mutex_;
  std::condition_variable returned_;     // a replaced waker has no more threads inside
  std::vector<Completion> completions_;  // guarded by mutex_
  std::shared_ptr<Waker> waker_;         // guarded by mutex_; nullptr: none
  std::string failure_;                  // guarded by mutex_
  std::atomic<bool> failed_{false};
};

struct StreamOptions {
  const char* name;         // at most 15 characters, the thread's name
  Throttle throttle;        // of copies
  double delay_per_second;  // of launched functions
};

// One in-order queue and the thread that serves it. Once the device has failed, copies and
// functions are skipped; order, events and completions go on, so that nobody waits in vain.
// Thread rule: calls ordered by the caller.
class Stream {
 public:
  Stream(const StreamOptions& options, Clock& clock, Outbox& outbox);
  // Ends what was enqueued.
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void copy(const CopyRequest& request);
  void launch(HostFunction function) { push(std::move(function)); }
  void record(EventPoint point) { push(Record{point}); }
  void wait(EventPoint point);
  void notify(Ticket ticket) { push(Notify{ticket}); }

 private:
  struct Copy {
    CopyRequest request;
    Nanoseconds asked;  // when it was enqueued; only where copies are throttled
  };
  struct Wait {
    EventPoint point;
  };
  struct Record {
    EventPoint point;
  };
  struct Notify {
    Ticket ticket;
  };
  using Item = std::variant<Copy, HostFunction, Wait, Record, Notify>;

  void push(Item item);
  void serve();
  void run(const Copy& copy);
  void run(const HostFunction& function);
  void run(const Wait& wait);
  void run(const Record& record);
  void run(const Notify& notify);
  std::string threw() const;

  const StreamOptions options_;
  Clock& clock_;
  Outbox& outbox_;
  Pacer pacer_;                    // the stream's thread alone
  Nanoseconds released_at_{0};     // the stream's thread alone: when the last wait was satisfied
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<Item> items_;         // guarded by mutex_
  bool stop_ = false;              // guarded by mutex_
  std::thread thread_;             // last: uses everything above
};

class EmulatedDevice final : public Device {
 public:
  explicit EmulatedDevice(const EmulatedDeviceOptions& options);
  // Waits for everything enqueued; frees what was not released.
  ~EmulatedDevice() override;

  DeviceInfo info() const override { return {"emulated", capacity_}; }

  // Accounts the bytes asked for; the mapping behind them is of whole pages.
  std::byte* allocate(Bytes size) override;
  void release(std::byte* memory) noexcept override;
  Bytes allocated() const override;
  Bytes peak_allocated() const override;

  void pin(std::span<std::byte> host) override;
  void unpin(std::span<std::byte> host) noexcept override;

  void copy(StreamId stream, const CopyRequest& request) override;
  void launch(StreamId stream, HostFunction function) override;
  EventId record(StreamId stream) override;
  void wait(StreamId stream, EventId event) override;
  void release_event(EventId event) noexcept override { events_.release(event); }
  void notify(StreamId stream, Ticket ticket) override { of(stream).notify(ticket); }

  std::size_t poll(std::vector<Completion>& completions) override;
  void set_waker(std::function<void()> waker) override { outbox_.set_waker(std::move(waker)); }
  void synchronize(StreamId stream) override;
  std::string failure() const override { return outbox_.failure(); }
  void* native_stream(StreamId) override { return nullptr; }

 private:
  Stream& of(StreamId stream);
  bool one_pinned_side(const CopyRequest& request) const;

  const Bytes capacity_;
  mutable std::mutex memory_mutex_;
  Bytes allocated_;         // guarded by memory_mutex_
  Bytes peak_allocated_;    // guarded by memory_mutex_
  RangeSet device_memory_;  // guarded by memory_mutex_
  RangeSet pinned_;         // guarded by memory_mutex_
  EventPool events_;
  Outbox outbox_;
  std::vector<std::unique_ptr<Stream>> streams_;  // by StreamId; last: their threads use the rest
};

}  // namespace terrace::emulated
