// The bench's result as one page that needs nothing else: no script, no font, no network.
#pragma once

#include <string>

#include "tools/nvme_result.h"

namespace terrace::cli {

// `json`: the same result, put into the page for machines.
std::string html_report(const BenchResult& result, const std::string& json);

}  // namespace terrace::cli
