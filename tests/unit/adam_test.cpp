// The Adam kernels of every instruction set of this CPU, against a specification written here in
// plain scalars: equal bits, whatever the length, alignment, dtypes, slicing and values.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "cpu_adam/adam_kernel.h"
#include "terrace/adam.h"

namespace terrace {
namespace {

using Random = std::mt19937_64;

constexpr std::size_t kWidestVector = 16;  // lanes, AVX-512
constexpr float kQuietNan = std::bit_cast<float>(0x7fc00000U);

// TERRACE_SEED repeats a run.
Random seeded() {
  const char* given = std::getenv("TERRACE_SEED");
  const std::uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  return Random(seed);
}

struct State {
  float weight, momentum, variance;
};

float stored(float value) { return std::isnan(value) ? kQuietNan : value; }

// The formulas of adam.h, one element at a time.
State specified(const AdamScalars& s, float gradient, State old) {
  const float g = s.l2 != 0 ? std::fma(s.l2, old.weight, gradient) : gradient;
  const float scaled = s.one_minus_beta1 * g;
  const float m = std::fma(s.beta1, old.momentum, scaled);
  const float part = s.one_minus_beta2 * g;
  const float squared = part * g;
  const float v = std::fma(s.beta2, old.variance, squared);
  const float denominator = std::fma(std::sqrt(v), s.inverse_sqrt_correction2, s.epsilon);
  const float ratio = m / denominator;
  const float decayed = old.weight * s.decay_factor;
  return {stored(std::fma(-s.step_size, ratio, decayed)), stored(m), stored(v)};
}

// An array at a chosen distance from a 64-byte boundary, between bytes that must not change.
class Fenced {
 public:
  static constexpr std::size_t kFence = 64;
  static constexpr std::byte kFenceByte{0xa5};

  Fenced(std::size_t bytes, std::size_t misalignment)
      : bytes_(bytes), storage_(bytes + misalignment + 3 * kFence, kFenceByte) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    offset_ = kFence + (kFence - address % kFence) % kFence + misalignment;
  }

  std::byte* data() { return storage_.data() + offset_; }
  float* floats() { return reinterpret_cast<float*>(data()); }
  float get(std::size_t i, DType dtype) const {
    const std::byte* at = storage_.data() + offset_ + i * size_of(dtype).count;
    std::uint32_t bits = 0;
    std::memcpy(&bits, at, size_of(dtype).count);
    return std::bit_cast<float>(dtype == DType::bf16 ? bits << 16 : bits);
  }
  void set(std::size_t i, DType dtype, float value) {
    const auto narrow = to_bfloat16(value);
    if (dtype == DType::bf16) std::memcpy(data() + 2 * i, &narrow, 2);
    if (dtype == DType::fp32) std::memcpy(data() + 4 * i, &value, 4);
  }
  bool fences_stand() const {
    const auto whole = [](std::byte byte) { return byte == kFenceByte; };
    const auto begin = storage_.begin() + static_cast<std::ptrdiff_t>(offset_);
    return std::all_of(storage_.begin(), begin, whole) &&
           std::all_of(begin + static_cast<std::ptrdiff_t>(bytes_), storage_.end(), whole);
  }
  friend bool operator==(const Fenced& a, const Fenced& b) {
    const auto at = [](const Fenced& f) { return f.storage_.data() + f.offset_; };
    return a.bytes_ == b.bytes_ && std::memcmp(at(a), at(b), a.bytes_) == 0;
  }

 private:
  std::size_t bytes_;
  std::vector<std::byte> storage_;
  std::size_t offset_ = 0;  // a copy has the distance to its storage, not that to the boundary
};

float any_value(Random& random) {
  const auto bits = static_cast<std::uint32_t>(random());
  switch (random() % 12) {
    case 0: return std::bit_cast<float>(bits & 0x80000000U);                // zero
    case 1: return std::bit_cast<float>(bits & 0x807fffffU);                // subnormal
    case 2: return std::bit_cast<float>((bits & 0x80ffffffU) | 0x7e000000U);  // huge
    case 3: return std::bit_cast<float>(bits);                              // anything
    case 4: return std::bit_cast<float>((bits & 0x80000000U) | 0x7f800000U);  // infinity
    case 5: return std::bit_cast<float>(bits | 0x7f800000U);                // NaN, nearly always
    case 6: return std::bit_cast<float>((bits & 0x80ffffffU) | 0x20000000U);  // the square vanishes
    default: return static_cast<float>(static_cast<std::int32_t>(bits)) * 0x1p-31F;
  }
}

struct Layout {
  DType gradient;
  std::optional<DType> parameter;
  std::size_t elements;
  std::size_t misalignment = 0;  // in elements, different for each array
};

const std::vector<Layout>& dtype_tuples() {
  static const std::vector<Layout> tuples = [] {
    std::vector<Layout> all;
    for (const auto gradient : {DType::fp32, DType::bf16}) {
      for (const auto parameter : {std::optional<DType>{}, std::optional{DType::fp32},
                                   std::optional{DType::bf16}}) {
        all.push_back({gradient, parameter, 0});
      }
    }
    return all;
  }();
  return tuples;
}

// The arrays of one slice, filled at random, and what they must hold after one update.
class Slice {
 public:
  Slice(const Layout& layout, Random& random)
      : layout_(layout),
        gradient_(array(layout.gradient, 0)),
        weight_(array(DType::fp32, 5)),
        momentum_(array(DType::fp32, 10)),
        variance_(array(DType::fp32, 15)),
        parameter_(array(layout.parameter.value_or(DType::fp32), 3)) {
    for (std::size_t i = 0; i < layout.elements; ++i) {
      gradient_.set(i, layout.gradient, any_value(random));
      weight_.set(i, DType::fp32, any_value(random));
      momentum_.set(i, DType::fp32, any_value(random));
      const float variance = any_value(random);
      variance_.set(i, DType::fp32, random() % 8 == 0 ? variance : std::abs(variance));
    }
  }

  AdamSlice view(std::size_t first, std::size_t elements) {
    const auto parameter = layout_.parameter.value_or(DType::fp32);
    return {gradient_.data() + first * size_of(layout_.gradient).count, layout_.gradient,
            weight_.floats() + first, momentum_.floats() + first, variance_.floats() + first,
            layout_.parameter ? parameter_.data() + first * size_of(parameter).count : nullptr,
            parameter, elements};
  }
  AdamSlice view() { return view(0, layout_.elements); }
  void put_parameter_on_gradient(AdamSlice& slice) { slice.parameter = gradient_.data(); }

  void update_as_specified(const AdamScalars& scalars) {
    for (std::size_t i = 0; i < layout_.elements; ++i) {
      const State now = specified(
          scalars, gradient_.get(i, layout_.gradient),
          {weight_.floats()[i], momentum_.floats()[i], variance_.floats()[i]});
      weight_.floats()[i] = now.weight;
      momentum_.floats()[i] = now.momentum;
      variance_.floats()[i] = now.variance;
      if (layout_.parameter) parameter_.set(i, *layout_.parameter, now.weight);
    }
  }
  bool fences_stand() const {
    return gradient_.fences_stand() && weight_.fences_stand() && momentum_.fences_stand() &&
           variance_.fences_stand() && parameter_.fences_stand();
  }
  bool parameter_is_on_gradient_of(const Slice& other) const {
    return parameter_ == other.gradient_;
  }
  bool same_state(const Slice& other) const {
    return weight_ == other.weight_ && momentum_ == other.momentum_ &&
           variance_ == other.variance_;
  }
  friend bool operator==(const Slice& a, const Slice& b) {
    return a.same_state(b) && a.gradient_ == b.gradient_ && a.parameter_ == b.parameter_;
  }

 private:
  Fenced array(DType dtype, std::size_t skew) const {
    const std::size_t size = size_of(dtype).count;
    return {layout_.elements * size, (layout_.misalignment + skew) * size % Fenced::kFence};
  }

  Layout layout_;
  Fenced gradient_, weight_, momentum_, variance_, parameter_;
};

std::vector<AdamScalars> both_modes() {
  const AdamOptions adam{.mode = AdamMode::adam, .weight_decay = 0.01};
  const AdamOptions adamw{.mode = AdamMode::adamw, .weight_decay = 0.01};
  return {adam_scalars(adam, 1e-3, 3), adam_scalars(adamw, 1e-3, 3)};
}

void expect_as_specified(const AdamKernel& kernel, const Layout& layout, Random& random) {
  for (const auto& scalars : both_modes()) {
    Slice actual(layout, random);
    Slice expected = actual;
    expected.update_as_specified(scalars);
    kernel.update(scalars, actual.view());
    ASSERT_TRUE(actual == expected && actual.fences_stand())
        << kernel.instruction_set() << ", " << layout.elements << " elements, gradient "
        << to_string(layout.gradient) << ", misaligned by " << layout.misalignment
        << ", parameter " << (layout.parameter ? to_string(*layout.parameter) : "none");
  }
}

TEST(AdamKernel, ShortLengthsAtEveryMisalignment) {
  auto random = seeded();
  for (const auto& kernel : adam_kernels()) {
    for (auto layout : dtype_tuples()) {
      for (layout.elements = 0; layout.elements <= 4 * kWidestVector; ++layout.elements) {
        // Each length sees half of them, so that each misalignment sees 32 lengths.
        for (std::size_t m = layout.elements % 2; m < Fenced::kFence / 2; m += 2) {
          layout.misalignment = m;
          ASSERT_NO_FATAL_FAILURE(expect_as_specified(kernel, layout, random));
        }
      }
    }
  }
}

TEST(AdamKernel, LongOddLengths) {
  auto random = seeded();
  for (const auto& kernel : adam_kernels()) {
    for (auto layout : dtype_tuples()) {
      for (const std::size_t elements : {1021U, 32768U + 17}) {
        layout.elements = elements;
        layout.misalignment = random() % Fenced::kFence;
        ASSERT_NO_FATAL_FAILURE(expect_as_specified(kernel, layout, random));
      }
    }
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
  Trapped gradient, weight, momentum, variance, parameter;
  const auto place = [](Trapped& pages, std::size_t bytes, bool at_end) {
    return at_end ? pages.end() - bytes : pages.begin();
  };
  for (const auto& kernel : adam_kernels()) {
    for (const auto dtype : {DType::fp32, DType::bf16}) {
      for (std::size_t n = 0; n <= 3 * kWidestVector; ++n) {
        for (const bool at_end : {false, true}) {
          const auto floats = [&](Trapped& pages) {
            return reinterpret_cast<float*>(place(pages, n * sizeof(float), at_end));
          };
          const std::size_t bytes = n * size_of(dtype).count;
          kernel.update(both_modes()[0],
                        {place(gradient, bytes, at_end), dtype, floats(weight), floats(momentum),
                         floats(variance), place(parameter, bytes, at_end), dtype, n});
        }
      }
    }
  }
}

TEST(AdamKernel, SlicingDoesNotShow) {
  auto random = seeded();
  const std::size_t elements = 5003;
  for (const auto& kernel : adam_kernels()) {
    for (auto layout : dtype_tuples()) {
      layout.elements = elements;
      Slice whole(layout, random);
      Slice cut = whole;
      const auto scalars = both_modes()[random() % 2];
      kernel.update(scalars, whole.view());
      for (std::size_t first = 0; first < elements;) {
        const auto count = std::min<std::size_t>(random() % 90, elements - first);
        kernel.update(scalars, cut.view(first, count));
        first += count;
      }
      ASSERT_TRUE(cut == whole && cut.fences_stand()) << kernel.instruction_set();
    }
  }
}

TEST(AdamKernel, ParameterMayLieOnTheGradient) {
  auto random = seeded();
  for (const auto& kernel : adam_kernels()) {
    for (const auto dtype : {DType::fp32, DType::bf16}) {
      Slice apart({dtype, dtype, 1021}, random);
      Slice together = apart;
      auto view = together.view();
      together.put_parameter_on_gradient(view);
      kernel.update(both_modes()[0], apart.view());
      kernel.update(both_modes()[0], view);
      EXPECT_TRUE(apart.same_state(together) && apart.parameter_is_on_gradient_of(together))
          << kernel.instruction_set() << " " << to_string(dtype);
    }
  }
}

// An application may flush subnormals to zero, or round otherwise, in all its threads.
TEST(AdamKernel, TheFloatingPointModeOfTheCallerIsIgnoredAndKept) {
  auto random = seeded();
  for (const auto& kernel : adam_kernels()) {
    Slice expected({DType::fp32, DType::bf16, 1021}, random);
    Slice actual = expected;
    const auto scalars = both_modes()[1];
    kernel.update(scalars, expected.view());
    std::fenv_t before;
    std::fegetenv(&before);
    std::fesetround(FE_UPWARD);
#if defined(__SSE__)
    const unsigned mode = __builtin_ia32_stmxcsr() | 0x8040U;  // flush to zero, on both sides
    __builtin_ia32_ldmxcsr(mode);
#endif
    kernel.update(scalars, actual.view());
    const int rounding = std::fegetround();
#if defined(__SSE__)
    const unsigned mode_after = __builtin_ia32_stmxcsr();
#endif
    std::fesetenv(&before);
    EXPECT_TRUE(actual == expected) << kernel.instruction_set();
    EXPECT_EQ(rounding, FE_UPWARD);
#if defined(__SSE__)
    EXPECT_EQ(mode_after, mode);
#endif
  }
}

TEST(AdamKernel, TheBestInstructionSetComesFirst) {
  const auto names = adam_instruction_sets();
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(names.front(), adam_instruction_set());
  for (const auto& name : names) EXPECT_EQ(std::count(names.begin(), names.end(), name), 1) << name;
#if defined(__x86_64__)
  const auto has = [&](const char* name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  EXPECT_EQ(has("AVX2"), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) {
    EXPECT_EQ(names.front().substr(0, 4), "AVX3");
  }
#endif
}

TEST(AdamUpdate, IsTheBestKernel) {
  auto random = seeded();
  Slice actual({DType::bf16, DType::bf16, 1021}, random);
  Slice expected = actual;
  const auto scalars = both_modes()[1];
  expected.update_as_specified(scalars);
  adam_update(scalars, actual.view());
  EXPECT_TRUE(actual == expected);
}

}  // namespace
}  // namespace terrace
