// What the system may do to engines with real files while they work: refusals, storms of
// interruptions, short results, a drive that hangs. Each on io_uring and on threads.

#include <gtest/gtest.h>

#include <cerrno>

#include "nvme/transfers.h"
#include "tests/io/faulty_file_system.h"

namespace terrace {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kSize = 1 << 20;  // sixteen transfers

class Faults : public IoEngineContract {
 protected:
  void SetUp() override {
    if (!disk_.refusal().empty()) GTEST_SKIP() << disk_.refusal();
    IoEngineContract::SetUp();
    std::mt19937_64 random(11);
    fill(written_.span(), random);
  }
  void TearDown() override { engine_.reset(); }

  FileId open_file(const std::string& name = "file") {
    return engine_->open({.path = disk_ / name, .size = {kSize}});
  }
  int write(FileId file) { return run(IoOperation::write, file, 0, written_.data(), kSize).error; }
  int read(FileId file) { return run(IoOperation::read, file, 0, read_.data(), kSize).error; }
  void expect_round_trip(FileId file) {
    ASSERT_EQ(write(file), 0);
    std::memset(read_.data(), 0, kSize);
    ASSERT_EQ(read(file), 0);
    EXPECT_EQ(std::memcmp(read_.data(), written_.data(), kSize), 0);
  }

  FaultyFileSystem disk_;
  FaultOrders& orders_ = disk_.orders();
  FaultyFileSystem other_disk_;
  FaultyFileSystem plain_disk_{true};
  PageBuffer written_{kSize};
  PageBuffer read_{kSize};
};

TEST_P(Faults, AreNotThereAtFirst) {
  const auto file = open_file();
  EXPECT_TRUE(engine_->file_info(file).direct);
  expect_round_trip(file);
  EXPECT_EQ(run(IoOperation::flush, file, 0, nullptr, 0).error, 0);
}

TEST_P(Faults, DirectRefusedAtOpenMeansThePageCache) {
  orders_.direct_only = true;
  orders_.error = EINVAL;
  const auto notes = engine_->info().notes.size();
  auto file = open_file();
  for (int i = 0; i < 2; ++i) {
    EXPECT_FALSE(engine_->file_info(file).direct);
    EXPECT_NE(engine_->file_info(file).direct_note.find("refuses direct"), std::string::npos);
    expect_round_trip(file);
    engine_->close(file);
    file = engine_->open({.path = disk_ / "file", .mode = IoFileMode::existing});
  }
  EXPECT_EQ(engine_->info().notes.size(), notes);
}

// With several transfers in flight: one downgrade, said once, and every transfer is done.
TEST_P(Faults, DirectRefusedWhileWorkingMeansThePageCacheFromThenOn) {
  for (const auto operation : {IoOperation::write, IoOperation::read}) {
    const auto name = operation == IoOperation::write ? "written" : "read";
    const auto file = open_file(name);
    expect_round_trip(file);
    const auto before = engine_->info().notes.size();
    orders_.direct_only = true;
    orders_.pass_first = 5;
    orders_.error = EINVAL;
    auto& buffer = operation == IoOperation::write ? written_ : read_;
    EXPECT_EQ(run(operation, file, 0, buffer.data(), kSize).error, 0);
    expect_round_trip(file);
    const auto info = engine_->file_info(file);
    EXPECT_FALSE(info.direct);
    EXPECT_NE(info.direct_note.find("began to refuse direct"), std::string::npos);
    const auto notes = engine_->info().notes;
    ASSERT_EQ(notes.size(), before + 1);
    EXPECT_NE(notes.back().find(disk_ / name), std::string::npos) << notes.back();
    disk_.relent();
  }
}

TEST_P(Faults, ARefusalThatIsNotForBeingDirectIsTold) {
  const auto file = open_file();
  ASSERT_EQ(write(file), 0);
  orders_.error = EINVAL;
  EXPECT_EQ(read(file), EINVAL);
  EXPECT_EQ(read(file), EINVAL);
  disk_.relent();
  expect_round_trip(file);
}

TEST_P(Faults, StormsOfInterruptionsAreSatOut) {
  const auto file = open_file();
  for (const int error : {EINTR, EAGAIN}) {
    disk_.relent();
    orders_.pass_every = 20;
    orders_.error = error;
    expect_round_trip(file);
    EXPECT_GE(orders_.calls, 32u * 20 / 2) << error;
  }
}

TEST_P(Faults, StormsWithoutEndAreToldAsErrors) {
  const auto file = open_file();
  for (const int error : {EINTR, EAGAIN}) {
    if (error == EAGAIN && GetParam().name == "io_uring") continue;  // the kernel has no bound
    orders_.error = error;
    EXPECT_EQ(write(file), error);
    EXPECT_EQ(read(file), error);
    EXPECT_LE(orders_.calls, 2u * 16 * kMaxInterruptions);
    disk_.relent();
    expect_round_trip(file);
  }
}

TEST_P(Faults, ShortResultsAreContinued) {
  if (GetParam().name == "io_uring") {
    GTEST_SKIP() << "the kernel goes on by itself, and on FUSE at the wrong offset";
  }
  const auto file =
      engine_->open({.path = plain_disk_ / "file", .size = {kSize}});
  auto& orders = plain_disk_.orders();
  orders.calls = 0;
  orders.shorten = true;
  expect_round_trip(file);
  EXPECT_GT(orders.calls, 64u);
}

TEST_P(Faults, NothingReadIsTheEnd) {
  const auto file = open_file();
  ASSERT_EQ(write(file), 0);
  orders_.end = kSize / 2;
  EXPECT_EQ(read(file), ENODATA);
  disk_.relent();
  ASSERT_EQ(read(file), 0);
  EXPECT_EQ(std::memcmp(read_.data(), written_.data(), kSize), 0);
}

// The error is told as it is, the rest of the file keeps what it had, and the engine goes on.
TEST_P(Faults, FailedWritesLeaveTheRestAlone) {
  const auto file = open_file();
  const PageBuffer changed(kSize);
  for (const int error : {ENOSPC, EIO, EDQUOT, EFBIG}) {
    expect_round_trip(file);
    orders_.writes_only = true;
    orders_.from = kSize / 2;
    orders_.error = error;
    const auto failed = run(IoOperation::write, file, 0, changed.data(), kSize);
    EXPECT_EQ(failed.error, error);
    EXPECT_EQ(failed.bytes, 0u);
    disk_.relent();
    ASSERT_EQ(read(file), 0);
    EXPECT_EQ(std::memcmp(read_.data() + kSize / 2, written_.data() + kSize / 2, kSize / 2), 0);
  }
  expect_round_trip(file);
}

// All the transfers that one drive takes hang, flushes on threads of the kernel; the other drive is
// as fast as ever.
TEST_P(Faults, ADriveThatHangsHoldsUpNoOther) {
  IoEngineOptions options = GetParam().options;
  options.queue_depth = 32;
  engine_ = make_io_engine(options);
  const auto slow_file = open_file();
  const auto fast_file =
      engine_->open({.path = other_disk_ / "file", .size = {kSize}, .drive = 1});
  for (const auto operation : {IoOperation::write, IoOperation::flush}) {
    orders_.hang = true;
    for (std::uint64_t i = 0; i < 40; ++i) {
      ASSERT_TRUE(engine_->submit({{i}, operation, slow_file, 0, written_.data(), 64 << 10}));
    }
    engine_->flush();
    std::vector<Completion> completions;
    for (std::uint64_t i = 100; i < 120; ++i) {
      ASSERT_TRUE(engine_->submit({{i}, operation, fast_file, 0, written_.data(), 64 << 10}));
      if (engine_->reap(completions, 10s) == 0) break;
      EXPECT_EQ(completions.back().ticket.value, i);
    }
    EXPECT_EQ(completions.size(), 20u) << (operation == IoOperation::flush);
    orders_.hang = false;
    EXPECT_EQ(drain().size(), 40u);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Engines, Faults,
    testing::Values(IoEngineCase{"io_uring", io_options(IoEngineKind::io_uring)},
                    IoEngineCase{"threads", io_options(IoEngineKind::threads)}),
    io_engine_name);

}  // namespace
}  // namespace terrace
