// The rules that every engine with real files shares: splitting, short results, retries, errors.
// The results that a kernel seldom gives are handed in here one by one.

#include <gtest/gtest.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "nvme/transfers.h"

namespace terrace {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr Nanoseconds kNow{1};
constexpr Nanoseconds kLater{2};

IoFileInfo file_of(Bytes size, std::uint32_t alignment = kPage, std::uint32_t drive = 0) {
  return {"file", size, true, "", alignment, drive};
}

// Addresses are handed out, never used.
IoRequest request_of(IoOperation operation, std::uint64_t bytes, std::uint64_t ticket = 1) {
  return {{ticket}, operation, {0}, 0, reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40),
          bytes};
}

Completion only(TransferTable& table) {
  std::vector<Completion> completions;
  EXPECT_EQ(table.collect(completions), 1u);
  EXPECT_EQ(table.pending(), 0u);
  return completions.empty() ? Completion{} : completions.front();
}

TEST(Transfers, CutsRequestsAtTheBlock) {
  TransferTable table(8, 64_KiB);
  ASSERT_TRUE(table.submit(request_of(IoOperation::read, 160 << 10), file_of(1_MiB)));
  std::vector<int> slots;
  for (int slot = table.next(kNow); slot >= 0; slot = table.next(kLater)) slots.push_back(slot);
  ASSERT_EQ(slots.size(), 3u);
  EXPECT_EQ(table.at(slots[1]).offset, 64u << 10);
  EXPECT_EQ(table.at(slots[2]).bytes, 32u << 10);
  for (const int slot : {slots[2], slots[0], slots[1]}) {  // in any order
    EXPECT_FALSE(table.has_completed());
    EXPECT_TRUE(table.uses({0}));
    EXPECT_FALSE(table.advance(slot, static_cast<std::int64_t>(table.at(slot).bytes), kLater));
  }
  EXPECT_FALSE(table.uses({0}));
  const auto completion = only(table);
  EXPECT_EQ(completion.bytes, 160u << 10);
  EXPECT_EQ(completion.start, kNow);
  EXPECT_EQ(completion.end, kLater);
}

TEST(Transfers, KeepsEveryTransferBelowTwoGiBAndAligned) {
  TransferTable huge(8, 64_GiB);
  ASSERT_TRUE(huge.submit(request_of(IoOperation::write, (5_GiB).count), file_of(8_GiB)));
  int count = 0;
  for (int slot = huge.next(kNow); slot >= 0; slot = huge.next(kNow), ++count) {
    EXPECT_LE(huge.at(slot).bytes, kMaxBlock.count);
  }
  EXPECT_EQ(count, 5);
  TransferTable tiny(8, 4_KiB);
  ASSERT_TRUE(tiny.submit(request_of(IoOperation::write, 32 << 10), file_of(1_MiB, 16 << 10)));
  EXPECT_EQ(tiny.at(tiny.next(kNow)).bytes, 16u << 10);
}

TEST(Transfers, GoOnAtTheLastAlignedOffset) {
  TransferTable table(1, 1_MiB);
  ASSERT_TRUE(table.submit(request_of(IoOperation::write, 4 * kPage), file_of(1_MiB)));
  const int slot = table.next(kNow);
  const auto* data = table.at(slot).data;
  EXPECT_TRUE(table.advance(slot, kPage + 100, kNow));
  EXPECT_EQ(table.at(slot).offset, kPage);
  EXPECT_EQ(table.at(slot).data, data + kPage);
  EXPECT_EQ(table.at(slot).bytes, 3 * kPage);
  EXPECT_TRUE(table.advance(slot, 2 * kPage, kNow));
  EXPECT_FALSE(table.advance(slot, kPage, kLater));
  EXPECT_EQ(only(table).bytes, 4 * kPage);
}

TEST(Transfers, AskForProgressWithinABound) {
  TransferTable table(1, 1_MiB);
  ASSERT_TRUE(table.submit(request_of(IoOperation::read, 4 * kPage), file_of(1_MiB)));
  const int slot = table.next(kNow);
  for (int i = 1; i < kMaxStalls; ++i) ASSERT_TRUE(table.advance(slot, 7, kNow));
  ASSERT_TRUE(table.advance(slot, kPage, kNow));  // progress: the count starts again
  for (int i = 1; i < kMaxStalls; ++i) ASSERT_TRUE(table.advance(slot, 7, kNow));
  EXPECT_FALSE(table.advance(slot, 7, kNow));
  EXPECT_EQ(only(table).error, ENODATA);
}

TEST(Transfers, TakeZeroAsTheEnd) {
  for (const auto& [operation, error] : {std::pair{IoOperation::read, ENODATA},
                                         std::pair{IoOperation::write, EIO}}) {
    TransferTable table(1, 1_MiB);
    ASSERT_TRUE(table.submit(request_of(operation, kPage), file_of(1_MiB)));
    EXPECT_FALSE(table.advance(table.next(kNow), 0, kNow));
    EXPECT_EQ(only(table).error, error);
  }
}

TEST(Transfers, TryAgainWhenInterruptedWithinABound) {
  for (const auto operation : {IoOperation::read, IoOperation::write, IoOperation::flush}) {
    for (const int error : {EINTR, EAGAIN}) {
      TransferTable table(1, 1_MiB);
      ASSERT_TRUE(table.submit(request_of(operation, kPage), file_of(1_MiB)));
      const int slot = table.next(kNow);
      for (int i = 1; i < kMaxInterruptions; ++i) ASSERT_TRUE(table.advance(slot, -error, kNow));
      EXPECT_FALSE(table.advance(slot, -error, kNow));
      EXPECT_EQ(only(table).error, error);
    }
  }
}

// The first error is told, after the last transfer in flight; what was not started stays undone,
// and the next request is served.
TEST(Transfers, EndARequestAtItsFirstError) {
  TransferTable table(2, 4_KiB);
  ASSERT_TRUE(table.submit(request_of(IoOperation::write, 8 * kPage, 1), file_of(1_MiB)));
  ASSERT_TRUE(table.submit(request_of(IoOperation::read, kPage, 2), file_of(1_MiB)));
  const int first = table.next(kNow);
  const int second = table.next(kNow);
  EXPECT_EQ(table.next(kNow), -1);
  EXPECT_FALSE(table.advance(second, -ENOSPC, kNow));
  EXPECT_FALSE(table.has_completed());
  const int other = table.next(kNow);
  EXPECT_EQ(table.at(other).operation, IoOperation::read);
  EXPECT_FALSE(table.advance(first, -EIO, kLater));
  std::vector<Completion> completions;
  ASSERT_EQ(table.collect(completions), 1u);
  EXPECT_EQ(completions[0].ticket.value, 1u);
  EXPECT_EQ(completions[0].error, ENOSPC);
  EXPECT_EQ(completions[0].bytes, 0u);
  EXPECT_FALSE(table.advance(other, kPage, kLater));
  EXPECT_EQ(only(table).ticket.value, 2u);
}

TEST(Transfers, BoundWhatIsPendingRefusalsIncluded) {
  TransferTable table(1, 4_KiB);
  for (std::size_t i = 0; i < kMaxRequests; ++i) {
    const auto bytes = i % 2 == 0 ? kPage : 1;
    ASSERT_TRUE(table.submit(request_of(IoOperation::read, bytes), file_of(1_MiB)));
  }
  EXPECT_FALSE(table.submit(request_of(IoOperation::read, 1), file_of(1_MiB)));
  std::vector<Completion> completions;
  EXPECT_EQ(table.collect(completions), kMaxRequests / 2);
  EXPECT_TRUE(table.submit(request_of(IoOperation::read, kPage), file_of(1_MiB)));
}

// A drive that is full of work takes neither a slot nor a turn from another.
TEST(Transfers, ServeDrivesInTurnUpToTheDepthOfEach) {
  TransferTable table(2, 4_KiB, 3);
  EXPECT_EQ(table.depth(), 2u);
  EXPECT_EQ(table.capacity(), 6u);
  for (const std::uint32_t drive : {0u, 0u, 2u}) {
    ASSERT_TRUE(table.submit(request_of(IoOperation::read, 3 * kPage, drive),
                             file_of(1_MiB, kPage, drive)));
  }
  std::vector<std::uint64_t> order;
  std::vector<int> slots;
  for (int slot = table.next(kNow); slot >= 0; slot = table.next(kNow)) {
    slots.push_back(slot);
    order.push_back(table.at(slot).request);
  }
  EXPECT_EQ(order, (std::vector<std::uint64_t>{0, 2, 0, 2}));
  EXPECT_FALSE(table.advance(slots[3], kPage, kNow));  // of drive 2, which goes on alone
  const int next = table.next(kNow);
  ASSERT_GE(next, 0);
  EXPECT_EQ(table.at(next).request, 2u);
  EXPECT_EQ(table.next(kNow), -1);
}

TEST(Transfers, BoundWhatIsPendingDriveByDrive) {
  TransferTable table(1, 4_KiB, 2);
  const auto slow = file_of(1_MiB, kPage, 0);
  const auto fast = file_of(1_MiB, kPage, 1);
  for (std::size_t i = 0; i < kMaxRequests; ++i) {
    ASSERT_TRUE(table.submit(request_of(IoOperation::read, kPage), slow));
  }
  EXPECT_FALSE(table.submit(request_of(IoOperation::read, kPage), slow));
  for (std::size_t i = 0; i < kMaxRequests; ++i) {
    ASSERT_TRUE(table.submit(request_of(IoOperation::read, i % 2 == 0 ? kPage : 1), fast));
  }
  EXPECT_FALSE(table.submit(request_of(IoOperation::read, 1), fast));
  EXPECT_EQ(table.pending(), 2 * kMaxRequests);
  std::vector<Completion> completions;
  EXPECT_EQ(table.collect(completions), kMaxRequests / 2);
  EXPECT_TRUE(table.submit(request_of(IoOperation::read, kPage), fast));
  EXPECT_FALSE(table.submit(request_of(IoOperation::read, kPage), slow));
}

TEST(Transfers, ShareTheirLimitAmongDrives) {
  EXPECT_EQ(TransferTable(4096, 4_KiB).capacity(), kMaxTransfers);
  EXPECT_EQ(TransferTable(4096, 4_KiB, 3).depth(), kMaxTransfers / 3);
  EXPECT_EQ(TransferTable(4096, 4_KiB, 1000).drives(), kMaxDrives);
  EXPECT_LE(TransferTable(4096, 4_KiB, 1000).capacity(), kMaxTransfers);
  EXPECT_EQ(TransferTable(0, 4_KiB, 0).capacity(), 1u);
}

// A second try is due to each transfer once; not to flushes, nor to files that were never direct.
TEST(Transfers, BlameDirectOnce) {
  TransferTable table(2, 4_KiB);
  auto file = file_of(1_MiB);
  for (const bool direct : {true, false}) {
    file.direct = direct;
    ASSERT_TRUE(table.submit(request_of(IoOperation::write, 2 * kPage), file));
    const int first = table.next(kNow);
    const int second = table.next(kNow);
    EXPECT_EQ(table.may_blame_direct(first), direct);
    EXPECT_FALSE(table.may_blame_direct(first));
    EXPECT_EQ(table.may_blame_direct(second), direct);
    for (const int slot : {first, second}) EXPECT_FALSE(table.advance(slot, kPage, kLater));
    ASSERT_TRUE(table.submit(request_of(IoOperation::flush, 0), file));
    const int flush = table.next(kNow);
    EXPECT_FALSE(table.may_blame_direct(flush));
    EXPECT_FALSE(table.advance(flush, 0, kLater));
  }
}

}  // namespace
}  // namespace terrace
