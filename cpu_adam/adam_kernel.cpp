// One source, compiled once for every instruction set. The arithmetic is written out operation by
// operation, fused where the specification fuses, so that all of them round alike.
#include "cpu_adam/adam_kernel.h"

#include <cfenv>
#include <cmath>
#include <cstring>
#include <iterator>
#include <type_traits>

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

// Which NaN an operation on several of them returns depends on the order of its operands, which is
// the compiler's choice, and on the architecture. One NaN for all makes results comparable.
HWY_INLINE Vec canonical(Vec v) {
  const auto quiet_nan = hn::BitCast(Floats(), hn::Set(Words(), 0x7fc00000U));
  return hn::IfThenElse(hn::IsNaN(v), quiet_nan, v);
}

HWY_INLINE Vec load_gradient(const float* p) { return hn::LoadU(Floats(), p); }
HWY_INLINE Vec load_gradient(const bfloat16* p) {
  const auto narrow = hn::LoadU(Halves(), reinterpret_cast<const std::uint16_t*>(p));
  return hn::BitCast(Floats(), hn::ShiftLeft<16>(hn::PromoteTo(Words(), narrow)));
}

struct None {};  // the parameter that nobody wants
HWY_INLINE void store_parameter(Vec, None*) {}
HWY_INLINE void store_parameter(Vec v, float* p) { hn::StoreU(v, Floats(), p); }
// to_bfloat16() of dtype.h, lane by lane. It needs no case for NaN: the canonical one, rounded like
// a number, gives the canonical one.
HWY_INLINE void store_parameter(Vec v, bfloat16* p) {
  const Words words;
  const Halves halves;
  const auto bits = hn::BitCast(words, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(words, 1U));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(words, 0x7fffU)));
  const auto narrow = hn::TruncateTo(halves, hn::ShiftRight<16>(rounded));
  hn::StoreU(narrow, halves, reinterpret_cast<std::uint16_t*>(p));
}

// Where one vector of elements lies.
template <class G, class P>
struct Place {
  const G* gradient;
  float* weight;
  float* momentum;
  float* variance;
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
template <bool kL2, class G, class P>
HWY_INLINE void update_vector(const AdamScalars& s, const Place<G, P>& at) {
  const Floats d;
  const Vec w_old = hn::LoadU(d, at.weight);
  const Vec m_old = hn::LoadU(d, at.momentum);
  const Vec v_old = hn::LoadU(d, at.variance);
  Vec g = load_gradient(at.gradient);
  if constexpr (kL2) g = fused(all(s.l2), w_old, g);

  const Vec m = fused(all(s.beta1), m_old, hn::Mul(all(s.one_minus_beta1), g));
  const Vec v = fused(all(s.beta2), v_old, hn::Mul(hn::Mul(all(s.one_minus_beta2), g), g));
  const Vec denominator =
      fused(hn::Sqrt(v), all(s.inverse_sqrt_correction2), all(s.epsilon));
  const Vec decayed = hn::Mul(w_old, all(s.decay_factor));
  const Vec w = canonical(fused(all(-s.step_size), hn::Div(m, denominator), decayed));

  hn::StoreU(canonical(m), d, at.momentum);
  hn::StoreU(canonical(v), d, at.variance);
  hn::StoreU(w, d, at.weight);
  store_parameter(w, at.parameter);
}

// The last, partial vector goes over the stack: same arithmetic, no byte outside the range touched.
template <bool kL2, class G, class P>
void update_tail(const AdamScalars& s, const Place<G, P>& at, std::size_t count) {
  constexpr std::size_t kLanes = hn::MaxLanes(Floats());
  G gradient[kLanes] = {};
  float weight[kLanes] = {};
  float momentum[kLanes] = {};
  float variance[kLanes] = {};
  P parameter[kLanes] = {};
  std::memcpy(gradient, at.gradient, count * sizeof(G));
  std::memcpy(weight, at.weight, count * sizeof(float));
  std::memcpy(momentum, at.momentum, count * sizeof(float));
  std::memcpy(variance, at.variance, count * sizeof(float));
  update_vector<kL2>(s, Place<G, P>{gradient, weight, momentum, variance, parameter});
  std::memcpy(at.weight, weight, count * sizeof(float));
  std::memcpy(at.momentum, momentum, count * sizeof(float));
  std::memcpy(at.variance, variance, count * sizeof(float));
  if constexpr (!std::is_same_v<P, None>) {
    std::memcpy(at.parameter, parameter, count * sizeof(P));
  }
}

template <bool kL2, class G, class P>
void update_typed(const AdamScalars& scalars, const AdamSlice& slice) {
  const AdamScalars s = scalars;  // ours, so that no store can change it: it stays in registers
  const Place<G, P> begin{static_cast<const G*>(slice.gradient), slice.master_weight,
                          slice.momentum, slice.variance, static_cast<P*>(slice.parameter)};
  const std::size_t lanes = hn::Lanes(Floats());
  const std::size_t whole = slice.elements / lanes * lanes;
  for (std::size_t i = 0; i < whole; i += lanes) update_vector<kL2>(s, begin + i);
  if (whole < slice.elements) update_tail<kL2>(s, begin + whole, slice.elements - whole);
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

// The name comes from where the code is compiled, so that it cannot be another's.
AdamKernel kernel() { return {hwy::TargetName(HWY_TARGET), update}; }

}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {
HWY_EXPORT(kernel);

namespace {

// Round to nearest, subnormals kept, nothing trapped, whatever the application has set (some flush
// subnormals to zero in all their threads).
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&before_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  std::fenv_t before_{};
};

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

void AdamKernel::update(const AdamScalars& scalars, const AdamSlice& slice) const {
  const DefaultFloatingPoint environment;
  function_(scalars, slice);
}

const std::vector<AdamKernel>& adam_kernels() {
  static const std::vector<AdamKernel> kernels = list_kernels();
  return kernels;
}

}  // namespace terrace
#endif
