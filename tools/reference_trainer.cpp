#include "tools/reference_trainer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "tools/gpt_layers.h"

namespace terrace::gpt {
namespace {

float load(bfloat16 value) { return to_float(value); }
float load(float16 value) { return to_float(value); }
float load(float value) { return value; }

void store(float value, bfloat16& target) { target = to_bfloat16(value); }
void store(float value, float16& target) { target = to_float16(value); }
void store(float value, float& target) { target = value; }

// A NaN has many bit patterns; the formula stores this one.
float one_nan(float value) { return value != value ? std::bit_cast<float>(0x7fc00000U) : value; }

// Calls function(pointer) with a pointer to `bytes` of the dtype's type.
template <class Function>
auto with_dtype(DType dtype, const AlignedBytes& bytes, Function&& function) {
  if (dtype == DType::bf16) return function(bytes.as<bfloat16>());
  if (dtype == DType::fp16) return function(bytes.as<float16>());
  return function(bytes.as<float>());
}

struct Factors {
  float beta1, rest1;
  float beta2, rest2;
  float epsilon, size, root;
  float decay, l2;
  float gradient;
};

Factors factors(const AdamOptions& options, double learning_rate, std::uint64_t step,
                double gradient_factor) {
  const auto t = static_cast<double>(step);
  const bool decoupled = options.mode == AdamMode::adamw;
  const double correction1 = options.bias_correction ? 1 - std::pow(options.beta1, t) : 1;
  const double correction2 = options.bias_correction ? 1 - std::pow(options.beta2, t) : 1;
  Factors f{};
  f.beta1 = static_cast<float>(options.beta1);
  f.rest1 = static_cast<float>(1 - options.beta1);
  f.beta2 = static_cast<float>(options.beta2);
  f.rest2 = static_cast<float>(1 - options.beta2);
  f.epsilon = static_cast<float>(options.epsilon);
  f.size = static_cast<float>(learning_rate / correction1);
  f.root = static_cast<float>(1 / std::sqrt(correction2));
  f.decay = decoupled ? static_cast<float>(1 - learning_rate * options.weight_decay) : 1.0F;
  f.l2 = decoupled ? 0.0F : static_cast<float>(options.weight_decay);
  f.gradient = std::max(static_cast<float>(gradient_factor),
                        std::numeric_limits<float>::denorm_min());
  return f;
}

// The formula of terrace/adam.h, one element after the other.
template <class Gradient, class Parameter>
void update_elements(const Factors& f, ReferenceTensor& tensor, const Gradient* gradient,
                     Parameter* parameter) {  // [elements], as all of these
  float* master_weight = tensor.master_weight.data();
  float* momentum = tensor.momentum.data();
  float* variance = tensor.variance.data();
  for (std::uint64_t i = 0; i < tensor.elements; ++i) {
    float g = load(gradient[i]) * f.gradient;
    if (f.l2 != 0) g = std::fma(f.l2, master_weight[i], g);
    const float m = std::fma(f.beta1, momentum[i], f.rest1 * g);
    const float v = std::fma(f.beta2, variance[i], f.rest2 * g * g);
    const float denominator = std::fma(std::sqrt(v), f.root, f.epsilon);
    const float w = one_nan(std::fma(-f.size, m / denominator, master_weight[i] * f.decay));
    momentum[i] = one_nan(m);
    variance[i] = one_nan(v);
    master_weight[i] = w;
    store(w, parameter[i]);
  }
}

// ---- the tree of terrace/adam.h

constexpr std::uint64_t kLeaf = 1024;  // elements
constexpr std::size_t kLanes = 32;
using Leaf = std::array<double, kLanes>;

// Adds the squares of a tensor whose first element is element `first` of its block.
template <class Gradient>
void add_squares(const Gradient* gradient, std::uint64_t elements, std::uint64_t first,
                 std::vector<Leaf>& leaves) {
  for (std::uint64_t i = 0; i < elements; ++i) {
    const auto g = static_cast<double>(load(gradient[i]));
    leaves[(first + i) / kLeaf][(first + i) % kLanes] += g * g;
  }
}

double folded(Leaf lanes) {
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// Cut at the largest power of two below the length.
double tree_sum(std::span<const double> sums) {
  if (sums.empty()) return 0;
  if (sums.size() == 1) return sums[0];
  std::size_t left = 1;
  while (left * 2 < sums.size()) left *= 2;
  return tree_sum(sums.first(left)) + tree_sum(sums.subspan(left));
}

}  // namespace

AlignedBytes::AlignedBytes(std::size_t size) {
  if (size == 0) return;
  const std::size_t rounded = round_up(size, 64);
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(64, rounded)));
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_.get(), 0, rounded);
}

void AlignedBytes::Free::operator()(std::byte* memory) const { std::free(memory); }

ReferenceTrainer::ReferenceTrainer(const GptConfig& config, const AdamOptions& options,
                                   const ReferenceGradients& gradients)
    : config_(config), options_(options), rules_(gradients) {
  const auto& scale = rules_.loss_scale;
  if (scale.enabled) {
    loss_scale_ = scale.constant > 0 ? scale.constant : std::exp2(scale.initial_power);
  }
  const ModelSpec model = make_model(config);
  const Initializer initialize = make_initializer(config);
  Bytes workspace;
  for (const auto& layer : model.layers) {
    first_tensor_.push_back(tensors_.size());
    for (const auto& spec : layer.tensors) {
      ReferenceTensor tensor;
      tensor.name = spec.name;
      tensor.elements = spec.elements();
      tensor.parameter = AlignedBytes(tensor.elements * size_of(config.parameter_dtype).count);
      tensor.gradient = AlignedBytes(tensor.elements * size_of(config.gradient_dtype).count);
      if (rules_.micro_batches > 1) {
        tensor.sum = AlignedBytes(tensor.elements * size_of(rules_.accumulation).count);
      }
      tensor.master_weight.resize(tensor.elements);
      tensor.momentum.assign(tensor.elements, 0.0F);
      tensor.variance.assign(tensor.elements, 0.0F);
      initialize(spec, 0, tensor.master_weight);
      with_dtype(config.parameter_dtype, tensor.parameter, [&](auto* parameter) {
        for (std::uint64_t i = 0; i < tensor.elements; ++i) {
          store(tensor.master_weight[i], parameter[i]);
        }
      });
      tensors_.push_back(std::move(tensor));
    }
    inputs_.emplace_back(layer.input_bytes.count);
    input_gradients_.emplace_back(layer.input_bytes.count);
    workspace = std::max({workspace, layer.forward_workspace, layer.backward_workspace});
  }
  first_tensor_.push_back(tensors_.size());
  workspace_ = AlignedBytes(workspace.count);
}

ReferenceResult ReferenceTrainer::step(const std::vector<TextData::Batch>& micro_batches,
                                       double learning_rate) {
  ReferenceResult result;
  std::vector<double> losses;
  for (const auto& batch : micro_batches) {
    losses.push_back(compute_gradients(batch));
    if (rules_.micro_batches == 1) continue;
    for (auto& tensor : tensors_) accumulate(tensor, losses.size() == 1);
  }
  result.loss = mean(losses);
  const double scale = loss_scale_ * rules_.micro_batches;
  result.skipped = !all_finite();
  adapt_loss_scale(result.skipped);
  if (result.skipped) return result;
  result.norm = norm() * (1 / scale);
  const double clip =
      rules_.clip_norm > 0 ? std::min(1.0, rules_.clip_norm / (*result.norm + 1e-6)) : 1;
  ++steps_;
  for (auto& tensor : tensors_) update(tensor, learning_rate, clip / scale);
  return result;
}

double ReferenceTrainer::compute_gradients(const TextData::Batch& batch) {
  double loss = 0;
  const auto buffers = [&](std::uint32_t l) {
    LayerBuffers b;
    for (std::size_t t = first_tensor_[l]; t < first_tensor_[l + 1]; ++t) {
      b.parameters[t - first_tensor_[l]] = tensors_[t].parameter.data();
      b.gradients[t - first_tensor_[l]] = tensors_[t].gradient.data();
    }
    b.input = inputs_[l].data();
    if (l < config_.head_layer()) {
      b.output = inputs_[l + 1].as<float>();
      b.output_gradient = input_gradients_[l + 1].as<const float>();
    }
    if (l > 0) b.input_gradient = input_gradients_[l].as<float>();
    b.workspace = workspace_.data();
    b.targets = batch.targets.data();
    b.loss = &loss;
    b.loss_scale = static_cast<float>(loss_scale_);
    return b;
  };
  std::memcpy(inputs_[0].data(), batch.inputs.data(), batch.inputs.size() * sizeof(std::int32_t));
  for (std::uint32_t l = 0; l < config_.head_layer(); ++l) forward(config_, l, buffers(l));
  for (std::uint32_t l = config_.layer_count(); l-- > 0;) backward(config_, l, buffers(l));
  return loss;
}

void ReferenceTrainer::accumulate(ReferenceTensor& tensor, bool first) const {
  with_dtype(config_.gradient_dtype, tensor.gradient, [&](const auto* gradient) {
    with_dtype(rules_.accumulation, tensor.sum, [&](auto* sum) {
      for (std::uint64_t i = 0; i < tensor.elements; ++i) {
        store(first ? load(gradient[i]) : load(sum[i]) + load(gradient[i]), sum[i]);
      }
    });
  });
}

DType ReferenceTrainer::kept_dtype() const {
  return rules_.micro_batches > 1 ? rules_.accumulation : config_.gradient_dtype;
}

const AlignedBytes& ReferenceTrainer::kept(const ReferenceTensor& tensor) const {
  return rules_.micro_batches > 1 ? tensor.sum : tensor.gradient;
}

bool ReferenceTrainer::all_finite() const {
  for (const auto& tensor : tensors_) {
    const bool finite = with_dtype(kept_dtype(), kept(tensor), [&](auto* gradient) {
      return std::all_of(gradient, gradient + tensor.elements,
                         [](auto value) { return std::isfinite(load(value)); });
    });
    if (!finite) return false;
  }
  return true;
}

// As the gradients are: of the loss times its scale.
double ReferenceTrainer::norm() const {
  std::vector<double> layers;
  for (std::size_t l = 0; l + 1 < first_tensor_.size(); ++l) layers.push_back(layer_sum(l));
  return std::sqrt(tree_sum(layers));
}

// Tensors begin at multiples of 64 bytes of the narrower dtype; what lies between counts as 0.
double ReferenceTrainer::layer_sum(std::size_t layer) const {
  const Bytes narrowest =
      std::min(size_of(config_.parameter_dtype), size_of(config_.gradient_dtype));
  std::vector<Leaf> leaves;
  std::uint64_t end = 0;
  for (std::size_t t = first_tensor_[layer]; t < first_tensor_[layer + 1]; ++t) {
    const auto& tensor = tensors_[t];
    const std::uint64_t first = round_up(end, 64 / narrowest.count);
    end = first + tensor.elements;
    leaves.resize((end + kLeaf - 1) / kLeaf, Leaf{});
    with_dtype(kept_dtype(), kept(tensor), [&](auto* gradient) {
      add_squares(gradient, tensor.elements, first, leaves);
    });
  }
  std::vector<double> sums;
  for (const auto& leaf : leaves) sums.push_back(folded(leaf));
  return tree_sum(sums);
}

// Halved from the hysteresis-th overflow on, doubled after a window without any.
void ReferenceTrainer::adapt_loss_scale(bool overflow) {
  const auto& rules = rules_.loss_scale;
  if (!rules.enabled || rules.constant > 0) return;
  if (overflow) {
    without_overflow_ = 0;
    ++overflows_;
    if (overflows_ >= rules.hysteresis) loss_scale_ = std::max(loss_scale_ / 2, rules.minimum);
  } else if (++without_overflow_ == rules.window) {
    without_overflow_ = 0;
    overflows_ = 0;
    loss_scale_ = std::min(loss_scale_ * 2, 0x1p60);
  }
}

void ReferenceTrainer::update(ReferenceTensor& tensor, double learning_rate, double factor) const {
  const Factors f = factors(options_, learning_rate, steps_, factor);
  with_dtype(kept_dtype(), kept(tensor), [&](const auto* gradient) {
    with_dtype(config_.parameter_dtype, tensor.parameter,
               [&](auto* parameter) { update_elements(f, tensor, gradient, parameter); });
  });
}

}  // namespace terrace::gpt
