// The devices under contract, and what their tests share. A new one joins device_kinds().
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "terrace/device.h"

namespace terrace {

inline constexpr Bytes kDeviceMemory = 4_MiB;
inline constexpr StreamId kStreams[] = {kHostToDeviceStream, kDeviceToHostStream, kComputeStream};

struct DeviceKind {
  std::string name;
  std::unique_ptr<Device> (*make)();
  Throttle throttle;         // of the copy streams; what the timing tests may count on
  bool host_functions;       // launch() works and may touch device memory
};

inline EmulatedDeviceOptions emulated_options(Throttle throttle) {
  EmulatedDeviceOptions options;
  options.memory = kDeviceMemory;
  options.host_to_device = throttle;
  options.device_to_host = throttle;
  return options;
}

inline constexpr Throttle kDeviceThrottle{.gb_s = 0.5, .latency_us = 20};

inline std::vector<DeviceKind> device_kinds() {
  return {
      {"emulated", [] { return make_emulated_device(emulated_options({})); }, {}, true},
      {"emulated_throttled",
       [] { return make_emulated_device(emulated_options(kDeviceThrottle)); }, kDeviceThrottle,
       true},
  };
}

inline std::string device_name(const testing::TestParamInfo<DeviceKind>& info) {
  return info.param.name;
}

// Host memory that is pinned while it lives. Neighbours of a page are never shared.
class Pinned {
 public:
  Pinned(Device& device, std::size_t size) : device_(device), bytes_(size + 2 * kPage) {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    span_ = std::span(bytes_).subspan(round_up(address, kPage) - address, size);
    device_.pin(span_);
  }
  ~Pinned() { device_.unpin(span_); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  std::byte* data() const { return span_.data(); }
  std::span<std::byte> span() const { return span_; }

 private:
  static constexpr std::uint64_t kPage = 4096;
  Device& device_;
  std::vector<std::byte> bytes_;
  std::span<std::byte> span_;
};

inline void fill(std::span<std::byte> bytes, unsigned seed) {
  std::mt19937 random(seed);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
}

class DeviceContract : public testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override { device_ = GetParam().make(); }

  // Everything that completes until all streams are empty, by ticket; each ticket once.
  std::map<std::uint64_t, Completion> drain() {
    for (const auto stream : kStreams) device_->synchronize(stream);
    std::vector<Completion> polled;
    const auto count = device_->poll(polled);
    EXPECT_EQ(count, polled.size());
    std::map<std::uint64_t, Completion> result;
    for (const auto& completion : polled) {
      EXPECT_TRUE(result.emplace(completion.ticket.value, completion).second)
          << "ticket " << completion.ticket.value << " completed twice";
      EXPECT_LE(completion.start, completion.end);
    }
    polled.clear();
    EXPECT_EQ(device_->poll(polled), 0u);
    return result;
  }

  void copy(StreamId stream, std::uint64_t ticket, std::byte* to, const std::byte* from,
            std::size_t size) {
    device_->copy(stream, {{ticket}, to, from, {size}});
  }

  std::unique_ptr<Device> device_;
};

}  // namespace terrace
