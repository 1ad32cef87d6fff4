#include "tools/result_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "terrace/error.h"

namespace terrace::cli {

ResultFile::ResultFile(std::string path, const char* option) : path_(std::move(path)) {
  if (path_.empty()) return;
  std::error_code none;
  const auto status = std::filesystem::status(path_, none);
  const bool file = !std::filesystem::exists(status) || std::filesystem::is_regular_file(status);
  written_ = file ? path_ + ".part" : path_;
  if (!std::ofstream(written_, std::ios::app)) {
    written_ = path_;
    throw Error(ErrorCode::io, std::string(option) + " " + path_ +
                                   " cannot be written; name a file in a writable directory");
  }
  if (file) std::filesystem::remove(path_, none);
}

ResultFile::~ResultFile() {
  std::error_code ignored;
  if (written_ != path_) std::filesystem::remove(written_, ignored);
}

void ResultFile::write(const std::string& text) {
  errno = 0;
  std::ofstream file(written_, std::ios::trunc);
  file << text;
  if (file.flush()) {
    std::error_code error;
    if (written_ != path_) std::filesystem::rename(written_, path_, error);
    if (!error) return;
    errno = error.value();
  }
  const char* advice = errno == EMFILE ? "raise the limit of open files (ulimit -n)"
                                       : "free space there or name another file";
  throw Error(ErrorCode::io,
              "writing " + path_ + " failed: " + std::strerror(errno) + "; " + advice);
}

}  // namespace terrace::cli
