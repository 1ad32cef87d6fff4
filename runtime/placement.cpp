#include "runtime/placement.h"

#include <algorithm>

#include "terrace/adam.h"

namespace terrace {
namespace {

class HomeBuilder {
 public:
  explicit HomeBuilder(const ModelLayout& layout) : layout_(layout) {
    for (auto& pieces : map_.homes.pieces) pieces.resize(layout.layers());
  }

  void reserve_durable() {
    auto& resident = at(map_.resident, Tier::nvme);
    for (auto& base : map_.durable_base) base.resize(layout_.layers());
    for (std::uint32_t l = 0; l < layout_.layers(); ++l) {
      for (std::size_t s = 0; s < kOptimizerStateCount; ++s) {
        map_.durable_base[s][l] = resident;
        resident += layout_.block_size(LayerId{l}, kOptimizerStates[s]);
      }
    }
    map_.durable = resident;
    at(at(map_.resident_class, Tier::nvme), TensorClass::optimizer_state) = resident;
  }

  void place(Content content, LayerId layer, Tier tier, ElementRange elements) {
    if (elements.count == 0) return;
    const Bytes size = elements.count * layout_.element_size(content);
    const Bytes offset = elements.first * layout_.element_size(content);
    const bool state = class_of(content) == TensorClass::optimizer_state;
    if (tier == Tier::nvme && state && map_.durable.count > 0) {
      map_.homes.pieces[static_cast<std::size_t>(content)][layer.value].push_back(
          {tier, offset, durable_extent(map_, content, layer, offset, size)});
      return;
    }
    auto& resident = at(map_.resident, tier);
    map_.homes.pieces[static_cast<std::size_t>(content)][layer.value].push_back(
        {tier, offset, {resident, size}});
    resident += size;
    at(at(map_.resident_class, tier), class_of(content)) += size;
  }

  // The first `dram_segments` in DRAM, the others on NVMe.
  void split(Content content, LayerId layer, std::uint64_t dram_segments) {
    const auto segments = layout_.block(layer).segments;
    const auto dram = std::min(dram_segments, segments);
    place(content, layer, Tier::dram, layout_.segment_range(layer, 0, dram));
    place(content, layer, Tier::nvme, layout_.segment_range(layer, dram, segments - dram));
  }

  // Back to back: nothing but memory accesses touches them.
  void place_sums() {
    auto& resident = at(map_.resident, Tier::dram);
    const Bytes first = resident;
    for (std::uint32_t l = 0; l < layout_.layers(); ++l) {
      const Bytes size{sizeof(double) * leaves_of(layout_.block(LayerId{l}).elements)};
      map_.gradient_sums.push_back({resident, size});
      resident += size;
    }
    resident = round_up(resident, kPage);
    at(at(map_.resident_class, Tier::dram), TensorClass::gradient) += resident - first;
  }

  MemoryMap finish() {
    map_.peak = map_.resident;
    return std::move(map_);
  }

 private:
  const ModelLayout& layout_;
  MemoryMap map_;
};

}  // namespace

Placement all_on(const ModelLayout& layout, Tier tier) {
  Placement placement(layout.layers());
  for (std::uint32_t l = 0; l < layout.layers(); ++l) {
    const auto segments = tier == Tier::dram ? layout.block(LayerId{l}).segments : 0;
    placement[l].parameter_dram_segments = segments;
    placement[l].state_dram_segments.fill(segments);
    placement[l].activation = tier;
  }
  return placement;
}

Extent durable_extent(const MemoryMap& map, Content state, LayerId layer, Bytes offset,
                      Bytes size) {
  const auto index = static_cast<std::size_t>(state) -
                     static_cast<std::size_t>(kOptimizerStates[0]);
  return {map.durable_base[index][layer.value] + offset, size};
}

MemoryMap assign_homes(const ModelLayout& layout, const Placement& placement,
                       const HomeOptions& options) {
  HomeBuilder builder(layout);
  if (options.durable) builder.reserve_durable();
  for (std::uint32_t l = 0; l < layout.layers(); ++l) {
    const LayerId layer{l};
    const auto& where = placement[l];
    if (where.parameter_hbm) {
      builder.place(Content::parameter, layer, Tier::hbm,
                    layout.segment_range(layer, 0, layout.block(layer).segments));
    } else {
      builder.split(Content::parameter, layer, where.parameter_dram_segments);
    }
    for (std::size_t s = 0; s < kOptimizerStateCount; ++s) {
      builder.split(kOptimizerStates[s], layer, where.state_dram_segments[s]);
    }
    if (options.form.update_time == UpdateTime::overlapped) continue;
    builder.split(kept_gradient(options.form.micro_batches > 1), layer,
                  layout.block(layer).segments);
  }
  builder.place_sums();
  return builder.finish();
}

}  // namespace terrace
