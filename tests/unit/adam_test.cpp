// The Adam kernels of every instruction set of this CPU, against a specification written here in
// plain scalars: equal bits, whatever the length, alignment, dtypes, slicing and values.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cfenv>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cpu_adam/adam_kernel.h"
#include "terrace/adam.h"
#include "terrace/error.h"
#include "tests/unit/adam_slices.h"

namespace terrace {
namespace {

constexpr std::size_t kWidestVector = 16;  // lanes, AVX-512

std::vector<AdamScalars> both_modes() {
  const AdamOptions adam{.mode = AdamMode::adam, .weight_decay = 0.01};
  const AdamOptions adamw{.mode = AdamMode::adamw, .weight_decay = 0.01};
  return {adam_scalars(adam, 1e-3, 3), adam_scalars(adamw, 1e-3, 3, 0.37 / 1024)};
}

constexpr std::array kStores{ParameterStores::ordinary, ParameterStores::streaming};

void expect_as_specified(const AdamKernel& kernel, const Layout& layout, Random& random) {
  for (const auto& scalars : both_modes()) {
    const Slice before(layout, random);
    Slice expected = before;
    expected.update_as_specified(scalars);
    for (const auto stores : kStores) {
      Slice actual = before;
      kernel.update(scalars, actual.view(), stores);
      ASSERT_TRUE(actual == expected && actual.fences_stand())
          << kernel.instruction_set << ", " << to_string(layout);
    }
  }
}

TEST(AdamKernel, EveryDtypeAndLength) {
  auto random = seeded();
  for (const auto& kernel : adam_kernels()) {
    for (auto layout : dtype_tuples()) {
      for (layout.elements = 0; layout.elements <= 4 * kWidestVector; ++layout.elements) {
        layout.misalignment = random() % Fenced::kFence;
        ASSERT_NO_FATAL_FAILURE(expect_as_specified(kernel, layout, random));
      }
    }
  }
}

TEST(AdamKernel, EveryMisalignmentAndLength) {
  auto random = seeded();
  for (const auto& kernel : adam_kernels()) {
    for (std::size_t elements = 0; elements <= 4 * kWidestVector; ++elements) {
      for (std::size_t m = 0; m < Fenced::kFence / 2; ++m) {
        Layout layout = dtype_tuples()[random() % dtype_tuples().size()];
        layout.elements = elements;
        layout.misalignment = m;
        ASSERT_NO_FATAL_FAILURE(expect_as_specified(kernel, layout, random));
      }
    }
  }
}

TEST(AdamKernel, LongOddLengths) {
  auto random = seeded();
  for (const auto& kernel : adam_kernels()) {
    for (auto layout : dtype_tuples()) {
      layout.elements = 1021;
      layout.misalignment = random() % Fenced::kFence;
      ASSERT_NO_FATAL_FAILURE(expect_as_specified(kernel, layout, random));
    }
    Layout layout = dtype_tuples()[random() % dtype_tuples().size()];
    layout.elements = 32768U + 17;
    ASSERT_NO_FATAL_FAILURE(expect_as_specified(kernel, layout, random));
  }
}

// Pages that trap on access lie before and behind.
class Trapped {
 public:
  Trapped() : page_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))) {
    base_ = static_cast<std::byte*>(::mmap(nullptr, 3 * page_, PROT_NONE,
                                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || ::mprotect(begin(), page_, PROT_READ | PROT_WRITE) != 0) {
      std::abort();
    }
  }
  ~Trapped() { ::munmap(base_, 3 * page_); }
  Trapped(const Trapped&) = delete;
  Trapped& operator=(const Trapped&) = delete;

  std::byte* begin() { return base_ + page_; }
  std::byte* end() { return begin() + page_; }

 private:
  std::size_t page_;
  std::byte* base_;
};

TEST(AdamKernel, TouchesNothingOutside) {
  auto random = seeded();
  Trapped gradient, weight, momentum, variance, parameter;
  const auto place = [](Trapped& pages, std::size_t bytes, bool at_end) {
    return at_end ? pages.end() - bytes : pages.begin();
  };
  for (const auto& kernel : adam_kernels()) {
    for (const auto dtype : {DType::fp32, DType::bf16, DType::fp16}) {
      const DType moment = dtype == DType::fp16 ? DType::bf16 : dtype;
      for (std::size_t n = 0; n <= 3 * kWidestVector; ++n) {
        for (const bool at_end : {false, true}) {
          const std::size_t bytes = n * size_of(dtype).count;
          auto* const weights =
              reinterpret_cast<float*>(place(weight, n * sizeof(float), at_end));
          kernel.update(both_modes()[0],
                        {place(gradient, bytes, at_end), dtype, weights,
                         place(momentum, bytes, at_end), place(variance, bytes, at_end),
                         place(parameter, bytes, at_end), dtype, n, moment, moment},
                        kStores[random() % kStores.size()]);
        }
      }
    }
  }
}

TEST(AdamKernel, SlicingDoesNotShow) {
  auto random = seeded();
  const std::size_t elements = 2003;
  for (const auto& kernel : adam_kernels()) {
    for (auto layout : dtype_tuples()) {
      layout.elements = elements;
      Slice whole(layout, random);
      Slice cut = whole;
      const auto scalars = both_modes()[random() % 2];
      kernel.update(scalars, whole.view(), ParameterStores::ordinary);
      for (std::size_t first = 0; first < elements;) {
        const auto count = std::min<std::size_t>(random() % 90, elements - first);
        kernel.update(scalars, cut.view(first, count), kStores[random() % kStores.size()]);
        first += count;
      }
      ASSERT_TRUE(cut == whole && cut.fences_stand()) << kernel.instruction_set;
    }
  }
}

TEST(AdamKernel, ParameterMayLieOnTheGradient) {
  auto random = seeded();
  for (const auto& kernel : adam_kernels()) {
    for (const auto dtype : {DType::fp32, DType::bf16, DType::fp16}) {
      Slice apart({.gradient = dtype, .parameter = dtype, .elements = 1021}, random);
      Slice together = apart;
      auto view = together.view();
      together.put_parameter_on_gradient(view);
      kernel.update(both_modes()[0], apart.view(), ParameterStores::ordinary);
      kernel.update(both_modes()[0], view, ParameterStores::streaming);
      EXPECT_TRUE(apart.same_state(together) && apart.parameter_is_on_gradient_of(together))
          << kernel.instruction_set << " " << to_string(dtype);
    }
  }
}

// An application may flush subnormals to zero, or round otherwise, in all its threads.
TEST(AdamUpdate, TheFloatingPointModeOfTheCallerIsIgnoredAndKept) {
  auto random = seeded();
  Slice expected({.parameter = DType::fp16, .variance = DType::bf16, .elements = 1021}, random);
  Slice actual = expected;
  const auto scalars = both_modes()[1];
  adam_update(scalars, expected.view());
  std::fenv_t before;
  std::fegetenv(&before);
  std::fesetround(FE_UPWARD);
#if defined(__SSE__)
  const unsigned mode = __builtin_ia32_stmxcsr() | 0x8040U;  // flush to zero, on both sides
  __builtin_ia32_ldmxcsr(mode);
#endif
  adam_update(scalars, actual.view());
  const int rounding = std::fegetround();
#if defined(__SSE__)
  const unsigned mode_after = __builtin_ia32_stmxcsr();
#endif
  std::fesetenv(&before);
  EXPECT_TRUE(actual == expected);
  EXPECT_EQ(rounding, FE_UPWARD);
#if defined(__SSE__)
  EXPECT_EQ(mode_after, mode);
#endif
}

TEST(AdamKernel, TheBestInstructionSetComesFirst) {
  const auto names = adam_instruction_sets();
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(names.front(), adam_instruction_set());
  for (const auto& name : names) std::printf("%s\n", name.c_str());
  for (const auto& name : names) EXPECT_EQ(std::count(names.begin(), names.end(), name), 1) << name;
#if defined(__x86_64__)
  const auto has = [&](const char* name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  EXPECT_EQ(has("AVX2"), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) {
    EXPECT_EQ(names.front().substr(0, 4), "AVX3");
  }
#elif defined(__aarch64__)
  EXPECT_EQ(names.back(), "NEON");
#endif
}

TEST(AdamUpdate, IsTheBestKernel) {
  auto random = seeded();
  Slice actual({.gradient = DType::bf16, .parameter = DType::bf16, .elements = 1021}, random);
  Slice expected = actual;
  const auto scalars = both_modes()[1];
  expected.update_as_specified(scalars);
  adam_update(scalars, actual.view());
  EXPECT_TRUE(actual == expected);
}

// Parameter groups: some with decay, some without, each with its own learning rate and betas.
std::vector<AdamScalars> three_groups() {
  return {adam_scalars({.weight_decay = 0.1}, 1e-3, 7), adam_scalars({}, 3e-4, 7),
          adam_scalars({.mode = AdamMode::adam, .beta1 = 0.5, .beta2 = 0.95}, 1e-2, 7)};
}

TEST(AdamUpdate, TakesSeveralTensorsOfSeveralGroups) {
  auto random = seeded();
  const auto groups = three_groups();
  std::vector<Slice> actual;
  for (int i = 0; i < 20; ++i) {
    Layout layout = dtype_tuples()[random() % dtype_tuples().size()];
    layout.elements = random() % 50;
    layout.misalignment = random() % Fenced::kFence;
    actual.emplace_back(layout, random);
  }
  auto expected = actual;
  std::vector<AdamSlice> slices;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    slices.push_back(actual[i].view());
    slices.back().group = static_cast<std::uint32_t>(random() % groups.size());
    expected[i].update_as_specified(groups[slices.back().group]);
  }
  adam_update(groups, slices);
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(actual[i] == expected[i] && actual[i].fences_stand()) << i;
  }
}

TEST(AdamUpdate, RefusesAGroupThatIsNotThereBeforeItBegins) {
  auto random = seeded();
  Slice slice({.elements = 10}, random);
  const Slice before = slice;
  AdamSlice views[] = {slice.view(), slice.view()};
  views[1].group = 3;
  try {
    adam_update(three_groups(), views);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "a slice is of group 3, and there are scalars for 3 groups");
  }
  EXPECT_TRUE(slice == before);
}

TEST(AdamUpdate, RefusesMomentsInFp16ByName) {
  auto random = seeded();
  Slice slice({.elements = 10}, random);
  Slice before = slice;
  const auto refusal = [&](DType momentum, DType variance) -> std::string {
    auto view = slice.view();
    view.momentum_dtype = momentum;
    view.variance_dtype = variance;
    try {
      adam_update(both_modes()[0], view);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal(DType::fp16, DType::fp32),
            "the momentum is fp16; Adam keeps it in fp32 or bf16");
  EXPECT_EQ(refusal(DType::bf16, DType::fp16),
            "the variance is fp16; Adam keeps it in fp32 or bf16");
  EXPECT_TRUE(slice == before);
}

}  // namespace
}  // namespace terrace
