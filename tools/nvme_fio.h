// fio, run on the bench's own file, as the second opinion.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "nvme/measured_drive.h"

namespace terrace::cli {

struct FioRun {
  double gb_s = 0;                // all bytes over all time, ramp-up and drain included
  double cpu_seconds_per_gb = 0;  // user and system time of the job's thread
};

// Thread rule: one thread at a time. fio is killed when this process is.
class Fio {
 public:
  // Looks for fio in PATH. Throws Error(unavailable): how to install it.
  Fio();

  const std::string& version() const { return version_; }
  // Patterns that fio has a counterpart of: read, overwrite, mix.
  static bool can(bench::Pattern pattern);
  // The arguments for one run of `seconds` over the first `bytes` of the file at `path`.
  static std::vector<std::string> arguments(const bench::Cell& cell, const std::string& path,
                                            std::uint64_t bytes, double seconds);
  // Throws Error(unavailable) with what fio said.
  FioRun run(const bench::Cell& cell, const std::string& path, std::uint64_t bytes,
             double seconds) const;

 private:
  std::string program_;
  std::string version_;
};

// "fio --name=... ...", quoted where a shell needs it
std::string command_text(const std::vector<std::string>& arguments);

}  // namespace terrace::cli
