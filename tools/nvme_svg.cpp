#include "tools/nvme_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

#include "tools/nvme_pictures.h"

namespace terrace::cli {
namespace {

using Out = std::back_insert_iterator<std::string>;

struct Color {
  double red, green, blue;
};
// Dark blue to yellow, even in brightness and readable without color vision (viridis).
constexpr std::array<Color, 6> kScale{
    {{68, 1, 84}, {65, 68, 135}, {42, 120, 142}, {34, 168, 132}, {122, 209, 81}, {253, 231, 37}}};

Color color_of(double share) {
  const double place = std::clamp(share, 0.0, 1.0) * (kScale.size() - 1);
  const auto below = std::min(kScale.size() - 2, static_cast<std::size_t>(place));
  const double rest = place - static_cast<double>(below);
  const auto& a = kScale[below];
  const auto& b = kScale[below + 1];
  return {a.red + rest * (b.red - a.red), a.green + rest * (b.green - a.green),
          a.blue + rest * (b.blue - a.blue)};
}

std::string css(const Color& color) {
  return fmt::format("rgb({:.0f},{:.0f},{:.0f})", color.red, color.green, color.blue);
}

// Black or white, whichever can be read on it.
const char* ink_on(const Color& color) {
  return 0.299 * color.red + 0.587 * color.green + 0.114 * color.blue > 140 ? "#111" : "#fff";
}

std::string size_text(std::uint64_t bytes) {
  return bytes >= (1 << 20) ? fmt::format("{} MiB", bytes >> 20)
                            : fmt::format("{} KiB", bytes >> 10);
}

std::string time_text(double us) {
  if (us < 1000) return fmt::format("{:.0f} µs", us);
  return us < 1e6 ? fmt::format("{:.1f} ms", us * 1e-3) : fmt::format("{:.1f} s", us * 1e-6);
}

std::string begin_svg(double width, double height, const std::string& label) {
  return fmt::format(
      "<svg viewBox=\"0 0 {:.0f} {:.0f}\" style=\"max-width:{:.0f}px\" role=\"img\" "
      "aria-label=\"{}\">\n",
      width, height, width, escaped(label));
}

void label(Out out, double x, double y, const char* anchor, const std::string& text,
           const char* style = "t") {
  fmt::format_to(out, "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" class=\"{}\">{}</text>\n",
                 x, y, anchor, style, escaped(text));
}

void rule(Out out, double x1, double y1, double x2, double y2, const char* style = "axis") {
  fmt::format_to(out,
                 "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" class=\"{}\"/>\n",
                 x1, y1, x2, y2, style);
}

// A round number that is about a quarter of `most`.
double grid_step(double most) {
  const double raw = most / 4;
  const double unit = std::pow(10.0, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (raw <= factor * unit) return factor * unit;
  }
  return 10 * unit;
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&': result += "&amp;"; break;
      case '<': result += "&lt;"; break;
      case '>': result += "&gt;"; break;
      case '"': result += "&quot;"; break;
      default: result += c;
    }
  }
  return result;
}

std::string heat_map_svg(const DriveResult& drive, bench::Pattern pattern) {
  const auto map = heat_map_of(drive, pattern);
  if (map.blocks.empty()) return {};
  constexpr double kLeft = 70, kTop = 26, kWide = 62, kHigh = 32;
  const double width = kLeft + kWide * static_cast<double>(map.depths.size()) + 4;
  const double height = kTop + kHigh * static_cast<double>(map.blocks.size()) + 24;
  const std::string name(bench::to_string(pattern));
  auto svg = begin_svg(width, height, "heat map of " + name + " by block and depth");
  auto out = std::back_inserter(svg);
  for (std::size_t column = 0; column < map.depths.size(); ++column) {
    label(out, kLeft + kWide * (static_cast<double>(column) + 0.5), kTop - 8, "middle",
          std::to_string(map.depths[column]));
  }
  for (std::size_t row = 0; row < map.blocks.size(); ++row) {
    const double y = kTop + kHigh * static_cast<double>(row);
    label(out, kLeft - 8, y + kHigh / 2 + 4, "end", size_text(map.blocks[row]));
    for (std::size_t column = 0; column < map.depths.size(); ++column) {
      const auto* cell = map.cells[row * map.depths.size() + column];
      if (cell == nullptr) continue;
      const double x = kLeft + kWide * static_cast<double>(column);
      const double speed = cell->median_gb_s();
      const auto color = color_of(speed / map.most_gb_s);
      const auto spread = bench::spread(cell->gb_s);
      fmt::format_to(out,
                     "<g><title>{}: {:.2f} GB/s, {} visits{}</title><rect x=\"{:.1f}\" "
                     "y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" rx=\"3\" fill=\"{}\"/>"
                     "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\" class=\"n\" "
                     "fill=\"{}\">{:.2f}</text></g>\n",
                     cell_text(cell->cell), speed, cell->gb_s.size(),
                     spread ? fmt::format(", spread {:.1f} %", 100 * *spread) : "", x + 1, y + 1,
                     kWide - 2, kHigh - 2, css(color), x + kWide / 2, y + kHigh / 2 + 4,
                     ink_on(color), speed);
      if (drive.knee.found && drive.knee.block_bytes == map.blocks[row] &&
          drive.knee.depth == map.depths[column]) {
        fmt::format_to(out,
                       "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" "
                       "rx=\"4\" class=\"chosen\"/>\n",
                       x + 1.5, y + 1.5, kWide - 3, kHigh - 3);
      }
    }
  }
  label(out, kLeft + (width - kLeft) / 2, height - 6, "middle", "queue depth");
  return svg + "</svg>\n";
}

std::string latency_svg(const DriveResult& drive, bench::Pattern pattern) {
  const auto* cell = drive.of(pattern);
  if (cell == nullptr || cell->latency().count() == 0) return {};
  constexpr int kBars = 40;
  constexpr double kWidth = 440, kHeight = 190, kLeft = 44, kBottom = 34, kTop = 12;
  const auto& latency = cell->latency();
  const auto bars = latency_bars(latency, kBars);
  double most = 0;
  for (const auto& bar : bars) most = std::max(most, bar.share);
  const std::string name(bench::to_string(pattern));
  auto svg = begin_svg(kWidth, kHeight, "latency of " + name);
  auto out = std::back_inserter(svg);
  const double wide = (kWidth - kLeft - 8) / kBars;
  const double high = kHeight - kTop - kBottom;
  for (const double share : {0.0, 0.5, 1.0}) {
    const double y = kTop + high * (1 - share);
    rule(out, kLeft, y, kWidth - 8, y, share == 0 ? "axis" : "grid");
    label(out, kLeft - 6, y + 4, "end", fmt::format("{:.0f} %", 100 * share * most));
  }
  for (std::size_t i = 0; i < bars.size(); ++i) {
    const double tall = bars[i].share / most * high;
    fmt::format_to(out,
                   "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" "
                   "class=\"bar\"><title>{} to {}: {:.2f} %</title></rect>\n",
                   kLeft + wide * static_cast<double>(i) + 0.5, kTop + high - tall, wide - 1, tall,
                   time_text(bars[i].from_us), time_text(bars[i].to_us), 100 * bars[i].share);
  }
  const double below = kHeight - kBottom + 16;
  label(out, kLeft, below, "start", time_text(bars.front().from_us));
  label(out, kLeft + wide * kBars / 2, below, "middle", time_text(bars[bars.size() / 2].from_us));
  label(out, kWidth - 8, below, "end", time_text(bars.back().to_us));
  const double low = bars.front().from_us;
  const double span = std::log(bars.back().to_us / low);
  for (const double q : {0.5, 0.99}) {
    const double at = std::clamp(std::log(latency.quantile_us(q) / low) / span, 0.0, 1.0);
    const double x = kLeft + at * (kWidth - kLeft - 8);
    rule(out, x, kTop, x, kTop + high, "mark");
  }
  label(out, kLeft + wide * kBars / 2, kHeight - 4, "middle",
        "p50 " + time_text(latency.quantile_us(0.5)) + ", p99 " +
            time_text(latency.quantile_us(0.99)),
        "m");
  return svg + "</svg>\n";
}

std::string sustained_svg(const DriveResult& drive) {
  const auto& speeds = drive.sustained_gb_s;
  if (speeds.size() < 2 || !drive.cliff) return {};
  constexpr double kWidth = 900, kHeight = 200, kLeft = 48, kBottom = 30, kTop = 12;
  const double most = *std::ranges::max_element(speeds) * 1.05;
  auto svg = begin_svg(kWidth, kHeight, "speed of a sustained write over time");
  auto out = std::back_inserter(svg);
  const double wide = kWidth - kLeft - 10;
  const double high = kHeight - kTop - kBottom;
  const auto y_of = [&](double speed) { return kTop + high * (1 - speed / most); };
  const double step = grid_step(most);
  for (double speed = 0; speed <= most; speed += step) {
    rule(out, kLeft, y_of(speed), kWidth - 10, y_of(speed), speed == 0 ? "axis" : "grid");
    label(out, kLeft - 6, y_of(speed) + 4, "end", fmt::format("{:g}", speed));
  }
  std::string points;
  for (std::size_t i = 0; i < speeds.size(); ++i) {
    const double x =
        kLeft + wide * (static_cast<double>(i) + 0.5) / static_cast<double>(speeds.size());
    points += fmt::format("{:.1f},{:.1f} ", x, y_of(speeds[i]));
  }
  fmt::format_to(out, "<polyline points=\"{}\" class=\"line\"/>\n", points);
  label(out, kLeft, kHeight - 8, "start", "0 s");
  label(out, kWidth - 10, kHeight - 8, "end", fmt::format("{:.1f} s", drive.sustained_seconds));
  label(out, kLeft + 6, kTop + 10, "start", "GB/s");
  if (drive.cliff->found) {
    rule(out, kLeft, y_of(drive.cliff->after_gb_s), kWidth - 10, y_of(drive.cliff->after_gb_s),
         "mark");
    label(out, kWidth - 14, y_of(drive.cliff->after_gb_s) - 6, "end",
          fmt::format("{:.2f} GB/s after {}", drive.cliff->after_gb_s,
                      to_string(Bytes{drive.cliff->at_bytes})),
          "m");
  }
  return svg + "</svg>\n";
}

std::string fio_svg(const DriveResult& drive) {
  std::vector<const CellResult*> cells;
  double low = 0.9;
  double high = 1.1;
  for (const auto& cell : drive.cells) {
    if (!cell.fio) continue;
    cells.push_back(&cell);
    for (const double ratio : cell.fio->speed.ratios) {
      low = std::min(low, ratio - 0.02);
      high = std::max(high, ratio + 0.02);
    }
  }
  if (cells.empty()) return {};
  constexpr double kWidth = 620, kLeft = 110, kRow = 34, kTop = 10;
  const double height = kTop + kRow * static_cast<double>(cells.size()) + 30;
  auto svg = begin_svg(kWidth, height, "speed relative to fio, with intervals");
  auto out = std::back_inserter(svg);
  const auto x_of = [&](double ratio) {
    return kLeft + (kWidth - kLeft - 20) * (ratio - low) / (high - low);
  };
  rule(out, x_of(1), kTop, x_of(1), height - 24, "mark");
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const auto& speed = cells[i]->fio->speed;
    const double y = kTop + kRow * (static_cast<double>(i) + 0.5);
    label(out, kLeft - 10, y + 4, "end", std::string(bench::to_string(cells[i]->cell.pattern)));
    for (const double ratio : speed.ratios) {
      fmt::format_to(out, "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2.5\" class=\"dot\"/>\n",
                     x_of(ratio), y);
    }
    rule(out, x_of(speed.interval.low), y, x_of(speed.interval.high), y, "interval");
    fmt::format_to(out,
                   "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\" class=\"bar\"><title>{:.3f} "
                   "[{:.3f}, {:.3f}]</title></circle>\n",
                   x_of(speed.ratio), y, speed.ratio, speed.interval.low, speed.interval.high);
  }
  for (const double ratio : {low, 1.0, high}) {
    label(out, x_of(ratio), height - 8, "middle", fmt::format("{:.2f}", ratio));
  }
  return svg + "</svg>\n";
}

}  // namespace terrace::cli
