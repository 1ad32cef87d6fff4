// What the tests of the Adam kernels share: arrays between sentinels, random values of every kind,
// and the update as a specification in plain scalars.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "terrace/adam.h"

namespace terrace {

using Random = std::mt19937_64;

// TERRACE_SEED repeats a run.
inline Random seeded() {
  const char* given = std::getenv("TERRACE_SEED");
  const std::uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  return Random(seed);
}

struct AdamState {
  float weight, momentum, variance;
};

inline float stored(float value) {
  return std::isnan(value) ? std::bit_cast<float>(0x7fc00000U) : value;
}

// The formulas of adam.h, one element at a time.
inline AdamState specified(const AdamScalars& s, float gradient, AdamState old) {
  const float scaled_gradient = gradient * s.gradient_factor;
  const float g = s.l2 != 0 ? std::fma(s.l2, old.weight, scaled_gradient) : scaled_gradient;
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

inline float any_value(Random& random) {
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

// An array at a chosen distance from a 64-byte boundary, between bytes that must not change.
class Fenced {
 public:
  static constexpr std::size_t kFence = 64;
  static constexpr std::byte kFenceByte{0xa5};

  Fenced(DType dtype, std::size_t elements, std::size_t misalignment)
      : dtype_(dtype),
        bytes_(elements * size_of(dtype).count),
        storage_(bytes_ + misalignment + 3 * kFence, kFenceByte) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    offset_ = kFence + (kFence - address % kFence) % kFence + misalignment;
  }

  DType dtype() const { return dtype_; }
  std::byte* at(std::size_t i) { return storage_.data() + offset_ + i * size_of(dtype_).count; }
  float get(std::size_t i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, at(i), size_of(dtype_).count);
    if (dtype_ == DType::bf16) return to_float(bfloat16{static_cast<std::uint16_t>(bits)});
    if (dtype_ == DType::fp16) return to_float(float16{static_cast<std::uint16_t>(bits)});
    return std::bit_cast<float>(bits);
  }
  void set(std::size_t i, float value) {
    std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    if (dtype_ == DType::bf16) bits = to_bfloat16(value).bits;
    if (dtype_ == DType::fp16) bits = to_float16(value).bits;
    std::memcpy(at(i), &bits, size_of(dtype_).count);
  }
  // Any value, and any bits of a narrow dtype.
  void set_random(std::size_t i, Random& random) {
    set(i, any_value(random));
    const std::uint64_t bits = random();
    if (dtype_ != DType::fp32 && random() % 3 == 0) std::memcpy(at(i), &bits, 2);
  }
  bool fences_stand() const {
    const auto whole = [](std::byte byte) { return byte == kFenceByte; };
    const auto begin = storage_.begin() + static_cast<std::ptrdiff_t>(offset_);
    return std::all_of(storage_.begin(), begin, whole) &&
           std::all_of(begin + static_cast<std::ptrdiff_t>(bytes_), storage_.end(), whole);
  }
  friend bool operator==(const Fenced& a, const Fenced& b) {
    const auto data = [](const Fenced& f) { return f.storage_.data() + f.offset_; };
    return a.bytes_ == b.bytes_ && std::memcmp(data(a), data(b), a.bytes_) == 0;
  }

 private:
  DType dtype_;
  std::size_t bytes_;
  std::vector<std::byte> storage_;
  std::size_t offset_ = 0;  // a copy has the distance to its storage, not that to the boundary
};

struct Layout {
  DType gradient = DType::fp32;
  std::optional<DType> parameter{};
  DType momentum = DType::fp32;
  DType variance = DType::fp32;
  std::size_t elements = 0;
  std::size_t misalignment = 0;  // in elements, different for each array
};

inline std::string to_string(const Layout& l) {
  const auto name = [](DType dtype) { return std::string(to_string(dtype)); };
  return std::to_string(l.elements) + " elements, misaligned by " +
         std::to_string(l.misalignment) + ", gradient " + name(l.gradient) + ", moments " +
         name(l.momentum) + " and " + name(l.variance) + ", parameter " +
         (l.parameter ? name(*l.parameter) : "none");
}

inline const std::vector<Layout>& dtype_tuples() {
  static const std::vector<Layout> tuples = [] {
    constexpr DType kAll[] = {DType::fp32, DType::bf16, DType::fp16};
    constexpr DType kMoments[] = {DType::fp32, DType::bf16};
    std::vector<Layout> all;
    for (const auto gradient : kAll) {
      for (const auto momentum : kMoments) {
        for (const auto variance : kMoments) {
          all.push_back({gradient, {}, momentum, variance});
          for (const auto p : kAll) all.push_back({gradient, p, momentum, variance});
        }
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
        momentum_(array(layout.momentum, 10)),
        variance_(array(layout.variance, 15)),
        parameter_(array(layout.parameter.value_or(DType::fp32), 3)) {
    for (std::size_t i = 0; i < layout.elements; ++i) {
      gradient_.set_random(i, random);
      weight_.set_random(i, random);
      momentum_.set_random(i, random);
      variance_.set_random(i, random);
      if (random() % 8 != 0) variance_.set(i, std::abs(variance_.get(i)));
    }
  }

  AdamSlice view(std::size_t first, std::size_t elements) {
    return {gradient_.at(first),
            layout_.gradient,
            reinterpret_cast<float*>(weight_.at(first)),
            momentum_.at(first),
            variance_.at(first),
            layout_.parameter ? parameter_.at(first) : nullptr,
            parameter_.dtype(),
            elements,
            layout_.momentum,
            layout_.variance};
  }
  AdamSlice view() { return view(0, layout_.elements); }
  void put_parameter_on_gradient(AdamSlice& slice) { slice.parameter = gradient_.at(0); }

  void update_as_specified(const AdamScalars& scalars) {
    for (std::size_t i = 0; i < layout_.elements; ++i) {
      const AdamState now = specified(
          scalars, gradient_.get(i), {weight_.get(i), momentum_.get(i), variance_.get(i)});
      weight_.set(i, now.weight);
      momentum_.set(i, now.momentum);
      variance_.set(i, now.variance);
      if (layout_.parameter) parameter_.set(i, now.weight);
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
    return {dtype, layout_.elements, (layout_.misalignment + skew) * size % Fenced::kFence};
  }

  Layout layout_;
  Fenced gradient_, weight_, momentum_, variance_, parameter_;
};

// Of gradients and of their sum.
struct AdditionDtypes {
  DType gradient, sum;
};
inline constexpr AdditionDtypes kAdditionDtypes[] = {{DType::fp32, DType::fp32},
                              {DType::bf16, DType::fp32},
                              {DType::bf16, DType::bf16},
                              {DType::fp16, DType::fp32},
                              {DType::fp16, DType::fp16}};

inline Fenced random_array(DType dtype, std::size_t elements, Random& random) {
  Fenced array(dtype, elements, random() % 32 * size_of(dtype).count);
  for (std::size_t i = 0; i < elements; ++i) array.set_random(i, random);
  return array;
}

inline void add_as_specified(Fenced& gradient, Fenced& sum, std::size_t elements, bool first) {
  for (std::size_t i = 0; i < elements; ++i) {
    sum.set(i, stored(first ? gradient.get(i) : sum.get(i) + gradient.get(i)));
  }
}

inline GradientAddition view(Fenced& gradient, Fenced& sum, std::size_t elements, bool first) {
  return {gradient.at(0), gradient.dtype(), sum.at(0), sum.dtype(), first, elements};
}

}  // namespace terrace
