// Dependencies seen from the other side: who waits for an operation.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "runtime/hazards.h"
#include "runtime/step_plan.h"

namespace terrace {

// Lists of operations, one for each of a number of others. Immutable once built.
class Links {
 public:
  Links() = default;
  // pairs: (owner, linked); owners below `owners`.
  Links(std::size_t owners, std::span<const std::pair<OpIndex, OpIndex>> pairs);

  std::span<const OpIndex> of(OpIndex owner) const {
    return std::span(linked_).subspan(begin_[owner], begin_[owner + 1] - begin_[owner]);
  }

 private:
  std::vector<std::uint32_t> begin_;
  std::vector<OpIndex> linked_;
};

Links dependents_of(const StepPlan& plan);
// Across a boundary: for an operation of next, what of previous it waits for; and the reverse.
Links boundary_waits(const StepPlan& next, const BoundaryDependencies& boundary);
Links boundary_dependents(const StepPlan& previous, const BoundaryDependencies& boundary);

}  // namespace terrace
