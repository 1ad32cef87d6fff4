// Whether a drive was measured, or only something that looks like one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nvme/measure_counters.h"

namespace terrace::bench {

// How a file lies on its drive.
struct Extents {
  bool known = false;          // the file system tells (FIEMAP)
  std::uint64_t written = 0;   // bytes that were written and are on the drive
  std::uint64_t reserved = 0;  // bytes that were preallocated: read as zeros without the drive
  std::uint64_t packed = 0;    // bytes inside metadata, compressed, or not yet placed
  std::uint64_t holes = 0;     // bytes of [0, size) that do not exist
};
// Of the first `bytes` of the file at `path`. Throws Error(io) when it cannot be opened.
Extents file_extents(const std::string& path, std::uint64_t bytes);

// Bytes of the first `bytes` of the file that are in the page cache: cachestat, or mincore on
// kernels before 6.5. Absent when neither works. Throws Error(io) when it cannot be opened.
std::optional<std::uint64_t> cached_bytes(const std::string& path, std::uint64_t bytes);

// Why a result does not count. `kind` is one word for scripts.
struct Refusal {
  std::string kind;    // "memory", "cached", "sparse", "preallocated", "not_direct", ...
  std::string reason;  // a sentence with the numbers and what helps
};

// Any of them absent: nothing against it.
std::optional<Refusal> refuse_extents(const Extents& extents, std::uint64_t bytes);
std::optional<Refusal> refuse_cached(std::optional<std::uint64_t> cached, std::uint64_t bytes);

// Claimed bytes against what the kernel counted on the drive (or, where that is unknown, for this
// process). Others may have moved more; less means that the drive did not serve what was claimed.
struct Moved {
  MovedBytes claimed;
  std::optional<MovedBytes> drive;
  std::optional<MovedBytes> process;
};
std::optional<Refusal> refuse_counters(const Moved& moved);

// A speed above what the link can carry. Absent ceiling: unknown.
std::optional<Refusal> refuse_ceiling(double gb_s, std::optional<double> ceiling_gb_s);

}  // namespace terrace::bench
