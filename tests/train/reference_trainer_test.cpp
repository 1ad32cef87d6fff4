// The oracle's optimizer against the library's, and what diverged training leaves behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "terrace/adam.h"
#include "tools/reference_trainer.h"

namespace terrace::gpt {
namespace {

GptConfig small() {
  GptConfig config;
  config.layers = 1;
  config.width = 20;  // tensors whose sizes leave a rest after every vector width
  config.heads = 2;
  config.context = 7;
  config.batch = 2;
  return config;
}

TextData::Batch counting(const GptConfig& config) {
  TextData::Batch batch;
  for (std::uint32_t i = 0; i < config.rows(); ++i) {
    batch.inputs.push_back(static_cast<std::int32_t>(i));
    batch.targets.push_back(static_cast<std::int32_t>(i + 1));
  }
  return batch;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
  });
}

struct Case {
  AdamOptions options;
  DType parameter;
  DType gradient;
  ReferenceGradients rules{};
};

class ReferenceOptimizer : public testing::TestWithParam<Case> {};

TEST_P(ReferenceOptimizer, GivesTheBitsOfAdamUpdate) {
  const auto& [options, parameter_dtype, gradient_dtype, rules] = GetParam();
  auto config = small();
  config.parameter_dtype = parameter_dtype;
  config.gradient_dtype = gradient_dtype;
  constexpr double kRate = 1e-2;
  ReferenceTrainer trainer(config, options, rules);
  std::vector<std::vector<float>> weights, momenta, variances;
  for (const auto& tensor : trainer.tensors()) {
    weights.push_back(tensor.master_weight);
    momenta.push_back(tensor.momentum);
    variances.push_back(tensor.variance);
  }
  for (std::uint64_t step = 1; step <= 4; ++step) {
    const double scale = trainer.loss_scale();
    const auto result = trainer.step({counting(config)}, kRate);
    ASSERT_FALSE(result.skipped);
    double factor = 1 / scale;
    if (rules.clip_norm > 0) factor *= std::min(1.0, rules.clip_norm / (*result.norm + 1e-6));
    const auto scalars = adam_scalars(options, kRate, step, factor);
    for (std::size_t t = 0; t < weights.size(); ++t) {
      const auto& tensor = trainer.tensors()[t];
      AlignedBytes parameter(tensor.elements * size_of(parameter_dtype).count);
      adam_update(scalars, {tensor.gradient.data(), gradient_dtype, weights[t].data(),
                            momenta[t].data(), variances[t].data(), parameter.data(),
                            parameter_dtype, tensor.elements});
      EXPECT_TRUE(same_bits(weights[t], tensor.master_weight)) << tensor.name << " step " << step;
      EXPECT_TRUE(same_bits(momenta[t], tensor.momentum)) << tensor.name << " step " << step;
      EXPECT_TRUE(same_bits(variances[t], tensor.variance)) << tensor.name << " step " << step;
      EXPECT_EQ(0, std::memcmp(parameter.data(), tensor.parameter.data(),
                               tensor.elements * size_of(parameter_dtype).count))
          << tensor.name << " step " << step;
    }
  }
}

LossScaleConfig scaled(double constant) {
  return {.enabled = true, .constant = constant, .initial_power = 8};
}

std::vector<Case> cases() {
  AdamOptions decoupled;
  decoupled.weight_decay = 0.1;
  AdamOptions l2 = decoupled;
  l2.mode = AdamMode::adam;
  AdamOptions plain;
  plain.bias_correction = false;
  return {{decoupled, DType::bf16, DType::bf16},
          {decoupled, DType::fp32, DType::bf16},
          {l2, DType::bf16, DType::fp32},
          {plain, DType::fp32, DType::fp32},
          {decoupled, DType::bf16, DType::bf16, {.clip_norm = 0.25, .loss_scale = {}}},
          {l2, DType::fp16, DType::fp16, {.clip_norm = 0, .loss_scale = scaled(0)}},
          {l2, DType::fp16, DType::fp32, {.clip_norm = 0.25, .loss_scale = scaled(256)}}};
}

INSTANTIATE_TEST_SUITE_P(Options, ReferenceOptimizer, testing::ValuesIn(cases()));

// The norm in another order, and of scaled and unscaled losses.
TEST(ReferenceTrainer, NormIsThatOfAllGradients) {
  auto config = small();
  config.parameter_dtype = config.gradient_dtype = DType::fp32;
  ReferenceTrainer trainer(config, {}, {.clip_norm = 1, .loss_scale = {}});
  ReferenceTrainer with_scale(config, {}, {.clip_norm = 0, .loss_scale = scaled(0)});
  const auto norm = trainer.step({counting(config)}, 1e-3).norm.value();
  double sum = 0;
  for (const auto& tensor : trainer.tensors()) {
    const auto* gradient = tensor.gradient.as<const float>();
    for (std::uint64_t i = 0; i < tensor.elements; ++i) {
      sum += static_cast<double>(gradient[i]) * static_cast<double>(gradient[i]);
    }
  }
  EXPECT_NEAR(norm, std::sqrt(sum), 1e-12 * norm);
  EXPECT_EQ(with_scale.step({counting(config)}, 1e-3).norm.value(), norm);
}

TEST(ReferenceTrainer, SkipsAndHalvesTheLossScale) {
  auto config = small();
  config.parameter_dtype = config.gradient_dtype = DType::fp16;
  const LossScaleConfig scale{.enabled = true, .initial_power = 40, .hysteresis = 3};
  ReferenceTrainer trainer(config, {}, {.clip_norm = 0, .loss_scale = scale});
  const auto before = trainer.tensors()[0].master_weight;
  for (const double power : {40.0, 40.0, 39.0, 38.0}) {  // after each step
    EXPECT_TRUE(trainer.step({counting(config)}, 1e-3).skipped);
    EXPECT_EQ(trainer.loss_scale(), std::exp2(power));
  }
  EXPECT_EQ(trainer.steps(), 0U);
  EXPECT_TRUE(same_bits(before, trainer.tensors()[0].master_weight));
}

TEST(ReferenceTrainer, StoresOneNanWhenTrainingDiverges) {
  ReferenceTrainer trainer(small(), {});
  for (int step = 0; step < 4; ++step) trainer.step({counting(small())}, 1e38);
  std::size_t found = 0;
  for (const auto& tensor : trainer.tensors()) {
    for (const auto* state : {&tensor.master_weight, &tensor.momentum, &tensor.variance}) {
      for (const float value : *state) {
        if (!std::isnan(value)) continue;
        ++found;
        ASSERT_EQ(std::bit_cast<std::uint32_t>(value), 0x7fc00000U) << tensor.name;
      }
    }
  }
  EXPECT_GT(found, 0U);
}

}  // namespace
}  // namespace terrace::gpt
