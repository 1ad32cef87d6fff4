// Sums of micro-batches: on every instruction set the bits of one fp32 addition per element,
// rounded to the dtype of the sum, whatever the length, the alignment and the cut.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu_adam/adam_kernel.h"
#include "cpu_adam/floating_point.h"
#include "terrace/adam.h"
#include "terrace/error.h"
#include "tests/unit/adam_slices.h"

namespace terrace {
namespace {

struct Dtypes {
  DType gradient, sum;
};
constexpr Dtypes kDtypes[] = {{DType::fp32, DType::fp32},
                              {DType::bf16, DType::fp32},
                              {DType::bf16, DType::bf16},
                              {DType::fp16, DType::fp32},
                              {DType::fp16, DType::fp16}};

Fenced random_array(DType dtype, std::size_t elements, Random& random) {
  Fenced array(dtype, elements, random() % 32 * size_of(dtype).count);
  for (std::size_t i = 0; i < elements; ++i) array.set_random(i, random);
  return array;
}

void add_as_specified(Fenced& gradient, Fenced& sum, std::size_t elements, bool first) {
  for (std::size_t i = 0; i < elements; ++i) {
    sum.set(i, stored(first ? gradient.get(i) : sum.get(i) + gradient.get(i)));
  }
}

GradientAddition view(Fenced& gradient, Fenced& sum, std::size_t elements, bool first) {
  return {gradient.at(0), gradient.dtype(), sum.at(0), sum.dtype(), first, elements};
}

TEST(Addition, EveryInstructionSetAddsAsSpecified) {
  auto random = seeded();
  const DefaultFloatingPoint environment;
  for (const auto& kernel : adam_kernels()) {
    for (const auto [gradient_dtype, sum_dtype] : kDtypes) {
      for (std::size_t elements = 0; elements < 200; ++elements) {
        const bool first = elements % 3 == 0;
        auto gradient = random_array(gradient_dtype, elements, random);
        const Fenced before = gradient;
        auto sum = random_array(sum_dtype, elements, random);
        Fenced wanted = sum;
        add_as_specified(gradient, wanted, elements, first);
        kernel.add(view(gradient, sum, elements, first));
        ASSERT_TRUE(sum == wanted) << kernel.instruction_set << " " << to_string(gradient_dtype)
                                   << " in " << to_string(sum_dtype) << " " << elements;
        ASSERT_TRUE(gradient == before);
        ASSERT_TRUE(sum.fences_stand());
      }
    }
  }
}

TEST(Addition, ThePoolsThreadsAndTilesDoNotShow) {
  auto random = seeded();
  constexpr std::size_t kElements = 3 * (1 << 15) + 17;
  for (const int threads : {1, 2, 5}) {
    const auto pool = make_adam_pool({.threads = threads});
    for (const auto [gradient_dtype, sum_dtype] : kDtypes) {
      auto sum = random_array(sum_dtype, kElements, random);
      Fenced wanted = sum;
      std::uint64_t bytes = 0;
      for (const bool first : {true, false, false}) {
        auto gradient = random_array(gradient_dtype, kElements, random);
        add_as_specified(gradient, wanted, kElements, first);
        pool->submit_addition({1}, view(gradient, sum, kElements, first));
        const auto completions = pool->wait();
        ASSERT_EQ(completions.size(), 1U);
        bytes += completions[0].bytes;
      }
      EXPECT_TRUE(sum == wanted);
      EXPECT_TRUE(sum.fences_stand());
      const auto moved = 3 * size_of(gradient_dtype).count + 5 * size_of(sum_dtype).count;
      EXPECT_EQ(bytes, kElements * moved);
    }
  }
}

TEST(Addition, WhatIsNotFiniteStaysSo) {
  const float infinity = INFINITY;
  for (const float bad : {infinity, -infinity, NAN}) {
    float sum = 0;
    for (const float gradient : {bad, 1.0F, -bad, 0.0F}) {
      add_gradients({&gradient, DType::fp32, &sum, DType::fp32, false, 1});
      EXPECT_FALSE(std::isfinite(sum));
    }
  }
}

TEST(Addition, RefusesASumThatCannotHoldTheGradients) {
  std::uint64_t gradient = 0;
  std::uint64_t sum = 0;
  for (const auto [from, to] : {Dtypes{DType::fp32, DType::bf16}, {DType::bf16, DType::fp16}}) {
    try {
      add_gradients({&gradient, from, &sum, to, false, 1});
      FAIL() << "was added";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(to_string(to)), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace terrace
