// ZeRO arithmetic: which elements of a block are rank r's.
#pragma once

#include <cstdint>

#include "tiers/block_layout.h"

namespace terrace {

// Cuts `elements` into `ranks` (>= 1) shards of equal size, the last ones shorter or empty: rank r
// owns [r * s, (r + 1) * s) below `elements`, where s = ceil(elements / ranks) rounded up to
// `alignment` elements (>= 1).
ElementRange shard_of(std::uint64_t elements, std::uint32_t ranks, std::uint32_t rank,
                      std::uint64_t alignment = 1);

}  // namespace terrace
