// The emulated speed of a resource: bytes per second and a latency per operation.
#pragma once

#include <algorithm>
#include <cstdint>

#include "terrace/clock.h"

namespace terrace {

// An upper bound on a resource's speed. 0 means unbounded.
struct Throttle {
  double gb_s = 0;        // 10^9 bytes per second
  double latency_us = 0;  // added to every operation

  constexpr bool active() const { return gb_s > 0 || latency_us > 0; }
  // Seconds that `bytes` take.
  constexpr double seconds(std::uint64_t bytes) const {
    return latency_us * 1e-6 + (gb_s > 0 ? static_cast<double>(bytes) / (gb_s * 1e9) : 0.0);
  }
};

// Turns a throttle into absolute deadlines for operations served one after the other, so that a
// late wake-up is made up by the next operation and the average rate is exact.
// Thread rule: one thread at a time.
class Pacer {
 public:
  explicit Pacer(Throttle throttle) : throttle_(throttle) {}

  struct Slot {
    Nanoseconds start;  // when the resource turns to this operation
    Nanoseconds end;    // the earliest time at which it may complete
  };

  // Reserves the resource for `bytes`, asked for at `now`.
  Slot reserve(Nanoseconds now, std::uint64_t bytes) {
    const Nanoseconds start = std::max(now, free_at_);
    free_at_ = start + from_seconds(throttle_.seconds(bytes));
    return {start, free_at_};
  }

  bool active() const { return throttle_.active(); }

 private:
  Throttle throttle_;
  Nanoseconds free_at_{0};
};

}  // namespace terrace
