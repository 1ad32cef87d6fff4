// Which cell to measure next, and which setting to recommend. Pure functions and state; no clock.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "nvme/measured_drive.h"

namespace terrace::bench {

// A cell and what its visits gave.
struct SweepCell {
  Cell cell;
  std::vector<double> gb_s;
  bool skipped = false;  // so deep for so slow a drive that a visit would take too long
};

struct SweepOptions {
  double enough_spread = 0.05;   // a cell that is this steady is not visited again
  std::size_t least_visits = 3;  // before its spread means anything
  std::size_t most_visits = 9;
  double near = 0.85;               // of the pattern's best: cells that decide the recommendation
  double most_queue_seconds = 0.4;  // of work in flight; deeper cells are skipped
};

// Chooses cells in random order: each once, then again those that are not steady yet, the ones near
// the best first and the least visited of them before the others.
// Thread rule: one thread at a time.
class Sweep {
 public:
  Sweep(std::vector<Cell> cells, std::uint64_t seed, SweepOptions options = {});

  // The cell to measure now; absent when all are steady or skipped.
  std::optional<std::size_t> next();
  void add(std::size_t index, double gb_s);
  const std::vector<SweepCell>& cells() const { return cells_; }
  // The best median among the pattern's cells; 0 when none has been visited.
  double best(Pattern pattern) const;
  bool steady(std::size_t index) const;

 private:
  bool too_deep(const Cell& cell) const;
  std::optional<std::size_t> first_visit();

  std::vector<SweepCell> cells_;
  SweepOptions options_;
  std::mt19937_64 random_;
  std::vector<std::size_t> order_;  // of the first visits
  std::size_t at_ = 0;
};

// Every block with every depth for each pattern, as far as `most_bytes` are in flight.
std::vector<Cell> grid(const std::vector<Pattern>& patterns,
                       const std::vector<std::uint64_t>& blocks,
                       const std::vector<std::uint32_t>& depths, std::uint64_t most_bytes);

// The same, thinned until `in_seconds` are enough to visit each cell twice, where one visit takes
// seconds_of(cell): of blocks or depths, whichever are more, every second one goes; the largest
// stay, and two of each at least.
std::vector<Cell> fitting_grid(const std::vector<Pattern>& patterns,
                               std::vector<std::uint64_t> blocks, std::vector<std::uint32_t> depths,
                               std::uint64_t most_bytes,
                               const std::function<double(const Cell&)>& seconds_of,
                               double in_seconds);

// What to recommend, or why nothing can be.
struct Knee {
  bool found = false;
  std::uint64_t block_bytes = 0;
  std::uint32_t depth = 0;
  double share = 0;                    // of the best, in the pattern where it is least
  std::uint64_t best_block_bytes = 0;  // the setting whose share is the highest
  std::uint32_t best_depth = 0;
  double tolerance = 0;  // that was allowed
  double noise = 0;      // the usual spread of a cell that is near the best
  std::string reason;    // why this one
  std::string why_not;   // "too noisy: ..." or "nothing was measured"
};

inline constexpr double kKneeTolerance = 0.05;
inline constexpr double kTooNoisy = 0.20;  // spread of the cells near the best

// The setting with the fewest bytes in flight (of equal ones the shallower) that is within the
// tolerance, or the noise when that is more, of the best in every pattern. The best is the mean of
// the three highest medians, so that one lucky cell does not set the mark.
Knee find_knee(const std::vector<SweepCell>& cells);

}  // namespace terrace::bench
