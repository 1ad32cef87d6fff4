// terrace bench step: the command, its table and its JSON.
#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "terrace/error.h"
#include "tools/bench_command.h"
#include "tools/bench_step.h"
#include "tools/options.h"
#include "tools/result_file.h"

namespace terrace::cli {
namespace {

constexpr std::uint32_t kCostSteps = 20;

struct Request {
  StepBenchOptions options;
  std::vector<std::string> only;  // names of cases
  std::string clip = "both";
  std::string json;
};

bool wanted(const Request& request, const StepCase& what) {
  if (request.clip == "none" && what.clip > 0) return false;
  if (request.clip == "global" && what.clip == 0) return false;
  return request.only.empty() ||
         std::ranges::find(request.only, name_of(what)) != request.only.end();
}

const char* clip_name(const StepCase& what) { return what.clip > 0 ? "global" : "none"; }

void print_head() {
  fmt::print("{:<16}{:<8}{:>9}{:>9}{:>9}{:>9}{:>9}{:>12}{:>12}{:>10}\n", "slowest lane", "clip",
             "floor s", "next s", "step s", "spread", "exposed", "step/floor", "step/plan",
             "state");
}

void print_row(const StepCaseResult& result) {
  auto floors = result.lane_floor;
  std::sort(floors.begin(), floors.end());
  fmt::print("{:<16}{:<8}{:>9.3f}{:>9.3f}{:>9.3f}{:>8.1f}%{:>9.3f}{:>12.3f}{:>12.3f}{:>10}\n",
             name_of(result.what), clip_name(result.what), result.floor_seconds,
             floors[floors.size() - 2], result.step_seconds, 100 * result.spread,
             result.exposed_seconds, result.ratio(), result.ratio_to_forecast(),
             result.state_identical ? "identical" : "DIFFERS");
  std::fflush(stdout);
}

nlohmann::json json_of(const StepCaseResult& result) {
  nlohmann::json out{{"slowest_lane", name_of(result.what)},
                     {"clip", clip_name(result.what)},
                     {"updates", result.deferred ? "deferred" : "overlapped"},
                     {"step_seconds", result.step_seconds},
                     {"spread", result.spread},
                     {"floor_seconds", result.floor_seconds},
                     {"forecast_seconds", result.forecast_seconds},
                     {"cpu_seconds", result.cpu_seconds},
                     {"ratio", result.ratio()},
                     {"ratio_to_forecast", result.ratio_to_forecast()},
                     {"exposed_seconds", result.exposed_seconds},
                     {"hidden_seconds", result.hidden_seconds},
                     {"state_identical", result.state_identical}};
  for (const Lane lane : kLanes) {
    out["lanes"][std::string(to_string(lane))] = {
        {"floor_seconds", at(result.lane_floor, lane)},
        {"busy_seconds", at(result.lane_busy, lane)}};
  }
  return out;
}

int run(const Request& request) {
  ResultFile json(request.json, "--json");
  nlohmann::json out{{"cases", nlohmann::json::array()}};
  bool identical = true;
  print_head();
  for (const auto& what : step_cases()) {
    if (!wanted(request, what)) continue;
    const auto result = run_step_case(what, request.options);
    print_row(result);
    identical &= result.state_identical;
    out["cases"].push_back(json_of(result));
  }
  if (out["cases"].empty()) {
    throw Error(ErrorCode::invalid_argument,
                "no case is left; --lane takes nvme_read, nvme_write, host_to_device, "
                "device_to_host, adam, compute, balanced");
  }
  const auto cost = measure_executor(kCostSteps);
  fmt::print("executor: {:.2f} us of user time per operation ({} operations, memory engine, no "
             "checksums)\n", cost.user_us_per_operation, cost.operations);
  out["executor"] = {{"user_us_per_operation", cost.user_us_per_operation},
                     {"operations", cost.operations}};
  if (json.wanted()) json.write(out.dump(2) + "\n");
  return identical ? 0 : 1;
}

}  // namespace

void add_bench_step(CLI::App& bench, ExitCode& code) {
  auto* command = bench.add_subcommand(
      "step", "one training step, each lane the slowest in turn: floor, forecast, measured");
  auto request = std::make_shared<Request>();
  auto& options = request->options;
  command->add_option("--nvme", options.nvme, "a directory on each drive")->required();
  command->add_option("--lane", request->only, "only these cases: a lane, or balanced");
  command->add_option("--clip", request->clip, "none, global or both")
      ->check(CLI::IsMember({"none", "global", "both"}));
  command->add_option("--seconds", options.seconds, "of a step, at the slowest lane's speed")
      ->check(CLI::PositiveNumber);
  command->add_option("--steps", options.steps, "measured in each case")
      ->check(whole_number(1));
  command->add_option("--layers", options.layers, "of the model")->check(whole_number(1));
  command->add_option("--elements", options.layer_elements, "parameters of a layer")
      ->check(whole_number(1));
  command->add_option("--json", request->json, "write the result to this file");
  command->callback([request, &code] { code.value = run(*request); });
}

}  // namespace terrace::cli
