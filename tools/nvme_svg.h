// Pictures of a bench as SVG for the page: colors are the page's, so that both themes work.
#pragma once

#include <string>

#include "tools/nvme_result.h"

namespace terrace::cli {

// Text for HTML and SVG.
std::string escaped(const std::string& text);

// Each is empty when there is nothing to draw.
std::string heat_map_svg(const DriveResult& drive, bench::Pattern pattern);
std::string latency_svg(const DriveResult& drive, bench::Pattern pattern);
std::string sustained_svg(const DriveResult& drive);
std::string fio_svg(const DriveResult& drive);

}  // namespace terrace::cli
