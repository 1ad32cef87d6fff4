// From a schedule, a placement and a shape to the operations of a step, with an address for every
// buffer. The only place that knows how a layer is fetched, saved and updated.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "runtime/placement.h"
#include "runtime/schedule.h"
#include "runtime/step_plan.h"

namespace terrace {

// How far the lanes may run apart. Larger values need more buffers; all zero (and one segment, one
// update) is the serial step, which needs the least memory that any step can do with.
struct PlanShape {
  std::uint32_t prefetch_uses = 0;    // layers fetched to HBM ahead of use
  std::uint32_t drain_lag = 0;        // uses computed before a use's gradients have left HBM
  std::uint64_t run_segments = 1;     // segments in one transfer and in one update
  std::uint32_t staging_window = 0;   // DRAM buffers on the way to or from NVMe, beyond one
  std::uint32_t update_window = 1;    // runs whose state is read ahead or not yet written
  std::uint32_t gradient_window = 0;  // runs of gradients in DRAM, beyond one
  friend bool operator==(const PlanShape&, const PlanShape&) = default;
};

using ContentBytes = std::array<Bytes, kContentCount>;

struct BuildResult {
  std::optional<StepPlan> plan;       // without dependencies; empty: a buffer found no place
  std::size_t operations = 0;         // emitted, up to a failure
  PerTier<Bytes> live_peak{};         // homes and the most bytes of buffers alive at once
  PerTier<Bytes> high_water{};        // the highest address in use: what must be reserved
  // The moment of the HBM peak.
  LayerUse peak_use;
  ContentBytes peak_content{};        // buffers alive then
};

// `map` comes from assign_homes(). Buffers lie in [map.resident, capacity) of each tier.
BuildResult build_plan(const ModelLayout& layout, const LayerSchedule& schedule,
                       const Placement& placement, const MemoryMap& map, const PlanShape& shape,
                       const PerTier<Bytes>& capacity);

}  // namespace terrace
