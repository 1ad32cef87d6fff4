#include "nvme/training_verdict.h"

#include <gtest/gtest.h>

#include "terrace/error.h"

namespace terrace::bench {
namespace {

constexpr DriveSpeeds kDrive{4.0, 2.0, 5.2};  // GB/s

// By hand, for 10^9 parameters: 4 GB fetched at 4 GB/s = 1 s; 26 GB at 5.2 = 5 s and 14 GB at 2 =
// 7 s, so the writes decide: 8 s.
TEST(Verdict, WithoutCompute) {
  const auto verdict = judge(kDrive, {1e9, {}, {}, 1});
  EXPECT_DOUBLE_EQ(verdict.read_bytes_per_step, 16e9);
  EXPECT_DOUBLE_EQ(verdict.written_bytes_per_step, 14e9);
  EXPECT_DOUBLE_EQ(verdict.stored_bytes, 26e9);
  EXPECT_DOUBLE_EQ(verdict.drive_seconds, 8);
  EXPECT_DOUBLE_EQ(verdict.seconds_to_hide, 8);
  EXPECT_FALSE(verdict.hides || verdict.serial_seconds || verdict.overlapped_seconds ||
               verdict.needed_gb_s || verdict.drives_needed || verdict.days_to_wear_out);
}

TEST(Verdict, TheOptimizersMixDecidesWhenWritesAreFast) {
  EXPECT_DOUBLE_EQ(judge({4.0, 100.0, 5.2}, {1e9, {}, {}, 1}).drive_seconds, 6);
}

// Serial: 10 + 16/4 + 14/2 = 21. Overlapped: max(10, 8). Needed: 30 GB in 10 s.
TEST(Verdict, Hides) {
  const auto verdict = judge(kDrive, {1e9, 10.0, {}, 1});
  EXPECT_DOUBLE_EQ(*verdict.serial_seconds, 21);
  EXPECT_DOUBLE_EQ(*verdict.overlapped_seconds, 10);
  EXPECT_TRUE(*verdict.hides);
  EXPECT_DOUBLE_EQ(*verdict.needed_gb_s, 3);
  EXPECT_EQ(*verdict.drives_needed, 1U);
}

// A drive that mixes badly: 4/4 + 26/3 s with both directions at once, 16/4 + 14/100 s in turn.
TEST(Verdict, OverlappedIsNeverLongerThanSerial) {
  const auto verdict = judge({4.0, 100.0, 3.0}, {1e9, 0.5, {}, 1});
  EXPECT_DOUBLE_EQ(*verdict.overlapped_seconds, 1 + 26.0 / 3);
  EXPECT_DOUBLE_EQ(*verdict.serial_seconds, 0.5 + 1 + 26.0 / 3);
}

// 80 s on the drive against 30 s of compute: 2.67 drives.
TEST(Verdict, DoesNotHide) {
  const auto verdict = judge(kDrive, {1e10, 30.0, {}, 1});
  EXPECT_DOUBLE_EQ(verdict.drive_seconds, 80);
  EXPECT_DOUBLE_EQ(*verdict.overlapped_seconds, 80);
  EXPECT_FALSE(*verdict.hides);
  EXPECT_DOUBLE_EQ(*verdict.needed_gb_s, 10);
  EXPECT_EQ(*verdict.drives_needed, 3U);
}

// 600 TB at 14 GB a step: 42857 steps; of 10 s each: 4.96 days.
TEST(Verdict, Endurance) {
  const auto verdict = judge(kDrive, {1e9, 10.0, 600e12, 1});
  EXPECT_NEAR(*verdict.steps_to_wear_out, 42857.14, 0.01);
  EXPECT_NEAR(*verdict.days_to_wear_out, 42857.14 * 10 / 86400, 1e-3);
  const auto idle = judge(kDrive, {1e9, {}, 600e12, 1});
  EXPECT_NEAR(*idle.days_to_wear_out, 42857.14 * 8 / 86400, 1e-3);
}

TEST(Verdict, DrivesShareTheWork) {
  const auto two = judge(kDrive, {1e10, 30.0, 600e12, 2});
  EXPECT_DOUBLE_EQ(two.drive_seconds, 40);
  EXPECT_EQ(*two.drives_needed, 3U) << "the same number, however many were measured";
  EXPECT_NEAR(*two.steps_to_wear_out, 2 * 600e12 / 140e9, 0.01);
}

TEST(Verdict, ExactlyEnoughIsEnough) {
  const auto verdict = judge(kDrive, {1e9, 8.0, {}, 1});
  EXPECT_TRUE(*verdict.hides);
  EXPECT_EQ(*verdict.drives_needed, 1U);
}

TEST(Verdict, ParameterCounts) {
  EXPECT_EQ(parse_parameters("7B"), 7e9);
  EXPECT_EQ(parse_parameters("70b"), 70e9);
  EXPECT_EQ(parse_parameters("350M"), 350e6);
  EXPECT_EQ(parse_parameters("1.5e9"), 1.5e9);
  EXPECT_EQ(parse_parameters("1T"), 1e12);
  for (const char* wrong : {"", "B", "7X", "7BB", "-1B", "nan", "inf", "0"}) {
    EXPECT_THROW(parse_parameters(wrong), Error) << wrong;
  }
}

}  // namespace
}  // namespace terrace::bench
