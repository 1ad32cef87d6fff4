// The reference model: a byte-level GPT, as Terrace sees it.
#pragma once

#include <cstdint>

#include "terrace/model.h"

namespace terrace::gpt {

inline constexpr std::uint32_t kVocabulary = 256;  // bytes

struct GptConfig {
  std::uint32_t layers = 6;
  std::uint32_t width = 384;
  std::uint32_t heads = 6;
  std::uint32_t context = 128;  // tokens of one sequence
  std::uint32_t batch = 8;      // sequences of one step
  DType parameter_dtype = DType::bf16;
  DType gradient_dtype = DType::bf16;
  std::uint64_t seed = 1;

  std::uint32_t rows() const { return batch * context; }
  std::uint32_t head_width() const { return width / heads; }
  // Of the model: embedding, blocks, head.
  std::uint32_t layer_count() const { return layers + 2; }
  std::uint32_t head_layer() const { return layers + 1; }
};

// Throws Error(invalid_argument) naming the numbers: zero sizes, heads that do not divide the
// width, and what does not fit 32-bit products.
void validate(const GptConfig& config);

// Tensors of each kind of layer, by index.
enum EmbeddingTensor : std::uint8_t { kTokenTable, kPositionTable };
enum BlockTensor : std::uint8_t {
  kNorm1Gain, kNorm1Bias, kQkvWeight, kQkvBias, kProjectionWeight, kProjectionBias,
  kNorm2Gain, kNorm2Bias, kUpWeight, kUpBias, kDownWeight, kDownBias
};
enum HeadTensor : std::uint8_t { kFinalGain, kFinalBias, kHeadWeight };

// Layers "embedding" (input: int32 tokens [batch, context]), "block0".. (input: fp32
// [batch * context, width]) and "head" (the same input; makes the loss).
ModelSpec make_model(const GptConfig& config);

// Normal(0, 0.02) weights (residual projections divided by sqrt(2 layers)), gains 1, biases 0, from
// a counter-based generator: every element depends on seed, tensor and index alone.
Initializer make_initializer(const GptConfig& config);

// Named sizes for `terrace plan`: parameters from 1M to 1T.
struct NamedSize {
  const char* name;
  std::uint32_t layers, width, heads, context, batch;
};
const std::vector<NamedSize>& named_sizes();

// A generator without state: the n-th number of a stream.
std::uint64_t mix(std::uint64_t seed, std::uint64_t index);

}  // namespace terrace::gpt
