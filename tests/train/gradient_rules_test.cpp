// Clipping, loss scaling and skipped steps: the tiered trainer against the one in memory, over
// dtypes and budgets.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/text.h"
#include "tools/tiered_trainer.h"

namespace terrace::gpt {
namespace {

constexpr std::uint64_t kSteps = 8;

struct Case {
  const char* name;
  DType dtype;
  double clip;
  LossScaleConfig loss_scale{};
  std::uint64_t skips = 0;  // that there must be, or 0
  std::uint32_t micro_batches = 1;
  DType accumulation = DType::fp32;
};

// 2^22 is far beyond what these gradients bear in fp16, and so is what a window of 3 makes of it.
constexpr LossScaleConfig kDynamic{.enabled = true, .initial_power = 22, .window = 3};
constexpr LossScaleConfig kConstant{.enabled = true, .constant = 1000};  // no power of two
constexpr Case kCases[] = {
    {"Bf16Clipped", DType::bf16, 1.0},
    {"Fp32ClippedHard", DType::fp32, 0.01},
    {"Fp16", DType::fp16, 0, kDynamic, 4},
    {"Fp16Clipped", DType::fp16, 1.0, kDynamic, 4},
    {"Fp16ConstantScale", DType::fp16, 1.0, kConstant},
    {"Bf16NeverClipped", DType::bf16, 1e9},
    {"Bf16Accumulated", DType::bf16, 0, {}, 0, 3},
    {"Bf16AccumulatedNarrow", DType::bf16, 1.0, {}, 0, 2, DType::bf16},
    {"Fp16Accumulated", DType::fp16, 1.0, kDynamic, 4, 4},
    {"Fp32Accumulated", DType::fp32, 1.0, {}, 0, 2},
};

enum class Tiers { roomy, tight, drive };

class GradientRules : public testing::TestWithParam<std::tuple<Case, Tiers>> {
 protected:
  static Config config(const Case& rules, Tiers tiers) {
    Config config;
    config.segment = 4_KiB;
    config.nvme = {{std::filesystem::current_path().string(), {}, {}}};
    config.store.slots = 1;
    config.optimizer.weight_decay = 0.1;
    config.gradient_clipping = rules.clip;
    config.loss_scale = rules.loss_scale;
    config.micro_batches = rules.micro_batches;
    config.accumulation_dtype = rules.accumulation;
    config.budget.hbm = tiers == Tiers::roomy ? 16_MiB : 640_KiB;
    config.budget.dram = tiers == Tiers::tight ? 768_KiB : 16_MiB;
    if (tiers != Tiers::drive) return config;
    const TierFractions nvme{0, 0, 1};
    config.placement = {nvme, nvme, nvme, nvme, nvme};
    return config;
  }
};

TEST_P(GradientRules, GiveTheBitsOfTrainingInMemory) {
  const auto& [rules, tiers] = GetParam();
  GptConfig gpt;
  gpt.layers = 2;
  gpt.width = 60;  // padding between tensors
  gpt.heads = 2;
  gpt.context = 16;
  gpt.batch = 2;
  gpt.parameter_dtype = gpt.gradient_dtype = rules.dtype;
  const Config engine = config(rules, tiers);
  EnginePorts ports;
  ports.speeds = Speeds{};
  TieredTrainer tiered(gpt, engine, std::move(ports));
  ReferenceTrainer reference(
      gpt, engine.optimizer,
      {rules.clip, rules.loss_scale, rules.micro_batches, rules.accumulation});
  const auto data = repeated_text("what is too long is clipped, what is too large is skipped. ");
  std::uint64_t batches = 0;
  while (tiered.engine().steps() < kSteps && batches < 100) {
    const auto batch = data.step(gpt, ++batches, rules.micro_batches);
    const double scale = reference.loss_scale();
    const auto seen = tiered.step(batch, 3e-3);
    const auto wanted = reference.step(batch, 3e-3);
    EXPECT_EQ(seen.loss, wanted.loss);
    EXPECT_EQ(seen.report.skipped, wanted.skipped);
    EXPECT_EQ(seen.report.gradient_norm, wanted.norm);
    EXPECT_EQ(seen.report.loss_scale, scale);
    EXPECT_EQ(seen.report.next_loss_scale, reference.loss_scale());
    EXPECT_EQ(tiered.engine().steps(), reference.steps());
    EXPECT_EQ(seen.report.bad_tensor.empty(), !seen.report.skipped);
    if (seen.report.clipped_norm && rules.clip > 0) {
      EXPECT_LE(*seen.report.clipped_norm, rules.clip);
    }
  }
  EXPECT_EQ(tiered.engine().steps(), kSteps);
  EXPECT_GE(batches - kSteps, rules.skips);
  EXPECT_EQ(difference(tiered.engine(), reference), "");
}

std::string name_of(const testing::TestParamInfo<std::tuple<Case, Tiers>>& which) {
  constexpr const char* kTierNames[] = {"Roomy", "Tight", "OnTheDrive"};
  return std::string(std::get<0>(which.param).name) +
         kTierNames[static_cast<std::size_t>(std::get<1>(which.param))];
}

INSTANTIATE_TEST_SUITE_P(Cases, GradientRules,
                         testing::Combine(testing::ValuesIn(kCases),
                                          testing::Values(Tiers::roomy, Tiers::tight,
                                                          Tiers::drive)),
                         name_of);

}  // namespace
}  // namespace terrace::gpt
