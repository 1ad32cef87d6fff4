#include "tools/nvme_html.h"

#include <fmt/format.h>

#include <iterator>

#include "tools/nvme_pairs.h"
#include "tools/nvme_svg.h"
#include "tools/nvme_text.h"
#include "tools/report.h"

namespace terrace::cli {
namespace {

using bench::Pattern;
using Out = std::back_insert_iterator<std::string>;

constexpr const char* kHead = R"(<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>terrace nvme bench</title>
<style>
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0;
  --card: #f6f8fa; --accent: #0b62c4; --mark: #b3261e; --good: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1216; --ink: #e6e9ed; --soft: #9aa4af;
  --line: #343b44; --card: #181d23; --accent: #6cb2ff; --mark: #ff9088; --good: #56d364; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 980px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem;
  border-bottom: 1px solid var(--line); padding-bottom: .3rem; }
h3 { font-size: 1rem; color: var(--soft); margin: 1.4rem 0 .4rem; }
.answer { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .8rem 1rem; }
.answer b { font-size: 1.15rem; } .no { color: var(--mark); } .yes { color: var(--good); }
.row { display: flex; flex-wrap: wrap; gap: 1.5rem; } .row > div { flex: 1 1 400px; min-width: 0; }
.scroll { overflow-x: auto; } svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .2rem .8rem .2rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
td:first-child, th:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; }
td.soft { white-space: normal; }
pre { background: var(--card); padding: .6rem .8rem; overflow-x: auto; border-radius: 6px;
  font-size: 12.5px; }
.soft { color: var(--soft); }
.t, .m { font: 12px system-ui, sans-serif; fill: var(--soft); } .m { fill: var(--mark); }
.n { font: 12.5px system-ui, sans-serif; }
.axis { stroke: var(--soft); } .grid { stroke: var(--line); }
.mark { stroke: var(--mark); stroke-dasharray: 4 3; }
.bar { fill: var(--accent); } .dot { fill: var(--soft); opacity: .6; }
.line { fill: none; stroke: var(--accent); stroke-width: 1.5; }
.interval { stroke: var(--accent); stroke-width: 3; }
.chosen { fill: none; stroke: #b3261e; stroke-width: 3; }
</style></head><body>
<h1>What these drives can do for training</h1>
)";

void picture(Out out, const std::string& title, const std::string& svg) {
  if (svg.empty()) return;
  fmt::format_to(out, "<div><h3>{}</h3>\n{}</div>\n", escaped(title), svg);
}

void answer(Out out, const DriveResult& drive) {
  fmt::format_to(out, "<div class=\"answer\">\n");
  if (drive.knee.found) {
    fmt::format_to(out, "<b>Block {}, queue depth {}</b><br>{}.\n",
                   to_string(Bytes{drive.knee.block_bytes}), drive.knee.depth,
                   escaped(drive.knee.reason));
  } else if (drive.refused.empty() || drive.measured) {
    fmt::format_to(out, "<b>No recommendation</b><br>{}; meanwhile {}.\n",
                   escaped(drive.knee.why_not), escaped(disturbance_text(drive.disturbance)));
  }
  for (const auto& refused : drive.refused) {
    fmt::format_to(out, "<div class=\"no\">Refused, {}: {}</div>\n", escaped(refused.what),
                   escaped(refused.why.reason));
  }
  fmt::format_to(out, "</div>\n");
}

void latency_cells(Out out, const bench::LatencyHistogram& latency) {
  if (latency.count() == 0) {
    fmt::format_to(out, "<td>–</td><td>–</td><td>–</td>");
    return;
  }
  for (const double q : {0.5, 0.99, 0.999}) {
    fmt::format_to(out, "<td>{:.2f}</td>", latency.quantile_us(q) * 1e-3);
  }
}

void pattern_table(Out out, const DriveResult& drive) {
  fmt::format_to(out, R"(<h3>Patterns of training (latencies in ms)</h3><div class="scroll"><table>
<tr><th>pattern</th><th>block × depth</th><th>GB/s</th><th>spread</th><th>CPU s/GB</th>
<th>calls/GB</th><th>read p50</th><th>p99</th><th>p99.9</th><th>write p50</th><th>p99</th>
<th>p99.9</th></tr>
)");
  for (const auto& cell : drive.cells) {
    if (cell.in_sweep) continue;
    const auto spread = bench::spread(cell.gb_s);
    fmt::format_to(out,
                   "<tr><td>{}</td><td>{}</td><td>{:.2f}</td><td>{}</td><td>{:.4f}</td><td>{}</td>",
                   bench::to_string(cell.cell.pattern), cell_text(cell.cell), cell.median_gb_s(),
                   spread ? fmt::format("{:.1f} %", 100 * *spread) : "–",
                   bench::median(cell.cpu_seconds_per_gb),
                   cell.system_calls_per_gb.empty()
                       ? std::string("–")
                       : fmt::format("{:.0f}", bench::median(cell.system_calls_per_gb)));
    latency_cells(out, cell.read);
    latency_cells(out, cell.write);
    fmt::format_to(out, "</tr>\n");
  }
  fmt::format_to(out, "</table></div>\n");
}

void fio_part(Out out, const DriveResult& drive) {
  if (!drive.fio_note.empty()) {
    fmt::format_to(out, "<p class=\"no\">fio: {}</p>\n", escaped(drive.fio_note));
  }
  const auto svg = fio_svg(drive);
  if (svg.empty()) return;
  fmt::format_to(out, "<h3>Speed over fio's, pair by pair, with the 95 % interval</h3>\n{}", svg);
  fmt::format_to(out, R"(<div class="scroll"><table><tr><th>pattern</th><th>fio GB/s</th>
<th>ratio</th><th>interval</th><th>pairs</th><th>CPU ratio</th><th>interval</th></tr>
)");
  const std::string* command = nullptr;
  for (const auto& cell : drive.cells) {
    if (!cell.fio) continue;
    const auto& fio = *cell.fio;
    command = &fio.command;
    fmt::format_to(out,
                   "<tr><td>{}</td><td>{:.2f}</td><td>{:.3f}</td><td>{:.3f} to {:.3f}{}</td>"
                   "<td>{}</td><td>{:.2f}</td><td>{:.2f} to {:.2f}</td></tr>\n",
                   bench::to_string(cell.cell.pattern), bench::median(fio.gb_s), fio.speed.ratio,
                   fio.speed.interval.low, fio.speed.interval.high,
                   fio.speed.too_noisy ? ", too noisy" : "", fio.speed.ratios.size(), fio.cpu.ratio,
                   fio.cpu.interval.low, fio.cpu.interval.high);
    if (!fio.noise.empty()) {
      fmt::format_to(out, "<tr><td colspan=\"7\" class=\"soft\">{}</td></tr>\n",
                     escaped(fio.noise));
    }
  }
  fmt::format_to(out, "</table></div>\n<pre>{}</pre>\n", escaped(*command));
}

void versus_part(Out out, const char* title, const std::vector<Versus>& all) {
  if (all.empty()) return;
  fmt::format_to(out, R"(<h3>{}</h3><table><tr><th></th><th>ratio</th><th>interval</th>
<th>pairs</th></tr>
)",
                 title);
  for (const auto& versus : all) {
    fmt::format_to(out,
                   "<tr><td>{}</td><td>{:.3f}</td><td>{:.3f} to {:.3f}{}</td><td>{}</td></tr>\n",
                   escaped(versus.what), versus.ratio.ratio, versus.ratio.interval.low,
                   versus.ratio.interval.high, versus.ratio.too_noisy ? ", too noisy" : "",
                   versus.ratio.ratios.size());
  }
  fmt::format_to(out, "</table>\n");
}

void drive_part(Out out, const DriveResult& drive) {
  fmt::format_to(out, "<h2>{}</h2>\n", escaped(drive.directory));
  answer(out, drive);
  if (!drive.cells.empty()) {
    fmt::format_to(out, "<div class=\"row\">\n");
    picture(out, "Read, GB/s by block and depth", heat_map_svg(drive, Pattern::read));
    picture(out, "Overwrite, GB/s by block and depth", heat_map_svg(drive, Pattern::overwrite));
    fmt::format_to(out, "</div>\n");
    pattern_table(out, drive);
    fmt::format_to(out, "<div class=\"row\">\n");
    picture(out, "Latency of reads", latency_svg(drive, Pattern::read));
    picture(out, "Latency of overwrites", latency_svg(drive, Pattern::overwrite));
    fmt::format_to(out, "</div>\n");
    picture(out, "Sustained write", sustained_svg(drive));
    fio_part(out, drive);
    versus_part(out, "Settings over the runtime's default, optimizer step", drive.duels);
    versus_part(out, "Thread engine over io_uring", drive.engines);
  }
  fmt::format_to(out, "<h3>Facts</h3>\n<pre>{}</pre>\n",
                 escaped(facts_text(drive.directory, drive.facts)));
}

void verdict_part(Out out, const BenchResult& result) {
  fmt::format_to(out, "<h2>What that means</h2>\n");
  if (!result.no_verdict.empty() || !result.speeds) {
    fmt::format_to(out, "<p class=\"no\">No verdict: {}</p>\n", escaped(result.no_verdict));
    return;
  }
  fmt::format_to(out,
                 R"(<p class="soft">Parameters and Adam's states on the drive: 16 bytes read and
14 written for each parameter and step.</p><div class="scroll"><table><tr><th>model</th>
<th>read/step</th><th>written/step</th><th>drive</th><th>serial</th><th>overlapped</th><th></th>
<th>endurance</th></tr>
)");
  const auto seconds = [](const std::optional<double>& value) {
    return value ? duration_text(*value) : std::string("–");
  };
  for (const auto& model : result.verdicts) {
    const auto& verdict = model.verdict;
    std::string says =
        fmt::format("hides beneath {} of compute", duration_text(verdict.seconds_to_hide));
    if (verdict.hides) {
      says = *verdict.hides ? "hides" : fmt::format("needs {} such drives", *verdict.drives_needed);
    }
    if (model.too_noisy) says = "too noisy to tell whether it hides";
    if (model.fits && !*model.fits) says += "; does not fit";
    const char* style = !verdict.hides || model.too_noisy ? "" : (*verdict.hides ? "yes" : "no");
    fmt::format_to(
        out,
        "<tr><td>{}</td><td>{:.1f} GB</td><td>{:.1f} GB</td><td>{}</td><td>{}</td><td>{}</td>"
        "<td class=\"{}\">{}</td><td>{}</td></tr>\n",
        escaped(model.name), verdict.read_bytes_per_step * 1e-9,
        verdict.written_bytes_per_step * 1e-9, duration_text(verdict.drive_seconds),
        seconds(verdict.serial_seconds), seconds(verdict.overlapped_seconds), style, says,
        verdict.days_to_wear_out ? fmt::format("{:.0f} days", *verdict.days_to_wear_out) : "–");
  }
  fmt::format_to(out, "</table></div>\n");
}

void together_part(Out out, const BenchResult& result) {
  if (!result.together) return;
  const auto& together = *result.together;
  fmt::format_to(out, R"(<h2>All drives together</h2><table><tr><th></th><th>each alone, summed</th>
<th>at once</th><th>share</th></tr>
)");
  for (const auto& [name, scaling] :
       {std::pair{"read", &together.read}, std::pair{"write", &together.write}}) {
    fmt::format_to(
        out, "<tr><td>{}</td><td>{:.2f} GB/s</td><td>{:.2f} GB/s</td><td>{:.0f} %</td></tr>\n",
        name, scaling->alone_gb_s, scaling->together_gb_s, 100 * scaling->share());
  }
  fmt::format_to(out, "</table>\n");
  for (const auto& uplink : together.uplinks) {
    std::string names;
    for (const auto i : uplink.drives) names.append(" ").append(result.drives[i].directory);
    fmt::format_to(out, "<p class=\"no\">These share an uplink of about {:.2f} GB/s:{}</p>\n",
                   uplink.gb_s, escaped(names));
  }
  for (const auto& note : together.notes) fmt::format_to(out, "<p>{}</p>\n", escaped(note));
}

}  // namespace

std::string html_report(const BenchResult& result, const std::string& json) {
  std::string page = kHead;
  auto out = std::back_inserter(page);
  verdict_part(out, result);
  together_part(out, result);
  for (const auto& drive : result.drives) drive_part(out, drive);
  std::string data = json;  // inside a script element only its end has a meaning
  for (auto at = data.find("</"); at != std::string::npos; at = data.find("</", at + 3)) {
    data.replace(at, 2, "<\\/");
  }
  fmt::format_to(
      out, "<script type=\"application/json\" id=\"result\">\n{}</script>\n</body></html>\n", data);
  return page;
}

}  // namespace terrace::cli
