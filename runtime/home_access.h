// Reading and writing tensors where they live, while no step is in flight.
#pragma once

#include <cstddef>
#include <span>

#include "runtime/step_plan.h"
#include "terrace/device.h"
#include "terrace/io_engine.h"
#include "terrace/model.h"
#include "tiers/block_layout.h"
#include "tiers/tensor_store.h"

namespace terrace {

// Thread rule: the I/O engine's owner, while nothing is in flight. Bytes pass through the buffers
// of the DRAM arena, which are free then.
class HomeAccess {
 public:
  HomeAccess(const ModelLayout& layout, const MemoryMap& map, const TensorStore& store,
             Device& device, IoEngine& io, FileId file);

  // Calls piece(bytes, offset in the block) for [offset, offset + size) of a content's block, in
  // order.
  using Piece = std::function<void(std::span<const std::byte> bytes, Bytes offset)>;
  void read(Content content, LayerId layer, Bytes offset, Bytes size, const Piece& piece);

  // Gives every home its initial value: parameters and master weights from `initializer`, zero for
  // moments and padding.
  void initialize(const Initializer& initializer);

 private:
  void initialize_layer(LayerId layer, const Initializer& initializer);
  void write(Content content, LayerId layer, Bytes offset, std::span<const std::byte> bytes);
  void write_piece(const HomePiece& piece, Bytes offset, std::span<const std::byte> bytes);
  void transfer(IoOperation operation, Bytes offset, std::span<std::byte> memory);
  void copy(StreamId stream, std::byte* destination, const std::byte* source, Bytes size);
  std::byte* home_address(const HomePiece& piece, Bytes offset) const;

  const ModelLayout& layout_;
  const MemoryMap& map_;
  const TensorStore& store_;
  Device& device_;
  IoEngine& io_;
  FileId file_;
  std::span<std::byte> bounce_;  // at least a page whenever a layer has parameters
};

}  // namespace terrace
