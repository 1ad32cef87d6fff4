// terrace plan: what a model needs and how long a step takes, without running anything.
#include <fmt/core.h>

#include <chrono>
#include <memory>

#include "runtime/engine_store.h"
#include "runtime/gradient_rules.h"
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
  GradientOptions gradients;
  Speeds speeds;

  void run() const {
    auto config = tiers.config();
    const auto gpt = model.config(config);
    gradients.apply(gpt.parameter_dtype, config);
    const ModelLayout layout(gpt::make_model(gpt), config.segment, config.accumulation_dtype);
    PerTier<Bytes> budget{config.budget.hbm.value_or(80_GiB),
                          config.budget.dram.value_or(detect_topology().memory),
                          config.budget.nvme.value_or(Bytes{})};
    const auto drives = drives_of(config);
    const auto durability = durability_of(config, drives);
    if (!config.budget.nvme) {
      at(budget, Tier::nvme) = free_on_drives(config.nvme, durability.weights, config.store.mode);
    }
    auto assumed = speeds_of(config);
    combine(drives, durability.weights, assumed);
    const auto begin = std::chrono::steady_clock::now();
    PlannerInput input{layout, budget, config.placement, assumed, config.sub_group_elements,
                       config.prefetch_elements, durability, {}};
    const auto plan = plan_engine(input, update_rule(config));
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    print(gpt, layout, plan, spent.count(), config);
    if (!config.nvme.empty()) compare(input, update_rule(config), plan.forecast);
  }

  // What surviving costs, against the other choices.
  static void compare(PlannerInput input, const UpdateRule& rule, const Forecast& chosen) {
    fmt::print("  {:<34}{:>14}{:>16}{:>14}\n", "choice", "on nvme", "written/step", "step");
    const auto row = [&](const std::string& name, std::uint32_t slots, std::uint64_t interval) {
      input.durability.two_slots = slots == 2;
      input.durability.commit_interval = interval;
      try {
        const auto forecast = plan_engine(input, rule).forecast;
        fmt::print("  {:<34}{:>14}{:>16}{:>14}{}\n", name,
                   to_string(at(forecast.tiers, Tier::nvme).peak), to_string(written(forecast)),
                   duration_text(forecast.step_seconds),
                   forecast.durability.two_slots == chosen.durability.two_slots &&
                           (slots == 1 || interval == chosen.durability.commit_interval)
                       ? "  <- chosen"
                       : "");
      } catch (const Error&) {
        fmt::print("  {:<34}{:>14}\n", name, "does not fit");
      }
    };
    row("--slots 2", 2, 1);
    const auto interval = chosen.durability.commit_interval;
    const std::uint64_t rare = interval > 1 ? interval : 100;
    row(fmt::format("--slots 2 --commit-interval {}", rare), 2, rare);
    row("--slots 1 (nothing survives)", 1, 1);
  }

  // Mean over the steps between two commits.
  static Bytes written(const Forecast& forecast) {
    const Bytes usual = at(forecast.lanes, Lane::nvme_write).bytes;
    const auto& durability = forecast.durability;
    if (!durability.two_slots) return usual;
    if (durability.commit_interval == 1) return usual + at(forecast.lanes, Lane::commit).bytes;
    return usual + durability.commit_bytes / durability.commit_interval;
  }

  std::vector<DriveSpeed> drives_of(const Config& config) const {
    std::vector<DriveSpeed> drives;
    for (const auto& drive : config.nvme) {
      drives.push_back({drive.read_gb_s.value_or(speeds.nvme_read_gb_s),
                        drive.write_gb_s.value_or(speeds.nvme_write_gb_s)});
    }
    return drives;
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
    return result;
  }

  static void print(const gpt::GptConfig& gpt, const ModelLayout& layout, const EnginePlan& plan,
                    double seconds, const Config& config) {
    const auto count = parameter_count(layout.model());
    fmt::print(
        "model: {} parameters ({} blocks, width {}, {} heads, context {}, batch {}), state {}\n",
        count_text(count), gpt.layers, gpt.width, gpt.heads, gpt.context,
        batch_text(gpt.batch, config),
        to_string(Bytes{count * (12 + 2 * size_of(gpt.parameter_dtype).count)}));
    for (const auto& note : config.notes) fmt::print("note: {}\n", note);
    fmt::print("{}{}", plan_text(plan.forecast), updates_text(config, plan.forecast));
    const double tokens = static_cast<double>(gpt.rows()) * config.micro_batches;
    fmt::print("  {:.0f} tokens/s; {} operations per step, planned in {}\n",
               tokens / plan.forecast.step_seconds, operations(plan), duration_text(seconds));
  }

  static std::uint64_t operations(const EnginePlan& plan) {
    const auto of = [&](PassKind kind) -> std::uint64_t {
      return plan.plan(kind).operations.size();
    };
    const std::uint64_t further = plan.form.micro_batches - 1;  // all but the first
    if (further == 0) return of(PassKind::training);
    return of(PassKind::training) + (further - 1) * of(PassKind::adding) + of(PassKind::closing);
  }
};

}  // namespace

void add_plan(CLI::App& app, ExitCode&) {
  auto* command = app.add_subcommand(
      "plan", "memory per tier and class, bytes per lane, forecast step time, bottleneck");
  auto state = std::make_shared<PlanCommand>();
  state->model.add(*command);
  state->tiers.add(*command);
  state->gradients.add(*command);
  auto& speeds = state->speeds;
  command->add_option("--nvme-read-gb-s", speeds.nvme_read_gb_s, "assumed speed of each drive");
  command->add_option("--nvme-write-gb-s", speeds.nvme_write_gb_s, "assumed speed of each drive");
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
