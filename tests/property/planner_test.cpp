// The planner against its judge and against brute force, over random models and budgets.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <random>

#include "runtime/placement_search.h"
#include "runtime/plan_check.h"
#include "runtime/planner.h"
#include "terrace/error.h"

namespace terrace {
namespace {

using Random = std::mt19937_64;

std::uint64_t pick(Random& random, std::uint64_t low, std::uint64_t high) {
  return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
}

// TERRACE_SEED repeats a run.
std::uint64_t fresh_seed() {
  const char* given = std::getenv("TERRACE_SEED");
  const std::uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

ModelSpec random_model(Random& random, std::uint64_t max_layers, std::uint64_t max_elements) {
  ModelSpec model;
  model.parameter_dtype = pick(random, 0, 1) != 0 ? DType::bf16 : DType::fp32;
  model.gradient_dtype = pick(random, 0, 1) != 0 ? DType::bf16 : DType::fp32;
  const auto layers = pick(random, 1, max_layers);
  for (std::uint64_t l = 0; l < layers; ++l) {
    LayerSpec layer;
    layer.name = "layer" + std::to_string(l);
    const auto tensors = pick(random, 0, 3);
    for (std::uint64_t t = 0; t < tensors; ++t) {
      layer.tensors.push_back(
          {layer.name + ".t" + std::to_string(t), {pick(random, 0, max_elements)}});
    }
    layer.input_bytes = {pick(random, 0, 30000)};
    layer.input_gradient = l > 0;
    layer.forward_workspace = {pick(random, 0, 20000)};
    layer.backward_workspace = {pick(random, 0, 40000)};
    layer.forward_flops = static_cast<double>(pick(random, 0, 1000000));
    layer.backward_flops = 2 * layer.forward_flops;
    model.layers.push_back(layer);
  }
  return model;
}

PerTier<Bytes> generous() { return {1_GiB, 1_GiB, 1_GiB}; }

void expect_sound(const PlannerInput& input, const EnginePlan& plan) {
  const auto wrong = check_plans(
      {input.layout, plan.map, input.budget, plan.form, plan.plans});
  for (const auto& text : wrong) ADD_FAILURE() << text;
  for (const auto before : kPassKinds) {
    for (const auto after : kPassKinds) {
      if (!may_follow(before, after, plan.form)) continue;
      const auto& previous = plan.plan(before);
      const auto& next = plan.plan(after);
      if (previous.operations.size() + next.operations.size() > 1500) continue;
      for (const auto& text : check_order(previous, next, plan.between(before, after))) {
        ADD_FAILURE() << text;
      }
    }
  }
}

// Peaks of the unlimited plan bound the interesting budgets.
PerTier<Bytes> random_budget(Random& random, const PerTier<Bytes>& full) {
  PerTier<Bytes> budget;
  for (const Tier tier : kTiers) {
    const auto scale = pick(random, 0, 3);
    at(budget, tier) =
        scale == 3 ? 1_GiB : Bytes{pick(random, 0, at(full, tier).count * 5 / 4 + 8192)};
  }
  if (pick(random, 0, 4) == 0) at(budget, Tier::nvme) = {};
  return budget;
}

TEST(Planner, EmitsSoundPlansOrRefuses) {
  const auto seed = fresh_seed();
  int accepted = 0;
  for (int trial = 0; trial < 1000; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(seed) + " trial " + std::to_string(trial));
    Random random(seed + static_cast<std::uint64_t>(trial));
    const auto model = random_model(random, 5, 30000);
    const ModelLayout layout(model, Bytes{4096ULL << pick(random, 0, 3)},
                             pick(random, 0, 1) == 0 ? DType::fp32 : model.gradient_dtype);
    PlannerInput input{layout, generous(), {}, {}, {}, {}};
    const auto free_plan = plan_engine(input);
    auto full = free_plan.map.peak;
    at(full, Tier::nvme) = at(full, Tier::dram);
    input.budget = random_budget(random, full);
    if (pick(random, 0, 3) == 0) input.sub_group_elements = pick(random, 1, 60000);
    input.durability.two_slots = pick(random, 0, 1) != 0 && at(input.budget, Tier::nvme).count > 0;
    input.durability.commit_interval = pick(random, 1, 2);
    input.durability.weights.resize(pick(random, 1, 3), 500);
    if (pick(random, 0, 3) == 0) input.prefetch_elements = pick(random, 0, 60000);
    if (pick(random, 0, 1) == 0) {
      input.form = {UpdateTime::deferred, static_cast<std::uint32_t>(pick(random, 1, 4))};
    }
    try {
      expect_sound(input, plan_engine(input));
      ++accepted;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::out_of_budget) << error.what();
      EXPECT_NE(std::string(error.what()).find("bytes"), std::string::npos);
    }
    if (HasFailure()) break;
  }
  EXPECT_GT(accepted, 200);
}

TEST(Planner, ForcedPlacementsAreMetToTheSegment) {
  const auto seed = fresh_seed();
  for (int trial = 0; trial < 200; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(seed) + " trial " + std::to_string(trial));
    Random random(seed + static_cast<std::uint64_t>(trial));
    const auto model = random_model(random, 4, 60000);
    const ModelLayout layout(model, 4_KiB);
    PlannerInput input{layout, generous(), {}, {}, {}, {}};
    const auto fraction = [&] {
      const double dram = static_cast<double>(pick(random, 0, 10)) / 10;
      return TierFractions{0, dram, 1 - dram};
    };
    input.placement.parameter = fraction();
    input.placement.momentum = fraction();
    input.placement.activation = TierFractions{0.3, 0.4, 0.3};
    const auto plan = plan_engine(input);
    expect_sound(input, plan);
    for (std::uint32_t l = 0; l < layout.layers(); ++l) {
      const auto segments = static_cast<double>(layout.block(LayerId{l}).segments);
      EXPECT_NEAR(static_cast<double>(plan.placement[l].state_dram_segments[1]),
                  input.placement.momentum->dram * segments, 0.5 + 1e-9);
    }
    if (HasFailure()) break;
  }
}

// Whether any placement of whole blocks lets the serial step fit, where every tier needs the homes,
// the saved inputs alive, and what one moment of the step holds: computed from sizes alone.
class BruteForce {
 public:
  BruteForce(const ModelLayout& layout, const PerTier<Bytes>& budget)
      : layout_(layout), budget_(budget), parameter_(layout.layers()), state_(layout.layers()),
        input_(layout.layers()) {}

  bool possible() { return choose(0); }

 private:
  bool choose(std::uint32_t l) {
    if (l == layout_.layers()) return fits();
    for (const Tier p : kTiers) {
      for (unsigned mask = 0; mask < 8; ++mask) {
        for (const Tier a : kTiers) {
          parameter_[l] = p;
          state_[l] = mask;
          input_[l] = a;
          if (choose(l + 1)) return true;
        }
      }
    }
    return false;
  }

  std::uint64_t block(std::uint32_t l, Content content) const {
    return layout_.block_size(LayerId{l}, content).count;
  }
  std::uint64_t in(std::uint32_t l) const { return layout_.input_size(LayerId{l}).count; }
  static std::uint64_t pages(Bytes bytes) { return round_up(bytes, kPage).count; }

  bool fits() {
    homes_ = {};
    const auto layers = static_cast<std::uint32_t>(layout_.layers());
    for (std::uint32_t l = 0; l < layers; ++l) {
      home(parameter_[l]) += block(l, Content::parameter);
      for (unsigned s = 0; s < 3; ++s) {
        home((state_[l] >> s & 1U) != 0 ? Tier::dram : Tier::nvme) +=
            block(l, Content::momentum);
      }
    }
    std::uint64_t sums = 0;  // of gradients
    for (std::uint32_t l = 0; l < layers; ++l) {
      sums += 8 * ((layout_.block(LayerId{l}).elements + 1023) / 1024);
    }
    home(Tier::dram) += pages({sums});
    peak_ = homes_;
    saved_ = {};
    for (std::uint32_t l = 0; l < layers; ++l) forward(l, layers);
    for (std::uint32_t l = layers; l-- > 0;) backward(l, layers);
    for (const Tier tier : kTiers) {
      if (peak_[static_cast<std::size_t>(tier)] > at(budget_, tier).count) return false;
    }
    return true;
  }

  std::uint64_t& home(Tier tier) { return homes_[static_cast<std::size_t>(tier)]; }
  std::uint64_t& saved(Tier tier) { return saved_[static_cast<std::size_t>(tier)]; }

  // A moment at which `extra` bytes of buffers are alive on a tier beside homes and saved inputs.
  void moment(Tier tier, std::uint64_t extra) {
    const auto index = static_cast<std::size_t>(tier);
    peak_[index] = std::max(peak_[index], homes_[index] + saved_[index] + extra);
  }

  std::uint64_t segment(std::uint64_t block_bytes, Content content) const {
    return std::min(block_bytes,
                    layout_.segment_elements() * layout_.element_size(content).count);
  }

  void fetch_parameters(std::uint32_t l) {
    if (parameter_[l] == Tier::nvme) {
      moment(Tier::dram, segment(block(l, Content::parameter), Content::parameter));
    }
  }

  // Staged input bytes pass in pieces of a segment's parameters.
  std::uint64_t piece(std::uint64_t bytes) const { return segment(bytes, Content::parameter); }

  void forward(std::uint32_t l, std::uint32_t layers) {
    fetch_parameters(l);
    const std::uint64_t output = l + 1 < layers ? in(l + 1) : 0;
    const std::uint64_t p = parameter_[l] == Tier::hbm ? 0 : block(l, Content::parameter);
    moment(Tier::hbm, in(l) + output + p + pages(layout_.layer(LayerId{l}).forward_workspace));
    if (l + 1 == layers || input_[l] == Tier::hbm) {
      saved(Tier::hbm) += in(l);
      return;
    }
    saved(input_[l]) += in(l);
    moment(input_[l], 0);
    if (input_[l] == Tier::nvme) moment(Tier::dram, piece(in(l)));
  }

  void backward(std::uint32_t l, std::uint32_t layers) {
    const bool kept = l + 1 == layers || input_[l] == Tier::hbm;
    if (!kept) {
      if (input_[l] == Tier::nvme) moment(Tier::dram, piece(in(l)));
      saved(input_[l]) -= in(l);
    } else {
      saved(Tier::hbm) -= in(l);
    }
    fetch_parameters(l);
    const std::uint64_t above = l + 1 < layers && layout_.layer(LayerId{l + 1}).input_gradient
                                    ? in(l + 1) : 0;
    const std::uint64_t below = layout_.layer(LayerId{l}).input_gradient ? in(l) : 0;
    const std::uint64_t p = parameter_[l] == Tier::hbm ? 0 : block(l, Content::parameter);
    moment(Tier::hbm, in(l) + above + below + p + block(l, Content::gradient) +
                          pages(layout_.layer(LayerId{l}).backward_workspace));
    std::uint64_t run = segment(block(l, Content::gradient), Content::gradient);
    for (unsigned s = 0; s < 3; ++s) {
      if ((state_[l] >> s & 1U) == 0) {
        run += segment(block(l, Content::momentum), Content::momentum);
      }
    }
    if (parameter_[l] != Tier::dram)
      run += segment(block(l, Content::parameter), Content::parameter);
    moment(Tier::dram, run);
  }

  const ModelLayout& layout_;
  const PerTier<Bytes> budget_;
  std::vector<Tier> parameter_;
  std::vector<unsigned> state_;  // bit s: state s lives in DRAM
  std::vector<Tier> input_;
  std::array<std::uint64_t, 3> homes_{}, saved_{}, peak_{};
};

TEST(Planner, AcceptsWhateverBruteForceFinds) {
  const auto seed = fresh_seed();
  int possible = 0;
  int refused = 0;
  for (int trial = 0; trial < 250; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(seed) + " trial " + std::to_string(trial));
    Random random(seed + static_cast<std::uint64_t>(trial));
    const auto model = random_model(random, 3, 5000);
    const ModelLayout layout(model, 4_KiB);
    PlannerInput input{layout, generous(), {}, {}, {}, {}};
    auto full = plan_engine(input).map.peak;
    at(full, Tier::nvme) = at(full, Tier::dram);
    input.budget = random_budget(random, full);
    bool accepted = true;
    std::string refusal;
    try {
      expect_sound(input, plan_engine(input));
    } catch (const Error& error) {
      accepted = false;
      refusal = error.what();
    }
    const bool can = BruteForce(layout, input.budget).possible();
    possible += can ? 1 : 0;
    refused += can ? 0 : 1;
    EXPECT_TRUE(accepted || !can) << "brute force fits it: " << refusal;
    if (HasFailure()) break;
  }
  EXPECT_GT(possible, 30);
  EXPECT_GT(refused, 30);
}

// Everything on NVMe: each lane carries what the formulas say, and no byte twice.
TEST(Planner, BytesOfEveryLaneFollowTheFormula) {
  const auto seed = fresh_seed();
  for (int trial = 0; trial < 100; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(seed) + " trial " + std::to_string(trial));
    Random random(seed + static_cast<std::uint64_t>(trial));
    const auto model = random_model(random, 5, 60000);
    const ModelLayout layout(model, Bytes{4096ULL << pick(random, 0, 3)});
    PlannerInput input{layout, generous(), {}, {}, {}, {}};
    const bool deferred = trial % 4 != 0;
    input.form = {deferred ? UpdateTime::deferred : UpdateTime::overlapped,
                  static_cast<std::uint32_t>(std::max(1, trial % 4 * 2 - 1))};
    const std::uint64_t passes = input.form.micro_batches;
    const TierFractions nvme{0, 0, 1};
    input.placement = {nvme, nvme, nvme, nvme, nvme};
    const auto plan = plan_engine(input);
    PerLane<Bytes> expected{};
    for (std::uint32_t l = 0; l < layout.layers(); ++l) {
      const bool last = l + 1 == layout.layers();  // stays on the device from forward to backward
      const Bytes parameter = layout.block_size(LayerId{l}, Content::parameter);
      const Bytes gradient = layout.block_size(LayerId{l}, Content::gradient);
      const Bytes states = 3 * layout.block_size(LayerId{l}, Content::momentum);
      const Bytes input_bytes = last ? Bytes{} : layout.input_size(LayerId{l});
      const Bytes fetched = (parameter * (last ? 1 : 2) + input_bytes) * passes;
      // Deferred updates hand their parameters to forward without the drive.
      at(expected, Lane::nvme_read) += fetched + states - (deferred ? parameter : Bytes{});
      at(expected, Lane::nvme_write) += parameter + states + input_bytes * passes;
      at(expected, Lane::host_to_device) += fetched;
      at(expected, Lane::device_to_host) += (gradient + input_bytes) * passes;
      if (passes == 1) continue;
      const Bytes sum = layout.block_size(LayerId{l}, Content::accumulated_gradient);
      at(expected, Lane::adam) += gradient * passes + sum * (2 * passes - 1);
    }
    const DType kept = passes > 1 ? DType::fp32 : model.gradient_dtype;
    at(expected, Lane::adam) += {
        parameter_count(model) *
        (adam_bytes_per_element(kept, model.parameter_dtype) + size_of(kept).count)};
    for (const Lane lane : kLanes) {
      EXPECT_EQ(at(plan.forecast.lanes, lane).bytes, at(expected, lane)) << to_string(lane);
    }
    if (HasFailure()) break;
  }
}

// The smallest accepted HBM budget is exact: one byte less is refused, and the message says one
// byte.
TEST(Planner, NamesTheMissingByte) {
  Random random(7);
  const auto model = random_model(random, 4, 20000);
  const ModelLayout layout(model, 4_KiB);
  PlannerInput input{layout, generous(), {}, {}, {}, {}};
  std::uint64_t low = 0;
  std::uint64_t high = 1 << 30;
  const auto accepts = [&](std::uint64_t hbm) {
    at(input.budget, Tier::hbm) = {hbm};
    try {
      plan_engine(input);
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  while (low + 1 < high) (accepts((low + high) / 2) ? high : low) = (low + high) / 2;
  at(input.budget, Tier::hbm) = {high - 1};
  try {
    plan_engine(input);
    FAIL() << "one byte less must be refused";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(" is 1 bytes"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("parameter"), std::string::npos);
  }
}

class PlantedMistakes : public testing::TestWithParam<StepForm> {};

TEST_P(PlantedMistakes, AreFound) {
  Random random(11);
  const auto model = random_model(random, 5, 40000);
  const ModelLayout layout(model, 4_KiB);
  PlannerInput input{layout, {1_MiB, 700_KiB, 1_GiB}, {}, {}, {}, {}};
  input.form = GetParam();
  const auto plan = plan_engine(input);
  const auto kind = input.form.micro_batches > 1 ? PassKind::adding : PassKind::training;
  const auto& right = plan.plan(kind);
  ASSERT_FALSE(right.dependencies.empty());
  const auto problems = [&](const StepPlan& broken) {
    auto plans = plan.plans;
    plans[static_cast<std::size_t>(kind)] = broken;
    if (kind == PassKind::training) plans[static_cast<std::size_t>(PassKind::committing)] = broken;
    return check_plans({layout, plan.map, input.budget, input.form, plans}).size() +
           check_order(broken, broken, boundary_dependencies(broken, broken)).size();
  };
  ASSERT_EQ(problems(right), 0U);
  int caught = 0;
  for (OpIndex op = 0; op < right.operations.size(); ++op) {
    auto broken = right;  // an operand that lies one page further
    broken.operands[broken.operations[op].first_operand].extent.offset += kPage;
    caught += problems(broken) > 0 ? 1 : 0;
  }
  EXPECT_EQ(caught, static_cast<int>(right.operations.size()));
  auto unordered = right;
  std::fill(unordered.dependency_begin.begin(), unordered.dependency_begin.end(), 0U);
  EXPECT_GT(problems(unordered), 0U);
}

INSTANTIATE_TEST_SUITE_P(Plans, PlantedMistakes,
                         testing::Values(StepForm{UpdateTime::overlapped, 1},
                                         StepForm{UpdateTime::deferred, 1},
                                         StepForm{UpdateTime::deferred, 3}),
                         [](const auto& form) {
                           return form.param.micro_batches > 1 ? "accumulated"
                                  : form.param.update_time == UpdateTime::deferred ? "deferred"
                                                                                   : "overlapped";
                         });

// A micro-batch that is left out, or taken twice, is found.
TEST(PlanCheck, CountsMicroBatches) {
  Random random(12);
  const auto model = random_model(random, 5, 40000);
  const ModelLayout layout(model, 4_KiB);
  PlannerInput input{layout, {1_MiB, 2_MiB, 1_GiB}, {}, {}, {}, {}};
  input.form = {UpdateTime::deferred, 4};
  const auto plan = plan_engine(input);
  const CheckedPlans right{layout, plan.map, input.budget, input.form, plan.plans};
  EXPECT_TRUE(check_plans(right).empty());
  auto plans = plan.plans;
  const auto at_kind = [&](PassKind kind) -> StepPlan& {
    return plans[static_cast<std::size_t>(kind)];
  };
  const auto found = [&] {
    return !check_plans({layout, plan.map, input.budget, input.form, plans}).empty();
  };
  at_kind(PassKind::adding) = plan.plan(PassKind::evaluation);
  EXPECT_TRUE(found());
  at_kind(PassKind::adding) = plan.plan(PassKind::fresh);
  EXPECT_TRUE(found());
  at_kind(PassKind::adding) = plan.plan(PassKind::adding);
  at_kind(PassKind::closing) = plan.plan(PassKind::adding);
  EXPECT_TRUE(found());
}

TEST(Planner, PlansATrillionParametersQuickly) {
  ModelSpec model;
  const std::uint64_t width = 25600;
  for (int l = 0; l < 128; ++l) {
    LayerSpec layer;
    layer.name = "block" + std::to_string(l);
    layer.tensors.push_back({layer.name + ".weights", {12, width, width}});
    layer.input_bytes = Bytes{2048 * width * 2};
    layer.forward_flops = 2e9 * 2048;
    layer.backward_flops = 3 * layer.forward_flops;
    model.layers.push_back(layer);
  }
  const ModelLayout layout(model, 1_MiB);
  const PlannerInput input{layout, {80_GiB, 512_GiB, 32_TiB}, {}, {}, {}, {}};
  const auto plan = plan_engine(input);
  EXPECT_LT(plan.plan(PassKind::training).operations.size(), 100000U);
  EXPECT_GT(plan.forecast.step_seconds, 0);
}

}  // namespace
}  // namespace terrace
