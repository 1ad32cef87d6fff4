#include "nvme/drive_statistics.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>

namespace terrace::bench {
namespace {

constexpr std::size_t kExactLimit = 20;  // values per side for which rank sums are counted exactly

std::vector<double> sorted(std::span<const double> values) {
  std::vector<double> copy(values.begin(), values.end());
  std::ranges::sort(copy);
  return copy;
}

// P(at most k heads in n fair tosses).
double binomial_tail(std::size_t n, std::size_t k) {
  double term = std::pow(0.5, static_cast<double>(n));
  double sum = term;
  for (std::size_t i = 1; i <= k; ++i) {
    term *= static_cast<double>(n - i + 1) / static_cast<double>(i);
    sum += term;
  }
  return std::min(1.0, sum);
}

// In how many of the pairs (a, b) a < b holds; half for ties.
double wins(std::span<const double> before, std::span<const double> after) {
  double count = 0;
  for (const double a : before) {
    for (const double b : after) count += a < b ? 1.0 : (a > b ? 0.0 : 0.5);
  }
  return count;
}

// P(U ≤ u) when both sets come from one distribution without ties: the number of ways, by the
// recurrence of Mann and Whitney (1947).
double rank_sum_tail(std::size_t n, std::size_t m, double u) {
  const std::size_t most = n * m;
  // ways[j][s]: subsets of j of the first i items with a rank excess of s.
  std::vector<std::vector<double>> ways(n + 1, std::vector<double>(most + 1, 0.0));
  ways[0][0] = 1;
  for (std::size_t i = 0; i < n + m; ++i) {
    for (std::size_t j = std::min(n, i + 1); j > 0; --j) {
      const std::size_t excess = i - (j - 1);  // items of the other set below this one
      if (excess > m) continue;
      for (std::size_t s = most + 1; s-- > excess;) ways[j][s] += ways[j - 1][s - excess];
    }
  }
  const auto& counts = ways[n];
  const double all = std::accumulate(counts.begin(), counts.end(), 0.0);
  double below = 0;
  for (std::size_t s = 0; s <= most && static_cast<double>(s) <= u; ++s) below += counts[s];
  return below / all;
}

double rank_sum_p(std::span<const double> before, std::span<const double> after) {
  const auto n = before.size();
  const auto m = after.size();
  if (n < 3 || m < 3) return 1;
  const double pairs = static_cast<double>(n * m);
  const double u = wins(before, after);
  const double least = std::min(u, pairs - u);
  if (n <= kExactLimit && m <= kExactLimit) {
    return std::min(1.0, 2 * rank_sum_tail(n, m, std::ceil(least)));
  }
  const double deviation = std::sqrt(pairs * static_cast<double>(n + m + 1) / 12);
  const double z = std::max(0.0, pairs / 2 - least - 0.5) / deviation;
  return std::erfc(z / std::sqrt(2.0));
}

}  // namespace

double quantile(std::span<const double> values, double q) {
  if (values.empty()) return 0;
  const auto order = sorted(values);
  const double place = std::clamp(q, 0.0, 1.0) * static_cast<double>(order.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const auto above = std::min(below + 1, order.size() - 1);
  return order[below] + (place - static_cast<double>(below)) * (order[above] - order[below]);
}

double median(std::span<const double> values) { return quantile(values, 0.5); }

std::optional<double> spread(std::span<const double> values) {
  const double middle = median(values);
  if (values.size() < 2 || middle == 0) return std::nullopt;
  return (quantile(values, 0.75) - quantile(values, 0.25)) / middle;
}

Interval median_interval(std::span<const double> values, double confidence) {
  if (values.empty()) return {};
  const auto order = sorted(values);
  const auto n = order.size();
  const auto covered = [n](std::size_t cut) { return 1 - 2 * binomial_tail(n, cut); };
  std::size_t cut = 0;  // values left out at each end
  while (2 * (cut + 2) <= n && covered(cut + 1) >= confidence) ++cut;
  return {order[cut], order[n - 1 - cut], std::max(0.0, covered(cut))};
}

PairedRatio compare_pairs(std::span<const double> first, std::span<const double> second) {
  PairedRatio result;
  for (std::size_t i = 0; i < std::min(first.size(), second.size()); ++i) {
    if (second[i] > 0) result.ratios.push_back(first[i] / second[i]);
  }
  result.ratio = median(result.ratios);
  result.interval = median_interval(result.ratios);
  result.too_noisy = result.ratios.size() < kLeastPairs || result.interval.width() > kNoisyWidth;
  return result;
}

Change compare_sets(std::span<const double> before, std::span<const double> after) {
  Change change;
  const double base = median(before);
  if (base > 0 && !after.empty()) change.ratio = median(after) / base;
  change.noise = std::max(spread(before).value_or(1), spread(after).value_or(1));
  change.p_value = rank_sum_p(before, after);
  return change;
}

std::vector<bool> significant(std::span<const double> p_values, double alpha) {
  std::vector<std::size_t> order(p_values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t i) { return p_values[i]; });
  std::vector<bool> result(p_values.size(), false);
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (p_values[order[i]] > alpha / static_cast<double>(order.size() - i)) break;
    result[order[i]] = true;
  }
  return result;
}

}  // namespace terrace::bench
