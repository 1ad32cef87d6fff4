// Several drives as one: shares in proportion to speed, and the speed of the whole.
#pragma once

#include <cstdint>
#include <vector>

#include "terrace/forecast.h"

namespace terrace {

// 10^9 bytes per second, positive.
struct DriveSpeed {
  double read_gb_s = Speeds{}.nvme_read_gb_s;
  double write_gb_s = Speeds{}.nvme_write_gb_s;
};

// What each drive does in the time that all together take, when about as much is read as written;
// the input of stripe_weights().
std::vector<double> stripe_speeds(const std::vector<DriveSpeed>& drives);

// Sets the drives' common speeds: the slowest drive for its share decides.
void combine(const std::vector<DriveSpeed>& drives, const std::vector<std::uint32_t>& weights,
             Speeds& speeds);

}  // namespace terrace
