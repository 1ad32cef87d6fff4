// What a store's files amount to, and which of their bytes are damaged: on files in memory.
#include "nvme/store_check.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include "nvme/checksum.h"
#include "nvme/segment_store.h"
#include "nvme/simulation.h"
#include "nvme/store_lock.h"

namespace terrace {
namespace {

TEST(TileHasher, PiecesHashLikeTheWhole) {
  std::mt19937 random(1);
  std::vector<std::byte> bytes(100000);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  for (const std::uint64_t tile : {1UL, 7UL, 240UL, 4096UL, 99999UL, 100000UL, 200000UL}) {
    for (const std::size_t most : {1UL, 100UL, 4096UL, 100000UL}) {
      TileHasher hasher(Bytes{tile});
      for (std::size_t done = 0; done < bytes.size();) {
        const auto size = std::min(bytes.size() - done, random() % most + 1);
        hasher.add(std::span(bytes).subspan(done, size));
        done += size;
      }
      EXPECT_EQ(hasher.finish(), hash_tiles(bytes, Bytes{tile})) << tile << " " << most;
      EXPECT_TRUE(hasher.finish().empty());
      if (tile == 1) break;  // slow enough
    }
  }
}

// ---- judging, from what drives say

using State = StoreOutlook::State;

struct Records {
  std::uint64_t generation[2];  // 0: blank
};

std::vector<InspectedStore> drives_with(const std::vector<Records>& all) {
  std::vector<InspectedStore> drives;
  for (std::uint32_t d = 0; d < all.size(); ++d) {
    InspectedStore drive;
    Superblock superblock;
    superblock.store = 7;
    superblock.drive = d;
    superblock.weights.assign(all.size(), 500);
    for (auto& copy : drive.superblock) copy.superblock = superblock;
    for (std::size_t i = 0; i < 2; ++i) {
      const auto generation = all[d].generation[i];
      drive.record[i].blank = generation == 0;
      if (generation == 0) continue;
      drive.record[i].record = CommitRecord{};
      drive.record[i].record->generation = generation;
    }
    drives.push_back(drive);
  }
  return drives;
}

TEST(StoreOutlook, CommitsCountWhenAllDrivesHoldThem) {
  struct Case {
    std::vector<Records> drives;
    State state;
    std::vector<std::size_t> commit;
  };
  const std::vector<Case> cases = {
      {{{{0, 0}}}, State::empty, {}},
      {{{{1, 0}}}, State::committed, {0}},
      {{{{1, 2}}}, State::committed, {1}},
      {{{{0, 0}}, {{0, 0}}}, State::empty, {}},
      {{{{1, 0}}, {{0, 0}}}, State::empty, {}},  // the first commit was cut short
      {{{{0, 0}}, {{1, 0}}}, State::empty, {}},
      {{{{1, 0}}, {{1, 0}}}, State::committed, {0, 0}},
      {{{{1, 2}}, {{1, 0}}}, State::committed, {0, 0}},  // so was the second
      {{{{3, 2}}, {{1, 2}}}, State::committed, {1, 1}},
      {{{{1, 2}}, {{0, 0}}}, State::damaged, {}},  // there was a first one, and it is lost
      {{{{5, 4}}, {{3, 2}}}, State::damaged, {}},
  };
  for (std::size_t c = 0; c < cases.size(); ++c) {
    const auto outlook = judge(drives_with(cases[c].drives));
    EXPECT_EQ(outlook.state, cases[c].state) << c << ": " << outlook.why;
    EXPECT_EQ(outlook.commit, cases[c].commit) << c;
    EXPECT_TRUE(outlook.complete || outlook.state == State::damaged) << c;
  }
}

TEST(StoreOutlook, DamageIsToldFromCreationsCutShort) {
  auto drives = drives_with({{{1, 2}}, {{1, 2}}});
  drives[1].record[0] = {{}, "its checksum is wrong", false};
  EXPECT_EQ(judge(drives).state, State::committed);
  EXPECT_EQ(judge(drives).commit, (std::vector<std::size_t>{1, 1}));
  drives[1].record[1] = {{}, "its checksum is wrong", false};
  EXPECT_EQ(judge(drives).state, State::damaged);
  EXPECT_EQ(judge(drives).drive, 1U);

  drives = drives_with({{{0, 0}}, {{0, 0}}});
  drives[1] = {};
  drives[1].unfinished = true;
  EXPECT_EQ(judge(drives).state, State::empty);
  drives = drives_with({{{1, 0}}, {{0, 0}}});
  drives[1] = {};
  drives[1].unfinished = true;
  EXPECT_EQ(judge(drives).state, State::damaged);
  drives[1].unfinished = false;
  drives[1].superblock[0].why_not = "it does not begin as one";
  EXPECT_NE(judge(drives).why.find("does not begin as one"), std::string::npos);
}

TEST(StoreOutlook, DrivesOfTwoStoresAreNotComplete) {
  auto drives = drives_with({{{1, 0}}, {{1, 0}}});
  drives[1].superblock[0].superblock->store = 8;
  EXPECT_EQ(judge(drives).state, State::committed);
  EXPECT_FALSE(judge(drives).complete);
  drives = drives_with({{{1, 0}}, {{1, 0}}});
  drives[1].superblock[0].superblock->drive = 0;
  EXPECT_FALSE(judge(drives).complete);
  drives.pop_back();
  EXPECT_FALSE(judge(drives).complete);
}

// ---- reading segments

class CheckStore : public testing::Test {
 protected:
  CheckStore() {
    std::string pattern = "terrace_test_XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    root_ = std::filesystem::absolute(pattern);
    for (const char* name : {"/a", "/b"}) {
      directories_.push_back(root_ + name);
      std::filesystem::create_directory(directories_.back());
    }
    options_.drives = {{directories_[0], 2, {}}, {directories_[1], 1, {}}};
    // Larger than a piece, not made of whole tiles; and many small ones.
    options_.durable = {{"large", {{}, 22_MiB}, 9_MiB, 100000_B},
                        {"small", {22_MiB, 1_MiB + 4_KiB}, 8_KiB, 4_KiB}};
    options_.transient = 23_MiB + 4_KiB;
    write_ = StoreGeometry(options_.durable, {1});
  }
  ~CheckStore() override {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }

  std::unique_ptr<IoEngine> engine() const { return make_memory_engine(disk_); }

  // Everything, then, as steps 2 to `steps`, the second region.
  void train(std::uint64_t steps) {
    const auto io = engine();
    SegmentStore store(*io, options_);
    std::mt19937 random(3);
    PageBuffer memory(9_MiB);
    for (std::uint64_t step = 1; step <= steps; ++step) {
      for (std::size_t s = step == 1 ? 0 : write_.first_segment(1); s < write_.segments(); ++s) {
        const auto extent = write_.extent(s);
        const auto bytes = memory.span().first(extent.size.count);
        for (std::size_t i = 0; i < bytes.size(); i += 64) bytes[i] = std::byte(random() & 255);
        store.write_now(extent, bytes, step);
      }
      store.commit_now(step, "kept");
    }
  }

  StoreCheck check() const {
    const auto io = engine();
    return check_store(*io, find_store(*io, directories_));
  }

  // A bit of one drive's file.
  void flip(std::size_t drive, Bytes offset) {
    const auto io = engine();
    const FileId file = io->open({.path = store_path(directories_[drive]), .size = {},
                                  .mode = IoFileMode::existing});
    PageBuffer page(kStorePage);
    const Bytes begin{offset.count / kStorePage.count * kStorePage.count};
    BlockingIo blocking(*io);
    blocking.read(file, begin, page.span());
    page.data()[(offset - begin).count] ^= std::byte{1};
    blocking.write(file, begin, page.span());
    blocking.flush(file);
  }

  std::shared_ptr<SimulatedDisk> disk_ = std::make_shared<SimulatedDisk>();
  std::string root_;
  std::vector<std::string> directories_;
  StoreOptions options_;
  StoreGeometry write_{{}, {1}};
};

TEST_F(CheckStore, EverySegmentIsRead) {
  train(1);
  auto found = check();
  EXPECT_EQ(found.segments, write_.segments());
  EXPECT_EQ(found.sound, found.segments);
  EXPECT_EQ(found.older_segments, 0U);
  EXPECT_EQ(found.read, write_.end());
  EXPECT_EQ(found.damaged, 0U);
  std::swap(directories_[0], directories_[1]);
  EXPECT_EQ(check().sound, write_.segments());
}

TEST_F(CheckStore, CopiesOfTheCommitBeforeAreCounted) {
  train(3);
  const auto found = check();
  EXPECT_EQ(found.sound, write_.segments());
  EXPECT_EQ(found.older_sound, write_.segments());
  // What both commits share is read once.
  EXPECT_EQ(found.read, write_.end() + write_.regions()[1].extent.size);
  EXPECT_EQ(found.older_segments, write_.segments());
}

TEST_F(CheckStore, DamageIsFoundWhereItIs) {
  train(2);
  const auto io = engine();
  const auto store = find_store(*io, directories_);
  std::uint64_t damaged = 0;
  for (std::size_t d = 0; d < 2; ++d) {
    const auto& table = store.drives[d].store.table[store.outlook.commit[d]];
    for (const std::size_t index : {std::size_t{0}, table.size() / 2, table.size() - 1}) {
      const auto& entry = table[index];
      for (const Bytes inside : {Bytes{0}, Bytes{entry.length - 1}}) {
        flip(d, Bytes{entry.offset} + inside);
        const auto found = check();
        ASSERT_EQ(found.damages.size(), 1U);
        const auto& damage = found.damages.front();
        EXPECT_EQ(damage.place, StorePlace::segment);
        EXPECT_EQ(damage.drive, d);
        EXPECT_EQ(damage.segment, entry.segment);
        EXPECT_EQ(damage.region,
                  write_.regions()[write_.region_of(entry.segment)].name);
        EXPECT_EQ(damage.extent, (Extent{{entry.offset}, {entry.length}}));
        EXPECT_EQ(damage.expected, entry.checksum);
        EXPECT_NE(damage.found, entry.checksum);
        EXPECT_EQ(found.sound, found.segments - 1);
        flip(d, Bytes{entry.offset} + inside);
        ++damaged;
      }
    }
  }
  EXPECT_EQ(damaged, 12U);
  EXPECT_EQ(check().damaged, 0U);
}

// Reads that fail take nothing else with them.
TEST_F(CheckStore, WhatCannotBeReadIsNamed) {
  train(1);
  const auto counters = std::make_shared<FaultCounters>();
  const auto counting = make_fault_engine(engine(), {}, counters);
  check_store(*counting, find_store(*counting, directories_));
  const std::uint64_t reads = counters->calls[static_cast<std::size_t>(IoCall::read)];
  const std::uint64_t first = 2 * (2 + 2 + 2 + 1);  // headers, texts, records, a table, of 2 drives
  ASSERT_GT(reads, first + 3);
  for (auto at = first + 1; at <= reads; ++at) {
    const auto once = make_fault_engine(engine(), {.at = at, .only = IoCall::read});
    const auto found = check_store(*once, find_store(*once, directories_));
    EXPECT_EQ(found.damaged, 0U) << at;  // each is read again
    EXPECT_EQ(found.sound, found.segments) << at;
  }
  const auto broken =
      make_fault_engine(engine(), {.at = first + 1, .only = IoCall::read, .persistent = true});
  const auto found = check_store(*broken, find_store(*broken, directories_));
  EXPECT_EQ(found.unreadable, found.segments);
  EXPECT_EQ(found.damaged, found.unreadable);
  EXPECT_EQ(found.sound, 0U);
  EXPECT_NE(found.damages.front().why.find("/a/terrace.store failed"), std::string::npos);
}

TEST_F(CheckStore, NobodyHoldsALockThatIsNotHeld) {
  EXPECT_FALSE(lock_holder(directories_[0]));
  EXPECT_FALSE(std::filesystem::exists(directories_[0] + "/terrace.lock"));
  {
    const StoreLock lock(directories_[0]);
    EXPECT_NE(lock_holder(directories_[0]).value_or("").find(std::to_string(::getpid())),
              std::string::npos);
  }
  EXPECT_FALSE(lock_holder(directories_[0]));
}

// Whoever lost its lock file must not take away the next owner's.
TEST_F(CheckStore, ALockThatWasTakenAwayIsNotTakenFromTheNextOwner) {
  const std::string path = directories_[0] + "/terrace.lock";
  std::optional<StoreLock> first(std::in_place, directories_[0]);
  std::filesystem::remove(path);
  const StoreLock second(directories_[0]);
  first.reset();
  EXPECT_TRUE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace terrace
