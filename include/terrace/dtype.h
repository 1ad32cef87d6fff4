// Element types and their conversions. The conversions are ours, in integer arithmetic, so that
// every compiler and instruction set rounds alike (to nearest, ties to even).
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "terrace/types.h"

namespace terrace {

enum class DType : std::uint8_t { fp32, bf16 };

constexpr Bytes size_of(DType dtype) { return {dtype == DType::fp32 ? 4U : 2U}; }

std::string_view to_string(DType dtype);          // "fp32", "bf16"
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

}  // namespace terrace
