// The block "terrace": what the de-facto standard form has no keys for.
#include <cmath>

#include "runtime/config_blocks.h"
#include "terrace/error.h"

namespace terrace {
namespace {

using nlohmann::json;

constexpr double kSumTolerance = 1e-6;  // of fractions written in decimals
constexpr Bytes kLeastSegment{4096};
constexpr Bytes kMostSegment = 1_GiB;
constexpr std::size_t kMostDrives = 16;

void read_budget(ConfigReader& r, BudgetConfig& budget) {
  const auto take = [&](const char* key, std::optional<Bytes>& tier) {
    if (const auto bytes = r.bytes(key)) tier = Bytes{*bytes};
  };
  take("hbm", budget.hbm);
  take("dram", budget.dram);
  take("nvme", budget.nvme);
}

std::optional<double> speed(ConfigReader& r, const std::string& key) {
  const auto value = r.number(key);
  if (value && !(*value > 0 && std::isfinite(*value))) r.expect(key, "a positive speed");
  return value;
}

void read_drives(ConfigReader& r, ConfigDraft& draft) {
  const json* drives = r.value("nvme");
  if (drives == nullptr) return;
  if (!drives->is_array()) r.expect("nvme", "a list of drives, [{\"path\": \"/nvme0\"}],");
  if (drives->size() > kMostDrives) {
    r.refuse("nvme", "at most " + std::to_string(kMostDrives) + " drives can be used");
  }
  for (const auto& drive : *drives) {
    ConfigReader d(drive, r.path("nvme[" + std::to_string(draft.config.nvme.size()) + "]"));
    const auto path = d.text("path");
    if (!path || path->empty()) d.refuse("path", "a drive needs the path of a directory");
    NvmeConfig named{*path, speed(d, "read_gb_s"), speed(d, "write_gb_s")};
    named.keep_free = {d.bytes("keep_free").value_or(0)};
    d.finish();
    draft.config.nvme.push_back(std::move(named));
  }
}

TierFractions read_fractions(ConfigReader& r, const std::string& key, const json& value) {
  if (value.is_string()) {
    if (value == "hbm") return {1, 0, 0};
    if (value == "dram") return {0, 1, 0};
    if (value == "nvme") return {0, 0, 1};
    r.expect(key, "one of \"hbm\", \"dram\", \"nvme\" and \"auto\", or fractions over them,");
  }
  if (!value.is_object()) r.expect(key, "a tier or an object with fractions over tiers");
  ConfigReader f(value, r.path(key));
  const TierFractions result{f.number("hbm").value_or(0), f.number("dram").value_or(0),
                             f.number("nvme").value_or(0)};
  f.finish();
  for (const double fraction : {result.hbm, result.dram, result.nvme}) {
    if (!(fraction >= 0 && fraction <= 1)) r.refuse(key, "a fraction is a number from 0 to 1");
  }
  const double sum = result.hbm + result.dram + result.nvme;
  if (std::abs(sum - 1) > kSumTolerance) {
    r.refuse(key, "the fractions add up to " + json(sum).dump() + "; they must add up to 1");
  }
  return result;
}

void read_choice(ConfigReader& r, const std::string& key, PlacementChoice& choice) {
  if (const json* value = r.value(key)) choice = read_fractions(r, key, *value);
}

void read_placement(ConfigReader& r, PlacementConfig& placement) {
  read_choice(r, "parameter", placement.parameter);
  read_choice(r, "activation", placement.activation);
  const auto read_state = [&](const char* key, PlacementChoice& state) {
    read_choice(r, key, state);
    if (state && state->hbm > 0) {
      r.refuse(key, "optimizer state in hbm is not available yet; use dram and nvme");
    }
  };
  read_state("master_weight", placement.master_weight);
  read_state("momentum", placement.momentum);
  read_state("variance", placement.variance);
  PlacementChoice gradient;
  read_choice(r, "gradient", gradient);
  if (gradient && *gradient != TierFractions{0, 1, 0}) {
    r.refuse("gradient", "gradients live in dram and nowhere else yet; write \"dram\"");
  }
  if (r.value("by_name") != nullptr) {
    r.refuse("by_name", "placement by name is not available yet; place whole classes");
  }
}

void read_protection(ConfigReader& r, StoreConfig& store) {
  if (const auto slots = r.count("slots", {.least = 1, .most = 2})) {
    store.slots = static_cast<std::uint32_t>(*slots);
  }
  const auto interval = r.count("commit_interval");
  if (interval && *interval == 0 && store.slots == 2) {
    r.refuse("commit_interval", "two slots are for commits; write at least 1, or slots 1");
  }
  if (interval && *interval > 0) store.commit_interval = *interval;
  store.checksums = r.flag("checksums").value_or(store.checksums);
  if (const auto seconds = r.number("timeout_seconds")) {
    if (!(*seconds > 0 && *seconds <= 1e6)) r.expect("timeout_seconds", "a positive time");
    store.timeout_seconds = *seconds;
  }
}

void read_clip(ConfigReader& r, ConfigDraft& draft) {
  draft.clip = r.text("clip");
  if (!draft.clip || *draft.clip == "none" || *draft.clip == "global") return;
  if (*draft.clip == "speculative") {
    r.refuse("clip", "clipping on suspicion is not available yet; write \"global\"");
  }
  r.expect("clip", "\"none\" or \"global\"");
}

}  // namespace

void read_terrace_block(ConfigReader& r, ConfigDraft& draft) {
  Config& config = draft.config;
  r.object("budget", [&](ConfigReader& b) { read_budget(b, config.budget); });
  read_drives(r, draft);
  r.object("placement", [&](ConfigReader& p) { read_placement(p, config.placement); });
  read_clip(r, draft);
  read_protection(r, config.store);
  if (const auto segment = r.bytes("segment")) {
    const bool power_of_two = (*segment & (*segment - 1)) == 0;
    if (!power_of_two || *segment < kLeastSegment.count || *segment > kMostSegment.count) {
      r.expect("segment", "a power of two from 4096 bytes to 1GiB");
    }
    config.segment = {*segment};
  }
  r.object("speeds", [&](ConfigReader& s) {
    config.speeds.host_to_device_gb_s = speed(s, "host_to_device_gb_s");
    config.speeds.device_to_host_gb_s = speed(s, "device_to_host_gb_s");
    config.speeds.adam_gb_s = speed(s, "adam_gb_s");
    config.speeds.compute_tflops = speed(s, "compute_tflops");
  });
  if (const auto node = r.count("numa_node", {.least = 0, .most = 1023})) {
    config.numa_node = static_cast<int>(*node);
  }
  config.trace = r.text("trace").value_or("");
}

}  // namespace terrace
