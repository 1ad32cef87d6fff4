// One source, compiled once for every instruction set. The arithmetic is written out operation by
// operation, fused where the specification fuses, so that all of them round alike.
#include "cpu_adam/adam_kernel.h"

#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_adam/adam_kernel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::ScalableTag<float>;
using Vec = hn::Vec<Floats>;
using Words = hn::Repartition<std::uint32_t, Floats>;
using Halves = hn::Rebind<std::uint16_t, Floats>;

// a * b + c with one rounding. Highway fuses from AVX2 on (and on Arm); below it does not, so there
// the lanes go through std::fma.
HWY_INLINE Vec fused(Vec a, Vec b, Vec c) {
#if HWY_TARGET == HWY_SSE2 || HWY_TARGET == HWY_SSSE3 || HWY_TARGET == HWY_SSE4 || \
    HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR
  const Floats d;
  HWY_ALIGN float x[hn::MaxLanes(d)];
  HWY_ALIGN float y[hn::MaxLanes(d)];
  HWY_ALIGN float z[hn::MaxLanes(d)];
  hn::Store(a, d, x);
  hn::Store(b, d, y);
  hn::Store(c, d, z);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::Load(d, z);
#else
  return hn::MulAdd(a, b, c);
#endif
}

HWY_INLINE Vec load_gradient(const float* p) { return hn::LoadU(Floats(), p); }
HWY_INLINE Vec load_gradient(const bfloat16* p) {
  const Words words;
  const auto narrow = hn::LoadU(Halves(), reinterpret_cast<const std::uint16_t*>(p));
  return hn::BitCast(Floats(), hn::ShiftLeft<16>(hn::PromoteTo(words, narrow)));
}

HWY_INLINE void store_parameter(Vec v, float* p) { hn::StoreU(v, Floats(), p); }
// to_bfloat16() of dtype.h, lane by lane.
HWY_INLINE void store_parameter(Vec v, bfloat16* p) {
  const Words words;
  const auto bits = hn::BitCast(words, v);
  const auto high = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(high, hn::Set(words, 1U));
  const auto rounded =
      hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(words, 0x7fffU))));
  const auto quiet = hn::Or(high, hn::Set(words, 0x40U));
  const auto magnitude = hn::And(bits, hn::Set(words, 0x7fffffffU));
  const auto nan = hn::Gt(magnitude, hn::Set(words, 0x7f800000U));
  const auto result = hn::IfThenElse(nan, quiet, rounded);
  const Halves halves;
  hn::StoreU(hn::TruncateTo(halves, result), halves, reinterpret_cast<std::uint16_t*>(p));
}

struct None {};
HWY_INLINE void store_parameter(Vec, None*) {}

// The scalars, once in every lane.
struct Broadcast {
  explicit Broadcast(const AdamScalars& s)
      : beta1(set(s.beta1)),
        one_minus_beta1(set(s.one_minus_beta1)),
        beta2(set(s.beta2)),
        one_minus_beta2(set(s.one_minus_beta2)),
        epsilon(set(s.epsilon)),
        minus_step_size(set(-s.step_size)),
        inverse_sqrt_correction2(set(s.inverse_sqrt_correction2)),
        l2(set(s.l2)),
        decay_factor(set(s.decay_factor)) {}
  static Vec set(float value) { return hn::Set(Floats(), value); }

  Vec beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, minus_step_size;
  Vec inverse_sqrt_correction2, l2, decay_factor;
};

struct Moments {
  Vec weight, momentum, variance;
};

template <bool kL2>
HWY_INLINE Moments step(const Broadcast& s, Vec gradient, Moments old) {
  const Vec g = kL2 ? fused(s.l2, old.weight, gradient) : gradient;
  const Vec m = fused(s.beta1, old.momentum, hn::Mul(s.one_minus_beta1, g));
  const Vec v = fused(s.beta2, old.variance, hn::Mul(hn::Mul(s.one_minus_beta2, g), g));
  const Vec denominator = fused(hn::Sqrt(v), s.inverse_sqrt_correction2, s.epsilon);
  const Vec decayed = hn::Mul(old.weight, s.decay_factor);
  const Vec w = fused(s.minus_step_size, hn::Div(m, denominator), decayed);
  return {w, m, v};
}

template <bool kL2, class G, class P>
HWY_INLINE void one_vector(const Broadcast& s, const G* gradient, float* weight, float* momentum,
                           float* variance, P* parameter) {
  const Floats d;
  const Moments fresh = step<kL2>(s, load_gradient(gradient),
                                  {hn::LoadU(d, weight), hn::LoadU(d, momentum),
                                   hn::LoadU(d, variance)});
  hn::StoreU(fresh.weight, d, weight);
  hn::StoreU(fresh.momentum, d, momentum);
  hn::StoreU(fresh.variance, d, variance);
  store_parameter(fresh.weight, parameter);
}

// The rest goes through vectors on the stack: same arithmetic, no byte outside the range touched.
template <bool kL2, class G, class P>
void tail(const Broadcast& s, const G* gradient, float* weight, float* momentum, float* variance,
          P* parameter, std::size_t count) {
  constexpr std::size_t kLanes = hn::MaxLanes(Floats());
  G g[kLanes] = {};
  P p[kLanes] = {};
  float w[kLanes] = {}, m[kLanes] = {}, v[kLanes] = {};
  std::memcpy(g, gradient, count * sizeof(G));
  std::memcpy(w, weight, count * sizeof(float));
  std::memcpy(m, momentum, count * sizeof(float));
  std::memcpy(v, variance, count * sizeof(float));
  one_vector<kL2>(s, g, w, m, v, p);
  std::memcpy(weight, w, count * sizeof(float));
  std::memcpy(momentum, m, count * sizeof(float));
  std::memcpy(variance, v, count * sizeof(float));
  if constexpr (!std::is_same_v<P, None>) std::memcpy(parameter, p, count * sizeof(P));
}

template <bool kL2, class G, class P>
void update_typed(const AdamScalars& scalars, const AdamSlice& slice) {
  const Broadcast s(scalars);
  const auto* gradient = static_cast<const G*>(slice.gradient);
  auto* parameter = static_cast<P*>(slice.parameter);
  const std::size_t lanes = hn::Lanes(Floats());
  const std::size_t elements = slice.elements;
  const auto out = [&](std::size_t i) {
    if constexpr (std::is_same_v<P, None>) return parameter;
    else return parameter + i;
  };
  std::size_t i = 0;
  for (; i + lanes <= elements; i += lanes) {
    one_vector<kL2>(s, gradient + i, slice.master_weight + i, slice.momentum + i,
                    slice.variance + i, out(i));
  }
  if (i < elements) {
    tail<kL2>(s, gradient + i, slice.master_weight + i, slice.momentum + i, slice.variance + i,
              out(i), elements - i);
  }
}

template <bool kL2, class G>
void update_gradient(const AdamScalars& scalars, const AdamSlice& slice) {
  if (slice.parameter == nullptr) return update_typed<kL2, G, None>(scalars, slice);
  if (slice.parameter_dtype == DType::bf16) return update_typed<kL2, G, bfloat16>(scalars, slice);
  update_typed<kL2, G, float>(scalars, slice);
}

template <bool kL2>
void update_mode(const AdamScalars& scalars, const AdamSlice& slice) {
  if (slice.gradient_dtype == DType::bf16) return update_gradient<kL2, bfloat16>(scalars, slice);
  update_gradient<kL2, float>(scalars, slice);
}

void update(const AdamScalars& scalars, const AdamSlice& slice) {
  if (scalars.l2 != 0) return update_mode<true>(scalars, slice);
  update_mode<false>(scalars, slice);
}

}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {
HWY_EXPORT(update);

namespace {

std::vector<AdamKernel> list_kernels() {
  std::vector<AdamKernel> kernels;
  std::int64_t targets = hwy::SupportedTargets();
  while (targets != 0) {
    const std::int64_t best = targets & -targets;  // Highway numbers better targets lower
    targets &= targets - 1;
    hwy::SetSupportedTargetsForTest(best);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    kernels.push_back({hwy::TargetName(best), &HWY_DYNAMIC_DISPATCH(update)});
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  return kernels;
}

}  // namespace

const std::vector<AdamKernel>& adam_kernels() {
  static const std::vector<AdamKernel> kernels = list_kernels();
  return kernels;
}

}  // namespace terrace
#endif
