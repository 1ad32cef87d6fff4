// The bench's result as text for a terminal.
#pragma once

#include <string>

#include "tools/nvme_result.h"

namespace terrace::cli {

struct TextStyle {
  bool color = false;  // escape sequences may be used
};

std::string facts_text(const std::string& directory, const DriveFacts& facts);
std::string result_text(const BenchResult& result, TextStyle style);

}  // namespace terrace::cli
