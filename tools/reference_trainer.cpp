#include "tools/reference_trainer.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "tools/gpt_layers.h"

namespace terrace::gpt {
namespace {

float load(const std::byte* data, std::uint64_t index, DType dtype) {
  if (dtype == DType::bf16) return to_float(reinterpret_cast<const bfloat16*>(data)[index]);
  return reinterpret_cast<const float*>(data)[index];
}

void store(std::byte* data, std::uint64_t index, DType dtype, float value) {
  if (dtype == DType::bf16) {
    reinterpret_cast<bfloat16*>(data)[index] = to_bfloat16(value);
  } else {
    reinterpret_cast<float*>(data)[index] = value;
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
        store(tensor.parameter.data(), i, config.parameter_dtype, tensor.master_weight[i]);
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

// The formula of terrace/adam.h, one element after the other.
void ReferenceTrainer::update(ReferenceTensor& tensor, double learning_rate) const {
  const auto t = static_cast<double>(steps_);
  const bool decoupled = options_.mode == AdamMode::adamw;
  const double correction1 = options_.bias_correction ? 1 - std::pow(options_.beta1, t) : 1;
  const double correction2 = options_.bias_correction ? 1 - std::pow(options_.beta2, t) : 1;
  const auto beta1 = static_cast<float>(options_.beta1);
  const auto beta2 = static_cast<float>(options_.beta2);
  const auto rest1 = static_cast<float>(1 - options_.beta1);
  const auto rest2 = static_cast<float>(1 - options_.beta2);
  const auto epsilon = static_cast<float>(options_.epsilon);
  const auto size = static_cast<float>(learning_rate / correction1);
  const auto root = static_cast<float>(1 / std::sqrt(correction2));
  const auto decay =
      decoupled ? static_cast<float>(1 - learning_rate * options_.weight_decay) : 1.0F;
  const auto l2 = decoupled ? 0.0F : static_cast<float>(options_.weight_decay);
  for (std::uint64_t i = 0; i < tensor.elements; ++i) {
    float& w = tensor.master_weight[i];
    float& m = tensor.momentum[i];
    float& v = tensor.variance[i];
    float g = load(tensor.gradient.data(), i, config_.gradient_dtype);
    if (l2 != 0) g = std::fma(l2, w, g);
    const float first = rest1 * g;
    const float second = rest2 * g * g;
    m = std::fma(beta1, m, first);
    v = std::fma(beta2, v, second);
    const float denominator = std::fma(std::sqrt(v), root, epsilon);
    const float decayed = w * decay;
    w = std::fma(-size, m / denominator, decayed);
    store(tensor.parameter.data(), i, config_.parameter_dtype, w);
  }
}

}  // namespace terrace::gpt
