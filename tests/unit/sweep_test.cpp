#include "nvme/sweep.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "nvme/cliff.h"
#include "nvme/drive_statistics.h"
#include "nvme/time_plan.h"
#include "nvme/uplink.h"

namespace terrace::bench {
namespace {

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;
constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};

std::vector<Cell> usual_grid() {
  return grid({Pattern::read, Pattern::overwrite}, {128 * kKiB, 512 * kKiB, kMiB, 4 * kMiB},
              {1, 2, 4, 8, 16}, kNoLimit);
}

// A drive that is saturated by `enough` bytes in flight.
double saturating(const Cell& cell, double most, double enough) {
  const auto bytes = static_cast<double>(cell.block_bytes * cell.depth);
  return most * std::min(1.0, bytes / enough);
}

std::vector<SweepCell> measured(double read_enough, double write_enough, double noise) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> factor(1, noise);
  std::vector<SweepCell> cells;
  for (const auto& cell : usual_grid()) {
    SweepCell seen{cell, {}, false};
    const double enough = cell.pattern == Pattern::read ? read_enough : write_enough;
    for (int i = 0; i < 5; ++i) {
      seen.gb_s.push_back(saturating(cell, 3.0, enough) * std::max(0.05, factor(random)));
    }
    cells.push_back(std::move(seen));
  }
  return cells;
}

TEST(Grid, KeepsToTheBytesInFlight) {
  const auto cells = grid({Pattern::read}, {kMiB, 4 * kMiB}, {1, 4}, 4 * kMiB);
  EXPECT_EQ(cells, (std::vector<Cell>{{Pattern::read, kMiB, 1, 1},
                                      {Pattern::read, kMiB, 4, 1},
                                      {Pattern::read, 4 * kMiB, 1, 1}}));
}

TEST(Grid, FitsTheTime) {
  const std::vector<std::uint64_t> blocks{64 * kKiB, 128 * kKiB, 256 * kKiB, 512 * kKiB, kMiB};
  const std::vector<std::uint32_t> depths{1, 2, 4, 8};
  const auto cells_in = [&](double seconds) {
    return fitting_grid({Pattern::read}, blocks, depths, kNoLimit, [](const Cell&) { return 1.0; },
                        seconds);
  };
  EXPECT_EQ(cells_in(40).size(), 20U) << "twice each";
  const auto thinned = cells_in(39);  // blocks 64 KiB, 256 KiB, 1 MiB
  EXPECT_EQ(thinned.size(), 12U);
  EXPECT_EQ(thinned.front().block_bytes, 64 * kKiB);
  EXPECT_EQ(thinned.back(), (Cell{Pattern::read, kMiB, 8, 1}));
  EXPECT_EQ(cells_in(23).size(), 6U) << "depths 2 and 8";
  EXPECT_EQ(cells_in(0).size(), 4U) << "two of each";
}

TEST(Knee, IsTheSmallestSettingThatIsGoodEnough) {
  const auto knee = find_knee(measured(2e6, 2e6, 0.01));
  ASSERT_TRUE(knee.found) << knee.why_not;
  EXPECT_EQ(knee.block_bytes * knee.depth, 2 * kMiB);
  EXPECT_EQ(knee.depth, 2U) << "of equal settings the shallower";
  EXPECT_GT(knee.share, 0.95);
  EXPECT_GE(knee.best_block_bytes * knee.best_depth, 2 * kMiB);
}

TEST(Knee, SuitsReadsAndWritesAlike) {
  const auto knee = find_knee(measured(1e6, 8e6, 0.01));
  ASSERT_TRUE(knee.found) << knee.why_not;
  EXPECT_EQ(knee.block_bytes * knee.depth, 8 * kMiB);
}

TEST(Knee, SaysTooNoisyInsteadOfANumber) {
  const auto knee = find_knee(measured(2e6, 2e6, 0.5));
  EXPECT_FALSE(knee.found);
  EXPECT_NE(knee.why_not.find("too noisy"), std::string::npos);
  EXPECT_GT(knee.noise, kTooNoisy);
}

TEST(Knee, NeedsRepeats) {
  EXPECT_FALSE(find_knee({}).found);
  auto cells = measured(2e6, 2e6, 0.01);
  for (auto& cell : cells) cell.gb_s.resize(1);
  EXPECT_FALSE(find_knee(cells).found);
}

TEST(Knee, LeavesOutWhatOnePatternDidNotMeasure) {
  auto cells = measured(2e6, 2e6, 0.01);
  for (auto& cell : cells) {
    const bool knee = cell.cell.block_bytes * cell.cell.depth == 2 * kMiB;
    if (knee && cell.cell.pattern == Pattern::overwrite) cell.gb_s.clear();
  }
  const auto found = find_knee(cells);
  ASSERT_TRUE(found.found);
  EXPECT_EQ(found.block_bytes * found.depth, 4 * kMiB);
}

// Runs a sweep of `visits` on a made-up drive and returns the visits to each cell.
std::map<Cell, int> run(Sweep& sweep, int visits, double noise) {
  std::mt19937_64 random(5);
  std::normal_distribution<double> factor(1, noise);
  std::map<Cell, int> counts;
  for (int i = 0; i < visits; ++i) {
    const auto next = sweep.next();
    if (!next) break;
    const auto& cell = sweep.cells()[*next].cell;
    ++counts[cell];
    sweep.add(*next, saturating(cell, 3.0, 4e6) * factor(random));
  }
  return counts;
}

TEST(Sweep, VisitsEveryCellFirstAndInRandomOrder) {
  const auto cells = usual_grid();
  Sweep sweep(cells, 1);
  const auto counts = run(sweep, static_cast<int>(cells.size()), 0.01);
  EXPECT_EQ(counts.size(), cells.size());
  const auto first = [&](std::uint64_t seed) { return *Sweep(cells, seed).next(); };
  std::set<std::size_t> firsts;
  for (std::uint64_t seed = 0; seed < 10; ++seed) firsts.insert(first(seed));
  EXPECT_GT(firsts.size(), 3U);
}

TEST(Sweep, EndsWhenEverythingIsSteady) {
  const auto cells = usual_grid();
  Sweep sweep(cells, 1);
  const auto counts = run(sweep, 10000, 0.001);
  for (const auto& [cell, count] : counts) EXPECT_EQ(count, 3) << cell.block_bytes;
  EXPECT_FALSE(sweep.next());
}

TEST(Sweep, RepeatsWhatIsUnsteadyWithABound) {
  Sweep sweep(usual_grid(), 1);
  const auto counts = run(sweep, 10000, 0.3);
  EXPECT_FALSE(sweep.next());
  for (const auto& [cell, count] : counts) EXPECT_LE(count, 9);
}

TEST(Sweep, SpendsRepeatsNearTheBest) {
  const auto cells = usual_grid();
  Sweep sweep(cells, 1);
  const auto counts = run(sweep, static_cast<int>(cells.size()) + 40, 0.2);
  double near = 0;
  double far = 0;
  for (const auto& [cell, count] : counts) {
    (saturating(cell, 3.0, 4e6) > 2.9 ? near : far) += count - 1;
  }
  EXPECT_GT(near, 4 * far);
}

TEST(Sweep, SkipsQueuesThatASlowDriveCannotEmpty) {
  Sweep sweep(grid({Pattern::read}, {4 * kMiB}, {1, 2, 4, 8, 16, 32}, kNoLimit), 1);
  while (const auto next = sweep.next()) sweep.add(*next, 0.05);  // 20 MB in 0.4 s
  for (const auto& cell : sweep.cells()) {
    EXPECT_EQ(cell.skipped, cell.cell.depth > 4) << cell.cell.depth;
    EXPECT_EQ(cell.gb_s.empty(), cell.skipped);
  }
}

std::vector<TimelinePoint> timeline(double before, double after, double cliff_bytes, double seconds,
                                    double noise) {
  std::mt19937_64 random(11);
  std::normal_distribution<double> factor(1, noise);
  std::vector<TimelinePoint> points;
  double bytes = 0;
  constexpr double kStep = 0.01;
  for (double at = 0; at < seconds; at += kStep) {
    points.push_back({at, static_cast<std::uint64_t>(bytes)});
    bytes += (bytes < cliff_bytes ? before : after) * 1e9 * kStep * std::max(0.0, factor(random));
  }
  return points;
}

TEST(Cliff, IsFoundWhereItIs) {
  for (const double place : {2e9, 5e9, 9e9}) {
    for (const double noise : {0.0, 0.1, 0.3}) {
      const auto cliff = find_cliff(timeline(2.0, 0.5, place, 10, noise));
      ASSERT_TRUE(cliff.found) << place << " " << noise;
      EXPECT_NEAR(static_cast<double>(cliff.at_bytes), place, 0.1 * place) << noise;
      EXPECT_NEAR(cliff.before_gb_s, 2.0, 0.2);
      EXPECT_NEAR(cliff.after_gb_s, 0.5, 0.1);
    }
  }
}

TEST(Cliff, IsNotInvented) {
  for (const double noise : {0.0, 0.1, 0.3}) {
    const auto cliff = find_cliff(timeline(2.0, 2.0, 1e9, 10, noise));
    EXPECT_FALSE(cliff.found) << noise;
    EXPECT_NEAR(cliff.mean_gb_s, 2.0, 0.1);
  }
  EXPECT_FALSE(find_cliff(timeline(2.0, 1.8, 5e9, 10, 0.0)).found) << "a tenth is no cliff";
  EXPECT_FALSE(find_cliff(timeline(0.5, 2.0, 2e9, 10, 0.0)).found) << "faster is no cliff";
  EXPECT_FALSE(find_cliff({}).found);
  // One long stall is no cliff either.
  auto points = timeline(2.0, 2.0, 1e9, 10, 0.05);
  for (auto& point : points) point.seconds += point.seconds > 5 ? 0.5 : 0;
  EXPECT_FALSE(find_cliff(points).found);
}

TEST(Cliff, SpeedsForAPicture) {
  const auto speeds = speeds_of(timeline(2.0, 0.5, 8e9, 8, 0.0), 10);
  ASSERT_EQ(speeds.size(), 10U);
  EXPECT_NEAR(speeds.front(), 2.0, 0.01);
  EXPECT_NEAR(speeds.back(), 0.5, 0.01);
  EXPECT_TRUE(speeds_of({}, 10).empty());
}

TEST(Uplink, FreeDrivesShareNothing) {
  EXPECT_TRUE(shared_uplinks({3, 3}, {{0, 1, 5.9}}).empty());
  EXPECT_TRUE(shared_uplinks({3}, {}).empty());
}

TEST(Uplink, TwoOfThree) {
  const auto found = shared_uplinks({3, 2, 3}, {{0, 1, 4.9}, {0, 2, 3.2}, {1, 2, 4.8}});
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].drives, (std::vector<std::size_t>{0, 2}));
  EXPECT_EQ(found[0].gb_s, 3.2);
}

TEST(Uplink, ChainsAreOneGroup) {
  const auto found =
      shared_uplinks({3, 3, 3, 3}, {{0, 1, 3}, {1, 2, 3.5}, {0, 2, 3}, {0, 3, 6}, {2, 3, 6}});
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].drives, (std::vector<std::size_t>{0, 1, 2}));
  EXPECT_EQ(found[0].gb_s, 3.5);
}

TEST(TimePlan, WhatOnePhaseLeavesFallsToTheOthers) {
  using std::chrono::seconds;
  TimePlan plan(seconds(100), seconds(60), 6);
  EXPECT_EQ(plan.deadline(seconds(100), 1), seconds(110));
  EXPECT_EQ(plan.deadline(seconds(105), 1), seconds(116));  // 55 s for 5 parts
  plan.drop(2);
  EXPECT_EQ(plan.deadline(seconds(120), 1), seconds(140));  // 40 s for 2
  EXPECT_EQ(plan.deadline(seconds(170), 1), seconds(170)) << "late: no time, never a negative one";
}

}  // namespace
}  // namespace terrace::bench
