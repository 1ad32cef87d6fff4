// What the pool's workers do: one tile of a run or of a hash job.
#pragma once

#include <cstdint>

#include "terrace/adam.h"

namespace terrace {

// Throws Error(invalid_argument) saying what has no meaning.
void check(const AdamRun& run);
void check(const HashJob& job);

// The bytes that the update of a run moves: adam_bytes_per_element for each updated element.
std::uint64_t updated_bytes(const AdamRun& run);

// Hashes what is wanted of the tile as found, updates its ranges, hashes it as left.
// Thread rule: any thread; different tiles at the same time.
void update_tile(const AdamScalars& scalars, const AdamRun& run, std::uint64_t tile);
void hash_tile(const HashJob& job, std::uint64_t tile);

}  // namespace terrace
