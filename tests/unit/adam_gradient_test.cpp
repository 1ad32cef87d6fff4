// The sum of squares of gradients: its tree, written here once more, on every instruction set; the
// finite check; and that neither depends on cuts.
#include <gtest/gtest.h>

#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu_adam/adam_gradient.h"
#include "cpu_adam/adam_kernel.h"
#include "cpu_adam/floating_point.h"
#include "terrace/adam.h"
#include "tests/unit/adam_slices.h"

namespace terrace {
namespace {

constexpr DType kDTypes[] = {DType::fp32, DType::bf16, DType::fp16};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

float finite_value(Random& random) {
  for (;;) {
    const float value = any_value(random);
    if (std::isfinite(value)) return value;
  }
}

Fenced finite_gradient(DType dtype, std::size_t elements, std::size_t misalignment,
                       Random& random) {
  Fenced result(dtype, elements, misalignment);
  for (std::size_t i = 0; i < elements; ++i) {
    do result.set(i, finite_value(random));
    while (!std::isfinite(result.get(i)));  // narrowing may overflow
  }
  return result;
}

GradientSlice view(Fenced& gradient, std::size_t first, std::size_t elements) {
  return {gradient.at(first), gradient.dtype(), elements};
}

double specified_leaf(Fenced& gradient, std::size_t first, std::size_t count) {
  double lanes[32] = {};
  for (std::size_t i = 0; i < count; ++i) {
    const double value = gradient.get(first + i);
    lanes[i % 32] += value * value;
  }
  for (int half = 16; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

double specified_tree(const std::vector<double>& leaves, std::size_t first, std::size_t count) {
  if (count == 0) return 0;
  if (count == 1) return leaves[first];
  std::size_t left = 1;
  while (left * 2 < count) left *= 2;
  return specified_tree(leaves, first, left) + specified_tree(leaves, first + left, count - left);
}

double specified_sum(Fenced& gradient, std::size_t elements) {
  std::vector<double> leaves;
  for (std::size_t first = 0; first < elements; first += 1024) {
    const auto count = std::min<std::size_t>(1024, elements - first);
    leaves.push_back(specified_leaf(gradient, first, count));
  }
  return specified_tree(leaves, 0, leaves.size());
}

std::uint64_t bits(double value) { return std::bit_cast<std::uint64_t>(value); }

TEST(Gradient, EveryInstructionSetAddsTheLeafAsSpecified) {
  auto random = seeded();
  const DefaultFloatingPoint environment;
  for (const auto& kernel : adam_kernels()) {
    for (const auto dtype : kDTypes) {
      for (std::size_t elements = 0; elements <= kGradientLeaf;
           elements += elements < 130 ? 1 : 149) {
        auto gradient = finite_gradient(dtype, elements, random() % 64, random);
        LeafSum sum(view(gradient, 0, elements), 0, kernel);
        sum.add(0, elements);
        ASSERT_EQ(bits(sum.result()), bits(specified_leaf(gradient, 0, elements)))
            << kernel.instruction_set << " " << to_string(dtype) << " " << elements;
        ASSERT_TRUE(gradient.fences_stand());
      }
    }
  }
}

TEST(Gradient, PiecesOfALeafAddUpToTheLeaf) {
  auto random = seeded();
  const DefaultFloatingPoint environment;
  for (const auto& kernel : adam_kernels()) {
    for (int round = 0; round < 50; ++round) {
      auto gradient = finite_gradient(kDTypes[round % 3], kGradientLeaf, 0, random);
      const auto whole = view(gradient, 0, kGradientLeaf);
      LeafSum pieces(whole, 0, kernel);
      for (std::uint64_t first = 0; first < kGradientLeaf;) {
        const auto count = std::min<std::uint64_t>(random() % 100, kGradientLeaf - first);
        pieces.add(first, count);
        first += count;
      }
      ASSERT_EQ(bits(pieces.result()), bits(specified_leaf(gradient, 0, kGradientLeaf)));
    }
  }
}

TEST(Gradient, LeavesAreAddedAsATree) {
  auto random = seeded();
  for (std::size_t elements : {0U, 1U, 1024U, 1025U, 2048U, 3000U, 4096U, 13 * 1024U + 7}) {
    for (const auto dtype : kDTypes) {
      auto gradient = finite_gradient(dtype, elements, random() % 64, random);
      const auto summary = summarize(view(gradient, 0, elements));
      EXPECT_EQ(bits(summary.sum_of_squares), bits(specified_sum(gradient, elements))) << elements;
      EXPECT_EQ(summary.first_not_finite, kAllFinite);
    }
  }
  std::vector<double> leaves;
  for (std::size_t count = 0; count < 200; ++count) {
    EXPECT_EQ(bits(sum_of_leaves(leaves)), bits(specified_tree(leaves, 0, count)));
    leaves.push_back(static_cast<double>(random() % 1000) / 7);
  }
}

// 64 additions in a lane, 5 between the lanes, one for each level of the tree.
TEST(Gradient, TheErrorIsBounded) {
  auto random = seeded();
  constexpr std::size_t kElements = 100'000;
  Fenced gradient(DType::fp32, kElements, 0);
  long double exact = 0;
  for (std::size_t i = 0; i < kElements; ++i) {
    gradient.set(i, static_cast<float>(random() % 1'000'003) * 0x1p-20F);
    const long double value = gradient.get(i);
    exact += value * value;
  }
  const double sum = summarize(view(gradient, 0, kElements)).sum_of_squares;
  const double slack = static_cast<double>(exact) * (kElements * 0x1p-64);  // of the reference
  EXPECT_NEAR(sum, static_cast<double>(exact), (64 + 5 + 7) * 0x1p-53 * sum + slack);
}

TEST(Gradient, TheFirstBadElementIsFound) {
  auto random = seeded();
  for (const auto dtype : kDTypes) {
    for (int round = 0; round < 60; ++round) {
      const std::size_t elements = 1 + random() % 4000;
      auto gradient = finite_gradient(dtype, elements, random() % 64, random);
      const std::size_t first = random() % elements;
      const std::size_t second = first + random() % (elements - first);
      gradient.set(second, std::numeric_limits<float>::quiet_NaN());
      gradient.set(first, random() % 2 == 0 ? -std::numeric_limits<float>::infinity()
                                            : std::numeric_limits<float>::quiet_NaN());
      const auto summary = summarize(view(gradient, 0, elements));
      ASSERT_EQ(summary.first_not_finite, first);
      ASSERT_EQ(bits(summary.sum_of_squares), bits(kInfinity));
    }
  }
}

// Not overflow: the largest values of fp32 have a sum of squares in double.
TEST(Gradient, HugeIsNotInfinite) {
  Fenced gradient(DType::fp32, 3000, 0);
  for (std::size_t i = 0; i < 3000; ++i) gradient.set(i, std::numeric_limits<float>::lowest());
  const auto summary = summarize(view(gradient, 0, 3000));
  EXPECT_EQ(summary.first_not_finite, kAllFinite);
  EXPECT_NEAR(summary.sum_of_squares / 3000 / 0x1p256, 1, 1e-6);
}

TEST(Gradient, TheFloatingPointModeOfTheCallerIsIgnoredAndKept) {
  auto random = seeded();
  auto gradient = finite_gradient(DType::fp32, 20'000, 0, random);
  std::vector<double> leaves(1000, 0.1);
  const auto expected = summarize(view(gradient, 0, 20'000));
  const double expected_leaves = sum_of_leaves(leaves);
  std::fenv_t before;
  std::fegetenv(&before);
  std::fesetround(FE_UPWARD);
  const auto actual = summarize(view(gradient, 0, 20'000));
  const double actual_leaves = sum_of_leaves(leaves);
  const int rounding = std::fegetround();
  std::fesetenv(&before);
  EXPECT_EQ(bits(actual.sum_of_squares), bits(expected.sum_of_squares));
  EXPECT_EQ(bits(actual_leaves), bits(expected_leaves));
  EXPECT_EQ(rounding, FE_UPWARD);
}

}  // namespace
}  // namespace terrace
