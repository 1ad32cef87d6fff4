// The configuration file: what is accepted, what it means, and what each refusal says.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "terrace/config.h"
#include "terrace/error.h"
#include "tests/support/refusal.h"

namespace terrace {
namespace {

constexpr const char* kEverything = R"({
  "train_batch_size": 8,
  "train_micro_batch_size_per_gpu": 8,
  "gradient_accumulation_steps": 1,
  "gradient_clipping": 0,
  "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-6,
                "weight_decay": 0.1, "bias_correction": false}},
  "fp16": {"enabled": false, "loss_scale": 0, "initial_scale_power": 16,
           "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8, "overlap_comm": true,
    "sub_group_size": 1e9, "stage3_prefetch_bucket_size": 5e7,
    "stage3_param_persistence_threshold": 1e5, "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": false,
    "round_robin_gradients": false, "contiguous_gradients": true, "reduce_scatter": true,
    "zero_quantized_weights": false, "zero_quantized_gradients": false,
    "zero_hpz_partition_size": 1,
    "offload_param": {"device": "nvme", "nvme_path": "/nvme0", "buffer_count": 5,
                      "buffer_size": 1e8, "max_in_cpu": 1e9, "pin_memory": true},
    "offload_optimizer": {"device": "cpu", "buffer_count": 4, "pin_memory": true,
                          "pipeline_read": false, "pipeline_write": false, "fast_init": false,
                          "ratio": 1.0}},
  "aio": {"block_size": "262144", "queue_depth": 16, "thread_count": "2", "single_submit": "false",
          "overlap_events": true},
  "terrace": {
    "budget": {"hbm": "24GiB", "dram": "200GiB", "nvme": 4096},
    "nvme": [{"path": "/nvme0/", "read_gb_s": 6.5, "write_gb_s": 5}],
    "placement": {"gradient": "dram", "activation": "hbm",
                  "master_weight": {"dram": 0.4, "nvme": 0.6}, "momentum": "nvme",
                  "variance": "auto"},
    "clip": "none", "slots": 1, "commit_interval": 0, "checksums": false, "segment": "2MiB",
    "speeds": {"host_to_device_gb_s": 25, "device_to_host_gb_s": 26.5, "adam_gb_s": 40,
               "compute_tflops": 300},
    "trace": "trace.json"
  }
})";

// What is wrong with `text`; empty when it is accepted.
std::string zero(const std::string& inside) { return R"({"zero_optimization": {)" + inside + "}}"; }
std::string own(const std::string& inside) { return R"({"terrace": {)" + inside + "}}"; }

bool has_note(const Config& config, const std::string& path) {
  return std::any_of(config.notes.begin(), config.notes.end(),
                     [&](const std::string& note) { return note.rfind(path + ": ", 0) == 0; });
}

TEST(Config, EmptyObjectIsTheDefault) {
  const Config config = parse_config("{}");
  const Config plain;
  EXPECT_EQ(config.optimizer, plain.optimizer);
  EXPECT_EQ(config.learning_rate, plain.learning_rate);
  EXPECT_EQ(config.segment, plain.segment);
  EXPECT_EQ(config.io.block, plain.io.block);
  EXPECT_FALSE(config.parameter_dtype || config.train_micro_batch_size || config.budget.dram);
  EXPECT_FALSE(config.placement.parameter || config.sub_group_elements);
  EXPECT_TRUE(config.nvme.empty() && config.notes.empty() && config.trace.empty());
}

TEST(Config, EverythingAtOnceStandardKeys) {
  const Config config = parse_config(kEverything);
  EXPECT_EQ(config.train_micro_batch_size, 8U);
  EXPECT_EQ(config.optimizer, (AdamOptions{AdamMode::adam, 0.8, 0.95, 1e-6, 0.1, false}));
  EXPECT_EQ(config.learning_rate, 3e-4);
  EXPECT_EQ(config.parameter_dtype, DType::bf16);
  EXPECT_EQ(config.sub_group_elements, 1'000'000'000U);
  EXPECT_EQ(config.prefetch_elements, 50'000'000U);
  EXPECT_EQ(config.io.block, Bytes{262144});
  EXPECT_EQ(config.io.queue_depth, 16U);
  EXPECT_EQ(config.io.threads, 2U);
  EXPECT_EQ(config.placement.parameter, (TierFractions{0, 0, 1}));
  EXPECT_EQ(config.placement.variance, (TierFractions{0, 1, 0}));  // "auto" leaves it as offloaded
}

TEST(Config, EverythingAtOnceOwnKeys) {
  const Config config = parse_config(kEverything);
  EXPECT_EQ(config.budget.hbm, 24_GiB);
  EXPECT_EQ(config.budget.dram, 200_GiB);
  EXPECT_EQ(config.budget.nvme, Bytes{4096});
  ASSERT_EQ(config.nvme.size(), 1U);
  EXPECT_EQ(config.nvme[0].path, "/nvme0/");
  EXPECT_EQ(config.nvme[0].read_gb_s, 6.5);
  EXPECT_EQ(config.nvme[0].write_gb_s, 5.0);
  EXPECT_EQ(config.placement.activation, (TierFractions{1, 0, 0}));
  EXPECT_EQ(config.placement.master_weight, (TierFractions{0, 0.4, 0.6}));
  EXPECT_EQ(config.placement.momentum, (TierFractions{0, 0, 1}));
  EXPECT_EQ(config.segment, 2_MiB);
  EXPECT_EQ(config.speeds.host_to_device_gb_s, 25.0);
  EXPECT_EQ(config.speeds.device_to_host_gb_s, 26.5);
  EXPECT_EQ(config.speeds.adam_gb_s, 40.0);
  EXPECT_EQ(config.speeds.compute_tflops, 300.0);
  EXPECT_EQ(config.trace, "trace.json");
}

TEST(Config, KeysWithoutEffectAreNoted) {
  const Config config = parse_config(kEverything);
  for (const char* key :
       {"stage", "reduce_bucket_size", "allgather_bucket_size", "overlap_comm",
        "stage3_param_persistence_threshold", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
        "round_robin_gradients", "contiguous_gradients", "reduce_scatter",
        "offload_param.buffer_count", "offload_param.buffer_size", "offload_param.max_in_cpu",
        "offload_optimizer.buffer_count", "offload_optimizer.pipeline_read",
        "offload_optimizer.pipeline_write", "offload_optimizer.fast_init"}) {
    EXPECT_TRUE(has_note(config, std::string("zero_optimization.") + key)) << key;
  }
  EXPECT_TRUE(has_note(config, "aio.single_submit"));
  EXPECT_TRUE(has_note(config, "aio.overlap_events"));
  EXPECT_FALSE(has_note(config, "zero_optimization.sub_group_size"));
}

TEST(Config, AliasesWithoutTheStagePrefix) {
  const Config config = parse_config(zero(
      R"("prefetch_bucket_size": 7, "param_persistence_threshold": 1, "max_live_parameters": 1,
         "max_reuse_distance": 1, "gather_16bit_weights_on_model_save": true)"));
  EXPECT_EQ(config.prefetch_elements, 7U);
  expect_refused(zero(R"("prefetch_bucket_size": 7, "stage3_prefetch_bucket_size": 8)"),
                 {"zero_optimization.prefetch_bucket_size", "stage3_prefetch_bucket_size"});
}

TEST(Config, AutoAndNullMeanTheDefault) {
  const Config config = parse_config(R"({
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": null,
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "optimizer": {"type": "auto", "params": {"lr": "auto", "betas": "auto", "eps": null,
                  "weight_decay": "auto", "bias_correction": "auto"}},
    "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": "auto", "sub_group_size": "auto",
      "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": "auto", "overlap_comm": "auto",
      "zero_quantized_weights": "auto", "zero_hpz_partition_size": "auto",
      "offload_param": {"device": "auto", "nvme_path": "auto", "pin_memory": "auto"},
      "offload_optimizer": "auto"},
    "aio": {"block_size": "auto", "queue_depth": "auto", "single_submit": "auto"},
    "terrace": {"budget": {"hbm": "auto"}, "nvme": "auto", "placement": {"parameter": "auto"},
      "clip": "auto", "slots": "auto", "commit_interval": "auto", "checksums": "auto",
      "segment": "auto", "speeds": {"compute_tflops": "auto"}, "trace": "auto"}
  })");
  const Config plain;
  EXPECT_EQ(config.optimizer, plain.optimizer);
  EXPECT_EQ(config.learning_rate, plain.learning_rate);
  EXPECT_EQ(config.io.queue_depth, plain.io.queue_depth);
  EXPECT_EQ(config.segment, plain.segment);
  EXPECT_FALSE(config.parameter_dtype || config.placement.parameter || config.budget.hbm);
  EXPECT_TRUE(config.nvme.empty() && config.notes.empty() && config.trace.empty());
}

TEST(Config, NumbersInEveryNotation) {
  EXPECT_EQ(parse_config(zero(R"("sub_group_size": 5e8)")).sub_group_elements, 500'000'000U);
  EXPECT_EQ(parse_config(zero(R"("sub_group_size": 5.0E+2)")).sub_group_elements, 500U);
  // Not representable in a double:
  EXPECT_EQ(parse_config(zero(R"("sub_group_size": 9007199254740993)")).sub_group_elements,
            9007199254740993U);
  EXPECT_EQ(parse_config(R"({"aio": {"queue_depth": "1e2"}})").io.queue_depth, 100U);
}

TEST(Config, NumbersThatAreNoCounts) {
  for (const char* value : {"-1", "1.5", "0", "1e300", "18446744073709551615", "\"7\"", "true",
                            "[]", "{}", "[[[[1]]]]", "\"\""}) {
    expect_refused(zero(R"("sub_group_size": )" + std::string(value)),
                   {"zero_optimization.sub_group_size: a whole number", " is expected, not "});
    if (HasFailure()) FAIL() << value;
  }
  for (const char* value : {"\"\"", "\"8x\"", "\"0x8\"", "\"nan\"", "\"inf\"", "\" 8\"", "0",
                            "5000", "\"-8\""}) {
    expect_refused(R"({"aio": {"queue_depth": )" + std::string(value) + "}}",
                   {"aio.queue_depth", "is expected, not"});
  }
}

TEST(Config, WrongTypesNameKeyFoundAndExpected) {
  expect_refused(R"({"bf16": {"enabled": 1}})", {"bf16.enabled: true or false", "the number 1"});
  expect_refused(R"({"bf16": {"enabled": "yes"}})", {"bf16.enabled", "the text \"yes\""});
  expect_refused(R"({"bf16": true})", {"bf16: an object", "not true"});
  expect_refused(R"({"optimizer": {"params": {"lr": "0.1"}}})",
                 {"optimizer.params.lr: a number", "the text \"0.1\""});
  expect_refused(R"({"optimizer": {"type": 3}})", {"optimizer.type: a text", "the number 3"});
  expect_refused(own(R"("nvme": "/nvme0")"), {"terrace.nvme: a list", "the text \"/nvme0\""});
  expect_refused(own(R"("nvme": ["/nvme0"])"), {"terrace.nvme[0]: an object", "\"/nvme0\""});
  expect_refused(own(R"("budget": {"dram": []})"), {"terrace.budget.dram: a size", "a list"});
  expect_refused(own(R"("trace": {})"), {"terrace.trace: a text", "an object"});
  expect_refused(own(R"("numa_node": "all")"), {"terrace.numa_node", "all"});
  EXPECT_EQ(parse_config(own(R"("numa_node": 1)")).numa_node, 1);
  expect_refused("[]", {"an object in braces is expected, not a list"});
  expect_refused("3", {"an object", "the number 3"});
}

TEST(Config, LongValuesAreCutInMessages) {
  const std::string text(100'000, 'x');
  EXPECT_LT(refusal(R"({"bf16": {"enabled": ")" + text + "\"}}").size(), 200U);
  EXPECT_LT(refusal("{\"" + text + "\": 1}").size(), 300U);
  EXPECT_LT(refusal("{\"" + text + "\": 1, \"" + text + "\": 1}").size(), 300U);
  EXPECT_LT(refusal(own(R"("budget": {"dram": ")" + text + "\"}")).size(), 400U);
}

TEST(Config, UnknownKeysNameTheNearest) {
  expect_refused(R"({"gradient_cliping": 1})", {"gradient_cliping: ", "'gradient_clipping'"});
  expect_refused(zero(R"("stages": 3)"), {"zero_optimization.stages: ", "unknown",
                                          "'zero_optimization.stage'"});
  expect_refused(zero(R"("offload_optimizer": {"devise": "cpu"})"),
                 {"zero_optimization.offload_optimizer.devise: ",
                  "'zero_optimization.offload_optimizer.device'"});
  expect_refused(own(R"("placement": {"momentun": "nvme"})"),
                 {"terrace.placement.momentun: ", "'terrace.placement.momentum'"});
  expect_refused(own(R"("placement": {"momentum": {"dran": 1}})"),
                 {"terrace.placement.momentum.dran: ", "'terrace.placement.momentum.dram'"});
  expect_refused(own(R"("nvme": [{"pat": "/"}])"), {"terrace.nvme[0]"});
  expect_refused(R"({"": 1})", {"unknown"});
}

TEST(Config, DuplicateKeysAreRefused) {
  expect_refused(R"({"bf16": {}, "bf16": {}})", {"bf16: this key appears twice"});
  expect_refused(own(R"("speeds": {"adam_gb_s": 1, "adam_gb_s": 1})"),
                 {"terrace.speeds.adam_gb_s: this key appears twice"});
  EXPECT_EQ(refusal(R"({"bf16": {"enabled": true}, "fp16": {"enabled": false}})"), "");
}

TEST(Config, OptimizerModes) {
  const auto mode = [](const std::string& inside) {
    return parse_config(R"({"optimizer": {)" + inside + "}}").optimizer.mode;
  };
  EXPECT_EQ(mode(R"("type": "AdamW")"), AdamMode::adamw);
  EXPECT_EQ(mode(R"("type": "Adam")"), AdamMode::adam);
  EXPECT_EQ(mode(R"("type": "Adam", "params": {"adam_w_mode": true})"), AdamMode::adamw);
  EXPECT_EQ(mode(R"("type": "Adam", "params": {"adam_w_mode": false})"), AdamMode::adam);
  EXPECT_TRUE(has_note(
      parse_config(R"({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}})"),
      "optimizer.params.weight_decay"));
  expect_refused(R"({"optimizer": {"type": "Lamb"}})", {"optimizer.type", "\"Lamb\"", "AdamW"});
  expect_refused(R"({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false}}})",
                 {"optimizer.params.adam_w_mode", "contradicts"});
}

TEST(Config, OptimizerValuesOutOfRange) {
  for (const char* params : {R"("lr": -1)", R"("betas": [1, 0.9])", R"("betas": [0.9, -0.1])",
                             R"("eps": 0)", R"("weight_decay": -1)"}) {
    expect_refused(R"({"optimizer": {"params": {)" + std::string(params) + "}}}",
                   {"optimizer.params"});
  }
  for (const char* betas : {"0.9", "[0.9]", "[0.9, 0.9, 0.9]", "[0.9, \"x\"]", "{}"}) {
    expect_refused(R"({"optimizer": {"params": {"betas": )" + std::string(betas) + "}}}",
                   {"optimizer.params.betas: a list of two numbers is expected, not"});
  }
}

TEST(Config, ClippingIsToOneNorm) {
  EXPECT_EQ(parse_config(R"({"gradient_clipping": 0.5})").gradient_clipping, 0.5);
  EXPECT_EQ(parse_config("{}").gradient_clipping, 0);
  EXPECT_EQ(parse_config(own(R"("clip": "global")")).gradient_clipping, 1.0);
  expect_refused(R"({"gradient_clipping": 0, "terrace": {"clip": "global"}})",
                 {"gradient_clipping", "terrace.clip", "write 1.0"});
  expect_refused(R"({"gradient_clipping": -1})", {"gradient_clipping"});
  expect_refused(own(R"("clip": "speculative")"), {"terrace.clip", "not available yet"});
  expect_refused(own(R"("clip": "all")"), {"terrace.clip", "\"all\""});
  const Config config = parse_config(R"({"gradient_clipping": 1.0, "terrace": {"clip": "none"}})");
  EXPECT_TRUE(has_note(config, "gradient_clipping"));
  EXPECT_EQ(config.gradient_clipping, 0);
}

TEST(Config, StoreKeys) {
  const Config config = parse_config(own(
      R"("slots": 2, "commit_interval": 50, "checksums": false, "timeout_seconds": 2.5,
         "nvme": [{"path": "/a", "read_gb_s": 6, "keep_free": "10GiB"}, {"path": "/b"}])"));
  EXPECT_EQ(config.store.slots, 2U);
  EXPECT_EQ(config.store.commit_interval, 50U);
  EXPECT_FALSE(config.store.checksums);
  EXPECT_EQ(config.store.timeout_seconds, 2.5);
  ASSERT_EQ(config.nvme.size(), 2U);
  EXPECT_EQ(config.nvme[0].read_gb_s, 6.0);
  EXPECT_EQ(config.nvme[0].keep_free, 10_GiB);
  EXPECT_EQ(config.nvme[1].path, "/b");
  expect_refused(own(R"("slots": 3)"), {"terrace.slots", "from 1 to 2"});
  expect_refused(own(R"("commit_interval": 0)"), {"terrace.commit_interval", "at least 1"});
  expect_refused(own(R"("timeout_seconds": 0)"), {"terrace.timeout_seconds", "positive"});
  expect_refused(own(R"("nvme": [{"path": "/a"}, {"path": "/a/"}])"), {"terrace.nvme", "twice"});
  expect_refused(own(R"("nvme": [{"path": "/a", "keep_free": -1}])"), {"keep_free"});
}

TEST(Config, WhatThisVersionDoesNotDo) {
  const Config scaled = parse_config(
      R"({"bf16": {"enabled": false}, "fp16": {"enabled": true, "initial_scale_power": 12,
          "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 0.25}})");
  EXPECT_EQ(scaled.parameter_dtype, DType::fp16);
  EXPECT_TRUE(scaled.loss_scale.enabled);
  EXPECT_EQ(scaled.loss_scale.initial_power, 12U);
  EXPECT_EQ(scaled.loss_scale.window, 500U);
  EXPECT_EQ(scaled.loss_scale.hysteresis, 3U);
  EXPECT_EQ(scaled.loss_scale.minimum, 0.25);
  expect_refused(R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})",
                 {"fp16.enabled", "bf16.enabled"});
  expect_refused(R"({"fp16": {"loss_scale": -1}})", {"fp16.loss_scale", "positive"});
  expect_refused(R"({"fp16": {"initial_scale_power": 61}})", {"fp16.initial_scale_power"});
  expect_refused(R"({"fp16": {"min_loss_scale": 0}})", {"fp16.min_loss_scale"});
  expect_refused(zero(R"("stage": 4)"), {"zero_optimization.stage", "from 0 to 3"});
  expect_refused(zero(R"("zero_quantized_weights": true)"), {"zero_quantized_weights", "ZeRO++"});
  expect_refused(zero(R"("zero_quantized_gradients": true)"), {"zero_quantized_gradients"});
  expect_refused(zero(R"("zero_hpz_partition_size": 8)"), {"zero_hpz_partition_size", "write 1"});
  expect_refused(zero(R"("offload_optimizer": {"ratio": 0.5})"),
                 {"zero_optimization.offload_optimizer.ratio", "write 1"});
  expect_refused(own(R"("placement": {"by_name": [{"match": "a.*", "parameter": "hbm"}]})"),
                 {"terrace.placement.by_name", "not available yet"});
  for (const char* tier : {R"("hbm")", R"("nvme")", R"({"dram": 0.5, "nvme": 0.5})"}) {
    expect_refused(own(R"("placement": {"gradient": )" + std::string(tier) + "}"),
                   {"terrace.placement.gradient", "\"dram\""});
  }
  for (const char* state : {"master_weight", "momentum", "variance"}) {
    const std::string half = R"(": {"hbm": 0.5, "dram": 0.5}})";
    expect_refused(own(R"("placement": {")" + std::string(state) + half), {state, "hbm"});
  }
}

TEST(Config, StagesNeedNoSecondRank) {
  EXPECT_TRUE(parse_config(zero(R"("stage": 0)")).notes.empty());
  for (const char* stage : {"1", "2", "3"}) {
    const Config config = parse_config(zero(R"("stage": )" + std::string(stage)));
    EXPECT_TRUE(has_note(config, "zero_optimization.stage"));
  }
}

TEST(Config, OffloadDevices) {
  const auto offload = [](const std::string& block, const std::string& inside) {
    return zero("\"" + block + "\": {" + inside + "}");
  };
  const Config none = parse_config(offload("offload_param", R"("device": "none")"));
  EXPECT_FALSE(none.placement.parameter);
  const Config cpu = parse_config(
      offload("offload_optimizer", R"("device": "cpu", "nvme_path": "/a", "pin_memory": false)"));
  EXPECT_EQ(cpu.placement.momentum, (TierFractions{0, 1, 0}));
  EXPECT_TRUE(cpu.nvme.empty());
  EXPECT_TRUE(has_note(cpu, "zero_optimization.offload_optimizer.nvme_path"));
  EXPECT_TRUE(has_note(cpu, "zero_optimization.offload_optimizer.pin_memory"));
  const Config nvme = parse_config(
      offload("offload_optimizer", R"("device": "nvme", "nvme_path": "/a")"));
  EXPECT_EQ(nvme.placement.master_weight, (TierFractions{0, 0, 1}));
  EXPECT_EQ(nvme.nvme.at(0).path, "/a");
  expect_refused(offload("offload_param", R"("device": "disk")"),
                 {"zero_optimization.offload_param.device", "\"nvme\""});
  expect_refused(offload("offload_param", R"("device": "nvme")"),
                 {"zero_optimization.offload_param.nvme_path", "terrace.nvme"});
  expect_refused(offload("offload_param", R"("device": "nvme", "nvme_path": "")"), {"nvme_path"});
}

TEST(Config, OneDirectoryFromSeveralPlaces) {
  const std::string both = R"({"zero_optimization": {
    "offload_param": {"device": "nvme", "nvme_path": "/a"},
    "offload_optimizer": {"device": "nvme", "nvme_path": "%"}}})";
  const auto with = [&](const std::string& path) {
    std::string text = both;
    return text.replace(text.find('%'), 1, path);
  };
  EXPECT_EQ(parse_config(with("/a/")).nvme.size(), 1U);
  expect_refused(with("/b"), {"offload_optimizer.nvme_path", "another directory",
                              "zero_optimization.offload_param.nvme_path"});
  const Config config = parse_config(R"({
    "zero_optimization": {"offload_optimizer": {"device": "nvme"}},
    "terrace": {"nvme": [{"path": "/c", "read_gb_s": 3}]}})");
  EXPECT_EQ(config.nvme.at(0).path, "/c");
  expect_refused(R"({"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/a"}},
                     "terrace": {"nvme": [{"path": "/c"}]}})",
                 {"offload_param.nvme_path", "not among the directories of terrace.nvme"});
  EXPECT_TRUE(parse_config(own(R"("nvme": [])")).nvme.empty());
}

TEST(Config, AioRanges) {
  expect_refused(R"({"aio": {"block_size": 1000}})", {"aio.block_size", "from 4096"});
  expect_refused(R"({"aio": {"block_size": 5000}})", {"aio.block_size", "multiple of 4096"});
  expect_refused(R"({"aio": {"block_size": 1e12}})", {"aio.block_size", "to 1073741824"});
  expect_refused(R"({"aio": {"num_threads": 0}})", {"aio.num_threads"});
  expect_refused(R"({"aio": {"num_threads": 2, "thread_count": 3}})", {"aio.num_threads"});
  expect_refused(R"({"aio": {"single_submit": "maybe"}})", {"aio.single_submit"});
  EXPECT_EQ(parse_config(R"({"aio": {"num_threads": 2, "intra_op_parallelism": 2}})").io.threads,
            2U);
}

TEST(Config, PlacementFractions) {
  const auto placement = [](const std::string& value) {
    return own(R"("placement": {"parameter": )" + value + "}");
  };
  const Config three = parse_config(placement(R"({"hbm": 0.1, "dram": 0.2, "nvme": 0.7})"));
  EXPECT_EQ(three.placement.parameter, (TierFractions{0.1, 0.2, 0.7}));
  EXPECT_EQ(parse_config(placement(R"({"dram": 1})")).placement.parameter,
            (TierFractions{0, 1, 0}));
  expect_refused(placement(R"({"dram": 0.5, "nvme": 0.4})"),
                 {"terrace.placement.parameter", "add up to 0.9", "must add up to 1"});
  expect_refused(placement(R"({"dram": 1.5, "nvme": -0.5})"), {"from 0 to 1"});
  expect_refused(placement("{}"), {"add up to 0"});
  expect_refused(placement(R"({"dram": "1"})"), {"terrace.placement.parameter.dram", "a number"});
  expect_refused(placement(R"("ssd")"), {"terrace.placement.parameter", "\"ssd\"", "\"nvme\""});
  expect_refused(placement("1"), {"terrace.placement.parameter", "the number 1"});
}

TEST(Config, SpeedsArePositive) {
  for (const char* key :
       {"host_to_device_gb_s", "device_to_host_gb_s", "adam_gb_s", "compute_tflops"}) {
    for (const char* value : {"0", "-1", "\"fast\""}) {
      expect_refused(own(R"("speeds": {")" + std::string(key) + "\": " + value + "}"),
                     {std::string("terrace.speeds.") + key});
    }
  }
  expect_refused(own(R"("nvme": [{"path": "/a", "read_gb_s": 0}])"),
                 {"terrace.nvme[0].read_gb_s: a positive speed"});
}

TEST(Config, Sizes) {
  EXPECT_EQ(parse_config(own(R"("budget": {"dram": "1.5GiB"})")).budget.dram, 1536_MiB);
  EXPECT_EQ(parse_config(own(R"("budget": {"dram": 5e9})")).budget.dram, Bytes{5'000'000'000});
  expect_refused(own(R"("budget": {"dram": "many"})"), {"terrace.budget.dram", "many"});
  expect_refused(own(R"("budget": {"dram": -5})"), {"terrace.budget.dram"});
  for (const char* segment : {"0", "2048", "\"3MiB\"", "\"2GiB\"", "true"}) {
    expect_refused(own(R"("segment": )" + std::string(segment)), {"terrace.segment"});
  }
}

TEST(Config, WhatIsNoJson) {
  for (const char* text : {"", "{", "{\"a\"", "{} {}", "{'a': 1}", "{\"a\": 1,}", "nul",
                           "{\"a\": 1e999}", "\xFF\xFE", "{\"\xC3\x28\": 1}"}) {
    expect_refused(text, {"this is not JSON: "});
  }
  EXPECT_EQ(refusal("{\"a\"").find("[json"), std::string::npos);
}

TEST(Config, DeepNestingIsRefusedNotOverrun) {
  for (const char* open : {"[", "{\"a\":"}) {
    std::string text = "{\"optimizer\": ";
    for (int i = 0; i < 100'000; ++i) text += open;
    expect_refused(text, {"nested too deeply"});
  }
}

TEST(Config, LoadNamesTheFile) {
  const std::string path =
      testing::TempDir() + "terrace_config_" + std::to_string(::getpid()) + ".json";
  std::ofstream(path) << R"({"train_batch_size": 3})";
  EXPECT_EQ(load_config(path).train_micro_batch_size, 3U);
  std::ofstream(path) << "{\"a\": 1}";
  try {
    static_cast<void>(load_config(path));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).rfind(path + ": a: ", 0), 0U) << error.what();
  }
  std::filesystem::remove(path);
  for (const std::string& unreadable : {path, testing::TempDir()}) {
    try {
      static_cast<void>(load_config(unreadable));
      FAIL() << "read " << unreadable;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::io);
      EXPECT_NE(std::string(error.what()).find(unreadable), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace terrace
