#include "runtime/store_plan.h"

#include <algorithm>

namespace terrace {
namespace {

constexpr std::uint64_t kTileElements = 1 << 15;

StoreRegion region_of(const ModelLayout& layout, Content content, LayerId layer, Extent extent) {
  const Bytes element = layout.element_size(content);
  return {std::string(to_string(content)) + " of " + layout.layer(layer).name, extent,
          layout.segment_elements() * element, tile_elements(layout) * element};
}

std::vector<StoreFileLayout> files_of(const ModelLayout& layout,
                                      std::span<const std::uint32_t> weights) {
  const auto regions = durable_regions(layout);
  std::vector<StoreFileLayout> files;
  for (const auto& share : share_out(regions, weights)) {
    files.push_back(store_file_layout(share, regions.size()));
  }
  return files;
}

}  // namespace

std::uint64_t tile_elements(const ModelLayout& layout) {
  return std::min(kTileElements, layout.segment_elements());
}

std::vector<StoreRegion> durable_regions(const ModelLayout& layout) {
  std::vector<StoreRegion> regions;
  Bytes end;
  for (std::uint32_t l = 0; l < layout.layers(); ++l) {
    for (const Content state : kOptimizerStates) {
      const Bytes size = layout.block_size(LayerId{l}, state);
      if (size.count == 0) continue;
      regions.push_back(region_of(layout, state, LayerId{l}, {end, size}));
      end += size;
    }
  }
  return regions;
}

std::vector<StoreRegion> scratch_regions(const ModelLayout& layout, const MemoryMap& map) {
  std::vector<StoreRegion> regions;
  for (const Content content : {Content::parameter, Content::master_weight, Content::momentum,
                                Content::variance}) {
    for (std::uint32_t l = 0; l < layout.layers(); ++l) {
      for (const auto& piece : map.homes.of(content, LayerId{l})) {
        if (piece.tier != Tier::nvme || piece.extent.offset < map.durable) continue;
        regions.push_back(region_of(layout, content, LayerId{l}, piece.extent));
      }
    }
  }
  std::sort(regions.begin(), regions.end(), [](const auto& a, const auto& b) {
    return a.extent.offset < b.extent.offset;
  });
  const Bytes first = at(map.resident, Tier::nvme);
  const Bytes end = at(map.peak, Tier::nvme);
  if (first < end) {
    regions.push_back({"saved inputs", {first, end - first},
                       layout.segment_elements() * layout.element_size(Content::parameter),
                       128_KiB});
  }
  return regions;
}

Bytes durable_overhead(const ModelLayout& layout, std::span<const std::uint32_t> weights) {
  Bytes files;
  for (const auto& file : files_of(layout, weights)) files += file.size;
  for (const auto& region : durable_regions(layout)) files -= region.extent.size;
  return files;
}

Bytes commit_bytes(const ModelLayout& layout, std::span<const std::uint32_t> weights) {
  Bytes bytes;
  for (const auto& file : files_of(layout, weights)) bytes += file.table_bytes + kStorePage;
  return bytes;
}

}  // namespace terrace
