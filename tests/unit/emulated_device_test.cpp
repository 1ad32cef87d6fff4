// What only the emulated device promises; the rest is in tests/contract/device_test.cpp.
#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "terrace/device.h"
#include "terrace/error.h"
#include "tiers/host_memory.h"

namespace terrace {
namespace {

constexpr Bytes kSize{100'000};

// Time passes only in sleeps, each of which ends too late.
class LateClock final : public Clock {
 public:
  Nanoseconds now() const override { return now_.load(); }
  void sleep_until(Nanoseconds deadline) override {
    now_ = std::max(now_.load(), deadline) + kLateness;
  }
  static constexpr Nanoseconds kLateness{70'000};

 private:
  std::atomic<Nanoseconds> now_{Nanoseconds{0}};
};

std::vector<Completion> drain(Device& device) {
  for (std::uint32_t s = 0; s < kStreamCount; ++s) device.synchronize(StreamId{s});
  std::vector<Completion> completions;
  device.poll(completions);
  return completions;
}

// 1 GB/s and 10 us: 100 000 bytes take 110 us. The streams wake up 70 us too late every time.
TEST(EmulatedDevice, MakesUpForLateWakeUps) {
  constexpr int kCopies = 100;
  constexpr Nanoseconds kEach{110'000};
  LateClock clock;
  EmulatedDeviceOptions options;
  options.memory = 1_MiB;
  options.host_to_device = {.gb_s = 1, .latency_us = 10};
  options.clock = &clock;
  const auto device = make_emulated_device(options);
  const HostMemory host(kSize, device.get());
  auto* memory = device->allocate(kSize);
  // Enqueued behind a closed gate, so that all copies are asked for at time 0.
  std::mutex gate;
  gate.lock();
  device->launch(kHostToDeviceStream, [&] { const std::lock_guard pass(gate); });
  for (std::uint64_t i = 0; i < kCopies; ++i) {
    device->copy(kHostToDeviceStream, {{i}, memory, host.span().data(), kSize});
  }
  gate.unlock();
  const auto completions = drain(*device);
  ASSERT_EQ(completions.size(), std::size_t{kCopies});
  for (int i = 0; i < kCopies; ++i) {
    const auto& completion = completions[static_cast<std::size_t>(i)];
    EXPECT_EQ(completion.end, (i + 1) * kEach + LateClock::kLateness) << "copy " << i;
    EXPECT_EQ(completion.start, i == 0 ? Nanoseconds{0} : i * kEach + LateClock::kLateness);
  }
  device->release(memory);
}

// A copy that waits for another stream is paced from when that stream got there.
TEST(EmulatedDevice, PacesFromTheEndOfAWait) {
  LateClock clock;
  EmulatedDeviceOptions options;
  options.memory = 1_MiB;
  options.host_to_device = {.gb_s = 1, .latency_us = 0};
  options.clock = &clock;
  const auto device = make_emulated_device(options);
  const HostMemory host(kSize, device.get());
  auto* memory = device->allocate(kSize);
  std::mutex gate;
  gate.lock();
  device->launch(kComputeStream, [&] {
    const std::lock_guard pass(gate);
    clock.sleep_until(Nanoseconds{930'000});
  });
  const auto event = device->record(kComputeStream);
  device->wait(kHostToDeviceStream, event);
  device->copy(kHostToDeviceStream, {{1}, memory, host.span().data(), kSize});
  gate.unlock();
  const auto completions = drain(*device);
  ASSERT_EQ(completions.size(), 1u);
  EXPECT_EQ(completions[0].start, Nanoseconds{1'000'000});
  EXPECT_EQ(completions[0].end, Nanoseconds{1'100'000} + LateClock::kLateness);
  device->release_event(event);
  device->release(memory);
}

TEST(EmulatedDevice, StretchesFunctionsByTheirCpuTime) {
  EmulatedDeviceOptions options;
  options.memory = 1_MiB;
  options.compute_delay_per_second = 3;
  const auto device = make_emulated_device(options);
  const auto cpu_time = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
  };
  double spent = 0;
  device->notify(kComputeStream, {1});
  device->launch(kComputeStream, [&] {
    const double begin = cpu_time();
    while (spent < 0.01) spent = cpu_time() - begin;
  });
  device->notify(kComputeStream, {2});
  device->synchronize(kComputeStream);
  std::vector<Completion> completions;
  ASSERT_EQ(device->poll(completions), 2u);
  EXPECT_GE(to_seconds(completions[1].start - completions[0].end), 4 * spent);
}

TEST(EmulatedDevice, AccountsTheBytesAskedForNotThePages) {
  EmulatedDeviceOptions options;
  options.memory = {10'000};
  const auto device = make_emulated_device(options);
  auto* memory = device->allocate({9'999});
  EXPECT_EQ(device->allocated(), Bytes{9'999});
  try {
    device->allocate(2_B);
    FAIL() << "allocated more than there is";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "allocating 2 bytes (2 B) of device memory failed: 9999 of its 10000 bytes are in "
                 "use, 1 are free; lower the hbm budget to that");
  }
  device->release(memory);
}

}  // namespace
}  // namespace terrace
