// How a run keeps its promise about time.
#pragma once

#include <algorithm>
#include <utility>

#include "terrace/clock.h"

namespace terrace::bench {

// Shares what is left of a time among phases by weight, in the order in which they come; what one
// does not use falls to those after it.
class TimePlan {
 public:
  // `weights`: the sum of those of all phases.
  TimePlan(Nanoseconds begin, Nanoseconds length, double weights)
      : end_(begin + length), weights_(weights) {}
  // When the next phase, of this weight, must end. Call at its beginning.
  Nanoseconds deadline(Nanoseconds now, double weight) {
    const auto left = std::max(Nanoseconds{0}, end_ - now);
    const double share = weights_ > 0 ? std::min(1.0, weight / weights_) : 1.0;
    weights_ = std::max(0.0, weights_ - weight);
    return now + from_seconds(to_seconds(left) * share);
  }
  // A phase that is left out.
  void drop(double weight) { weights_ = std::max(0.0, weights_ - weight); }
  Nanoseconds end() const { return end_; }

 private:
  Nanoseconds end_;
  double weights_;
};

}  // namespace terrace::bench
