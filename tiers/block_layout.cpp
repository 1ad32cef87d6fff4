#include "tiers/block_layout.h"

#include <algorithm>
#include <bit>

#include "terrace/error.h"

namespace terrace {
namespace {

BlockLayout lay_out(const LayerSpec& layer, std::uint64_t narrowest_bytes,
                    std::uint64_t segment_elements) {
  BlockLayout block;
  std::uint64_t end = 0;
  for (const auto& tensor : layer.tensors) {
    const std::uint64_t first = round_up(end, kTensorAlignment.count / narrowest_bytes);
    block.tensors.push_back({first, tensor.elements()});
    end = first + tensor.elements();
  }
  block.elements = round_up(end, kPage.count / narrowest_bytes);
  block.segments = (block.elements + segment_elements - 1) / segment_elements;
  return block;
}

}  // namespace

ModelLayout::ModelLayout(const ModelSpec& model, Bytes segment, DType accumulation)
    : model_(model), accumulation_(accumulation) {
  validate(model);
  if (accumulation != DType::fp32 && accumulation != model.gradient_dtype) {
    throw Error(ErrorCode::invalid_argument,
                "gradients in " + std::string(to_string(model.gradient_dtype)) +
                    " cannot be accumulated in " + std::string(to_string(accumulation)) +
                    "; use fp32 or their own dtype");
  }
  if (segment < kPage || !std::has_single_bit(segment.count) || segment > 1_GiB) {
    throw Error(ErrorCode::invalid_argument,
                "a segment of " + std::to_string(segment.count) +
                    " bytes: it must be a power of two from 4096 to 1 GiB");
  }
  const std::uint64_t narrowest =
      std::min(size_of(model.parameter_dtype), size_of(model.gradient_dtype)).count;
  segment_elements_ = segment.count / narrowest;
  for (const auto& layer : model_.layers) {
    blocks_.push_back(lay_out(layer, narrowest, segment_elements_));
  }
}

DType ModelLayout::dtype(Content content) const {
  if (content == Content::parameter) return model_.parameter_dtype;
  if (content == Content::gradient) return model_.gradient_dtype;
  if (content == Content::accumulated_gradient) return accumulation_;
  TERRACE_CHECK(class_of(content) == TensorClass::optimizer_state);
  return DType::fp32;
}

Bytes ModelLayout::block_size(LayerId layer, Content content) const {
  return block(layer).elements * element_size(content);
}

Bytes ModelLayout::input_size(LayerId layer) const {
  return round_up(model_.layers[layer.value].input_bytes, kPage);
}

ElementRange ModelLayout::segment_range(LayerId layer, std::uint64_t first,
                                        std::uint64_t count) const {
  const std::uint64_t begin = std::min(first * segment_elements_, block(layer).elements);
  const std::uint64_t end = std::min((first + count) * segment_elements_, block(layer).elements);
  return {begin, end - begin};
}

ModelLayout::TensorPlace ModelLayout::find(std::string_view tensor) const {
  for (std::uint32_t l = 0; l < model_.layers.size(); ++l) {
    const auto& tensors = model_.layers[l].tensors;
    const auto found = std::find_if(tensors.begin(), tensors.end(),
                                    [&](const TensorSpec& spec) { return spec.name == tensor; });
    if (found != tensors.end()) {
      return {LayerId{l}, static_cast<std::size_t>(found - tensors.begin())};
    }
  }
  throw Error(ErrorCode::invalid_argument,
              "the model has no tensor named '" + std::string(tensor) + "'");
}

}  // namespace terrace
