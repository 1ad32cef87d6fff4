// The rule that the only good copy is never overwritten.
#include "nvme/segment_table.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace terrace {
namespace {

class SegmentTableTest : public testing::Test {
 protected:
  static StoreGeometry geometry() {
    return StoreGeometry({{"a", {{}, 80_KiB}, 8_KiB, 8_KiB}}, {1, 1});
  }
  static std::vector<DriveSlots> slots(const StoreGeometry& geometry, std::uint64_t spares) {
    std::vector<DriveSlots> slots;
    for (const auto& share : geometry.shares()) {
      const Bytes first = 1_MiB;
      slots.push_back({{first, first + share.bytes}, first + share.bytes * 2, 8_KiB, spares});
    }
    return slots;
  }
  void write(std::size_t segment, std::uint64_t step) {
    table_.stage(segment, step * 100 + segment, step);
    table_.written(segment, table_.target(segment));
  }

  const StoreGeometry geometry_ = geometry();
  SegmentTable table_{geometry_, slots(geometry_, 2)};
};

TEST_F(SegmentTableTest, ASegmentIsNowhereBeforeItIsWritten) {
  EXPECT_EQ(table_.current(3), SegmentTable::kNowhere);
  write(3, 1);
  EXPECT_NE(table_.current(3), SegmentTable::kNowhere);
  EXPECT_EQ(table_.checksum(3), 103U);
  EXPECT_EQ(table_.generation(3), 1U);
  EXPECT_EQ(table_.current(4), SegmentTable::kNowhere);
}

TEST_F(SegmentTableTest, SlotsAlternateFromCommitToCommit) {
  std::uint64_t before = SegmentTable::kNowhere;
  std::uint64_t before_that = SegmentTable::kNowhere;
  for (std::uint64_t step = 1; step < 8; ++step) {
    write(2, step);
    EXPECT_NE(table_.current(2), before);
    EXPECT_TRUE(step <= 2 || table_.current(2) == before_that);
    table_.commit();
    before_that = before;
    before = table_.current(2);
  }
}

TEST_F(SegmentTableTest, BetweenCommitsACopyIsOverwrittenInPlace) {
  write(2, 1);
  table_.commit();
  const auto committed = table_.current(2);
  write(2, 2);
  const auto place = table_.current(2);
  EXPECT_NE(place, committed);
  for (std::uint64_t step = 3; step < 6; ++step) {
    write(2, step);
    EXPECT_EQ(table_.current(2), place);
  }
}

TEST_F(SegmentTableTest, WhatIsStagedCountsWhenItIsWritten) {
  write(2, 1);
  table_.stage(2, 77, 2);
  EXPECT_EQ(table_.checksum(2), 102U);
  EXPECT_EQ(table_.generation(2), 1U);
  table_.written(2, table_.target(2));
  EXPECT_EQ(table_.checksum(2), 77U);
  EXPECT_EQ(table_.generation(2), 2U);
}

TEST_F(SegmentTableTest, APlaceThatIsQuarantinedIsUsedNoMore) {
  write(2, 1);
  table_.commit();
  const auto committed = table_.current(2);
  const auto bad = table_.target(2);
  ASSERT_TRUE(table_.quarantine(2, bad));
  std::set<std::uint64_t> used;
  for (std::uint64_t step = 2; step < 8; ++step) {
    write(2, step);
    used.insert(table_.current(2));
    table_.commit();
  }
  EXPECT_FALSE(used.contains(bad));
  EXPECT_TRUE(used.contains(committed));
  EXPECT_EQ(used.size(), 2U);
  EXPECT_EQ(table_.quarantined(), 1U);
}

TEST_F(SegmentTableTest, SparesRunOutDriveByDrive) {
  std::set<std::uint64_t> spares;
  for (std::size_t segment = 0; segment < geometry_.segments(); ++segment) {
    if (geometry_.place(segment).drive != 0) continue;
    if (!table_.quarantine(segment, table_.target(segment))) continue;
    EXPECT_TRUE(spares.insert(table_.target(segment)).second);
  }
  EXPECT_EQ(spares.size(), 2U);
  for (std::size_t segment = 0; segment < geometry_.segments(); ++segment) {
    if (geometry_.place(segment).drive != 1) continue;
    EXPECT_TRUE(table_.quarantine(segment, table_.target(segment)));  // has its own
    const auto spare = table_.target(segment);
    EXPECT_TRUE(table_.quarantine(segment, spare));  // which may be bad too
    EXPECT_NE(table_.target(segment), spare);
    EXPECT_FALSE(table_.quarantine(segment, table_.target(segment)));
    break;
  }
}

TEST_F(SegmentTableTest, IsLoadedAsItWasCommitted) {
  for (std::size_t s = 0; s < geometry_.segments(); ++s) write(s, 1);
  ASSERT_TRUE(table_.quarantine(4, table_.target(4)));
  write(4, 2);
  const auto spare = table_.current(4);
  table_.commit();
  SegmentTable again(geometry_, slots(geometry_, 2));
  for (std::uint32_t d = 0; d < 2; ++d) again.load(table_.entries(d));
  for (std::size_t s = 0; s < geometry_.segments(); ++s) {
    EXPECT_EQ(again.current(s), table_.current(s));
    EXPECT_EQ(again.checksum(s), table_.checksum(s));
    EXPECT_EQ(again.generation(s), table_.generation(s));
    EXPECT_NE(again.target(s), again.current(s));
  }
  for (std::uint32_t d = 0; d < 2; ++d) EXPECT_EQ(again.entries(d), table_.entries(d));
  // The spare is taken, whoever took it.
  const auto drive = geometry_.place(4).drive;
  for (std::size_t s = 0; s < geometry_.segments(); ++s) {
    if (geometry_.place(s).drive != drive || s == 4) continue;
    ASSERT_TRUE(again.quarantine(s, again.target(s)));
    EXPECT_NE(again.target(s), spare);
    EXPECT_FALSE(again.quarantine(s, again.target(s)));
    break;
  }
}

TEST_F(SegmentTableTest, OneSlotIsAlwaysThere) {
  SegmentTable one(geometry_, {{{1_MiB}, {}, {}, 0}, {{2_MiB}, {}, {}, 0}});
  for (std::uint64_t step = 1; step < 4; ++step) {
    one.stage(0, step, step);
    EXPECT_EQ(one.target(0), (1_MiB + geometry_.place(0).offset).count);
    one.written(0, one.target(0));
    EXPECT_FALSE(one.quarantine(0, one.target(0)));
  }
}

// Any order of writes, failures and commits: what is committed is never the target, and no place
// belongs to two segments.
TEST_F(SegmentTableTest, NeverAimsAtWhatIsCommitted) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    SegmentTable table(geometry_, slots(geometry_, 3));
    std::vector<std::uint64_t> committed(geometry_.segments(), SegmentTable::kNowhere);
    for (int i = 0; i < 100; ++i) {
      const auto segment = random() % geometry_.segments();
      const auto target = table.target(segment);
      ASSERT_NE(target, committed[segment]) << "seed " << seed;
      const auto what = random() % 8;
      if (what == 0) {
        table.commit();
        for (std::size_t s = 0; s < committed.size(); ++s) committed[s] = table.current(s);
      } else if (what == 1) {
        table.quarantine(segment, target);
      } else {
        table.stage(segment, random(), 1);
        table.written(segment, target);
      }
    }
    std::set<std::pair<std::uint32_t, std::uint64_t>> places;
    for (std::size_t s = 0; s < geometry_.segments(); ++s) {
      for (const auto place : {committed[s], table.target(s)}) {
        if (place == SegmentTable::kNowhere) continue;
        EXPECT_TRUE(places.insert({geometry_.place(s).drive, place}).second) << "seed " << seed;
      }
    }
  }
}

// A place that refuses writes costs one spare at a time, over any number of runs.
TEST(SegmentTable, SparesThatNoCommitNamesAreUsedAgain) {
  const StoreGeometry geometry({{"states", {{}, 8_KiB}, 4_KiB, 4_KiB}}, {1});
  const DriveSlots slots{{1_MiB, 2_MiB}, 3_MiB, 4_KiB, 2};
  std::vector<TableEntry> committed;
  for (int run = 0; run < 20; ++run) {
    SegmentTable table(geometry, {slots});
    table.load(committed);
    auto target = table.target(0);
    const bool bad = target == (1_MiB).count;  // always
    if (bad) {
      ASSERT_TRUE(table.quarantine(0, target)) << run;
      target = table.target(0);
    }
    for (std::size_t segment = 0; segment < 2; ++segment) {
      table.stage(segment, 1, static_cast<std::uint64_t>(run));
      table.written(segment, segment == 0 ? target : table.target(segment));
    }
    table.commit();
    committed = table.entries(0);
  }
}

}  // namespace
}  // namespace terrace
