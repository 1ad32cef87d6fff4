// A folder that stands for "/" of another machine.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace terrace {

class FakeRoot : public testing::Test {
 protected:
  FakeRoot() {
    root_ = std::filesystem::temp_directory_path() / ("terrace_root_" + std::to_string(::getpid()));
    std::filesystem::create_directories(root_);
  }
  ~FakeRoot() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << '\n';
  }
  std::string root() const { return root_.string(); }
  // "8:17": the device that the folder itself is on.
  std::string device_number() const {
    struct stat status {};
    EXPECT_EQ(::stat(root_.c_str(), &status), 0);
    return std::to_string(major(status.st_dev)) + ":" + std::to_string(minor(status.st_dev));
  }

  std::filesystem::path root_;
};

}  // namespace terrace
