// One set of kernels for each instruction set that this CPU can run.
// Thread rule: every call from any thread, in the default floating-point environment
// (floating_point.h): the kernels leave it as it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "terrace/adam.h"

namespace terrace {

// Lanes in which a leaf of a gradient is summed: enough for four vectors of the widest kind.
inline constexpr std::size_t kGradientLanes = 32;

// How the parameter is stored, the one array that is not read. Streaming goes past the caches: its
// lines are not read first (a fifteenth of all bytes that an update moves), and not found there by
// who reads them soon.
enum class ParameterStores : std::uint8_t { ordinary, streaming };

// Streaming when the whole is too long for whoever reads it to find it in a core's cache.
ParameterStores parameter_stores(const AdamSlice& whole);

struct AdamKernel {
  const char* instruction_set;  // Highway's name: "AVX3", ...
  // The slice has passed check().
  void (*update)(const AdamScalars& scalars, const AdamSlice& slice, ParameterStores stores);
  // Adds the squares of `rows` * kGradientLanes elements to the lanes, one row after the other.
  void (*add_squares)(const void* gradient, DType dtype, std::size_t rows, double* lanes);
  // The addition has passed check().
  void (*add)(const GradientAddition& addition);
};

// Best first; at least one.
const std::vector<AdamKernel>& adam_kernels();

// Elements [first, first + count) of a slice.
AdamSlice part(const AdamSlice& slice, std::uint64_t first, std::uint64_t count);

// Throw Error(invalid_argument) naming what no kernel can do.
void check(const AdamSlice& slice);
void check(const GradientAddition& addition);
void check_group(std::uint32_t group, std::size_t groups);

}  // namespace terrace
