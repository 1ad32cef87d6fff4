// From model, budgets and speeds to everything an engine executes. Pure: no port, no clock, no
// thread; the same input gives the same plan.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "runtime/hazards.h"
#include "runtime/plan_builder.h"
#include "terrace/config.h"
#include "terrace/forecast.h"
#include "tiers/block_layout.h"

namespace terrace {

// What survives the process. With two slots NVMe holds all optimizer states twice.
struct DurabilityInput {
  bool two_slots = false;
  std::uint64_t commit_interval = 1;      // steps
  std::vector<std::uint32_t> weights{1};  // of the drives; see stripe_weights()
  Bytes commit_bytes{};                   // the planner's own note
  bool keeps_bytes = false;               // of the engine or the trainer, at each commit
};

struct PlannerInput {
  const ModelLayout& layout;
  PerTier<Bytes> budget{};
  PlacementConfig placement;
  Speeds speeds;
  std::optional<std::uint64_t> sub_group_elements;  // upper bound of one update
  std::optional<std::uint64_t> prefetch_elements;   // upper bound of parameters fetched ahead
  DurabilityInput durability{};
  StepForm form{};
};

// What decides when updates are made.
struct UpdateRule {
  std::uint32_t micro_batches = 1;   // of a step; several need all gradients
  bool needs_all_gradients = false;  // for their norm or a loss scale
  bool atomic = true;                // a step that goes wrong must leave the state as it was
};
UpdateRule update_rule(const Config& config);

// Immutable. All plans use the same homes and fit the same map.
struct EnginePlan {
  Placement placement;
  PlanShape shape;
  MemoryMap map;
  StepForm form;
  // By kind; those that do not exist are empty. Without two slots nothing commits, and committing
  // is as training.
  std::array<StepPlan, kPassKindCount> plans;
  BoundaryDependencies boundary[kPassKindCount][kPassKindCount];  // [previous][next]
  Forecast forecast;

  const StepPlan& plan(PassKind kind) const { return plans[static_cast<std::size_t>(kind)]; }
  const BoundaryDependencies& between(PassKind previous, PassKind next) const {
    return boundary[static_cast<std::size_t>(previous)][static_cast<std::size_t>(next)];
  }
};

// The plan with the shortest forecast step among those tried. Throws Error(out_of_budget) that
// names the missing bytes per tier and class when nothing fits, Error(invalid_argument) for a
// placement that has no meaning.
EnginePlan plan_engine(const PlannerInput& input);

// Whether updates that were made too early can be undone: the last commit holds the step before.
bool reversible(const DurabilityInput& durability);

// The same, with the form by the rule: overlapped where that is atomic or need not be, deferred
// otherwise, and overlapped all the same when the gradients find no room.
EnginePlan plan_engine(PlannerInput input, const UpdateRule& rule);

}  // namespace terrace
