// The layer functions of the reference GPT, on raw (device) memory: what a trainer brings, and all
// that tiered and in-memory training share.
//
// Every function is deterministic: the same bytes in give the same bytes out, wherever the buffers
// lie, as long as each is 64-byte aligned. Backward recomputes what it needs from the saved input.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "tools/gpt_model.h"

namespace terrace::gpt {

inline constexpr std::size_t kMaxTensors = 12;

struct LayerBuffers {
  std::array<const std::byte*, kMaxTensors> parameters{};  // by tensor, in the parameter dtype
  std::array<std::byte*, kMaxTensors> gradients{};         // backward: every element is written
  std::byte* input = nullptr;                 // embedding: int32 [rows]; others: fp32 [rows, width]
  float* output = nullptr;                    // forward but head: fp32 [rows, width]
  const float* output_gradient = nullptr;     // backward but head: fp32 [rows, width]
  float* input_gradient = nullptr;            // backward but embedding: fp32 [rows, width]
  std::byte* workspace = nullptr;
  const std::int32_t* targets = nullptr;      // head: [rows]
  double* loss = nullptr;                     // head: mean cross-entropy in nats, written
  float loss_scale = 1;                       // head backward: its gradients are multiplied with it
  float* logits = nullptr;                    // head forward: [rows, 256] if wanted, or nullptr
};

// Layer 0 is the embedding, the last one the head.
void forward(const GptConfig& config, std::uint32_t layer, const LayerBuffers& buffers);
void backward(const GptConfig& config, std::uint32_t layer, const LayerBuffers& buffers);

// Exactly what the functions use.
Bytes forward_workspace(const GptConfig& config, std::uint32_t layer);
Bytes backward_workspace(const GptConfig& config, std::uint32_t layer);

// Floating-point operations per second of the layer functions' own matrix product, in 10^12.
double measure_tflops(const GptConfig& config);

}  // namespace terrace::gpt
