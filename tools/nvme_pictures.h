// Pictures in characters.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tools/nvme_result.h"

namespace terrace::cli {

// Block × depth of the sweep in GB/s, the recommended cell in brackets; empty without a sweep.
std::string heat_map(const DriveResult& drive, bench::Pattern pattern, bool color);

// Latencies of the read and the overwrite pattern as horizontal bars over logarithmic buckets.
std::string latency_picture(const DriveResult& drive);

// One line of block characters, from zero to the highest value.
std::string sparkline(const std::vector<double>& values);

// What heat maps and histograms of every kind are drawn from.
struct HeatMap {
  std::vector<std::uint64_t> blocks;
  std::vector<std::uint32_t> depths;
  std::vector<const CellResult*> cells;  // row by row (block), null where nothing was measured
  double most_gb_s = 0;
};
HeatMap heat_map_of(const DriveResult& drive, bench::Pattern pattern);

struct LatencyBar {
  double from_us = 0;
  double to_us = 0;
  double share = 0;  // of the operations
};
// At most `most` bars between the shortest and the longest latency, equal on a logarithmic scale.
std::vector<LatencyBar> latency_bars(const bench::LatencyHistogram& latency, int most);

}  // namespace terrace::cli
