// Options that several sub-commands share, and their way into a Config.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "terrace/config.h"
#include "tools/gpt_model.h"

namespace terrace::cli {

// A whole number from `low` on that fits.
CLI::Validator whole_number(std::uint64_t low);

struct ModelOptions {
  std::string size;  // a name of gpt::named_sizes(), or empty
  gpt::GptConfig gpt;
  std::optional<std::uint32_t> layers, width, heads, context, batch;
  std::optional<std::string> dtype;

  void add(CLI::App& command);
  // The named size or the defaults, with what was given explicitly; the dtype is the flag's, or
  // that of `file`, or bf16.
  gpt::GptConfig config(const Config& file) const;
};

struct TierOptions {
  std::string config_file;
  std::string hbm, dram, nvme_budget;  // sizes
  std::vector<std::string> nvme;       // a directory on each drive
  std::optional<std::uint32_t> slots;
  std::optional<std::uint64_t> commit_interval;
  std::string keep_free;               // a size
  std::string throttle;                // "nvme_read=1.0,adam=2"
  std::string io_engine;
  std::string segment;
  std::optional<int> adam_threads;

  void add(CLI::App& command);
  // The file's configuration with the flags over it. Directories that the file names too keep what
  // it says about them; what nothing says comes from the drive's tuned file (nvme_tune.h), if any.
  Config config() const;

 private:
  std::vector<NvmeConfig> drives(const std::vector<NvmeConfig>& known) const;
};

// What becomes of the gradients before the update.
struct GradientOptions {
  std::string clip;  // a norm, or "none"
  std::optional<double> loss_scale;
  std::optional<std::uint32_t> micro_batches;
  std::optional<std::string> accumulation;  // a dtype

  void add(CLI::App& command);
  // Over what `config` says. Losses are scaled when parameters are fp16, and only then. Throws
  // Error(invalid_argument) naming the option.
  void apply(DType parameters, Config& config) const;

 private:
  void apply_clip(Config& config) const;
  void apply_micro_batches(DType gradients, Config& config) const;
};

// Throws Error(invalid_argument) naming the lane that is unknown or the value that is no speed.
void apply_throttle(const std::string& text, Config& config);

}  // namespace terrace::cli
