#include "tools/nvme_result.h"

#include <fmt/format.h>

#include <algorithm>

namespace terrace::cli {

CellResult CellResult::of(const bench::Cell& cell, bool in_sweep) {
  CellResult result;
  result.cell = cell;
  result.in_sweep = in_sweep;
  return result;
}

void CellResult::add(const bench::Sample& sample) {
  gb_s.push_back(sample.gb_s);
  cpu_seconds_per_gb.push_back(sample.cpu_seconds_per_gb);
  if (sample.system_calls_per_gb) system_calls_per_gb.push_back(*sample.system_calls_per_gb);
  read.add(sample.read);
  write.add(sample.write);
  flush.add(sample.flush);
}

const CellResult* DriveResult::of(bench::Pattern pattern) const {
  const CellResult* found = nullptr;
  for (const auto& cell : cells) {
    if (cell.cell.pattern == pattern && !cell.in_sweep && cell.cell.threads == 1) found = &cell;
  }
  return found;
}

std::string cell_text(const bench::Cell& cell) {
  auto text = fmt::format("{} x {}", to_string(Bytes{cell.block_bytes}), cell.depth);
  if (cell.threads > 1) text += fmt::format(" x {} threads", cell.threads);
  return text;
}

int exit_code(const BenchResult& result) {
  if (result.interrupted) return 130;
  const bool measured =
      !result.drives.empty() && std::ranges::all_of(result.drives, &DriveResult::measured);
  const bool read_only = std::ranges::any_of(result.drives, &DriveResult::read_only);
  const bool asked = result.compute_seconds.has_value();
  if (!measured || (result.verdicts.empty() && (asked || !read_only))) return 2;
  bool doubt = false;
  for (const auto& model : result.verdicts) {
    doubt = doubt || model.too_noisy;
    if (!model.too_noisy && !model.verdict.hides.value_or(true)) return 1;
  }
  // Without a question about compute, the setting is what was asked for.
  const bool no_setting = !result.compute_seconds && !read_only &&
                          !std::ranges::all_of(result.drives, [](const DriveResult& drive) {
                            return drive.knee.found;
                          });
  return doubt || no_setting ? 2 : 0;
}

}  // namespace terrace::cli
