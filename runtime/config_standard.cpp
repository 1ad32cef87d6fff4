// The keys that users already have: batch sizes, optimizer, precision, ZeRO, offload, I/O.
#include <cmath>

#include "runtime/config_blocks.h"
#include "terrace/error.h"

namespace terrace {
namespace {

using nlohmann::json;

constexpr CountRange kAtLeastOne{.least = 1};
constexpr CountRange kSequences{.least = 1, .most = std::uint64_t{1} << 40};
constexpr CountRange kMicroBatches{.least = 1, .most = 1000000};
constexpr CountRange kThreads{.least = 1, .most = 256};
constexpr CountRange kQueueDepth{.least = 1, .most = 4096};
constexpr CountRange kBlockBytes{.least = 4096, .most = 1U << 30};

// train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps, for one rank.
void read_batch(ConfigReader& r, Config& config) {
  const auto all = r.count("train_batch_size", kSequences);
  auto micro = r.count("train_micro_batch_size_per_gpu", kSequences);
  auto steps = r.count("gradient_accumulation_steps", kMicroBatches);
  if (all && micro && !steps) steps = *all / *micro;
  if (all && !micro) micro = *all / steps.value_or(1);
  if (all && *all != *micro * steps.value_or(1)) {
    r.refuse("train_batch_size",
             std::to_string(*all) + " is not train_micro_batch_size_per_gpu times " +
                 "gradient_accumulation_steps; make it so, or leave one of the three out");
  }
  if (steps.value_or(1) > kMicroBatches.most) {
    r.refuse("train_batch_size", "it asks for more than " + std::to_string(kMicroBatches.most) +
                                     " accumulation steps");
  }
  config.train_micro_batch_size = micro;
  config.micro_batches = static_cast<std::uint32_t>(steps.value_or(1));
}

// The gradient's dtype, when that is not fp32, is known to the trainer alone.
void read_accumulation(ConfigReader& r, Config& config) {
  const auto name = r.text("grad_accum_dtype");
  if (!name) return;
  constexpr std::pair<const char*, DType> kNames[] = {
      {"fp32", DType::fp32}, {"bf16", DType::bf16}, {"fp16", DType::fp16}};
  for (const auto& [known, dtype] : kNames) {
    if (*name == known) return void(config.accumulation_dtype = dtype);
  }
  r.expect("grad_accum_dtype", "\"fp32\", \"bf16\" or \"fp16\"");
}

void read_betas(ConfigReader& r, AdamOptions& adam) {
  const json* betas = r.value("betas");
  if (betas == nullptr) return;
  if (!betas->is_array() || betas->size() != 2 || !(*betas)[0].is_number() ||
      !(*betas)[1].is_number()) {
    r.expect("betas", "a list of two numbers");
  }
  adam.beta1 = (*betas)[0].get<double>();
  adam.beta2 = (*betas)[1].get<double>();
}

void read_adam(ConfigReader& r, ConfigDraft& draft) {
  Config& config = draft.config;
  AdamOptions& adam = config.optimizer;
  config.learning_rate = r.number("lr").value_or(config.learning_rate);
  read_betas(r, adam);
  adam.epsilon = r.number("eps").value_or(adam.epsilon);
  adam.weight_decay = r.number("weight_decay").value_or(adam.weight_decay);
  adam.bias_correction = r.flag("bias_correction").value_or(adam.bias_correction);
  const auto decoupled = r.flag("adam_w_mode");
  if (decoupled) {
    if (adam.mode == AdamMode::adamw && !*decoupled) {
      r.refuse("adam_w_mode", "false contradicts the type AdamW; write the type Adam");
    }
    adam.mode = *decoupled ? AdamMode::adamw : AdamMode::adam;
  } else if (adam.mode == AdamMode::adam && adam.weight_decay != 0) {
    draft.note(r, "weight_decay",
               "Adam adds it to the gradient; the type AdamW, or adam_w_mode true, decouples it");
  }
}

void read_optimizer(ConfigReader& r, ConfigDraft& draft) {
  Config& config = draft.config;
  if (const auto type = r.text("type")) {
    if (*type != "Adam" && *type != "AdamW") r.expect("type", "\"Adam\" or \"AdamW\"");
    config.optimizer.mode = *type == "Adam" ? AdamMode::adam : AdamMode::adamw;
  }
  r.object("params", [&](ConfigReader& p) { read_adam(p, draft); });
  try {
    static_cast<void>(adam_scalars(config.optimizer, config.learning_rate, 1));
  } catch (const Error& error) {
    r.refuse("params", error.what());
  }
}

void read_fp16(ConfigReader& r, Config& config) {
  auto& scale = config.loss_scale;
  scale.enabled = r.flag("enabled").value_or(false);
  scale.constant = r.number("loss_scale").value_or(scale.constant);
  if (!(scale.constant >= 0 && scale.constant <= 0x1p60)) {
    r.expect("loss_scale", "0 (dynamic) or a positive factor up to 2^60");
  }
  const auto whole = [&](const char* key, CountRange range, std::uint32_t& value) {
    if (const auto given = r.count(key, range)) value = static_cast<std::uint32_t>(*given);
  };
  whole("initial_scale_power", {0, 60}, scale.initial_power);
  whole("loss_scale_window", {1, 1000000000}, scale.window);
  whole("hysteresis", {1, 1000000000}, scale.hysteresis);
  scale.minimum = r.number("min_loss_scale").value_or(scale.minimum);
  if (!(scale.minimum > 0 && scale.minimum <= 0x1p60)) {
    r.expect("min_loss_scale", "a positive factor up to 2^60");
  }
  if (!scale.enabled) return;
  if (config.parameter_dtype == DType::bf16) {
    r.refuse("enabled", "bf16.enabled is true as well; choose one of them");
  }
  config.parameter_dtype = DType::fp16;
}

// The tier of an offload block; nothing when the device is none, which leaves it to the planner.
PlacementChoice read_device(ConfigReader& r, ConfigDraft& draft) {
  const auto device = r.text("device").value_or("none");
  const auto path = r.text("nvme_path");
  if (device != "none" && device != "cpu" && device != "nvme") {
    r.expect("device", "\"none\", \"cpu\" or \"nvme\"");
  }
  if (device != "nvme") {
    if (path) draft.note(r, "nvme_path", "has no effect with device " + device);
    if (device == "none") return std::nullopt;
    return TierFractions{.hbm = 0, .dram = 1, .nvme = 0};
  }
  if (!path) {
    draft.directory_wanted_by = r.path("nvme_path");
  } else if (path->empty()) {
    r.expect("nvme_path", "the path of a directory");
  } else {
    draft.name_directory(r, "nvme_path", *path);
  }
  return TierFractions{.hbm = 0, .dram = 0, .nvme = 1};
}

void read_buffers(ConfigReader& r, ConfigDraft& draft) {
  if (r.count("buffer_count")) {
    draft.note(r, "buffer_count", "has no effect; the planner sizes all buffers");
  }
  if (!r.flag("pin_memory").value_or(true)) {
    draft.note(r, "pin_memory", "has no effect; the host arena is always pinned");
  }
}

void read_offload_param(ConfigReader& r, ConfigDraft& draft) {
  draft.config.placement.parameter = read_device(r, draft);
  read_buffers(r, draft);
  for (const char* key : {"buffer_size", "max_in_cpu"}) {
    if (r.count(key)) draft.note(r, key, "has no effect; set terrace.budget.dram");
  }
}

void read_offload_optimizer(ConfigReader& r, ConfigDraft& draft) {
  auto& placement = draft.config.placement;
  placement.master_weight = placement.momentum = placement.variance = read_device(r, draft);
  read_buffers(r, draft);
  for (const char* key : {"pipeline_read", "pipeline_write"}) {
    if (r.flag(key)) draft.note(r, key, "has no effect; transfers always overlap the updates");
  }
  if (r.flag("fast_init")) {
    draft.note(r, "fast_init", "has no effect; state is always written once, where it lives");
  }
  if (r.number("ratio").value_or(1) != 1) {
    r.refuse("ratio", "optimizer state in hbm is not available yet; write 1");
  }
}

// Keys that other systems need between ranks, or to bound what the planner knows.
void read_zero_without_effect(ConfigReader& r, ConfigDraft& draft) {
  for (const char* key :
       {"reduce_bucket_size", "allgather_bucket_size", "stage3_param_persistence_threshold",
        "param_persistence_threshold", "stage3_max_live_parameters", "max_live_parameters",
        "stage3_max_reuse_distance", "max_reuse_distance"}) {
    if (r.count(key)) draft.note(r, key, "has no effect with one rank and planned memory");
  }
  for (const char* key : {"overlap_comm", "round_robin_gradients", "contiguous_gradients",
                          "reduce_scatter", "stage3_gather_16bit_weights_on_model_save",
                          "gather_16bit_weights_on_model_save"}) {
    if (r.flag(key)) {
      draft.note(r, key, "has no effect; what it switches is always on or has no counterpart");
    }
  }
}

void refuse_zero_plus_plus(ConfigReader& r) {
  for (const char* key : {"zero_quantized_weights", "zero_quantized_gradients"}) {
    if (r.flag(key).value_or(false)) r.refuse(key, "ZeRO++ is not available yet; write false");
  }
  if (r.count("zero_hpz_partition_size").value_or(1) != 1) {
    r.refuse("zero_hpz_partition_size", "ZeRO++ is not available yet; write 1");
  }
}

void read_zero(ConfigReader& r, ConfigDraft& draft) {
  if (r.count("stage", {.least = 0, .most = 3}).value_or(0) > 0) {
    draft.note(r, "stage", "has no effect; with one rank the stages 0 to 3 are the same");
  }
  draft.config.sub_group_elements = r.count("sub_group_size", kAtLeastOne);
  const auto prefixed = r.count("stage3_prefetch_bucket_size");
  const auto plain = r.count("prefetch_bucket_size");
  if (prefixed && plain && *prefixed != *plain) {
    r.refuse("prefetch_bucket_size", "differs from stage3_prefetch_bucket_size; remove one");
  }
  draft.config.prefetch_elements = prefixed ? prefixed : plain;
  read_zero_without_effect(r, draft);
  refuse_zero_plus_plus(r);
  r.object("offload_param", [&](ConfigReader& o) { read_offload_param(o, draft); });
  r.object("offload_optimizer", [&](ConfigReader& o) { read_offload_optimizer(o, draft); });
}

void read_aio(ConfigReader& r, ConfigDraft& draft) {
  IoEngineOptions& io = draft.config.io;
  if (const auto block = r.text_count("block_size", kBlockBytes)) {
    if (*block % kBlockBytes.least != 0) r.expect("block_size", "a multiple of 4096");
    io.block = {*block};
  }
  if (const auto depth = r.text_count("queue_depth", kQueueDepth)) {
    io.queue_depth = static_cast<std::uint32_t>(*depth);
  }
  std::optional<std::uint64_t> threads;
  for (const char* key : {"intra_op_parallelism", "thread_count", "num_threads"}) {
    const auto value = r.text_count(key, kThreads);
    if (value && threads && *value != *threads) {
      r.refuse(key, "differs from another name of the same thing; remove one");
    }
    if (value) threads = value;
  }
  if (threads) io.threads = static_cast<std::uint32_t>(*threads);
  for (const char* key : {"single_submit", "overlap_events"}) {
    const json* value = r.value(key);
    if (value == nullptr) continue;
    if (!value->is_boolean() && *value != "true" && *value != "false") {
      r.expect(key, "true or false");
    }
    draft.note(r, key, "has no effect; requests are submitted together and overlap");
  }
}

}  // namespace

void read_standard_blocks(ConfigReader& top, ConfigDraft& draft) {
  read_batch(top, draft.config);
  draft.gradient_clipping = top.number("gradient_clipping");
  if (draft.gradient_clipping && !(*draft.gradient_clipping >= 0)) {
    top.expect("gradient_clipping", "a norm that is not negative");
  }
  top.object("optimizer", [&](ConfigReader& r) { read_optimizer(r, draft); });
  top.object("bf16", [&](ConfigReader& r) {
    if (const auto enabled = r.flag("enabled")) {
      draft.config.parameter_dtype = *enabled ? DType::bf16 : DType::fp32;
    }
  });
  top.object("fp16", [&](ConfigReader& r) { read_fp16(r, draft.config); });
  top.object("data_types", [&](ConfigReader& r) { read_accumulation(r, draft.config); });
  top.object("zero_optimization", [&](ConfigReader& r) { read_zero(r, draft); });
  top.object("aio", [&](ConfigReader& r) { read_aio(r, draft); });
}

}  // namespace terrace
