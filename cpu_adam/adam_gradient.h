// The leaves of a gradient's sum of squares, and where the first value is that is not finite.
// Thread rule: any thread, in the default floating-point environment (floating_point.h).
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "cpu_adam/adam_kernel.h"
#include "terrace/adam.h"

namespace terrace {

// One leaf, from the pieces of it that count. The pieces ascend.
class LeafSum {
 public:
  LeafSum(const GradientSlice& whole, std::uint64_t leaf, const AdamKernel& kernel);
  LeafSum(const GradientSlice& whole, std::uint64_t leaf);  // with the best kernel

  // Elements [first, first + count) of the whole, all of them within the leaf.
  void add(std::uint64_t first, std::uint64_t count);
  double result();  // infinity when an element is not finite; once, after the last add()

 private:
  const std::byte* at(std::uint64_t element) const;
  void add_partial(std::uint64_t first, std::uint64_t count);

  const GradientSlice whole_;
  const AdamKernel& kernel_;
  const std::uint64_t begin_;  // the leaf's first element
  alignas(64) std::array<double, kGradientLanes> lanes_{};
};

// The first leaf that is not finite; leaves.size() when all are.
std::uint64_t first_bad_leaf(std::span<const double> leaves);

// The first element of [first, first + count) that is not finite, or kAllFinite.
std::uint64_t first_bad(const GradientSlice& whole, std::uint64_t first, std::uint64_t count);

}  // namespace terrace
