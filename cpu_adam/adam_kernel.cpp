// One source, compiled once for every instruction set. The arithmetic is written out operation by
// operation, fused where the specification fuses, so that all of them round alike.
#include "cpu_adam/adam_kernel.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_adam/adam_kernel.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

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
using Floats = hn::ScalableTag<float>;
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

struct None {};  // the parameter that nobody wants
HWY_INLINE void store(Vec, None*) {}
HWY_INLINE void store(Vec v, float* p) { hn::StoreU(v, Floats(), p); }

template <class Bits, class T>
HWY_INLINE void store_bits(Bits bits, T* p) {
  const hn::RebindToUnsigned<Floats> words;
  const hn::Rebind<std::uint16_t, Floats> narrow;
  hn::StoreU(hn::TruncateTo(narrow, hn::BitCast(words, bits)), narrow,
             reinterpret_cast<std::uint16_t*>(p));
}

// The canonical NaN, rounded like a number, gives the canonical NaN.
HWY_INLINE void store(Vec v, bfloat16* p) {
  const hn::RebindToUnsigned<Floats> words;
  const auto bits = hn::BitCast(words, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(words, 1U));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(words, 0x7fffU)));
  store_bits(hn::ShiftRight<16>(rounded), p);
}

HWY_INLINE void store(Vec v, float16* p) {
#if TERRACE_NATIVE_FP16
  const hn::Rebind<hwy::float16_t, Floats> narrow;
  hn::StoreU(hn::DemoteTo(narrow, v), narrow, reinterpret_cast<hwy::float16_t*>(p));
#else
  const Floats d;
  const hn::RebindToSigned<Floats> words;
  const auto bits = hn::BitCast(words, v);
  const auto magnitude = hn::And(bits, hn::Set(words, 0x7fffffff));
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(words, 0x8000));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(words, 1));
  const auto rounded =
      hn::Add(hn::Sub(magnitude, hn::Set(words, 0x38000000 - 0xfff)), odd);
  const auto normal = hn::ShiftRight<13>(rounded);
  // The unit in the last place of 0.5 is that of fp16's subnormals: the addition rounds for us.
  const auto sum = hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5F));
  const auto subnormal = hn::Sub(hn::BitCast(words, sum), hn::Set(words, 0x3f000000));
  const auto large = hn::IfThenElse(hn::Gt(magnitude, hn::Set(words, 0x7f800000)),
                                    hn::Set(words, 0x7e00), hn::Set(words, 0x7c00));
  auto result =
      hn::IfThenElse(hn::Lt(magnitude, hn::Set(words, 0x38800000)), subnormal, normal);
  result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(words, 0x47800000)), result, large);
  store_bits(hn::Or(result, sign), p);
#endif
}

// ---- the update

// Where one vector of elements lies. G, M, V and P are the types of gradient, momentum, variance
// and parameter.
template <class G, class M, class V, class P>
struct Place {
  const G* gradient;
  float* weight;
  M* momentum;
  V* variance;
  P* parameter;

  HWY_INLINE Place operator+(std::size_t i) const {
    if constexpr (std::is_same_v<P, None>) {
      return {gradient + i, weight + i, momentum + i, variance + i, nullptr};
    } else {
      return {gradient + i, weight + i, momentum + i, variance + i, parameter + i};
    }
  }
};

// The formulas of adam.h. Everything is read before anything is written: the parameter may lie on
// the gradient.
template <class G, class M, class V, class P>
HWY_INLINE void update_vector(const AdamScalars& s, const Place<G, M, V, P>& at) {
  const Floats d;
  const Vec w_old = load(d, at.weight);
  const Vec m_old = load(d, at.momentum);
  const Vec v_old = load(d, at.variance);
  Vec g = hn::Mul(load(d, at.gradient), all(s.gradient_factor));
  if (s.l2 != 0) g = fused(all(s.l2), w_old, g);

  const Vec m = fused(all(s.beta1), m_old, hn::Mul(all(s.one_minus_beta1), g));
  const Vec v = fused(all(s.beta2), v_old, hn::Mul(hn::Mul(all(s.one_minus_beta2), g), g));
  const Vec denominator =
      fused(hn::Sqrt(v), all(s.inverse_sqrt_correction2), all(s.epsilon));
  const Vec decayed = hn::Mul(w_old, all(s.decay_factor));
  const Vec w = canonical(fused(all(-s.step_size), hn::Div(m, denominator), decayed));

  store(canonical(m), at.momentum);
  store(canonical(v), at.variance);
  store(w, at.weight);
  store(w, at.parameter);
}

// The last, partial vector goes over the stack: same arithmetic, no byte outside the range touched.
template <class G, class M, class V, class P>
void update_tail(const AdamScalars& s, const Place<G, M, V, P>& at, std::size_t count) {
  constexpr std::size_t kLanes = hn::MaxLanes(Floats());
  G gradient[kLanes] = {};
  float weight[kLanes] = {};
  M momentum[kLanes] = {};
  V variance[kLanes] = {};
  P parameter[kLanes] = {};
  std::memcpy(gradient, at.gradient, count * sizeof(G));
  std::memcpy(weight, at.weight, count * sizeof(float));
  std::memcpy(momentum, at.momentum, count * sizeof(M));
  std::memcpy(variance, at.variance, count * sizeof(V));
  update_vector(s, Place<G, M, V, P>{gradient, weight, momentum, variance, parameter});
  std::memcpy(at.weight, weight, count * sizeof(float));
  std::memcpy(at.momentum, momentum, count * sizeof(M));
  std::memcpy(at.variance, variance, count * sizeof(V));
  if constexpr (!std::is_same_v<P, None>) {
    std::memcpy(at.parameter, parameter, count * sizeof(P));
  }
}

template <class G, class M, class V, class P>
void update_typed(const AdamScalars& scalars, const AdamSlice& slice) {
  const AdamScalars s = scalars;  // ours, so that no store can change it: it stays in registers
  const Place<G, M, V, P> begin{static_cast<const G*>(slice.gradient), slice.master_weight,
                                static_cast<M*>(slice.momentum), static_cast<V*>(slice.variance),
                                static_cast<P*>(slice.parameter)};
  const std::size_t lanes = hn::Lanes(Floats());
  const std::size_t whole = slice.elements / lanes * lanes;
  for (std::size_t i = 0; i < whole; i += lanes) {
    fetch_ahead(begin.gradient + i);
    fetch_ahead(begin.weight + i);
    fetch_ahead(begin.momentum + i);
    fetch_ahead(begin.variance + i);
    update_vector(s, begin + i);
  }
  if (whole < slice.elements) update_tail(s, begin + whole, slice.elements - whole);
}

template <class G, class M, class V>
void update_moments(const AdamScalars& s, const AdamSlice& slice) {
  if (slice.parameter == nullptr) return update_typed<G, M, V, None>(s, slice);
  switch (slice.parameter_dtype) {
    case DType::fp32: return update_typed<G, M, V, float>(s, slice);
    case DType::bf16: return update_typed<G, M, V, bfloat16>(s, slice);
    case DType::fp16: return update_typed<G, M, V, float16>(s, slice);
  }
}

template <class G>
void update_gradient(const AdamScalars& s, const AdamSlice& slice) {
  const bool narrow_variance = slice.variance_dtype == DType::bf16;
  if (slice.momentum_dtype == DType::bf16) {
    return narrow_variance ? update_moments<G, bfloat16, bfloat16>(s, slice)
                           : update_moments<G, bfloat16, float>(s, slice);
  }
  return narrow_variance ? update_moments<G, float, bfloat16>(s, slice)
                         : update_moments<G, float, float>(s, slice);
}

void update(const AdamScalars& s, const AdamSlice& slice) {
  switch (slice.gradient_dtype) {
    case DType::fp32: return update_gradient<float>(s, slice);
    case DType::bf16: return update_gradient<bfloat16>(s, slice);
    case DType::fp16: return update_gradient<float16>(s, slice);
  }
}

// ---- the sum of micro-batches

template <bool kFirst, class G, class S>
HWY_INLINE void add_vector(const G* gradient, S* sum) {
  auto value = load(Floats(), gradient);
  if constexpr (!kFirst) value = hn::Add(load(Floats(), sum), value);
  store(canonical(value), sum);
}

template <bool kFirst, class G, class S>
void add_typed(const G* gradient, S* sum, std::uint64_t elements) {
  const std::size_t lanes = hn::Lanes(Floats());
  const std::uint64_t whole = elements / lanes * lanes;
  for (std::uint64_t i = 0; i < whole; i += lanes) {
    fetch_ahead(gradient + i);
    fetch_ahead(sum + i);
    add_vector<kFirst>(gradient + i, sum + i);
  }
  const std::size_t rest = elements - whole;
  if (rest == 0) return;
  constexpr std::size_t kLanes = hn::MaxLanes(Floats());
  G last_gradients[kLanes] = {};
  S last_sums[kLanes] = {};
  std::memcpy(last_gradients, gradient + whole, rest * sizeof(G));
  std::memcpy(last_sums, sum + whole, rest * sizeof(S));
  add_vector<kFirst>(last_gradients, last_sums);
  std::memcpy(sum + whole, last_sums, rest * sizeof(S));
}

template <class G, class S>
void add_to(const GradientAddition& a) {
  const auto* gradient = static_cast<const G*>(a.gradient);
  auto* sum = static_cast<S*>(a.sum);
  if (a.first) {
    add_typed<true>(gradient, sum, a.elements);
  } else {
    add_typed<false>(gradient, sum, a.elements);
  }
}

void add(const GradientAddition& a) {
  const bool wide = a.sum_dtype == DType::fp32;
  switch (a.gradient_dtype) {
    case DType::fp32: return add_to<float, float>(a);
    case DType::bf16: return wide ? add_to<bfloat16, float>(a) : add_to<bfloat16, bfloat16>(a);
    case DType::fp16: return wide ? add_to<float16, float>(a) : add_to<float16, float16>(a);
  }
}

// ---- the sum of squares

using Doubles = hn::CappedTag<double, kGradientLanes / 4>;

// A square of fp32 is exact in double, so that it does not matter whether MulAdd rounds once.
template <class G>
HWY_INLINE hn::Vec<Doubles> add_square(hn::Vec<Doubles> sum, const G* p) {
  const auto value = hn::PromoteTo(Doubles(), load(hn::Rebind<float, Doubles>(), p));
  return hn::MulAdd(value, value, sum);
}

// Four vectors of lanes at a time, so that an addition need not wait for the one before.
template <class G>
void add_squares_typed(const G* gradient, std::size_t rows, double* lanes) {
  const Doubles d;
  const std::size_t n = hn::Lanes(d);
  for (std::size_t first = 0; first < kGradientLanes; first += 4 * n) {
    double* const own = lanes + first;
    auto a = hn::LoadU(d, own), b = hn::LoadU(d, own + n);
    auto c = hn::LoadU(d, own + 2 * n), e = hn::LoadU(d, own + 3 * n);
    for (std::size_t row = 0; row < rows; ++row) {
      const G* const at = gradient + row * kGradientLanes + first;
      fetch_ahead(at);
      a = add_square(a, at);
      b = add_square(b, at + n);
      c = add_square(c, at + 2 * n);
      e = add_square(e, at + 3 * n);
    }
    hn::StoreU(a, d, own);
    hn::StoreU(b, d, own + n);
    hn::StoreU(c, d, own + 2 * n);
    hn::StoreU(e, d, own + 3 * n);
  }
}

void add_squares(const void* gradient, DType dtype, std::size_t rows, double* lanes) {
  switch (dtype) {
    case DType::fp32: return add_squares_typed(static_cast<const float*>(gradient), rows, lanes);
    case DType::bf16: return add_squares_typed(static_cast<const bfloat16*>(gradient), rows, lanes);
    case DType::fp16: return add_squares_typed(static_cast<const float16*>(gradient), rows, lanes);
  }
}

// The name comes from where the code is compiled, so that it cannot be another's.
AdamKernel kernel() { return {hwy::TargetName(HWY_TARGET), update, add_squares, add}; }

}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {
HWY_EXPORT(kernel);

namespace {

// What HWY_DYNAMIC_DISPATCH would call if `target` were the best one. The choice is our own, since
// Highway's belongs to the whole process. The table has one entry when there is none to make.
AdamKernel kernel_for(std::int64_t target) {
  constexpr std::size_t kEntries = std::size(HWY_DISPATCH_TABLE(kernel));
  hwy::ChosenTarget chosen;
  chosen.Update(target);
  return HWY_DISPATCH_TABLE(kernel)[kEntries == 1 ? 0 : chosen.GetIndex()]();
}

std::vector<AdamKernel> list_kernels() {
  std::vector<AdamKernel> kernels;
  for (const auto target : hwy::SupportedAndGeneratedTargets()) {  // better ones come first
    kernels.push_back(kernel_for(target));
  }
  return kernels;
}

}  // namespace

const std::vector<AdamKernel>& adam_kernels() {
  static const std::vector<AdamKernel> kernels = list_kernels();
  return kernels;
}

}  // namespace terrace
#endif
