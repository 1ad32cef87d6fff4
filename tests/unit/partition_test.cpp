// ZeRO arithmetic: shards are disjoint, in order, and together everything.
#include "runtime/partition.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace terrace {
namespace {

TEST(Partition, GatherOfShardsIsTheWhole) {
  for (std::uint64_t elements = 0; elements <= 17; ++elements) {
    std::vector<int> whole(elements);
    std::iota(whole.begin(), whole.end(), 0);
    for (std::uint32_t ranks = 1; ranks <= 9; ++ranks) {
      for (const std::uint64_t alignment : {1U, 2U, 4U}) {
        std::vector<int> gathered;
        for (std::uint32_t rank = 0; rank < ranks; ++rank) {
          const auto shard = shard_of(elements, ranks, rank, alignment);
          EXPECT_EQ(shard.first, gathered.size());
          for (auto i = shard.first; i < shard.end(); ++i) gathered.push_back(whole[i]);
        }
        EXPECT_EQ(gathered, whole) << elements << " over " << ranks;
      }
    }
  }
}

TEST(Partition, ShardsStartAligned) {
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(shard_of(1000, 3, rank, 64).first, std::min<std::uint64_t>(1000, rank * 384ULL));
  }
}

}  // namespace
}  // namespace terrace
