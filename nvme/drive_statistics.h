// Statistics of repeated measurements on a noisy machine. Pure functions; none assumes a
// distribution. Any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

namespace terrace::bench {

// Between the order statistics, linearly; 0 ≤ q ≤ 1. 0 for no values.
double quantile(std::span<const double> values, double q);
double median(std::span<const double> values);

// The distance of the quartiles over the median: what half of the repeats keep to. Absent for fewer
// than two values or a median of 0.
std::optional<double> spread(std::span<const double> values);

struct Interval {
  double low = 0;
  double high = 0;
  double coverage = 0;  // the probability that the true median lies in it
  double width() const { return high - low; }
  bool contains(double value) const { return low <= value && value <= high; }
};

// The interval of the median from order statistics: the narrowest symmetric one whose coverage is
// at least `confidence`; all values, with the coverage that they have, when there are too few
// (fewer than six for 95 %).
Interval median_interval(std::span<const double> values, double confidence = 0.95);

inline constexpr std::size_t kLeastPairs = 6;  // for an interval of 95 %
inline constexpr double kNoisyWidth = 0.25;    // of an interval of ratios

// Two things measured in turn, pair by pair.
struct PairedRatio {
  double ratio = 0;  // the median of first over second
  Interval interval;
  std::vector<double> ratios;  // of each pair
  bool too_noisy = true;       // fewer than kLeastPairs, or wider than kNoisyWidth
};
// Pairs with a second value of 0 are left out.
PairedRatio compare_pairs(std::span<const double> first, std::span<const double> second);

// Whether two sets of repeats, measured at different times, differ beyond their noise.
struct Change {
  double ratio = 1;    // the median of `after` over that of `before`
  double noise = 0;    // the relative change below which nothing can be said
  double p_value = 1;  // of the rank-sum test; 1 when there are too few values to tell
};
Change compare_sets(std::span<const double> before, std::span<const double> after);

// Which of several tests count at level `alpha` when all are looked at together (Holm).
std::vector<bool> significant(std::span<const double> p_values, double alpha = 0.05);

}  // namespace terrace::bench
