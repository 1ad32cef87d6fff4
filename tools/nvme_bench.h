// A bench of one or several drives, from its options to its result.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tools/nvme_result.h"

namespace terrace::cli {

struct BenchOptions {
  std::vector<std::string> directories;
  bool quick = false;
  bool thorough = false;
  std::optional<double> seconds;
  std::string file_size;  // empty: by effort
  std::string write_limit;
  std::string engine;  // empty: automatic
  bool fio = false;
  bool allow_unproven = false;
  std::string sysfs_root;
  std::optional<std::uint64_t> seed;
  std::string model;  // one or several of "7B,13B"; empty: the usual four
  std::string parameters;
  std::optional<double> compute_seconds;
  std::optional<double> rated_terabytes;  // endurance
};

// Throws Error(invalid_argument) for options that contradict each other or make no sense.
Effort effort_of(const BenchOptions& options);

// Called with a line of text for people; `introduce` once, with everything that will be done.
struct BenchListener {
  std::function<void(const std::string&)> introduce;
  std::function<void(const std::string&)> progress;
};

// Throws Error for bad options and for directories that are not there. What is found wrong with a
// drive is in the result. Ends early when `stop` is set.
BenchResult run_bench(const BenchOptions& options, const BenchListener& listener,
                      const std::atomic<bool>& stop);

// What the measured drives mean for the models asked for; fills the verdict part of `result`.
// Without drives it only checks the options: Error(invalid_argument) for a model that is none.
void add_verdict(const BenchOptions& options, BenchResult& result);

// What remains for writes when the drive's fast cache is full; the plain overwrite's speed when no
// cliff was found below that. The drive must have been measured.
double lasting_write_gb_s(const DriveResult& drive);

}  // namespace terrace::cli
