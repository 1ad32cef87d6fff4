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

// The part of the file that one run goes through, again and again.
struct FioPlace {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  // Half of a file of `file_bytes`, beginning elsewhere in each pair, at a whole block.
  static FioPlace of_pair(std::size_t pair, std::uint64_t file_bytes, std::uint64_t block_bytes);
};

// Thread rule: one thread at a time. fio is killed when this process is.
class Fio {
 public:
  // Looks for fio in PATH. Throws Error(unavailable): how to install it.
  Fio();

  const std::string& version() const { return version_; }
  // Patterns that fio has a counterpart of: read, overwrite, mix.
  static bool can(bench::Pattern pattern);
  // Whether enough huge pages are reserved and free for its buffers (vm.nr_hugepages). Ours always
  // lie in (transparent) huge pages; a drive that takes few segments per request is far slower
  // from ordinary ones.
  static bool huge_pages(const bench::Cell& cell);
  // The arguments for one run of `seconds` over `place` in the file at `path`.
  static std::vector<std::string> arguments(const bench::Cell& cell, const std::string& path,
                                            const FioPlace& place, double seconds);
  // Ends fio after `at_most`. Throws Error(unavailable) with what fio said.
  FioRun run(const bench::Cell& cell, const std::string& path, const FioPlace& place,
             double seconds, Nanoseconds at_most) const;

 private:
  std::string program_;
  std::string version_;
};

// "fio --name=... ...", quoted where a shell needs it
std::string command_text(const std::vector<std::string>& arguments);

}  // namespace terrace::cli
