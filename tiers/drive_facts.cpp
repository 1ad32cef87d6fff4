#include "tiers/drive_facts.h"

#include <fcntl.h>
#include <linux/nvme_ioctl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string_view>

#include "terrace/error.h"
#include "tiers/mounts.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kSmartBytes = 512;
constexpr int kMostNesting = 8;  // volumes of volumes

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  while (!line.empty() && line.back() == ' ') line.pop_back();  // names are padded with spaces
  return line;
}

std::optional<long> number_in(const fs::path& path) {
  const auto line = first_line(path);
  long value = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value);
  if (error != std::errc{}) return std::nullopt;
  return value;
}

// "always [madvise] never" → "madvise"
std::string chosen(const std::string& line) {
  const auto open = line.find('[');
  const auto close = line.find(']');
  if (open == std::string::npos || close == std::string::npos) return line;
  return line.substr(open + 1, close - open - 1);
}

// Folders in `parent` whose names begin with `prefix`, sorted.
std::vector<fs::path> folders(const fs::path& parent, std::string_view prefix) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(parent, error)) {
    if (entry.path().filename().string().starts_with(prefix)) found.push_back(entry.path());
  }
  std::ranges::sort(found);
  return found;
}

// The drive's folder under /sys. Some file systems (btrfs) have device numbers of their own; there
// the mount tells the device.
fs::path drive_folder(dev_t number, const Mount& mount, const std::string& root) {
  std::error_code error;
  auto folder = fs::canonical(root + "/sys/dev/block/" + std::to_string(major(number)) + ":" +
                                  std::to_string(minor(number)),
                              error);
  if (error && mount.source.starts_with("/dev/")) {
    const auto device = fs::weakly_canonical(mount.source, error).filename();
    folder = fs::canonical(root + "/sys/class/block/" + device.string(), error);
  }
  if (error) return {};
  return fs::exists(folder / "partition", error) ? folder.parent_path() : folder;
}

// Where the drive hangs on the bus. With several paths to one NVMe drive its own folder is virtual
// and the controllers are beside it; the first stands for all.
fs::path bus_folder(const fs::path& drive) {
  std::error_code error;
  if (drive.string().find("/nvme-subsystem/") == std::string::npos) return drive;
  for (const auto& entry : folders(drive.parent_path(), "nvme")) {
    const auto target = fs::canonical(entry, error);
    if (!error && target.string().find("/pci") != std::string::npos) return target;
  }
  return drive;
}

// "0000:03:00.0"
bool is_pci_address(const std::string& name) {
  return name.size() >= 12 && name[name.size() - 2] == '.' && name[name.size() - 5] == ':' &&
         name[name.size() - 8] == ':';
}

// "16.0 GT/s PCIe" and "4"; unknown links say "Unknown".
std::optional<PcieLink> link_of(const fs::path& function) {
  const auto speed = first_line(function / "current_link_speed");
  const auto lanes = number_in(function / "current_link_width");
  PcieLink link{function.filename().string(), std::strtod(speed.c_str(), nullptr), 0, 0};
  if (!(link.gigatransfers > 0) || !lanes || *lanes <= 0 || *lanes > 64) return std::nullopt;
  link.lanes = static_cast<int>(*lanes);
  link.gb_s = pcie_gb_s(link.gigatransfers, link.lanes);
  return link;
}

void add_bus(DriveFacts& facts, const fs::path& bus) {
  fs::path at;
  for (const auto& part : bus) {
    at /= part;
    if (!is_pci_address(part.string())) continue;
    if (const auto link = link_of(at)) facts.links.push_back(*link);
    const auto node = number_in(at / "numa_node");
    if (node && *node >= 0) facts.numa_node = static_cast<int>(*node);
  }
  for (const auto& link : facts.links) {
    facts.ceiling_gb_s = std::min(facts.ceiling_gb_s.value_or(link.gb_s), link.gb_s);
  }
}

std::optional<double> temperature_of(const fs::path& drive, const fs::path& bus) {
  for (const auto& place : {drive / "device", drive / "device/hwmon", drive / "device/device/hwmon",
                            bus, bus / "device/hwmon", bus / "hwmon"}) {
    for (const auto& sensor : folders(place, "hwmon")) {
      const auto milli = number_in(sensor / "temp1_input");
      if (milli) return static_cast<double>(*milli) / 1000;
    }
  }
  return std::nullopt;
}

// From the drive itself; under a test's root from a file of what it would say.
std::string smart_log(const std::string& device, const std::string& root) {
  if (!root.empty()) {
    std::ifstream file(root + "/dev/" + device + ".smart_log", std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::array<char, kSmartBytes> page{};
  const int descriptor = ::open(("/dev/" + device).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return {};
  nvme_admin_cmd command{};
  command.opcode = 0x02;  // get log page
  command.nsid = 0xffffffff;
  command.addr = reinterpret_cast<std::uintptr_t>(page.data());
  command.data_len = kSmartBytes;
  command.cdw10 = ((kSmartBytes / 4 - 1) << 16) | 0x02;  // dwords less one; SMART / health
  const bool told = ::ioctl(descriptor, NVME_IOCTL_ADMIN_CMD, &command) == 0;
  ::close(descriptor);
  return told ? std::string(page.data(), page.size()) : std::string();
}

// A volume's members; their links carry the volume's bytes.
void add_members(DriveFacts& facts, const fs::path& drive, const std::string& root, int nesting) {
  const auto backing = first_line(drive / "loop/backing_file");
  if (!backing.empty()) facts.members.push_back(backing);
  if (!backing.empty() && first_line(drive / "loop/dio") == "0") facts.cached_loop = true;
  double sum = 0;
  bool known = true;
  for (const auto& slave : folders(drive / "slaves", "")) {
    std::error_code error;
    auto member = fs::canonical(slave, error);
    if (error) continue;
    if (fs::exists(member / "partition", error)) member = member.parent_path();
    facts.members.push_back(member.filename().string());
    DriveFacts part;
    add_bus(part, bus_folder(member));
    if (nesting < kMostNesting && !part.ceiling_gb_s) {
      add_members(part, member, root, nesting + 1);
    }
    known = known && part.ceiling_gb_s.has_value();
    sum += part.ceiling_gb_s.value_or(0);
  }
  if (known && sum > 0) facts.ceiling_gb_s = sum;
}

std::uint64_t little_endian(const std::string& page, std::size_t at) {
  std::uint64_t value = 0;
  for (std::size_t i = 8; i-- > 0;) value = value << 8 | static_cast<unsigned char>(page[at + i]);
  return value;
}

bool any_of(const std::string& name, std::initializer_list<std::string_view> names) {
  return std::ranges::find(names, name) != names.end();
}

FileSystemKind kind_of(const std::string& name) {
  if (any_of(name, {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})) return FileSystemKind::memory;
  if (any_of(name, {"overlay", "aufs", "fuse.fuse-overlayfs"})) return FileSystemKind::overlay;
  if (any_of(name, {"nfs",         "nfs4",      "cifs",         "smb3",
                    "smbfs",       "9p",        "virtiofs",     "ceph",
                    "lustre",      "gpfs",      "beegfs",       "wekafs",
                    "afs",         "orangefs",  "glusterfs",    "fuse.glusterfs",
                    "fuse.sshfs",  "fuse.s3fs", "fuse.juicefs", "fuse.gcsfuse",
                    "fuse.rclone", "fuse.ceph", "fuse.mount-s3"})) {
    return FileSystemKind::network;
  }
  return name == "fuse" || name == "fuseblk" || name.starts_with("fuse.")
             ? FileSystemKind::user_space
             : FileSystemKind::local;
}

// Of the file, or of one without a name that is made in the directory for a moment.
std::optional<std::uint32_t> direct_alignment(const std::string& path) {
  std::optional<std::uint32_t> alignment;
#ifdef STATX_DIOALIGN
  int file = ::open(path.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return alignment;
  struct statx status {};
  if (::statx(file, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
      (status.stx_mask & STATX_DIOALIGN) != 0) {
    alignment = status.stx_dio_offset_align;
  }
  ::close(file);
#endif
  return alignment;
}

void add_drive(DriveFacts& facts, const fs::path& drive, const std::string& root) {
  const auto bus = bus_folder(drive);
  facts.folder = drive.string();
  facts.device = drive.filename().string();
  facts.model = first_line(drive / "device/model");
  if (facts.model.empty()) facts.model = first_line(bus / "model");
  facts.scheduler = chosen(first_line(drive / "queue/scheduler"));
  const auto rotational = first_line(drive / "queue/rotational");
  if (!rotational.empty()) facts.rotational = rotational == "1";
  const auto sector = [&](const char* name) -> std::optional<std::uint32_t> {
    const auto bytes = number_in(drive / "queue" / name);
    if (!bytes || *bytes <= 0) return std::nullopt;
    return static_cast<std::uint32_t>(*bytes);
  };
  facts.logical_sector = sector("logical_block_size");
  facts.physical_sector = sector("physical_block_size");
  add_bus(facts, bus);
  add_members(facts, drive, root, 0);
  facts.temperature_c = temperature_of(drive, bus);
  facts.wear = parse_smart_log(facts.device.starts_with("nvme") ? smart_log(facts.device, root)
                                                                : std::string());
  if (facts.device.starts_with("zram") || facts.device.starts_with("ram")) {
    facts.kind = FileSystemKind::memory;
  }
}

}  // namespace

double pcie_gb_s(double gigatransfers, int lanes) {
  const double kept = gigatransfers <= 5    ? 8.0 / 10
                      : gigatransfers <= 32 ? 128.0 / 130
                                            : 242.0 / 256;
  return gigatransfers * kept / 8 * lanes;
}

std::vector<PcieLink> common_links(const DriveFacts& a, const DriveFacts& b) {
  std::vector<PcieLink> common;
  for (std::size_t i = 0; i < std::min(a.links.size(), b.links.size()); ++i) {
    if (a.links[i].address != b.links[i].address) break;
    common.push_back(a.links[i]);
  }
  return common;
}

std::optional<DriveWear> parse_smart_log(const std::string& page) {
  if (page.size() < kSmartBytes) return std::nullopt;
  constexpr std::uint64_t kUnit = 512000;  // bytes of a "data unit"
  DriveWear wear;
  wear.spare_percent = static_cast<unsigned char>(page[3]);
  wear.percentage_used = static_cast<unsigned char>(page[5]);
  const auto units = little_endian(page, 48);
  wear.written_bytes = std::min(units, std::numeric_limits<std::uint64_t>::max() / kUnit) * kUnit;
  wear.power_on_hours = little_endian(page, 128);
  return wear;
}

std::string_view to_string(FileSystemKind kind) {
  switch (kind) {
    case FileSystemKind::local: return "local";
    case FileSystemKind::memory: return "memory";
    case FileSystemKind::network: return "network";
    case FileSystemKind::overlay: return "overlay";
    case FileSystemKind::user_space: return "user_space";
  }
  return "";
}

std::string why_no_drive(const std::string& directory, const DriveFacts& facts) {
  const auto where = directory + " is on " + facts.file_system;
  switch (facts.kind) {
    case FileSystemKind::local: return {};
    case FileSystemKind::memory:
      return where + (facts.device.empty() ? "" : " on " + facts.device) +
             ", which keeps files in memory: memory would be measured; name a directory on a drive";
    case FileSystemKind::network:
      return where + " (" + facts.mount_source +
             "): the network and a server would be measured, not a drive of this machine; name a "
             "directory on a local file system";
    case FileSystemKind::overlay:
      return where + ", the writable layer of a container" +
             (facts.upper_directory.empty() ? "" : " (kept in " + facts.upper_directory + ")") +
             "; put a directory of the drive itself into the container (docker run -v "
             "/nvme0:/nvme0) and name that";
    case FileSystemKind::user_space:
      return where + " (" + facts.mount_source +
             "): another process serves its files; name a directory on a file system of the kernel";
  }
  return {};
}

DriveFacts drive_facts(const std::string& directory, const std::string& root) {
  struct stat status {};
  struct statvfs space {};
  if (::stat(directory.c_str(), &status) != 0 || ::statvfs(directory.c_str(), &space) != 0) {
    throw Error(ErrorCode::io, "the directory " + directory + " cannot be used: " +
                                   std::strerror(errno) + "; create it or name another one");
  }
  if (!S_ISDIR(status.st_mode) && !S_ISREG(status.st_mode)) {
    throw Error(ErrorCode::invalid_argument,
                directory + " is neither a directory nor a regular file; name a directory on the "
                            "drive");
  }
  DriveFacts facts;
  facts.free = {static_cast<std::uint64_t>(space.f_bavail) * space.f_frsize};
  facts.size = {static_cast<std::uint64_t>(space.f_blocks) * space.f_frsize};
  std::error_code error;
  const auto mount = mount_of(fs::canonical(directory, error).string(), root);
  facts.file_system = mount.file_system;
  facts.kind = kind_of(mount.file_system);
  facts.mount_point = mount.point;
  facts.mount_source = mount.source;
  facts.upper_directory = mount_option(mount, "upperdir");
  const auto drive = drive_folder(status.st_dev, mount, root);
  if (!drive.empty()) add_drive(facts, drive, root);
  facts.direct_alignment = direct_alignment(directory);
  return facts;
}

}  // namespace terrace
