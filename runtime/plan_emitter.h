// What the parts of the plan builder share: the plan so far, the buffers, and how an operation is
// written down.
#pragma once

#include <algorithm>
#include <deque>
#include <vector>

#include "runtime/plan_buffers.h"
#include "runtime/step_plan.h"

namespace terrace {

struct Place {
  Tier tier = Tier::dram;
  Extent extent;
};

inline Extent part(Extent whole, Bytes offset, Bytes size) {
  return {whole.offset + offset, size};
}

// Thread rule: one thread.
class PlanEmitter {
 public:
  PlanEmitter(const LayerSchedule& schedule, const MemoryMap& map, const PerTier<Bytes>& capacity)
      : buffers(map, capacity) {
    plan.schedule = schedule;
  }

  Extent allocate(Tier tier, Content content, Bytes size, PoolEnd end = PoolEnd::low) {
    return buffers.allocate(tier, content, size, end);
  }

  OpIndex emit(OpKind kind, LayerId layer, const std::vector<Operand>& operands, Bytes bytes) {
    Operation operation;
    operation.kind = kind;
    operation.layer = layer;
    operation.first_operand = static_cast<std::uint32_t>(plan.operands.size());
    for (const auto& operand : operands) {
      if (operand.extent.size.count > 0) plan.operands.push_back(operand);
    }
    operation.operand_count =
        static_cast<std::uint32_t>(plan.operands.size()) - operation.first_operand;
    operation.bytes = bytes;
    plan.operations.push_back(operation);
    return static_cast<OpIndex>(plan.operations.size() - 1);
  }

  void transfer(OpKind kind, Content content, LayerId layer, Bytes data_offset, Place source,
                Place destination) {
    if (source.extent.size.count == 0) return;
    emit(kind, layer,
         {{content, source.tier, Access::read, layer, data_offset, source.extent},
          {content, destination.tier, Access::write, layer, data_offset, destination.extent}},
         source.extent.size);
    // What an update reads or makes is hashed there, in cache.
    const bool saved = class_of(content) == TensorClass::activation;
    plan.operations.back().hashed =
        (kind == OpKind::write && saved) ||
        (kind == OpKind::read && (saved || content == Content::parameter));
  }

  // A DRAM buffer that has done its work may be reused, but later ones come first.
  void retire(std::deque<Extent>& window, std::size_t limit, Extent extent) {
    window.push_back(extent);
    while (window.size() > limit) {
      buffers.release(Tier::dram, Content::workspace, window.front());
      window.pop_front();
    }
  }

  StepPlan plan;
  PlanBuffers buffers;
};

}  // namespace terrace
