#include "tiers/drive_facts.h"

#include <gtest/gtest.h>

#include "terrace/error.h"
#include "tests/unit/fake_root.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

TEST(DriveFacts, OfThisMachine) {
  const auto facts = drive_facts(fs::temp_directory_path().string());
  EXPECT_FALSE(facts.file_system.empty());
  EXPECT_GT(facts.size, 0_B);
  EXPECT_LE(facts.free, facts.size);
  if (facts.direct_alignment && *facts.direct_alignment > 0) {
    EXPECT_GE(*facts.direct_alignment, 512U);
    EXPECT_EQ(*facts.direct_alignment & (*facts.direct_alignment - 1), 0U) << "a power of two";
  }
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
        "2 1 0:40 / " +
            escaped +
            " rw shared:1 - ext3 /dev/sdb rw\n"
            "3 1 0:41 /sub " +
            escaped +
            " rw shared:1 - btrfs /dev/nothing9 rw\n"
            "4 1 0:42 / " +
            escaped +
            "/sta rw - xfs /dev/sdd rw\n"
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

// A drive with two links above it, behind a switch.
TEST_F(FakeRoot, FindsTheBusTheAgeAndTheTemperature) {
  const std::string port = "sys/devices/pci0000:00/0000:00:01.1/";
  const std::string function = port + "0000:01:00.0/0000:02:04.0/0000:03:00.0/";
  const std::string drive = function + "nvme/nvme3/nvme3n1/";
  write(port + "current_link_speed", "16.0 GT/s PCIe");
  write(port + "current_link_width", "4");
  write(port + "0000:01:00.0/current_link_speed", "Unknown");
  write(port + "0000:01:00.0/current_link_width", "0");
  write(function + "current_link_speed", "32.0 GT/s PCIe");
  write(function + "current_link_width", "4");
  write(function + "numa_node", "1");
  write(drive + "queue/logical_block_size", "512");
  write(drive + "queue/physical_block_size", "4096");
  write(drive + "device/hwmon7/temp1_input", "41850");
  std::string log(512, '\0');
  log[3] = 97;
  log[5] = 12;
  log[48] = 0x10;  // 0x110 data units of 512000 bytes
  log[49] = 0x01;
  log[128] = 77;
  write("dev/nvme3n1.smart_log", log);
  fs::create_directories(root_ / "sys/dev/block");
  fs::create_symlink(root_ / drive, root_ / "sys/dev/block" / device_number());
  const auto facts = drive_facts(root(), root());
  EXPECT_EQ(facts.device, "nvme3n1");
  ASSERT_EQ(facts.links.size(), 2U);
  EXPECT_EQ(facts.links[0].address, "0000:00:01.1");
  EXPECT_EQ(facts.links[1].lanes, 4);
  EXPECT_NEAR(*facts.ceiling_gb_s, 7.877, 0.001);
  EXPECT_EQ(facts.numa_node, 1);
  EXPECT_EQ(facts.logical_sector, 512U);
  EXPECT_EQ(facts.physical_sector, 4096U);
  EXPECT_NEAR(*facts.temperature_c, 41.85, 1e-9);
  ASSERT_TRUE(facts.wear);
  EXPECT_EQ(facts.wear->percentage_used, 12);
  EXPECT_EQ(facts.wear->spare_percent, 97);
  EXPECT_EQ(facts.wear->written_bytes, 0x110U * 512000U);
  EXPECT_EQ(facts.wear->power_on_hours, 77U);
}

// With several paths to a drive its own folder is virtual and its controllers are links beside it.
TEST_F(FakeRoot, FindsTheBusOfADriveWithSeveralPaths) {
  const std::string subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0/";
  const std::string controller = "sys/devices/pci0000:00/0000:00:05.0/nvme/nvme0/";
  write(subsystem + "nvme0n1/queue/rotational", "0");
  write(controller + "model", "Many Paths");
  write("sys/devices/pci0000:00/0000:00:05.0/current_link_speed", "8.0 GT/s PCIe");
  write("sys/devices/pci0000:00/0000:00:05.0/current_link_width", "2");
  fs::create_symlink(root_ / controller, root_ / (subsystem + "nvme0"));
  fs::create_directories(root_ / "sys/dev/block");
  fs::create_symlink(root_ / (subsystem + "nvme0n1"), root_ / "sys/dev/block" / device_number());
  const auto facts = drive_facts(root(), root());
  EXPECT_EQ(facts.model, "Many Paths");
  EXPECT_NEAR(*facts.ceiling_gb_s, 1.969, 0.001);
}

TEST_F(FakeRoot, AVolumesCeilingIsTheSumOfItsMembers) {
  const std::string volume = "sys/devices/virtual/block/md0/";
  write(volume + "queue/rotational", "0");
  fs::create_directories(root_ / (volume + "slaves"));
  for (const std::string name : {"nvme0n1", "nvme1n1"}) {
    const std::string function = "sys/devices/pci0000:00/0000:0" + name.substr(4, 1) + ":00.0/";
    write(function + "current_link_speed", "16.0 GT/s PCIe");
    write(function + "current_link_width", "4");
    write(function + "nvme/" + name + "/queue/rotational", "0");
    fs::create_symlink(root_ / (function + "nvme/" + name), root_ / (volume + "slaves/" + name));
  }
  fs::create_directories(root_ / "sys/dev/block");
  fs::create_symlink(root_ / volume, root_ / "sys/dev/block" / device_number());
  const auto facts = drive_facts(root(), root());
  EXPECT_EQ(facts.members, (std::vector<std::string>{"nvme0n1", "nvme1n1"}));
  EXPECT_NEAR(*facts.ceiling_gb_s, 2 * 7.877, 0.001);
}

// What is no drive of this machine gets a sentence that says what to do.
TEST_F(FakeRoot, SaysWhatIsNoDrive) {
  struct Case {
    std::string line;
    FileSystemKind kind;
    std::string words;
  };
  for (const auto& [line, kind, words] :
       {Case{"ext4 /dev/sda1 rw", FileSystemKind::local, ""},
        Case{"btrfs /dev/sda1 rw", FileSystemKind::local, ""},
        Case{"tmpfs none rw", FileSystemKind::memory, "memory"},
        Case{"ext4 /dev/zram0 rw", FileSystemKind::memory, "zram0"},
        Case{"nfs4 server:/export rw", FileSystemKind::network, "server:/export"},
        Case{"fuse.sshfs host: rw", FileSystemKind::network, "local file system"},
        Case{"overlay overlay rw,lowerdir=/l,upperdir=/var/lib/up,workdir=/w",
             FileSystemKind::overlay, "/var/lib/up"},
        Case{"fuse.thing /dev/fuse rw", FileSystemKind::user_space, "another process"}}) {
    write("proc/self/mountinfo", "1 0 0:99 / / rw - " + line);
    write("sys/devices/virtual/zram0/queue/rotational", "0");
    fs::create_directories(root_ / "sys/class/block");
    if (!fs::exists(root_ / "sys/class/block/zram0")) {
      fs::create_symlink(root_ / "sys/devices/virtual/zram0", root_ / "sys/class/block/zram0");
    }
    const auto facts = drive_facts(root(), root());
    EXPECT_EQ(facts.kind, kind) << line;
    const auto sentence = why_no_drive("/data", facts);
    EXPECT_EQ(sentence.empty(), kind == FileSystemKind::local) << line;
    EXPECT_NE(sentence.find(words), std::string::npos) << sentence;
  }
}

// PCI Express Base Specification: 8b/10b, 128b/130b, flits.
TEST(DriveFacts, LinkSpeeds) {
  EXPECT_DOUBLE_EQ(pcie_gb_s(2.5, 1), 0.25);
  EXPECT_DOUBLE_EQ(pcie_gb_s(5, 4), 2.0);
  EXPECT_NEAR(pcie_gb_s(8, 4), 3.938, 0.001);
  EXPECT_NEAR(pcie_gb_s(16, 4), 7.877, 0.001);
  EXPECT_NEAR(pcie_gb_s(32, 4), 15.754, 0.001);
  EXPECT_NEAR(pcie_gb_s(64, 4), 30.25, 0.001);
}

TEST(DriveFacts, CommonLinks) {
  DriveFacts a;
  DriveFacts b;
  a.links = {{"0000:00:01.0", 8, 16, 15.7}, {"0000:02:00.0", 8, 4, 3.9}};
  b.links = {{"0000:00:01.0", 8, 16, 15.7}, {"0000:03:00.0", 8, 4, 3.9}};
  ASSERT_EQ(common_links(a, b).size(), 1U);
  EXPECT_EQ(common_links(a, b)[0].address, "0000:00:01.0");
  b.links[0].address = "0000:00:02.0";
  EXPECT_TRUE(common_links(a, b).empty());
}

TEST(DriveFacts, ShortSmartLog) { EXPECT_EQ(parse_smart_log("short"), std::nullopt); }

}  // namespace
}  // namespace terrace
