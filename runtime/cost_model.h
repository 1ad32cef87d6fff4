// How long a plan takes: its operations on lanes of known speed, in virtual time.
#pragma once

#include "runtime/hazards.h"
#include "runtime/step_plan.h"
#include "terrace/forecast.h"

namespace terrace {

// Seconds that `operation` keeps its lane busy.
double seconds_of(const Operation& operation, const Speeds& speeds);

// Bytes, and seconds at the lane's speed alone, of every lane.
PerLane<LaneForecast> lane_totals(const StepPlan& plan, const Speeds& speeds);

// Seconds from one step's end to the next one's, when `plan` follows itself (`self` are its
// boundary dependencies): each lane serves its operations one by one in order, each after what it
// waits for.
double steady_step_seconds(const StepPlan& plan, const BoundaryDependencies& self,
                           const Speeds& speeds);

}  // namespace terrace
