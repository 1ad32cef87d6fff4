#include "tools/nvme_json.h"

#include <fcntl.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstring>
#include <ctime>
#include <filesystem>

#include "tiers/topology.h"

namespace terrace::cli {
namespace {

using nlohmann::json;

template <class T>
json maybe(const std::optional<T>& value) {
  return value ? json(*value) : json(nullptr);
}

json to_json(const bench::MovedBytes& moved) {
  return {{"read_bytes", moved.read}, {"written_bytes", moved.written}};
}

json to_json(const bench::LatencyHistogram& latency) {
  if (latency.count() == 0) return nullptr;
  return {{"count", latency.count()},
          {"p50_us", latency.quantile_us(0.5)},
          {"p90_us", latency.quantile_us(0.9)},
          {"p99_us", latency.quantile_us(0.99)},
          {"p999_us", latency.quantile_us(0.999)},
          {"max_us", latency.max_us()}};
}

json interval(const bench::Interval& interval) { return {interval.low, interval.high}; }

json to_json(const bench::PairedRatio& ratio) {
  return {{"ratio", ratio.ratio},
          {"interval", interval(ratio.interval)},
          {"coverage", ratio.interval.coverage},
          {"pairs", ratio.ratios},
          {"too_noisy", ratio.too_noisy}};
}

void add_fio(json& out, const FioComparison& fio) {
  out["fio_gb_s"] = bench::median(fio.gb_s);
  out["fio_samples_gb_s"] = fio.gb_s;
  out["fio_cpu_seconds_per_gb"] = fio.cpu_seconds_per_gb;
  out["fio_command"] = fio.command;
  out["fio_huge_pages"] = fio.huge_pages;
  out["ratio_to_fio"] = fio.speed.ratio;
  out["ratio_interval"] = interval(fio.speed.interval);
  out["ratio_pairs"] = fio.speed.ratios;
  out["cpu_ratio_to_fio"] = fio.cpu.ratio;
  out["cpu_ratio_interval"] = interval(fio.cpu.interval);
  out["too_noisy"] = fio.speed.too_noisy;
  if (!fio.noise.empty()) out["noise"] = fio.noise;
}

json to_json(const CellResult& cell, const DriveResult& drive) {
  const auto& latency = cell.latency();
  json out = {{"directory", drive.directory},
              {"pattern", bench::to_string(cell.cell.pattern)},
              {"block_bytes", cell.cell.block_bytes},
              {"depth", cell.cell.depth},
              {"threads", cell.cell.threads},
              {"sweep", cell.in_sweep},
              {"gb_s", cell.median_gb_s()},
              {"spread", maybe(bench::spread(cell.gb_s))},
              {"samples_gb_s", cell.gb_s},
              {"p50_us", latency.quantile_us(0.5)},
              {"p99_us", latency.quantile_us(0.99)},
              {"read_latency", to_json(cell.read)},
              {"write_latency", to_json(cell.write)},
              {"flush_latency", to_json(cell.flush)},
              {"cpu_seconds_per_gb", bench::median(cell.cpu_seconds_per_gb)},
              // Direct transfers go from the drive into the caller's memory; the proof is that the
              // file has no page in the cache afterwards, else nothing is reported at all.
              {"cpu_copies_per_byte", drive.file.direct ? json(0) : json(nullptr)},
              {"system_calls_per_gb", cell.system_calls_per_gb.empty()
                                          ? json(nullptr)
                                          : json(bench::median(cell.system_calls_per_gb))}};
  if (cell.fio) add_fio(out, *cell.fio);
  return out;
}

json to_json(const DriveFacts& facts) {
  json links = json::array();
  for (const auto& link : facts.links) {
    links.push_back({{"address", link.address},
                     {"gigatransfers", link.gigatransfers},
                     {"lanes", link.lanes},
                     {"gb_s", link.gb_s}});
  }
  json out = {{"device", facts.device},
              {"members", facts.members},
              {"model", facts.model},
              {"file_system", facts.file_system},
              {"file_system_kind", to_string(facts.kind)},
              {"mount", facts.mount_point},
              {"source", facts.mount_source},
              {"logical_sector", maybe(facts.logical_sector)},
              {"physical_sector", maybe(facts.physical_sector)},
              {"direct_alignment", maybe(facts.direct_alignment)},
              {"scheduler", facts.scheduler},
              {"rotational", maybe(facts.rotational)},
              {"pcie_links", links},
              {"ceiling_gb_s", maybe(facts.ceiling_gb_s)},
              {"numa_node", maybe(facts.numa_node)},
              {"temperature_c", maybe(facts.temperature_c)},
              {"free_bytes", facts.free.count},
              {"size_bytes", facts.size.count},
              {"wear", nullptr}};
  if (facts.wear) {
    out["wear"] = {{"percentage_used", facts.wear->percentage_used},
                   {"spare_percent", facts.wear->spare_percent},
                   {"written_bytes", facts.wear->written_bytes},
                   {"power_on_hours", facts.wear->power_on_hours}};
  }
  return out;
}

json to_json(const bench::Knee& knee, const DriveResult& drive) {
  if (!knee.found) return nullptr;
  json out = {{"directory", drive.directory}, {"block_bytes", knee.block_bytes},
              {"depth", knee.depth},          {"threads", 1},
              {"share_of_best", knee.share},  {"tolerance", knee.tolerance},
              {"noise", knee.noise}};
  out["reason"] = knee.reason;
  out["against_default"] = json::array();
  for (const auto& duel : drive.duels) {
    auto entry = to_json(duel.ratio);
    entry["block_bytes"] = duel.block_bytes;
    entry["depth"] = duel.depth;
    out["against_default"].push_back(entry);
  }
  return out;
}

json to_json(const Refused& refused) {
  return {{"directory", refused.directory},
          {"what", refused.what},
          {"kind", refused.why.kind},
          {"reason", refused.why.reason}};
}

json to_json(const bench::Disturbance& disturbance) {
  json out = {{"seconds", disturbance.seconds},
              {"stolen_cpu_share", disturbance.stolen_share},
              {"others_cpu_share", disturbance.others_cpu_share},
              {"load", disturbance.load},
              {"others", nullptr}};
  if (disturbance.others_bytes) out["others"] = to_json(*disturbance.others_bytes);
  return out;
}

json to_json(const DriveResult& drive) {
  json out = {{"directory", drive.directory},
              {"facts", to_json(drive.facts)},
              {"measured", drive.measured},
              {"direct", drive.file.direct},
              {"alignment", drive.file.alignment},
              {"engine", drive.engine.engine},
              {"registered_buffers", drive.engine.registered_buffers},
              {"registered_files", drive.engine.registered_files},
              {"engine_notes", drive.engine.notes},
              {"system_calls_note", drive.system_calls_note},
              {"recommended", to_json(drive.knee, drive)},
              {"no_recommendation", drive.knee.why_not},
              {"verified_blocks", drive.verified_blocks},
              {"claimed", to_json(drive.claimed)},
              {"counted_by_drive", drive.counted ? to_json(*drive.counted) : json(nullptr)},
              {"disturbance", to_json(drive.disturbance)},
              {"fio_note", drive.fio_note},
              {"temperature_after_c", maybe(drive.temperature_after_c)},
              {"sustained", nullptr}};
  out["engines"] = json::array();
  for (const auto& versus : drive.engines) {
    auto entry = to_json(versus.ratio);
    entry["pattern"] = bench::to_string(versus.pattern);
    entry["block_bytes"] = versus.block_bytes;
    entry["depth"] = versus.depth;
    out["engines"].push_back(entry);
  }
  if (drive.cliff) {
    out["sustained"] = {{"cliff", drive.cliff->found},
                        {"at_bytes", drive.cliff->found ? json(drive.cliff->at_bytes) : json()},
                        {"before_gb_s", drive.cliff->before_gb_s},
                        {"after_gb_s", drive.cliff->after_gb_s},
                        {"mean_gb_s", drive.cliff->mean_gb_s},
                        {"written_bytes", drive.cliff->written_bytes},
                        {"seconds", drive.sustained_seconds},
                        {"timeline_gb_s", drive.sustained_gb_s}};
  }
  return out;
}

json to_json(const ModelVerdict& model) {
  const auto& verdict = model.verdict;
  return {{"model", model.name},
          {"parameters", model.parameters},
          {"read_bytes_per_step", verdict.read_bytes_per_step},
          {"written_bytes_per_step", verdict.written_bytes_per_step},
          {"stored_bytes", verdict.stored_bytes},
          {"fits", maybe(model.fits)},
          {"drive_seconds", verdict.drive_seconds},
          {"serial_seconds", maybe(verdict.serial_seconds)},
          {"overlapped_seconds", maybe(verdict.overlapped_seconds)},
          {"hides", model.too_noisy ? json(nullptr) : maybe(verdict.hides)},
          {"too_noisy", model.too_noisy},
          {"seconds_to_hide", verdict.seconds_to_hide},
          {"needed_gb_s", maybe(verdict.needed_gb_s)},
          {"drives_needed", maybe(verdict.drives_needed)},
          {"steps_to_wear_out", maybe(verdict.steps_to_wear_out)},
          {"days_to_wear_out", maybe(verdict.days_to_wear_out)}};
}

json to_json(const bench::Scaling& scaling) {
  return {{"alone_gb_s", scaling.alone_gb_s},
          {"together_gb_s", scaling.together_gb_s},
          {"share", scaling.share()}};
}

json to_json(const TogetherResult& together, const std::vector<DriveResult>& drives) {
  json uplinks = json::array();
  for (const auto& uplink : together.uplinks) {
    json members = json::array();
    for (const auto i : uplink.drives) members.push_back(drives[i].directory);
    uplinks.push_back({{"drives", members}, {"gb_s", uplink.gb_s}});
  }
  return {{"read", to_json(together.read)},
          {"write", to_json(together.write)},
          {"shared_uplinks", uplinks},
          {"notes", together.notes}};
}

std::string utc_now() {
  const std::time_t time = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&time, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

json environment() {
  utsname system{};
  ::uname(&system);
  const auto machine = detect_topology();
  return {{"time", utc_now()},
          {"terrace", TERRACE_VERSION},
          {"kernel", system.release},
          {"architecture", system.machine},
          {"cores", machine.cores},
          {"numa_nodes", machine.numa_nodes.size()},
          {"memory_bytes", machine.memory.count},
          {"memlock_bytes", machine.memlock ? json(machine.memlock->count) : json(nullptr)}};
}

}  // namespace

json to_json(const BenchResult& result) {
  json out = {
      {"format", "terrace nvme bench 1"},
      {"environment", environment()},
      {"effort", result.effort.name},
      {"stated_seconds", result.effort.seconds + (result.with_fio ? result.effort.fio_seconds : 0)},
      {"seconds", result.seconds},
      {"seed", result.seed},
      {"interrupted", result.interrupted},
      {"compute_seconds", maybe(result.compute_seconds)},
      {"no_verdict", result.no_verdict},
      {"fio_command", nullptr},
      {"recommended", nullptr},
      {"together", nullptr}};
  out["cells"] = json::array();
  out["refused"] = json::array();
  out["verdict"] = json::array();
  out["drives"] = json::array();
  bool direct = !result.drives.empty();
  for (const auto& drive : result.drives) {
    direct = direct && drive.file.direct;
    out["drives"].push_back(to_json(drive));
    for (const auto& refused : drive.refused) out["refused"].push_back(to_json(refused));
    for (const auto& cell : drive.cells) {
      out["cells"].push_back(to_json(cell, drive));
      if (cell.fio && out["fio_command"].is_null()) out["fio_command"] = cell.fio->command;
    }
    if (out["recommended"].is_null()) out["recommended"] = to_json(drive.knee, drive);
  }
  out["direct"] = direct;
  for (const auto& model : result.verdicts) out["verdict"].push_back(to_json(model));
  if (result.together) out["together"] = to_json(*result.together, result.drives);
  return out;
}

}  // namespace terrace::cli
