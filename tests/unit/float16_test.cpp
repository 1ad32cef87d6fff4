// fp16: the conversions against a reference in double, which rounds by arithmetic instead of bits,
// and against the CPU's own where it has them.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "terrace/dtype.h"

namespace terrace {
namespace {

constexpr std::uint32_t kValues = 1U << 16;
constexpr int kPrecision = 11;          // bits of the significand, with the hidden one
constexpr int kSmallestExponent = -24;  // of the smallest subnormal
constexpr double kInfinity = std::numeric_limits<double>::infinity();

float16 fp16(std::uint32_t bits) { return {static_cast<std::uint16_t>(bits)}; }
float fp32(std::uint32_t bits) { return std::bit_cast<float>(bits); }
bool is_nan(float16 value) { return (value.bits & 0x7fff) > 0x7c00; }

// What the 16 bits mean, from the definition of the format.
double meaning(float16 value) {
  const double sign = value.bits >> 15 != 0 ? -1 : 1;
  const int exponent = (value.bits >> 10) & 0x1f;
  const int fraction = value.bits & 0x3ff;
  if (exponent == 0x1f) return sign * kInfinity;
  if (exponent == 0) return sign * std::ldexp(fraction, kSmallestExponent);
  return sign * std::ldexp(1024 + fraction, exponent - 1 + kSmallestExponent);
}

// The nearest number of the format, ties to even, not below 2^16 meaning infinity.
double nearest(double value) {
  int exponent = 0;
  std::frexp(value, &exponent);
  const int unit = std::max(exponent - kPrecision, kSmallestExponent);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
  return std::abs(rounded) < 0x1p16 ? rounded : std::copysign(kInfinity, value);
}

TEST(Fp16, EveryValueMeansWhatTheFormatSays) {
  for (std::uint32_t bits = 0; bits < kValues; ++bits) {
    const float value = to_float(fp16(bits));
    ASSERT_EQ(std::signbit(value), bits >> 15 != 0) << bits;
    if (is_nan(fp16(bits))) {
      ASSERT_TRUE(std::isnan(value)) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(value), meaning(fp16(bits))) << bits;
    }
  }
}

TEST(Fp16, EveryValueSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < kValues; ++bits) {
    // A NaN keeps its sign and payload and becomes quiet.
    const std::uint32_t expected = is_nan(fp16(bits)) ? bits | 0x200 : bits;
    ASSERT_EQ(to_float16(to_float(fp16(bits))).bits, expected) << bits;
  }
}

// Every sign, exponent and fraction of fp16's length with tails around the tie, and the powers of
// two down to fp32's subnormals, where the tie lies elsewhere.
TEST(Fp16, RoundsLikeTheReference) {
  for (std::uint32_t high = 0; high < 1U << 19; ++high) {
    for (const std::uint32_t low : {0U, 1U, 0x567U, 0xfffU, 0x1000U, 0x1001U, 0x1fffU}) {
      const float value = fp32(high << 13 | low);
      if (!std::isfinite(value)) continue;
      const float16 rounded = to_float16(value);
      ASSERT_EQ(meaning(rounded), nearest(static_cast<double>(value))) << std::hex << high << low;
      ASSERT_EQ(rounded.bits >> 15, high >> 18) << std::hex << high << low;
    }
  }
}

TEST(Fp16, TheEdges) {
  EXPECT_EQ(to_float16(65504.0F).bits, 0x7bff);        // the largest number
  EXPECT_EQ(to_float16(65519.996F).bits, 0x7bff);      // just below the tie with 2^16
  EXPECT_EQ(to_float16(65520.0F).bits, 0x7c00);        // the tie
  EXPECT_EQ(to_float16(-65536.0F).bits, 0xfc00);
  EXPECT_EQ(to_float16(fp32(0x7f800000)).bits, 0x7c00);
  EXPECT_EQ(to_float16(std::numeric_limits<float>::lowest()).bits, 0xfc00);
  EXPECT_EQ(to_float16(0x1p-14F).bits, 0x0400);        // the smallest normal number
  EXPECT_EQ(to_float16(0x1.ff8p-15F).bits, 0x03ff);    // the largest subnormal
  EXPECT_EQ(to_float16(0x1.ffcp-15F).bits, 0x0400);    // the tie between both
  EXPECT_EQ(to_float16(0x1p-24F).bits, 0x0001);        // the smallest subnormal
  EXPECT_EQ(to_float16(0x1p-25F).bits, 0x0000);        // its half: a tie
  EXPECT_EQ(to_float16(-0x1.000002p-25F).bits, 0x8001);
  EXPECT_EQ(to_float16(-0x1p-149F).bits, 0x8000);
  EXPECT_EQ(to_float16(fp32(0x7fc00000)).bits, 0x7e00);
  EXPECT_EQ(to_float16(fp32(0xff800001)).bits, 0xfe00);  // a payload in the lower part only
  EXPECT_EQ(to_float16(fp32(0x7fffffff)).bits, 0x7fff);
}

#if defined(__x86_64__)
__attribute__((target("f16c"))) std::uint16_t by_cpu(float value) {
  return static_cast<std::uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
}
__attribute__((target("f16c"))) float by_cpu(std::uint16_t value) { return _cvtsh_ss(value); }

TEST(Fp16, EqualsWhatTheCpuConverts) {
  // Every CPU with AVX2 has F16C; not every compiler lets one ask for it.
  if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "this CPU has no F16C";
  for (std::uint32_t bits = 0; bits < kValues; ++bits) {
    const auto narrow = static_cast<std::uint16_t>(bits);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(to_float(float16{narrow})),
              std::bit_cast<std::uint32_t>(by_cpu(narrow))) << bits;
  }
  constexpr std::uint64_t kStride = 997;  // odd: every residue of the low bits is met
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += kStride) {
    const float value = fp32(static_cast<std::uint32_t>(bits));
    ASSERT_EQ(to_float16(value).bits, by_cpu(value)) << std::hex << bits;
  }
}
#endif

TEST(Fp16, ConvertsAtCompileTime) {
  static_assert(to_float16(1.0F) == float16{0x3c00});
  static_assert(to_float(float16{0xc000}) == -2.0F);
  static_assert(to_float(float16{0x0001}) == 0x1p-24F);
  static_assert(size_of(DType::fp16) == Bytes{2});
}

}  // namespace
}  // namespace terrace
