// How long a plan takes: its operations on lanes of known speed, in virtual time.
#pragma once

#include <span>

#include "runtime/hazards.h"
#include "runtime/step_plan.h"
#include "terrace/forecast.h"

namespace terrace {

// Seconds that `operation` keeps its lane busy.
double seconds_of(const Operation& operation, const Speeds& speeds);

// Bytes, and seconds at the lane's speed alone, of every lane.
PerLane<LaneForecast> lane_totals(const StepPlan& plan, const Speeds& speeds);

// A pass, and its boundary dependencies on the one before it.
struct CyclePass {
  const StepPlan* plan;
  const BoundaryDependencies* boundary;
};

// Seconds from one step's end to the next one's, when these passes follow one another, the first
// the last: each lane serves its operations one by one in order, each after what it waits for.
double steady_cycle_seconds(std::span<const CyclePass> passes, const Speeds& speeds);
// When `plan` follows itself.
double steady_step_seconds(const StepPlan& plan, const BoundaryDependencies& self,
                           const Speeds& speeds);

}  // namespace terrace
