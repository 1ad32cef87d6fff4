// Tiered training equals plain in-memory training, bit for bit: over budgets, segment sizes, I/O
// engines and thread counts.
#include <gtest/gtest.h>

#include "runtime/planner.h"
#include "terrace/terrace.h"
#include "tests/support/directory.h"
#include "tests/support/mlp.h"

namespace terrace {
namespace {

Config base_config(IoEngineKind engine, const Directory& directory) {
  Config config;
  config.nvme = {{directory.path(), {}, {}}};
  config.io.kind = engine;
  config.io.block = 64_KiB;
  config.optimizer.weight_decay = 0.01;
  config.store.mode = StoreMode::discard;
  return config;
}

EnginePorts quick() {
  EnginePorts ports;
  ports.speeds = Speeds{};
  return ports;
}

bool defers(const Config& config) {
  return update_rule(config).needs_all_gradients;
}

// The smallest budget of a tier, in whole pages, that the planner takes with the others as they
// are.
Bytes smallest(const Config& config, const ModelLayout& layout, PerTier<Bytes> budget, Tier tier) {
  std::uint64_t refused = 0;
  std::uint64_t taken = at(budget, tier).count / kPage.count;
  while (refused + 1 < taken) {
    const auto middle = refused + (taken - refused) / 2;
    at(budget, tier) = middle * kPage;
    try {
      plan_engine({layout, budget, config.placement, Speeds{}, 1, 0,
                   {config.store.slots == 2, config.store.commit_interval, {1}, {}, false},
                   {defers(config) ? UpdateTime::deferred : UpdateTime::overlapped,
                    config.micro_batches}});
      taken = middle;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::out_of_budget) << error.what();
      refused = middle;
    }
  }
  return taken * kPage;
}

// Plenty, the smallest that the planner takes, or a little more than that.
void choose_budgets(Config& config, const Mlp& mlp, Random& random) {
  config.budget.hbm = 64_MiB;
  config.budget.dram = 64_MiB;
  const auto size = pick(random, 0, 2);
  if (size == 2) return;
  const ModelLayout layout(mlp.spec(), config.segment, config.accumulation_dtype);
  PerTier<Bytes> budget{64_MiB, 64_MiB, 1_GiB};
  config.budget.dram = at(budget, Tier::dram) = smallest(config, layout, budget, Tier::dram);
  config.budget.hbm = smallest(config, layout, budget, Tier::hbm);
  if (size == 0) return;
  *config.budget.dram += Bytes{pick(random, 0, 300000)};
  *config.budget.hbm += Bytes{pick(random, 0, 300000)};
}

// A step with a gradient that is not finite leaves everything as it was.
void skip_now_and_then(Engine& engine, const Config& config, const Mlp& mlp, double rate,
                       std::uint64_t s, Random& random) {
  if (pick(random, 0, 2) != 0) return;
  const auto layer = static_cast<std::uint32_t>(pick(random, 0, mlp.layers() - 1));
  const std::size_t weights = std::size_t{mlp.widths[layer]} * mlp.widths[layer + 1];
  const BadValue bad{layer, pick(random, 0, weights - 1),
                    pick(random, 0, 1) == 0 ? INFINITY : NAN, false,
                    static_cast<std::uint32_t>(pick(random, 0, mlp.micro_batches - 1))};
  const auto report = train_step(engine, mlp, rate, s, {}, bad);
  EXPECT_TRUE(report.skipped);
  EXPECT_EQ(report.step, s - 1);
  EXPECT_EQ(report.bad_tensor, "dense" + std::to_string(layer) + ".weight");
  EXPECT_EQ(report.bad_index, bad.weight);
  EXPECT_FALSE(report.gradient_norm.has_value());
  if (config.loss_scale.enabled) { EXPECT_LE(engine.steps(), s - 1); }
}

void train_and_compare(const Config& config, const Mlp& mlp, Plain& plain, Random& random,
                       std::uint64_t steps) {
  Engine engine(config, mlp.spec(), initialize, quick());
  const bool resumes = config.store.mode == StoreMode::resume;
  ASSERT_EQ(engine.resumed_step().has_value(), resumes);
  if (resumes) { ASSERT_EQ(difference(engine, plain, mlp.dtype), ""); }
  const auto first = engine.steps();
  for (std::uint64_t s = first + 1; s <= first + steps; ++s) {
    const double rate = 0.01 / static_cast<double>(s);
    if (defers(config)) {
      skip_now_and_then(engine, config, mlp, rate, s, random);
      const auto report = train_step(engine, mlp, rate, s);
      const auto norm = plain.step(rate, s, s, config.gradient_clipping,
                                   static_cast<float>(report.loss_scale));
      ASSERT_EQ(report.gradient_norm, norm);
      EXPECT_EQ(report.step, s);
    } else {
      train_step(engine, mlp, rate, s);
      plain.step(rate, s);
    }
    if (pick(random, 0, 1) == 0) evaluate(engine, mlp);
  }
  engine.drain();
  const auto stats = engine.stats();
  ASSERT_EQ(difference(engine, plain, mlp.dtype), "");
  for (const Tier tier : kTiers) {
    EXPECT_EQ(at(stats.peak, tier), at(engine.forecast().tiers, tier).peak);
    EXPECT_LE(at(stats.peak, tier), at(engine.forecast().tiers, tier).budget);
  }
  for (const Lane lane : kLanes) {
    EXPECT_EQ(at(stats.lanes, lane).bytes, at(stats.lanes, lane).planned_bytes)
        << to_string(lane);
  }
  if (config.store.slots == 2) engine.commit("kept");
}

class Oracle : public testing::TestWithParam<IoEngineKind> {};

TEST_P(Oracle, TieredTrainingEqualsPlainTraining) {
  const auto seed = fresh_seed();
  const Directory directory("oracle");
  for (std::uint64_t trial = 0; trial < 12; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(seed) + " trial " + std::to_string(trial));
    Random random(seed + trial);
    Mlp mlp;
    const auto depth = pick(random, 2, 6);
    for (std::uint64_t i = 0; i < depth; ++i) {
      mlp.widths.push_back(static_cast<std::uint32_t>(pick(random, 1, 90)));
    }
    const DType dtypes[] = {DType::bf16, DType::fp32, DType::fp16};
    mlp.dtype = dtypes[pick(random, 0, 2)];
    Config config = base_config(GetParam(), directory);
    config.segment = Bytes{4096ULL << pick(random, 0, 3)};
    config.adam_threads = static_cast<int>(pick(random, 1, 2));
    config.store.slots = static_cast<std::uint32_t>(pick(random, 1, 2));
    config.store.commit_interval = pick(random, 1, 3);
    config.store.checksums = pick(random, 0, 3) != 0;
    if (pick(random, 0, 1) == 0) {
      const double norms[] = {1e-3, 0.5, 1e9};
      config.gradient_clipping = norms[pick(random, 0, 2)];
    }
    if (pick(random, 0, 2) == 0) {
      config.loss_scale = {true, pick(random, 0, 1) == 0 ? 128.0 : 0, 6, 2, 1, 0.5};
    }
    if (pick(random, 0, 2) == 0) {
      config.micro_batches = mlp.micro_batches = static_cast<std::uint32_t>(pick(random, 2, 5));
      if (pick(random, 0, 1) == 0) config.accumulation_dtype = mlp.accumulation = mlp.dtype;
    }
    Plain plain(mlp, config.optimizer);
    choose_budgets(config, mlp, random);
    train_and_compare(config, mlp, plain, random, 4);
    if (config.store.slots == 2 && GetParam() != IoEngineKind::memory) {
      config.store.mode = StoreMode::resume;  // from where the last one committed, in other homes
      choose_budgets(config, mlp, random);
      train_and_compare(config, mlp, plain, random, 3);
    }
    if (HasFailure()) break;
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, Oracle,
                         testing::Values(IoEngineKind::automatic, IoEngineKind::threads,
                                         IoEngineKind::memory),
                         [](const auto& engine) { return std::string(to_string(engine.param)); });

}  // namespace
}  // namespace terrace
