#include "nvme/drive_statistics.h"

#include <gtest/gtest.h>

#include <random>

#include "nvme/latency_histogram.h"

namespace terrace::bench {
namespace {

using Values = std::vector<double>;

TEST(DriveStatistics, Quantiles) {
  EXPECT_EQ(median(Values{}), 0);
  EXPECT_EQ(median(Values{7}), 7);
  EXPECT_EQ(median(Values{3, 1}), 2);
  EXPECT_EQ(median(Values{9, 1, 5}), 5);
  EXPECT_EQ(quantile(Values{1, 2, 3, 4, 5}, 0.25), 2);
  EXPECT_EQ(quantile(Values{4, 1, 3, 2}, 0.75), 3.25);
  EXPECT_EQ(quantile(Values{4, 1, 3, 2}, 2), 4);
}

TEST(DriveStatistics, SpreadIsTheQuartilesOverTheMedian) {
  EXPECT_EQ(spread(Values{5}), std::nullopt);
  EXPECT_EQ(spread(Values{0, 0, 0}), std::nullopt);
  EXPECT_EQ(spread(Values{2, 2, 2}), 0);
  EXPECT_DOUBLE_EQ(*spread(Values{8, 9, 10, 11, 12}), 0.2);
}

// Coverage 1 − 2·P(Bin(n, 1/2) < cut): tables of the sign test.
TEST(DriveStatistics, IntervalOfTheMedianFromRanks) {
  const auto five = median_interval(Values{5, 4, 3, 2, 1});
  EXPECT_EQ(five.low, 1);
  EXPECT_EQ(five.high, 5);
  EXPECT_DOUBLE_EQ(five.coverage, 1 - 2.0 / 32);  // too few for 95 %
  const auto six = median_interval(Values{1, 2, 3, 4, 5, 6});
  EXPECT_EQ(six.low, 1);
  EXPECT_EQ(six.high, 6);
  EXPECT_DOUBLE_EQ(six.coverage, 1 - 2.0 / 64);
  const auto nine = median_interval(Values{1, 2, 3, 4, 5, 6, 7, 8, 9});
  EXPECT_EQ(nine.low, 2);
  EXPECT_EQ(nine.high, 8);
  EXPECT_DOUBLE_EQ(nine.coverage, 1 - 2.0 * 10 / 512);
  Values twenty;
  for (int i = 1; i <= 20; ++i) twenty.push_back(i);
  EXPECT_EQ(median_interval(twenty).low, 6);
  EXPECT_EQ(median_interval(twenty).high, 15);
  EXPECT_NEAR(median_interval(twenty).coverage, 0.9586, 1e-4);
  EXPECT_EQ(median_interval(Values{}).width(), 0);
}

// The interval holds the true median about as often as it says.
TEST(DriveStatistics, IntervalCoversWhatItPromises) {
  std::mt19937_64 random(7);
  std::exponential_distribution<double> skewed(1);
  const double truth = std::log(2.0);
  int covered = 0;
  constexpr int kRounds = 2000;
  for (int round = 0; round < kRounds; ++round) {
    Values values;
    for (int i = 0; i < 12; ++i) values.push_back(skewed(random));
    covered += median_interval(values).contains(truth) ? 1 : 0;
  }
  EXPECT_GT(covered, kRounds * 0.945);  // 96.1 % by the table
  EXPECT_LT(covered, kRounds * 0.98);
}

TEST(DriveStatistics, PairsCancelWhatBothFeel) {
  Values first;
  Values second;
  for (const double weather : {1.0, 0.5, 2.0, 0.25, 1.5, 0.75, 1.0, 3.0}) {
    first.push_back(0.99 * weather);
    second.push_back(weather);
  }
  const auto pairs = compare_pairs(first, second);
  EXPECT_DOUBLE_EQ(pairs.ratio, 0.99);
  EXPECT_FALSE(pairs.too_noisy);
  EXPECT_NEAR(pairs.interval.width(), 0, 1e-12);
  EXPECT_TRUE(compare_pairs(Values{1, 1, 1, 1, 1}, Values{1, 1, 1, 1, 1}).too_noisy) << "too few";
  const auto wide = compare_pairs(Values{1, 2, 1, 2, 1, 2, 1, 2}, Values{1, 1, 1, 1, 1, 1, 1, 1});
  EXPECT_TRUE(wide.too_noisy);
  EXPECT_EQ(compare_pairs(Values{1, 5}, Values{0, 5}).ratios.size(), 1U) << "no division by zero";
}

// Exact tails of the rank-sum test: with 3 and 3 values the extreme order has probability 1/20,
// with 5 and 5 1/252.
TEST(DriveStatistics, ChangesBetweenRuns) {
  EXPECT_DOUBLE_EQ(compare_sets(Values{1, 2, 3}, Values{4, 5, 6}).p_value, 2.0 / 20);
  EXPECT_DOUBLE_EQ(compare_sets(Values{1, 2, 3, 4, 5}, Values{6, 7, 8, 9, 10}).p_value, 2.0 / 252);
  EXPECT_DOUBLE_EQ(compare_sets(Values{6, 7, 8, 9, 10}, Values{1, 2, 3, 4, 5}).p_value, 2.0 / 252);
  EXPECT_DOUBLE_EQ(compare_sets(Values{1, 2, 3, 4, 5}, Values{1, 2, 3, 4, 5}).p_value, 1);
  EXPECT_EQ(compare_sets(Values{1, 2}, Values{8, 9}).p_value, 1) << "too few to tell";
  EXPECT_DOUBLE_EQ(compare_sets(Values{2, 2, 2}, Values{3, 3, 3}).ratio, 1.5);
  Values many(40);
  Values more(40);
  for (std::size_t i = 0; i < many.size(); ++i) {
    many[i] = static_cast<double>(i % 10);
    more[i] = static_cast<double>(i % 10) + 6;
  }
  EXPECT_LT(compare_sets(many, more).p_value, 1e-6);
  EXPECT_GT(compare_sets(many, many).p_value, 0.9);
}

TEST(DriveStatistics, ManyTestsDoNotInventAChange) {
  EXPECT_EQ(significant(Values{0.04, 0.01, 0.03}), (std::vector<bool>{false, true, false}));
  EXPECT_EQ(significant(Values{0.02, 0.01, 0.04}), (std::vector<bool>{true, true, true}));
  EXPECT_EQ(significant(Values{0.03, 0.03}), (std::vector<bool>{false, false}));
  EXPECT_TRUE(significant(Values{}).empty());
}

TEST(LatencyHistogram, KeepsThreePercent) {
  LatencyHistogram histogram;
  EXPECT_EQ(histogram.quantile_us(0.5), 0);
  for (int us = 1; us <= 1000; ++us) histogram.add(std::chrono::microseconds(us));
  EXPECT_EQ(histogram.count(), 1000U);
  EXPECT_NEAR(histogram.quantile_us(0.5), 500, 500 * 0.033);
  EXPECT_NEAR(histogram.quantile_us(0.99), 990, 990 * 0.033);
  EXPECT_EQ(histogram.quantile_us(1), 1000);
  EXPECT_EQ(histogram.max_us(), 1000);
}

TEST(LatencyHistogram, TakesEveryValue) {
  for (const std::int64_t ns :
       {std::int64_t{-5}, std::int64_t{0}, std::int64_t{1}, std::int64_t{31}, std::int64_t{32},
        std::int64_t{63}, std::int64_t{64}, std::int64_t{1} << 40, std::int64_t{1} << 62}) {
    LatencyHistogram histogram;
    histogram.add(Nanoseconds{ns});
    const double us = static_cast<double>(std::max<std::int64_t>(0, ns)) * 1e-3;
    EXPECT_LE(histogram.quantile_us(0.5), us) << ns;
    EXPECT_GE(histogram.quantile_us(0.5), us * 0.96) << ns;
  }
  for (std::size_t i = 0; i + 1 < LatencyHistogram::kBuckets; ++i) {
    EXPECT_LT(LatencyHistogram::lower_bound(i), LatencyHistogram::lower_bound(i + 1));
  }
}

TEST(LatencyHistogram, Adds) {
  LatencyHistogram a;
  LatencyHistogram b;
  a.add(std::chrono::microseconds(10));
  b.add(std::chrono::microseconds(1000));
  a.add(b);
  EXPECT_EQ(a.count(), 2U);
  EXPECT_EQ(a.max_us(), 1000);
}

}  // namespace
}  // namespace terrace::bench
