// Embedding and head, and the choice among the kinds of layer.
#include "tools/gpt_layers.h"

#include <chrono>
#include <vector>

#include "terrace/error.h"
#include "tools/gpt_block.h"
#include "tools/gpt_math.h"

namespace terrace::gpt {
namespace {

// Results must not depend on how many threads or how large a cache the machine has, and the packing
// buffers inside a product must stay small.
void fix_eigen() {
  static const bool fixed = [] {
    Eigen::setNbThreads(1);
    Eigen::setCpuCacheSizes(32 << 10, 1 << 20, 4 << 20);
    return true;
  }();
  static_cast<void>(fixed);
}

// ---- embedding: output [rows, width] = token table [256, width] + position table [context, width]

struct EmbeddingScratch {
  float* tokens = nullptr;     // [256, width]
  float* positions = nullptr;  // [context, width]
};

EmbeddingScratch carve_embedding(const GptConfig& c, Scratch& scratch) {
  EmbeddingScratch s;
  s.tokens = scratch.floats(std::size_t{kVocabulary} * c.width);
  s.positions = scratch.floats(std::size_t{c.context} * c.width);
  return s;
}

std::int32_t token_at(const LayerBuffers& b, std::size_t row) {
  const auto token = reinterpret_cast<const std::int32_t*>(b.input)[row];
  TERRACE_CHECK(token >= 0 && token < static_cast<std::int32_t>(kVocabulary));
  return token;
}

void embedding_forward(const GptConfig& c, const LayerBuffers& b) {
  Scratch scratch(b.workspace);
  const auto s = carve_embedding(c, scratch);
  widen(b.parameters[kTokenTable], c.parameter_dtype, std::size_t{kVocabulary} * c.width, s.tokens);
  widen(b.parameters[kPositionTable], c.parameter_dtype, std::size_t{c.context} * c.width,
        s.positions);
  const auto tokens = matrix(s.tokens, kVocabulary, c.width);
  const auto positions = matrix(s.positions, c.context, c.width);
  auto output = matrix(b.output, c.rows(), c.width);
  for (std::size_t row = 0; row < c.rows(); ++row) {
    output.row(static_cast<Index>(row)) =
        tokens.row(token_at(b, row)) + positions.row(static_cast<Index>(row % c.context));
  }
}

void embedding_backward(const GptConfig& c, const LayerBuffers& b) {
  Scratch scratch(b.workspace);
  const auto s = carve_embedding(c, scratch);
  auto tokens = matrix(s.tokens, kVocabulary, c.width);
  auto positions = matrix(s.positions, c.context, c.width);
  tokens.setZero();
  positions.setZero();
  const auto gradient = matrix(b.output_gradient, c.rows(), c.width);
  for (std::size_t row = 0; row < c.rows(); ++row) {
    tokens.row(token_at(b, row)) += gradient.row(static_cast<Index>(row));
    positions.row(static_cast<Index>(row % c.context)) += gradient.row(static_cast<Index>(row));
  }
  narrow(s.tokens, std::size_t{kVocabulary} * c.width, c.gradient_dtype, b.gradients[kTokenTable]);
  narrow(s.positions, std::size_t{c.context} * c.width, c.gradient_dtype,
         b.gradients[kPositionTable]);
}

// ---- head: logits [rows, 256] = norm(x) W; the loss is their mean cross-entropy with the targets

struct HeadScratch {
  float* gain_bias = nullptr;  // [2, width]
  float* weight = nullptr;     // [width, 256]
  float* normal = nullptr;     // [rows, width]
  float* logits = nullptr;     // [rows, 256]
  // backward
  float* vectors = nullptr;          // [3, width]
  float* weight_gradient = nullptr;  // [width, 256]
  float* rows = nullptr;             // [rows, width]
};

HeadScratch carve_head(const GptConfig& c, bool backward, Scratch& scratch) {
  const std::size_t rows = c.rows();
  const std::size_t table = std::size_t{c.width} * kVocabulary;
  HeadScratch s;
  s.gain_bias = scratch.floats(2 * round_up(c.width, 16));
  s.weight = scratch.floats(table);
  s.normal = scratch.floats(rows * c.width);
  s.logits = scratch.floats(rows * kVocabulary);
  if (!backward) return s;
  s.vectors = scratch.floats(3 * round_up(c.width, 16));
  s.weight_gradient = scratch.floats(table);
  s.rows = scratch.floats(rows * c.width);
  return s;
}

void head_logits(const GptConfig& c, const LayerBuffers& b, HeadScratch& s) {
  const auto stride = round_up(c.width, 16);
  widen(b.parameters[kFinalGain], c.parameter_dtype, c.width, s.gain_bias);
  widen(b.parameters[kFinalBias], c.parameter_dtype, c.width, s.gain_bias + stride);
  widen(b.parameters[kHeadWeight], c.parameter_dtype, std::size_t{c.width} * kVocabulary, s.weight);
  const auto x = matrix(reinterpret_cast<const float*>(b.input), c.rows(), c.width);
  layer_norm(x, s.gain_bias, s.gain_bias + stride, matrix(s.normal, c.rows(), c.width));
  matrix(s.logits, c.rows(), kVocabulary).noalias() =
      matrix(s.normal, c.rows(), c.width) * matrix(s.weight, c.width, kVocabulary);
}

// Turns logits into probabilities and returns the mean cross-entropy in nats.
double softmax_loss(const GptConfig& c, const LayerBuffers& b, float* data) {
  auto logits = matrix(data, c.rows(), kVocabulary);
  double loss = 0;
  for (Index r = 0; r < logits.rows(); ++r) {
    auto row = logits.row(r).array();
    const float highest = row.maxCoeff();
    const float target = row(b.targets[r]) - highest;
    row = (row - highest).exp();
    const float sum = row.sum();
    loss += std::log(static_cast<double>(sum)) - static_cast<double>(target);
    row *= 1.0F / sum;
  }
  return loss / static_cast<double>(c.rows());
}

void head_forward(const GptConfig& c, const LayerBuffers& b) {
  Scratch scratch(b.workspace);
  auto s = carve_head(c, false, scratch);
  head_logits(c, b, s);
  if (b.logits != nullptr) {
    std::memcpy(b.logits, s.logits, std::size_t{c.rows()} * kVocabulary * sizeof(float));
  }
  if (b.loss != nullptr) *b.loss = softmax_loss(c, b, s.logits);
}

void head_backward(const GptConfig& c, const LayerBuffers& b) {
  Scratch scratch(b.workspace);
  auto s = carve_head(c, true, scratch);
  head_logits(c, b, s);
  const double loss = softmax_loss(c, b, s.logits);
  if (b.loss != nullptr) *b.loss = loss;
  auto delta = matrix(s.logits, c.rows(), kVocabulary);
  for (Index r = 0; r < delta.rows(); ++r) delta(r, b.targets[r]) -= 1.0F;
  delta *= b.loss_scale / static_cast<float>(c.rows());
  auto weights = matrix(s.weight_gradient, c.width, kVocabulary);
  weights.noalias() = matrix(s.normal, c.rows(), c.width).transpose() * delta;
  narrow(s.weight_gradient, std::size_t{c.width} * kVocabulary, c.gradient_dtype,
         b.gradients[kHeadWeight]);
  matrix(s.rows, c.rows(), c.width).noalias() =
      delta * matrix(s.weight, c.width, kVocabulary).transpose();
  const auto stride = round_up(c.width, 16);
  auto dx = matrix(b.input_gradient, c.rows(), c.width);
  dx.setZero();
  layer_norm_backward(matrix(reinterpret_cast<const float*>(b.input), c.rows(), c.width),
                      s.gain_bias, const_matrix(s.rows, c.rows(), c.width), dx,
                      row_vector(s.vectors, c.width), row_vector(s.vectors + stride, c.width),
                      row_vector(s.vectors + 2 * stride, c.width));
  narrow(s.vectors, c.width, c.gradient_dtype, b.gradients[kFinalGain]);
  narrow(s.vectors + stride, c.width, c.gradient_dtype, b.gradients[kFinalBias]);
}

}  // namespace

void forward(const GptConfig& config, std::uint32_t layer, const LayerBuffers& buffers) {
  fix_eigen();
  if (layer == 0) return embedding_forward(config, buffers);
  if (layer == config.head_layer()) return head_forward(config, buffers);
  block_forward(config, buffers);
}

void backward(const GptConfig& config, std::uint32_t layer, const LayerBuffers& buffers) {
  fix_eigen();
  if (layer == 0) return embedding_backward(config, buffers);
  if (layer == config.head_layer()) return head_backward(config, buffers);
  block_backward(config, buffers);
}

Bytes forward_workspace(const GptConfig& config, std::uint32_t layer) {
  Scratch scratch;
  if (layer == 0) {
    carve_embedding(config, scratch);
  } else if (layer == config.head_layer()) {
    carve_head(config, false, scratch);
  } else {
    return block_forward_workspace(config);
  }
  return scratch.used();
}

Bytes backward_workspace(const GptConfig& config, std::uint32_t layer) {
  Scratch scratch;
  if (layer == 0) {
    carve_embedding(config, scratch);
  } else if (layer == config.head_layer()) {
    carve_head(config, true, scratch);
  } else {
    return block_backward_workspace(config);
  }
  return scratch.used();
}

double measure_tflops(const GptConfig& config) {
  fix_eigen();
  using Dense = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const auto rows = static_cast<Index>(std::min(config.rows(), 512U));
  const auto width = static_cast<Index>(std::min(config.width, 2048U));
  const Dense a = Dense::Constant(rows, width, 0.5F);
  const Dense b = Dense::Constant(width, width, 0.25F);
  Dense c(rows, width);
  c.noalias() = a * b;
  const double flops = 2.0 * static_cast<double>(rows * width) * static_cast<double>(width);
  const auto begin = std::chrono::steady_clock::now();
  double seconds = 0;
  int rounds = 0;
  while (seconds < 0.05 || rounds < 2) {
    c.noalias() = a * b;
    ++rounds;
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  return flops * rounds / seconds / 1e12;
}

}  // namespace terrace::gpt
