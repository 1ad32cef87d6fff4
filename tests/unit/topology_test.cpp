#include "tiers/topology.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "terrace/error.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

// A folder that stands for "/" of another machine.
class FakeRoot : public testing::Test {
 protected:
  FakeRoot() {
    root_ = fs::temp_directory_path() / ("terrace_topology_" + std::to_string(::getpid()));
    fs::create_directories(root_);
  }
  ~FakeRoot() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    const fs::path file = root_ / path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text << '\n';
  }
  std::string root() const { return root_.string(); }
  // "8:17": the device that the folder itself is on.
  std::string device_number() const {
    struct stat status {};
    EXPECT_EQ(::stat(root_.c_str(), &status), 0);
    return std::to_string(major(status.st_dev)) + ":" + std::to_string(minor(status.st_dev));
  }

  fs::path root_;
};

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

TEST(DriveFacts, OfThisMachine) {
  const auto facts = drive_facts(fs::temp_directory_path().string());
  EXPECT_FALSE(facts.file_system.empty());
  EXPECT_GT(facts.size, 0_B);
  EXPECT_LE(facts.free, facts.size);
}

TEST(DriveFacts, NamesADirectoryThatIsNotThere) {
  try {
    drive_facts("/no/such/place");
    FAIL() << "accepted a directory that does not exist";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_NE(std::string(error.what()).find("/no/such/place"), std::string::npos);
  }
}

TEST_F(FakeRoot, FindsTheDriveOfAPartition) {
  const std::string drive = "sys/devices/pci/nvme0/nvme0n1/";
  write(drive + "nvme0n1p2/partition", "2");
  write(drive + "device/model", "Fast Drive 2000   ");
  write(drive + "queue/scheduler", "[none] mq-deadline");
  write(drive + "queue/rotational", "0");
  fs::create_directories(root_ / "sys/dev/block");
  fs::create_symlink(root_ / drive / "nvme0n1p2", root_ / "sys/dev/block" / device_number());
  const auto facts = drive_facts(root(), root());
  EXPECT_EQ(facts.device, "nvme0n1");
  EXPECT_EQ(facts.model, "Fast Drive 2000");
  EXPECT_EQ(facts.scheduler, "none");
  EXPECT_EQ(facts.rotational, false);
}

// The longest mount point wins, of equal ones the last; a name that merely begins alike does not.
TEST_F(FakeRoot, FindsTheMount) {
  const fs::path place = root_ / "my drive" / "state";
  fs::create_directories(place);
  const std::string escaped = fs::canonical(root_).string() + "/my\\040drive";
  write("proc/self/mountinfo",
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 0:40 / " + escaped + " rw shared:1 - ext3 /dev/sdb rw\n"
        "3 1 0:41 /sub " + escaped + " rw shared:1 - btrfs /dev/nothing9 rw\n"
        "4 1 0:42 / " + escaped + "/sta rw - xfs /dev/sdd rw\n"
        "5 1 0:43 / /proc rw - proc proc rw");
  write("sys/devices/virtual/nothing9/queue/rotational", "1");
  fs::create_directories(root_ / "sys/class/block");
  fs::create_symlink(root_ / "sys/devices/virtual/nothing9", root_ / "sys/class/block/nothing9");
  const auto facts = drive_facts(place.string(), root());
  EXPECT_EQ(facts.file_system, "btrfs");
  EXPECT_EQ(facts.device, "nothing9");
  EXPECT_EQ(facts.model, "");
  EXPECT_EQ(facts.rotational, true);
  EXPECT_EQ(drive_facts(root(), root()).file_system, "ext4");
}

TEST_F(FakeRoot, LeavesEmptyWhatTheSystemDoesNotTell) {
  const auto facts = drive_facts(root(), root());
  EXPECT_EQ(facts.device + facts.model + facts.scheduler + facts.file_system, "");
  EXPECT_EQ(facts.rotational, std::nullopt);
  EXPECT_GT(facts.size, 0_B);
}

}  // namespace
}  // namespace terrace
