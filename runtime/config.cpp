// The keys that Terrace reads: the de-facto standard ones, and its own in the block "terrace".
#include "terrace/config.h"

#include <cmath>
#include <fstream>
#include <iterator>

#include "runtime/config_reader.h"
#include "terrace/error.h"

namespace terrace {
namespace {

using nlohmann::json;

class ConfigParser {
 public:
  explicit ConfigParser(Config& config) : config_(config) {}

  void read(ConfigReader& top) {
    read_batch(top);
    if (const auto clip = top.number("gradient_clipping"); clip && *clip != 0) {
      top.refuse("gradient_clipping", "clipping is not available yet; write 0");
    }
    top.object("optimizer", [&](ConfigReader& r) { read_optimizer(r); });
    top.object("bf16", [&](ConfigReader& r) {
      if (const auto enabled = r.flag("enabled")) {
        config_.parameter_dtype = *enabled ? DType::bf16 : DType::fp32;
      }
    });
    top.object("fp16", [&](ConfigReader& r) { read_fp16(r); });
    top.object("zero_optimization", [&](ConfigReader& r) { read_zero(r); });
    top.object("aio", [&](ConfigReader& r) { read_aio(r); });
    top.object("terrace", [&](ConfigReader& r) { read_own(r); });
  }

 private:
  void note(const ConfigReader& reader, const std::string& key, const std::string& what) {
    config_.notes.push_back(reader.path(key) + ": " + what);
  }

  void read_batch(ConfigReader& r) {
    const auto all = r.count("train_batch_size");
    const auto micro = r.count("train_micro_batch_size_per_gpu");
    const auto steps = r.count("gradient_accumulation_steps");
    if (steps.value_or(1) != 1) {
      r.refuse("gradient_accumulation_steps", "accumulation is not available yet; write 1");
    }
    if (all && micro && *all != *micro * steps.value_or(1)) {
      r.refuse("train_batch_size",
               std::to_string(*all) + " is not train_micro_batch_size_per_gpu (" +
                   std::to_string(*micro) + ") times gradient_accumulation_steps");
    }
    config_.train_micro_batch_size = micro ? micro : all;
  }

  void read_optimizer(ConfigReader& r) {
    const auto type = r.text("type").value_or("AdamW");
    if (type != "Adam" && type != "AdamW") r.refuse("type", "'" + type + "' is not available; there are Adam and AdamW");
    config_.optimizer.mode = type == "Adam" ? AdamMode::adam : AdamMode::adamw;
    r.object("params", [&](ConfigReader& p) {
      config_.learning_rate = p.number("lr").value_or(config_.learning_rate);
      auto& adam = config_.optimizer;
      if (const json* betas = p.value("betas"); betas != nullptr && !betas->is_string()) {
        if (!betas->is_array() || betas->size() != 2 || !(*betas)[0].is_number() ||
            !(*betas)[1].is_number()) {
          p.refuse("betas", "two numbers in brackets are expected");
        }
        adam.beta1 = (*betas)[0].get<double>();
        adam.beta2 = (*betas)[1].get<double>();
      }
      adam.epsilon = p.number("eps").value_or(adam.epsilon);
      adam.weight_decay = p.number("weight_decay").value_or(adam.weight_decay);
      adam.bias_correction = p.flag("bias_correction").value_or(adam.bias_correction);
    });
    try {
      static_cast<void>(adam_scalars(config_.optimizer, config_.learning_rate, 1));
    } catch (const Error& error) {
      r.refuse("params", error.what());
    }
  }

  static void read_fp16(ConfigReader& r) {
    if (r.flag("enabled").value_or(false)) {
      r.refuse("enabled", "fp16 is not available yet; use bf16");
    }
    for (const char* key : {"loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
                            "min_loss_scale"}) {
      r.number(key);
    }
  }

  void read_zero(ConfigReader& r) {
    if (const auto stage = r.count("stage")) {
      if (*stage > 3) r.refuse("stage", "there are the stages 0 to 3");
      if (*stage > 0) note(r, "stage", "with one rank all stages are the same");
    }
    config_.sub_group_elements = r.count("sub_group_size");
    const auto prefix = r.count("stage3_prefetch_bucket_size");
    const auto plain = r.count("prefetch_bucket_size");
    config_.prefetch_elements = prefix ? prefix : plain;
    for (const char* key : {"reduce_bucket_size", "allgather_bucket_size",
                            "stage3_param_persistence_threshold", "param_persistence_threshold",
                            "stage3_max_live_parameters", "max_live_parameters",
                            "stage3_max_reuse_distance", "max_reuse_distance"}) {
      if (r.count(key)) note(r, key, "has no effect with one rank");
    }
    for (const char* key : {"overlap_comm", "round_robin_gradients", "contiguous_gradients",
                            "reduce_scatter", "stage3_gather_16bit_weights_on_model_save",
                            "gather_16bit_weights_on_model_save"}) {
      if (r.flag(key)) note(r, key, "is always on or has no counterpart; ignored");
    }
    for (const char* key : {"zero_quantized_weights", "zero_quantized_gradients"}) {
      if (r.flag(key).value_or(false)) r.refuse(key, "ZeRO++ is not available; write false");
    }
    if (r.count("zero_hpz_partition_size").value_or(1) != 1) {
      r.refuse("zero_hpz_partition_size", "ZeRO++ is not available; write 1");
    }
    r.object("offload_param", [&](ConfigReader& o) {
      o.number("buffer_size");
      o.number("max_in_cpu");
      if (const auto tier = read_offload(o, true)) config_.placement.parameter = tier;
    });
    r.object("offload_optimizer", [&](ConfigReader& o) {
      for (const char* key : {"pipeline_read", "pipeline_write", "fast_init"}) o.flag(key);
      const double ratio = o.number("ratio").value_or(1.0);
      if (ratio != 1.0) o.refuse("ratio", "optimizer state in hbm is not available yet; write 1");
      const auto tier = read_offload(o, false);
      if (!tier) return;
      config_.placement.master_weight = config_.placement.momentum = config_.placement.variance =
          tier;
    });
  }

  PlacementChoice read_offload(ConfigReader& r, bool parameters) {
    r.number("buffer_count");
    if (!r.flag("pin_memory").value_or(true)) {
      note(r, "pin_memory", "the arena is always pinned");
    }
    const auto path = r.text("nvme_path");
    const auto device = r.text("device").value_or("none");
    if (device == "none") {
      return parameters ? PlacementChoice{TierFractions{1, 0, 0}} : std::nullopt;
    }
    if (device == "cpu") return TierFractions{0, 1, 0};
    if (device != "nvme") r.refuse("device", "'" + device + "' is unknown; there are none, cpu and nvme");
    if (!path) r.refuse("nvme_path", "device nvme needs the path of a directory");
    if (!config_.nvme.empty() && config_.nvme.front().path != *path) {
      r.refuse("nvme_path", "several directories are not available yet; name one");
    }
    config_.nvme = {{*path, {}, {}}};
    return TierFractions{0, 0, 1};
  }

  void read_aio(ConfigReader& r) {
    const auto block = r.count("block_size");
    if (block) {
      if (*block < 4096 || *block > (1U << 30)) r.refuse("block_size", "4096 to 2^30 bytes are possible");
      config_.io.block = {*block};
    }
    if (const auto depth = r.count("queue_depth")) {
      if (*depth < 1 || *depth > 4096) r.refuse("queue_depth", "1 to 4096 are possible");
      config_.io.queue_depth = static_cast<std::uint32_t>(*depth);
    }
    for (const char* key : {"intra_op_parallelism", "thread_count", "num_threads"}) {
      if (const auto threads = r.count(key)) {
        if (*threads < 1 || *threads > 256) r.refuse(key, "1 to 256 are possible");
        config_.io.threads = static_cast<std::uint32_t>(*threads);
      }
    }
    for (const char* key : {"single_submit", "overlap_events"}) {
      if (r.flag(key)) note(r, key, "requests are always submitted together and overlapped");
    }
  }

  // ---- the block "terrace"

  void read_own(ConfigReader& r) {
    r.object("budget", [&](ConfigReader& b) {
      const auto take = [&](const char* key, std::optional<Bytes>& budget) {
        if (const auto bytes = b.bytes(key)) budget = Bytes{*bytes};
      };
      take("hbm", config_.budget.hbm);
      take("dram", config_.budget.dram);
      take("nvme", config_.budget.nvme);
    });
    read_drives(r);
    r.object("placement", [&](ConfigReader& p) { read_placement(p); });
    if (const auto clip = r.text("clip"); clip && *clip != "none") {
      r.refuse("clip", "'" + *clip + "' is not available yet; write \"none\"");
    }
    if (r.count("slots").value_or(1) != 1) r.refuse("slots", "two slots are not available yet; write 1");
    if (r.flag("checksums").value_or(false)) {
      r.refuse("checksums", "checksums are not available yet; write false");
    }
    if (r.count("commit_interval").value_or(0) != 0) {
      r.refuse("commit_interval", "commits are not available yet; write 0");
    }
    if (const auto segment = r.bytes("segment")) config_.segment = {*segment};
    r.object("speeds", [&](ConfigReader& s) {
      config_.speeds.host_to_device_gb_s = speed(s, "host_to_device_gb_s");
      config_.speeds.device_to_host_gb_s = speed(s, "device_to_host_gb_s");
      config_.speeds.adam_gb_s = speed(s, "adam_gb_s");
      config_.speeds.compute_tflops = speed(s, "compute_tflops");
    });
    config_.trace = r.text("trace").value_or("");
  }

  static std::optional<double> speed(ConfigReader& r, const std::string& key) {
    const auto value = r.number(key);
    if (value && !(*value > 0 && std::isfinite(*value))) r.refuse(key, "a positive speed is expected");
    return value;
  }

  void read_drives(ConfigReader& r) {
    const json* drives = r.value("nvme");
    if (drives == nullptr || drives->is_null()) return;
    if (!drives->is_array()) r.refuse("nvme", "a list of drives in brackets is expected");
    if (drives->size() > 1) r.refuse("nvme", "several directories are not available yet; name one");
    for (const auto& drive : *drives) {
      ConfigReader d(drive, r.path("nvme[0]"));
      const auto path = d.text("path");
      if (!path) d.refuse("path", "a drive needs the path of a directory");
      config_.nvme = {{*path, speed(d, "read_gb_s"), speed(d, "write_gb_s")}};
      d.finish();
    }
  }

  void read_placement(ConfigReader& r) {
    auto& placement = config_.placement;
    placement.parameter = choice(r, "parameter", placement.parameter);
    placement.master_weight = choice(r, "master_weight", placement.master_weight);
    placement.momentum = choice(r, "momentum", placement.momentum);
    placement.variance = choice(r, "variance", placement.variance);
    placement.activation = choice(r, "activation", placement.activation);
    const auto gradient = choice(r, "gradient", {});
    if (gradient && gradient->dram != 1) {
      r.refuse("gradient", "gradients pass through dram; write \"dram\" or \"auto\"");
    }
    if (r.value("by_name") != nullptr) r.refuse("by_name", "placement by name is not available yet");
  }

  static PlacementChoice choice(ConfigReader& r, const std::string& key, PlacementChoice before) {
    const json* value = r.value(key);
    if (value == nullptr || value->is_null()) return before;
    if (value->is_string()) {
      const auto& tier = value->get_ref<const std::string&>();
      if (tier == "auto") return before;
      if (tier == "hbm") return TierFractions{1, 0, 0};
      if (tier == "dram") return TierFractions{0, 1, 0};
      if (tier == "nvme") return TierFractions{0, 0, 1};
      r.refuse(key, "'" + tier + "' is no tier; there are hbm, dram, nvme and auto");
    }
    ConfigReader fractions(*value, r.path(key));
    const TierFractions result{fractions.number("hbm").value_or(0),
                               fractions.number("dram").value_or(0),
                               fractions.number("nvme").value_or(0)};
    fractions.finish();
    const double sum = result.hbm + result.dram + result.nvme;
    if (!(result.hbm >= 0 && result.dram >= 0 && result.nvme >= 0 && std::abs(sum - 1) < 1e-6)) {
      r.refuse(key, "the fractions must not be negative and must add up to 1");
    }
    return result;
  }

  Config& config_;
};

}  // namespace

Config parse_config(std::string_view json_text, std::string_view origin) {
  const json document = parse_config_json(json_text, origin);
  Config config;
  try {
    ConfigReader top(document, "");
    ConfigParser(config).read(top);
    top.finish();
  } catch (const Error& error) {
    throw Error(error.code(), std::string(origin) + ": " + error.what());
  }
  return config;
}

Config load_config(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw Error(ErrorCode::io, "the configuration " + path + " cannot be read; check the path");
  }
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return parse_config(text, path);
}

}  // namespace terrace
