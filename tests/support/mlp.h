// A small multi-layer perceptron, trained through an Engine and plainly in memory.
#pragma once

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "terrace/terrace.h"

namespace terrace {

using Random = std::mt19937_64;

inline std::uint64_t pick(Random& random, std::uint64_t low, std::uint64_t high) {
  return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
}

// TERRACE_SEED repeats a run.
inline std::uint64_t fresh_seed() {
  const char* given = std::getenv("TERRACE_SEED");
  const std::uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

// A chain of dense layers with tanh-like squashing: y = x W / n + b, out = y / (1 + |y|).
struct Mlp {
  std::vector<std::uint32_t> widths;  // of input, hidden..., output
  std::uint32_t batch = 4;
  DType dtype = DType::bf16;
  std::uint32_t micro_batches = 1;
  DType accumulation = DType::fp32;

  DType sum_dtype() const { return micro_batches > 1 ? accumulation : dtype; }
  std::uint32_t layers() const { return static_cast<std::uint32_t>(widths.size()) - 1; }

  ModelSpec spec() const {
    ModelSpec model;
    model.parameter_dtype = model.gradient_dtype = dtype;
    for (std::uint32_t l = 0; l < layers(); ++l) {
      LayerSpec layer;
      layer.name = "dense" + std::to_string(l);
      layer.tensors = {{layer.name + ".weight", {widths[l], widths[l + 1]}},
                       {layer.name + ".bias", {widths[l + 1]}}};
      layer.input_bytes = Bytes{std::uint64_t{batch} * widths[l] * 4};
      layer.input_gradient = l > 0;
      layer.forward_workspace =
          layer.backward_workspace = {std::uint64_t{batch} * widths[l + 1] * 8};
      layer.forward_flops = 1e5;
      layer.backward_flops = 2e5;
      model.layers.push_back(layer);
    }
    return model;
  }
};

inline float initial(const TensorSpec& tensor, std::uint64_t index) {
  const auto hash = std::hash<std::string>{}(tensor.name) + index * 0x9E3779B97F4A7C15ULL;
  return static_cast<float>(static_cast<std::int64_t>(hash >> 40) - (1 << 23)) / (1 << 23);
}

inline void initialize(const TensorSpec& tensor, std::uint64_t first, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = initial(tensor, first + i);
}

inline float load(const std::byte* base, std::size_t index, DType dtype) {
  if (dtype == DType::bf16) {
    bfloat16 value;
    std::memcpy(&value, base + index * 2, 2);
    return to_float(value);
  }
  if (dtype == DType::fp16) {
    float16 value;
    std::memcpy(&value, base + index * 2, 2);
    return to_float(value);
  }
  float value = 0;
  std::memcpy(&value, base + index * 4, 4);
  return value;
}

inline void store(std::byte* base, std::size_t index, DType dtype, float value) {
  if (dtype == DType::bf16) {
    const bfloat16 narrow = to_bfloat16(value);
    std::memcpy(base + index * 2, &narrow, 2);
  } else if (dtype == DType::fp16) {
    const float16 narrow = to_float16(value);
    std::memcpy(base + index * 2, &narrow, 2);
  } else {
    std::memcpy(base + index * 4, &value, 4);
  }
}

struct Buffers {
  const std::byte* weight;
  const std::byte* bias;
  std::byte* weight_gradient;
  std::byte* bias_gradient;
  float* input;
  float* output;
  const float* output_gradient;
  float* input_gradient;
};

// y before squashing, for one row and column.
inline float dense(const Mlp& mlp, std::uint32_t l, const Buffers& b, std::uint32_t row,
                   std::uint32_t j) {
  const auto in = mlp.widths[l];
  const auto out = mlp.widths[l + 1];
  float sum = load(b.bias, j, mlp.dtype);
  for (std::uint32_t i = 0; i < in; ++i) {
    sum += b.input[row * in + i] * load(b.weight, std::size_t{i} * out + j, mlp.dtype) /
           static_cast<float>(in);
  }
  return sum;
}

inline void forward(const Mlp& mlp, std::uint32_t l, const Buffers& b) {
  if (b.output == nullptr) return;
  const auto out = mlp.widths[l + 1];
  for (std::uint32_t row = 0; row < mlp.batch; ++row) {
    for (std::uint32_t j = 0; j < out; ++j) {
      const float y = dense(mlp, l, b, row, j);
      b.output[row * out + j] = y / (1 + std::abs(y));
    }
  }
}

// A value that one gradient gets, whatever backward has made of it.
struct BadValue {
  std::uint32_t layer = ~0U;
  std::size_t weight = 0;  // index, of the weight or of the bias
  float value = 0;
  bool bias = false;
  std::uint32_t micro_batch = 0;
};

// The last layer's loss is the mean of (out - 0.5)^2, times `scale`.
inline void backward(const Mlp& mlp, std::uint32_t l, const Buffers& b,
                     std::vector<float>& scratch, float scale = 1, const BadValue& bad = {}) {
  const auto in = mlp.widths[l];
  const auto out = mlp.widths[l + 1];
  scratch.assign(std::size_t{mlp.batch} * out, 0);
  for (std::uint32_t row = 0; row < mlp.batch; ++row) {
    for (std::uint32_t j = 0; j < out; ++j) {
      const float y = dense(mlp, l, b, row, j);
      const float squashed = 1 + std::abs(y);
      const float above = b.output_gradient != nullptr ? b.output_gradient[row * out + j]
                                                       : scale * 2 * (y / squashed - 0.5F);
      scratch[row * out + j] = above / (squashed * squashed);
    }
  }
  for (std::uint32_t j = 0; j < out; ++j) {
    float bias = 0;
    for (std::uint32_t row = 0; row < mlp.batch; ++row) bias += scratch[row * out + j];
    store(b.bias_gradient, j, mlp.dtype, bias);
    for (std::uint32_t i = 0; i < in; ++i) {
      float sum = 0;
      for (std::uint32_t row = 0; row < mlp.batch; ++row) {
        sum += b.input[row * in + i] * scratch[row * out + j] / static_cast<float>(in);
      }
      store(b.weight_gradient, std::size_t{i} * out + j, mlp.dtype, sum);
    }
  }
  if (bad.layer == l) {
    store(bad.bias ? b.bias_gradient : b.weight_gradient, bad.weight, mlp.dtype, bad.value);
  }
  if (b.input_gradient == nullptr) return;
  for (std::uint32_t row = 0; row < mlp.batch; ++row) {
    for (std::uint32_t i = 0; i < in; ++i) {
      float sum = 0;
      for (std::uint32_t j = 0; j < out; ++j) {
        sum += scratch[row * out + j] * load(b.weight, std::size_t{i} * out + j, mlp.dtype) /
               static_cast<float>(in);
      }
      b.input_gradient[row * in + i] = sum;
    }
  }
}

// Of a micro-batch of a step.
inline std::uint64_t data_of(std::uint64_t step, std::uint32_t micro_batch) {
  return step + std::uint64_t{micro_batch} * 1000;
}

inline void fill_input(const Mlp& mlp, std::uint64_t step, float* input) {
  for (std::uint32_t i = 0; i < mlp.batch * mlp.widths[0]; ++i) {
    input[i] = static_cast<float>((i * 37 + step * 101) % 97) / 97.0F - 0.5F;
  }
}

// ---- plainly in memory

struct PlainTensor {
  std::string name;
  std::vector<float> master, momentum, variance;
  std::vector<std::byte> parameter, gradient;
  std::vector<std::byte> sum;  // of the micro-batches' gradients
};

class Plain {
 public:
  Plain(const Mlp& mlp, const AdamOptions& options) : mlp_(mlp), options_(options) {
    for (const auto& layer : mlp.spec().layers) {
      for (const auto& spec : layer.tensors) {
        PlainTensor t{spec.name, {}, {}, {}, {}, {}, {}};
        const auto n = spec.elements();
        t.master.resize(n);
        t.momentum.assign(n, 0);
        t.variance.assign(n, 0);
        t.parameter.resize(n * 4);
        t.gradient.resize(n * 4);
        t.sum.resize(n * 4);
        initialize(spec, 0, t.master);
        for (std::size_t i = 0; i < n; ++i) store(t.parameter.data(), i, mlp.dtype, t.master[i]);
        tensors_.push_back(std::move(t));
      }
    }
    for (const auto width : mlp.widths) {
      inputs_.emplace_back(std::size_t{mlp.batch} * width);
      gradients_.emplace_back(std::size_t{mlp.batch} * width);
    }
  }

  void step(double rate, std::uint64_t number) {
    gradients(number, 1);
    const auto factor = static_cast<float>(1.0 / mlp_.micro_batches);
    for (auto& tensor : tensors_) update(tensor, rate, number, factor);
  }

  // Clipped to `max_norm` (0: not at all); the update is number `count`. The norm before that.
  double step(double rate, std::uint64_t number, std::uint64_t count, double max_norm,
              float scale) {
    gradients(number, scale);
    std::vector<double> blocks;
    for (std::uint32_t l = 0; l < mlp_.layers(); ++l) blocks.push_back(block_sum(l));
    const double divisor = static_cast<double>(scale) * mlp_.micro_batches;
    const double norm = std::sqrt(halved(blocks)) * (1 / divisor);
    const double clip = max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1;
    const auto factor = static_cast<float>(clip / divisor);
    for (auto& tensor : tensors_) update(tensor, rate, count, factor);
    return norm;
  }

  const std::vector<PlainTensor>& tensors() const { return tensors_; }

 private:
  Buffers buffers(std::uint32_t l) {
    auto& weight = tensors_[l * 2];
    auto& bias = tensors_[l * 2 + 1];
    const bool last = l + 1 == mlp_.layers();
    return {weight.parameter.data(), bias.parameter.data(), weight.gradient.data(),
            bias.gradient.data(), inputs_[l].data(), last ? nullptr : inputs_[l + 1].data(),
            last ? nullptr : gradients_[l + 1].data(), l > 0 ? gradients_[l].data() : nullptr};
  }

  void gradients(std::uint64_t number, float scale) {
    for (std::uint32_t m = 0; m < mlp_.micro_batches; ++m) {
      gradients_of(data_of(number, m), scale);
      for (auto& tensor : tensors_) add_gradients(tensor, m == 0);
    }
  }

  void add_gradients(PlainTensor& tensor, bool first) const {
    for (std::size_t i = 0; i < tensor.master.size(); ++i) {
      const float gradient = load(tensor.gradient.data(), i, mlp_.dtype);
      const float sum = first ? gradient : load(tensor.sum.data(), i, mlp_.sum_dtype()) + gradient;
      store(tensor.sum.data(), i, mlp_.sum_dtype(), sum);
    }
  }

  void gradients_of(std::uint64_t data, float scale) {
    fill_input(mlp_, data, inputs_[0].data());
    std::vector<float> scratch;
    for (std::uint32_t l = 0; l < mlp_.layers(); ++l) forward(mlp_, l, buffers(l));
    for (std::uint32_t l = mlp_.layers(); l-- > 0;) {
      backward(mlp_, l, buffers(l), scratch, scale);
    }
  }

  // The documented tree: the left part is the largest power of two below the length.
  static double halved(std::span<const double> values) {
    if (values.empty()) return 0;
    if (values.size() == 1) return values[0];
    const auto left = std::bit_floor(values.size() - 1);
    return halved(values.first(left)) + halved(values.subspan(left));
  }

  // Weight, padding to 64 bytes, bias; leaves of 1024 elements over 32 lanes.
  double block_sum(std::uint32_t l) const {
    const std::size_t width = size_of(mlp_.dtype).count;
    std::vector<double> squares;
    for (std::size_t t = l * 2; t < l * 2 + 2; ++t) {
      for (std::size_t i = 0; i < tensors_[t].master.size(); ++i) {
        const double g = static_cast<double>(load(tensors_[t].sum.data(), i, mlp_.sum_dtype()));
        squares.push_back(g * g);
      }
      squares.resize((squares.size() + 64 / width - 1) / (64 / width) * (64 / width));
    }
    std::vector<double> leaves;
    for (std::size_t first = 0; first < squares.size(); first += 1024) {
      double lanes[32] = {};
      for (std::size_t i = first; i < std::min(first + 1024, squares.size()); ++i) {
        lanes[i % 32] += squares[i];
      }
      for (std::size_t half = 16; half > 0; half /= 2) {
        for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
      }
      leaves.push_back(lanes[0]);
    }
    return halved(leaves);
  }

  // The documented formula, written again.
  void update(PlainTensor& t, double rate, std::uint64_t number, float factor) {
    const auto& o = options_;
    const double n = static_cast<double>(number);
    const auto b1 = static_cast<float>(o.beta1), c1 = static_cast<float>(1 - o.beta1);
    const auto b2 = static_cast<float>(o.beta2), c2 = static_cast<float>(1 - o.beta2);
    const auto size = static_cast<float>(rate / (1 - std::pow(o.beta1, n)));
    const auto root = static_cast<float>(1 / std::sqrt(1 - std::pow(o.beta2, n)));
    const auto decay = static_cast<float>(1 - rate * o.weight_decay);
    for (std::size_t i = 0; i < t.master.size(); ++i) {
      const float g = load(t.sum.data(), i, mlp_.sum_dtype()) * factor;
      const float g1 = c1 * g;
      const float g2 = c2 * g;
      const float g3 = g2 * g;
      t.momentum[i] = std::fma(b1, t.momentum[i], g1);
      t.variance[i] = std::fma(b2, t.variance[i], g3);
      const float d = std::fma(std::sqrt(t.variance[i]), root, static_cast<float>(o.epsilon));
      const float w = t.master[i] * decay;
      t.master[i] = std::fma(-size, t.momentum[i] / d, w);
      store(t.parameter.data(), i, mlp_.dtype, t.master[i]);
    }
  }

  const Mlp mlp_;
  const AdamOptions options_;
  std::vector<PlainTensor> tensors_;
  std::vector<std::vector<float>> inputs_, gradients_;
};

// ---- through the tiers

inline Buffers buffers_of(const LayerView& view) {
  return {view.parameter(0), view.parameter(1), view.gradient(0), view.gradient(1),
          reinterpret_cast<float*>(view.input()), reinterpret_cast<float*>(view.output()),
          reinterpret_cast<const float*>(view.output_gradient()),
          reinterpret_cast<float*>(view.input_gradient())};
}

inline StepReport train_step(Engine& engine, const Mlp& mlp, double rate, std::uint64_t number,
                             const TrainerState& state = {}, const BadValue& bad = {}) {
  std::vector<float> scratch;  // outlives what is enqueued
  auto step = engine.begin_step({rate});
  const auto scale = static_cast<float>(step.loss_scale());
  for (std::uint32_t m = 0; m < mlp.micro_batches; ++m) {
    for (std::uint32_t l = 0; l < mlp.layers(); ++l) {
      const auto view = step.forward(LayerId{l});
      view.launch([&mlp, l, data = data_of(number, m), b = buffers_of(view)] {
        if (l == 0) fill_input(mlp, data, b.input);
        forward(mlp, l, b);
      });
    }
    for (std::uint32_t l = mlp.layers(); l-- > 0;) {
      auto view = step.backward(LayerId{l});
      const BadValue here = m == bad.micro_batch ? bad : BadValue{};
      view.launch([&mlp, &scratch, here, scale, l, b = buffers_of(view)] {
        backward(mlp, l, b, scratch, scale, here);
      });
      view.submit_gradients();
    }
  }
  return step.finish(state);
}

inline void evaluate(Engine& engine, const Mlp& mlp) {
  auto step = engine.begin_evaluation();
  for (std::uint32_t l = 0; l < mlp.layers(); ++l) {
    const auto view = step.forward(LayerId{l});
    view.launch([&mlp, l, b = buffers_of(view)] {
      if (l == 0) fill_input(mlp, 12345, b.input);
      forward(mlp, l, b);
    });
  }
  step.finish();
}

// "" when every parameter and state has these bits, else the first that has not.
inline std::string difference(Engine& engine, const Plain& plain, DType dtype) {
  std::string found;
  for (const auto& tensor : plain.tensors()) {
    std::vector<float> values(tensor.master.size());
    const auto compare = [&](Content content, auto&& expected) {
      engine.read(tensor.name, content, 0, values);
      for (std::size_t i = 0; i < values.size() && found.empty(); ++i) {
        const float wanted = expected(i);
        if (std::bit_cast<std::uint32_t>(values[i]) == std::bit_cast<std::uint32_t>(wanted)) {
          continue;
        }
        found = tensor.name + " " + std::string(to_string(content)) + "[" + std::to_string(i) +
                "] is " + std::to_string(values[i]) + ", not " + std::to_string(wanted);
      }
    };
    compare(Content::parameter,
            [&](std::size_t i) { return load(tensor.parameter.data(), i, dtype); });
    compare(Content::master_weight, [&](std::size_t i) { return tensor.master[i]; });
    compare(Content::momentum, [&](std::size_t i) { return tensor.momentum[i]; });
    compare(Content::variance, [&](std::size_t i) { return tensor.variance[i]; });
  }
  return found;
}

}  // namespace terrace
