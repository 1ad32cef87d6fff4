// Dependencies from what operations read and write: an operation waits for the last writer of what
// it reads, and for the last writer and every reader since of what it writes.
#pragma once

#include <utility>
#include <vector>

#include "runtime/step_plan.h"

namespace terrace {

// Fills plan.dependencies from its operands.
void add_dependencies(StepPlan& plan);

// When `next` follows `previous`: (operation of next, operation of previous that it waits for),
// ordered by the former.
using BoundaryDependencies = std::vector<std::pair<OpIndex, OpIndex>>;
BoundaryDependencies boundary_dependencies(const StepPlan& previous, const StepPlan& next);

}  // namespace terrace
