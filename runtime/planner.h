// From model, budgets and speeds to everything an engine executes. Pure: no port, no clock, no
// thread; the same input gives the same plan.
#pragma once

#include <cstdint>
#include <optional>

#include "runtime/hazards.h"
#include "runtime/plan_builder.h"
#include "terrace/config.h"
#include "terrace/forecast.h"
#include "tiers/block_layout.h"

namespace terrace {

struct PlannerInput {
  const ModelLayout& layout;
  PerTier<Bytes> budget{};
  PlacementConfig placement;
  Speeds speeds;
  std::optional<std::uint64_t> sub_group_elements;  // upper bound of one update
  std::optional<std::uint64_t> prefetch_elements;   // upper bound of parameters fetched ahead
};

// Immutable. Both plans use the same homes and fit the same map.
struct EnginePlan {
  Placement placement;
  PlanShape shape;
  MemoryMap map;
  StepPlan training;
  StepPlan evaluation;
  // [previous is evaluation][next is evaluation]
  BoundaryDependencies boundary[2][2];
  Forecast forecast;

  const StepPlan& plan(bool evaluate) const { return evaluate ? evaluation : training; }
};

// The plan with the shortest forecast step among those tried. Throws Error(out_of_budget) that
// names the missing bytes per tier and class when nothing fits, Error(invalid_argument) for a
// placement that has no meaning.
EnginePlan plan_engine(const PlannerInput& input);

}  // namespace terrace
