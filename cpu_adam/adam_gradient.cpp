#include "cpu_adam/adam_gradient.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "cpu_adam/floating_point.h"

namespace terrace {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The bits of the exponent: all of them are set in infinity and NaN, and only there.
std::uint32_t exponent_mask(DType dtype) {
  switch (dtype) {
    case DType::bf16: return 0x7f80U;
    case DType::fp16: return 0x7c00U;
    default: return 0x7f800000U;
  }
}

// sum_of_leaves() of leaves that come one by one: the sums of complete subtrees, largest first.
class TreeSum {
 public:
  void add(double leaf) {
    ++leaves_;
    // Every trailing zero of the count is a pair of subtrees of one size.
    for (auto n = leaves_; n % 2 == 0; n /= 2) leaf = open_[--depth_] + leaf;
    open_[depth_++] = leaf;
  }
  double result() const {
    if (depth_ == 0) return 0;
    double sum = open_[depth_ - 1];
    for (auto i = depth_ - 1; i > 0; --i) sum = open_[i - 1] + sum;
    return sum;
  }

 private:
  std::array<double, 64> open_{};
  std::size_t depth_ = 0;
  std::uint64_t leaves_ = 0;
};

double tree_sum(std::span<const double> leaves) {
  if (leaves.size() == 1) return leaves.front();
  const std::size_t left = std::bit_ceil(leaves.size()) / 2;
  return tree_sum(leaves.first(left)) + tree_sum(leaves.subspan(left));
}

}  // namespace

LeafSum::LeafSum(const GradientSlice& whole, std::uint64_t leaf, const AdamKernel& kernel)
    : whole_(whole), kernel_(kernel), begin_(leaf * kGradientLeaf) {}

LeafSum::LeafSum(const GradientSlice& whole, std::uint64_t leaf)
    : LeafSum(whole, leaf, adam_kernels().front()) {}

const std::byte* LeafSum::at(std::uint64_t element) const {
  return static_cast<const std::byte*>(whole_.gradient) + element * size_of(whole_.dtype).count;
}

void LeafSum::add(std::uint64_t first, std::uint64_t count) {
  const std::uint64_t phase = (first - begin_) % kGradientLanes;
  if (phase != 0) {
    const auto head = std::min(kGradientLanes - phase, count);
    add_partial(first, head);
    first += head;
    count -= head;
  }
  const auto rows = count / kGradientLanes;
  kernel_.add_squares(at(first), whole_.dtype, rows, lanes_.data());
  add_partial(first + rows * kGradientLanes, count % kGradientLanes);
}

// A row of which only some count: the others are 0, and adding 0 changes no sum of squares.
void LeafSum::add_partial(std::uint64_t first, std::uint64_t count) {
  if (count == 0) return;
  const auto size = size_of(whole_.dtype).count;
  alignas(64) std::array<std::byte, kGradientLanes * sizeof(float)> row{};
  std::memcpy(row.data() + (first - begin_) % kGradientLanes * size, at(first), count * size);
  kernel_.add_squares(row.data(), whole_.dtype, 1, lanes_.data());
}

double LeafSum::result() {
  for (std::size_t half = kGradientLanes / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) lanes_[i] += lanes_[i + half];
  }
  // Squares of finite values cannot overflow a double, whatever their number: what is not finite
  // now was not finite before.
  return lanes_[0] < kInfinity ? lanes_[0] : kInfinity;
}

std::uint64_t first_bad_leaf(std::span<const double> leaves) {
  const auto bad = std::find(leaves.begin(), leaves.end(), kInfinity);
  return static_cast<std::uint64_t>(bad - leaves.begin());
}

std::uint64_t first_bad(const GradientSlice& whole, std::uint64_t first, std::uint64_t count) {
  const auto mask = exponent_mask(whole.dtype);
  const auto size = size_of(whole.dtype).count;
  const auto* data = static_cast<const std::byte*>(whole.gradient);
  for (auto i = first; i < first + count; ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, data + i * size, size);
    if ((bits & mask) == mask) return i;
  }
  return kAllFinite;
}

GradientSummary summarize(const GradientSlice& slice) {
  const DefaultFloatingPoint environment;
  GradientSummary summary;
  TreeSum tree;
  for (std::uint64_t leaf = 0; leaf < leaves_of(slice.elements); ++leaf) {
    const auto first = leaf * kGradientLeaf;
    const auto count = std::min(kGradientLeaf, slice.elements - first);
    LeafSum sum(slice, leaf);
    sum.add(first, count);
    const double result = sum.result();
    if (result == kInfinity && summary.first_not_finite == kAllFinite) {
      summary.first_not_finite = first_bad(slice, first, count);
    }
    tree.add(result);
  }
  summary.sum_of_squares = settled(tree.result());
  return summary;
}

double sum_of_leaves(std::span<const double> leaves) {
  const DefaultFloatingPoint environment;
  return leaves.empty() ? 0 : settled(tree_sum(leaves));
}

}  // namespace terrace
