#include "tiers/topology.h"

#include <gtest/gtest.h>
#include <thread>

#include "tests/unit/fake_root.h"

namespace terrace {
namespace {

TEST(Topology, OfThisMachine) {
  const auto topology = detect_topology();
  EXPECT_GE(topology.cores, 1);
  EXPECT_LE(topology.cores, static_cast<int>(std::thread::hardware_concurrency()));
  EXPECT_GE(topology.numa_nodes, 1);
  EXPECT_GT(topology.memory, 64_MiB);
  if (topology.memory_limit) {
    EXPECT_LE(topology.memory, *topology.memory_limit);
  }
  const auto available = available_memory();
  ASSERT_TRUE(available);
  EXPECT_GT(*available, 0_B);
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
