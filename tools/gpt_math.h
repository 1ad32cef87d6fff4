// Small pieces of the layer functions. Included by the layer functions alone.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstring>

#include "terrace/dtype.h"
#include "terrace/types.h"

namespace terrace::gpt {

using Matrix = Eigen::Map<Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>,
                          Eigen::Aligned64>;
using ConstMatrix =
    Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>,
               Eigen::Aligned64>;
using RowVector = Eigen::Map<Eigen::Matrix<float, 1, Eigen::Dynamic>, Eigen::Aligned64>;
using ConstRowVector = Eigen::Map<const Eigen::Matrix<float, 1, Eigen::Dynamic>, Eigen::Aligned64>;
using Index = Eigen::Index;

inline Matrix matrix(float* data, std::size_t rows, std::size_t columns) {
  return {data, static_cast<Index>(rows), static_cast<Index>(columns)};
}
inline ConstMatrix matrix(const float* data, std::size_t rows, std::size_t columns) {
  return {data, static_cast<Index>(rows), static_cast<Index>(columns)};
}
inline ConstMatrix const_matrix(const float* data, std::size_t rows, std::size_t columns) {
  return matrix(data, rows, columns);
}
inline RowVector row_vector(float* data, std::size_t columns) {
  return {data, static_cast<Index>(columns)};
}

// Hands out 64-byte aligned pieces of a workspace; without memory it only adds up their sizes, so
// that the size that is declared and the pieces that are used come from the same lines.
class Scratch {
 public:
  explicit Scratch(std::byte* memory = nullptr) : memory_(memory) {}
  float* floats(std::size_t count) {
    const std::size_t offset = used_;
    used_ += round_up(count * sizeof(float), 64);
    return memory_ == nullptr ? nullptr : reinterpret_cast<float*>(memory_ + offset);
  }
  Bytes used() const { return {used_}; }

 private:
  std::byte* memory_;
  std::size_t used_ = 0;
};

// Parameters of any dtype to fp32.
inline void widen(const std::byte* source, DType dtype, std::size_t count, float* target) {
  if (dtype == DType::fp32) {
    std::memcpy(target, source, count * sizeof(float));
    return;
  }
  const auto each = [&](const auto* narrow) {
    for (std::size_t i = 0; i < count; ++i) target[i] = to_float(narrow[i]);
  };
  if (dtype == DType::bf16) return each(reinterpret_cast<const bfloat16*>(source));
  each(reinterpret_cast<const float16*>(source));
}

// fp32 gradients to their dtype, rounded once.
inline void narrow(const float* source, std::size_t count, DType dtype, std::byte* target) {
  if (dtype == DType::fp32) {
    std::memcpy(target, source, count * sizeof(float));
    return;
  }
  if (dtype == DType::bf16) {
    auto* out = reinterpret_cast<bfloat16*>(target);
    for (std::size_t i = 0; i < count; ++i) out[i] = to_bfloat16(source[i]);
    return;
  }
  auto* out = reinterpret_cast<float16*>(target);
  for (std::size_t i = 0; i < count; ++i) out[i] = to_float16(source[i]);
}

inline constexpr float kNormEpsilon = 1e-5F;

// y = (x - mean) / sqrt(variance + epsilon) * gain + bias, row by row.
inline void layer_norm(const ConstMatrix& x, const float* gain, const float* bias, Matrix y) {
  const auto width = static_cast<std::size_t>(x.cols());
  const Eigen::Map<const Eigen::Array<float, 1, Eigen::Dynamic>, Eigen::Aligned64> g(gain,
                                                                                     x.cols());
  const Eigen::Map<const Eigen::Array<float, 1, Eigen::Dynamic>, Eigen::Aligned64> b(bias,
                                                                                     x.cols());
  for (Index r = 0; r < x.rows(); ++r) {
    const float mean = x.row(r).sum() / static_cast<float>(width);
    const float variance =
        (x.row(r).array() - mean).square().sum() / static_cast<float>(width);
    const float scale = 1.0F / std::sqrt(variance + kNormEpsilon);
    y.row(r).array() = (x.row(r).array() - mean) * scale * g + b;
  }
}

// Given dy, adds the gradient of x to dx and sets those of gain and bias.
inline void layer_norm_backward(const ConstMatrix& x, const float* gain, const ConstMatrix& dy,
                                Matrix dx, RowVector dgain, RowVector dbias, RowVector normal) {
  const auto width = static_cast<float>(x.cols());
  const Eigen::Map<const Eigen::Array<float, 1, Eigen::Dynamic>, Eigen::Aligned64> g(gain,
                                                                                     x.cols());
  dgain.setZero();
  dbias.setZero();
  for (Index r = 0; r < x.rows(); ++r) {
    const float mean = x.row(r).sum() / width;
    const float variance = (x.row(r).array() - mean).square().sum() / width;
    const float scale = 1.0F / std::sqrt(variance + kNormEpsilon);
    normal.array() = (x.row(r).array() - mean) * scale;
    dgain.array() += dy.row(r).array() * normal.array();
    dbias.array() += dy.row(r).array();
    const float sum = (dy.row(r).array() * g).sum() / width;
    const float projection = (dy.row(r).array() * g * normal.array()).sum() / width;
    dx.row(r).array() += (dy.row(r).array() * g - sum - normal.array() * projection) * scale;
  }
}

inline constexpr float kGeluScale = 0.7978845608028654F;  // sqrt(2 / pi)
inline constexpr float kGeluCubic = 0.044715F;

// y = x / 2 * (1 + tanh(scale * (x + cubic * x^3)))
inline void gelu(const ConstMatrix& x, Matrix y) {
  const auto a = x.array();
  y.array() = 0.5F * a * (1.0F + (kGeluScale * (a + kGeluCubic * a.cube())).tanh());
}

// dy becomes dx. Pieces of a row at a time, so that tanh is computed once and stays in cache.
inline void gelu_backward(const ConstMatrix& x, Matrix dy) {
  constexpr Index kPiece = 256;
  Eigen::Array<float, 1, Eigen::Dynamic, Eigen::RowMajor, 1, kPiece> t;
  for (Index r = 0; r < x.rows(); ++r) {
    for (Index first = 0; first < x.cols(); first += kPiece) {
      const Index count = std::min(kPiece, x.cols() - first);
      const auto a = x.row(r).segment(first, count).array();
      t = (kGeluScale * (a + kGeluCubic * a.cube())).tanh();
      dy.row(r).segment(first, count).array() *=
          0.5F * (1.0F + t) + 0.5F * a * (1.0F - t.square()) * kGeluScale *
                                  (1.0F + 3.0F * kGeluCubic * a.square());
    }
  }
}

}  // namespace terrace::gpt
