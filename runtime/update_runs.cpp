#include "runtime/update_runs.h"

#include <algorithm>

#include "terrace/adam.h"

namespace terrace {
namespace {

// Multiples of the run length, and wherever a content's home changes.
std::vector<std::uint64_t> boundaries(std::uint64_t segments, const LayerPlacement& where,
                                      std::uint64_t run_segments) {
  std::vector<std::uint64_t> cuts{std::min(where.parameter_dram_segments, segments), segments};
  for (const auto count : where.state_dram_segments) cuts.push_back(std::min(count, segments));
  for (std::uint64_t s = 0; s < segments; s += run_segments) cuts.push_back(s);
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  return cuts;
}

}  // namespace

std::vector<UpdateRun> list_update_runs(const ModelLayout& layout, const LayerSchedule& schedule,
                                        const Placement& placement, std::uint64_t run_segments) {
  std::vector<UpdateRun> runs;
  for (const auto& use : schedule.uses) {
    if (use.phase != Phase::backward) continue;
    const auto cuts = boundaries(layout.block(use.layer).segments, placement[use.layer.value],
                                 run_segments);
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      runs.push_back({use.layer, layout.segment_range(use.layer, cuts[i], cuts[i + 1] - cuts[i])});
    }
  }
  return runs;
}

Bytes update_bytes(const ModelLayout& layout, const UpdateRun& run) {
  std::uint64_t elements = 0;
  for (const auto& tensor : layout.block(run.layer).tensors) {
    const auto first = std::max(tensor.first, run.elements.first);
    const auto end = std::min(tensor.end(), run.elements.end());
    if (first < end) elements += end - first;
  }
  return {elements * adam_bytes_per_element(layout.model().gradient_dtype,
                                            layout.model().parameter_dtype)};
}

}  // namespace terrace
