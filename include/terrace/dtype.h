// Element types and their conversions. The conversions are ours, in integer arithmetic, so that
// every compiler and instruction set rounds alike (to nearest, ties to even).
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "terrace/types.h"

namespace terrace {

enum class DType : std::uint8_t { fp32, bf16, fp16 };

constexpr Bytes size_of(DType dtype) { return {dtype == DType::fp32 ? 4U : 2U}; }

std::string_view to_string(DType dtype);          // "fp32", "bf16", "fp16"
DType parse_dtype(std::string_view text);         // throws Error(invalid_argument)

// The high half of an fp32.
struct bfloat16 {
  std::uint16_t bits = 0;
  friend constexpr bool operator==(bfloat16, bfloat16) = default;
};

constexpr float to_float(bfloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

// Nearest bf16, ties to even; overflow goes to infinity, NaN stays a quiet NaN of the same sign.
constexpr bfloat16 to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40U)};
  }
  const std::uint32_t rounding = 0x7fffU + ((bits >> 16) & 1U);
  return {static_cast<std::uint16_t>((bits + rounding) >> 16)};
}

// IEEE 754 binary16: 5 bits of exponent, 10 of fraction.
struct float16 {
  std::uint16_t bits = 0;
  friend constexpr bool operator==(float16, float16) = default;
};

// Exact; NaN becomes a quiet NaN with the same sign and payload.
constexpr float to_float(float16 value) {
  const std::uint32_t sign = (value.bits & 0x8000U) << 16;
  const std::uint32_t exponent = (value.bits >> 10) & 0x1fU;
  std::uint32_t fraction = value.bits & 0x3ffU;
  if (exponent == 0x1f) {
    const std::uint32_t payload = fraction == 0 ? 0 : (fraction << 13) | 0x400000U;
    return std::bit_cast<float>(sign | 0x7f800000U | payload);
  }
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  }
  if (fraction == 0) return std::bit_cast<float>(sign);
  // A subnormal is a number of fp32: its leading bit becomes the hidden one.
  const auto shift = static_cast<std::uint32_t>(std::countl_zero(fraction)) - 21;
  fraction = (fraction << shift) & 0x3ffU;
  return std::bit_cast<float>(sign | ((113 - shift) << 23) | (fraction << 13));
}

// Nearest fp16, ties to even; 65520 and above go to infinity, what is too small to a subnormal or
// zero; NaN stays a quiet NaN of the same sign.
constexpr float16 to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  const auto result = [&](std::uint32_t rest) {
    return float16{static_cast<std::uint16_t>(sign | rest)};
  };
  if (magnitude > 0x7f800000U) return result(0x7e00U | ((magnitude >> 13) & 0x1ffU));
  if (magnitude >= 0x47800000U) return result(0x7c00U);  // 2^16 and above
  // The last bit that stays decides a tie; a carry out of the fraction raises the exponent.
  const auto shifted = [](std::uint32_t from, std::uint32_t shift) {
    const std::uint32_t tie = (std::uint32_t{1} << (shift - 1)) - 1 + ((from >> shift) & 1U);
    return (from + tie) >> shift;
  };
  if (magnitude >= 0x38800000U) return result(shifted(magnitude - 0x38000000U, 13));  // 2^-14
  const std::uint32_t exponent = magnitude >> 23;
  if (exponent < 102) return result(0);  // below 2^-25, half the smallest subnormal
  return result(shifted((magnitude & 0x7fffffU) | 0x800000U, 126 - exponent));
}

}  // namespace terrace
