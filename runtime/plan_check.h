// An independent judge of plans, written apart from the planner.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "runtime/hazards.h"
#include "runtime/step_plan.h"
#include "terrace/forecast.h"
#include "tiers/block_layout.h"

namespace terrace {

struct CheckedPlans {
  const ModelLayout& layout;
  const MemoryMap& map;
  PerTier<Bytes> budget;
  StepForm form;
  const std::array<StepPlan, kPassKindCount>& plans;  // by kind

  const StepPlan& plan(PassKind kind) const { return plans[static_cast<std::size_t>(kind)]; }
};

// Replays steps and evaluations on a residency table and returns what is wrong; empty:
// nothing. Proven are: every address lies inside the map and the map inside the budget; every use
// and update finds the right version of its bytes; where updates are deferred, every gradient is
// kept, those of all micro-batches in one sum, and measured; after each step every home holds the
// new version, and at each commit the durable part holds that of every state; transfers have equal
// ends; dependencies point backward.
std::vector<std::string> check_plans(const CheckedPlans& plans);

// Every two operations of which one writes what the other touches are ordered by dependencies, in
// `next` and from `previous` into it. Quadratic: for plans of up to some thousand operations.
std::vector<std::string> check_order(const StepPlan& previous, const StepPlan& next,
                                     const BoundaryDependencies& boundary);

}  // namespace terrace
