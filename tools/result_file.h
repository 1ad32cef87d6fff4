// A result that is there whole or not at all.
#pragma once

#include <string>

namespace terrace::cli {

// Written beside its path and renamed when it is whole. A device or a pipe is written as it is.
// Thread rule: one thread.
class ResultFile {
 public:
  // Removes what an earlier run left at `path`, and sees that a new one can be made. Throws
  // Error(io) that names `option`. An empty path: nothing is wanted.
  ResultFile(std::string path, const char* option);
  ~ResultFile();  // without write(): nothing is left
  ResultFile(const ResultFile&) = delete;
  ResultFile& operator=(const ResultFile&) = delete;

  bool wanted() const { return !path_.empty(); }
  // Throws Error(io) with the path and what to do.
  void write(const std::string& text);

 private:
  const std::string path_;
  std::string written_;  // where it is until it is whole
};

}  // namespace terrace::cli
