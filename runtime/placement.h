// Where every class of every layer lives between uses.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "runtime/step_plan.h"
#include "tiers/block_layout.h"

namespace terrace {

// Segments are placed from the front of a block: the first so many in DRAM, the rest on NVMe.
struct LayerPlacement {
  bool parameter_hbm = false;                 // the whole block; the DRAM count is void then
  std::uint64_t parameter_dram_segments = 0;
  std::array<std::uint64_t, kOptimizerStateCount> state_dram_segments{};  // by kOptimizerStates
  Tier activation = Tier::nvme;
  friend bool operator==(const LayerPlacement&, const LayerPlacement&) = default;
};
using Placement = std::vector<LayerPlacement>;  // by layer

// The placement in which `tier` (dram or nvme) holds everything.
Placement all_on(const ModelLayout& layout, Tier tier);

// Where bytes [offset, offset + size) of a state's block lie in the durable part of NVMe.
Extent durable_extent(const MemoryMap& map, Content state, LayerId layer, Bytes offset,
                      Bytes size);

struct HomeOptions {
  bool durable = false;  // NVMe begins with a place for every optimizer state, whatever its home
  StepForm form;         // deferred updates: gradients have homes in DRAM
};

// Addresses for all homes: fills homes, resident and resident_class, and sets peak to resident.
MemoryMap assign_homes(const ModelLayout& layout, const Placement& placement,
                       const HomeOptions& options);

}  // namespace terrace
