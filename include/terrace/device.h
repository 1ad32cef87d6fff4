// Port: the accelerator. Its own bounded memory (HBM), in-order streams, events, pinned host
// memory.
//
// The port is shaped for CUDA: copies and launches only enqueue, dependencies between streams are
// device-ordered (record, wait) and cost no host round trip, and the compute stream may be the
// trainer's own. The emulated device (tiers/emulated_device.h) implements it on host threads.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "terrace/completion.h"
#include "terrace/pacer.h"
#include "terrace/types.h"

namespace terrace {

// The three streams that every device has; as StreamId values.
inline constexpr StreamId kHostToDeviceStream{0};
inline constexpr StreamId kDeviceToHostStream{1};
inline constexpr StreamId kComputeStream{2};
inline constexpr std::size_t kStreamCount = 3;

struct DeviceInfo {
  std::string name;  // "emulated", "NVIDIA H200", ...
  Bytes memory;      // what allocate() can give in all
};

struct CopyRequest {
  Ticket ticket;
  std::byte* destination = nullptr;
  const std::byte* source = nullptr;
  Bytes size;
};

// Work for Device::launch. Runs on the device's own thread, in stream order.
using HostFunction = std::function<void()>;

// Thread rule: enqueueing calls (copy, launch, record, wait, notify) may come from any thread, but
// calls on one stream must be ordered by the callers. poll(): one thread. No call blocks on the
// work in a stream except synchronize().
class Device {
 public:
  virtual ~Device() = default;

  virtual DeviceInfo info() const = 0;

  // One plain allocation, 4096-aligned, of at most info().memory in all. Done at start, never
  // later. Throws Error(out_of_budget) with the bytes asked for, in use and available.
  virtual std::byte* allocate(Bytes size) = 0;
  virtual void release(std::byte* memory) noexcept = 0;
  // Bytes allocated now, and the most that were at any time.
  virtual Bytes allocated() const = 0;
  virtual Bytes peak_allocated() const = 0;

  // Makes host memory fit for asynchronous copies. Done at start, never later.
  // Throws Error(device) naming the bytes; nothing stays pinned then.
  virtual void pin(std::span<std::byte> host) = 0;
  virtual void unpin(std::span<std::byte> host) noexcept = 0;

  // Enqueues a copy in either direction. `source` and `destination` stay valid until it completes.
  virtual void copy(StreamId stream, const CopyRequest& request) = 0;

  // Enqueues host code that may touch device memory. Devices on which the host cannot do that throw
  // Error(unavailable): there the trainer enqueues kernels on native_stream().
  // An exception thrown by `function` is sticky: every later completion carries an error, and
  // failure() tells what it said.
  virtual void launch(StreamId stream, HostFunction function) = 0;

  // Marks the present end of `stream`. The event lives until release_event().
  virtual EventId record(StreamId stream) = 0;
  // Work enqueued on `stream` from now on starts after `event`.
  virtual void wait(StreamId stream, EventId event) = 0;
  virtual void release_event(EventId event) noexcept = 0;

  // Completes `ticket` when all work enqueued on `stream` so far has ended. start == end.
  virtual void notify(StreamId stream, Ticket ticket) = 0;

  // Appends what has completed since the last call; returns how many.
  virtual std::size_t poll(std::vector<Completion>& completions) = 0;
  // `waker` is called, from any thread, after each completion became visible to poll(). When
  // set_waker() returns, the one before is not running and will not be called again.
  virtual void set_waker(std::function<void()> waker) = 0;

  // Blocks until everything enqueued on `stream` has ended.
  virtual void synchronize(StreamId stream) = 0;

  // Why the device no longer works; empty while it does.
  virtual std::string failure() const = 0;

  // The driver's handle of a stream (cudaStream_t), or nullptr where there is none.
  virtual void* native_stream(StreamId stream) = 0;
};

struct EmulatedDeviceOptions {
  Bytes memory;                         // the capacity that stands for HBM
  Throttle host_to_device;              // per stream
  Throttle device_to_host;
  double compute_delay_per_second =
      0;  // each launched function of t seconds is stretched by t * this
  Clock* clock = nullptr;               // nullptr: steady_clock()
};

// Host memory and one thread per stream.
std::unique_ptr<Device> make_emulated_device(const EmulatedDeviceOptions& options);

}  // namespace terrace
