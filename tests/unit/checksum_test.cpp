#include "nvme/checksum.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

namespace terrace {
namespace {

std::vector<std::byte> bytes(std::size_t count) {
  std::vector<std::byte> result(count);
  for (std::size_t i = 0; i < count; ++i) result[i] = static_cast<std::byte>(i * 31 + (i >> 8));
  return result;
}

// The values that the algorithm's own authors publish: a store must be read by every later build.
TEST(Checksum, IsXxh3) {
  EXPECT_EQ(hash_bytes("", 0), 0x2D06800538D394C2ULL);
  EXPECT_EQ(hash_bytes("abc", 3), 0x78AF5F94892F3950ULL);
}

TEST(Checksum, DependsOnEveryByteAndTheLength) {
  auto data = bytes(5000);
  const auto hash = hash_bytes(data.data(), data.size());
  for (std::size_t i = 0; i < data.size(); i += 7) {
    data[i] ^= std::byte{1};
    EXPECT_NE(hash_bytes(data.data(), data.size()), hash) << i;
    data[i] ^= std::byte{1};
  }
  EXPECT_NE(hash_bytes(data.data(), data.size() - 1), hash);
  EXPECT_EQ(hash_bytes(data.data(), data.size()), hash);
}

TEST(Checksum, OfASegmentCoversWhatItClaimsToBe) {
  const SegmentClaim claim{1, 2, 3, 4};
  const std::vector<std::uint64_t> tiles{5, 6, 7};
  const auto sum = segment_checksum(claim, tiles);
  EXPECT_NE(sum, 0U);
  EXPECT_EQ(segment_checksum(claim, tiles), sum);
  EXPECT_NE(segment_checksum({9, 2, 3, 4}, tiles), sum);
  EXPECT_NE(segment_checksum({1, 9, 3, 4}, tiles), sum);
  EXPECT_NE(segment_checksum({1, 2, 9, 4}, tiles), sum);
  EXPECT_NE(segment_checksum({1, 2, 3, 9}, tiles), sum);
  EXPECT_NE(segment_checksum(claim, std::vector<std::uint64_t>{6, 5, 7}), sum);
  EXPECT_NE(segment_checksum(claim, std::vector<std::uint64_t>{5, 6}), sum);
  EXPECT_NE(segment_checksum(claim, {}), 0U);
}

TEST(Checksum, OfTilesIsOfEachAlone) {
  const auto data = bytes(10'000);
  const auto hashes = hash_tiles(data, 4096_B);
  ASSERT_EQ(hashes.size(), 3U);
  EXPECT_EQ(hashes.size(), tile_count(10000_B, 4096_B));
  EXPECT_EQ(hashes[0], hash_bytes(data.data(), 4096));
  EXPECT_EQ(hashes[1], hash_bytes(data.data() + 4096, 4096));
  EXPECT_EQ(hashes[2], hash_bytes(data.data() + 8192, 10'000 - 8192));
  EXPECT_TRUE(hash_tiles({}, 4096_B).empty());
  EXPECT_EQ(tile_count(Bytes{}, 4096_B), 0U);
  EXPECT_EQ(tile_count(8192_B, 4096_B), 2U);
}

TEST(Checksum, OfTilesInPiecesIsTheSame) {
  const auto data = bytes(20'001);
  for (const std::size_t tile : {1000U, 4096U, 20'001U, 50'000U}) {
    const auto whole = hash_tiles(data, Bytes{tile});
    for (const std::size_t piece : {1U, 7U, 999U, 1000U, 4096U, 8192U, 20'001U}) {
      TileHasher hasher(Bytes{tile});
      for (std::size_t at = 0; at < data.size(); at += piece) {
        hasher.add(std::span(data).subspan(at, std::min(piece, data.size() - at)));
        hasher.add({});
      }
      EXPECT_EQ(hasher.finish(), whole) << tile << " " << piece;
    }
  }
  EXPECT_TRUE(TileHasher(4096_B).finish().empty());
}

}  // namespace
}  // namespace terrace
