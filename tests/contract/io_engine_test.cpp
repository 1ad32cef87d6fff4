// The contract of IoEngine, for every implementation. Nothing here knows which one it talks to.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <iterator>
#include <thread>

#include "tests/contract/io_engine_contract.h"

namespace terrace {
namespace {

using namespace std::chrono_literals;

TEST_P(IoEngineContract, SaysWhatItIs) {
  EXPECT_FALSE(engine_->info().engine.empty());
  const auto file = open(1_MiB);
  const auto info = engine_->file_info(file);
  EXPECT_EQ(info.path, directory_ / "file");
  EXPECT_EQ(info.size, 1_MiB);
  EXPECT_GE(info.alignment, kPage);
  EXPECT_EQ(info.alignment & (info.alignment - 1), 0u);
  EXPECT_EQ(info.direct_note.empty(), info.direct);
}

// Lengths below, at and above the block of 64 KiB, at random offsets, against a copy in memory.
TEST_P(IoEngineContract, RoundTripsEveryLength) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  constexpr std::uint64_t kSize = 8 << 20;
  const auto file = open({kSize});
  PageBuffer mirror(kSize);
  ASSERT_EQ(run(IoOperation::write, file, 0, mirror.data(), kSize).error, 0);
  PageBuffer buffer(kSize);
  for (const std::uint64_t pages : {1u, 2u, 3u, 13u, 15u, 16u, 17u, 31u, 32u, 33u, 97u, 257u, 1021u,
                                    2048u}) {
    const auto bytes = pages * kPage;
    const auto offset = random() % ((kSize - bytes) / kPage + 1) * kPage;
    const auto from = random() % ((kSize - bytes) / kPage + 1) * kPage;
    const auto part = buffer.span().subspan(from, bytes);
    fill(part, random);
    std::memcpy(mirror.data() + offset, part.data(), bytes);
    const auto wrote = run(IoOperation::write, file, offset, part.data(), bytes);
    EXPECT_EQ(wrote.error, 0);
    EXPECT_EQ(wrote.bytes, bytes);
    const auto read = run(IoOperation::read, file, 0, buffer.data(), kSize);
    EXPECT_EQ(read.error, 0);
    EXPECT_EQ(read.bytes, kSize);
    ASSERT_EQ(std::memcmp(buffer.data(), mirror.data(), kSize), 0) << pages << " at " << offset;
    const auto again = random() % ((kSize - bytes) / kPage + 1) * kPage;
    EXPECT_EQ(run(IoOperation::read, file, again, buffer.data(), bytes).error, 0);
    ASSERT_EQ(std::memcmp(buffer.data(), mirror.data() + again, bytes), 0) << pages;
  }
}

// More requests than any engine takes: it refuses, loses none and serves the rest later.
TEST_P(IoEngineContract, RefusesWhatExceedsItsCapacityAndLosesNothing) {
  constexpr std::uint64_t kCount = 2500;
  std::mt19937_64 random(1);
  const auto file = open({kCount * kPage});
  PageBuffer written(kCount * kPage);
  PageBuffer read(kCount * kPage);
  fill(written.span(), random);
  for (const auto operation : {IoOperation::write, IoOperation::read}) {
    auto* data = operation == IoOperation::write ? written.data() : read.data();
    std::map<std::uint64_t, Completion> done;
    std::uint64_t refused = 0;
    for (std::uint64_t i = 0; i < kCount; ++i) {
      const auto offset = (i * 1009 % kCount) * kPage;
      const IoRequest request{{i}, operation, file, offset, data + offset, kPage};
      while (!engine_->submit(request)) {
        ++refused;
        ASSERT_NO_FATAL_FAILURE(reap_into(done));
      }
    }
    done.merge(drain());
    EXPECT_GT(refused, 0u);
    ASSERT_EQ(done.size(), kCount);
    for (const auto& [ticket, completion] : done) {
      EXPECT_EQ(completion.error, 0) << ticket;
      EXPECT_EQ(completion.bytes, kPage) << ticket;
    }
  }
  EXPECT_EQ(std::memcmp(read.data(), written.data(), kCount * kPage), 0);
}

TEST_P(IoEngineContract, TakesARequestOfAnySizeWhenNoneIsPending) {
  constexpr std::uint64_t kSize = 64 << 20;
  const auto file = open({kSize});
  PageBuffer buffer(kSize);
  EXPECT_EQ(run(IoOperation::write, file, 0, buffer.data(), kSize).bytes, kSize);
  EXPECT_EQ(run(IoOperation::read, file, 0, buffer.data(), kSize).bytes, kSize);
  EXPECT_EQ(run(IoOperation::read, file, 0, buffer.data(), 0).error, 0);
}

TEST_P(IoEngineContract, RefusesMisalignedRequests) {
  const auto file = open(1_MiB);
  PageBuffer buffer(2 * kPage);
  for (const auto operation : {IoOperation::read, IoOperation::write}) {
    EXPECT_EQ(run(operation, file, 512, buffer.data(), kPage).error, EINVAL);
    EXPECT_EQ(run(operation, file, 0, buffer.data() + 1, kPage).error, EINVAL);
    for (const std::uint64_t bytes : {1u, 511u, 512u, 513u, 4095u, 4097u}) {
      const auto completion = run(operation, file, 0, buffer.data(), bytes);
      EXPECT_EQ(completion.error, EINVAL);
      EXPECT_EQ(completion.bytes, 0u);
    }
  }
  EXPECT_EQ(run(IoOperation::read, file, 0, buffer.data(), kPage).error, 0);
}

TEST_P(IoEngineContract, EndsAtTheEndOfTheFile) {
  const auto file = open(1_MiB);
  PageBuffer buffer(2 << 20);
  constexpr std::uint64_t kSize = 1 << 20;
  EXPECT_EQ(run(IoOperation::read, file, kSize, buffer.data(), kPage).error, ENODATA);
  EXPECT_EQ(run(IoOperation::read, file, kSize - kPage, buffer.data(), 2 * kPage).error, ENODATA);
  EXPECT_EQ(run(IoOperation::read, file, 0, buffer.data(), 2 * kSize).error, ENODATA);
  EXPECT_EQ(run(IoOperation::read, file, ~kPage + 1, buffer.data(), 2 * kPage).error, ENODATA);
  EXPECT_EQ(run(IoOperation::write, file, kSize, buffer.data(), kPage).error, ENOSPC);
  EXPECT_EQ(run(IoOperation::read, file, kSize - kPage, buffer.data(), kPage).error, 0);
}

// Somebody cuts the file short behind the engine's back, in the middle of a block of a request.
TEST_P(IoEngineContract, ReportsAFileThatIsShorterThanItWas) {
  if (!GetParam().real_files) GTEST_SKIP() << "its files are in memory";
  const auto file = open(1_MiB);
  PageBuffer buffer(1 << 20);
  for (const off_t left : {100 * 1024, 100 * 1024 + 77, 0}) {
    ASSERT_EQ(::truncate((directory_ / "file").c_str(), left), 0);
    const auto completion = run(IoOperation::read, file, 0, buffer.data(), 1 << 20);
    EXPECT_EQ(completion.error, ENODATA) << left;
    EXPECT_EQ(completion.bytes, 0u);
  }
}

// A write that the system refuses half way: the second transfer is short, then fails.
TEST_P(IoEngineContract, SurvivesAWriteThatFails) {
  if (!GetParam().real_files) GTEST_SKIP() << "its files are in memory";
  std::mt19937_64 random(2);
  const auto file = open(1_MiB);
  PageBuffer old_data(1 << 20);
  fill(old_data.span(), random);
  ASSERT_EQ(run(IoOperation::write, file, 0, old_data.data(), 1 << 20).error, 0);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit low{96 << 10, limit.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);
  PageBuffer new_data(256 << 10);
  fill(new_data.span(), random);
  const auto failed = run(IoOperation::write, file, 0, new_data.data(), 256 << 10);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(failed.error, EFBIG);
  PageBuffer found(1 << 20);
  EXPECT_EQ(run(IoOperation::read, file, 0, found.data(), 1 << 20).error, 0);
  EXPECT_EQ(std::memcmp(found.data() + (96 << 10), old_data.data() + (96 << 10),
                        found.span().size() - (96 << 10)), 0);
  EXPECT_EQ(run(IoOperation::write, file, 0, new_data.data(), 256 << 10).error, 0);
}

TEST_P(IoEngineContract, Flushes) {
  const auto file = open(1_MiB);
  PageBuffer buffer(1 << 20);
  ASSERT_EQ(run(IoOperation::write, file, 0, buffer.data(), 1 << 20).error, 0);
  const auto completion = run(IoOperation::flush, file, 0, nullptr, 0);
  EXPECT_EQ(completion.error, 0);
  EXPECT_EQ(completion.bytes, 0u);
}

TEST_P(IoEngineContract, HonoursTimeouts) {
  std::vector<Completion> completions;
  for (const Nanoseconds timeout : {Nanoseconds{0}, Nanoseconds{-5}, Nanoseconds{30ms}}) {
    const auto before = steady_clock().now();
    EXPECT_EQ(engine_->reap(completions, timeout), 0u);
    const auto passed = steady_clock().now() - before;
    EXPECT_GE(passed, timeout);
    EXPECT_LT(passed, 10s);
  }
}

TEST_P(IoEngineContract, WakesABlockedReap) {
  for (int i = 0; i < 20; ++i) {
    std::thread waker([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(i % 3));
      engine_->wake();
    });
    std::vector<Completion> completions;
    EXPECT_EQ(engine_->reap(completions, Nanoseconds::max()), 0u);
    waker.join();
  }
}

TEST_P(IoEngineContract, RemembersAWake) {
  engine_->wake();
  engine_->wake();
  std::vector<Completion> completions;
  EXPECT_EQ(engine_->reap(completions, Nanoseconds::max()), 0u);
}

// Wakes while operations complete: neither may swallow the other.
TEST_P(IoEngineContract, WakesAmongCompletions) {
  const auto file = open(1_MiB);
  PageBuffer buffer(1 << 20);
  std::atomic<bool> stop = false;
  std::thread waker([&] {
    while (!stop) engine_->wake();
  });
  std::map<std::uint64_t, int> seen;
  for (std::uint64_t i = 0; i < 200; ++i) {
    const auto operation = i % 2 == 0 ? IoOperation::write : IoOperation::read;
    while (!engine_->submit({{i}, operation, file, 0, buffer.data(), 4 * kPage})) {
    }
    std::vector<Completion> completions;
    while (engine_->pending() > 0) engine_->reap(completions, 1s);
    for (const auto& completion : completions) ++seen[completion.ticket.value];
  }
  stop = true;
  waker.join();
  EXPECT_EQ(seen.size(), 200u);
}

TEST_P(IoEngineContract, MovesRegisteredMemory) {
  std::mt19937_64 random(3);
  const auto file = open(1_MiB);
  PageBuffer first(1 << 20);
  PageBuffer second(1 << 20);
  fill(first.span(), random);
  for (const auto buffer : {first.span(), second.span()}) {
    engine_->register_buffers(std::span(&buffer, 1));
  }
  engine_->register_buffers({});
  ASSERT_EQ(run(IoOperation::write, file, 0, first.data(), 1 << 20).error, 0);
  ASSERT_EQ(run(IoOperation::read, file, 0, second.data(), 1 << 20).error, 0);
  EXPECT_EQ(std::memcmp(first.data(), second.data(), 1 << 20), 0);
}

TEST_P(IoEngineContract, ReusesFilesUpToItsLimit) {
  std::vector<FileId> files;
  for (std::size_t i = 0; i < kMaxIoFiles; ++i) files.push_back(open(4_KiB, std::to_string(i)));
  EXPECT_THROW(open(4_KiB, "more"), Error);
  engine_->close(files[5]);
  const auto again = open(64_KiB, "again");
  PageBuffer buffer(64 << 10);
  EXPECT_EQ(run(IoOperation::write, again, 0, buffer.data(), 64 << 10).error, 0);
}

// The memory is the kernel's until the operation has ended: destruction has to wait for that.
TEST_P(IoEngineContract, WaitsForItsOperationsWhenDestroyed) {
  constexpr std::uint64_t kSize = 8 << 20;
  std::mt19937_64 random(4);
  const auto file = open({kSize});
  PageBuffer buffer(kSize);
  fill(buffer.span(), random);
  for (std::uint64_t i = 0; i < 8; ++i) {
    const auto offset = i * (kSize / 8);
    ASSERT_TRUE(engine_->submit({{i}, IoOperation::write, file, offset, buffer.data() + offset,
                                 kSize / 8}));
  }
  engine_->flush();
  EXPECT_EQ(engine_->pending(), 8u);
  engine_.reset();
  if (!GetParam().real_files) return;
  std::ifstream stream(directory_ / "file", std::ios::binary);
  const std::vector<char> found{std::istreambuf_iterator<char>(stream), {}};
  ASSERT_EQ(found.size(), kSize);
  EXPECT_EQ(std::memcmp(found.data(), buffer.data(), kSize), 0);
}

INSTANTIATE_TEST_SUITE_P(Engines, IoEngineContract, testing::ValuesIn(io_engine_kinds()),
                         io_engine_name);

}  // namespace
}  // namespace terrace
