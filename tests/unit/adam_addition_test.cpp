// Sums of micro-batches: on every instruction set the bits of one fp32 addition per element,
// rounded to the dtype of the sum, whatever the length and the alignment.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "cpu_adam/adam_kernel.h"
#include "cpu_adam/floating_point.h"
#include "terrace/adam.h"
#include "terrace/error.h"
#include "tests/unit/adam_slices.h"

namespace terrace {
namespace {

TEST(Addition, EveryInstructionSetAddsAsSpecified) {
  auto random = seeded();
  const DefaultFloatingPoint environment;
  for (const auto& kernel : adam_kernels()) {
    for (const auto [gradient_dtype, sum_dtype] : kAdditionDtypes) {
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
  for (const auto [from, to] :
       {AdditionDtypes{DType::fp32, DType::bf16}, {DType::bf16, DType::fp16}}) {
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
