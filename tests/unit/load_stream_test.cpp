#include "nvme/load_stream.h"

#include <gtest/gtest.h>

#include <set>

#include "nvme/load_memory.h"
#include "terrace/error.h"

namespace terrace::bench {
namespace {

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;

std::vector<LoadRequest> take(LoadStream& stream, std::size_t count) {
  std::vector<LoadRequest> requests;
  while (requests.size() < count) {
    const auto request = stream.next();
    if (!request) break;
    requests.push_back(*request);
  }
  return requests;
}

// Whatever the pattern: aligned, inside the region, at most a block, groups never falling.
TEST(LoadStream, EveryPatternKeepsToItsRegion) {
  for (const auto pattern : kPatterns) {
    for (const std::uint64_t size : {2 * kMiB, 37 * kMiB, 1024 * kMiB}) {
      for (const std::uint64_t block : {4 * kKiB, 192 * kKiB, kMiB}) {
        for (const std::uint32_t alignment : {4096U, 16384U}) {
          if (block % alignment != 0) continue;
          const LoadRegion region{64 * kKiB, 64 * kKiB + size, alignment};
          const auto stream = make_stream(pattern, region, block, 12345);
          std::uint64_t group = 0;
          for (const auto& request : take(*stream, 3000)) {
            EXPECT_GE(request.group, group);
            group = request.group;
            if (request.operation == IoOperation::flush) continue;
            ASSERT_GT(request.bytes, 0U) << to_string(pattern);
            ASSERT_LE(request.bytes, block);
            ASSERT_EQ(request.bytes % alignment, 0U) << to_string(pattern);
            ASSERT_EQ(request.offset % alignment, 0U) << to_string(pattern);
            ASSERT_GE(request.offset, region.begin);
            ASSERT_LE(request.offset + request.bytes, region.end) << to_string(pattern);
          }
        }
      }
    }
  }
}

TEST(LoadStream, FirstWriteCoversTheRegionOnce) {
  const auto stream = make_stream(Pattern::first_write, {kMiB, kMiB + 10 * 4096}, 4 * 4096, 9);
  const auto requests = take(*stream, 100);
  ASSERT_EQ(requests.size(), 3U);
  EXPECT_EQ(requests[0].offset, kMiB);
  EXPECT_EQ(requests[2].offset, kMiB + 8 * 4096);
  EXPECT_EQ(requests[2].bytes, 2 * 4096U);
}

TEST(LoadStream, SequentialGoesRoundAndStartsElsewhere) {
  const auto stream = make_stream(Pattern::read, {0, 4 * kMiB}, kMiB, 6);
  const auto requests = take(*stream, 5);
  std::vector<std::uint64_t> offsets;
  for (const auto& request : requests) offsets.push_back(request.offset / kMiB);
  EXPECT_EQ(offsets, (std::vector<std::uint64_t>{2, 3, 0, 1, 2}));
}

TEST(LoadStream, MixIsHalfAndHalf) {
  const auto stream = make_stream(Pattern::mix, {0, 64 * kMiB}, kMiB, 0);
  std::uint64_t reads = 0;
  std::uint64_t writes = 0;
  for (const auto& request : take(*stream, 100)) {
    (request.operation == IoOperation::read ? reads : writes) += request.bytes;
  }
  EXPECT_EQ(reads, writes);
}

// 12 bytes read and 14 written per parameter; a run is written only after it was read, and is read
// into a buffer only after the write that used it.
TEST(LoadStream, OptimizerStepKeepsItsProportion) {
  const auto stream = make_stream(Pattern::optimizer_step, {0, 512 * kMiB}, kMiB, 3);
  EXPECT_EQ(stream->lag(), 5U);
  double reads = 0;
  double writes = 0;
  std::set<std::uint64_t> read_runs;
  std::uint64_t group = 0;
  for (const auto& request : take(*stream, 20000)) {
    const bool fresh = request.group != group;
    group = request.group;
    if (request.operation == IoOperation::read) {
      reads += static_cast<double>(request.bytes);
      if (fresh) read_runs.insert(request.offset);
    } else {
      writes += static_cast<double>(request.bytes);
      EXPECT_TRUE(!fresh || read_runs.contains(request.offset)) << "a run that was never read";
    }
  }
  EXPECT_NEAR(writes / reads, 14.0 / 12.0, 0.02);
}

TEST(LoadStream, CommitFlushesDataAndRecord) {
  const auto stream = make_stream(Pattern::commit, {0, 64 * kMiB}, kMiB, 0);
  EXPECT_EQ(stream->lag(), 1U);
  std::string order;
  std::uint64_t group = 0;
  for (const auto& request : take(*stream, 60)) {
    if (request.group == group) continue;
    group = request.group;
    const bool record = request.operation == IoOperation::write && request.offset == 0;
    order += request.operation == IoOperation::flush ? 'f' : (record ? 'r' : 'w');
  }
  EXPECT_EQ(order.substr(0, 8), "wfrfwfrf");
}

TEST(LoadStream, Names) {
  for (const auto pattern : kPatterns) EXPECT_EQ(parse_pattern(to_string(pattern)), pattern);
  EXPECT_THROW(parse_pattern("random"), Error);
}

TEST(LoadMemory, PagesProveWhereTheyBelong) {
  LoadMemory memory(64 * kKiB, 1);
  memory.stamp(8 * kKiB, 16 * kKiB, 3 * kMiB);
  std::vector<std::byte> read(memory.source(8 * kKiB), memory.source(24 * kKiB));
  EXPECT_EQ(memory.check(read, 3 * kMiB), std::nullopt);
  EXPECT_NE(memory.check(read, 5 * kMiB), std::nullopt) << "elsewhere";
  const LoadMemory other(64 * kKiB, 2);
  EXPECT_NE(other.check(read, 3 * kMiB), std::nullopt) << "another run's";
  read[5000] ^= std::byte{1};
  const auto wrong = memory.check(read, 3 * kMiB);
  ASSERT_TRUE(wrong);
  EXPECT_NE(wrong->find(std::to_string(3 * kMiB + 4096)), std::string::npos) << *wrong;
  EXPECT_NE(memory.check(std::vector<std::byte>(4096), 0), std::nullopt) << "zeros";
}

// No byte value is much more frequent than the others, and no page is like another.
TEST(LoadMemory, CannotBeCompressed) {
  const LoadMemory memory(kMiB, 5);
  std::vector<int> counts(256);
  for (std::uint64_t i = 0; i < kMiB; ++i) ++counts[static_cast<std::size_t>(*memory.source(i))];
  for (const int count : counts) EXPECT_NEAR(count, 4096, 6 * 64);
  std::set<std::vector<std::byte>> pages;
  for (std::uint64_t i = 0; i < kMiB; i += kPage) {
    pages.emplace(memory.source(i), memory.source(i + kPage));
  }
  EXPECT_EQ(pages.size(), kMiB / kPage);
}

}  // namespace
}  // namespace terrace::bench
