#include "runtime/hazards.h"

#include <algorithm>
#include <array>

#include "tiers/interval_map.h"

namespace terrace {
namespace {

constexpr OpIndex kNobody = ~OpIndex{0};

// Who touched each address last. Operations are numbered over all plans that pass through.
class HazardTable {
 public:
  // Appends to `found` what an operation with these operands waits for, sorted and unique.
  void waits_for(std::span<const Operand> operands, std::vector<OpIndex>& found) {
    found.clear();
    for (const auto& operand : operands) {
      table(operand).visit(operand.extent, [&](Extent, Users& users) {
        if (users.writer != kNobody) found.push_back(users.writer);
        if (writes(operand.access)) {
          found.insert(found.end(), users.readers.begin(), users.readers.end());
        }
      });
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
  }

  void record(std::span<const Operand> operands, OpIndex op) {
    for (const auto& operand : operands) {
      if (writes(operand.access)) {
        table(operand).assign(operand.extent, {op, {}});
      } else {
        record_reader(operand, op);
      }
    }
  }

 private:
  struct Users {
    OpIndex writer = kNobody;
    std::vector<OpIndex> readers;  // since writer
  };

  IntervalMap<Users>& table(const Operand& operand) {
    return tiers_[static_cast<std::size_t>(operand.tier)];
  }

  // Addresses that nobody has touched yet get a reader as well: a later writer must wait for it.
  void record_reader(const Operand& operand, OpIndex op) {
    std::vector<Extent> untouched;
    Bytes position = operand.extent.offset;
    table(operand).visit(operand.extent, [&](Extent part, Users& users) {
      if (position < part.offset) untouched.push_back({position, part.offset - position});
      users.readers.push_back(op);
      position = part.end();
    });
    if (position < operand.extent.end()) {
      untouched.push_back({position, operand.extent.end() - position});
    }
    for (const auto gap : untouched) table(operand).assign(gap, {kNobody, {op}});
  }

  std::array<IntervalMap<Users>, kTierCount> tiers_;
};

}  // namespace

void add_dependencies(StepPlan& plan) {
  HazardTable table;
  std::vector<OpIndex> found;
  plan.dependencies.clear();
  plan.dependency_begin.assign(1, 0);
  for (OpIndex op = 0; op < plan.operations.size(); ++op) {
    table.waits_for(plan.operands_of(op), found);
    table.record(plan.operands_of(op), op);
    plan.dependencies.insert(plan.dependencies.end(), found.begin(), found.end());
    plan.dependency_begin.push_back(static_cast<std::uint32_t>(plan.dependencies.size()));
  }
}

BoundaryDependencies boundary_dependencies(const StepPlan& previous, const StepPlan& next) {
  HazardTable table;
  const auto base = static_cast<OpIndex>(previous.operations.size());
  for (OpIndex op = 0; op < base; ++op) table.record(previous.operands_of(op), op);
  BoundaryDependencies result;
  std::vector<OpIndex> found;
  for (OpIndex op = 0; op < next.operations.size(); ++op) {
    table.waits_for(next.operands_of(op), found);
    for (const auto dependency : found) {
      if (dependency < base) result.emplace_back(op, dependency);
    }
    table.record(next.operands_of(op), base + op);
  }
  return result;
}

}  // namespace terrace
