#include "tools/nvme_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "tools/nvme_pairs.h"
#include "tools/nvme_pictures.h"
#include "tools/report.h"

namespace terrace::cli {
namespace {

constexpr double kOthersShare = 1.15;  // moved on the drive, over what was asked for

using bench::Pattern;
using Out = std::back_insert_iterator<std::string>;

void line(Out out, const char* what, const std::string& value) {
  if (!value.empty()) fmt::format_to(out, "  {:<16}{}\n", what, value);
}

std::string latency_text(double us) {
  if (us < 1000) return fmt::format("{:.0f} us", us);
  return us < 1e6 ? fmt::format("{:.2f} ms", us * 1e-3) : fmt::format("{:.2f} s", us * 1e-6);
}

void latency_row(Out out, const char* name, const bench::LatencyHistogram& latency) {
  if (latency.count() == 0) return;
  fmt::format_to(out, "    {:<33}{:>10}{:>10}{:>10}{:>10}{:>10}\n", name,
                 latency_text(latency.quantile_us(0.5)), latency_text(latency.quantile_us(0.9)),
                 latency_text(latency.quantile_us(0.99)), latency_text(latency.quantile_us(0.999)),
                 latency_text(latency.max_us()));
}

void pattern_table(Out out, const DriveResult& drive) {
  fmt::format_to(out, "\n  {:<16}{:>17}{:>8}{:>9}{:>11}{:>12}\n", "pattern", "block x depth",
                 "GB/s", "spread", "CPU s/GB", "calls/GB");
  for (const auto& cell : drive.cells) {
    if (cell.in_sweep) continue;
    const auto spread = bench::spread(cell.gb_s);
    fmt::format_to(out, "  {:<16}{:>17}{:>8.2f}{:>9}{:>11.4f}{:>12}\n",
                   bench::to_string(cell.cell.pattern), cell_text(cell.cell), cell.median_gb_s(),
                   spread ? fmt::format("{:.1f} %", 100 * *spread) : "-",
                   bench::median(cell.cpu_seconds_per_gb),
                   cell.system_calls_per_gb.empty()
                       ? std::string("-")
                       : fmt::format("{:.0f}", bench::median(cell.system_calls_per_gb)));
  }
  fmt::format_to(out, "\n  {:<35}{:>10}{:>10}{:>10}{:>10}{:>10}\n", "latency", "p50", "p90", "p99",
                 "p99.9", "most");
  for (const auto& cell : drive.cells) {
    if (cell.in_sweep) continue;
    fmt::format_to(out, "  {} {}\n", bench::to_string(cell.cell.pattern), cell_text(cell.cell));
    latency_row(out, "read", cell.read);
    latency_row(out, "write", cell.write);
    latency_row(out, "flush", cell.flush);
  }
  if (drive.file.direct) {
    fmt::format_to(out, "  CPU copies: 0 (direct, and no page in the cache)\n");
  }
  if (!drive.system_calls_note.empty()) {
    fmt::format_to(out, "  note: {}\n", drive.system_calls_note);
  }
}

void fio_table(Out out, const DriveResult& drive) {
  if (!drive.fio_note.empty()) fmt::format_to(out, "\n  fio: {}\n", drive.fio_note);
  bool head = false;
  bool ordinary_pages = false;
  for (const auto& cell : drive.cells) {
    if (!cell.fio) continue;
    if (!head) {
      fmt::format_to(out, "\n  {:<16}{:>17}{:>8}{:>8}{:>22}{:>20}\n", "against fio",
                     "block x depth", "fio", "ratio", "95 % interval", "CPU ratio");
    }
    head = true;
    const auto& fio = *cell.fio;
    fmt::format_to(out, "  {:<16}{:>17}{:>8.2f}{:>8.3f}{:>22}{:>20}\n",
                   bench::to_string(cell.cell.pattern), cell_text(cell.cell),
                   bench::median(fio.gb_s), fio.speed.ratio,
                   fmt::format("[{:.3f}, {:.3f}] of {}", fio.speed.interval.low,
                               fio.speed.interval.high, fio.speed.ratios.size()),
                   fmt::format("{:.2f} [{:.2f}, {:.2f}]", fio.cpu.ratio, fio.cpu.interval.low,
                               fio.cpu.interval.high));
    if (fio.speed.too_noisy) fmt::format_to(out, "    too noisy: {}\n", fio.noise);
    ordinary_pages |= !fio.huge_pages;
  }
  if (ordinary_pages) {
    fmt::format_to(out,
                   "    fio's buffers lay in ordinary pages, ours in huge ones, which alone may "
                   "explain a ratio above 1:\n    reserve some for fio (sysctl "
                   "vm.nr_hugepages=64) and measure again\n");
  }
}

std::string ratio_text(const bench::PairedRatio& ratio) {
  return fmt::format("{:.3f} [{:.3f}, {:.3f}]{}", ratio.ratio, ratio.interval.low,
                     ratio.interval.high, ratio.too_noisy ? " too noisy" : "");
}

void versus_lines(Out out, const DriveResult& drive) {
  if (!drive.engines.empty()) fmt::format_to(out, "\n  thread engine over io_uring\n");
  for (const auto& versus : drive.engines) {
    fmt::format_to(out, "  {:<40}{}\n", versus.what, ratio_text(versus.ratio));
  }
  for (const auto& cell : drive.cells) {
    if (cell.cell.threads < 2 || drive.of(cell.cell.pattern) == nullptr) continue;
    const double one = drive.of(cell.cell.pattern)->median_gb_s();
    fmt::format_to(out, "  {:<40}{:.2f} GB/s, {:.2f} times one thread's\n",
                   fmt::format("{}, {}", bench::to_string(cell.cell.pattern), cell_text(cell.cell)),
                   cell.median_gb_s(), one > 0 ? cell.median_gb_s() / one : 0);
  }
}

void sustained_lines(Out out, const DriveResult& drive) {
  if (!drive.cliff) return;
  const auto& cliff = *drive.cliff;
  if (cliff.found) {
    fmt::format_to(out,
                   "\n  sustained write: {:.2f} GB/s until {} were written, then {:.2f} GB/s: the "
                   "fast cache ends there\n",
                   cliff.before_gb_s, to_string(Bytes{cliff.at_bytes}), cliff.after_gb_s);
  } else {
    fmt::format_to(out,
                   "\n  sustained write: {:.2f} GB/s over {}, no cliff (a larger cache shows in a "
                   "longer run)\n",
                   cliff.mean_gb_s, to_string(Bytes{cliff.written_bytes}));
  }
  fmt::format_to(out, "  {}\n", sparkline(drive.sustained_gb_s));
}

void recommendation(Out out, const DriveResult& drive) {
  const auto& knee = drive.knee;
  if (!knee.found) {
    fmt::format_to(out, "\n  no recommendation: {}\n  meanwhile: {}\n", knee.why_not,
                   disturbance_text(drive.disturbance));
    return;
  }
  fmt::format_to(out, "\n  recommended: block {} and queue depth {}, {}\n",
                 to_string(Bytes{knee.block_bytes}), knee.depth, knee.reason);
  for (const auto& duel : drive.duels) {
    fmt::format_to(out, "  optimizer step, {}: {}\n", duel.what, ratio_text(duel.ratio));
  }
}

void proof_lines(Out out, const DriveResult& drive) {
  if (drive.verified_blocks > 0 && drive.verified.empty()) {
    fmt::format_to(out, "  proof: {} blocks read back and equal", drive.verified_blocks);
    if (drive.counted) {
      fmt::format_to(out, "; asked for {} and {}, the drive counted {} and {}",
                     to_string(Bytes{drive.claimed.read}), to_string(Bytes{drive.claimed.written}),
                     to_string(Bytes{drive.counted->read}),
                     to_string(Bytes{drive.counted->written}));
    }
    fmt::format_to(out, "\n");
  }
  if (drive.counted) {
    const std::uint64_t own = drive.claimed.read + drive.claimed.written;
    const std::uint64_t all = drive.counted->read + drive.counted->written;
    if (static_cast<double>(all) > kOthersShare * static_cast<double>(own)) {
      fmt::format_to(out,
                     "  note: others moved {} on this drive meanwhile: alone it can do more, and a "
                     "cliff may be theirs\n",
                     to_string(Bytes{all - own}));
    }
  }
  for (const auto& note : drive.engine.notes) fmt::format_to(out, "  note: {}\n", note);
  for (const auto& refused : drive.refused) {
    fmt::format_to(out, "  refused: {}: {}\n", refused.what, refused.why.reason);
  }
}

void together_lines(Out out, const BenchResult& result) {
  if (!result.together) return;
  const auto& together = *result.together;
  const auto show = [&](const char* what, const bench::Scaling& scaling) {
    if (scaling.alone_gb_s <= 0) return;
    fmt::format_to(out, "  {:<7}{:>7.2f} GB/s at once, {:>6.2f} the sum of each alone: {:.0f} %\n",
                   what, scaling.together_gb_s, scaling.alone_gb_s, 100 * scaling.share());
  };
  fmt::format_to(out, "\nall drives together\n");
  show("read", together.read);
  show("write", together.write);
  for (const auto& uplink : together.uplinks) {
    std::string names;
    for (const auto i : uplink.drives) {
      names += (names.empty() ? "" : ", ") + result.drives[i].directory;
    }
    fmt::format_to(out, "  {} share an uplink of about {:.2f} GB/s\n", names, uplink.gb_s);
  }
  for (const auto& note : together.notes) fmt::format_to(out, "  {}\n", note);
}

std::string days_text(double days) {
  return days < 730 ? fmt::format("{:.0f} days", days) : fmt::format("{:.1f} years", days / 365.25);
}

std::string bytes_text(double bytes) { return to_string(Bytes{static_cast<std::uint64_t>(bytes)}); }

void verdict_line(Out out, const ModelVerdict& model) {
  const auto& verdict = model.verdict;
  fmt::format_to(out, "  {:<8}{:>14}{:>14}{:>12}", model.name,
                 bytes_text(verdict.read_bytes_per_step),
                 bytes_text(verdict.written_bytes_per_step), duration_text(verdict.drive_seconds));
  if (verdict.serial_seconds) {
    fmt::format_to(out, "{:>12}{:>12}  {}", duration_text(*verdict.serial_seconds),
                   duration_text(*verdict.overlapped_seconds),
                   model.too_noisy  ? "too noisy to tell whether it hides"
                   : *verdict.hides ? "hides"
                                    : "does not hide");
    fmt::format_to(out, ": {:.1f} GB/s needed, {} such drive{}", *verdict.needed_gb_s,
                   *verdict.drives_needed, *verdict.drives_needed == 1 ? "" : "s");
  } else {
    fmt::format_to(out, "  hides beneath {} of compute", duration_text(verdict.seconds_to_hide));
  }
  fmt::format_to(out, "\n");
  if (verdict.steps_to_wear_out) {
    fmt::format_to(out, "  {:<8}the rated endurance lasts {:.0f} steps, {}\n", "",
                   *verdict.steps_to_wear_out, days_text(*verdict.days_to_wear_out));
  }
  if (model.fits && !*model.fits) {
    fmt::format_to(out, "  {:<8}does not fit: {} are stored in two slots, more than is free\n", "",
                   bytes_text(verdict.stored_bytes));
  }
}

void verdict_lines(Out out, const BenchResult& result) {
  if (!result.no_verdict.empty()) {
    fmt::format_to(out, "\nno verdict: {}\n", result.no_verdict);
    return;
  }
  if (!result.speeds) return;
  fmt::format_to(out,
                 "\nwhat that means for training (parameters and Adam's states on the drive, read "
                 "{:.2f},\nlasting write {:.2f}, optimizer step {:.2f} GB/s per drive)\n",
                 result.speeds->read_gb_s, result.speeds->write_gb_s,
                 result.speeds->optimizer_gb_s);
  fmt::format_to(out, "  {:<8}{:>14}{:>14}{:>12}", "model", "read/step", "written/step", "drive");
  if (result.compute_seconds) fmt::format_to(out, "{:>12}{:>12}", "serial", "overlapped");
  fmt::format_to(out, "\n");
  for (const auto& model : result.verdicts) verdict_line(out, model);
}

}  // namespace

std::string facts_text(const std::string& directory, const DriveFacts& facts) {
  std::string text = "drive behind " + directory + "\n";
  auto out = std::back_inserter(text);
  std::string members;
  for (const auto& member : facts.members) members += (members.empty() ? "" : ", ") + member;
  line(out, "device", facts.device + (members.empty() ? "" : " (" + members + ")"));
  line(out, "model", facts.model);
  line(out, "file system",
       facts.file_system + ", mounted at " + facts.mount_point + " from " + facts.mount_source);
  line(out, "free", to_string(facts.free) + " of " + to_string(facts.size));
  if (facts.logical_sector) {
    line(out, "sector",
         fmt::format("{} logical, {} physical", *facts.logical_sector,
                     facts.physical_sector.value_or(*facts.logical_sector)));
  }
  if (facts.direct_alignment) {
    line(out, "direct I/O",
         *facts.direct_alignment == 0 ? "not possible"
                                      : fmt::format("aligned to {}", *facts.direct_alignment));
  }
  line(out, "scheduler", facts.scheduler);
  for (const auto& link : facts.links) {
    line(out, "PCI Express",
         fmt::format("{} lanes at {} GT/s above {}: {:.2f} GB/s", link.lanes, link.gigatransfers,
                     link.address, link.gb_s));
  }
  line(out, "link's ceiling",
       facts.ceiling_gb_s ? fmt::format("{:.2f} GB/s", *facts.ceiling_gb_s) : "unknown");
  if (facts.numa_node) line(out, "NUMA node", std::to_string(*facts.numa_node));
  if (facts.temperature_c) line(out, "temperature", fmt::format("{:.0f} C", *facts.temperature_c));
  if (facts.wear) {
    line(out, "wear",
         fmt::format("{} % of its endurance used, {} written in {} hours",
                     facts.wear->percentage_used, to_string(Bytes{facts.wear->written_bytes}),
                     facts.wear->power_on_hours));
  }
  return text;
}

std::string result_text(const BenchResult& result, TextStyle style) {
  std::string text;
  auto out = std::back_inserter(text);
  for (const auto& drive : result.drives) {
    fmt::format_to(out, "\n{}", drive.directory);
    if (!drive.engine.engine.empty()) {
      fmt::format_to(out, ": {}, {}, aligned to {}{}", drive.engine.engine,
                     drive.file.direct ? "direct" : "NOT direct", drive.file.alignment,
                     drive.engine.registered_buffers ? ", registered buffers" : "");
    }
    fmt::format_to(out, "\n");
    if (!drive.cells.empty()) {
      fmt::format_to(out, "{}", heat_map(drive, Pattern::read, style.color));
      fmt::format_to(out, "{}", heat_map(drive, Pattern::overwrite, style.color));
      pattern_table(out, drive);
      fmt::format_to(out, "{}", latency_picture(drive));
      fio_table(out, drive);
      versus_lines(out, drive);
      sustained_lines(out, drive);
      recommendation(out, drive);
    }
    proof_lines(out, drive);
  }
  together_lines(out, result);
  verdict_lines(out, result);
  if (result.interrupted) fmt::format_to(out, "interrupted: what is above is not complete\n");
  return text;
}

}  // namespace terrace::cli
