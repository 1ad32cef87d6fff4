#include "tools/gpt_model.h"

#include <cmath>
#include <numbers>

#include "terrace/error.h"
#include "tools/gpt_layers.h"

namespace terrace::gpt {
namespace {

LayerSpec embedding(const GptConfig& c) {
  LayerSpec layer;
  layer.name = "embedding";
  layer.tensors = {{"embedding.token", {kVocabulary, c.width}},
                   {"embedding.position", {c.context, c.width}}};
  layer.input_bytes = {std::uint64_t{c.rows()} * sizeof(std::int32_t)};
  layer.input_gradient = false;
  layer.forward_flops = layer.backward_flops = 4.0 * c.rows() * c.width;
  return layer;
}

LayerSpec block(const GptConfig& c, std::uint32_t index) {
  LayerSpec layer;
  layer.name = "block" + std::to_string(index);
  const auto tensor = [&](const char* name, std::vector<std::uint64_t> shape) {
    layer.tensors.push_back({layer.name + "." + name, std::move(shape)});
  };
  const std::uint64_t d = c.width;
  tensor("norm1.gain", {d});
  tensor("norm1.bias", {d});
  tensor("qkv.weight", {d, 3 * d});
  tensor("qkv.bias", {3 * d});
  tensor("projection.weight", {d, d});
  tensor("projection.bias", {d});
  tensor("norm2.gain", {d});
  tensor("norm2.bias", {d});
  tensor("up.weight", {d, 4 * d});
  tensor("up.bias", {4 * d});
  tensor("down.weight", {4 * d, d});
  tensor("down.bias", {d});
  layer.input_bytes = {std::uint64_t{c.rows()} * d * sizeof(float)};
  const double rows = c.rows();
  const double width = c.width;
  layer.forward_flops = 2 * rows * 12 * width * width + 4 * rows * c.context * width;
  layer.backward_flops = 3 * layer.forward_flops;  // once more forward, then twice its work
  return layer;
}

LayerSpec head(const GptConfig& c) {
  LayerSpec layer;
  layer.name = "head";
  layer.tensors = {{"head.norm.gain", {c.width}},
                   {"head.norm.bias", {c.width}},
                   {"head.weight", {c.width, kVocabulary}}};
  layer.input_bytes = {std::uint64_t{c.rows()} * c.width * sizeof(float)};
  layer.forward_flops = 2.0 * c.rows() * c.width * kVocabulary;
  layer.backward_flops = 3 * layer.forward_flops;
  return layer;
}

std::uint64_t hash_name(const std::string& name) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return hash;
}

bool ends_with(const std::string& text, const char* end) {
  return std::string_view(text).ends_with(end);
}

// Box-Muller, one of the pair.
float normal(std::uint64_t seed, std::uint64_t index) {
  const std::uint64_t bits = mix(seed, index);
  const double u1 = (static_cast<double>(bits >> 40) + 1) * 0x1p-24;
  const double u2 = static_cast<double>(bits & 0xffffffU) * 0x1p-24;
  return static_cast<float>(std::sqrt(-2 * std::log(u1)) * std::cos(2 * std::numbers::pi * u2));
}

}  // namespace

std::uint64_t mix(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15ULL;  // splitmix64
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

void validate(const GptConfig& config) {
  const auto positive = [](std::uint32_t value, const char* name) {
    if (value == 0) {
      throw Error(ErrorCode::invalid_argument, std::string("--") + name + " must be at least 1");
    }
  };
  positive(config.layers, "layers");
  positive(config.width, "width");
  positive(config.heads, "heads");
  positive(config.context, "context");
  positive(config.batch, "batch");
  if (config.width % config.heads != 0) {
    throw Error(ErrorCode::invalid_argument,
                std::to_string(config.heads) + " heads do not divide the width of " +
                    std::to_string(config.width) + "; choose a multiple");
  }
  if (std::uint64_t{config.batch} * config.context > (1U << 24)) {
    throw Error(ErrorCode::invalid_argument,
                "batch times context is more than 2^24 tokens; make one of them smaller");
  }
}

ModelSpec make_model(const GptConfig& config) {
  validate(config);
  ModelSpec model;
  model.parameter_dtype = config.parameter_dtype;
  model.gradient_dtype = config.gradient_dtype;
  model.layers.push_back(embedding(config));
  for (std::uint32_t i = 0; i < config.layers; ++i) model.layers.push_back(block(config, i));
  model.layers.push_back(head(config));
  for (std::uint32_t l = 0; l < config.layer_count(); ++l) {
    model.layers[l].forward_workspace = forward_workspace(config, l);
    model.layers[l].backward_workspace = backward_workspace(config, l);
  }
  return model;
}

Initializer make_initializer(const GptConfig& config) {
  const double residual = 0.02 / std::sqrt(2.0 * config.layers);
  return [seed = config.seed, residual](const TensorSpec& tensor, std::uint64_t first,
                                        std::span<float> values) {
    if (ends_with(tensor.name, ".gain") || ends_with(tensor.name, ".bias")) {
      const float value = ends_with(tensor.name, ".gain") ? 1.0F : 0.0F;
      for (auto& element : values) element = value;
      return;
    }
    const bool on_residual =
        ends_with(tensor.name, "projection.weight") || ends_with(tensor.name, "down.weight");
    const auto deviation = static_cast<float>(on_residual ? residual : 0.02);
    const std::uint64_t stream = mix(seed, hash_name(tensor.name));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = deviation * normal(stream, first + i);
    }
  };
}

const std::vector<NamedSize>& named_sizes() {
  static const std::vector<NamedSize> sizes{
      {"1M", 4, 128, 4, 128, 8},          {"10M", 6, 384, 6, 256, 8},
      {"100M", 14, 768, 12, 512, 8},      {"350M", 24, 1088, 17, 1024, 8},
      {"1B", 24, 1856, 29, 2048, 8},      {"3B", 32, 2816, 22, 2048, 8},
      {"7B", 32, 4288, 67, 2048, 8},      {"13B", 40, 5184, 81, 2048, 8},
      {"30B", 60, 6464, 101, 2048, 8},    {"70B", 80, 8512, 133, 2048, 8},
      {"175B", 96, 12288, 96, 2048, 8},   {"500B", 112, 19328, 151, 2048, 4},
      {"1T", 128, 25600, 200, 2048, 4},
  };
  return sizes;
}

}  // namespace terrace::gpt
