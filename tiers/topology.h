// What this machine has, as far as the system tells. Every function may be called from any thread.
//
// `root` stands before every path under /proc and /sys: "" for this machine, a folder of files in
// tests.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "terrace/types.h"

namespace terrace {

// A NUMA node, by the system's number: its memory, and those of its CPUs that this process may use.
struct NumaNode {
  int number = 0;
  std::vector<int> cpus;
  Bytes memory;
};

struct Topology {
  int cores = 1;                     // that this process may use
  std::vector<NumaNode> numa_nodes;  // that have such CPUs
  Bytes memory;                      // physical, or the control group's limit when that is less
  std::optional<Bytes> memory_limit; // of the control group, when there is one
  Bytes last_level_cache;            // one of them; 0 when unknown
  int last_level_caches = 1;
  std::optional<Bytes> memlock;      // RLIMIT_MEMLOCK; absent: unlimited
  std::string huge_pages;            // "always", "madvise", "never", or "" when unknown
};

// `synthetic`: the hardware that hwloc makes of this description, "numa:2 core:4 pu:2", for tests.
Topology detect_topology(const std::string& root = "", const std::string& synthetic = "");

// Where a rank keeps its memory and its workers.
struct NumaHome {
  std::vector<int> cpus;  // of one node; empty: anywhere
  int ranks = 1;          // that share them
};

// `node` is what the user asked for. Otherwise a rank that is alone uses the whole machine, and
// several ranks are dealt to the nodes in equal runs. `rank` counts from 0 on this machine.
// Throws Error(invalid_argument) naming the nodes that there are.
NumaHome numa_home(const Topology& topology, std::optional<int> node, int rank, int ranks);

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
