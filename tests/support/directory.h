// A directory of a test's own: a store locks the one it lies in, and tests run side by side.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <string>

namespace terrace {

class Directory {
 public:
  explicit Directory(const std::string& name)
      : path_(std::filesystem::current_path() / (name + "-" + std::to_string(::getpid()))) {
    std::filesystem::create_directory(path_);
  }
  ~Directory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace terrace
