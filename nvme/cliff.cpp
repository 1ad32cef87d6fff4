#include "nvme/cliff.h"

#include <algorithm>
#include <cmath>

#include "nvme/drive_statistics.h"

namespace terrace::bench {
namespace {

constexpr std::size_t kBins = 400;
constexpr std::size_t kLeastBins = 20;
constexpr double kLeastDrop = 0.2;
constexpr double kLeastShare = 0.1;  // of the time, on either side
constexpr double kLeastNoises = 3;

// Bytes at a time, linearly between the points.
double bytes_at(std::span<const TimelinePoint> timeline, double seconds) {
  const auto after = std::ranges::lower_bound(timeline, seconds, {}, &TimelinePoint::seconds);
  if (after == timeline.end()) return static_cast<double>(timeline.back().bytes);
  if (after == timeline.begin()) return static_cast<double>(after->bytes);
  const auto before = after - 1;
  const double share = (seconds - before->seconds) / (after->seconds - before->seconds);
  return static_cast<double>(before->bytes) +
         share * static_cast<double>(after->bytes - before->bytes);
}

// The split that leaves the least squared deviation from the means of its two parts.
std::size_t best_split(const std::vector<double>& speeds) {
  std::vector<double> sums(speeds.size() + 1, 0.0);
  for (std::size_t i = 0; i < speeds.size(); ++i) sums[i + 1] = sums[i] + speeds[i];
  const auto n = static_cast<double>(speeds.size());
  std::size_t best = 0;
  double most = -1;
  for (std::size_t i = 1; i < speeds.size(); ++i) {
    const auto left = static_cast<double>(i);
    const double gap = sums[i] / left - (sums.back() - sums[i]) / (n - left);
    const double explained = left * (n - left) / n * gap * gap;
    if (explained > most) most = explained, best = i;
  }
  return best;
}

}  // namespace

std::vector<double> speeds_of(std::span<const TimelinePoint> timeline, std::size_t most) {
  if (timeline.size() < 3) return {};
  const double begin = timeline.front().seconds;
  const double length = timeline.back().seconds - begin;
  const auto bins = std::min(most, timeline.size() - 1);
  const double step = length / static_cast<double>(bins);
  std::vector<double> speeds;
  for (std::size_t i = 0; i < bins && step > 0; ++i) {
    const double at = begin + step * static_cast<double>(i);
    speeds.push_back((bytes_at(timeline, at + step) - bytes_at(timeline, at)) / step * 1e-9);
  }
  return speeds;
}

Cliff find_cliff(std::span<const TimelinePoint> timeline) {
  Cliff cliff;
  if (timeline.size() < 2) return cliff;
  const double length = timeline.back().seconds - timeline.front().seconds;
  cliff.written_bytes = timeline.back().bytes;
  if (length > 0) {
    cliff.mean_gb_s =
        static_cast<double>(timeline.back().bytes - timeline.front().bytes) / length * 1e-9;
  }
  cliff.before_gb_s = cliff.after_gb_s = cliff.mean_gb_s;
  const auto speeds = speeds_of(timeline, kBins);
  if (speeds.size() < kLeastBins) return cliff;
  const auto split = best_split(speeds);
  const std::span<const double> all(speeds);
  const auto before = all.first(split);
  const auto after = all.subspan(split);
  const double share = static_cast<double>(after.size()) / static_cast<double>(all.size());
  if (share < kLeastShare || share > 1 - kLeastShare / 10) return cliff;
  const double high = median(before);
  const double low = median(after);
  const double noise = std::max(quantile(before, 0.75) - quantile(before, 0.25),
                                quantile(after, 0.75) - quantile(after, 0.25)) /
                       std::sqrt(static_cast<double>(std::min(before.size(), after.size())));
  if (low > (1 - kLeastDrop) * high || high - low < kLeastNoises * noise) return cliff;
  const double at = timeline.front().seconds +
                    length * static_cast<double>(split) / static_cast<double>(speeds.size());
  const double bytes = bytes_at(timeline, at);
  cliff.found = true;
  cliff.at_bytes = static_cast<std::uint64_t>(bytes);
  cliff.before_gb_s = high;
  cliff.after_gb_s =
      (static_cast<double>(timeline.back().bytes) - bytes) / (timeline.back().seconds - at) * 1e-9;
  return cliff;
}

}  // namespace terrace::bench
