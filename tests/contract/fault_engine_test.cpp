// Operations that fail on demand: exactly the planned ones, in the planned way.

#include <gtest/gtest.h>

#include <cerrno>

#include "nvme/engines.h"
#include "nvme/simulation.h"
#include "tests/contract/io_engine_contract.h"

namespace terrace {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kSize = 8 * kPage;

class FaultEngine : public testing::Test {
 protected:
  // One file of eight pages that hold 1, opened before the plan counts: that is call 1.
  void start(FaultPlan plan) {
    counters_ = std::make_shared<FaultCounters>();
    engine_ = make_fault_engine(make_memory_engine(), plan, counters_);
    file_ = engine_->open({.path = "file", .size = {kSize}});
  }

  Completion run(IoOperation operation, std::uint64_t bytes = kSize, std::uint64_t ticket = 9) {
    const IoRequest request{{ticket}, operation, file_, 0, buffer_.data(), bytes};
    EXPECT_TRUE(engine_->submit(request));
    EXPECT_EQ(engine_->pending(), 1u);
    std::vector<Completion> completions;
    EXPECT_EQ(engine_->reap(completions, 1s), 1u);
    EXPECT_EQ(engine_->pending(), 0u);
    if (completions.empty()) return {};
    EXPECT_EQ(completions.front().ticket.value, ticket);
    return completions.front();
  }

  void set(int value) { std::memset(buffer_.data(), value, kSize); }
  int page(std::uint64_t index) { return static_cast<int>(buffer_.data()[index * kPage]); }
  std::uint64_t counted(IoCall call) { return counters_->calls[static_cast<std::size_t>(call)]; }

  PageBuffer buffer_{kSize};
  std::shared_ptr<FaultCounters> counters_;
  std::unique_ptr<IoEngine> engine_;
  FileId file_;
};

TEST_F(FaultEngine, CountsEverythingOnce) {
  start({});
  for (const auto operation : {IoOperation::write, IoOperation::read, IoOperation::read}) {
    EXPECT_EQ(run(operation).error, 0);
  }
  EXPECT_EQ(run(IoOperation::flush).error, 0);
  engine_->remove("file");
  EXPECT_EQ(counters_->total, 6u);
  EXPECT_EQ(counted(IoCall::open), 1u);
  EXPECT_EQ(counted(IoCall::write), 1u);
  EXPECT_EQ(counted(IoCall::read), 2u);
  EXPECT_EQ(counted(IoCall::flush), 1u);
  EXPECT_EQ(counted(IoCall::remove), 1u);
  EXPECT_EQ(counters_->failed, 0u);
  EXPECT_TRUE(engine_->info().notes.empty());
}

TEST_F(FaultEngine, FailsOnceAndMovesNothing) {
  start({.at = 3, .error = ENOSPC});
  set(1);
  EXPECT_EQ(run(IoOperation::write).error, 0);
  set(2);
  const auto failed = run(IoOperation::write);
  EXPECT_EQ(failed.error, ENOSPC);
  EXPECT_EQ(failed.bytes, 0u);
  EXPECT_EQ(run(IoOperation::read).error, 0);
  EXPECT_EQ(page(0), 1);
  set(3);
  EXPECT_EQ(run(IoOperation::write).error, 0);
  EXPECT_EQ(counters_->failed, 1u);
  EXPECT_EQ(engine_->info().notes.size(), 1u);
}

TEST_F(FaultEngine, MovesAndThenFails) {
  start({.at = 2, .kind = FaultKind::error_after_move});
  set(4);
  const auto failed = run(IoOperation::write);
  EXPECT_EQ(failed.error, EIO);
  EXPECT_EQ(failed.bytes, 0u);
  set(0);
  EXPECT_EQ(run(IoOperation::read).error, 0);
  EXPECT_EQ(page(0), 4);
}

TEST_F(FaultEngine, CompletesShort) {
  start({.at = 2, .kind = FaultKind::short_completion, .persistent = true});
  set(5);
  auto completion = run(IoOperation::write, 5 * kPage);
  EXPECT_EQ(completion.error, 0);
  EXPECT_EQ(completion.bytes, 2 * kPage);
  completion = run(IoOperation::write, kPage);
  EXPECT_EQ(completion.error, 0);
  EXPECT_EQ(completion.bytes, 0u);
  EXPECT_EQ(run(IoOperation::read).bytes, kSize);
  EXPECT_EQ(page(1), 5);
  EXPECT_EQ(page(2), 0);
}

TEST_F(FaultEngine, LosesAnOperation) {
  start({.at = 2, .kind = FaultKind::lost});
  ASSERT_TRUE(engine_->submit({{1}, IoOperation::write, file_, 0, buffer_.data(), kSize}));
  std::vector<Completion> completions;
  const auto before = steady_clock().now();
  EXPECT_EQ(engine_->reap(completions, 20ms), 0u);
  EXPECT_GE(steady_clock().now() - before, 20ms);
  EXPECT_EQ(engine_->pending(), 1u);
  ASSERT_TRUE(engine_->submit({{2}, IoOperation::read, file_, 0, buffer_.data(), kSize}));
  EXPECT_EQ(engine_->reap(completions, 1s), 1u);
  EXPECT_EQ(completions.back().ticket.value, 2u);
  engine_->wake();
  EXPECT_EQ(engine_->reap(completions, Nanoseconds::max()), 0u);
  EXPECT_EQ(engine_->pending(), 1u);
  engine_->close(file_);
}

TEST_F(FaultEngine, BoundsWhatIsLost) {
  start({.at = 2, .kind = FaultKind::lost, .persistent = true});
  const IoRequest request{{1}, IoOperation::flush, file_};
  std::size_t taken = 0;
  while (taken < 100'000 && engine_->submit(request)) ++taken;
  EXPECT_LT(taken, 100'000u);
  EXPECT_EQ(engine_->pending(), taken);
}

TEST_F(FaultEngine, GoesOnFailingForOneKindOnly) {
  start({.at = 4, .persistent = true});
  EXPECT_EQ(run(IoOperation::write).error, 0);  // 2
  EXPECT_EQ(run(IoOperation::read).error, 0);
  EXPECT_EQ(run(IoOperation::write).error, EIO);
  EXPECT_EQ(run(IoOperation::read).error, 0);
  EXPECT_EQ(run(IoOperation::flush).error, 0);
  EXPECT_EQ(run(IoOperation::write).error, EIO);
  EXPECT_EQ(run(IoOperation::read).error, 0);
  EXPECT_EQ(counters_->failed, 2u);
}

TEST_F(FaultEngine, CountsOneKindOnly) {
  start({.at = 2, .only = IoCall::flush});
  EXPECT_EQ(run(IoOperation::flush).error, 0);
  EXPECT_EQ(run(IoOperation::write).error, 0);
  EXPECT_EQ(run(IoOperation::flush).error, EIO);
  EXPECT_EQ(run(IoOperation::flush).error, 0);
}

TEST_F(FaultEngine, FailsNames) {
  for (const auto kind : {FaultKind::error, FaultKind::lost, FaultKind::short_completion}) {
    EXPECT_THROW(start({.at = 1, .kind = kind}), Error);
  }
  start({.at = 1, .only = IoCall::remove, .error = EACCES});
  try {
    engine_->remove("file");
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_NE(std::string(error.what()).find("file failed: Permission denied"), std::string::npos);
  }
  EXPECT_TRUE(engine_->exists("file"));
  engine_->remove("file");
  EXPECT_FALSE(engine_->exists("file"));
}

// A refusal for want of capacity is not an operation, and the planned one stays the planned one.
TEST_F(FaultEngine, DoesNotCountWhatIsNotTaken) {
  start({});
  const IoRequest request{{1}, IoOperation::flush, file_};
  std::uint64_t taken = 0;
  while (engine_->submit(request)) ++taken;
  EXPECT_EQ(counters_->total, taken + 1);
}

}  // namespace
}  // namespace terrace
