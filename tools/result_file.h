// A result that is there whole or not at all.
#pragma once

#include <string>

namespace terrace::cli {

// Written beside its path and renamed when it is whole. A link stays one: the file that it names is
// replaced. A device or a pipe, and what /dev and /proc name, is written as it is.
// Thread rule: one thread.
class ResultFile {
 public:
  // Removes what an earlier run left at `path`, and sees that another file can be made there; until
  // write() there is none, however this process ends. Throws Error(io) that names `option`. An
  // empty path: nothing is wanted.
  ResultFile(std::string path, const char* option);

  bool wanted() const { return !path_.empty(); }
  // Throws Error(io) with the path and what to do.
  void write(const std::string& text) const;

 private:
  std::string path_;
  bool replaces_ = false;  // by a file beside it
};

}  // namespace terrace::cli
