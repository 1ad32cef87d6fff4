#include "runtime/drive_speeds.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace terrace {

std::vector<double> stripe_speeds(const std::vector<DriveSpeed>& drives) {
  std::vector<double> speeds;
  for (const auto& drive : drives) {
    speeds.push_back(1 / (1 / drive.read_gb_s + 1 / drive.write_gb_s));
  }
  return speeds;
}

void combine(const std::vector<DriveSpeed>& drives, const std::vector<std::uint32_t>& weights,
             Speeds& speeds) {
  if (drives.empty()) return;
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  speeds.nvme_read_gb_s = speeds.nvme_write_gb_s = std::numeric_limits<double>::max();
  for (std::size_t d = 0; d < drives.size(); ++d) {
    const double share = weights[d] / sum;
    speeds.nvme_read_gb_s = std::min(speeds.nvme_read_gb_s, drives[d].read_gb_s / share);
    speeds.nvme_write_gb_s = std::min(speeds.nvme_write_gb_s, drives[d].write_gb_s / share);
  }
}

}  // namespace terrace
