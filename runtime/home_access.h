// Reading and writing tensors where they live, while no step is in flight.
#pragma once

#include <cstddef>
#include <span>

#include "nvme/segment_store.h"
#include "runtime/step_plan.h"
#include "terrace/device.h"
#include "terrace/model.h"
#include "tiers/block_layout.h"
#include "tiers/tensor_store.h"

namespace terrace {

// Thread rule: the store's owner, while nothing is in flight. Bytes pass through the buffers of the
// DRAM arena, which are free then. What is read from NVMe is whole segments whose checksums hold.
class HomeAccess {
 public:
  HomeAccess(const ModelLayout& layout, const MemoryMap& map, const TensorStore& store,
             Device& device, SegmentStore& nvme);

  // Calls piece(bytes, offset in the block) for [offset, offset + size) of a content's block, in
  // order.
  using Piece = std::function<void(std::span<const std::byte> bytes, Bytes offset)>;
  void read(Content content, LayerId layer, Bytes offset, Bytes size, const Piece& piece);

  // Gives every home its initial value: parameters and master weights from `initializer`, zero for
  // moments and padding.
  void initialize(const Initializer& initializer);
  // Gives every home what the store's last commit holds; parameters are the rounded master weights.
  void restore();
  // Writes the durable copies of what does not live on NVMe, as `step` left it.
  void flush_homes(std::uint64_t step);

 private:
  void initialize_layer(LayerId layer, const Initializer& initializer);
  void restore_layer(LayerId layer);
  void write(Content content, LayerId layer, Bytes offset, std::span<const std::byte> bytes);
  void write_piece(const HomePiece& piece, Bytes offset, std::span<const std::byte> bytes);
  // From the master weights of consecutive elements.
  void write_parameters(LayerId layer, std::uint64_t first, std::span<const float> values);
  // Elements that are handled at a time: whole segments.
  std::uint64_t chunk_elements() const;
  Bytes segment_bytes(Content content) const;
  void copy(StreamId stream, std::byte* destination, const std::byte* source, Bytes size);
  std::byte* home_address(const HomePiece& piece, Bytes offset) const;

  const ModelLayout& layout_;
  const MemoryMap& map_;
  const TensorStore& store_;
  Device& device_;
  SegmentStore& nvme_;
  Bytes write_unit_{kPage};       // that the present write must not cut
  std::uint64_t generation_ = 0;  // of what initialize() and restore() write
  std::span<std::byte> bounce_;  // at least a segment of whatever lives on NVMe
};

}  // namespace terrace
