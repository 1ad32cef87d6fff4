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
  const auto count = static_cast<std::uint32_t>(layout.layers());
  for (std::uint32_t i = 0; i < count; ++i) {
    const bool forward = schedule.update_time == UpdateTime::deferred;
    const LayerId layer{forward ? i : count - 1 - i};
    const auto cuts =
        boundaries(layout.block(layer).segments, placement[layer.value], run_segments);
    for (std::size_t cut = 0; cut + 1 < cuts.size(); ++cut) {
      runs.push_back({layer, layout.segment_range(layer, cuts[cut], cuts[cut + 1] - cuts[cut])});
    }
  }
  return runs;
}

std::uint64_t updated_elements(const ModelLayout& layout, const UpdateRun& run) {
  std::uint64_t elements = 0;
  for (const auto& tensor : layout.block(run.layer).tensors) {
    const auto first = std::max(tensor.first, run.elements.first);
    const auto end = std::min(tensor.end(), run.elements.end());
    if (first < end) elements += end - first;
  }
  return elements;
}

Bytes update_bytes(const ModelLayout& layout, const UpdateRun& run, DType gradient) {
  return {updated_elements(layout, run) *
          adam_bytes_per_element(gradient, layout.model().parameter_dtype)};
}

}  // namespace terrace
