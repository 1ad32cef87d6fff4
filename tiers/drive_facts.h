// The drive behind a directory, as far as the system tells. Every function may be called from any
// thread.
//
// `root` stands before every path under /proc and /sys: "" for this machine, a folder of files in
// tests.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "terrace/types.h"

namespace terrace {

enum class FileSystemKind : std::uint8_t {
  local,       // on a drive of this machine
  memory,      // tmpfs, ramfs; also a file system on zram or a RAM disk
  network,     // NFS, SMB, Ceph, Lustre, ...
  overlay,     // layers of other file systems, as containers have them
  user_space,  // FUSE: another process serves it
};

// One piece of PCI Express on the way to the drive, at the speed that it has negotiated.
struct PcieLink {
  std::string address;       // of the function below it: "0000:03:00.0"
  double gigatransfers = 0;  // per second and lane
  int lanes = 0;
  double gb_s = 0;  // 10^9 payload bytes per second: what encoding leaves
};

// What the drive says of its own age (NVMe's SMART log; asking needs root).
struct DriveWear {
  int percentage_used = 0;  // of its rated endurance; may pass 100
  int spare_percent = 0;
  std::uint64_t written_bytes = 0;  // by hosts, in all its life
  std::uint64_t power_on_hours = 0;
};

// Empty or absent where the system does not tell.
struct DriveFacts {
  std::string file_system;  // "ext4", "xfs", "tmpfs", ...
  FileSystemKind kind = FileSystemKind::local;
  std::string mount_point;
  std::string mount_source;     // "/dev/nvme0n1p1", "server:/export"
  std::string upper_directory;  // of an overlay: where its files really are
  std::string device;  // "nvme0n1"; the whole drive, not the partition; "dm-0" for a volume
  std::vector<std::string> members;  // of a volume or RAID; the file behind a loop device
  bool cached_loop = false;          // a loop device whose file goes through the page cache
  std::string folder;                // the device's folder under /sys, for its counters
  std::string model;
  std::string scheduler;
  std::optional<bool> rotational;
  std::optional<std::uint32_t> logical_sector;  // bytes
  std::optional<std::uint32_t> physical_sector;
  // What a file in the directory wants of direct transfers; 0: it takes none. Linux 6.1 tells.
  std::optional<std::uint32_t> direct_alignment;
  std::vector<PcieLink> links;         // from the processor to the drive
  std::optional<double> ceiling_gb_s;  // the narrowest link's; a volume's: the sum of its members'
  std::optional<int> numa_node;
  std::optional<double> temperature_c;
  std::optional<DriveWear> wear;
  Bytes free;  // for this user
  Bytes size;
};

// Throws Error(io) when the directory cannot be looked at.
DriveFacts drive_facts(const std::string& directory, const std::string& root = "");

// "local", "memory", "network", "overlay", "user_space"
std::string_view to_string(FileSystemKind kind);

// Why what lies in the directory is no drive of this machine, and what to do instead; empty for one
// that is.
std::string why_no_drive(const std::string& directory, const DriveFacts& facts);

// 10^9 bytes per second that `lanes` carry after line encoding: 8b/10b up to 5 GT/s, 128b/130b up
// to 32, flits of 242 in 256 bytes above (PCI Express Base Specification, revisions 1 to 6).
double pcie_gb_s(double gigatransfers, int lanes);

// The links that the ways to both drives have in common, from the processor on.
std::vector<PcieLink> common_links(const DriveFacts& a, const DriveFacts& b);

// Reads the 512 bytes of NVMe's log page 2 (NVM Express Base Specification, "SMART / Health
// Information"); absent when there are fewer.
std::optional<DriveWear> parse_smart_log(const std::string& page);

}  // namespace terrace
