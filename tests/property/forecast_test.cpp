// The forecast against brute force: tiny plans, every order in which each lane could serve its
// operations, simulated by events, step after step.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <optional>
#include <set>
#include <vector>

#include "runtime/cost_model.h"
#include "runtime/planner.h"
#include "tests/support/mlp.h"

namespace terrace {
namespace {

using Order = std::array<std::vector<OpIndex>, kLaneCount>;  // of each lane's operations

constexpr int kSteps = 4;
constexpr std::size_t kMostOrders = 20000;

struct Tiny {
  StepPlan plan;
  BoundaryDependencies boundary;
  Speeds speeds;
};

Order order_of(const StepPlan& plan) {
  Order order;
  for (OpIndex op = 0; op < plan.operations.size(); ++op) {
    order[static_cast<std::size_t>(lane_of(plan.operations[op].kind))].push_back(op);
  }
  return order;
}

// Every lane takes its next operation as soon as it is free and what that waits for has ended.
class Simulation {
 public:
  Simulation(const Tiny& tiny, const Order& order) : tiny_(tiny), order_(order) {}

  // Of a step in steady state; nothing when the lanes wait for each other for ever.
  std::optional<double> step_seconds() {
    double before = 0;
    for (int step = 0; step < kSteps; ++step) {
      before = begin_;
      if (!run_step()) return std::nullopt;
    }
    return begin_ - before;
  }

 private:
  bool run_step() {
    const auto count = tiny_.plan.operations.size();
    std::vector<double> ends(count, -1);
    std::array<std::size_t, kLaneCount> next{};
    double finish = begin_;
    for (std::size_t done = 0; done < count;) {
      const auto before = done;
      for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
        while (next[lane] < order_[lane].size() && ready(order_[lane][next[lane]], ends)) {
          const OpIndex op = order_[lane][next[lane]++];
          ends[op] = std::max(free_[lane], start_of(op, ends)) +
                     seconds_of(tiny_.plan.operations[op], tiny_.speeds);
          free_[lane] = ends[op];
          const bool result = lane == static_cast<std::size_t>(Lane::compute) ||
                              lane == static_cast<std::size_t>(Lane::adam);
          if (result) finish = std::max(finish, ends[op]);
          ++done;
        }
      }
      if (done == before) return false;
    }
    previous_ = ends;
    begin_ = finish;
    return true;
  }

  bool ready(OpIndex op, const std::vector<double>& ends) const {
    const auto needed = tiny_.plan.dependencies_of(op);
    return std::all_of(needed.begin(), needed.end(), [&](OpIndex d) { return ends[d] >= 0; });
  }

  double start_of(OpIndex op, const std::vector<double>& ends) const {
    double start = begin_;
    for (const auto dependency : tiny_.plan.dependencies_of(op)) {
      start = std::max(start, ends[dependency]);
    }
    for (const auto& [own, other] : tiny_.boundary) {
      if (own == op && !previous_.empty()) start = std::max(start, previous_[other]);
    }
    return start;
  }

  const Tiny& tiny_;
  const Order& order_;
  std::array<double, kLaneCount> free_{};
  std::vector<double> previous_;
  double begin_ = 0;
};

// Whether `later` waits for `earlier`, over others too.
std::vector<std::set<OpIndex>> all_waits(const StepPlan& plan) {
  std::vector<std::set<OpIndex>> waits(plan.operations.size());
  for (OpIndex op = 0; op < waits.size(); ++op) {
    for (const auto d : plan.dependencies_of(op)) {
      waits[op].insert(d);
      waits[op].insert(waits[d].begin(), waits[d].end());
    }
  }
  return waits;
}

// The shortest step over all orders; nothing when there are too many of them.
class BruteForce {
 public:
  explicit BruteForce(const Tiny& tiny) : tiny_(tiny), waits_(all_waits(tiny.plan)) {}

  std::optional<double> shortest() {
    choose(0, order_of(tiny_.plan), {});
    if (tried_ > kMostOrders) return std::nullopt;
    return best_;
  }
  std::size_t tried() const { return tried_; }

 private:
  // Puts the operations of `rest` behind those that `chosen` has of each lane.
  void choose(std::size_t lane, Order rest, const Order& chosen) {
    if (tried_ > kMostOrders) return;
    if (lane == kLaneCount) return evaluate(chosen);
    if (rest[lane].empty()) return choose(lane + 1, rest, chosen);
    for (std::size_t i = 0; i < rest[lane].size(); ++i) {
      const OpIndex op = rest[lane][i];
      if (i > 0 && lane == static_cast<std::size_t>(Lane::compute)) break;  // the trainer's order
      const bool first = std::none_of(rest[lane].begin(), rest[lane].end(), [&](OpIndex other) {
        return waits_[op].contains(other);
      });
      if (!first) continue;
      Order less = rest;
      Order more = chosen;
      less[lane].erase(less[lane].begin() + static_cast<std::ptrdiff_t>(i));
      more[lane].push_back(op);
      choose(lane, std::move(less), more);
    }
  }

  void evaluate(const Order& order) {
    ++tried_;
    const auto seconds = Simulation(tiny_, order).step_seconds();
    if (seconds) best_ = std::min(best_.value_or(*seconds), *seconds);
  }

  const Tiny& tiny_;
  const std::vector<std::set<OpIndex>> waits_;
  std::optional<double> best_;
  std::size_t tried_ = 0;
};

ModelSpec random_model(Random& random) {
  ModelSpec model;
  const auto layers = pick(random, 1, 3);
  for (std::uint64_t l = 0; l < layers; ++l) {
    LayerSpec layer;
    layer.name = "layer" + std::to_string(l);
    layer.tensors = {{layer.name + ".weight", {pick(random, 1000, 9000)}}};
    layer.input_bytes = {4 * pick(random, 100, 3000)};
    layer.input_gradient = l > 0;
    layer.forward_flops = static_cast<double>(pick(random, 1, 9)) * 1e7;
    layer.backward_flops = 2 * layer.forward_flops;
    model.layers.push_back(layer);
  }
  return model;
}

// Any lane may be the slowest.
Speeds random_speeds(Random& random) {
  const auto speed = [&] { return 0.05 * static_cast<double>(pick(random, 1, 40)); };
  return {speed(), speed(), speed(), speed(), speed(), speed() / 10, 5, 0.05};
}

TEST(Forecast, IsThatOfTheBestOrder) {
  const auto seed = fresh_seed();
  int compared = 0;
  int chosen = 0;  // among several orders
  double worst = 1;
  for (std::uint64_t trial = 0; trial < 250; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(seed) + " trial " + std::to_string(trial));
    Random random(seed + trial);
    const ModelLayout layout(random_model(random), 64_KiB);
    PlannerInput input{layout, {1_GiB, 1_GiB, 1_GiB}, {}, random_speeds(random), {}, {}};
    const auto home = [&]() -> PlacementChoice {
      return pick(random, 0, 2) == 0 ? TierFractions{0, 0, 1} : TierFractions{0, 1, 0};
    };
    input.placement = {home(), home(), home(), home(), home()};
    if (pick(random, 0, 1) == 0) input.form.update_time = UpdateTime::deferred;
    const auto plan = plan_engine(input);
    const Tiny tiny{plan.plan(PassKind::training),
                    plan.between(PassKind::training, PassKind::training), input.speeds};
    const auto own = Simulation(tiny, order_of(tiny.plan)).step_seconds();
    ASSERT_TRUE(own.has_value());
    ASSERT_NEAR(*own, plan.forecast.step_seconds, 1e-9);
    BruteForce all(tiny);
    const auto best = all.shortest();
    if (!best) continue;
    ++compared;
    chosen += all.tried() > 1 ? 1 : 0;
    worst = std::max(worst, *own / *best);
  }
  std::printf("%d plans, %d with several orders; at worst %.3f times the best order\n", compared,
              chosen, worst);
  EXPECT_GT(compared, 100);
  EXPECT_GT(chosen, 50);
  EXPECT_LE(worst, 1.05);
}

}  // namespace
}  // namespace terrace
