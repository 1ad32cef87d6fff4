// terrace plan: what a model needs and how long a step takes, without running anything.
#include <fmt/core.h>

#include <chrono>
#include <memory>

#include "runtime/planner.h"
#include "terrace/error.h"
#include "tiers/drive_facts.h"
#include "tiers/topology.h"
#include "tools/commands.h"
#include "tools/options.h"
#include "tools/report.h"

namespace terrace::cli {
namespace {

struct PlanCommand {
  ModelOptions model;
  TierOptions tiers;
  Speeds speeds;

  void run() const {
    const auto config = tiers.config();
    const auto gpt = model.config(config);
    const ModelLayout layout(gpt::make_model(gpt), config.segment);
    PerTier<Bytes> budget{config.budget.hbm.value_or(80_GiB),
                          config.budget.dram.value_or(detect_topology().memory),
                          config.budget.nvme.value_or(Bytes{})};
    if (!config.budget.nvme && !config.nvme.empty()) {
      at(budget, Tier::nvme) = drive_facts(config.nvme.front().path).free;
    }
    const auto begin = std::chrono::steady_clock::now();
    const auto plan = plan_engine({layout, budget, config.placement, speeds_of(config),
                                   config.sub_group_elements, config.prefetch_elements});
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    print(gpt, layout, plan, spent.count());
  }

  Speeds speeds_of(const Config& config) const {
    Speeds result = speeds;
    const auto take = [](std::optional<double> given, double& speed) {
      if (given) speed = *given;
    };
    take(config.speeds.host_to_device_gb_s, result.host_to_device_gb_s);
    take(config.speeds.device_to_host_gb_s, result.device_to_host_gb_s);
    take(config.speeds.adam_gb_s, result.adam_gb_s);
    take(config.speeds.compute_tflops, result.compute_tflops);
    if (config.nvme.empty()) return result;
    take(config.nvme.front().read_gb_s, result.nvme_read_gb_s);
    take(config.nvme.front().write_gb_s, result.nvme_write_gb_s);
    return result;
  }

  static void print(const gpt::GptConfig& gpt, const ModelLayout& layout, const EnginePlan& plan,
                    double seconds) {
    const auto count = parameter_count(layout.model());
    fmt::print(
        "model: {} parameters ({} blocks, width {}, {} heads, context {}, batch {}), state {}\n",
        count_text(count), gpt.layers, gpt.width, gpt.heads, gpt.context, gpt.batch,
        to_string(Bytes{count * (12 + 2 * size_of(gpt.parameter_dtype).count)}));
    fmt::print("{}", plan_text(plan.forecast));
    const double tokens = gpt.rows();
    fmt::print("  {:.0f} tokens/s; {} operations per step, planned in {}\n",
               tokens / plan.forecast.step_seconds, plan.training.operations.size(),
               duration_text(seconds));
  }
};

}  // namespace

void add_plan(CLI::App& app, ExitCode&) {
  auto* command = app.add_subcommand(
      "plan", "memory per tier and class, bytes per lane, forecast step time, bottleneck");
  auto state = std::make_shared<PlanCommand>();
  state->model.add(*command);
  state->tiers.add(*command);
  auto& speeds = state->speeds;
  command->add_option("--nvme-read-gb-s", speeds.nvme_read_gb_s, "assumed speed");
  command->add_option("--nvme-write-gb-s", speeds.nvme_write_gb_s, "assumed speed");
  command->add_option("--host-to-device-gb-s", speeds.host_to_device_gb_s, "assumed speed");
  command->add_option("--device-to-host-gb-s", speeds.device_to_host_gb_s, "assumed speed");
  command->add_option("--adam-gb-s", speeds.adam_gb_s, "assumed speed");
  command->add_option("--compute-tflops", speeds.compute_tflops, "assumed speed");
  for (auto* option : command->get_options()) {
    if (option->get_name().ends_with("-s") || option->get_name().ends_with("flops")) {
      option->check(CLI::PositiveNumber);
    }
  }
  command->callback([state] { state->run(); });
}

}  // namespace terrace::cli
