// An engine that is held back: never faster than asked for, and each drive on its own.

#include <gtest/gtest.h>

#include <thread>

#include "tests/contract/io_engine_contract.h"

namespace terrace {
namespace {

using namespace std::chrono_literals;

class ThrottledIo : public IoEngineContract {};

TEST_P(ThrottledIo, IsNoFasterThanAskedFor) {
  const auto file = open(8_MiB);
  PageBuffer buffer(8 << 20);
  const auto before = steady_clock().now();
  for (std::uint64_t i = 0; i < 8; ++i) {
    const auto operation = i % 2 == 0 ? IoOperation::read : IoOperation::write;
    const auto offset = i << 20;
    ASSERT_TRUE(engine_->submit({{i}, operation, file, offset, buffer.data() + offset, 1 << 20}));
  }
  const auto completions = drain();
  // Reads and writes overlap: 4 MiB each way at 0.1 GB/s.
  const auto least = from_seconds((4 << 20) / 0.1e9);
  EXPECT_GE(steady_clock().now() - before, least);
  for (const auto& [ticket, completion] : completions) {
    EXPECT_EQ(completion.error, 0) << ticket;
    EXPECT_GE(completion.end - completion.start, least / 4) << ticket;
  }
}

// The wake comes while a completion is held back.
TEST_P(ThrottledIo, WakesBeforeTheDeadline) {
  const auto file = open(64_MiB);
  PageBuffer buffer(64 << 20);
  ASSERT_TRUE(engine_->submit({{1}, IoOperation::read, file, 0, buffer.data(), 64 << 20}));
  std::thread waker([&] {
    std::this_thread::sleep_for(10ms);
    engine_->wake();
  });
  std::vector<Completion> completions;
  EXPECT_EQ(engine_->reap(completions, Nanoseconds::max()), 0u);
  waker.join();
  EXPECT_EQ(engine_->pending(), 1u);
  while (engine_->pending() > 0) engine_->reap(completions, 100ms);  // the buffer goes first
}

// Two drives take as long as one: each has a pacer of its own.
TEST_P(ThrottledIo, PacesEachDriveOnItsOwn) {
  PageBuffer buffer(8 << 20);
  std::vector<FileId> files;
  for (const std::uint32_t drive : {0u, 1u}) {
    files.push_back(engine_->open(
        {.path = directory_ / std::to_string(drive), .size = 4_MiB, .drive = drive}));
  }
  for (std::uint64_t i = 0; i < 8; ++i) {
    ASSERT_TRUE(engine_->submit({{i}, IoOperation::write, files[i % 2], (i / 2) << 20,
                                 buffer.data() + (i << 20), 1 << 20}));
  }
  Nanoseconds first = Nanoseconds::max();
  Nanoseconds last{0};
  for (const auto& [ticket, completion] : drain()) {
    EXPECT_EQ(completion.error, 0) << ticket;
    first = std::min(first, completion.start);
    last = std::max(last, completion.end);
  }
  const auto alone = from_seconds((4 << 20) / 0.1e9);
  EXPECT_GE(last - first, alone - 1ms);
  EXPECT_LT(last - first, alone * 3 / 2);
}

INSTANTIATE_TEST_SUITE_P(
    Engines, ThrottledIo,
    testing::Values(IoEngineCase{"threads", io_options(IoEngineKind::threads, {.gb_s = 0.1})},
                    IoEngineCase{"memory", io_options(IoEngineKind::memory, {.gb_s = 0.1}), false},
                    IoEngineCase{"io_uring", io_options(IoEngineKind::io_uring, {.gb_s = 0.1})}),
    io_engine_name);

}  // namespace
}  // namespace terrace
