// The loops that Adam is held against, with the best instruction set of this CPU.
// Thread rule: every function from any thread. `elements` is a multiple of kGradientLeaf and every
// array is aligned to kLoopAlignment.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "terrace/adam.h"

namespace terrace::cli {

inline constexpr std::size_t kLoopAlignment = 64;

enum class Stores : std::uint8_t {
  ordinary,
  non_temporal,            // past the caches
  parameter_non_temporal,  // only those to the array that is not read
};
inline constexpr std::array kAllStores{Stores::ordinary, Stores::non_temporal,
                                       Stores::parameter_non_temporal};
const char* to_string(Stores stores);

// The roof of an update: reads and writes the bytes that it reads and writes, in the same widths,
// and computes nothing. All states keep their values; the parameter gets bytes of the weight.
void touch_streams(const AdamSlice& slice, Stores stores);

// STREAM: to = from; to = a + 0.25 b. `parameter_non_temporal` is as `non_temporal`.
void copy(const float* from, float* to, std::uint64_t elements, Stores stores);
void triad(const float* a, const float* b, float* to, std::uint64_t elements, Stores stores);

// The passes that an update replaces, together with summarize() and an update that takes fp32
// gradients and writes no parameter.
void unscale(const void* gradient, DType dtype, float factor, float* to, std::uint64_t elements);
void scale(float* values, float factor, std::uint64_t elements);
void cast(const float* from, void* to, DType dtype, std::uint64_t elements);

}  // namespace terrace::cli
