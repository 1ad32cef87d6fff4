#include "tools/reference_trainer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "tools/gpt_layers.h"

namespace terrace::gpt {
namespace {

float load(bfloat16 value) { return to_float(value); }
float load(float value) { return value; }

void store(float value, bfloat16& target) { target = to_bfloat16(value); }
void store(float value, float& target) { target = value; }

// A NaN has many bit patterns; the formula stores this one.
float one_nan(float value) { return value != value ? std::bit_cast<float>(0x7fc00000U) : value; }

struct Factors {
  float beta1, rest1;
  float beta2, rest2;
  float epsilon, size, root;
  float decay, l2;
};

Factors factors(const AdamOptions& options, double learning_rate, std::uint64_t step) {
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
  return f;
}

// The formula of terrace/adam.h, one element after the other.
template <class Gradient, class Parameter>
void update_elements(const Factors& f, ReferenceTensor& tensor) {
  const auto* gradient = tensor.gradient.as<const Gradient>();  // [elements], as all of these
  auto* parameter = tensor.parameter.as<Parameter>();
  float* master_weight = tensor.master_weight.data();
  float* momentum = tensor.momentum.data();
  float* variance = tensor.variance.data();
  for (std::uint64_t i = 0; i < tensor.elements; ++i) {
    float g = load(gradient[i]);
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

}  // namespace

AlignedBytes::AlignedBytes(std::size_t size) {
  if (size == 0) return;
  const std::size_t rounded = round_up(size, 64);
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(64, rounded)));
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_.get(), 0, rounded);
}

void AlignedBytes::Free::operator()(std::byte* memory) const { std::free(memory); }

ReferenceTrainer::ReferenceTrainer(const GptConfig& config, const AdamOptions& options)
    : config_(config), options_(options) {
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
      tensor.master_weight.resize(tensor.elements);
      tensor.momentum.assign(tensor.elements, 0.0F);
      tensor.variance.assign(tensor.elements, 0.0F);
      initialize(spec, 0, tensor.master_weight);
      for (std::uint64_t i = 0; i < tensor.elements; ++i) {
        if (config.parameter_dtype == DType::bf16) {
          store(tensor.master_weight[i], tensor.parameter.as<bfloat16>()[i]);
        } else {
          store(tensor.master_weight[i], tensor.parameter.as<float>()[i]);
        }
      }
      tensors_.push_back(std::move(tensor));
    }
    inputs_.emplace_back(layer.input_bytes.count);
    input_gradients_.emplace_back(layer.input_bytes.count);
    workspace = std::max({workspace, layer.forward_workspace, layer.backward_workspace});
  }
  first_tensor_.push_back(tensors_.size());
  workspace_ = AlignedBytes(workspace.count);
}

double ReferenceTrainer::step(const TextData::Batch& batch, double learning_rate) {
  ++steps_;
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
    return b;
  };
  std::memcpy(inputs_[0].data(), batch.inputs.data(), batch.inputs.size() * sizeof(std::int32_t));
  for (std::uint32_t l = 0; l < config_.head_layer(); ++l) forward(config_, l, buffers(l));
  for (std::uint32_t l = config_.layer_count(); l-- > 0;) backward(config_, l, buffers(l));
  for (auto& tensor : tensors_) update(tensor, learning_rate);
  return loss;
}

void ReferenceTrainer::update(ReferenceTensor& tensor, double learning_rate) const {
  const Factors f = factors(options_, learning_rate, steps_);
  const bool narrow_gradient = config_.gradient_dtype == DType::bf16;
  if (config_.parameter_dtype == DType::bf16) {
    narrow_gradient ? update_elements<bfloat16, bfloat16>(f, tensor)
                    : update_elements<float, bfloat16>(f, tensor);
  } else {
    narrow_gradient ? update_elements<bfloat16, float>(f, tensor)
                    : update_elements<float, float>(f, tensor);
  }
}

}  // namespace terrace::gpt
