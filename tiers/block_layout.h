// Where a layer's tensors lie inside its block, and how the block is cut into segments.
//
// All contents of a layer that have one value per parameter (parameter, gradient, accumulated
// gradient, master weight, momentum, variance) share one layout in elements; their bytes differ
// only by the element size. A tensor starts at a multiple of 64 bytes, a block ends at a multiple
// of 4096 bytes, in the narrowest of these types and therefore in all of them.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "terrace/model.h"
#include "terrace/types.h"

namespace terrace {

inline constexpr Bytes kPage{4096};           // of every buffer, transfer and file offset
inline constexpr Bytes kTensorAlignment{64};  // of a tensor inside its block

// A run of elements of a block.
struct ElementRange {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  std::uint64_t end() const { return first + count; }
  friend bool operator==(ElementRange, ElementRange) = default;
};

struct BlockLayout {
  std::vector<ElementRange> tensors;  // by index into LayerSpec::tensors, ascending, disjoint
  std::uint64_t elements = 0;         // padding included; 0 when the layer has no parameters
  std::uint64_t segments = 0;
};

// Immutable; safe from any thread.
class ModelLayout {
 public:
  // `segment` is the size of a segment's parameters: a power of two, at least one page.
  // `accumulation` is the dtype of accumulated gradients: fp32, or that of gradients.
  // Throws Error(invalid_argument) for others and for what validate() refuses.
  ModelLayout(const ModelSpec& model, Bytes segment, DType accumulation = DType::fp32);

  const ModelSpec& model() const { return model_; }
  std::size_t layers() const { return blocks_.size(); }
  const BlockLayout& block(LayerId layer) const { return blocks_[layer.value]; }
  const LayerSpec& layer(LayerId layer) const { return model_.layers[layer.value]; }
  std::uint64_t segment_elements() const { return segment_elements_; }

  // Of one element of a per-parameter content.
  DType dtype(Content content) const;
  Bytes element_size(Content content) const { return size_of(dtype(content)); }
  // Of the whole block, or of `elements` of it.
  Bytes block_size(LayerId layer, Content content) const;
  // A layer's saved input or input gradient, rounded up to pages.
  Bytes input_size(LayerId layer) const;

  // Elements of segments [first, first + count) of a layer; the last segment may be short.
  ElementRange segment_range(LayerId layer, std::uint64_t first, std::uint64_t count) const;

  struct TensorPlace {
    LayerId layer;
    std::size_t index = 0;  // into LayerSpec::tensors
  };
  // Throws Error(invalid_argument) when no tensor has this name.
  TensorPlace find(std::string_view tensor) const;

 private:
  ModelSpec model_;
  DType accumulation_;
  std::uint64_t segment_elements_ = 0;
  std::vector<BlockLayout> blocks_;
};

}  // namespace terrace
