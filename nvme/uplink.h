// Whether drives hinder each other. Pure functions.
#pragma once

#include <cstddef>
#include <vector>

namespace terrace::bench {

// Two drives (by index), each alone and both at once, in GB/s.
struct PairSpeed {
  std::size_t first = 0;
  std::size_t second = 0;
  double together_gb_s = 0;
};

struct Scaling {
  double alone_gb_s = 0;     // the sum of the drives, each alone
  double together_gb_s = 0;  // all at once
  double share() const { return alone_gb_s > 0 ? together_gb_s / alone_gb_s : 0; }
};

// Drives that share something narrower than their sum.
struct SharedUplink {
  std::vector<std::size_t> drives;
  double gb_s = 0;  // the most that was seen through it
};

inline constexpr double kFreeShare = 0.85;  // of the sum: below it, drives hinder each other

// Groups of drives that are connected by pairs which, at once, reach less than kFreeShare of the
// sum of both alone. `alone` has one speed for each drive.
std::vector<SharedUplink> shared_uplinks(const std::vector<double>& alone,
                                         const std::vector<PairSpeed>& pairs);

}  // namespace terrace::bench
