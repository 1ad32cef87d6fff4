// x [rows, width]: the block's input.
//   y   = x + attention(norm1(x)) projection        rows = batch * context
//   out = y + gelu(norm2(y) up) down
#include "tools/gpt_block.h"

#include "tools/gpt_math.h"

namespace terrace::gpt {
namespace {

using Strided = Eigen::Map<Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>,
                           Eigen::Unaligned, Eigen::OuterStride<>>;

// What forward keeps in the workspace; in backward all of it is alive at once.
struct Activations {
  float* gain_bias = nullptr;  // [2, 4 * width] widened vectors
  float* weight = nullptr;     // [4 * width * width] the widened matrix in use
  float* norm1 = nullptr;      // [rows, width]
  float* qkv = nullptr;        // [rows, 3 * width]
  float* attention = nullptr;  // [rows, width]
  float* y = nullptr;          // [rows, width]
  float* norm2 = nullptr;      // [rows, width]
  float* up = nullptr;         // [rows, 4 * width]
  float* hidden = nullptr;     // [rows, 4 * width]
  float* scores = nullptr;     // [context, context]
};

struct Gradients {
  float* weight = nullptr;     // [4 * width * width]
  float* vector = nullptr;     // [2, 4 * width]
  float* rows = nullptr;       // [rows, width]
  float* y = nullptr;          // [rows, width]
  float* scores = nullptr;     // [context, context]
  float* normal = nullptr;     // [width]
};

class Block {
 public:
  Block(const GptConfig& config, const LayerBuffers& buffers)
      : c_(config), b_(buffers), d_(config.width), rows_(config.rows()) {}

  static Activations carve(const GptConfig& c, Scratch& scratch) {
    const std::size_t d = c.width;
    const std::size_t rows = c.rows();
    Activations a;
    a.gain_bias = scratch.floats(2 * round_up(4 * d, 16));
    a.weight = scratch.floats(4 * d * d);
    a.norm1 = scratch.floats(rows * d);
    a.qkv = scratch.floats(rows * 3 * d);
    a.attention = scratch.floats(rows * d);
    a.y = scratch.floats(rows * d);
    a.norm2 = scratch.floats(rows * d);
    a.up = scratch.floats(rows * 4 * d);
    a.hidden = scratch.floats(rows * 4 * d);
    a.scores = scratch.floats(std::size_t{c.context} * c.context);
    return a;
  }

  static Gradients carve_gradients(const GptConfig& c, Scratch& scratch) {
    const std::size_t d = c.width;
    Gradients g;
    g.weight = scratch.floats(4 * d * d);
    g.vector = scratch.floats(2 * round_up(4 * d, 16));
    g.rows = scratch.floats(c.rows() * d);
    g.y = scratch.floats(c.rows() * d);
    g.scores = scratch.floats(std::size_t{c.context} * c.context);
    g.normal = scratch.floats(d);
    return g;
  }

  // Up to the MLP's hidden layer.
  void forward_hidden(Activations& a) {
    const auto x = matrix(reinterpret_cast<const float*>(b_.input), rows_, d_);
    normalize(x, kNorm1Gain, a, a.norm1);
    linear(a.norm1, d_, kQkvWeight, 3 * d_, a, a.qkv);
    for_each_head([&](std::size_t sequence, std::size_t head) { attend(sequence, head, a); });
    linear(a.attention, d_, kProjectionWeight, d_, a, a.y);
    matrix(a.y, rows_, d_) += x;
    normalize(const_matrix(a.y, rows_, d_), kNorm2Gain, a, a.norm2);
    linear(a.norm2, d_, kUpWeight, 4 * d_, a, a.up);
    gelu(const_matrix(a.up, rows_, 4 * d_), matrix(a.hidden, rows_, 4 * d_));
  }

  void forward_output(Activations& a) {
    linear(a.hidden, 4 * d_, kDownWeight, d_, a, b_.output);
    matrix(b_.output, rows_, d_) += matrix(a.y, rows_, d_);
  }

  void backward(Activations& a, Gradients& g) {
    const auto x = matrix(reinterpret_cast<const float*>(b_.input), rows_, d_);
    const auto dout = matrix(b_.output_gradient, rows_, d_);
    // MLP. The hidden layer's buffer takes its gradient once it has been used.
    weight_gradient(a.hidden, 4 * d_, b_.output_gradient, d_, kDownWeight, g);
    input_gradient(b_.output_gradient, d_, kDownWeight, 4 * d_, a, a.hidden);
    gelu_backward(const_matrix(a.up, rows_, 4 * d_), matrix(a.hidden, rows_, 4 * d_));
    weight_gradient(a.norm2, d_, a.hidden, 4 * d_, kUpWeight, g);
    input_gradient(a.hidden, 4 * d_, kUpWeight, d_, a, g.rows);
    matrix(g.y, rows_, d_) = dout;
    normalize_backward(const_matrix(a.y, rows_, d_), kNorm2Gain, a, g, g.y);
    // Attention. The up buffer takes the gradient of q, k and v.
    weight_gradient(a.attention, d_, g.y, d_, kProjectionWeight, g);
    input_gradient(g.y, d_, kProjectionWeight, d_, a, g.rows);
    for_each_head([&](std::size_t sequence, std::size_t head) {
      attend_backward(sequence, head, a, g, a.up);
    });
    weight_gradient(a.norm1, d_, a.up, 3 * d_, kQkvWeight, g);
    input_gradient(a.up, 3 * d_, kQkvWeight, d_, a, g.rows);
    matrix(b_.input_gradient, rows_, d_) = matrix(g.y, rows_, d_);
    normalize_backward(x, kNorm1Gain, a, g, b_.input_gradient);
  }

 private:
  template <class Function>
  void for_each_head(Function&& function) const {
    for (std::size_t s = 0; s < c_.batch; ++s) {
      for (std::size_t h = 0; h < c_.heads; ++h) function(s, h);
    }
  }

  std::size_t vector_stride() const { return round_up(4 * d_, 16); }

  // Gain and bias stand next to each other among the tensors.
  void normalize(const ConstMatrix& x, std::size_t gain, Activations& a, float* y) const {
    widen_norm(gain, a);
    layer_norm(x, a.gain_bias, a.gain_bias + vector_stride(), matrix(y, rows_, d_));
  }

  void widen_norm(std::size_t gain, Activations& a) const {
    widen(b_.parameters[gain], c_.parameter_dtype, d_, a.gain_bias);
    widen(b_.parameters[gain + 1], c_.parameter_dtype, d_, a.gain_bias + vector_stride());
  }

  // g.rows holds dy; its share of dx is added to `dx`.
  void normalize_backward(const ConstMatrix& x, std::size_t gain, Activations& a, Gradients& g,
                          float* dx) const {
    widen_norm(gain, a);
    float* dbias = g.vector + vector_stride();
    layer_norm_backward(x, a.gain_bias, const_matrix(g.rows, rows_, d_),
                        matrix(dx, rows_, d_), row_vector(g.vector, d_), row_vector(dbias, d_),
                        row_vector(g.normal, d_));
    narrow(g.vector, d_, c_.gradient_dtype, b_.gradients[gain]);
    narrow(dbias, d_, c_.gradient_dtype, b_.gradients[gain + 1]);
  }

  // y [rows, out] = x [rows, in] W [in, out] + bias [out]; the bias follows its weight.
  void linear(const float* x, std::size_t in, std::size_t weight, std::size_t out, Activations& a,
              float* y) const {
    widen(b_.parameters[weight], c_.parameter_dtype, in * out, a.weight);
    widen(b_.parameters[weight + 1], c_.parameter_dtype, out, a.gain_bias);
    auto result = matrix(y, rows_, out);
    result.noalias() = matrix(x, rows_, in) * matrix(a.weight, in, out);
    result.rowwise() += row_vector(a.gain_bias, out);
  }

  // dx [rows, in] = dy [rows, out] W^T
  void input_gradient(const float* dy, std::size_t out, std::size_t weight, std::size_t in,
                      Activations& a, float* dx) const {
    widen(b_.parameters[weight], c_.parameter_dtype, in * out, a.weight);
    matrix(dx, rows_, in).noalias() =
        matrix(dy, rows_, out) * matrix(a.weight, in, out).transpose();
  }

  // dW [in, out] = x^T dy, dbias [out] = column sums of dy
  void weight_gradient(const float* x, std::size_t in, const float* dy, std::size_t out,
                       std::size_t weight, Gradients& g) const {
    const auto delta = matrix(dy, rows_, out);
    matrix(g.weight, in, out).noalias() = matrix(x, rows_, in).transpose() * delta;
    narrow(g.weight, in * out, c_.gradient_dtype, b_.gradients[weight]);
    auto bias = row_vector(g.vector, out);
    bias.setZero();
    for (Index r = 0; r < delta.rows(); ++r) bias += delta.row(r);
    narrow(g.vector, out, c_.gradient_dtype, b_.gradients[weight + 1]);
  }

  // [context, head width] of one sequence and head, inside [rows, columns].
  Strided head_of(float* data, std::size_t columns, std::size_t sequence, std::size_t first) const {
    return {data + sequence * c_.context * columns + first, static_cast<Index>(c_.context),
            static_cast<Index>(c_.head_width()), Eigen::OuterStride<>(static_cast<Index>(columns))};
  }
  Strided query(float* qkv, std::size_t s, std::size_t h) const {
    return head_of(qkv, 3 * d_, s, h * c_.head_width());
  }
  Strided key(float* qkv, std::size_t s, std::size_t h) const {
    return head_of(qkv, 3 * d_, s, d_ + h * c_.head_width());
  }
  Strided value(float* qkv, std::size_t s, std::size_t h) const {
    return head_of(qkv, 3 * d_, s, 2 * d_ + h * c_.head_width());
  }
  float scale() const { return 1.0F / std::sqrt(static_cast<float>(c_.head_width())); }

  // scores = softmax over the past of q k^T / sqrt(head width)
  void softmax_scores(std::size_t s, std::size_t h, Activations& a) const {
    auto scores = matrix(a.scores, c_.context, c_.context);
    scores.noalias() = query(a.qkv, s, h) * key(a.qkv, s, h).transpose();
    for (Index t = 0; t < scores.rows(); ++t) {
      auto past = scores.row(t).head(t + 1).array();
      past *= scale();
      const float highest = past.maxCoeff();
      past = (past - highest).exp();
      const float sum = past.sum();
      past *= 1.0F / sum;
      scores.row(t).tail(scores.cols() - t - 1).setZero();
    }
  }

  void attend(std::size_t s, std::size_t h, Activations& a) const {
    softmax_scores(s, h, a);
    head_of(a.attention, d_, s, h * c_.head_width()).noalias() =
        matrix(a.scores, c_.context, c_.context) * value(a.qkv, s, h);
  }

  // g.rows holds the gradient of the attention's output.
  void attend_backward(std::size_t s, std::size_t h, Activations& a, Gradients& g,
                       float* dqkv) const {
    softmax_scores(s, h, a);
    const auto scores = matrix(a.scores, c_.context, c_.context);
    const auto dout = head_of(g.rows, d_, s, h * c_.head_width());
    auto dscores = matrix(g.scores, c_.context, c_.context);
    value(dqkv, s, h).noalias() = scores.transpose() * dout;
    dscores.noalias() = dout * value(a.qkv, s, h).transpose();
    for (Index t = 0; t < scores.rows(); ++t) {
      const float mean = (scores.row(t).array() * dscores.row(t).array()).sum();
      dscores.row(t).array() =
          scores.row(t).array() * (dscores.row(t).array() - mean) * scale();
    }
    query(dqkv, s, h).noalias() = dscores * key(a.qkv, s, h);
    key(dqkv, s, h).noalias() = dscores.transpose() * query(a.qkv, s, h);
  }

  const GptConfig& c_;
  const LayerBuffers& b_;
  const std::size_t d_;
  const std::size_t rows_;
};

}  // namespace

void block_forward(const GptConfig& config, const LayerBuffers& buffers) {
  Scratch scratch(buffers.workspace);
  auto activations = Block::carve(config, scratch);
  Block block(config, buffers);
  block.forward_hidden(activations);
  block.forward_output(activations);
}

void block_backward(const GptConfig& config, const LayerBuffers& buffers) {
  Scratch scratch(buffers.workspace);
  auto activations = Block::carve(config, scratch);
  auto gradients = Block::carve_gradients(config, scratch);
  Block block(config, buffers);
  block.forward_hidden(activations);
  block.backward(activations, gradients);
}

Bytes block_forward_workspace(const GptConfig& config) {
  Scratch scratch;
  Block::carve(config, scratch);
  return scratch.used();
}

Bytes block_backward_workspace(const GptConfig& config) {
  Scratch scratch;
  Block::carve(config, scratch);
  Block::carve_gradients(config, scratch);
  return scratch.used();
}

}  // namespace terrace::gpt
