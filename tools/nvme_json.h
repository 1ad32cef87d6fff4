// The bench's result as JSON.
#pragma once

#include <nlohmann/json.hpp>

#include "tools/nvme_result.h"

namespace terrace::cli {

// The keys are described in docs/nvme.md.
nlohmann::json to_json(const BenchResult& result);

}  // namespace terrace::cli
