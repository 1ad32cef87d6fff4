// The layer functions against numeric derivatives, and what bit-equal training rests on.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "terrace/error.h"
#include "tools/gpt_layers.h"
#include "tools/reference_trainer.h"

namespace terrace::gpt {
namespace {

GptConfig tiny() {
  GptConfig config;
  config.layers = 1;
  config.width = 12;
  config.heads = 3;
  config.context = 5;
  config.batch = 2;
  config.parameter_dtype = config.gradient_dtype = DType::fp32;
  return config;
}

constexpr std::byte kSentinel{0xA5};
constexpr std::size_t kGuard = 256;

// One layer with buffers of its own, at an offset of so many cache lines.
struct Bench {
  Bench(const GptConfig& c, std::uint32_t l, std::size_t shift = 0) : config(c), layer(l) {
    const auto spec = make_model(c).layers[l];
    const auto init = make_initializer(c);
    const auto take = [&](std::size_t bytes) {
      memory.emplace_back(bytes + shift * 64 + kGuard);
      return memory.back().data() + shift * 64;
    };
    for (const auto& tensor : spec.tensors) {
      std::vector<float> values(tensor.elements());
      init(tensor, 0, values);
      for (std::size_t i = 0; i < values.size(); ++i) {  // biases and gains must matter too
        values[i] += 0.1F * std::sin(static_cast<float>(i + memory.size()));
      }
      auto* data = take(values.size() * 4);
      std::memcpy(data, values.data(), values.size() * 4);
      sizes.push_back(values.size());
      buffers.parameters[sizes.size() - 1] = data;
      buffers.gradients[sizes.size() - 1] = take(values.size() * 4);
    }
    const std::size_t rows = c.rows() * std::size_t{c.width};
    buffers.input = take(rows * 4);
    if (l == 0) {
      for (std::size_t i = 0; i < c.rows(); ++i) {
        reinterpret_cast<std::int32_t*>(buffers.input)[i] = static_cast<std::int32_t>(i * 29 % 256);
      }
    } else {
      for (std::size_t i = 0; i < rows; ++i) input()[i] = std::sin(static_cast<float>(i) * 0.7F);
    }
    output = reinterpret_cast<float*>(take(rows * 4));
    auto* above = reinterpret_cast<float*>(take(rows * 4));
    for (std::size_t i = 0; i < rows; ++i) above[i] = std::cos(static_cast<float>(i) * 1.3F);
    buffers.output_gradient = above;
    buffers.input_gradient = reinterpret_cast<float*>(take(rows * 4));
    workspace_size = std::max(spec.forward_workspace.count, spec.backward_workspace.count);
    buffers.workspace = take(workspace_size);
    for (std::size_t i = 0; i < c.rows(); ++i)
      targets.push_back(static_cast<std::int32_t>(i * 31 % 256));
    buffers.targets = targets.data();
    buffers.loss = &loss;
    buffers.output = output;
    guard(spec.forward_workspace.count);
  }

  float* input() { return reinterpret_cast<float*>(buffers.input); }
  void guard(std::size_t size) {
    std::memset(buffers.workspace + size, static_cast<int>(kSentinel), kGuard);
  }
  bool guarded(std::size_t size) const {
    for (std::size_t i = 0; i < kGuard; ++i) {
      if (buffers.workspace[size + i] != kSentinel) return false;
    }
    return true;
  }

  // sum(output * output_gradient), or the loss.
  double objective() {
    forward(config, layer, buffers);
    if (layer == config.head_layer()) return loss;
    double sum = 0;
    for (std::size_t i = 0; i < config.rows() * std::size_t{config.width}; ++i) {
      sum += static_cast<double>(output[i]) * static_cast<double>(buffers.output_gradient[i]);
    }
    return sum;
  }

  double derivative(float& value) {
    const float kept = value;
    constexpr float kStep = 4e-3F;
    value = kept + kStep;
    const double up = objective();
    value = kept - kStep;
    const double down = objective();
    value = kept;
    return (up - down) / (2 * static_cast<double>(kStep));
  }

  GptConfig config;
  std::uint32_t layer;
  LayerBuffers buffers;
  float* output = nullptr;
  std::vector<AlignedBytes> memory;
  std::vector<std::size_t> sizes;
  std::vector<std::int32_t> targets;
  std::size_t workspace_size = 0;
  double loss = 0;
};

void expect_close(double numeric, float analytic, const std::string& what) {
  EXPECT_NEAR(numeric, static_cast<double>(analytic), 2e-3 + 1e-2 * std::abs(numeric)) << what;
}

class GptLayer : public testing::TestWithParam<std::uint32_t> {};

TEST_P(GptLayer, BackwardIsTheDerivativeOfForward) {
  Bench bench(tiny(), GetParam());
  backward(bench.config, bench.layer, bench.buffers);
  for (std::size_t t = 0; t < bench.sizes.size(); ++t) {
    auto* values = reinterpret_cast<float*>(const_cast<std::byte*>(bench.buffers.parameters[t]));
    const auto* gradient = reinterpret_cast<const float*>(bench.buffers.gradients[t]);
    const std::size_t stride = std::max<std::size_t>(1, bench.sizes[t] / 60);
    for (std::size_t i = 0; i < bench.sizes[t]; i += stride) {
      expect_close(bench.derivative(values[i]), gradient[i],
                   "tensor " + std::to_string(t) + " element " + std::to_string(i));
    }
  }
  if (GetParam() == 0) return;
  for (std::size_t i = 0; i < bench.config.rows() * std::size_t{bench.config.width}; ++i) {
    expect_close(bench.derivative(bench.input()[i]), bench.buffers.input_gradient[i],
                 "input " + std::to_string(i));
  }
}

TEST_P(GptLayer, StaysInsideItsWorkspace) {
  const auto config = tiny();
  Bench bench(config, GetParam());
  const auto forward_size = forward_workspace(config, GetParam()).count;
  const auto backward_size = backward_workspace(config, GetParam()).count;
  bench.guard(forward_size);
  forward(config, GetParam(), bench.buffers);
  EXPECT_TRUE(bench.guarded(forward_size));
  bench.guard(backward_size);
  backward(config, GetParam(), bench.buffers);
  EXPECT_TRUE(bench.guarded(backward_size));
}

TEST_P(GptLayer, GivesTheSameBitsAtEveryAddress) {
  auto config = tiny();
  config.width = 36;
  config.context = 9;
  Bench one(config, GetParam(), 0);
  Bench two(config, GetParam(), 3);
  backward(config, GetParam(), one.buffers);
  backward(config, GetParam(), two.buffers);
  for (std::size_t t = 0; t < one.sizes.size(); ++t) {
    EXPECT_EQ(0, std::memcmp(one.buffers.gradients[t], two.buffers.gradients[t], one.sizes[t] * 4));
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, GptLayer, testing::Values(0U, 1U, 2U));

TEST(Gpt, StartsNearTheUniformGuessAndLearns) {
  GptConfig config;
  config.layers = 2;
  config.width = 32;
  config.heads = 2;
  config.context = 16;
  config.batch = 4;
  ReferenceTrainer trainer(config, {});
  TextData::Batch batch;
  for (int i = 0; i < 64; ++i) {
    batch.inputs.push_back("abcdefgh"[i % 8]);
    batch.targets.push_back("abcdefgh"[(i + 1) % 8]);
  }
  const double first = trainer.step(batch, 3e-3);
  EXPECT_NEAR(first, std::log(256.0), 0.2);
  double last = first;
  for (int i = 0; i < 60; ++i) last = trainer.step(batch, 3e-3);
  EXPECT_LT(last, 0.2);
}

TEST(Gpt, InitialValuesDoNotDependOnTheCut) {
  const auto init = make_initializer(tiny());
  const TensorSpec tensor{"block0.up.weight", {10, 40}};
  std::vector<float> whole(400), pieces(400);
  init(tensor, 0, whole);
  for (std::size_t first = 0; first < 400; first += 37) {
    init(tensor, first, std::span(pieces).subspan(first, std::min<std::size_t>(37, 400 - first)));
  }
  EXPECT_EQ(whole, pieces);
}

TEST(Gpt, RefusesWhatHasNoMeaning) {
  GptConfig config = tiny();
  config.heads = 5;
  try {
    make_model(config);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("5 heads do not divide the width of 12"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace terrace::gpt
