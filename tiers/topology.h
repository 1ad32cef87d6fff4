// What this machine has, as far as the system tells. Every function may be called from any thread.
//
// `root` stands before every path under /proc and /sys: "" for this machine, a folder of files in
// tests.
#pragma once

#include <optional>
#include <string>

#include "terrace/types.h"

namespace terrace {

struct Topology {
  int cores = 1;                     // that this process may use
  int numa_nodes = 1;
  Bytes memory;                      // physical, or the control group's limit when that is less
  std::optional<Bytes> memory_limit; // of the control group, when there is one
  Bytes last_level_cache;            // one of them; 0 when unknown
  int last_level_caches = 1;
  std::optional<Bytes> memlock;      // RLIMIT_MEMLOCK; absent: unlimited
  std::string huge_pages;            // "always", "madvise", "never", or "" when unknown
};

Topology detect_topology(const std::string& root = "");

// The control groups (version 1 or 2) between this process and the root.
struct ControlGroupMemory {
  std::optional<Bytes> limit;      // the smallest; absent: no group has one
  std::optional<Bytes> available;  // the least that a group leaves, file cache counted as free
};

ControlGroupMemory control_group_memory(const std::string& root = "");

// What could be touched now without swapping: what the kernel estimates, or what the control groups
// leave when that is less. Absent when unknown.
std::optional<Bytes> available_memory(const std::string& root = "");

}  // namespace terrace
