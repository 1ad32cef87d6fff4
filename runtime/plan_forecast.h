// What a plan says beforehand: bytes, and seconds in virtual time.
#pragma once

#include "runtime/planner.h"

namespace terrace {

// All of it but what durability takes on NVMe beside the plan's own bytes.
Forecast forecast_of(const EnginePlan& plan, const PlannerInput& input);

}  // namespace terrace
