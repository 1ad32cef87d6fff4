// Drives whose limits the test sets: a fast cache that ends, an uplink that two share.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <mutex>
#include <thread>

#include "nvme/cliff.h"
#include "nvme/engines.h"
#include "nvme/measured_drive.h"
#include "nvme/uplink.h"

namespace terrace::bench {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::uint64_t kMiB = 1 << 20;

// What several engines, each of its own thread, get through together.
class Uplink {
 public:
  // `slow` after so many bytes.
  explicit Uplink(Throttle fast, std::uint64_t bytes = ~std::uint64_t{0}, Throttle slow = {})
      : fast_(fast), slow_(slow), left_(bytes) {}
  Nanoseconds pass(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    auto& pacer = left_ >= bytes ? fast_ : slow_;
    left_ -= std::min(left_, bytes);
    return pacer.reserve(steady_clock().now(), bytes).end;
  }

 private:
  std::mutex mutex_;
  Pacer fast_;
  Pacer slow_;
  std::uint64_t left_;
};

// Gives completions back when the uplink has let them through; keeps the requests.
class UplinkEngine final : public IoEngine {
 public:
  UplinkEngine(std::unique_ptr<IoEngine> engine, std::shared_ptr<Uplink> uplink,
               std::vector<IoRequest>* requests)
      : engine_(std::move(engine)), uplink_(std::move(uplink)), requests_(requests) {}
  IoEngineInfo info() const override { return engine_->info(); }
  FileId open(const IoFileOptions& options) override { return engine_->open(options); }
  void close(FileId file) override { engine_->close(file); }
  bool exists(const std::string& path) const override { return engine_->exists(path); }
  void remove(const std::string& path) override { engine_->remove(path); }
  IoFileInfo file_info(FileId file) const override { return engine_->file_info(file); }
  void register_buffers(std::span<const std::span<std::byte>> buffers) override {
    engine_->register_buffers(buffers);
  }
  bool submit(const IoRequest& request) override {
    if (requests_ != nullptr) requests_->push_back(request);
    return engine_->submit(request);
  }
  void flush() override { engine_->flush(); }
  std::size_t pending() const override { return engine_->pending(); }
  std::size_t reap(std::vector<Completion>& completions, Nanoseconds timeout) override {
    const auto before = completions.size();
    const auto count = engine_->reap(completions, timeout);
    for (auto i = before; uplink_ && i < completions.size(); ++i) {
      const auto due = uplink_->pass(completions[i].bytes);
      std::this_thread::sleep_for(due - steady_clock().now());
    }
    return count;
  }
  void wake() override { engine_->wake(); }

 private:
  std::unique_ptr<IoEngine> engine_;
  std::shared_ptr<Uplink> uplink_;
  std::vector<IoRequest>* requests_;
};

class MeasuredLimits : public testing::Test {
 protected:
  MeasuredLimits()
      : place_(fs::current_path() / ("measured_limits_" + std::to_string(::getpid()))) {
    fs::create_directories(place_);
  }
  ~MeasuredLimits() override { fs::remove_all(place_); }

  DriveOptions behind(std::shared_ptr<Uplink> uplink,
                      std::vector<IoRequest>* requests = nullptr) const {
    DriveOptions options;
    options.path = place_.string();
    options.size = 32_MiB;
    options.buffer_bytes = 8 * kMiB;
    options.make_engine = [uplink, requests](const IoEngineOptions& engine) {
      return std::make_unique<UplinkEngine>(make_io_engine(engine), uplink, requests);
    };
    return options;
  }
  // In memory: nothing but the test limits it.
  static DriveOptions fast(std::shared_ptr<Uplink> uplink) {
    DriveOptions options;
    options.path = ".";
    options.size = 32_MiB;
    options.buffer_bytes = 8 * kMiB;
    options.make_engine = [uplink](const IoEngineOptions&) {
      return std::make_unique<UplinkEngine>(make_memory_engine(), uplink, nullptr);
    };
    return options;
  }

  fs::path place_;
};

Cliff cliff_after(std::uint64_t place, const std::function<DriveOptions(std::uint64_t)>& drive_of) {
  const std::uint64_t filled = 32 * kMiB;
  MeasuredDrive drive(drive_of(filled + place));
  drive.fill(filled, kMiB, 4, seconds(60));
  const auto sample = drive.measure({Pattern::sustained_write, 256 * 1024, 4, 1},
                                    {milliseconds(1), seconds(1), milliseconds(2)});
  return find_cliff(sample.timeline);
}

// A throttle that changes after so many bytes is found within a tenth of its place. A machine that
// stops this thread for a while changes what there is to find: then again.
TEST_F(MeasuredLimits, TheEndOfAFastCacheIsFound) {
  for (const std::uint64_t place : {60 * kMiB, 100 * kMiB}) {
    const auto wanted = static_cast<double>(place);
    Cliff cliff;
    for (int attempt = 0; attempt < 5; ++attempt) {
      cliff = cliff_after(place, [&](std::uint64_t bytes) {
        return fast(std::make_shared<Uplink>(Throttle{0.2, 0}, bytes, Throttle{0.05, 0}));
      });
      if (cliff.found && std::abs(static_cast<double>(cliff.at_bytes) - wanted) < 0.1 * wanted) {
        break;
      }
    }
    ASSERT_TRUE(cliff.found) << place;
    EXPECT_NEAR(static_cast<double>(cliff.at_bytes), wanted, 0.1 * wanted);
    EXPECT_NEAR(cliff.before_gb_s, 0.2, 0.05);
    EXPECT_NEAR(cliff.after_gb_s, 0.05, 0.02);
  }
}

TEST_F(MeasuredLimits, AnUplinkThatTwoDrivesShareIsSeen) {
  const auto shared = std::make_shared<Uplink>(Throttle{0.1, 0});
  const auto own = std::make_shared<Uplink>(Throttle{0.1, 0});
  std::vector<std::unique_ptr<MeasuredDrive>> drives;
  for (const auto& uplink : {shared, shared, own}) {
    drives.push_back(std::make_unique<MeasuredDrive>(fast(uplink)));
    drives.back()->fill(8 * kMiB, kMiB, 4, seconds(60));
  }
  const Cell cell{Pattern::read, 256 * 1024, 4, 1};
  const Timing timing{milliseconds(20), milliseconds(300)};
  std::vector<double> alone;
  for (auto& drive : drives) alone.push_back(drive->measure(cell, timing).gb_s);
  std::vector<PairSpeed> pairs;
  for (const auto& [a, b] : {std::pair{0, 1}, {0, 2}, {1, 2}}) {
    const auto first = static_cast<std::size_t>(a);
    const auto second = static_cast<std::size_t>(b);
    drives[first]->start(cell, timing);
    drives[second]->start(cell, timing);
    const double one = drives[first]->finish().gb_s;
    pairs.push_back({first, second, one + drives[second]->finish().gb_s});
  }
  const auto found = shared_uplinks(alone, pairs);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].drives, (std::vector<std::size_t>{0, 1}));
  EXPECT_NEAR(found[0].gb_s, 0.1, 0.04) << "their times do not overlap to the millisecond";
}

// Both of a pair go through the same blocks.
TEST_F(MeasuredLimits, BeginsAtTheBlockThatIsAskedFor) {
  std::vector<IoRequest> requests;
  MeasuredDrive drive(behind(nullptr, &requests));
  drive.fill(32 * kMiB, kMiB, 4, seconds(60));
  const Cell cell{Pattern::read, kMiB, 2, 1};
  for (const std::uint64_t block : {0UL, 5UL, 31UL}) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      requests.clear();
      drive.measure(cell,
                    {.warm_up = milliseconds(0), .measure = milliseconds(1), .first_block = block});
      ASSERT_GE(requests.size(), 2U);
      EXPECT_EQ(requests[0].offset, block * kMiB);
      EXPECT_EQ(requests[1].offset, (block + 1) % 32 * kMiB);
    }
  }
  requests.clear();
  drive.measure(cell, {milliseconds(0), milliseconds(1)});
  const auto first = requests.at(0).offset;
  requests.clear();
  drive.measure(cell, {milliseconds(0), milliseconds(1)});
  EXPECT_NE(requests.at(0).offset, first) << "otherwise another one every time";
}

// What a buffer held is written again, and nothing of it is found where it should not be.
TEST_F(MeasuredLimits, TheSameDataIsWrittenWithoutAStamp) {
  MeasuredDrive drive(behind(nullptr));
  drive.fill(32 * kMiB, kMiB, 4, seconds(60));
  const Cell cell{Pattern::overwrite, kMiB, 4, 1};
  drive.measure(cell, {.warm_up = milliseconds(0),
                       .measure = seconds(60),
                       .most_bytes = 32 * kMiB,
                       .first_block = 0});
  EXPECT_EQ(drive.verify(32), "");
  drive.measure(cell, {.warm_up = milliseconds(0),
                       .measure = seconds(60),
                       .most_bytes = 32 * kMiB,
                       .same_data = true,
                       .first_block = 0});
  EXPECT_NE(drive.verify(32), "") << "it was stamped";
}

// Making the data is counted apart from the I/O.
TEST(LoadRunner, CountsTheStampsOfWrites) {
  const auto engine = make_memory_engine();
  IoFileOptions options;
  options.path = "memory";
  options.size = 8_MiB;
  const auto file = engine->open(options);
  LoadMemory memory(4 * kMiB, 1);
  const auto stamps = [&](Pattern pattern, bool same_data) {
    const auto stream = make_stream(pattern, {0, 8 * kMiB}, kMiB, 0);
    LoadLimits limits;
    limits.depth = 4;
    limits.measure = seconds(60);
    limits.most_bytes = 64 * kMiB;
    limits.same_data = same_data;
    return run_load(*engine, file, memory, *stream, kMiB, limits).stamp_cpu_seconds;
  };
  EXPECT_GT(stamps(Pattern::overwrite, false), 0);
  EXPECT_EQ(stamps(Pattern::overwrite, true), 0);
  EXPECT_EQ(stamps(Pattern::read, false), 0);
  engine->close(file);
}

}  // namespace
}  // namespace terrace::bench
