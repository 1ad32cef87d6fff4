#include "runtime/links.h"

namespace terrace {

Links::Links(std::size_t owners, std::span<const std::pair<OpIndex, OpIndex>> pairs)
    : begin_(owners + 1), linked_(pairs.size()) {
  for (const auto& [owner, linked] : pairs) ++begin_[owner + 1];
  for (std::size_t i = 0; i < owners; ++i) begin_[i + 1] += begin_[i];
  auto next = begin_;
  for (const auto& [owner, linked] : pairs) linked_[next[owner]++] = linked;
}

Links dependents_of(const StepPlan& plan) {
  std::vector<std::pair<OpIndex, OpIndex>> pairs;
  pairs.reserve(plan.dependencies.size());
  for (OpIndex op = 0; op < plan.operations.size(); ++op) {
    for (const auto dependency : plan.dependencies_of(op)) pairs.emplace_back(dependency, op);
  }
  return {plan.operations.size(), pairs};
}

Links boundary_waits(const StepPlan& next, const BoundaryDependencies& boundary) {
  return {next.operations.size(), boundary};
}

Links boundary_dependents(const StepPlan& previous, const BoundaryDependencies& boundary) {
  std::vector<std::pair<OpIndex, OpIndex>> pairs;
  pairs.reserve(boundary.size());
  for (const auto& [op, dependency] : boundary) pairs.emplace_back(dependency, op);
  return {previous.operations.size(), pairs};
}

}  // namespace terrace
