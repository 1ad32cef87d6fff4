#include "nvme/checksum.h"

#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <algorithm>

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

}  // namespace terrace
