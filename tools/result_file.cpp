#include "tools/result_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "terrace/error.h"

namespace terrace::cli {
namespace {

// Whether `path` is, or can become, a file that another may take the place of.
bool replaceable(const std::string& path) {
  if (path.starts_with("/dev/") || path.starts_with("/proc/")) return false;
  std::error_code none;
  const auto status = std::filesystem::status(path, none);
  return !std::filesystem::exists(status) || std::filesystem::is_regular_file(status);
}

// A new file beside `path`, as open() would make it; empty: none can be made.
std::string made_beside(const std::string& path) {
  std::string name = path + ".XXXXXX";
  const int file = ::mkstemp(name.data());
  if (file < 0) return {};
  const mode_t mask = ::umask(0);
  ::umask(mask);
  ::fchmod(file, 0666 & ~mask);
  ::close(file);
  return name;
}

}  // namespace

ResultFile::ResultFile(std::string path, const char* option) : path_(std::move(path)) {
  if (path_.empty()) return;
  std::error_code none;
  replaces_ = replaceable(path_);
  if (replaces_ && std::filesystem::is_symlink(path_, none)) {
    path_ = std::filesystem::weakly_canonical(path_, none).string();
  }
  errno = 0;
  bool writable = path_ != "-";
  if (!replaces_) {
    writable = writable && std::ofstream(path_, std::ios::app);
  } else if (writable) {
    writable = !std::filesystem::exists(path_, none) || ::access(path_.c_str(), W_OK) == 0;
    const auto made = writable ? made_beside(path_) : std::string{};
    writable = !made.empty();
    if (writable) std::filesystem::remove(made, none);
  }
  if (!writable) {
    const std::string why = errno != 0 ? std::string(": ") + std::strerror(errno) : "";
    throw Error(ErrorCode::io, std::string(option) + " " + path_ + " cannot be written" + why +
                                   "; name a file in a writable directory");
  }
  if (replaces_) std::filesystem::remove(path_, none);
}

void ResultFile::write(const std::string& text) const {
  errno = 0;
  const std::string fresh = replaces_ ? made_beside(path_) : path_;
  if (!fresh.empty()) {
    std::ofstream file(fresh, std::ios::trunc);
    file << text;
    if (file.flush()) {
      std::error_code error;
      if (replaces_) std::filesystem::rename(fresh, path_, error);
      if (!error) return;
      errno = error.value();
    }
  }
  const int error = errno;
  std::error_code ignored;
  if (replaces_) std::filesystem::remove(fresh, ignored);
  const char* advice = error == EMFILE ? "raise the limit of open files (ulimit -n)"
                                       : "free space there or name another file";
  throw Error(ErrorCode::io,
              "writing " + path_ + " failed: " + std::strerror(error) + "; " + advice);
}

}  // namespace terrace::cli
