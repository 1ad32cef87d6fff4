// Fits sin(3 x) cos(2 y) with a multi-layer perceptron, twice: with its optimizer state on a drive
// and little RAM, and with room for everything. Both must learn, and must give the same bits.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "terrace/terrace.h"

namespace {

constexpr std::uint32_t kBatch = 64;
constexpr std::uint32_t kWidths[] = {2, 128, 128, 1};  // input, hidden, hidden, output
constexpr std::uint32_t kLayers = 3;
constexpr int kSteps = 300;

std::uint32_t inputs(std::uint32_t layer) { return kWidths[layer]; }
std::uint32_t outputs(std::uint32_t layer) { return kWidths[layer + 1]; }

terrace::ModelSpec perceptron() {
  terrace::ModelSpec model;
  model.parameter_dtype = model.gradient_dtype = terrace::DType::fp32;
  for (std::uint32_t l = 0; l < kLayers; ++l) {
    terrace::LayerSpec layer;
    layer.name = "dense" + std::to_string(l);
    layer.tensors = {{layer.name + ".weight", {outputs(l), inputs(l)}},
                     {layer.name + ".bias", {outputs(l)}}};
    layer.input_bytes = {std::uint64_t{kBatch} * inputs(l) * sizeof(float)};
    layer.input_gradient = l > 0;
    layer.backward_workspace = {std::uint64_t{kBatch} * outputs(l) * sizeof(float)};
    model.layers.push_back(layer);
  }
  return model;
}

// A number in [-1, 1) that depends on its arguments alone.
float noise(std::uint64_t stream, std::uint64_t index) {
  std::uint64_t x = (stream << 32) + index + 1;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return static_cast<float>((x ^ (x >> 31)) >> 40) * 0x1p-23F - 1.0F;
}

// Uniform within sqrt(6 / (inputs + outputs)) (Glorot & Bengio 2010); biases are 0.
void initialize(const terrace::TensorSpec& tensor, std::uint64_t first, std::span<float> values) {
  const bool weight = tensor.shape.size() == 2;
  const float bound =
      weight ? std::sqrt(6.0F / static_cast<float>(tensor.shape[0] + tensor.shape[1])) : 0.0F;
  const auto stream = static_cast<std::uint64_t>(tensor.name[5]);  // the digit of "dense0"
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = bound * noise(stream, first + i);
}

struct Sample {
  float x, y, target;
};

Sample sample(std::uint64_t step, std::uint32_t row) {
  const float x = noise(100 + step, row * 2);
  const float y = noise(100 + step, row * 2 + 1);
  return {x, y, std::sin(3 * x) * std::cos(2 * y)};
}

struct Buffers {
  const float* weight;           // [outputs][inputs]
  const float* bias;             // [outputs]
  float* weight_gradient;        // as weight
  float* bias_gradient;          // as bias
  float* input;                  // [batch][inputs]
  float* output;                 // [batch][outputs]; nullptr in the last layer and in backward
  const float* output_gradient;  // [batch][outputs]; nullptr in the last layer
  float* input_gradient;         // [batch][inputs]; nullptr in the first layer
  float* workspace;              // [batch][outputs], backward only
};

Buffers buffers_of(const terrace::LayerView& view, bool backward) {
  const auto floats = [](std::byte* bytes) { return reinterpret_cast<float*>(bytes); };
  const auto read_only = [](const std::byte* bytes) {
    return reinterpret_cast<const float*>(bytes);
  };
  return {read_only(view.parameter(0)),
          read_only(view.parameter(1)),
          backward ? floats(view.gradient(0)) : nullptr,
          backward ? floats(view.gradient(1)) : nullptr,
          floats(view.input()),
          floats(view.output()),
          read_only(view.output_gradient()),
          floats(view.input_gradient()),
          floats(view.workspace())};
}

// What neuron `o` sees for one row, before tanh.
float sum(const Buffers& b, std::uint32_t layer, std::uint32_t row, std::uint32_t o) {
  const std::uint32_t n = inputs(layer);
  float result = b.bias[o];
  for (std::uint32_t i = 0; i < n; ++i) result += b.weight[o * n + i] * b.input[row * n + i];
  return result;
}

void forward(const Buffers& b, std::uint32_t layer) {
  if (b.output == nullptr) return;  // the last layer's work is in its backward
  for (std::uint32_t row = 0; row < kBatch; ++row) {
    for (std::uint32_t o = 0; o < outputs(layer); ++o) {
      b.output[row * outputs(layer) + o] = std::tanh(sum(b, layer, row, o));
    }
  }
}

// Fills the workspace with the loss's gradient with respect to what the neurons see. The last layer
// is linear, and its loss is the mean squared error, which is returned; the others return 0.
double neuron_gradients(const Buffers& b, std::uint32_t layer, std::uint64_t step) {
  double loss = 0;
  for (std::uint32_t row = 0; row < kBatch; ++row) {
    for (std::uint32_t o = 0; o < outputs(layer); ++o) {
      const std::size_t at = std::size_t{row} * outputs(layer) + o;
      const float y = sum(b, layer, row, o);
      if (b.output_gradient == nullptr) {
        const float error = y - sample(step, row).target;
        loss += double{error} * error / kBatch;
        b.workspace[at] = 2 * error / kBatch;
      } else {
        const float squashed = std::tanh(y);
        b.workspace[at] = b.output_gradient[at] * (1 - squashed * squashed);
      }
    }
  }
  return loss;
}

double backward(const Buffers& b, std::uint32_t layer, std::uint64_t step) {
  const double loss = neuron_gradients(b, layer, step);
  const std::uint32_t in = inputs(layer);
  const std::uint32_t out = outputs(layer);
  std::memset(b.weight_gradient, 0, sizeof(float) * in * out);
  std::memset(b.bias_gradient, 0, sizeof(float) * out);
  if (b.input_gradient != nullptr) std::memset(b.input_gradient, 0, sizeof(float) * kBatch * in);
  for (std::uint32_t row = 0; row < kBatch; ++row) {
    for (std::uint32_t o = 0; o < out; ++o) {
      const float gradient = b.workspace[row * out + o];
      b.bias_gradient[o] += gradient;
      for (std::uint32_t i = 0; i < in; ++i) {
        b.weight_gradient[o * in + i] += gradient * b.input[row * in + i];
        if (b.input_gradient != nullptr) {
          b.input_gradient[row * in + i] += gradient * b.weight[o * in + i];
        }
      }
    }
  }
  return loss;
}

double train_step(terrace::Engine& engine, std::uint64_t number) {
  double loss = 0;
  auto step = engine.begin_step();
  for (std::uint32_t l = 0; l < kLayers; ++l) {
    const auto view = step.forward(terrace::LayerId{l});
    view.launch([b = buffers_of(view, false), l, number] {
      for (std::uint32_t row = 0; l == 0 && row < kBatch; ++row) {
        const Sample s = sample(number, row);
        b.input[row * 2] = s.x;
        b.input[row * 2 + 1] = s.y;
      }
      forward(b, l);
    });
  }
  for (std::uint32_t l = kLayers; l-- > 0;) {
    auto view = step.backward(terrace::LayerId{l});
    view.launch([b = buffers_of(view, true), l, number, &loss] { loss += backward(b, l, number); });
    view.submit_gradients();
  }
  step.finish();
  return loss;
}

struct Result {
  double first_loss = 0, last_loss = 0;
  std::uint64_t nvme_bytes = 0;
  std::vector<float> weights;  // of all tensors, one after the other
};

Result train(const terrace::Config& config) {
  terrace::Engine engine(config, perceptron(), initialize);
  Result result;
  for (int step = 1; step <= kSteps; ++step) {
    result.last_loss = train_step(engine, static_cast<std::uint64_t>(step));
    if (step == 1) result.first_loss = result.last_loss;
  }
  for (const auto& layer : engine.model().layers) {
    for (const auto& tensor : layer.tensors) {
      std::vector<float> values(tensor.elements());
      engine.read(tensor.name, terrace::Content::parameter, 0, values);
      result.weights.insert(result.weights.end(), values.begin(), values.end());
    }
  }
  const auto stats = engine.stats();
  result.nvme_bytes = terrace::at(stats.lanes, terrace::Lane::nvme_read).bytes.count;
  return result;
}

// 17 thousand parameters need 340 KB with their gradients and optimizer state; RAM has less.
terrace::Config tight(const std::string& directory) {
  terrace::Config config;
  config.learning_rate = 5e-3;
  config.segment = terrace::Bytes{4 << 10};
  config.budget.dram = terrace::Bytes{192 << 10};
  config.nvme = {{directory, {}, {}}};
  return config;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

int compare(const std::string& directory) {
  const Result streamed = train(tight(directory));
  terrace::Config roomy;
  roomy.learning_rate = tight(directory).learning_rate;
  const Result resident = train(roomy);
  std::printf("streamed: loss %.4f to %.4f, %.1f MB read from the drive\n", streamed.first_loss,
              streamed.last_loss, static_cast<double>(streamed.nvme_bytes) / 1e6);
  std::printf("resident: loss %.4f to %.4f\n", resident.first_loss, resident.last_loss);
  if (streamed.nvme_bytes == 0) {
    std::printf("nothing came from the drive\n");
  } else if (streamed.last_loss * 10 > streamed.first_loss) {
    std::printf("the loss did not fall tenfold\n");
  } else if (!same_bits(streamed.weights, resident.weights)) {
    std::printf("the weights differ\n");
  } else {
    return 0;
  }
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: regression DIRECTORY\n");
    return 2;
  }
  try {
    return compare(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
