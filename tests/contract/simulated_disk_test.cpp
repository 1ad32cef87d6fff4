// The simulated disk: what a power cut may take and what it may not. Every sector that is written
// carries the number of its write, so that what is found after a restart tells where it is from.

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <thread>

#include "nvme/simulation.h"
#include "tests/contract/io_engine_contract.h"

namespace terrace {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kSector = 512;
constexpr std::uint64_t kPages = 8;
constexpr std::uint64_t kSize = kPages * kPage;
constexpr std::uint64_t kSectors = kSize / kSector;

class SimulatedDiskTest : public testing::Test {
 protected:
  void make(SimulatedDiskOptions options = {}) {
    disk_ = std::make_shared<SimulatedDisk>(options);
    start();
    file_ = engine_->open({.path = "file", .size = {kSize}});
  }
  void start() { engine_ = make_memory_engine(disk_); }
  void restart(std::uint64_t seed) {
    disk_->restart(seed);
    start();
    file_ = engine_->open({.path = "file", .mode = IoFileMode::existing});
  }

  // A write of `pages` whose sectors all begin with `number`; the memory lives as long as the test.
  void submit_write(std::uint64_t number, std::uint64_t page, std::uint64_t pages = 1) {
    auto& buffer = *buffers_.emplace_back(std::make_unique<PageBuffer>(pages * kPage));
    for (std::uint64_t at = 0; at < pages * kPage; at += kSector) {
      std::memcpy(buffer.data() + at, &number, sizeof number);
    }
    ASSERT_TRUE(engine_->submit({{number}, IoOperation::write, file_, page * kPage, buffer.data(),
                                 pages * kPage}));
  }
  void submit_flush(std::uint64_t ticket) {
    ASSERT_TRUE(engine_->submit({{ticket}, IoOperation::flush, file_}));
  }

  std::map<std::uint64_t, int> drain() {  // error by ticket
    std::vector<Completion> completions;
    while (engine_->pending() > 0) engine_->reap(completions, 0ms);
    std::map<std::uint64_t, int> errors;
    for (const auto& completion : completions) errors[completion.ticket.value] = completion.error;
    return errors;
  }
  void write(std::uint64_t number, std::uint64_t page, std::uint64_t pages = 1) {
    submit_write(number, page, pages);
    drain();
  }
  void flush() {
    submit_flush(1000);
    drain();
  }

  std::vector<std::uint64_t> sectors() {
    PageBuffer buffer(kSize);
    EXPECT_TRUE(engine_->submit({{1}, IoOperation::read, file_, 0, buffer.data(), kSize}));
    EXPECT_EQ(drain(), (std::map<std::uint64_t, int>{{1, 0}}));
    std::vector<std::uint64_t> numbers(kSectors);
    for (std::uint64_t i = 0; i < kSectors; ++i) {
      std::memcpy(&numbers[i], buffer.data() + i * kSector, sizeof numbers[i]);
    }
    return numbers;
  }

  std::shared_ptr<SimulatedDisk> disk_;
  std::unique_ptr<IoEngine> engine_;
  FileId file_;
  std::vector<std::unique_ptr<PageBuffer>> buffers_;
};

TEST_F(SimulatedDiskTest, KeepsWhatWasFlushedWhateverTheSeed) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    make();
    write(1, 0, kPages);
    write(2, 3);
    flush();
    restart(seed);
    const auto found = sectors();
    for (std::uint64_t i = 0; i < kSectors; ++i) EXPECT_EQ(found[i], i / 8 == 3 ? 2u : 1u);
  }
}

// Over many seeds everything that may happen to two overlapping writes does happen.
TEST_F(SimulatedDiskTest, LosesTearsAndReordersWhatWasNot) {
  int none = 0, all = 0, torn = 0, reordered = 0, mixed = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    make();
    write(1, 0, kPages);
    flush();
    write(2, 0, 4);
    write(3, 2, 4);
    EXPECT_EQ(sectors()[3 * 8], 3u);  // reads see what has completed
    restart(seed);
    const auto found = sectors();
    const std::set<std::uint64_t> first(found.begin(), found.begin() + 16);
    const std::set<std::uint64_t> both(found.begin() + 16, found.begin() + 32);
    const std::set<std::uint64_t> second(found.begin() + 32, found.begin() + 48);
    const std::set<std::uint64_t> rest(found.begin() + 48, found.end());
    EXPECT_EQ(rest, std::set<std::uint64_t>{1});
    EXPECT_FALSE(first.contains(3));
    EXPECT_FALSE(second.contains(2));
    none += first.size() == 1 && both == first && second == first && first.contains(1);
    all += first == std::set<std::uint64_t>{2} && both == second &&
           second == std::set<std::uint64_t>{3};
    torn += first.size() == 2;
    reordered += both.contains(2) && second.contains(3);
    mixed += first == std::set<std::uint64_t>{2} && both == std::set<std::uint64_t>{2, 3} &&
             second == std::set<std::uint64_t>{3};
  }
  for (const int count : {none, all, torn, reordered, mixed}) EXPECT_GE(count, 3);
}

// Completed is not durable, submitted is not completed: the flush covers the first write only, even
// where the second one completes before the flush does.
TEST_F(SimulatedDiskTest, FlushesOnlyWhatHadCompletedBefore) {
  int overtaken = 0, lost = 0;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    make({.seed = seed});
    write(1, 0);
    submit_write(2, 1);
    submit_flush(1000);
    std::vector<Completion> completions;
    while (engine_->pending() > 0) engine_->reap(completions, 0ms);
    for (const auto& completion : completions) EXPECT_EQ(completion.error, 0);
    restart(seed + 1000);
    const auto found = sectors();
    EXPECT_EQ(std::set<std::uint64_t>(found.begin(), found.begin() + 8),
              std::set<std::uint64_t>{1});
    if (completions.front().ticket.value == 1000) continue;
    ++overtaken;
    lost += std::count(found.begin() + 8, found.begin() + 16, 2u) < 8;
  }
  EXPECT_GT(overtaken, 10);
  EXPECT_GT(lost, 3);
}

TEST_F(SimulatedDiskTest, FlushesOneFileOnly) {
  bool lost = false;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    make();
    write(1, 0);
    const auto first = file_;
    file_ = engine_->open({.path = "other", .size = {kSize}});
    flush();
    file_ = first;
    restart(seed);
    lost |= sectors()[0] == 0;
  }
  EXPECT_TRUE(lost);
}

TEST_F(SimulatedDiskTest, ShufflesCompletionsByItsSeed) {
  const auto order = [&](std::uint64_t seed) {
    make({.seed = seed});
    for (std::uint64_t i = 0; i < 8; ++i) submit_write(i, i);
    std::vector<Completion> completions;
    int reaps = 0;
    for (; engine_->pending() > 0; ++reaps) engine_->reap(completions, 0ms);
    std::vector<std::uint64_t> tickets;
    for (const auto& completion : completions) tickets.push_back(completion.ticket.value);
    return tickets;
  };
  std::set<std::vector<std::uint64_t>> orders;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    orders.insert(order(seed));
    EXPECT_EQ(order(seed), order(seed));
  }
  EXPECT_GT(orders.size(), 15u);
}

// At every operation: all before it are done, it and all later ones fail and change nothing.
TEST_F(SimulatedDiskTest, CutsThePowerAtTheOperationAskedFor) {
  for (std::uint64_t at = 1; at <= 5; ++at) {
    disk_ = std::make_shared<SimulatedDisk>();
    disk_->cut_power_at(at);
    start();
    std::uint64_t done = 0;
    try {
      file_ = engine_->open({.path = "file", .size = {kSize}});
      ++done;
      for (std::uint64_t number = 1; number <= 2; ++number) {
        submit_write(number, number);
        done += drain().at(number) == 0;
      }
      submit_flush(1000);
      done += drain().at(1000) == 0;
      engine_->remove("file");
      ++done;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::io);
      EXPECT_NE(std::string(error.what()).find("lost its power"), std::string::npos);
    }
    EXPECT_EQ(done, at - 1);
    EXPECT_FALSE(disk_->has_power());
    EXPECT_THROW(static_cast<void>(engine_->exists("file")), Error);
    disk_->restart(at);
    EXPECT_TRUE(disk_->has_power());
    start();
    EXPECT_EQ(engine_->exists("file"), at > 1);
    if (at == 5) {
      file_ = engine_->open({.path = "file", .mode = IoFileMode::existing});
      EXPECT_EQ(sectors()[8], 1u);
      EXPECT_EQ(sectors()[16], 2u);
    }
  }
}

// In flight when the power went: an error is told, and any part may have survived.
TEST_F(SimulatedDiskTest, MayKeepPartsOfWhatWasInFlight) {
  bool kept = false, lost = false;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    make();
    submit_write(1, 0);
    disk_->cut_power_at(1);  // has passed: now
    submit_write(2, 1);
    EXPECT_EQ(drain(), (std::map<std::uint64_t, int>{{1, EIO}, {2, EIO}}));
    restart(seed);
    const auto found = sectors();
    kept |= std::count(found.begin(), found.begin() + 8, 1u) > 0;
    lost |= std::count(found.begin(), found.begin() + 8, 1u) < 8;
    EXPECT_EQ(std::count(found.begin() + 8, found.end(), 0u), std::ptrdiff_t{kSectors - 8});
  }
  EXPECT_TRUE(kept && lost);
}

TEST_F(SimulatedDiskTest, KeepsNamesAndForgetsScratch) {
  make();
  engine_->open({.path = "gone", .size = {kSize}});
  engine_->open({.path = "scratch", .size = {kSize}, .mode = IoFileMode::scratch});
  engine_->remove("gone");
  restart(1);
  EXPECT_TRUE(engine_->exists("file"));
  EXPECT_FALSE(engine_->exists("gone"));
  EXPECT_FALSE(engine_->exists("scratch"));
  EXPECT_EQ(engine_->file_info(file_).size.count, kSize);
}

TEST_F(SimulatedDiskTest, IsCopiedWithItsCache) {
  make();
  write(1, 0);
  flush();
  write(2, 0);
  write(3, 1);
  const auto copy = disk_->copy();
  write(4, 2);
  std::set<std::uint64_t> found;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    disk_ = copy->copy();
    EXPECT_EQ(disk_->operations(), 0u);
    restart(seed);
    const auto after = sectors();
    EXPECT_EQ(after[2 * kPage / kSector], 0u);
    found.insert(after[0]);
    start();  // gives the engine up before the disk
  }
  EXPECT_EQ(found, (std::set<std::uint64_t>{1, 2}));
}

// An engine of before the cut cannot touch the disk of after it.
TEST_F(SimulatedDiskTest, IsLostToTheEnginesOfBefore) {
  make();
  write(1, 0);
  flush();
  submit_write(2, 0);  // in flight over the restart
  auto old_engine = std::move(engine_);
  const auto old_file = file_;
  restart(3);
  PageBuffer buffer(kPage);
  EXPECT_TRUE(old_engine->submit({{3}, IoOperation::write, old_file, 0, buffer.data(), kPage}));
  std::vector<Completion> completions;
  while (old_engine->pending() > 0) old_engine->reap(completions, 0ms);
  ASSERT_EQ(completions.size(), 2u);
  for (const auto& completion : completions) EXPECT_EQ(completion.error, EIO);
  EXPECT_THROW(old_engine->open({.path = "new", .size = {kSize}}), Error);
  EXPECT_THROW(old_engine->remove("file"), Error);
  old_engine.reset();
  EXPECT_EQ(sectors()[0], 1u);
  EXPECT_EQ(disk_->operations(), 2u);  // the open and the read after the restart
}

TEST_F(SimulatedDiskTest, SurvivesManyRestarts) {
  make();
  std::uint64_t number = 1;
  for (std::uint64_t round = 0; round < 20; ++round) {
    write(number, round % kPages);
    flush();
    write(number + 1, round % kPages);
    restart(round);
    const auto found = sectors();
    const auto sector = found[round % kPages * 8];
    EXPECT_TRUE(sector == number || sector == number + 1);
    restart(round + 100);  // what was found is durable
    EXPECT_EQ(sectors(), found);
    number += 2;
  }
}

// What is never flushed does not pile up in memory without bound: the oldest becomes durable.
TEST_F(SimulatedDiskTest, DrainsAFullCache) {
  constexpr std::uint64_t kLarge = 16 << 20;
  PageBuffer buffer(kLarge);
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    make();
    std::memset(buffer.data(), 1, kLarge);
    file_ = engine_->open({.path = "large", .size = {kLarge}});
    for (std::uint64_t i = 0; i < 5; ++i) {
      ASSERT_TRUE(engine_->submit({{i}, IoOperation::write, file_, 0, buffer.data(), kLarge}));
      drain();
    }
    disk_->restart(seed);
    start();
    file_ = engine_->open({.path = "large", .mode = IoFileMode::existing});
    ASSERT_TRUE(engine_->submit({{1}, IoOperation::read, file_, 0, buffer.data(), kLarge}));
    drain();
    EXPECT_EQ(std::count(buffer.span().begin(), buffer.span().end(), std::byte{1}),
              std::ptrdiff_t{kLarge});
  }
}

// The power goes while engines on other threads are at work, and comes back to new ones.
TEST_F(SimulatedDiskTest, IsSharedByThreads) {
  disk_ = std::make_shared<SimulatedDisk>();
  std::vector<std::thread> owners;
  for (int id = 0; id < 3; ++id) {
    owners.emplace_back([disk = disk_, id] {
      const auto engine = make_memory_engine(disk);
      PageBuffer buffer(kPage);
      try {
        const auto file = engine->open({.path = std::to_string(id), .size = {kPage}});
        for (int error = 0; error == 0;) {
          ASSERT_TRUE(engine->submit({{1}, IoOperation::write, file, 0, buffer.data(), kPage}));
          std::vector<Completion> completions;
          while (engine->reap(completions, 1s) == 0) {
          }
          error = completions.front().error;
        }
      } catch (const Error& error) {
        ADD_FAILURE() << error.what();
      }
    });
  }
  start();
  const auto all_at_work = [&] {
    return engine_->exists("0") && engine_->exists("1") && engine_->exists("2");
  };
  while (disk_->operations() < 1000 || !all_at_work()) std::this_thread::yield();
  disk_->cut_power_at(1);
  for (auto& owner : owners) owner.join();
  disk_->restart(1);
  start();
  EXPECT_TRUE(all_at_work());
}

}  // namespace
}  // namespace terrace
