#include "tiers/mounts.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

namespace terrace {
namespace {

namespace fs = std::filesystem;

// Spaces, tabs, newlines and backslashes are written as "\040".
std::string unescaped(const std::string& text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      result += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 +
                                  (text[i + 3] - '0'));
      i += 3;
    } else {
      result += text[i];
    }
  }
  return result;
}

std::optional<Mount> parse_mount(const std::string& line) {
  const auto dash = line.find(" - ");
  if (dash == std::string::npos) return std::nullopt;
  std::istringstream left(line.substr(0, dash));
  std::istringstream right(line.substr(dash + 3));
  Mount mount;
  for (int field = 0; field < 5; ++field) left >> mount.point;
  right >> mount.file_system >> mount.source >> mount.options;
  mount.point = unescaped(mount.point);
  mount.source = unescaped(mount.source);
  mount.options = unescaped(mount.options);
  return mount;
}

}  // namespace

Mount mount_of(const std::string& path, const std::string& root) {
  std::ifstream file(root + "/proc/self/mountinfo");
  const fs::path wanted = path;
  Mount best;
  for (std::string line; std::getline(file, line);) {
    auto mount = parse_mount(line);
    if (!mount || mount->point.size() < best.point.size()) continue;
    const fs::path point = mount->point;
    const bool above =
        mount->point == "/" || std::ranges::mismatch(point, wanted).in1 == point.end();
    if (above) best = std::move(*mount);
  }
  return best;
}

std::string mount_option(const Mount& mount, const std::string& key) {
  std::istringstream options(mount.options);
  for (std::string option; std::getline(options, option, ',');) {
    if (option.starts_with(key + "=")) return option.substr(key.size() + 1);
  }
  return {};
}

}  // namespace terrace
