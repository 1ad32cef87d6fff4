// The layer functions against numeric derivatives, and what bit-equal training rests on.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

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
constexpr float kStep = 0x1p-5F;  // of the numeric derivatives

// One layer with buffers of its own, at an offset of so many cache lines.
struct Bench {
  Bench(const GptConfig& c, std::uint32_t l, std::size_t shift = 0, bool values_fit_bf16 = false)
      : config(c), layer(l) {
    const auto spec = make_model(c).layers[l];
    const auto init = make_initializer(c);
    const auto take = [&](std::size_t bytes) {
      memory.emplace_back(bytes + shift * 64 + kGuard);
      return memory.back().data() + shift * 64;
    };
    for (const auto& tensor : spec.tensors) {
      std::vector<float> values(tensor.elements());
      init(tensor, 0, values);
      // Biases and gains must matter too, and the MLP must leave gelu's straight part.
      const float size = tensor.name.ends_with("up.weight") ? 0.6F : 0.1F;
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] += size * std::sin(static_cast<float>(i + memory.size()));
      }
      auto* data = take(values.size() * 4);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const bfloat16 narrow = to_bfloat16(values[i]);
        if (c.parameter_dtype == DType::bf16) {
          reinterpret_cast<bfloat16*>(data)[i] = narrow;
        } else {
          reinterpret_cast<float*>(data)[i] = values_fit_bf16 ? to_float(narrow) : values[i];
        }
      }
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

  // How far rounding may move the objective: its terms carry independent errors of a few units.
  double rounding() {
    objective();
    double squares = 0;
    if (layer == config.head_layer()) {
      squares = loss * loss / config.rows();
    } else {
      for (std::size_t i = 0; i < config.rows() * std::size_t{config.width}; ++i) {
        const double term = static_cast<double>(output[i]) *
                            static_cast<double>(buffers.output_gradient[i]);
        squares += term * term;
      }
    }
    return 8 * 0x1p-24 * std::sqrt(squares);
  }

  // Five points: off by kStep^4 / 30 times the fifth derivative, and by 1.5 / kStep roundings.
  double derivative(float& value) {
    const float kept = value;
    const auto at = [&](float distance) {
      value = kept + distance;
      return objective();
    };
    const double near = at(kStep) - at(-kStep);
    const double far = at(2 * kStep) - at(-2 * kStep);
    value = kept;
    return (8 * near - far) / (12 * static_cast<double>(kStep));
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

// Compares about 60 elements of a gradient with numeric derivatives, and sees to it that the
// tolerance is far below the gradient: zeros would not pass.
void expect_gradient(Bench& bench, float* values, const float* gradient, std::size_t elements,
                     const std::string& what) {
  float largest = 0;
  for (std::size_t i = 0; i < elements; ++i) largest = std::max(largest, std::abs(gradient[i]));
  const double rounding = 1.5 * bench.rounding() / static_cast<double>(kStep);
  EXPECT_LT(20 * rounding, static_cast<double>(largest)) << what << ": the check says nothing";
  const std::size_t stride = std::max<std::size_t>(1, elements / 60);
  for (std::size_t i = 0; i < elements; i += stride) {
    const double numeric = bench.derivative(values[i]);
    EXPECT_NEAR(numeric, static_cast<double>(gradient[i]), rounding + 1e-3 * std::abs(numeric))
        << what << " element " << i;
  }
}

std::vector<std::byte> bytes(const void* data, std::size_t size) {
  const auto* first = static_cast<const std::byte*>(data);
  return {first, first + size};
}

// Everything that forward and backward of the bench's layer write.
std::vector<std::vector<std::byte>> results(Bench& bench) {
  std::vector<std::vector<std::byte>> all;
  const std::size_t rows = bench.config.rows() * std::size_t{bench.config.width} * sizeof(float);
  const bool head = bench.layer == bench.config.head_layer();
  forward(bench.config, bench.layer, bench.buffers);
  all.push_back(head ? bytes(&bench.loss, sizeof bench.loss) : bytes(bench.output, rows));
  backward(bench.config, bench.layer, bench.buffers);
  if (head) all.push_back(bytes(&bench.loss, sizeof bench.loss));
  if (bench.layer > 0) all.push_back(bytes(bench.buffers.input_gradient, rows));
  for (std::size_t t = 0; t < bench.sizes.size(); ++t) {
    const auto size = bench.sizes[t] * size_of(bench.config.gradient_dtype).count;
    all.push_back(bytes(bench.buffers.gradients[t], size));
  }
  return all;
}

class GptLayer : public testing::TestWithParam<std::uint32_t> {};

TEST_P(GptLayer, BackwardIsTheDerivativeOfForward) {
  Bench bench(tiny(), GetParam());
  backward(bench.config, bench.layer, bench.buffers);
  for (std::size_t t = 0; t < bench.sizes.size(); ++t) {
    expect_gradient(
        bench, reinterpret_cast<float*>(const_cast<std::byte*>(bench.buffers.parameters[t])),
        reinterpret_cast<const float*>(bench.buffers.gradients[t]), bench.sizes[t],
        "tensor " + std::to_string(t));
  }
  if (GetParam() == 0) return;
  expect_gradient(bench, bench.input(), bench.buffers.input_gradient,
                  bench.config.rows() * std::size_t{bench.config.width}, "input");
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

TEST_P(GptLayer, GivesTheSameBitsAtEveryAddressAndOnEveryThread) {
  auto config = tiny();
  config.width = 36;  // rows that do not begin on a cache line
  config.context = 9;
  Bench first(config, GetParam());
  const auto expected = results(first);
  for (const std::size_t shift : {1U, 3U, 64U}) {
    Bench other(config, GetParam(), shift);
    EXPECT_EQ(results(other), expected) << shift;
  }
  std::thread([&] {
    Bench other(config, GetParam(), 5);
    EXPECT_EQ(results(other), expected) << "another thread";
  }).join();
}

TEST_P(GptLayer, RoundsBf16GradientsOnceFromFp32) {
  auto config = tiny();
  Bench wide(config, GetParam(), 0, true);
  config.parameter_dtype = config.gradient_dtype = DType::bf16;
  Bench narrow(config, GetParam());
  auto expected = results(wide);
  for (std::size_t t = 0; t < wide.sizes.size(); ++t) {
    std::vector<bfloat16> rounded(wide.sizes[t]);
    const auto* gradient = reinterpret_cast<const float*>(wide.buffers.gradients[t]);
    for (std::size_t i = 0; i < rounded.size(); ++i) rounded[i] = to_bfloat16(gradient[i]);
    expected[expected.size() - wide.sizes.size() + t] = bytes(rounded.data(), rounded.size() * 2);
  }
  EXPECT_EQ(results(narrow), expected);
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
  const double first = trainer.step({batch}, 3e-3).loss;
  EXPECT_NEAR(first, std::log(256.0), 0.2);
  double last = first;
  for (int i = 0; i < 60; ++i) last = trainer.step({batch}, 3e-3).loss;
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
