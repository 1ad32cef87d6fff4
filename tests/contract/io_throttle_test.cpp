// An engine that is held back: never faster than asked for, and each drive on its own.

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "nvme/engines.h"
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
  IoEngineOptions options = GetParam().options;
  options.read = {.latency_us = 1e6};
  engine_ = make_io_engine(options);
  const auto file = open({kPage});
  PageBuffer buffer(kPage);
  ASSERT_TRUE(engine_->submit({{1}, IoOperation::read, file, 0, buffer.data(), kPage}));
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

INSTANTIATE_TEST_SUITE_P(
    Engines, ThrottledIo,
    testing::Values(IoEngineCase{"threads", io_options(IoEngineKind::threads, {.gb_s = 0.1})},
                    IoEngineCase{"memory", io_options(IoEngineKind::memory, {.gb_s = 0.1}), false},
                    IoEngineCase{"io_uring", io_options(IoEngineKind::io_uring, {.gb_s = 0.1})}),
    io_engine_name);

// Stands still but for the test, an hour ahead of the clock that the engine within looks at.
class TestClock final : public Clock {
 public:
  Nanoseconds now() const override { return now_; }
  void sleep_until(Nanoseconds deadline) override { now_ = std::max(now_, deadline); }

 private:
  Nanoseconds now_ = steady_clock().now() + std::chrono::hours(1);
};

// Two drives take as long as one, for reads and for writes: each has pacers of its own.
TEST(ThrottledDrives, ArePacedEachOnItsOwn) {
  TestClock clock;
  const Throttle read{.latency_us = 1000};
  const Throttle write{.latency_us = 3000};
  const auto engine = make_throttled_engine(make_memory_engine(2), read, write, clock);
  PageBuffer buffer(kPage);
  std::uint64_t ticket = 0;
  for (const std::uint32_t drive : {0u, 1u}) {
    const auto file =
        engine->open({.path = std::to_string(drive), .size = {kPage}, .drive = drive});
    for (const auto operation : {IoOperation::read, IoOperation::write}) {
      for (int i = 0; i < 4; ++i) {
        ASSERT_TRUE(engine->submit({{ticket++}, operation, file, 0, buffer.data(), kPage}));
      }
    }
  }
  std::vector<Completion> completions;
  const auto start = clock.now();
  for (int ms = 0; ms <= 12; ++ms) {
    clock.sleep_until(start + std::chrono::milliseconds(ms));
    engine->reap(completions, 0ms);
    const auto due = 2 * (std::min(ms, 4) + ms / 3);
    EXPECT_EQ(completions.size(), static_cast<std::size_t>(due)) << ms << " ms";
  }
  EXPECT_EQ(engine->pending(), 0u);
}

}  // namespace
}  // namespace terrace
