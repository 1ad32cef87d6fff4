// One transformer block: pre-norm causal attention and MLP.
#pragma once

#include "tools/gpt_layers.h"

namespace terrace::gpt {

void block_forward(const GptConfig& config, const LayerBuffers& buffers);
void block_backward(const GptConfig& config, const LayerBuffers& buffers);
Bytes block_forward_workspace(const GptConfig& config);
Bytes block_backward_workspace(const GptConfig& config);

}  // namespace terrace::gpt
