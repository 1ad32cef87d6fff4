// Vectors of fp32 from and to arrays of every element type, for files that are compiled once for
// every instruction set. Included after hwy/foreach_target.h; what it defines is that set's own.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "terrace/dtype.h"

// Once for each instruction set, in Highway's way.
#if defined(TERRACE_ADAM_VECTORS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TERRACE_ADAM_VECTORS_INL_H
#undef TERRACE_ADAM_VECTORS_INL_H
#else
#define TERRACE_ADAM_VECTORS_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {

// Whether this instruction set converts fp16. Highway's emulation promises no rounding.
#undef TERRACE_NATIVE_FP16
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)) || HWY_ARCH_ARM_A64
#define TERRACE_NATIVE_FP16 1
#else
#define TERRACE_NATIVE_FP16 0
#endif

namespace hn = hwy::HWY_NAMESPACE;
#if HWY_ARCH_X86
// Memory is as fast with 32 bytes as with 64, and the clock of some CPUs is not.
using Floats = hn::CappedTag<float, 8>;
#else
using Floats = hn::ScalableTag<float>;
#endif
using Vec = hn::Vec<Floats>;

HWY_INLINE Vec all(float value) { return hn::Set(Floats(), value); }

// a * b + c with one rounding. Where the instruction set has none (below AVX2), Highway's MulAdd
// rounds twice, so there the lanes go through std::fma.
HWY_INLINE Vec fused(Vec a, Vec b, Vec c) {
#if HWY_NATIVE_FMA
  return hn::MulAdd(a, b, c);
#else
  const Floats d;
  HWY_ALIGN float x[hn::MaxLanes(d)];
  HWY_ALIGN float y[hn::MaxLanes(d)];
  HWY_ALIGN float z[hn::MaxLanes(d)];
  hn::Store(a, d, x);
  hn::Store(b, d, y);
  hn::Store(c, d, z);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::Load(d, z);
#endif
}

// Touches what comes later, also behind the end of the array, where it does nothing. Left to itself
// the CPU stops at the end of every page: it is worth a tenth of an update, a third of a sum.
HWY_INLINE void fetch_ahead(const void* p) {
  constexpr std::uintptr_t kAheadBytes = 2048;
  hwy::Prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(p) + kAheadBytes));
}

// Which NaN an operation on several of them returns depends on the order of its operands, which is
// the compiler's choice, and on the architecture. One NaN for all makes results comparable.
HWY_INLINE Vec canonical(Vec v) {
  const hn::RebindToUnsigned<Floats> words;
  const auto quiet_nan = hn::BitCast(Floats(), hn::Set(words, 0x7fc00000U));
  return hn::IfThenElse(hn::IsNaN(v), quiet_nan, v);
}

// ---- loads: to_float() of dtype.h, lane by lane

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const float* p) {
  return hn::LoadU(d, p);
}

// 16-bit patterns in 32-bit lanes.
template <class D, class T>
HWY_INLINE auto load_bits(D, const T* p) {
  const hn::Rebind<std::uint16_t, D> narrow;
  return hn::PromoteTo(hn::RebindToSigned<D>(),
                       hn::LoadU(narrow, reinterpret_cast<const std::uint16_t*>(p)));
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const bfloat16* p) {
  return hn::BitCast(d, hn::ShiftLeft<16>(load_bits(d, p)));
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const float16* p) {
#if TERRACE_NATIVE_FP16
  const hn::Rebind<hwy::float16_t, D> narrow;
  return hn::PromoteTo(d, hn::LoadU(narrow, reinterpret_cast<const hwy::float16_t*>(p)));
#else
  const hn::RebindToSigned<D> words;
  const auto bits = load_bits(d, p);
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(words, 0x8000)));
  const auto magnitude = hn::ShiftLeft<13>(hn::And(bits, hn::Set(words, 0x7fff)));
  const auto normal = hn::Add(magnitude, hn::Set(words, 112 << 23));
  const auto infinite_or_nan = hn::Add(normal, hn::Set(words, 112 << 23));
  // 2^-14 + f * 2^-24 less 2^-14: exact, and no subnormal operand, which would be slow.
  const auto shifted = hn::BitCast(d, hn::Add(normal, hn::Set(words, 1 << 23)));
  const auto subnormal = hn::BitCast(words, hn::Sub(shifted, hn::Set(d, 0x1p-14F)));
  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(words, 1 << 23)), subnormal, normal);
  result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(words, 0x1f << 23)), result, infinite_or_nan);
  return hn::BitCast(d, hn::Or(result, sign));
#endif
}

// ---- stores: to_bfloat16() and to_float16() of dtype.h. A NaN has to be the canonical one.

// `streaming`: past the caches; then p is aligned to the vector.
template <class D>
HWY_INLINE void put(hn::Vec<D> v, D d, hn::TFromD<D>* p, bool streaming) {
  // Highway streams at least 16 bytes, of which only some would be ours.
  if (streaming && hn::MaxLanes(d) * sizeof(*p) >= 16) {
    hn::Stream(v, d, p);
  } else {
    hn::StoreU(v, d, p);
  }
}

struct None {};  // the parameter that nobody wants
HWY_INLINE void store(Vec, None*, bool = false) {}
HWY_INLINE void store(Vec v, float* p, bool streaming = false) { put(v, Floats(), p, streaming); }

template <class Bits, class T>
HWY_INLINE void store_bits(Bits bits, T* p, bool streaming) {
  const hn::RebindToUnsigned<Floats> words;
  const hn::Rebind<std::uint16_t, Floats> narrow;
  put(hn::TruncateTo(narrow, hn::BitCast(words, bits)), narrow, reinterpret_cast<std::uint16_t*>(p),
      streaming);
}

// The canonical NaN, rounded like a number, gives the canonical NaN.
HWY_INLINE void store(Vec v, bfloat16* p, bool streaming = false) {
  const hn::RebindToUnsigned<Floats> words;
  const auto bits = hn::BitCast(words, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(words, 1U));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(words, 0x7fffU)));
  store_bits(hn::ShiftRight<16>(rounded), p, streaming);
}

HWY_INLINE void store(Vec v, float16* p, bool streaming = false) {
#if TERRACE_NATIVE_FP16
  const hn::Rebind<hwy::float16_t, Floats> halves;
  const hn::Rebind<std::uint16_t, Floats> narrow;
  put(hn::BitCast(narrow, hn::DemoteTo(halves, v)), narrow, reinterpret_cast<std::uint16_t*>(p),
      streaming);
#else
  const Floats d;
  const hn::RebindToSigned<Floats> words;
  const auto bits = hn::BitCast(words, v);
  const auto magnitude = hn::And(bits, hn::Set(words, 0x7fffffff));
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(words, 0x8000));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(words, 1));
  const auto rounded = hn::Add(hn::Sub(magnitude, hn::Set(words, 0x38000000 - 0xfff)), odd);
  const auto normal = hn::ShiftRight<13>(rounded);
  // The unit in the last place of 0.5 is that of fp16's subnormals: the addition rounds for us.
  const auto sum = hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5F));
  const auto subnormal = hn::Sub(hn::BitCast(words, sum), hn::Set(words, 0x3f000000));
  const auto large = hn::IfThenElse(hn::Gt(magnitude, hn::Set(words, 0x7f800000)),
                                    hn::Set(words, 0x7e00), hn::Set(words, 0x7c00));
  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(words, 0x38800000)), subnormal, normal);
  result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(words, 0x47800000)), result, large);
  store_bits(hn::Or(result, sign), p, streaming);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#endif
