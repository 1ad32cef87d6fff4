// What an engine asks of its tiers and its store, from its configuration and plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nvme/store_files.h"
#include "runtime/drive_speeds.h"
#include "runtime/planner.h"
#include "terrace/config.h"
#include "terrace/forecast.h"
#include "tiers/block_layout.h"

namespace terrace {

// Throws Error(invalid_argument) for settings that contradict one another.
void check_config(const Config& config);

// What the directories have free for a store that is dealt out by these weights, and what one that
// lies there takes: it is continued, dealt as it is, or goes before a new one is made. Throws
// Error(io) for a directory that cannot be used.
Bytes free_on_drives(const std::vector<NvmeConfig>& drives,
                     const std::vector<std::uint32_t>& weights, StoreMode mode);

// What a plan that did not fit is to say about the drives: what is free on each.
std::string free_text(const std::vector<NvmeConfig>& drives);

DurabilityInput durability_of(const Config& config, const std::vector<DriveSpeed>& drives);

// The store of a plan. `layout` and `map` must outlive the options.
StoreOptions store_options(const Config& config, const ModelLayout& layout, const MemoryMap& map,
                           const std::vector<DriveSpeed>& drives);

}  // namespace terrace
