#include "nvme/measured_drive.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "nvme/engines.h"
#include "terrace/error.h"

namespace terrace::bench {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::uint64_t kMiB = 1 << 20;

// A directory beside the tests: on a real file system, unlike /tmp on many machines.
class OnADrive : public testing::Test {
 protected:
  OnADrive() : place_(fs::current_path() / ("measured_" + std::to_string(::getpid()))) {
    fs::create_directories(place_);
  }
  ~OnADrive() override { fs::remove_all(place_); }

  DriveOptions options() const {
    DriveOptions options;
    options.path = place_.string();
    options.size = 64_MiB;
    options.buffer_bytes = 16 * kMiB;
    options.helper_buffer_bytes = 8 * kMiB;
    return options;
  }
  std::string file(const std::string& name) const { return (place_ / name).string(); }

  fs::path place_;
};

class Descriptor {
 public:
  explicit Descriptor(const std::string& path)
      : value_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    EXPECT_GE(value_, 0) << path;
  }
  ~Descriptor() { ::close(value_); }
  Descriptor(const Descriptor&) = delete;
  int get() const { return value_; }
  void write(std::uint64_t bytes) const {
    const std::vector<char> data(kMiB, 'x');
    for (std::uint64_t done = 0; done < bytes; done += kMiB) {
      ASSERT_EQ(::pwrite(value_, data.data(), kMiB, static_cast<off_t>(done)), kMiB);
    }
    ASSERT_EQ(::fsync(value_), 0);
  }

 private:
  int value_;
};

TEST_F(OnADrive, EveryPatternMovesBytesAndTheDataIsRight) {
  MeasuredDrive drive(options());
  EXPECT_FALSE(drive.can({Pattern::read, kMiB, 1, 1})) << "nothing is written yet";
  drive.fill(20 * kMiB, kMiB, 4, seconds(60));
  EXPECT_EQ(drive.written_bytes(), 20 * kMiB);
  const auto first = drive.fill(~std::uint64_t{0} / 2, kMiB, 4, seconds(60));
  EXPECT_EQ(drive.written_bytes(), 64 * kMiB);
  EXPECT_EQ(first.moved.written, 44 * kMiB);
  for (const auto pattern : kPatterns) {
    if (pattern == Pattern::first_write) continue;
    const Cell cell{pattern, 256 * 1024, 4, 1};
    ASSERT_TRUE(drive.can(cell));
    // So many bytes, however long they take: each pattern has come to its writes by then.
    const auto sample =
        drive.measure(cell, {milliseconds(0), seconds(60), Nanoseconds{0}, 96 * kMiB});
    EXPECT_TRUE(sample.complete) << to_string(pattern);
    EXPECT_GT(sample.gb_s, 0) << to_string(pattern);
    EXPECT_EQ(sample.write.count() > 0, writes(pattern)) << to_string(pattern);
    EXPECT_EQ(sample.moved.written > 0, writes(pattern));
    EXPECT_GT(sample.cpu_seconds_per_gb, 0);
  }
  EXPECT_EQ(drive.verify(64), "");
  EXPECT_TRUE(fs::is_empty(place_)) << "the scratch file has no name";
}

TEST_F(OnADrive, SeveralThreadsWorkOnOneFile) {
  MeasuredDrive drive(options());
  drive.fill(64 * kMiB, kMiB, 4, seconds(60));
  const Cell cell{Pattern::mix, 256 * 1024, 2, 3};
  EXPECT_FALSE(drive.can(cell));
  drive.prepare_threads(3);
  ASSERT_TRUE(drive.can(cell));
  const auto sample = drive.measure(cell, {milliseconds(5), milliseconds(30)});
  EXPECT_GT(sample.read_gb_s, 0);
  EXPECT_EQ(drive.verify(16), "");
  EXPECT_EQ(drive.claimed().written, 64 * kMiB + sample.moved.written);
}

TEST_F(OnADrive, StopsWhenAsked) {
  std::atomic<bool> stop{false};
  auto wanted = options();
  wanted.stop = &stop;
  MeasuredDrive drive(wanted);
  drive.fill(64 * kMiB, kMiB, 4, seconds(60));
  drive.start({Pattern::read, kMiB, 4, 1}, {milliseconds(0), seconds(600)});
  stop = true;
  EXPECT_FALSE(drive.finish().complete);
}

TEST_F(OnADrive, BoundsWhatItWrites) {
  MeasuredDrive drive(options());
  drive.fill(64 * kMiB, kMiB, 4, seconds(60));
  const auto sample = drive.measure({Pattern::sustained_write, kMiB, 4, 1},
                                    {milliseconds(0), seconds(60), milliseconds(1), 100 * kMiB});
  EXPECT_EQ(sample.moved.written, 100 * kMiB);
  EXPECT_GT(sample.timeline.size(), 2U);
}

// A throttle of 0.2 GB/s in front of the engine is measured as that.
TEST_F(OnADrive, AThrottleIsMeasuredAtItsSpeed) {
  auto throttled = options();
  throttled.engine.read.gb_s = 0.2;
  throttled.engine.write.gb_s = 0.1;
  MeasuredDrive drive(throttled);
  drive.fill(16 * kMiB, kMiB, 4, seconds(60));
  const Timing timing{milliseconds(50), milliseconds(500)};
  EXPECT_NEAR(drive.measure({Pattern::read, 256 * 1024, 32, 1}, timing).gb_s, 0.2, 0.01);
  EXPECT_NEAR(drive.measure({Pattern::overwrite, 256 * 1024, 32, 1}, timing).gb_s, 0.1, 0.005);
}

TEST_F(OnADrive, WrongDataIsFound) {
  MeasuredDrive drive(options());
  drive.fill(64 * kMiB, kMiB, 4, seconds(60));
  const Descriptor other(drive.file().path);
  const std::vector<char> data(4096, 'x');
  ASSERT_EQ(::pwrite(other.get(), data.data(), data.size(), 5 * kMiB + 8192), 4096);
  ASSERT_EQ(::fsync(other.get()), 0);
  EXPECT_NE(drive.verify(64), "");
}

TEST_F(OnADrive, RefusesSparseAndPreallocatedFiles) {
  const Descriptor sparse(file("sparse"));
  ASSERT_EQ(::ftruncate(sparse.get(), 32 * kMiB), 0);
  const auto holes = file_extents(file("sparse"), 32 * kMiB);
  if (!holes.known) GTEST_SKIP() << "this file system does not tell its extents";
  EXPECT_EQ(holes.holes, 32 * kMiB);
  EXPECT_EQ(refuse_extents(holes, 32 * kMiB)->kind, "sparse");

  const Descriptor reserved(file("reserved"));
  if (::fallocate(reserved.get(), 0, 0, 32 * kMiB) == 0) {
    EXPECT_EQ(refuse_extents(file_extents(file("reserved"), 32 * kMiB), 32 * kMiB)->kind,
              "preallocated");
  }

  const Descriptor written(file("written"));
  written.write(32 * kMiB);
  const auto extents = file_extents(file("written"), 32 * kMiB);
  EXPECT_EQ(extents.written, 32 * kMiB);
  EXPECT_FALSE(refuse_extents(extents, 32 * kMiB));
}

TEST_F(OnADrive, RefusesACachedFile) {
  const Descriptor cached(file("cached"));
  cached.write(16 * kMiB);
  const auto bytes = cached_bytes(file("cached"), 16 * kMiB);
  if (!bytes) GTEST_SKIP() << "neither cachestat nor mincore works here";
  EXPECT_EQ(refuse_cached(bytes, 16 * kMiB)->kind, "cached");
  MeasuredDrive drive(options());
  drive.fill(64 * kMiB, kMiB, 4, seconds(60));
  if (!drive.file().direct) GTEST_SKIP() << "no direct I/O here";
  EXPECT_FALSE(drive.refuse_file()) << drive.refuse_file()->reason;
}

TEST_F(OnADrive, AFileThatIsThereIsOnlyRead) {
  const Descriptor written(file("written"));
  written.write(32 * kMiB);
  ::posix_fadvise(written.get(), 0, 0, POSIX_FADV_DONTNEED);
  auto there = options();
  there.path = file("written");
  MeasuredDrive drive(there);
  EXPECT_TRUE(drive.read_only());
  EXPECT_EQ(drive.written_bytes(), 32 * kMiB);
  EXPECT_FALSE(drive.can({Pattern::overwrite, kMiB, 1, 1}));
  const auto sample =
      drive.measure({Pattern::read, kMiB, 2, 1}, {milliseconds(0), milliseconds(20)});
  EXPECT_GT(sample.read_gb_s, 0);
  EXPECT_EQ(sample.moved.written, 0U);
  EXPECT_EQ(drive.verify(4), "");
  EXPECT_EQ(fs::file_size(file("written")), 32 * kMiB);
}

TEST_F(OnADrive, ARefusedDirectoryLeavesNothing) {
  auto wrong = options();
  wrong.path = file("nowhere");
  EXPECT_THROW(MeasuredDrive{wrong}, Error);
  auto large = options();
  large.size = {std::uint64_t{1} << 60};
  EXPECT_THROW(MeasuredDrive{large}, Error);
  EXPECT_TRUE(fs::is_empty(place_));
}

TEST(Proof, CountersBelowTheClaimAreRefused) {
  const MovedBytes claimed{100 * kMiB, 200 * kMiB};
  EXPECT_FALSE(refuse_counters({claimed, MovedBytes{100 * kMiB, 260 * kMiB}, {}})) << "others too";
  EXPECT_FALSE(refuse_counters({claimed, {}, {}})) << "unknown";
  EXPECT_FALSE(refuse_counters({{kMiB, kMiB}, MovedBytes{}, {}})) << "too little to tell";
  const auto reads = refuse_counters({claimed, MovedBytes{50 * kMiB, 200 * kMiB}, {}});
  ASSERT_TRUE(reads);
  EXPECT_EQ(reads->kind, "not_the_drive");
  EXPECT_NE(reads->reason.find("on the drive"), std::string::npos) << reads->reason;
  const auto writes = refuse_counters({claimed, {}, MovedBytes{100 * kMiB, kMiB}});
  ASSERT_TRUE(writes);
  EXPECT_NE(writes->reason.find("for this process"), std::string::npos) << writes->reason;
}

TEST(Proof, SpeedsAboveTheLinkAreRefused) {
  EXPECT_FALSE(refuse_ceiling(100, std::nullopt));
  EXPECT_FALSE(refuse_ceiling(7.9, 7.877));
  EXPECT_EQ(refuse_ceiling(8.2, 7.877)->kind, "above_ceiling");
}

// The speed is taken between two moments of a full queue, whatever comes before and after.
TEST(LoadRunner, MeasuresInVirtualMemory) {
  const auto engine = make_memory_engine();
  IoFileOptions file_options;
  file_options.path = "memory";
  file_options.size = 8_MiB;
  const auto file = engine->open(file_options);
  LoadMemory memory(4 * kMiB, 1);
  const auto stream = make_stream(Pattern::overwrite, {0, 8 * kMiB}, kMiB, 0);
  LoadLimits limits;
  limits.depth = 4;
  limits.warm_up = milliseconds(1);
  limits.measure = milliseconds(10);
  const auto result = run_load(*engine, file, memory, *stream, kMiB, limits);
  EXPECT_TRUE(result.complete);
  EXPECT_GE(result.seconds, 0.01);
  EXPECT_EQ(result.written_bytes % kMiB, 0U);
  EXPECT_GE(result.all_written_bytes, result.written_bytes);
  EXPECT_EQ(engine->pending(), 0U);
  engine->close(file);
}

}  // namespace
}  // namespace terrace::bench
