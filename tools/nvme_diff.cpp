#include "tools/nvme_diff.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>

#include "nvme/drive_statistics.h"
#include "terrace/error.h"
#include "tools/nvme_result.h"

namespace terrace::cli {
namespace {

using nlohmann::json;

constexpr double kLeastChange = 0.05;  // runs at different times differ by so much by themselves

using Key = std::tuple<std::size_t, bool, std::string, std::uint64_t, std::uint32_t, std::uint32_t>;

std::string label(const Key& key) {
  const auto& [drive, sweep, pattern, block, depth, threads] = key;
  return (drive > 0 ? fmt::format("drive {}: ", drive + 1) : std::string()) + pattern + " " +
         cell_text({bench::parse_pattern(pattern), block, depth, threads});
}

struct Speeds {
  std::string label;
  std::vector<double> samples;
};

// Drives are compared in their order: directories may have other names on another machine. Beside
// the sweep a pattern is compared with itself, whatever setting it was measured at.
std::map<Key, Speeds> cells_of(const json& bench) {
  std::vector<std::string> directories;
  for (const auto& drive : bench.at("drives")) directories.push_back(drive.at("directory"));
  std::map<Key, Speeds> cells;
  for (const auto& cell : bench.at("cells")) {
    const auto place = std::ranges::find(directories, cell.at("directory").get<std::string>());
    Key key{static_cast<std::size_t>(place - directories.begin()), cell.at("sweep").get<bool>(),
            cell.at("pattern").get<std::string>(), cell.at("block_bytes").get<std::uint64_t>(),
            cell.at("depth").get<std::uint32_t>(), cell.at("threads").get<std::uint32_t>()};
    Speeds speeds{label(key), cell.at("samples_gb_s").get<std::vector<double>>()};
    auto& [drive, sweep, pattern, block, depth, threads] = key;
    if (!sweep && threads == 1) block = depth = 0;
    cells[key] = std::move(speeds);
  }
  return cells;
}

std::string short_text(const json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

void compare_values(const json& before, const json& after, const std::string& prefix,
                    std::vector<std::string>& out) {
  static const std::vector<std::string> kMoves{"time", "free_bytes", "temperature_c",
                                               "wear", "mount",      "source"};
  for (const auto& [key, value] : before.items()) {
    const auto now = after.value(key, json());
    if (value == now || std::ranges::find(kMoves, key) != kMoves.end()) continue;
    out.push_back(prefix + key + ": " + short_text(value) + ", now " + short_text(now));
  }
}

void compare_cells(const json& before, const json& after, BenchDiff& diff) {
  const auto old_cells = cells_of(before);
  const auto new_cells = cells_of(after);
  std::vector<double> p_values;
  std::size_t lost = 0;
  for (const auto& [key, old_speeds] : old_cells) {
    const auto found = new_cells.find(key);
    if (found == new_cells.end()) {
      ++lost;
      continue;
    }
    const auto& [was, old_samples] = old_speeds;
    const auto& [is, new_samples] = found->second;
    const auto change = bench::compare_sets(old_samples, new_samples);
    diff.cells.push_back({was == is ? was : was + ", now " + is, std::get<1>(key),
                          bench::median(old_samples), bench::median(new_samples),
                          std::max(kLeastChange, change.noise), change.p_value, false});
    p_values.push_back(change.p_value);
  }
  if (diff.cells.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "the two results have no measurement in common: there is nothing to compare");
  }
  const auto counts = bench::significant(p_values);
  for (std::size_t i = 0; i < diff.cells.size(); ++i) {
    auto& cell = diff.cells[i];
    const double ratio = cell.before_gb_s > 0 ? cell.after_gb_s / cell.before_gb_s : 1;
    cell.changed = counts[i] && std::abs(ratio - 1) > cell.noise;
    diff.changed = diff.changed || cell.changed;
  }
  const auto gained = new_cells.size() + lost - old_cells.size();
  if (lost + gained > 0) {
    diff.others.push_back(
        fmt::format("{} cells are only in the first, {} only in the second", lost, gained));
  }
}

std::string setting_text(const json& recommended) {
  if (recommended.is_null()) return "none";
  return cell_text({bench::Pattern::read, recommended.at("block_bytes").get<std::uint64_t>(),
                    recommended.at("depth").get<std::uint32_t>(), 1});
}

void compare_drives(const json& before, const json& after, BenchDiff& diff) {
  const auto& old_drives = before.at("drives");
  const auto& new_drives = after.at("drives");
  if (old_drives.size() != new_drives.size()) {
    diff.others.push_back(fmt::format("{} drives, now {}", old_drives.size(), new_drives.size()));
  }
  for (std::size_t i = 0; i < std::min(old_drives.size(), new_drives.size()); ++i) {
    const auto prefix = old_drives.size() > 1 ? fmt::format("drive {}: ", i + 1) : std::string();
    compare_values(old_drives[i].at("facts"), new_drives[i].at("facts"), prefix, diff.facts);
    const auto was = setting_text(old_drives[i].at("recommended"));
    const auto is = setting_text(new_drives[i].at("recommended"));
    if (was != is) diff.others.push_back(prefix + "recommended: " + was + ", now " + is);
  }
  if (before.at("refused") != after.at("refused")) {
    diff.others.push_back(fmt::format("refused results: {}, now {}", before.at("refused").size(),
                                      after.at("refused").size()));
  }
}

}  // namespace

BenchDiff diff_benches(const json& before, const json& after) {
  BenchDiff diff;
  try {
    if (before.at("format") != after.at("format")) {
      throw Error(ErrorCode::invalid_argument,
                  "the two results are of different formats: " + short_text(before.at("format")) +
                      " and " + short_text(after.at("format")) + "; measure again");
    }
    compare_values(before.at("environment"), after.at("environment"), "", diff.facts);
    compare_drives(before, after, diff);
    compare_cells(before, after, diff);
  } catch (const json::exception&) {
    throw Error(ErrorCode::invalid_argument,
                "one of the files is no result of terrace nvme bench --json of this version");
  }
  return diff;
}

std::string diff_text(const BenchDiff& diff) {
  std::string text;
  auto out = std::back_inserter(text);
  if (!diff.facts.empty()) fmt::format_to(out, "what is different\n");
  for (const auto& fact : diff.facts) fmt::format_to(out, "  {}\n", fact);
  fmt::format_to(out, "{:<36}{:>10}{:>10}{:>9}{:>9}  {}\n", "GB/s", "first", "second", "change",
                 "noise", "beyond the noise");
  std::vector<double> ratios;
  for (const auto& cell : diff.cells) {
    const double ratio = cell.before_gb_s > 0 ? cell.after_gb_s / cell.before_gb_s : 1;
    if (cell.sweep) ratios.push_back(ratio);
    if (cell.sweep && !cell.changed) continue;
    fmt::format_to(out, "{:<36}{:>10.2f}{:>10.2f}{:>+8.1f} %{:>7.1f} %  {}\n",
                   (cell.sweep ? "sweep " : "") + cell.cell, cell.before_gb_s, cell.after_gb_s,
                   100 * (ratio - 1), 100 * cell.noise,
                   cell.changed ? fmt::format("yes (p = {:.4f})", cell.p_value) : "no");
  }
  if (!ratios.empty()) {
    const auto interval = bench::median_interval(ratios);
    fmt::format_to(out, "sweep: {} cells in both, median change {:+.1f} % [{:+.1f}, {:+.1f}]\n",
                   ratios.size(), 100 * (bench::median(ratios) - 1), 100 * (interval.low - 1),
                   100 * (interval.high - 1));
  }
  for (const auto& other : diff.others) fmt::format_to(out, "{}\n", other);
  fmt::format_to(out, "{}\n",
                 diff.changed ? "changed beyond the noise" : "nothing changed beyond the noise");
  return text;
}

}  // namespace terrace::cli
