// A step with one bad value leaves every byte as it was: for each tensor in turn, in every way in
// which updates are made, with the state on every tier.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "terrace/terrace.h"
#include "tests/support/directory.h"
#include "tests/support/mlp.h"

namespace terrace {
namespace {

struct Way {
  const char* name;
  double clip = 0;
  LossScaleConfig scale{};
  std::uint32_t slots = 2;
  std::uint64_t commit_interval = 1;
  bool deferred = false;  // expected
  std::uint32_t micro_batches = 1;
  DType accumulation = DType::fp32;
};

const Way kWays[] = {
    {"undone", 0, {}, 2, 1, false},
    {"deferred_without_commits", 0, {}, 1, 1, true},
    {"deferred_between_commits", 0, {}, 2, 3, true},
    {"clipped", 0.01, {}, 2, 1, true},
    {"scaled", 0, {true, 0, 8, 1000, 1, 1}, 2, 2, true},
    {"accumulated", 0.01, {}, 2, 1, true, 3},
    {"accumulated_narrow", 0, {true, 0, 8, 1000, 1, 1}, 2, 2, true, 2, DType::bf16},
};

struct Homes {
  const char* name;
  TierFractions parameter, states;
};

const Homes kHomes[] = {
    {"hbm_and_dram", {1, 0, 0}, {0, 1, 0}},
    {"dram", {0, 1, 0}, {0, 1, 0}},
    {"nvme", {0, 0, 1}, {0, 0, 1}},
    {"all_tiers", {0.4, 0.3, 0.3}, {0, 0.5, 0.5}},
};

void PrintTo(const Way& way, std::ostream* out) { *out << way.name; }
void PrintTo(const Homes& homes, std::ostream* out) { *out << homes.name; }

class Atomic : public testing::TestWithParam<std::tuple<Way, Homes>> {
 protected:
  Mlp mlp_{{70, 33, 65, 9}, 4, DType::bf16};
};

Config config_of(const Way& way, const Homes& homes, const Directory& directory) {
  Config config;
  config.nvme = {{directory.path(), {}, {}}};
  config.store.mode = StoreMode::discard;
  config.segment = 4_KiB;
  config.budget.hbm = config.budget.dram = 64_MiB;
  config.gradient_clipping = way.clip;
  config.loss_scale = way.scale;
  config.store.slots = way.slots;
  config.store.commit_interval = way.commit_interval;
  config.micro_batches = way.micro_batches;
  config.accumulation_dtype = way.accumulation;
  config.placement = {homes.parameter, homes.states, homes.states, homes.states, {}};
  return config;
}

TEST_P(Atomic, OneBadValueAnywhereChangesNothing) {
  const auto& [way, homes] = GetParam();
  mlp_.micro_batches = way.micro_batches;
  mlp_.accumulation = way.accumulation;
  const Directory directory("atomic");
  const Config config = config_of(way, homes, directory);
  EnginePorts ports;
  ports.speeds = Speeds{};
  Engine engine(config, mlp_.spec(), initialize, std::move(ports));
  EXPECT_EQ(engine.forecast().updates_deferred, way.deferred);
  EXPECT_TRUE(engine.forecast().atomic_steps);
  Plain plain(mlp_, config.optimizer);
  const float values[] = {INFINITY, -INFINITY, NAN};
  const auto spec = mlp_.spec();
  std::uint64_t step = 0;
  for (std::uint32_t turn = 0; turn < 2 * mlp_.layers(); ++turn) {
    BadValue bad{turn / 2, 0, values[turn % 3], turn % 2 == 1};
    const auto& tensor = spec.layers[bad.layer].tensors[turn % 2];
    bad.weight = turn < 3 ? 0 : tensor.elements() - 1;
    bad.micro_batch = turn % way.micro_batches;
    SCOPED_TRACE(tensor.name);
    const auto report = train_step(engine, mlp_, 0.01, step + 1, {}, bad);
    EXPECT_TRUE(report.skipped);
    EXPECT_EQ(report.bad_tensor, tensor.name);
    EXPECT_EQ(report.bad_index, bad.weight);
    EXPECT_EQ(engine.steps(), step);
    ASSERT_EQ(difference(engine, plain, mlp_.dtype), "");
    ++step;
    const auto good = train_step(engine, mlp_, 0.01, step);
    const auto norm = plain.step(0.01, step, step, way.clip, static_cast<float>(good.loss_scale));
    EXPECT_EQ(good.gradient_norm, norm);
    if (turn % 2 == 0) { ASSERT_EQ(difference(engine, plain, mlp_.dtype), ""); }
  }
  ASSERT_EQ(difference(engine, plain, mlp_.dtype), "");
}

INSTANTIATE_TEST_SUITE_P(Ways, Atomic,
                         testing::Combine(testing::ValuesIn(kWays), testing::ValuesIn(kHomes)),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param).name) + "_" +
                                  std::get<1>(param.param).name;
                         });

// Resume after skipped steps goes on with the same loss scale.
TEST(LossScale, SurvivesAResume) {
  const Directory directory("scale");
  Mlp mlp{{20, 30, 10}, 4, DType::fp16};
  Way way{"scaled", 0, {true, 0, 8, 3, 2, 1}, 2, 1, true};
  Config config = config_of(way, kHomes[3], directory);
  Plain plain(mlp, config.optimizer);
  std::uint64_t step = 0;
  std::vector<double> scales;
  for (int run = 0; run < 4; ++run) {
    EnginePorts ports;
    ports.speeds = Speeds{};
    Engine engine(config, mlp.spec(), initialize, std::move(ports));
    EXPECT_EQ(engine.trainer_state(), run == 0 ? "" : "kept " + std::to_string(step));
    ASSERT_EQ(difference(engine, plain, mlp.dtype), "");
    for (int i = 0; i < 2; ++i) {
      const BadValue bad{0, 3, std::numeric_limits<float>::infinity()};
      if (run % 2 == 0) { EXPECT_TRUE(train_step(engine, mlp, 0.01, step + 1, {}, bad).skipped); }
      ++step;
      const auto good = train_step(engine, mlp, 0.01, step, [&](const StepReport& report) {
        return "kept " + std::to_string(report.step);
      });
      plain.step(0.01, step, step, 0, static_cast<float>(good.loss_scale));
      scales.push_back(good.loss_scale);
    }
    config.store.mode = StoreMode::resume;
  }
  // The second overflow halves, three good steps in a row double.
  EXPECT_EQ(scales, (std::vector<double>{256, 128, 128, 128, 256, 128, 128, 128}));
}

}  // namespace
}  // namespace terrace
