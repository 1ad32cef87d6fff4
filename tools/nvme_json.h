// The bench's result as JSON.
#pragma once

#include <nlohmann/json.hpp>

#include "tools/nvme_result.h"

namespace terrace::cli {

// The keys are described in docs/nvme.md.
nlohmann::json to_json(const BenchResult& result);

// Writes `text` so that the file is either there whole or not at all. Throws Error(io).
void write_file(const std::string& path, const std::string& text);
// Throws Error(io) when a file at `path` could not be written, without making one.
void check_writable(const std::string& path, const std::string& option);

}  // namespace terrace::cli
