// Checksums of what lies on a drive: XXH3 over tiles, and over their hashes together with what the
// bytes claim to be, so that stale and misplaced bytes are found as surely as damaged ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "terrace/types.h"

namespace terrace {

// XXH3, 64 bits, by the best instruction set of this CPU. Safe from any thread.
std::uint64_t hash_bytes(const void* data, std::size_t bytes);

// What a segment claims to be.
struct SegmentClaim {
  std::uint64_t store = 0;       // id of the store
  std::uint64_t segment = 0;     // index in the store, or its address for what has no index
  std::uint64_t generation = 0;  // the step that wrote it
  std::uint64_t length = 0;      // bytes
};

// Over the claim and the hashes of the segment's tiles, in order. Never 0.
std::uint64_t segment_checksum(const SegmentClaim& claim, std::span<const std::uint64_t> tiles);

// The hashes of `data` in tiles of `tile` bytes, the last one shorter.
std::vector<std::uint64_t> hash_tiles(std::span<const std::byte> data, Bytes tile);

// hash_tiles() of bytes that come in pieces, in order. Thread rule: one thread.
class TileHasher {
 public:
  explicit TileHasher(Bytes tile);
  TileHasher(TileHasher&&) noexcept;
  TileHasher& operator=(TileHasher&&) noexcept;
  ~TileHasher();

  void add(std::span<const std::byte> piece);
  // Of all that was added.
  std::vector<std::uint64_t> finish();

 private:
  struct State;
  void end_tile();

  Bytes tile_;
  Bytes begun_;                   // bytes of a tile that is not complete
  std::unique_ptr<State> state_;  // of those
  std::vector<std::uint64_t> hashes_;
};

constexpr std::uint64_t tile_count(Bytes size, Bytes tile) {
  return (size.count + tile.count - 1) / tile.count;
}

}  // namespace terrace
