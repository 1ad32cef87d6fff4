// Where a sustained write becomes slower: the end of a drive's fast cache. Pure functions.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "nvme/load_runner.h"

namespace terrace::bench {

struct Cliff {
  bool found = false;
  std::uint64_t at_bytes = 0;  // written at the old speed
  double before_gb_s = 0;      // the median speed until there
  double after_gb_s = 0;       // the mean speed from there on: what remains
  double mean_gb_s = 0;        // of the whole, the cliff or not
  std::uint64_t written_bytes = 0;
};

// The one point that best splits the timeline into a faster and a slower part. It counts as a cliff
// when the part after it is slower by a fifth at least, by more than three times what the speed
// varies by chance on either side, and lasts a tenth of the time at least.
Cliff find_cliff(std::span<const TimelinePoint> timeline);

// Speeds between the points, for a picture: at most `most` values in GB/s over equal times.
std::vector<double> speeds_of(std::span<const TimelinePoint> timeline, std::size_t most);

}  // namespace terrace::bench
