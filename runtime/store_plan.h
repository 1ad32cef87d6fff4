// What a model needs of its store: pure arithmetic between the plan's addresses and the files.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "nvme/store_geometry.h"
#include "runtime/step_plan.h"
#include "tiers/block_layout.h"

namespace terrace {

// Elements that are hashed at a time: about a core's share of its cache, and whole segments.
std::uint64_t tile_elements(const ModelLayout& layout);

// One region for every optimizer state of every layer, at the addresses that assign_homes() gives.
std::vector<StoreRegion> durable_regions(const ModelLayout& layout);
// What else has its home on NVMe, and the transient part behind it.
std::vector<StoreRegion> scratch_regions(const ModelLayout& layout, const MemoryMap& map);

// What the files of the durable part take beyond one copy of it: the second slot, tables, records,
// spares. Weights: of the drives.
Bytes durable_overhead(const ModelLayout& layout, std::span<const std::uint32_t> weights);
// Bytes that a commit writes about itself.
Bytes commit_bytes(const ModelLayout& layout, std::span<const std::uint32_t> weights);

}  // namespace terrace
