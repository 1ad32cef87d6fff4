// The immutable description of a model: what the planner needs to know, and nothing else.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "terrace/dtype.h"
#include "terrace/types.h"

namespace terrace {

struct TensorSpec {
  std::string name;                  // unique in the model; the key under which it is read back
  std::vector<std::uint64_t> shape;  // row-major; empty: a scalar; a zero dimension: no elements

  std::uint64_t elements() const {
    std::uint64_t product = 1;
    for (const auto dimension : shape) product *= dimension;
    return product;
  }
};

// One step of the forward order: parameters that are needed together, an input, an output (the next
// layer's input) and scratch. Sizes are exact for one micro-batch.
struct LayerSpec {
  std::string name;                  // unique in the model
  std::vector<TensorSpec> tensors;
  Bytes input_bytes;                 // saved from forward to backward as class activation
  bool input_gradient = true;        // false: nothing below needs this layer's input gradient
  Bytes forward_workspace;           // device scratch of the forward function
  Bytes backward_workspace;          // device scratch of the backward function
  double forward_flops = 0;          // for the forecast; 0: unknown
  double backward_flops = 0;         // recomputation included
};

struct ModelSpec {
  std::vector<LayerSpec> layers;     // in forward order
  DType parameter_dtype = DType::bf16;
  DType gradient_dtype = DType::bf16;
};

// Fills `values` with the initial values of elements [first, first + values.size()) of a tensor.
// Called for every piece, in any order and on any thread, one call at a time; must depend on its
// arguments alone, so that a model larger than memory can be created piece by piece, and again.
using Initializer =
    std::function<void(const TensorSpec& tensor, std::uint64_t first, std::span<float> values)>;

// Throws Error(invalid_argument) that names the layer or tensor: no layers, empty or repeated
// names, element counts that overflow.
void validate(const ModelSpec& model);

// Elements of all tensors, without padding.
std::uint64_t parameter_count(const ModelSpec& model);

}  // namespace terrace
