// One source, compiled once for every instruction set. The arithmetic is written out operation by
// operation, fused where the specification fuses, so that all of them round alike.
#include "cpu_adam/adam_kernel.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_adam/adam_kernel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu_adam/adam_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {

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
HWY_INLINE void update_vector(const AdamScalars& s, const Place<G, M, V, P>& at,
                              bool streaming = false) {
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
  store(w, at.parameter, streaming);
}

// So many vectors that a block of 16-bit elements is a cache line where vectors have 32 bytes.
constexpr std::size_t kBlock = 4;

template <class T>
HWY_INLINE void fetch_block_ahead(const T* p) {
  constexpr std::size_t kStep = 32 / sizeof(T);  // half a line
  for (std::size_t i = 0; i < kBlock * hn::Lanes(Floats()); i += kStep) fetch_ahead(p + i);
}

template <class G, class M, class V, class P>
HWY_INLINE void update_block(const AdamScalars& s, const Place<G, M, V, P>& at, bool streaming) {
  fetch_block_ahead(at.gradient);
  fetch_block_ahead(at.weight);
  fetch_block_ahead(at.momentum);
  fetch_block_ahead(at.variance);
  for (std::size_t j = 0; j < kBlock; ++j) {
    update_vector(s, at + j * hn::Lanes(Floats()), streaming);
  }
}

// Less than a vector goes over the stack: same arithmetic, no byte outside the range touched.
template <class G, class M, class V, class P>
void update_partial(const AdamScalars& s, const Place<G, M, V, P>& at, std::size_t count) {
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

// Elements before one at which a vector of them is aligned.
template <class P>
std::size_t unaligned(const P* p) {
  const std::size_t vector_bytes = hn::Lanes(Floats()) * sizeof(P);
  const auto over = static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(p) % vector_bytes);
  return over == 0 ? 0 : (vector_bytes - over) / sizeof(P);
}

template <class G, class M, class V, class P>
void update_typed(const AdamScalars& scalars, const AdamSlice& slice, ParameterStores stores) {
  const AdamScalars s = scalars;  // ours, so that no store can change it: it stays in registers
  const Place<G, M, V, P> begin{static_cast<const G*>(slice.gradient), slice.master_weight,
                                static_cast<M*>(slice.momentum), static_cast<V*>(slice.variance),
                                static_cast<P*>(slice.parameter)};
  const bool streaming = stores == ParameterStores::streaming;
  const std::size_t lanes = hn::Lanes(Floats());
  const std::size_t head = streaming ? std::min(unaligned(begin.parameter), slice.elements) : 0;
  const std::size_t end = head + (slice.elements - head) / lanes * lanes;
  if (head > 0) update_partial(s, begin, head);
  std::size_t i = head;
  for (; i + kBlock * lanes <= end; i += kBlock * lanes) update_block(s, begin + i, streaming);
  for (; i < end; i += lanes) update_vector(s, begin + i, streaming);
  if (end < slice.elements) update_partial(s, begin + end, slice.elements - end);
  if (streaming) hwy::FlushStream();  // before another thread hears of it
}

template <class G, class M, class V>
void update_moments(const AdamScalars& s, const AdamSlice& slice, ParameterStores stores) {
  if (slice.parameter == nullptr) {
    return update_typed<G, M, V, None>(s, slice, ParameterStores::ordinary);
  }
  switch (slice.parameter_dtype) {
    case DType::fp32: return update_typed<G, M, V, float>(s, slice, stores);
    case DType::bf16: return update_typed<G, M, V, bfloat16>(s, slice, stores);
    case DType::fp16: return update_typed<G, M, V, float16>(s, slice, stores);
  }
}

template <class G>
void update_gradient(const AdamScalars& s, const AdamSlice& slice, ParameterStores stores) {
  const bool narrow_variance = slice.variance_dtype == DType::bf16;
  if (slice.momentum_dtype == DType::bf16) {
    return narrow_variance ? update_moments<G, bfloat16, bfloat16>(s, slice, stores)
                           : update_moments<G, bfloat16, float>(s, slice, stores);
  }
  return narrow_variance ? update_moments<G, float, bfloat16>(s, slice, stores)
                         : update_moments<G, float, float>(s, slice, stores);
}

void update(const AdamScalars& s, const AdamSlice& slice, ParameterStores stores) {
  switch (slice.gradient_dtype) {
    case DType::fp32: return update_gradient<float>(s, slice, stores);
    case DType::bf16: return update_gradient<bfloat16>(s, slice, stores);
    case DType::fp16: return update_gradient<float16>(s, slice, stores);
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
