// What is mounted where.
#pragma once

#include <string>

namespace terrace {

// A line of /proc/self/mountinfo: "36 35 98:0 /root /point options... - ext4 /dev/sda1 options".
struct Mount {
  std::string point;
  std::string file_system;
  std::string source;
  std::string options;  // of the file system, as it names them: "rw,upperdir=/a/b"
};

// What the absolute `path` is on: the longest mount point above it; of equal ones the last, which
// hides others. Empty fields when the system does not tell. `root`: as in drive_facts.h.
Mount mount_of(const std::string& path, const std::string& root);

// The value of "key=value" in a mount's options; empty when it is not there.
std::string mount_option(const Mount& mount, const std::string& key);

}  // namespace terrace
