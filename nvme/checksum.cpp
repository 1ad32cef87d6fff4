#include "nvme/checksum.h"

#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <algorithm>
#include <new>
#include <utility>

namespace terrace {

std::uint64_t hash_bytes(const void* data, std::size_t bytes) { return XXH3_64bits(data, bytes); }

std::uint64_t segment_checksum(const SegmentClaim& claim, std::span<const std::uint64_t> tiles) {
  std::vector<std::uint64_t> all{claim.store, claim.segment, claim.generation, claim.length};
  all.insert(all.end(), tiles.begin(), tiles.end());
  return std::max<std::uint64_t>(1, hash_bytes(all.data(), all.size() * sizeof(std::uint64_t)));
}

std::vector<std::uint64_t> hash_tiles(std::span<const std::byte> data, Bytes tile) {
  std::vector<std::uint64_t> hashes;
  for (std::size_t done = 0; done < data.size(); done += tile.count) {
    hashes.push_back(hash_bytes(data.data() + done, std::min(tile.count, data.size() - done)));
  }
  return hashes;
}

// ---- in pieces

struct TileHasher::State {
  State() : xxh(XXH3_createState()) {
    if (xxh == nullptr) throw std::bad_alloc();
    XXH3_64bits_reset(xxh);
  }
  ~State() { XXH3_freeState(xxh); }
  State(const State&) = delete;

  XXH3_state_t* xxh;
};

TileHasher::TileHasher(Bytes tile) : tile_(tile), state_(std::make_unique<State>()) {}
TileHasher::TileHasher(TileHasher&&) noexcept = default;
TileHasher& TileHasher::operator=(TileHasher&&) noexcept = default;
TileHasher::~TileHasher() = default;

void TileHasher::end_tile() {
  hashes_.push_back(XXH3_64bits_digest(state_->xxh));
  XXH3_64bits_reset(state_->xxh);
  begun_ = {};
}

void TileHasher::add(std::span<const std::byte> piece) {
  while (!piece.empty()) {
    const auto size = std::min<std::size_t>(piece.size(), (tile_ - begun_).count);
    const auto part = piece.first(size);
    piece = piece.subspan(size);
    if (size == tile_.count) {
      hashes_.push_back(hash_bytes(part.data(), size));
      continue;
    }
    XXH3_64bits_update(state_->xxh, part.data(), size);
    begun_ += Bytes{size};
    if (begun_ == tile_) end_tile();
  }
}

std::vector<std::uint64_t> TileHasher::finish() {
  if (begun_.count > 0) end_tile();
  return std::move(hashes_);
}

}  // namespace terrace
