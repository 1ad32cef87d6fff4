// Port: time.
#pragma once

#include <chrono>

namespace terrace {

using Nanoseconds = std::chrono::nanoseconds;  // a duration, or a point since the clock's own epoch

constexpr double to_seconds(Nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}
constexpr Nanoseconds from_seconds(double seconds) {
  return std::chrono::duration_cast<Nanoseconds>(std::chrono::duration<double>(seconds));
}

// Thread rule: every call from any thread.
class Clock {
 public:
  virtual ~Clock() = default;
  // Never goes backward.
  virtual Nanoseconds now() const = 0;
  // Returns no earlier than `deadline`; at once when it has passed.
  virtual void sleep_until(Nanoseconds deadline) = 0;
};

// std::chrono::steady_clock. One instance for the process.
Clock& steady_clock();


}  // namespace terrace
