#include "runtime/home_access.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "runtime/placement.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr Bytes kMaxBounce = 4_MiB;
constexpr std::uint64_t kInitialElements = 1 << 16;  // created at a time

std::span<std::byte> bounce_of(const MemoryMap& map, const TensorStore& store, Bytes segment) {
  const Bytes first = at(map.resident, Tier::dram);
  const Bytes size = std::min(at(map.peak, Tier::dram) - first, std::max(kMaxBounce, segment));
  return store.arena().subspan(first.count, size.count / kPage.count * kPage.count);
}

template <class Narrow>
auto narrowed(std::span<const float> values, Narrow narrow) {
  std::vector<decltype(narrow(0.0F))> result(values.size());
  std::transform(values.begin(), values.end(), result.begin(), narrow);
  return result;
}

}  // namespace

HomeAccess::HomeAccess(const ModelLayout& layout, const MemoryMap& map, const TensorStore& store,
                       Device& device, SegmentStore& nvme)
    : layout_(layout),
      map_(map),
      store_(store),
      device_(device),
      nvme_(nvme),
      bounce_(bounce_of(map, store, {layout.segment_elements() * sizeof(float)})) {}

std::byte* HomeAccess::home_address(const HomePiece& piece, Bytes offset) const {
  return store_.address(piece.tier, piece.extent) + (offset - piece.data_offset).count;
}

void HomeAccess::copy(StreamId stream, std::byte* destination, const std::byte* source,
                      Bytes size) {
  device_.copy(stream, {Ticket{}, destination, source, size});
  device_.synchronize(stream);
  std::vector<Completion> completions;
  while (device_.poll(completions) == 0) device_.synchronize(stream);
  if (completions.front().error != 0) {
    throw Error(ErrorCode::device, "a copy of " + std::to_string(size.count) +
                                       " bytes failed: " + device_.failure());
  }
}

Bytes HomeAccess::segment_bytes(Content content) const {
  return layout_.segment_elements() * layout_.element_size(content);
}

std::uint64_t HomeAccess::chunk_elements() const {
  return round_up(kInitialElements, layout_.segment_elements());
}

void HomeAccess::read(Content content, LayerId layer, Bytes offset, Bytes size,
                      const Piece& piece) {
  for (const auto& home : map_.homes.of(content, layer)) {
    const Bytes home_end = home.data_offset + home.extent.size;
    // Only the wanted part is handed out of what has to be moved.
    const Bytes unit = home.tier == Tier::nvme
                           ? std::min(segment_bytes(content), home.extent.size)
                           : kPage;
    const Bytes most{bounce_.size() / unit.count * unit.count};
    Bytes position = std::max(offset, home.data_offset);
    const Bytes end = std::min(offset + size, home_end);
    if (home.tier == Tier::dram && position < end) {
      piece({home_address(home, position), (end - position).count}, position);
      continue;
    }
    while (position < end) {
      const Bytes first =
          home.data_offset + (position - home.data_offset) / unit.count * unit.count;
      const Bytes last = std::min({home.data_offset + round_up(end - home.data_offset, unit),
                                   home_end, first + most});
      TERRACE_CHECK(first < last);
      const auto bounce = bounce_.first((last - first).count);
      if (home.tier == Tier::hbm) {
        copy(kDeviceToHostStream, bounce.data(), home_address(home, first), last - first);
      } else {
        nvme_.read_now({home.extent.offset + (first - home.data_offset), last - first}, bounce);
      }
      const Bytes stop = std::min(last, end);
      piece({bounce.data() + (position - first).count, (stop - position).count}, position);
      position = stop;
    }
  }
}

void HomeAccess::write_piece(const HomePiece& piece, Bytes offset,
                             std::span<const std::byte> bytes) {
  if (piece.tier == Tier::dram) {
    std::memcpy(home_address(piece, offset), bytes.data(), bytes.size());
    return;
  }
  const Bytes unit =
      piece.tier == Tier::nvme ? std::min(write_unit_, piece.extent.size) : kPage;
  const std::size_t most = bounce_.size() / unit.count * unit.count;
  for (std::size_t done = 0; done < bytes.size();) {
    const std::size_t size = std::min(most, bytes.size() - done);
    const auto bounce = bounce_.first(size);
    std::memcpy(bounce.data(), bytes.data() + done, size);
    const Bytes position = offset + Bytes{done};
    if (piece.tier == Tier::hbm) {
      copy(kHostToDeviceStream, home_address(piece, position), bounce.data(), {size});
    } else {
      nvme_.write_now({piece.extent.offset + (position - piece.data_offset), Bytes{size}}, bounce,
                      generation_);
    }
    done += size;
  }
}

// `offset` and the size are whole segments, or end with the block.
void HomeAccess::write(Content content, LayerId layer, Bytes offset,
                       std::span<const std::byte> bytes) {
  write_unit_ = segment_bytes(content);
  for (const auto& home : map_.homes.of(content, layer)) {
    const Bytes first = std::max(offset, home.data_offset);
    const Bytes end =
        std::min(offset + Bytes{bytes.size()}, home.data_offset + home.extent.size);
    if (first < end) {
      write_piece(home, first, bytes.subspan((first - offset).count, (end - first).count));
    }
  }
}

void HomeAccess::initialize(const Initializer& initializer) {
  for (std::uint32_t l = 0; l < layout_.layers(); ++l) initialize_layer(LayerId{l}, initializer);
}

void HomeAccess::initialize_layer(LayerId layer, const Initializer& initializer) {
  const auto& block = layout_.block(layer);
  const auto& tensors = layout_.layer(layer).tensors;
  std::vector<float> values;
  const std::uint64_t chunk = chunk_elements();
  for (std::uint64_t first = 0; first < block.elements; first += chunk) {
    const std::uint64_t count = std::min(chunk, block.elements - first);
    values.assign(count, 0.0F);
    const Bytes offset{first * sizeof(float)};
    for (const Content moment : {Content::momentum, Content::variance}) {
      write(moment, layer, offset, std::as_bytes(std::span(values)));
    }
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      const auto begin = std::max(first, block.tensors[t].first);
      const auto end = std::min(first + count, block.tensors[t].end());
      if (begin >= end) continue;
      initializer(tensors[t], begin - block.tensors[t].first,
                  std::span(values).subspan(begin - first, end - begin));
    }
    write_parameters(layer, first, values);
    write(Content::master_weight, layer, offset, std::as_bytes(std::span(values)));
  }
}

void HomeAccess::write_parameters(LayerId layer, std::uint64_t first,
                                  std::span<const float> values) {
  const auto write_as = [&](const auto& narrow) {
    write(Content::parameter, layer, {first * sizeof narrow[0]}, std::as_bytes(std::span(narrow)));
  };
  switch (layout_.model().parameter_dtype) {
    case DType::fp32: return write_as(values);
    case DType::bf16: return write_as(narrowed(values, to_bfloat16));
    case DType::fp16: return write_as(narrowed(values, to_float16));
  }
}

void HomeAccess::restore() {
  for (std::uint32_t l = 0; l < layout_.layers(); ++l) restore_layer(LayerId{l});
}

void HomeAccess::restore_layer(LayerId layer) {
  for (const Content state : kOptimizerStates) {
    for (const auto& home : map_.homes.of(state, layer)) {
      if (home.tier != Tier::dram) continue;
      nvme_.read_now(durable_extent(map_, state, layer, home.data_offset, home.extent.size),
                     {home_address(home, home.data_offset), home.extent.size.count});
    }
  }
  const std::uint64_t chunk = chunk_elements();
  const auto elements = layout_.block(layer).elements;
  std::vector<float> values;
  for (std::uint64_t first = 0; first < elements; first += chunk) {
    values.resize(std::min(chunk, elements - first));
    const Bytes offset{first * sizeof(float)};
    read(Content::master_weight, layer, offset, {values.size() * sizeof(float)},
         [&](std::span<const std::byte> bytes, Bytes position) {
           std::memcpy(reinterpret_cast<std::byte*>(values.data()) + (position - offset).count,
                       bytes.data(), bytes.size());
         });
    write_parameters(layer, first, values);
  }
}

void HomeAccess::flush_homes(std::uint64_t step) {
  for (std::uint32_t l = 0; l < layout_.layers(); ++l) {
    for (const Content state : kOptimizerStates) {
      for (const auto& home : map_.homes.of(state, LayerId{l})) {
        if (home.tier != Tier::dram) continue;
        nvme_.write_now(durable_extent(map_, state, LayerId{l}, home.data_offset,
                                       home.extent.size),
                        {home_address(home, home.data_offset), home.extent.size.count}, step);
      }
    }
  }
}

}  // namespace terrace
