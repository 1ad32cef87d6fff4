#include "tools/report.h"

#include <fmt/format.h>

#include <iterator>

namespace terrace::cli {

std::string duration_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.1f} ms", seconds * 1e3);
  if (seconds < 120) return fmt::format("{:.2f} s", seconds);
  if (seconds < 7200) return fmt::format("{:.1f} min", seconds / 60);
  return fmt::format("{:.1f} h", seconds / 3600);
}

std::string count_text(std::uint64_t count) {
  const auto value = static_cast<double>(count);
  if (value >= 1e12) return fmt::format("{:.2f}T", value / 1e12);
  if (value >= 1e9) return fmt::format("{:.2f}B", value / 1e9);
  if (value >= 1e6) return fmt::format("{:.2f}M", value / 1e6);
  return fmt::format("{:.1f}K", value / 1e3);
}

std::string printable(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto value = static_cast<unsigned char>(c);
    if (c == '\n' || c == '\t' || (value >= 0x20 && value < 0x7f)) {
      text += c;
    } else {
      text += fmt::format("\\x{:02x}", value);
    }
  }
  return text;
}

std::string durability_text(const DurabilityForecast& durability, double step_seconds) {
  if (!durability.two_slots) return "  durability: none; nothing survives the run\n";
  const auto every = durability.commit_interval == 1
                         ? std::string("every step")
                         : fmt::format("every {} steps", durability.commit_interval);
  return fmt::format(
      "  durability: commit {}; nvme holds {} of states, and {} of second slot and tables\n"
      "              a committing step writes {} more and takes {}, {} on average\n",
      every, to_string(durability.copies), to_string(durability.overhead),
      to_string(durability.commit_bytes), duration_text(durability.commit_step_seconds),
      duration_text(step_seconds));
}

std::string batch_text(std::uint32_t batch, const Config& config) {
  if (config.micro_batches == 1) return std::to_string(batch);
  return fmt::format("{} x {} summed in {}", config.micro_batches, batch,
                     to_string(config.accumulation_dtype));
}

std::string optimizer_text(const Config& config) {
  const auto& adam = config.optimizer;
  auto text = fmt::format("{} (betas {} and {}, epsilon {}, weight decay {}{})",
                          adam.mode == AdamMode::adamw ? "AdamW" : "Adam", adam.beta1, adam.beta2,
                          adam.epsilon, adam.weight_decay,
                          adam.bias_correction ? "" : ", no bias correction");
  if (config.gradient_clipping > 0) {
    text += fmt::format(" clipped to norm {}", config.gradient_clipping);
  }
  const auto& scale = config.loss_scale;
  if (scale.enabled && scale.constant > 0) text += fmt::format(", loss scale {}", scale.constant);
  if (scale.enabled && scale.constant == 0) {
    text += fmt::format(", loss scale from 2^{}, window {}, hysteresis {}, at least {}",
                        scale.initial_power, scale.window, scale.hysteresis, scale.minimum);
  }
  return text;
}

std::string updates_text(const Config& config, const Forecast& forecast) {
  if (!forecast.updates_deferred) {
    return fmt::format("  updates: in the step's own backward, layer by layer\n"
                       "           a gradient that is not finite {}\n",
                       forecast.atomic_steps ? "undoes the step" : "ends the run");
  }
  std::string why;
  const auto add = [&](const std::string& reason) { why += (why.empty() ? "" : " and ") + reason; };
  if (config.gradient_clipping > 0) {
    add(fmt::format("clipping to norm {}", config.gradient_clipping));
  }
  const auto& scale = config.loss_scale;
  if (scale.enabled) {
    add(scale.constant > 0 ? fmt::format("the loss scale {}", scale.constant)
                           : "the dynamic loss scale");
  }
  if (config.micro_batches > 1) add(fmt::format("{} micro-batches", config.micro_batches));
  if (why.empty()) add("steps that are skipped whole: not every step commits");
  const auto& dram = at(forecast.tiers, Tier::dram);
  return fmt::format("  updates: in the next step's forward, for {}\n"
                     "           {} of gradients wait in dram until all are there\n",
                     why, to_string(at(dram.resident, TensorClass::gradient)));
}

std::string plan_text(const Forecast& forecast) {
  std::string text;
  auto out = std::back_inserter(text);
  fmt::format_to(out, "  {:<6}{:>12}{:>12}{:>12}{:>12}{:>12}{:>12}{:>12}\n", "tier", "budget",
                 "reserved", "parameters", "gradients", "optimizer", "buffers", "free");
  for (const Tier tier : kTiers) {
    const auto& entry = at(forecast.tiers, tier);
    fmt::format_to(out, "  {:<6}{:>12}{:>12}{:>12}{:>12}{:>12}{:>12}{:>12}\n", to_string(tier),
                   to_string(entry.budget), to_string(entry.peak),
                   to_string(at(entry.resident, TensorClass::parameter)),
                   to_string(at(entry.resident, TensorClass::gradient)),
                   to_string(at(entry.resident, TensorClass::optimizer_state)),
                   to_string(entry.transient), to_string(entry.budget - entry.peak));
  }
  fmt::format_to(out, "  {:<16}{:>14}{:>14}\n", "lane", "bytes/step", "floor");
  for (const Lane lane : kLanes) {
    const auto& entry = at(forecast.lanes, lane);
    fmt::format_to(out, "  {:<16}{:>14}{:>14}{}\n", to_string(lane),
                   lane == Lane::compute ? std::string("-") : to_string(entry.bytes),
                   duration_text(entry.seconds),
                   lane == forecast.bottleneck ? "  <- bottleneck" : "");
  }
  text += durability_text(forecast.durability, forecast.step_seconds);
  fmt::format_to(out,
                 "  forecast: {} per step, {:.2f} times the bottleneck's floor; {} of it not "
                 "beneath compute\n",
                 duration_text(forecast.step_seconds),
                 forecast.step_seconds / at(forecast.lanes, forecast.bottleneck).seconds,
                 duration_text(forecast.exposed_seconds));
  return text;
}

std::string lanes_text(const Forecast& forecast, const EngineStats& stats, std::uint64_t steps,
                       double mean_step_seconds, double seconds) {
  std::string text;
  auto out = std::back_inserter(text);
  const double n = static_cast<double>(steps);
  fmt::format_to(out, "  {:<16}{:>14}{:>14}{:>14}{:>10}{:>9}\n", "lane", "bytes/step",
                 "forecast", "measured", "GB/s", "busy");
  for (const Lane lane : kLanes) {
    const auto& seen = at(stats.lanes, lane);
    const double busy = seen.busy_seconds / n;
    const bool moves = lane != Lane::compute && seen.busy_seconds > 0;
    fmt::format_to(out, "  {:<16}{:>14}{:>14}{:>14}{:>10}{:>8.0f}%\n", to_string(lane),
                   lane == Lane::compute ? std::string("-") : to_string(seen.bytes / steps),
                   duration_text(at(forecast.lanes, lane).seconds), duration_text(busy),
                   moves ? fmt::format("{:.2f}", static_cast<double>(seen.bytes.count) /
                                                     seen.busy_seconds / 1e9)
                         : std::string("-"),
                   100 * seen.busy_seconds / seconds);
  }
  fmt::format_to(out, "  {:<16}{:>14}{:>14}{:>14}\n", "step", "",
                 duration_text(forecast.step_seconds), duration_text(mean_step_seconds));
  return text;
}

}  // namespace terrace::cli
