#include "tools/nvme_pictures.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>

namespace terrace::cli {
namespace {

constexpr int kBars = 12;
constexpr int kBarWidth = 40;
// From dark to bright on a terminal of 256 colors, and the shades for those without.
constexpr int kColors[] = {17, 18, 19, 25, 31, 37, 43, 78, 113, 148, 184, 220};
constexpr const char* kShades[] = {" ", "░", "▒", "▓", "█"};

std::string short_size(std::uint64_t bytes) {
  return bytes >= (1 << 20) ? fmt::format("{} MiB", bytes >> 20)
                            : fmt::format("{} KiB", bytes >> 10);
}

std::string short_time(double us) {
  if (us < 1000) return fmt::format("{:.0f} us", us);
  return us < 1e6 ? fmt::format("{:.1f} ms", us * 1e-3) : fmt::format("{:.1f} s", us * 1e-6);
}

std::string painted(const std::string& text, double share, bool color) {
  const auto level = [share](std::size_t count) {
    const auto place = share * static_cast<double>(count);
    return std::min(count - 1, static_cast<std::size_t>(std::max(0.0, place)));
  };
  if (!color) return text + kShades[level(std::size(kShades))];
  const auto paint = level(std::size(kColors));
  return fmt::format("\x1b[48;5;{}m\x1b[38;5;{}m{}\x1b[0m", kColors[paint], paint > 6 ? 16 : 231,
                     text);
}

}  // namespace

HeatMap heat_map_of(const DriveResult& drive, bench::Pattern pattern) {
  std::set<std::uint64_t> blocks;
  std::set<std::uint32_t> depths;
  const auto wanted = [&](const CellResult& cell) {
    return cell.in_sweep && cell.cell.pattern == pattern && cell.cell.threads == 1;
  };
  for (const auto& cell : drive.cells) {
    if (!wanted(cell)) continue;
    blocks.insert(cell.cell.block_bytes);
    depths.insert(cell.cell.depth);
  }
  HeatMap map{{blocks.begin(), blocks.end()}, {depths.begin(), depths.end()}, {}, 0};
  map.cells.resize(blocks.size() * depths.size());
  for (const auto& cell : drive.cells) {
    if (!wanted(cell)) continue;
    const auto row = std::ranges::find(map.blocks, cell.cell.block_bytes) - map.blocks.begin();
    const auto column = std::ranges::find(map.depths, cell.cell.depth) - map.depths.begin();
    map.cells[static_cast<std::size_t>(row) * depths.size() + static_cast<std::size_t>(column)] =
        &cell;
    map.most_gb_s = std::max(map.most_gb_s, cell.median_gb_s());
  }
  return map;
}

std::string heat_map(const DriveResult& drive, bench::Pattern pattern, bool color) {
  const auto map = heat_map_of(drive, pattern);
  if (map.blocks.empty()) return {};
  std::string text;
  auto out = std::back_inserter(text);
  fmt::format_to(out, "\n  {} in GB/s, block by depth\n  {:>9}", bench::to_string(pattern), "");
  for (const auto depth : map.depths) fmt::format_to(out, "{:>8}{}", depth, color ? "" : " ");
  fmt::format_to(out, "\n");
  for (std::size_t row = 0; row < map.blocks.size(); ++row) {
    fmt::format_to(out, "  {:>9}", short_size(map.blocks[row]));
    for (std::size_t column = 0; column < map.depths.size(); ++column) {
      const auto* cell = map.cells[row * map.depths.size() + column];
      if (cell == nullptr) {
        fmt::format_to(out, "{:>8}{}", "", color ? "" : " ");
        continue;
      }
      const bool chosen = drive.knee.found && drive.knee.block_bytes == map.blocks[row] &&
                          drive.knee.depth == map.depths[column];
      const auto number = fmt::format("{:.2f}", cell->median_gb_s());
      fmt::format_to(
          out, "{}",
          painted(chosen ? fmt::format("{:>8}", "[" + number + "]") : fmt::format("{:>7} ", number),
                  cell->median_gb_s() / map.most_gb_s, color));
    }
    fmt::format_to(out, "\n");
  }
  return text;
}

std::vector<LatencyBar> latency_bars(const bench::LatencyHistogram& latency, int most) {
  using Histogram = bench::LatencyHistogram;
  std::size_t first = Histogram::kBuckets;
  std::size_t last = 0;
  for (std::size_t i = 0; i < Histogram::kBuckets; ++i) {
    if (latency.at(i) == 0) continue;
    first = std::min(first, i);
    last = i;
  }
  if (first > last) return {};
  const double low = std::max(1.0, static_cast<double>(Histogram::lower_bound(first)));
  const double high = static_cast<double>(Histogram::lower_bound(last + 1));
  const double step = std::log(high / low) / most;
  std::vector<LatencyBar> bars;
  for (int i = 0; i < most; ++i) {
    bars.push_back({low * std::exp(step * i) * 1e-3, low * std::exp(step * (i + 1)) * 1e-3, 0});
  }
  for (std::size_t i = first; i <= last; ++i) {
    const double middle = std::sqrt(std::max(1.0, static_cast<double>(Histogram::lower_bound(i))) *
                                    static_cast<double>(Histogram::lower_bound(i + 1)));
    const auto bar = std::clamp(static_cast<int>(std::log(middle / low) / step), 0, most - 1);
    bars[static_cast<std::size_t>(bar)].share +=
        static_cast<double>(latency.at(i)) / static_cast<double>(latency.count());
  }
  return bars;
}

std::string latency_picture(const DriveResult& drive) {
  std::string text;
  auto out = std::back_inserter(text);
  for (const auto pattern : {bench::Pattern::read, bench::Pattern::overwrite}) {
    const auto* cell = drive.of(pattern);
    if (cell == nullptr || cell->latency().count() == 0) continue;
    const auto bars = latency_bars(cell->latency(), kBars);
    double most = 0;
    for (const auto& bar : bars) most = std::max(most, bar.share);
    fmt::format_to(out, "\n  latency of {}, {}\n", bench::to_string(pattern),
                   cell_text(cell->cell));
    for (const auto& bar : bars) {
      const auto length = static_cast<int>(std::lround(bar.share / most * kBarWidth));
      std::string blocks;
      for (int i = 0; i < length; ++i) blocks += "█";
      if (length == 0 && bar.share > 0) blocks = "▏";
      fmt::format_to(out, "  {:>9} {}{}\n", short_time(bar.from_us), blocks,
                     bar.share > 0 ? fmt::format(" {:.1f} %", 100 * bar.share) : "");
    }
  }
  return text;
}

std::string sparkline(const std::vector<double>& values) {
  constexpr const char* kSteps[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  constexpr std::size_t kWidth = 80;
  if (values.empty()) return {};
  const double most = *std::ranges::max_element(values);
  const auto width = std::min(kWidth, values.size());
  std::string text;
  for (std::size_t i = 0; i < width; ++i) {
    const auto begin = i * values.size() / width;
    const auto end = std::max(begin + 1, (i + 1) * values.size() / width);
    double sum = 0;
    for (auto k = begin; k < end; ++k) sum += values[k];
    const double share = most > 0 ? sum / static_cast<double>(end - begin) / most : 0;
    text += kSteps[std::clamp<long>(std::lround(share * 8), 0, 8)];
  }
  return text;
}

}  // namespace terrace::cli
