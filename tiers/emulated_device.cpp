#include "tiers/emulated_device.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

#include "terrace/error.h"

namespace terrace::emulated {
namespace {

constexpr Bytes kPage = 4_KiB;

// An EventId is a slot's index and the low bits of its generation, so that a stale id is noticed.
constexpr unsigned kEventIndexBits = 20;
constexpr std::uint32_t kMaxEvents = 1u << kEventIndexBits;

EventId id_of(std::uint32_t index, std::uint32_t generation) {
  return {generation << kEventIndexBits | index};
}

// CPU time of the calling thread: what a layer function would take on a core of its own.
Nanoseconds thread_time() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + Nanoseconds(time.tv_nsec);
}

Error refusal(Bytes size, const std::string& why) {
  return {ErrorCode::out_of_budget, "allocating " + std::to_string(size.count) + " bytes (" +
                                        to_string(size) + ") of device memory failed: " + why};
}

}  // namespace

bool EventPoint::reached() const {
  return reached_by(slot_->reached.load(std::memory_order_acquire));
}

Nanoseconds EventPoint::wait() const {
  auto last = slot_->reached.load(std::memory_order_acquire);
  while (!reached_by(last)) {
    slot_->reached.wait(last, std::memory_order_acquire);
    last = slot_->reached.load(std::memory_order_acquire);
  }
  return Nanoseconds(slot_->reached_at_ns.load(std::memory_order_relaxed));
}

void EventPoint::reach(Nanoseconds now) const {
  slot_->reached_at_ns.store(now.count(), std::memory_order_relaxed);
  slot_->reached.store(generation_, std::memory_order_release);
  slot_->reached.notify_all();
}

EventPool::Recorded EventPool::record(StreamId stream) {
  TERRACE_CHECK(stream.value < kStreamCount);
  const std::lock_guard lock(mutex_);
  auto& free = free_slots_[stream.value];
  if (free.empty()) {
    TERRACE_CHECK(slots_.size() < kMaxEvents);
    free.push_back(static_cast<std::uint32_t>(slots_.size()));
    slots_.emplace_back().stream = stream;
  }
  const auto index = free.back();
  free.pop_back();
  auto& slot = slots_[index];
  slot.live = true;
  ++slot.recorded;
  return {id_of(index, slot.recorded), EventPoint(slot, slot.recorded)};
}

EventPoint EventPool::find(EventId event) {
  const std::lock_guard lock(mutex_);
  auto& slot = live(event);
  return {slot, slot.recorded};
}

void EventPool::release(EventId event) noexcept {
  const std::lock_guard lock(mutex_);
  auto& slot = live(event);
  slot.live = false;
  free_slots_[slot.stream.value].push_back(event.value % kMaxEvents);
}

EventSlot& EventPool::live(EventId event) {
  const auto index = event.value % kMaxEvents;
  TERRACE_CHECK(index < slots_.size());
  auto& slot = slots_[index];
  TERRACE_CHECK(slot.live && event == id_of(index, slot.recorded));
  return slot;
}

void Outbox::push(Completion completion) {
  std::unique_lock lock(mutex_);
  if (failed()) completion.error = EIO;
  completions_.push_back(completion);
  const auto waker = waker_;
  if (waker == nullptr) return;
  ++waker->running;
  lock.unlock();
  waker->call();
  lock.lock();
  --waker->running;
  if (waker != waker_ && waker->running == 0) returned_.notify_all();
}

std::size_t Outbox::poll(std::vector<Completion>& completions) {
  const std::lock_guard lock(mutex_);
  const auto count = completions_.size();
  completions.insert(completions.end(), completions_.begin(), completions_.end());
  completions_.clear();
  return count;
}

void Outbox::set_waker(std::function<void()> waker) {
  auto next = waker ? std::make_shared<Waker>() : nullptr;
  if (next != nullptr) next->call = std::move(waker);
  std::unique_lock lock(mutex_);
  const auto before = std::exchange(waker_, std::move(next));
  if (before != nullptr) returned_.wait(lock, [&] { return before->running == 0; });
}

void Outbox::fail(const std::string& message) {
  const std::lock_guard lock(mutex_);
  if (failed()) return;
  failure_ = message;
  failed_.store(true, std::memory_order_release);
}

std::string Outbox::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

Stream::Stream(const StreamOptions& options, Clock& clock, Outbox& outbox)
    : options_(options), clock_(clock), outbox_(outbox), pacer_(options.throttle) {
  thread_ = std::thread([this] { serve(); });
}

Stream::~Stream() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  filled_.notify_one();
  thread_.join();
}

void Stream::copy(const CopyRequest& request) {
  push(Copy{request, pacer_.active() ? clock_.now() : Nanoseconds{0}});
}

void Stream::wait(EventPoint point) {
  if (!point.reached()) push(Wait{point});
}

void Stream::push(Item item) {
  {
    const std::lock_guard lock(mutex_);
    items_.push_back(std::move(item));
  }
  filled_.notify_one();
}

void Stream::serve() {
  ::pthread_setname_np(::pthread_self(), options_.name);
  ::prctl(PR_SET_TIMERSLACK, 1UL);  // wake up at the deadline, not the usual 50 us after it
  for (;;) {
    std::unique_lock lock(mutex_);
    filled_.wait(lock, [&] { return stop_ || !items_.empty(); });
    if (items_.empty()) return;
    const Item item = std::move(items_.front());
    items_.pop_front();
    lock.unlock();
    std::visit([&](const auto& what) { run(what); }, item);
  }
}

// The pacer counts from when the copy could have begun, not from when this thread woke up for it:
// being late is made up by finishing sooner after the deadline before.
void Stream::run(const Copy& copy) {
  const auto& request = copy.request;
  Completion completion{request.ticket, 0, 0, clock_.now(), {}};
  if (!outbox_.failed()) {
    if (request.size.count > 0) {
      std::memcpy(request.destination, request.source, request.size.count);
    }
    completion.bytes = request.size.count;
    if (pacer_.active()) {
      const auto ready = std::max(copy.asked, released_at_);
      clock_.sleep_until(pacer_.reserve(ready, request.size.count).end);
    }
  }
  completion.end = clock_.now();
  outbox_.push(completion);
}

// A function of t seconds of CPU ends t * (1 + delay) after it began: time in which other threads
// held the core counts as delay, so that a busy host does not slow the emulated processor down.
void Stream::run(const HostFunction& function) {
  if (outbox_.failed()) return;
  const auto begin = clock_.now();
  const auto cpu_begin = thread_time();
  try {
    function();
  } catch (const std::exception& error) {
    outbox_.fail(threw() + error.what());
  } catch (...) {
    outbox_.fail(threw() + "something that is no std::exception");
  }
  if (options_.delay_per_second <= 0) return;
  const auto spent = to_seconds(thread_time() - cpu_begin);
  clock_.sleep_until(begin + from_seconds(spent * (1 + options_.delay_per_second)));
}

std::string Stream::threw() const {
  return std::string("a function on the ") + options_.name + " stream threw: ";
}

void Stream::run(const Wait& wait) { released_at_ = std::max(released_at_, wait.point.wait()); }

void Stream::run(const Record& record) { record.point.reach(clock_.now()); }

void Stream::run(const Notify& notify) {
  const auto now = clock_.now();
  outbox_.push({notify.ticket, 0, 0, now, now});
}

EmulatedDevice::EmulatedDevice(const EmulatedDeviceOptions& options) : capacity_(options.memory) {
  Clock& clock = options.clock != nullptr ? *options.clock : steady_clock();
  const double delay = options.compute_delay_per_second;
  const StreamOptions streams[kStreamCount] = {{"host_to_device", options.host_to_device, delay},
                                               {"device_to_host", options.device_to_host, delay},
                                               {"compute", {}, delay}};
  for (const auto& stream : streams) {
    streams_.push_back(std::make_unique<Stream>(stream, clock, outbox_));
  }
}

// A stream may wait for another: none goes before all are empty.
EmulatedDevice::~EmulatedDevice() {
  for (std::uint32_t s = 0; s < kStreamCount; ++s) synchronize(StreamId{s});
  streams_.clear();
  while (const auto left = device_memory_.front()) release(left->data());
}

std::byte* EmulatedDevice::allocate(Bytes size) {
  TERRACE_CHECK(size.count > 0);
  const std::lock_guard lock(memory_mutex_);
  const Bytes free = capacity_ - allocated_;
  if (size > free) {
    throw refusal(size, std::to_string(allocated_.count) + " of its " +
                            std::to_string(capacity_.count) + " bytes are in use, " +
                            std::to_string(free.count) + " are free; lower the hbm budget to that");
  }
  void* memory = ::mmap(nullptr, round_up(size, kPage).count, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw refusal(size, std::string("the host says ") + std::strerror(errno));
  }
  auto* first = static_cast<std::byte*>(memory);
  TERRACE_CHECK(device_memory_.add(first, size.count));
  allocated_ += size;
  peak_allocated_ = std::max(peak_allocated_, allocated_);
  return first;
}

void EmulatedDevice::release(std::byte* memory) noexcept {
  const std::lock_guard lock(memory_mutex_);
  const Bytes size{device_memory_.remove(memory)};
  TERRACE_CHECK(size.count > 0);
  ::munmap(memory, round_up(size, kPage).count);
  allocated_ -= size;
}

Bytes EmulatedDevice::allocated() const {
  const std::lock_guard lock(memory_mutex_);
  return allocated_;
}

Bytes EmulatedDevice::peak_allocated() const {
  const std::lock_guard lock(memory_mutex_);
  return peak_allocated_;
}

void EmulatedDevice::pin(std::span<std::byte> host) {
  const std::lock_guard lock(memory_mutex_);
  if (pinned_.add(host.data(), host.size())) return;
  throw Error(ErrorCode::device,
              "pinning " + std::to_string(host.size()) + " bytes of host memory failed: " +
                  (host.empty() ? "there is nothing to pin" : "some are pinned already"));
}

void EmulatedDevice::unpin(std::span<std::byte> host) noexcept {
  const std::lock_guard lock(memory_mutex_);
  const auto size = pinned_.remove(host.data());
  TERRACE_CHECK(size > 0 && size == host.size());
}

void EmulatedDevice::copy(StreamId stream, const CopyRequest& request) {
  TERRACE_CHECK(request.size.count == 0 || one_pinned_side(request));
  of(stream).copy(request);
}

bool EmulatedDevice::one_pinned_side(const CopyRequest& request) const {
  const auto size = request.size.count;
  const std::lock_guard lock(memory_mutex_);
  const bool up = device_memory_.contains(request.destination, size) &&
                  pinned_.covers(request.source, size);
  const bool down = device_memory_.contains(request.source, size) &&
                    pinned_.covers(request.destination, size);
  return up != down;
}

void EmulatedDevice::launch(StreamId stream, HostFunction function) {
  TERRACE_CHECK(function != nullptr);
  of(stream).launch(std::move(function));
}

EventId EmulatedDevice::record(StreamId stream) {
  const auto [id, point] = events_.record(stream);
  of(stream).record(point);
  return id;
}

void EmulatedDevice::wait(StreamId stream, EventId event) { of(stream).wait(events_.find(event)); }

std::size_t EmulatedDevice::poll(std::vector<Completion>& completions) {
  return outbox_.poll(completions);
}

void EmulatedDevice::synchronize(StreamId stream) {
  const auto [id, point] = events_.record(stream);
  of(stream).record(point);
  point.wait();
  events_.release(id);
}

Stream& EmulatedDevice::of(StreamId stream) {
  TERRACE_CHECK(stream.value < streams_.size());
  return *streams_[stream.value];
}

}  // namespace terrace::emulated

namespace terrace {

std::unique_ptr<Device> make_emulated_device(const EmulatedDeviceOptions& options) {
  return std::make_unique<emulated::EmulatedDevice>(options);
}

}  // namespace terrace
