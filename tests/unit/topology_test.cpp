#include "tiers/topology.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "terrace/error.h"
#include "tests/unit/fake_root.h"

namespace terrace {
namespace {

TEST(Topology, OfThisMachine) {
  const auto topology = detect_topology();
  EXPECT_GE(topology.cores, 1);
  EXPECT_LE(topology.cores, static_cast<int>(std::thread::hardware_concurrency()));
  ASSERT_FALSE(topology.numa_nodes.empty());
  EXPECT_FALSE(topology.numa_nodes.front().cpus.empty());
  EXPECT_GT(topology.memory, 64_MiB);
  if (topology.memory_limit) {
    EXPECT_LE(topology.memory, *topology.memory_limit);
  }
  const auto available = available_memory();
  ASSERT_TRUE(available);
  EXPECT_GT(*available, 0_B);
}

std::vector<int> range(int first, int count) {
  std::vector<int> numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

TEST(Numa, NodesOfASyntheticMachine) {
  const auto topology = detect_topology("", "pack:2 numa:2(memory=64GB) core:4 pu:2");
  EXPECT_EQ(topology.cores, 32);
  ASSERT_EQ(topology.numa_nodes.size(), 4U);
  for (int n = 0; n < 4; ++n) {
    const auto& node = topology.numa_nodes[static_cast<std::size_t>(n)];
    EXPECT_EQ(node.number, n);
    EXPECT_EQ(node.cpus, range(8 * n, 8));
    EXPECT_GE(node.memory, 50_GiB);
  }
}

// Ranks are dealt in equal runs; one that is alone takes all.
TEST(Numa, RanksAreAtHomeOnNodes) {
  const auto two = detect_topology("", "numa:2 core:6 pu:1");
  EXPECT_TRUE(numa_home(two, {}, 0, 1).cpus.empty());
  for (int rank = 0; rank < 4; ++rank) {
    const auto home = numa_home(two, {}, rank, 4);
    EXPECT_EQ(home.cpus, range(rank < 2 ? 0 : 6, 6));
    EXPECT_EQ(home.ranks, 2);
  }
  EXPECT_EQ(numa_home(two, {}, 0, 3).ranks, 2);
  EXPECT_EQ(numa_home(two, {}, 2, 3).ranks, 1);
  const auto four = detect_topology("", "numa:4 core:2 pu:1");
  EXPECT_EQ(numa_home(four, {}, 1, 2).cpus, range(4, 2));
  const auto one = detect_topology("", "numa:1 core:8 pu:1");
  EXPECT_TRUE(numa_home(one, {}, 3, 4).cpus.empty());
  EXPECT_EQ(numa_home(one, {}, 3, 4).ranks, 4);
}

TEST(Numa, TheUsersNodeWinsOrIsRefusedByName) {
  const auto topology = detect_topology("", "numa:2 core:3 pu:1");
  EXPECT_EQ(numa_home(topology, 1, 0, 1).cpus, range(3, 3));
  try {
    numa_home(topology, 5, 0, 1);
    FAIL() << "there is no node 5";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("node 5 has no CPU"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("there are 0, 1"), std::string::npos);
  }
}

TEST_F(FakeRoot, WithoutControlGroupsThereIsNoLimit) {
  EXPECT_EQ(control_group_memory(root()).limit, std::nullopt);
  EXPECT_EQ(control_group_memory(root()).available, std::nullopt);
  EXPECT_EQ(available_memory(root()), std::nullopt);
  write("proc/meminfo", "MemTotal:  4000 kB\nMemAvailable:    3000 kB");
  EXPECT_EQ(available_memory(root()), 3000_KiB);
}

TEST_F(FakeRoot, Version2TakesTheSmallestLimitOnTheWayUp) {
  write("proc/self/cgroup", "0::/user/job");
  write("sys/fs/cgroup/user/job/memory.max", "max");
  write("sys/fs/cgroup/user/memory.max", "3000000");
  write("sys/fs/cgroup/user/memory.current", "1000000");
  write("sys/fs/cgroup/user/memory.stat",
        "anon 5\nactive_file 100000\ninactive_file 200000\nfile 9");
  const auto memory = control_group_memory(root());
  EXPECT_EQ(memory.limit, Bytes{3'000'000});
  EXPECT_EQ(memory.available, Bytes{2'300'000});
  write("proc/meminfo", "MemAvailable: 1000 kB");
  EXPECT_EQ(available_memory(root()), 1000_KiB);
  EXPECT_EQ(detect_topology(root()).memory, Bytes{3'000'000});
}

TEST_F(FakeRoot, Version1KnowsUnlimited) {
  write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/box\n0::/");
  write("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "9223372036854771712");
  EXPECT_EQ(control_group_memory(root()).limit, std::nullopt);
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "5000");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "7000");
  write("sys/fs/cgroup/memory/memory.stat", "total_active_file 10\ntotal_inactive_file 20");
  EXPECT_EQ(control_group_memory(root()).limit, Bytes{5'000});
  EXPECT_EQ(control_group_memory(root()).available, 0_B);
}

TEST_F(FakeRoot, OtherControllersDoNotCount) {
  write("proc/self/cgroup", "3:memory_like:/");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "5000");
  EXPECT_EQ(control_group_memory(root()).limit, std::nullopt);
}

TEST_F(FakeRoot, ReadsTheHugePageSetting) {
  write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never");
  EXPECT_EQ(detect_topology(root()).huge_pages, "madvise");
}

}  // namespace
}  // namespace terrace
