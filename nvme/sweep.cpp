#include "nvme/sweep.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "nvme/drive_statistics.h"

namespace terrace::bench {
namespace {

constexpr std::size_t kTop = 3;  // medians that set the mark

std::uint64_t in_flight(const Cell& cell) { return cell.block_bytes * cell.depth * cell.threads; }

std::vector<Pattern> patterns_of(const std::vector<SweepCell>& cells) {
  std::vector<Pattern> patterns;
  for (const auto& cell : cells) {
    if (!cell.gb_s.empty() && std::ranges::find(patterns, cell.cell.pattern) == patterns.end()) {
      patterns.push_back(cell.cell.pattern);
    }
  }
  return patterns;
}

double mark_of(const std::vector<SweepCell>& cells, Pattern pattern) {
  std::vector<double> medians;
  for (const auto& cell : cells) {
    if (cell.cell.pattern == pattern && !cell.gb_s.empty()) medians.push_back(median(cell.gb_s));
  }
  std::ranges::sort(medians, std::greater<>());
  medians.resize(std::min(kTop, medians.size()));
  return std::accumulate(medians.begin(), medians.end(), 0.0) /
         static_cast<double>(std::max<std::size_t>(1, medians.size()));
}

// The median of the spreads of cells near their pattern's best; absent without repeats.
std::optional<double> noise_of(const std::vector<SweepCell>& cells,
                               const std::map<Pattern, double>& marks) {
  std::vector<double> spreads;
  for (const auto& cell : cells) {
    const auto seen = spread(cell.gb_s);
    const auto mark = marks.find(cell.cell.pattern);
    if (!seen || mark == marks.end() || median(cell.gb_s) < 0.85 * mark->second) continue;
    spreads.push_back(*seen);
  }
  if (spreads.empty()) return std::nullopt;
  return median(spreads);
}

// The setting's share of the best in its worst pattern; 0 where a pattern was not measured.
double share_of(const std::vector<SweepCell>& cells, std::uint64_t block, std::uint32_t depth,
                const std::map<Pattern, double>& marks) {
  double least = std::numeric_limits<double>::max();
  std::size_t found = 0;
  for (const auto& cell : cells) {
    if (cell.cell.block_bytes != block || cell.cell.depth != depth || cell.gb_s.empty()) continue;
    least = std::min(least, median(cell.gb_s) / marks.at(cell.cell.pattern));
    ++found;
  }
  return found == marks.size() ? least : 0;
}

// Every second one, so that the last stays.
template <class T>
void thin(std::vector<T>& values) {
  std::vector<T> kept;
  for (std::size_t i = (values.size() - 1) % 2; i < values.size(); i += 2) {
    kept.push_back(values[i]);
  }
  values = std::move(kept);
}

std::string percent(double share) {
  return std::to_string(static_cast<int>(std::lround(100 * share))) + " %";
}

}  // namespace

Sweep::Sweep(std::vector<Cell> cells, std::uint64_t seed, SweepOptions options)
    : options_(options), random_(seed), order_(cells.size()) {
  for (const auto& cell : cells) cells_.push_back({cell, {}, false});
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  std::ranges::shuffle(order_, random_);
}

double Sweep::best(Pattern pattern) const {
  double result = 0;
  for (const auto& cell : cells_) {
    if (cell.cell.pattern == pattern && !cell.gb_s.empty()) {
      result = std::max(result, median(cell.gb_s));
    }
  }
  return result;
}

bool Sweep::steady(std::size_t index) const {
  const auto& seen = cells_[index].gb_s;
  if (seen.size() >= options_.most_visits) return true;
  return seen.size() >= options_.least_visits && spread(seen).value_or(1) <= options_.enough_spread;
}

// Until a pattern has a speed, only its cells with little in flight are tried.
bool Sweep::too_deep(const Cell& cell) const {
  constexpr double kUnknownGbS = 0.05;
  const double speed = std::max(best(cell.pattern), kUnknownGbS);
  return static_cast<double>(in_flight(cell)) > speed * 1e9 * options_.most_queue_seconds;
}

std::optional<std::size_t> Sweep::first_visit() {
  const auto begin = order_.begin() + static_cast<std::ptrdiff_t>(at_);
  const auto found =
      std::find_if(begin, order_.end(), [&](std::size_t i) { return !too_deep(cells_[i].cell); });
  if (found == order_.end()) {
    for (auto it = begin; it != order_.end(); ++it) cells_[*it].skipped = true;
    at_ = order_.size();
    return std::nullopt;
  }
  std::iter_swap(begin, found);
  return order_[at_++];
}

std::optional<std::size_t> Sweep::next() {
  if (at_ < order_.size()) {
    if (const auto first = first_visit()) return first;
  }
  // (far from the best?, visits, chance): the least is next.
  using Rank = std::tuple<bool, std::size_t, std::uint64_t>;
  std::optional<std::pair<Rank, std::size_t>> least;
  for (std::size_t i = 0; i < cells_.size(); ++i) {
    if (cells_[i].skipped || steady(i)) continue;
    const bool far = median(cells_[i].gb_s) < options_.near * best(cells_[i].cell.pattern);
    const Rank rank{far, cells_[i].gb_s.size(), random_()};
    if (!least || rank < least->first) least = {rank, i};
  }
  if (!least) return std::nullopt;
  return least->second;
}

void Sweep::add(std::size_t index, double gb_s) { cells_[index].gb_s.push_back(gb_s); }

std::vector<Cell> grid(const std::vector<Pattern>& patterns,
                       const std::vector<std::uint64_t>& blocks,
                       const std::vector<std::uint32_t>& depths, std::uint64_t most_bytes) {
  std::vector<Cell> cells;
  for (const auto pattern : patterns) {
    for (const auto block : blocks) {
      for (const auto depth : depths) {
        if (block * depth <= most_bytes) cells.push_back({pattern, block, depth, 1});
      }
    }
  }
  return cells;
}

std::vector<Cell> fitting_grid(const std::vector<Pattern>& patterns,
                               std::vector<std::uint64_t> blocks, std::vector<std::uint32_t> depths,
                               std::uint64_t most_bytes,
                               const std::function<double(const Cell&)>& seconds_of,
                               double in_seconds) {
  constexpr std::size_t kLeast = 2;
  for (;;) {
    auto cells = grid(patterns, blocks, depths, most_bytes);
    double once = 0;
    for (const auto& cell : cells) once += seconds_of(cell);
    if (2 * once <= in_seconds || std::max(blocks.size(), depths.size()) <= kLeast) return cells;
    if (blocks.size() >= depths.size()) {
      thin(blocks);
    } else {
      thin(depths);
    }
  }
}

Knee find_knee(const std::vector<SweepCell>& cells) {
  Knee knee;
  std::map<Pattern, double> marks;
  for (const auto pattern : patterns_of(cells)) marks[pattern] = mark_of(cells, pattern);
  const auto noise = noise_of(cells, marks);
  knee.noise = noise.value_or(0);
  knee.tolerance = std::max(kKneeTolerance, knee.noise);
  if (marks.empty() || !noise) {
    knee.why_not = "no cell was measured twice in the time that there was; give it more";
    return knee;
  }
  if (knee.noise > kTooNoisy) {
    knee.why_not = "too noisy: repeats of one cell differ by " + percent(knee.noise) +
                   " (quartiles), more than what separates the settings";
    return knee;
  }
  std::uint64_t least = ~std::uint64_t{0};
  double most = 0;
  for (const auto& [cell, gb_s, skipped] : cells) {
    const double share = share_of(cells, cell.block_bytes, cell.depth, marks);
    if (share > most) {
      most = share;
      knee.best_block_bytes = cell.block_bytes;
      knee.best_depth = cell.depth;
    }
    if (share < 1 - knee.tolerance) continue;
    const bool better =
        in_flight(cell) < least || (in_flight(cell) == least && cell.depth < knee.depth);
    if (!better) continue;
    least = in_flight(cell);
    knee.found = true;
    knee.block_bytes = cell.block_bytes;
    knee.depth = cell.depth;
    knee.share = share;
  }
  knee.reason =
      "the smallest within " + percent(knee.tolerance) + " of the best for reads and writes alike";
  if (!knee.found) {
    knee.why_not = "no setting is within " + percent(knee.tolerance) +
                   " of the best for reads and writes alike; look at the heat maps";
  }
  return knee;
}

}  // namespace terrace::bench
