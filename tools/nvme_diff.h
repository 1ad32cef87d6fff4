// Two results of `terrace nvme bench --json` held against each other.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace terrace::cli {

struct CellChange {
  std::string cell;  // "read 1.00 MiB x 8"
  bool sweep = false;
  double before_gb_s = 0;
  double after_gb_s = 0;
  double noise = 0;  // the relative change that says nothing
  double p_value = 1;
  bool changed = false;  // beyond the noise
};

struct BenchDiff {
  std::vector<std::string> facts;   // "scheduler: mq-deadline, now none"
  std::vector<CellChange> cells;    // those that both have
  std::vector<std::string> others;  // recommendation, refusals, cells that only one has
  bool changed = false;             // a speed, beyond the noise
};

// Throws Error(invalid_argument) when one of them is no bench result.
BenchDiff diff_benches(const nlohmann::json& before, const nlohmann::json& after);

std::string diff_text(const BenchDiff& diff);

}  // namespace terrace::cli
