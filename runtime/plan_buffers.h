// The planner's buffers: pools of all tiers, and what is alive in HBM by content.
#pragma once

#include <algorithm>
#include <vector>

#include "runtime/extent_pool.h"
#include "runtime/plan_builder.h"

namespace terrace {

// Thrown inside build_plan() when a buffer finds no place.
struct NoPlace {};

// Thread rule: one thread.
class PlanBuffers {
 public:
  PlanBuffers(const MemoryMap& map, const PerTier<Bytes>& capacity) {
    for (const Tier tier : kTiers) {
      const Bytes first = at(map.resident, tier);
      const Bytes end = std::max(first, at(capacity, tier) / kPage.count * kPage.count);
      pools_.emplace_back(Extent{first, end - first});
    }
  }

  Extent allocate(Tier tier, Content content, Bytes size, PoolEnd end) {
    auto& pool = pools_[static_cast<std::size_t>(tier)];
    const bool new_peak = pool.used() + size > pool.peak_used();
    const auto extent = pool.allocate(size, end);
    if (!extent) throw NoPlace{};
    if (tier == Tier::hbm) {
      at(hbm_live_, content) += size;
      if (new_peak) {
        peak_content_ = hbm_live_;
        peak_use_ = current_use;
      }
    }
    return *extent;
  }

  void release(Tier tier, Content content, Extent extent) {
    pools_[static_cast<std::size_t>(tier)].release(extent);
    if (tier == Tier::hbm) at(hbm_live_, content) -= extent.size;
  }

  void report(const MemoryMap& map, BuildResult& result) const {
    for (const Tier tier : kTiers) {
      const auto& pool = pools_[static_cast<std::size_t>(tier)];
      at(result.live_peak, tier) = at(map.resident, tier) + pool.peak_used();
      at(result.high_water, tier) = pool.high_water();
    }
    result.peak_use = peak_use_;
    result.peak_content = peak_content_;
  }

  LayerUse current_use;

 private:
  std::vector<ExtentPool> pools_;
  ContentBytes hbm_live_{};
  ContentBytes peak_content_{};
  LayerUse peak_use_;
};

}  // namespace terrace
