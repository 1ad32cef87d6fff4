#include "tiers/topology.h"

#include <hwloc.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "terrace/error.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  while (!line.empty() && (line.back() == ' ' || line.back() == '\n')) line.pop_back();
  return line;
}

// "always [madvise] never" → "madvise"
std::string chosen(const std::string& line) {
  const auto open = line.find('[');
  const auto close = line.find(']');
  if (open == std::string::npos || close == std::string::npos) return line;
  return line.substr(open + 1, close - open - 1);
}

std::optional<Bytes> limit_in(const fs::path& path) {
  const auto line = first_line(path);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value);
  if (error != std::errc{} || end != line.data() + line.size()) return std::nullopt;
  constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60;  // how version 1 says "unlimited"
  if (value >= kNoLimit) return std::nullopt;
  return Bytes{value};
}

// The smallest memory limit on the way from this process's control group to the root.
std::optional<Bytes> control_group_limit() {
  std::optional<Bytes> least;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const auto controllers = line.substr(first + 1, second - first - 1);
    const bool unified = controllers.empty();
    if (!unified && controllers.find("memory") == std::string::npos) continue;
    const fs::path root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    const char* name = unified ? "memory.max" : "memory.limit_in_bytes";
    for (fs::path group = line.substr(second + 1);; group = group.parent_path()) {
      if (const auto limit = limit_in(root / group.relative_path() / name)) {
        least = std::min(least.value_or(*limit), *limit);
      }
      if (!group.has_relative_path()) break;
    }
  }
  return least;
}

std::string file_system_name(long magic) {
  switch (static_cast<unsigned long>(magic)) {
    case 0xEF53: return "ext4";
    case 0x58465342: return "xfs";
    case 0x9123683E: return "btrfs";
    case 0x01021994: return "tmpfs";
    case 0x794C7630: return "overlay";
    case 0x6969: return "nfs";
    case 0x2FC12FC1: return "zfs";
    case 0xF2F52010: return "f2fs";
    case 0x65735546: return "fuse";
    default: return "";
  }
}

struct TopologyDeleter {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};

}  // namespace

Topology detect_topology() {
  Topology result;
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) == 0 && hwloc_topology_load(raw) == 0) {
    const std::unique_ptr<hwloc_topology, TopologyDeleter> topology(raw);
    result.numa_nodes = std::max(1, hwloc_get_nbobjs_by_type(raw, HWLOC_OBJ_NUMANODE));
    if (const auto* root = hwloc_get_root_obj(raw)) result.memory = {root->total_memory};
    for (const auto type : {HWLOC_OBJ_L3CACHE, HWLOC_OBJ_L2CACHE}) {
      const auto* cache = hwloc_get_obj_by_type(raw, type, 0);
      if (cache != nullptr && result.last_level_cache.count == 0) {
        result.last_level_cache = {cache->attr->cache.size};
      }
    }
    const std::unique_ptr<hwloc_bitmap_s, void (*)(hwloc_bitmap_t)> set(hwloc_bitmap_alloc(),
                                                                         hwloc_bitmap_free);
    if (hwloc_get_cpubind(raw, set.get(), HWLOC_CPUBIND_PROCESS) == 0) {
      result.cores = std::max(1, hwloc_bitmap_weight(set.get()));
    }
  }
  if (result.memory.count == 0) {
    result.memory = {static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                     static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))};
  }
  result.memory_limit = control_group_limit();
  if (result.memory_limit) result.memory = std::min(result.memory, *result.memory_limit);
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    result.memlock = Bytes{limit.rlim_cur};
  }
  result.huge_pages = chosen(first_line("/sys/kernel/mm/transparent_hugepage/enabled"));
  return result;
}

DriveFacts drive_facts(const std::string& directory) {
  struct stat status {};
  struct statfs space {};
  if (::stat(directory.c_str(), &status) != 0 || ::statfs(directory.c_str(), &space) != 0) {
    throw Error(ErrorCode::io, "the directory " + directory + " cannot be used: " +
                                   std::strerror(errno) + "; create it or name another one");
  }
  DriveFacts facts;
  facts.file_system = file_system_name(static_cast<long>(space.f_type));
  facts.free = {space.f_bavail * static_cast<std::uint64_t>(space.f_bsize)};
  facts.size = {space.f_blocks * static_cast<std::uint64_t>(space.f_bsize)};
  std::error_code error;
  const fs::path link = "/sys/dev/block/" + std::to_string(major(status.st_dev)) + ":" +
                        std::to_string(minor(status.st_dev));
  fs::path block = fs::canonical(link, error);
  if (error) return facts;
  if (fs::exists(block / "partition", error)) block = block.parent_path();
  facts.device = block.filename().string();
  facts.model = first_line(block / "device/model");
  facts.scheduler = chosen(first_line(block / "queue/scheduler"));
  const auto rotational = first_line(block / "queue/rotational");
  if (!rotational.empty()) facts.rotational = rotational == "1";
  return facts;
}

}  // namespace terrace
