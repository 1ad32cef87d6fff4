#include "nvme/uplink.h"

#include <algorithm>
#include <numeric>

namespace terrace::bench {

std::vector<SharedUplink> shared_uplinks(const std::vector<double>& alone,
                                         const std::vector<PairSpeed>& pairs) {
  std::vector<std::size_t> group(alone.size());
  std::iota(group.begin(), group.end(), std::size_t{0});
  std::vector<PairSpeed> hindered;
  for (const auto& pair : pairs) {
    if (pair.together_gb_s >= kFreeShare * (alone[pair.first] + alone[pair.second])) continue;
    hindered.push_back(pair);
    const auto from = group[pair.second];
    std::ranges::replace(group, from, group[pair.first]);
  }
  std::vector<SharedUplink> result;
  for (std::size_t id = 0; id < alone.size(); ++id) {
    SharedUplink uplink;
    for (std::size_t i = 0; i < alone.size(); ++i) {
      if (group[i] == id) uplink.drives.push_back(i);
    }
    if (uplink.drives.size() < 2) continue;
    for (const auto& pair : hindered) {
      if (group[pair.first] == id) uplink.gb_s = std::max(uplink.gb_s, pair.together_gb_s);
    }
    result.push_back(std::move(uplink));
  }
  return result;
}

}  // namespace terrace::bench
