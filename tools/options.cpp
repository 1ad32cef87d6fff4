#include "tools/options.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "terrace/error.h"
#include "tools/nvme_tune.h"

namespace terrace::cli {
namespace {

constexpr double kLargestLossScale = 0x1p60;  // as of the configuration

double parse_speed(const std::string& text, const std::string& whole) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || *end != '\0' || !(value > 0) || value > 1e6) {
    throw Error(ErrorCode::invalid_argument,
                "--throttle " + whole + ": '" + text +
                    "' is no positive speed in GB/s (of compute: factor)");
  }
  return value;
}

}  // namespace

CLI::Validator whole_number(std::uint64_t low) {
  const auto check = [low](const std::string& text) -> std::string {
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error == std::errc::result_out_of_range) return text + " is too large";
    const bool whole = error == std::errc{} && end == text.data() + text.size();
    if (whole && value >= low) return {};
    return "'" + text + "' is not a whole number from " + std::to_string(low) + " on";
  };
  return CLI::Validator(check, "UINT");
}

void ModelOptions::add(CLI::App& command) {
  command.add_option("--model", size, "a built-in size: 1M, 10M, 100M, 1B, 7B, ... 1T");
  command.add_option("--layers", layers, "transformer blocks");
  command.add_option("--width", width, "model width");
  command.add_option("--heads", heads, "attention heads; must divide the width");
  command.add_option("--context", context, "bytes of one sequence");
  command.add_option("--batch", batch, "sequences of one micro-batch");
  command.add_option("--seed", gpt.seed, "of initial values, batches and samples");
  command.add_option("--dtype", dtype, "of parameters and gradients: bf16, fp16 or fp32");
}

gpt::GptConfig ModelOptions::config(const Config& file) const {
  gpt::GptConfig result = gpt;
  if (!size.empty()) {
    const gpt::NamedSize* found = nullptr;
    std::string known;
    for (const auto& named : gpt::named_sizes()) {
      if (size == named.name) found = &named;
      known += std::string(known.empty() ? "" : ", ") + named.name;
    }
    if (found == nullptr) {
      throw Error(ErrorCode::invalid_argument,
                  "--model " + size + " is no built-in size; there are " + known);
    }
    result.layers = found->layers;
    result.width = found->width;
    result.heads = found->heads;
    result.context = found->context;
    result.batch = found->batch;
  }
  result.layers = layers.value_or(result.layers);
  result.width = width.value_or(result.width);
  result.heads = heads.value_or(result.heads);
  result.context = context.value_or(result.context);
  if (const auto sequences = file.train_micro_batch_size) {
    if (*sequences > ~std::uint32_t{0}) {
      throw Error(ErrorCode::invalid_argument, "a micro-batch of " + std::to_string(*sequences) +
                                                   " sequences is too large for this model");
    }
    result.batch = static_cast<std::uint32_t>(*sequences);
  }
  result.batch = batch.value_or(result.batch);
  const DType fallback = file.parameter_dtype.value_or(DType::bf16);
  result.parameter_dtype = result.gradient_dtype = dtype ? parse_dtype(*dtype) : fallback;
  gpt::validate(result);
  return result;
}

void GradientOptions::add(CLI::App& command) {
  command.add_option("--clip", clip, "the largest norm of all gradients together, or none");
  command.add_option("--loss-scale", loss_scale,
                     "of fp16 training: a factor, or 0 to adapt it to the gradients (0)");
  command
      .add_option("--micro-batches", micro_batches,
                  "of one step: their gradients are added up and divided by their number (1)")
      ->check(CLI::Range(1, 1000000));
  command.add_option("--accumulation-dtype", accumulation,
                     "of that sum: fp32, or the dtype of the gradients (fp32)");
}

void GradientOptions::apply_clip(Config& config) const {
  if (clip.empty()) return;
  if (clip == "none") {
    config.gradient_clipping = 0;
    return;
  }
  char* end = nullptr;
  const double norm = std::strtod(clip.c_str(), &end);
  if (*end != '\0' || !(norm > 0) || !std::isfinite(norm)) {
    throw Error(ErrorCode::invalid_argument,
                "--clip " + clip + ": a positive norm is expected, or none");
  }
  config.gradient_clipping = norm;
}

void GradientOptions::apply_micro_batches(DType gradients, Config& config) const {
  config.micro_batches = micro_batches.value_or(config.micro_batches);
  if (accumulation) config.accumulation_dtype = parse_dtype(*accumulation);
  if (config.accumulation_dtype == DType::fp32 || config.accumulation_dtype == gradients) return;
  throw Error(ErrorCode::invalid_argument,
              "--accumulation-dtype " + std::string(to_string(config.accumulation_dtype)) +
                  " (grad_accum_dtype): gradients in " + std::string(to_string(gradients)) +
                  " are added up in fp32 or in their own dtype");
}

void GradientOptions::apply(DType parameters, Config& config) const {
  apply_clip(config);
  apply_micro_batches(parameters, config);
  config.loss_scale.enabled = parameters == DType::fp16;
  if (!loss_scale) return;
  if (!config.loss_scale.enabled) {
    throw Error(ErrorCode::invalid_argument,
                "--loss-scale is for fp16, not for " + std::string(to_string(parameters)) +
                    "; leave it out or add --dtype fp16");
  }
  if (!(*loss_scale >= 0 && *loss_scale <= kLargestLossScale)) {
    throw Error(ErrorCode::invalid_argument,
                "--loss-scale: 0 (adapted to the gradients) or a positive factor up to 2^60 is "
                "expected");
  }
  config.loss_scale.constant = *loss_scale;
}

void TierOptions::add(CLI::App& command) {
  command.add_option("--config", config_file, "a JSON configuration (docs/config.md)");
  command.add_option("--hbm", hbm, "budget on the device, for example 128MiB");
  command.add_option("--dram", dram, "budget in RAM");
  command
      .add_option("--nvme", nvme,
                  "directory on the drive that takes the rest; several for several drives")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command.add_option("--nvme-budget", nvme_budget, "budget on all drives together");
  command.add_option("--keep-free", keep_free, "never leave less than this free on a drive");
  command
      .add_option("--slots", slots,
                  "2: a run can be killed and resumed; 1: half the space, nothing survives")
      ->check(CLI::Range(1, 2));
  command.add_option("--commit-interval", commit_interval, "steps between commits (1)")
      ->check(whole_number(1));
  command.add_option("--segment", segment,
                     "parameter bytes of a segment, a power of two from 4096");
  command.add_option("--io", io_engine, "auto, io_uring, threads or memory");
  command.add_option("--adam-threads", adam_threads, "workers of the optimizer; 0: one per core");
  command.add_option("--throttle", throttle,
                     "emulated speeds in GB/s, for example nvme_read=1.0,host_to_device=4.0; "
                     "compute=1 doubles every layer's time");
}

Config TierOptions::config() const {
  Config config = config_file.empty() ? Config{} : load_config(config_file);
  if (!hbm.empty()) config.budget.hbm = parse_bytes(hbm);
  if (!dram.empty()) config.budget.dram = parse_bytes(dram);
  if (!nvme_budget.empty()) config.budget.nvme = parse_bytes(nvme_budget);
  if (!nvme.empty()) config.nvme = drives(config.nvme);
  if (!keep_free.empty()) {
    for (auto& drive : config.nvme) drive.keep_free = parse_bytes(keep_free);
  }
  if (slots) config.store.slots = *slots;
  if (commit_interval) config.store.commit_interval = *commit_interval;
  if (commit_interval && config.store.slots == 1) {
    config.notes.emplace_back("--commit-interval has no effect with one slot, which none uses");
  }
  apply_tuned(config, has_aio_block(config_file));
  if (!segment.empty()) config.segment = parse_bytes(segment);
  if (!io_engine.empty()) config.io.kind = parse_io_engine(io_engine);
  if (adam_threads) config.adam_threads = *adam_threads;
  if (!throttle.empty()) apply_throttle(throttle, config);
  return config;
}

std::vector<NvmeConfig> TierOptions::drives(const std::vector<NvmeConfig>& known) const {
  std::vector<NvmeConfig> result;
  for (const auto& directory : nvme) {
    NvmeConfig drive{directory};
    for (const auto& other : known) {
      if (other.path == directory) drive = other;
    }
    for (const auto& other : result) {
      if (std::filesystem::weakly_canonical(other.path) !=
          std::filesystem::weakly_canonical(directory)) {
        continue;
      }
      throw Error(ErrorCode::invalid_argument,
                  "--nvme " + directory + " is named twice; name each drive once");
    }
    result.push_back(drive);
  }
  return result;
}

void apply_throttle(const std::string& text, Config& config) {
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const auto equals = entry.find('=');
    const std::string lane = entry.substr(0, equals);
    const double speed =
        parse_speed(equals == std::string::npos ? "" : entry.substr(equals + 1), entry);
    if (lane == "nvme_read") config.io.read.gb_s = speed;
    else if (lane == "nvme_write") config.io.write.gb_s = speed;
    else if (lane == "host_to_device") config.throttle.host_to_device.gb_s = speed;
    else if (lane == "device_to_host") config.throttle.device_to_host.gb_s = speed;
    else if (lane == "adam") config.throttle.adam_gb_s = speed;
    else if (lane == "compute") config.throttle.compute_delay = speed;
    else
      throw Error(ErrorCode::invalid_argument,
                  "--throttle: '" + lane +
                      "' is no lane; there are nvme_read, nvme_write, host_to_device, "
                      "device_to_host, adam and compute");
  }
}

}  // namespace terrace::cli
