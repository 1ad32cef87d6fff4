#include "tiers/topology.h"

#include <hwloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <memory>
#include <sstream>
#include <string_view>
#include <utility>

#include "terrace/error.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  while (!line.empty() && line.back() == ' ') line.pop_back();  // names are padded with spaces
  return line;
}

// "always [madvise] never" → "madvise"
std::string chosen(const std::string& line) {
  const auto open = line.find('[');
  const auto close = line.find(']');
  if (open == std::string::npos || close == std::string::npos) return line;
  return line.substr(open + 1, close - open - 1);
}

// Nothing for a missing file and for "max".
std::optional<std::uint64_t> number_in(const fs::path& path) {
  const auto line = first_line(path);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value);
  if (error != std::errc{} || end != line.data() + line.size()) return std::nullopt;
  return value;
}

// The sum of the values of all lines "key value" or "key: value" with one of these keys.
using Keys = std::initializer_list<std::string_view>;
std::optional<std::uint64_t> sum_in(const fs::path& path, Keys keys) {
  std::ifstream file(path);
  std::optional<std::uint64_t> sum;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    std::uint64_t value = 0;
    if (!(words >> key >> value)) continue;
    if (std::ranges::find(keys, key) != keys.end()) sum = sum.value_or(0) + value;
  }
  return sum;
}

// Whether "cpu,memory" has the memory controller in it.
bool names_memory(const std::string& controllers) {
  std::istringstream names(controllers);
  for (std::string name; std::getline(names, name, ',');) {
    if (name == "memory") return true;
  }
  return false;
}

void lower_to(std::optional<Bytes>& least, Bytes value) {
  least = std::min(least.value_or(value), value);
}

// One group of either version of the memory controller.
void add_group(ControlGroupMemory& memory, const fs::path& group, bool version2) {
  constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60;  // how version 1 says "unlimited"
  const auto limit = number_in(group / (version2 ? "memory.max" : "memory.limit_in_bytes"));
  if (!limit || *limit >= kNoLimit) return;
  lower_to(memory.limit, {*limit});
  const auto usage = number_in(group / (version2 ? "memory.current" : "memory.usage_in_bytes"));
  if (!usage) return;
  const auto cache = sum_in(group / "memory.stat",
                            version2 ? Keys{"active_file", "inactive_file"}
                                     : Keys{"total_active_file", "total_inactive_file"});
  const auto held = *usage - std::min(*usage, cache.value_or(0));
  lower_to(memory.available, {*limit - std::min(*limit, held)});
}

struct TopologyDeleter {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};
struct BitmapDeleter {
  void operator()(hwloc_bitmap_s* bitmap) const { hwloc_bitmap_free(bitmap); }
};

void add_nodes(hwloc_topology_t topology, hwloc_const_cpuset_t usable, Topology& result) {
  const std::unique_ptr<hwloc_bitmap_s, BitmapDeleter> own(hwloc_bitmap_alloc());
  hwloc_obj_t node = nullptr;
  while ((node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != nullptr) {
    NumaNode found{static_cast<int>(node->os_index), {}, {node->attr->numanode.local_memory}};
    hwloc_bitmap_and(own.get(), node->cpuset, usable);
    for (int cpu = hwloc_bitmap_first(own.get()); cpu >= 0;
         cpu = hwloc_bitmap_next(own.get(), cpu)) {
      found.cpus.push_back(cpu);
    }
    if (!found.cpus.empty()) result.numa_nodes.push_back(std::move(found));
  }
}

void add_hardware(Topology& result, const std::string& synthetic) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return;
  const std::unique_ptr<hwloc_topology, TopologyDeleter> topology(raw);
  if (!synthetic.empty() && hwloc_topology_set_synthetic(raw, synthetic.c_str()) != 0) return;
  if (hwloc_topology_load(raw) != 0) return;
  result.memory = {hwloc_get_root_obj(raw)->total_memory};
  for (const auto type : {HWLOC_OBJ_L3CACHE, HWLOC_OBJ_L2CACHE}) {
    const auto* cache = hwloc_get_obj_by_type(raw, type, 0);
    if (cache == nullptr) continue;
    result.last_level_cache = {cache->attr->cache.size};
    result.last_level_caches = hwloc_get_nbobjs_by_type(raw, type);
    break;
  }
  const std::unique_ptr<hwloc_bitmap_s, BitmapDeleter> cores(hwloc_bitmap_alloc());
  if (!synthetic.empty() ||
      hwloc_get_cpubind(raw, cores.get(), HWLOC_CPUBIND_PROCESS) != 0) {
    hwloc_bitmap_copy(cores.get(), hwloc_topology_get_allowed_cpuset(raw));
  }
  result.cores = std::max(1, hwloc_bitmap_weight(cores.get()));
  add_nodes(raw, cores.get(), result);
}

}  // namespace

NumaHome numa_home(const Topology& topology, std::optional<int> node, int rank, int ranks) {
  const auto& nodes = topology.numa_nodes;
  if (node) {
    std::string known;
    for (const auto& other : nodes) {
      if (other.number == *node) return {other.cpus, ranks};
      known += (known.empty() ? "" : ", ") + std::to_string(other.number);
    }
    throw Error(ErrorCode::invalid_argument,
                "NUMA node " + std::to_string(*node) + " has no CPU for this process; " +
                    (known.empty() ? "the system tells of none" : "there are " + known));
  }
  const int count = static_cast<int>(nodes.size());
  if (ranks <= 1 || count <= 1) return {{}, ranks};
  const auto node_of = [&](int r) { return r * count / ranks; };
  NumaHome home{nodes[static_cast<std::size_t>(node_of(rank))].cpus, 0};
  for (int r = 0; r < ranks; ++r) home.ranks += node_of(r) == node_of(rank) ? 1 : 0;
  return home;
}

Topology detect_topology(const std::string& root, const std::string& synthetic) {
  Topology result;
  add_hardware(result, synthetic);
  // The topology library may miss memory that was added while the machine ran.
  const Bytes pages{static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                    static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))};
  result.memory = std::max(result.memory, pages);
  result.memory_limit = control_group_memory(root).limit;
  if (result.memory_limit) result.memory = std::min(result.memory, *result.memory_limit);
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    result.memlock = Bytes{limit.rlim_cur};
  }
  result.huge_pages = chosen(first_line(root + "/sys/kernel/mm/transparent_hugepage/enabled"));
  return result;
}

// Lines of /proc/self/cgroup: "4:memory:/a/b" (version 1), "0::/a/b" (version 2). In a container
// the path may be the host's, of which only the root is visible.
ControlGroupMemory control_group_memory(const std::string& root) {
  ControlGroupMemory memory;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const auto controllers = line.substr(first + 1, second - first - 1);
    const bool version2 = controllers.empty();
    if (!version2 && !names_memory(controllers)) continue;
    const fs::path mount = root + (version2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    for (fs::path group = line.substr(second + 1);; group = group.parent_path()) {
      add_group(memory, mount / group.relative_path(), version2);
      if (!group.has_relative_path()) break;
    }
  }
  return memory;
}

std::optional<Bytes> available_memory(const std::string& root) {
  constexpr std::uint64_t kKiB = 1024;
  auto available = control_group_memory(root).available;
  const auto machine = sum_in(root + "/proc/meminfo", {"MemAvailable:"});
  if (machine) lower_to(available, {*machine * kKiB});
  return available;
}

}  // namespace terrace
