// bf16: the conversions against a reference in double, which rounds by arithmetic instead of bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "terrace/dtype.h"

namespace terrace {
namespace {

constexpr std::uint32_t kValues = 1U << 16;
constexpr int kPrecision = 8;             // bits of the significand, with the hidden one
constexpr int kSmallestExponent = -133;   // of the smallest subnormal

bfloat16 bf16(std::uint32_t bits) { return {static_cast<std::uint16_t>(bits)}; }
float fp32(std::uint32_t bits) { return std::bit_cast<float>(bits); }
bool is_nan(bfloat16 value) { return (value.bits & 0x7fff) > 0x7f80; }

// What the 16 bits mean, from the definition of the format.
double meaning(bfloat16 value) {
  const double sign = value.bits >> 15 != 0 ? -1 : 1;
  const int exponent = (value.bits >> 7) & 0xff;
  const int fraction = value.bits & 0x7f;
  if (exponent == 0xff) return sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(fraction, kSmallestExponent);
  return sign * std::ldexp(128 + fraction, exponent - 1 + kSmallestExponent);
}

// The nearest number of the format, ties to even, not below 2^128 meaning infinity.
double nearest(double value) {
  int exponent = 0;
  std::frexp(value, &exponent);
  const int unit = std::max(exponent - kPrecision, kSmallestExponent);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
  return std::abs(rounded) < 0x1p128
             ? rounded
             : std::copysign(std::numeric_limits<double>::infinity(), value);
}

TEST(Bf16, EveryValueMeansWhatTheFormatSays) {
  for (std::uint32_t bits = 0; bits < kValues; ++bits) {
    const float value = to_float(bf16(bits));
    if (is_nan(bf16(bits))) {
      EXPECT_TRUE(std::isnan(value)) << bits;
      continue;
    }
    EXPECT_EQ(value, meaning(bf16(bits))) << bits;
    EXPECT_EQ(std::signbit(value), bits >> 15 != 0) << bits;
  }
}

TEST(Bf16, EveryValueSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < kValues; ++bits) {
    // A NaN keeps its sign and payload and becomes quiet.
    const std::uint32_t expected = is_nan(bf16(bits)) ? bits | 0x40 : bits;
    EXPECT_EQ(to_bfloat16(to_float(bf16(bits))).bits, expected) << bits;
  }
}

// Around every value: just above, just below and at the tie with its neighbour.
TEST(Bf16, RoundsLikeTheReference) {
  for (std::uint32_t high = 0; high < kValues; ++high) {
    if (is_nan(bf16(high)) || (high & 0x7fff) == 0x7f80) continue;
    for (const std::uint32_t low : {0U, 1U, 0x1234U, 0x7fffU, 0x8000U, 0x8001U, 0xfedcU, 0xffffU}) {
      const float value = fp32(high << 16 | low);
      const bfloat16 rounded = to_bfloat16(value);
      ASSERT_EQ(meaning(rounded), nearest(static_cast<double>(value))) << std::hex << high << low;
      ASSERT_EQ(rounded.bits >> 15, high >> 15) << std::hex << high << low;
    }
  }
}

TEST(Bf16, TiesGoToEven) {
  EXPECT_EQ(to_bfloat16(0x1.01p0F).bits, 0x3f80);   // between 1 and 1 + 2^-7
  EXPECT_EQ(to_bfloat16(0x1.03p0F).bits, 0x3f82);   // between 1 + 2^-7 and 1 + 2^-6
  EXPECT_EQ(to_bfloat16(-0x1.01p0F).bits, 0xbf80);
  EXPECT_EQ(to_bfloat16(0x1.ffp0F).bits, 0x4000);   // carries into the exponent
  EXPECT_EQ(to_bfloat16(0x1p-134F).bits, 0x0000);   // half the smallest subnormal
  EXPECT_EQ(to_bfloat16(0x1.8p-133F).bits, 0x0002);
}

TEST(Bf16, OverflowGoesToInfinity) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_bfloat16(kInfinity).bits, 0x7f80);
  EXPECT_EQ(to_bfloat16(-kInfinity).bits, 0xff80);
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::lowest()).bits, 0xff80);
  EXPECT_EQ(to_bfloat16(0x1.fep127F).bits, 0x7f7f);      // the largest number
  EXPECT_EQ(to_bfloat16(0x1.fefffep127F).bits, 0x7f7f);  // just below the tie with 2^128
  EXPECT_EQ(to_bfloat16(0x1.ffp127F).bits, 0x7f80);      // the tie
}

TEST(Bf16, NanStaysNan) {
  EXPECT_EQ(to_bfloat16(fp32(0x7fc00000)).bits, 0x7fc0);
  EXPECT_EQ(to_bfloat16(fp32(0xffc00000)).bits, 0xffc0);
  EXPECT_EQ(to_bfloat16(fp32(0x7f800001)).bits, 0x7fc0);  // a payload in the lower half only
  EXPECT_EQ(to_bfloat16(fp32(0xff80ffff)).bits, 0xffc0);
  EXPECT_EQ(to_bfloat16(fp32(0x7fffffff)).bits, 0x7fff);  // rounding up would give -0
}

TEST(Bf16, ConvertsAtCompileTime) {
  static_assert(to_bfloat16(1.0F) == bfloat16{0x3f80});
  static_assert(to_float(bfloat16{0xc000}) == -2.0F);
  static_assert(size_of(DType::fp32) == Bytes{4} && size_of(DType::bf16) == Bytes{2});
}

}  // namespace
}  // namespace terrace
