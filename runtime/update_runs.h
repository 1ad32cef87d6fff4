// The optimizer's units of work: runs of a block's segments whose homes do not change inside.
#pragma once

#include <vector>

#include "runtime/placement.h"
#include "runtime/schedule.h"
#include "runtime/step_plan.h"
#include "tiers/block_layout.h"

namespace terrace {

struct UpdateRun {
  LayerId layer;
  ElementRange elements;
  Extent set{};  // DRAM for the contents that do not live there; filled by the plan builder
};

// By layer, in the order in which `schedule` makes them: pending ones as forward goes, others as
// backward makes their gradients. At most `run_segments` segments each, cut
// where the home of any content changes.
std::vector<UpdateRun> list_update_runs(const ModelLayout& layout, const LayerSchedule& schedule,
                                        const Placement& placement, std::uint64_t run_segments);

// Padding between tensors apart.
std::uint64_t updated_elements(const ModelLayout& layout, const UpdateRun& run);
// Bytes that updating a run moves, with gradients of this dtype; the optimizer skips the padding
// between tensors.
Bytes update_bytes(const ModelLayout& layout, const UpdateRun& run, DType gradient);

}  // namespace terrace
