#include "tools/nvme_tune.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "terrace/error.h"
#include "tools/nvme_bench.h"

namespace terrace::cli {
namespace {

using bench::Pattern;
using nlohmann::ordered_json;

constexpr std::uint32_t kMostThreads = 16;
constexpr double kWorthAThread = 1.05;  // a second one must give so much

// Of all drives the setting with the most in flight: a shallow one would starve the others.
bench::Knee common_knee(const BenchResult& result) {
  bench::Knee knee;
  for (const auto& drive : result.drives) {
    if (!drive.measured || !drive.knee.found) {
      throw Error(
          ErrorCode::unavailable,
          drive.directory + " has no recommended setting: " +
              (drive.refused.empty() ? drive.knee.why_not : drive.refused.front().why.reason));
    }
    const auto& other = drive.knee;
    if (other.block_bytes * other.depth > knee.block_bytes * knee.depth) knee = other;
  }
  return knee;
}

// Three digits: more would be noise.
double rounded(double gb_s) {
  const double unit = std::pow(10.0, std::floor(std::log10(std::max(gb_s, 1e-6))) - 2);
  return std::round(gb_s / unit) * unit;
}

std::uint32_t best_threads(const BenchResult& result) {
  std::uint32_t best = 1;
  for (const auto& drive : result.drives) {
    const auto* one = drive.of(Pattern::read);
    double most = one == nullptr ? 0 : one->median_gb_s() * kWorthAThread;
    for (const auto& cell : drive.cells) {
      if (cell.cell.threads < 2 || cell.cell.pattern != Pattern::read) continue;
      if (cell.median_gb_s() <= most) continue;
      most = cell.median_gb_s() * kWorthAThread;
      best = std::max(best, cell.cell.threads);
    }
  }
  return best;
}

Config load_tuned(const std::string& path) {
  try {
    return load_config(path);
  } catch (const Error& error) {
    throw Error(error.code(), std::string(error.what()) + "; remove " + path +
                                  " or make it anew with terrace nvme tune");
  }
}

}  // namespace

std::string tuned_config(const BenchResult& result) {
  const auto knee = common_knee(result);
  ordered_json out;
  out["aio"] = {{"block_size", knee.block_bytes},
                {"queue_depth", knee.depth},
                {"intra_op_parallelism", std::clamp(knee.depth, 1U, kMostThreads)}};
  out["terrace"]["nvme"] = ordered_json::array();
  for (const auto& drive : result.drives) {
    const auto path = std::filesystem::weakly_canonical(drive.directory).string();
    out["terrace"]["nvme"].push_back(
        {{"path", path},
         {"read_gb_s", rounded(drive.of(Pattern::read)->median_gb_s())},
         {"write_gb_s", rounded(lasting_write_gb_s(drive))}});
  }
  return out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string deepspeed_config(const BenchResult& result) {
  const auto knee = common_knee(result);
  ordered_json out;
  out["aio"] = {{"block_size", knee.block_bytes},
                {"queue_depth", knee.depth},
                {"intra_op_parallelism", best_threads(result)},
                {"single_submit", false},
                {"overlap_events", true}};
  return out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

void apply_tuned(Config& config, bool has_aio) {
  std::uint64_t most_in_flight = 0;
  for (auto& drive : config.nvme) {
    const auto path = (std::filesystem::path(drive.path) / kTunedFile).string();
    if (!std::filesystem::is_regular_file(path)) continue;
    const auto tuned = load_tuned(path);
    if (!tuned.nvme.empty()) {
      const auto& known = tuned.nvme.front();
      if (!drive.read_gb_s) drive.read_gb_s = known.read_gb_s;
      if (!drive.write_gb_s) drive.write_gb_s = known.write_gb_s;
    }
    const auto in_flight = tuned.io.block.count * tuned.io.queue_depth;
    if (!has_aio && in_flight > most_in_flight) {
      most_in_flight = in_flight;
      config.io.block = tuned.io.block;
      config.io.queue_depth = tuned.io.queue_depth;
      config.io.threads = tuned.io.threads;
    }
    config.notes.push_back("the drive's speeds" +
                           std::string(has_aio ? "" : ", block and queue depth") + " come from " +
                           path);
  }
}

bool has_aio_block(const std::string& config_file) {
  if (config_file.empty()) return false;
  std::ifstream file(config_file);
  const auto json = nlohmann::json::parse(file, nullptr, false);
  return json.is_object() && json.contains("aio");
}

}  // namespace terrace::cli
