// One source, compiled once for every instruction set, as the Adam kernels are.
#include "tools/bench_adam_loops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tools/bench_adam_loops.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu_adam/adam_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {

using cli::Stores;
using Raw = hn::CappedTag<std::uint8_t, 32>;  // longer ones are a little slower where there are any

template <bool kNonTemporal, class D>
HWY_INLINE void put(hn::Vec<D> v, D d, hn::TFromD<D>* p) {
  if constexpr (kNonTemporal) {
    hn::Stream(v, d, p);
  } else {
    hn::Store(v, d, p);
  }
}

HWY_INLINE hn::Vec<Raw> take(const std::uint8_t* p) {
  fetch_ahead(p);
  return hn::Load(Raw(), p);
}

// Reads and writes kVectors vectors as they are. `nothing` is zero, and only we know.
template <std::size_t kVectors, bool kNonTemporal>
HWY_INLINE void rewrite(std::uint8_t* p, hn::Vec<Raw> nothing) {
  const Raw d;
  const std::size_t n = hn::Lanes(d);
  for (std::size_t i = 0; i < kVectors; ++i) {
    put<kNonTemporal>(hn::Or(take(p + i * n), nothing), d, p + i * n);
  }
}

// kG, kM, kP: bytes of an element of gradient, moments and parameter. As many elements at a time as
// a vector has bytes: each stream then is so many vectors as its elements have bytes.
template <std::size_t kG, std::size_t kM, std::size_t kP, Stores kStores>
void touch_typed(const AdamSlice& slice, std::uint8_t zero) {
  constexpr bool kAll = kStores == Stores::non_temporal;
  const Raw d;
  const std::size_t n = hn::Lanes(d);
  const auto* gradient = static_cast<const std::uint8_t*>(slice.gradient);
  auto* weight = reinterpret_cast<std::uint8_t*>(slice.master_weight);
  auto* momentum = static_cast<std::uint8_t*>(slice.momentum);
  auto* variance = static_cast<std::uint8_t*>(slice.variance);
  auto* parameter = static_cast<std::uint8_t*>(slice.parameter);
  const auto mask = hn::Set(d, zero);
  for (std::uint64_t i = 0; i < slice.elements; i += n) {
    auto nothing = hn::Zero(d);
    for (std::size_t j = 0; j < kG; ++j) {
      nothing = hn::Or(nothing, take(gradient + i * kG + j * n));
    }
    nothing = hn::And(nothing, mask);
    for (std::size_t j = 0; j < kP; ++j) {
      const auto found = hn::Load(d, weight + i * 4 + j * n);
      put<kStores != Stores::ordinary>(hn::Or(found, nothing), d, parameter + i * kP + j * n);
    }
    rewrite<4, kAll>(weight + i * 4, nothing);
    rewrite<kM, kAll>(momentum + i * kM, nothing);
    rewrite<kM, kAll>(variance + i * kM, nothing);
  }
  if constexpr (kStores != Stores::ordinary) hwy::FlushStream();
}

template <std::size_t kG, std::size_t kM, std::size_t kP>
void touch_sizes(const AdamSlice& slice, Stores stores, std::uint8_t zero) {
  switch (stores) {
    case Stores::ordinary: return touch_typed<kG, kM, kP, Stores::ordinary>(slice, zero);
    case Stores::non_temporal: return touch_typed<kG, kM, kP, Stores::non_temporal>(slice, zero);
    case Stores::parameter_non_temporal:
      return touch_typed<kG, kM, kP, Stores::parameter_non_temporal>(slice, zero);
  }
}

template <std::size_t kG, std::size_t kM>
void touch_moments(const AdamSlice& slice, Stores stores, std::uint8_t zero) {
  return size_of(slice.parameter_dtype).count == 4 ? touch_sizes<kG, kM, 4>(slice, stores, zero)
                                                   : touch_sizes<kG, kM, 2>(slice, stores, zero);
}

template <std::size_t kG>
void touch_gradient(const AdamSlice& slice, Stores stores, std::uint8_t zero) {
  return size_of(slice.momentum_dtype).count == 4 ? touch_moments<kG, 4>(slice, stores, zero)
                                                  : touch_moments<kG, 2>(slice, stores, zero);
}

void touch(const AdamSlice& slice, Stores stores) {
  const volatile std::uint8_t zero = 0;  // not a constant to the compiler
  return size_of(slice.gradient_dtype).count == 4 ? touch_gradient<4>(slice, stores, zero)
                                                  : touch_gradient<2>(slice, stores, zero);
}

// ---- STREAM

template <bool kNonTemporal, class Body>
void fill(float* to, std::uint64_t elements, const Body& body) {
  const Floats d;
  for (std::uint64_t i = 0; i < elements; i += hn::Lanes(d)) put<kNonTemporal>(body(i), d, to + i);
  if constexpr (kNonTemporal) hwy::FlushStream();
}

HWY_INLINE Vec read(const float* p) {
  fetch_ahead(p);
  return hn::Load(Floats(), p);
}

void copy(const float* from, float* to, std::uint64_t elements, Stores stores) {
  const auto body = [from](std::uint64_t i) HWY_ATTR { return read(from + i); };
  stores == Stores::ordinary ? fill<false>(to, elements, body) : fill<true>(to, elements, body);
}

void triad(const float* a, const float* b, float* to, std::uint64_t elements, Stores stores) {
  const auto body = [a, b](std::uint64_t i)
                        HWY_ATTR { return hn::MulAdd(all(0.25F), read(b + i), read(a + i)); };
  stores == Stores::ordinary ? fill<false>(to, elements, body) : fill<true>(to, elements, body);
}

// ---- separate passes, each with the stores that suit it: past the caches, or where it reads

template <class G, bool kNonTemporal>
void unscale_typed(const void* gradient, float factor, float* to, std::uint64_t elements) {
  const auto* from = static_cast<const G*>(gradient);
  fill<kNonTemporal>(to, elements, [from, factor](std::uint64_t i) HWY_ATTR {
    fetch_ahead(from + i);
    return hn::Mul(load(Floats(), from + i), all(factor));
  });
}

void unscale(const void* gradient, DType dtype, float factor, float* to, std::uint64_t elements) {
  switch (dtype) {
    case DType::fp32: return unscale_typed<float, true>(gradient, factor, to, elements);
    case DType::bf16: return unscale_typed<bfloat16, true>(gradient, factor, to, elements);
    case DType::fp16: return unscale_typed<float16, true>(gradient, factor, to, elements);
  }
}

void scale(float* values, float factor, std::uint64_t elements) {
  unscale_typed<float, false>(values, factor, values, elements);
}

template <class P>
void cast_typed(const float* from, void* to, std::uint64_t elements) {
  auto* parameter = static_cast<P*>(to);
  for (std::uint64_t i = 0; i < elements; i += hn::Lanes(Floats())) {
    store(canonical(read(from + i)), parameter + i, true);
  }
  hwy::FlushStream();
}

void cast(const float* from, void* to, DType dtype, std::uint64_t elements) {
  switch (dtype) {
    case DType::fp32: return cast_typed<float>(from, to, elements);
    case DType::bf16: return cast_typed<bfloat16>(from, to, elements);
    case DType::fp16: return cast_typed<float16>(from, to, elements);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {
HWY_EXPORT(touch);
HWY_EXPORT(copy);
HWY_EXPORT(triad);
HWY_EXPORT(unscale);
HWY_EXPORT(scale);
HWY_EXPORT(cast);

namespace cli {

const char* to_string(Stores stores) {
  switch (stores) {
    case Stores::ordinary: return "ordinary";
    case Stores::non_temporal: return "non-temporal";
    case Stores::parameter_non_temporal: return "non-temporal parameter";
  }
  return "";
}

void touch_streams(const AdamSlice& slice, Stores stores) {
  HWY_DYNAMIC_DISPATCH(touch)(slice, stores);
}
void copy(const float* from, float* to, std::uint64_t elements, Stores stores) {
  HWY_DYNAMIC_DISPATCH(copy)(from, to, elements, stores);
}
void triad(const float* a, const float* b, float* to, std::uint64_t elements, Stores stores) {
  HWY_DYNAMIC_DISPATCH(triad)(a, b, to, elements, stores);
}
void unscale(const void* gradient, DType dtype, float factor, float* to, std::uint64_t elements) {
  HWY_DYNAMIC_DISPATCH(unscale)(gradient, dtype, factor, to, elements);
}
void scale(float* values, float factor, std::uint64_t elements) {
  HWY_DYNAMIC_DISPATCH(scale)(values, factor, elements);
}
void cast(const float* from, void* to, DType dtype, std::uint64_t elements) {
  HWY_DYNAMIC_DISPATCH(cast)(from, to, dtype, elements);
}

}  // namespace cli
}  // namespace terrace
#endif
