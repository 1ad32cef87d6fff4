// What a bench says, as configuration: written by `terrace nvme tune`, read by `terrace train`.
#pragma once

#include <string>

#include "terrace/config.h"
#include "tools/nvme_result.h"

namespace terrace::cli {

// In a drive's directory: what tune found out about that drive.
inline constexpr const char* kTunedFile = "terrace.tuned.json";

// The blocks "aio" and "terrace.nvme" for the drives of `result`, as load_config() reads them.
// With several drives, the setting with the most bytes in flight serves all.
// Throws Error(unavailable), and says why, when a drive has no recommendation.
std::string tuned_config(const BenchResult& result);

// The "aio" block under the names that DeepSpeed's runtime reads (its swap_tensor/constants.py).
std::string deepspeed_config(const BenchResult& result);

// Takes what the tuned files in the directories of `config` say and nothing else does: the speeds
// of a drive, and the I/O block and depth unless `has_aio`. Adds a note for each file.
void apply_tuned(Config& config, bool has_aio);

// Whether the JSON file has an "aio" block of its own.
bool has_aio_block(const std::string& config_file);

}  // namespace terrace::cli
