// What this machine has.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "terrace/types.h"

namespace terrace {

struct Topology {
  int cores = 1;                     // that this process may use
  int numa_nodes = 1;
  Bytes memory;                      // physical, or the control group's limit when that is less
  std::optional<Bytes> memory_limit; // of the control group, when there is one
  Bytes last_level_cache;
  std::optional<Bytes> memlock;      // RLIMIT_MEMLOCK; absent: unlimited
  std::string huge_pages;            // "always", "madvise", "never", or "" when unknown
};

Topology detect_topology();

// What the system tells of the drive behind a directory; empty or 0 where it does not.
struct DriveFacts {
  std::string file_system;  // "ext4", "xfs", "tmpfs", ...
  std::string device;       // "nvme0n1"
  std::string model;
  std::string scheduler;
  std::optional<bool> rotational;
  Bytes free;
  Bytes size;
};

// Throws Error(io) when the directory does not exist.
DriveFacts drive_facts(const std::string& directory);

}  // namespace terrace
