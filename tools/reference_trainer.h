// Training plainly in memory: what tiered training must equal bit for bit. Shares the layer
// functions with it and nothing else; storage and optimizer are written apart.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "terrace/adam.h"
#include "tools/gpt_model.h"
#include "tools/text_data.h"

namespace terrace::gpt {

// Memory on a 64-byte boundary.
class AlignedBytes {
 public:
  explicit AlignedBytes(std::size_t size = 0);
  std::byte* data() const { return data_.get(); }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Free> data_;
};

struct ReferenceTensor {
  std::string name;
  std::uint64_t elements = 0;
  AlignedBytes parameter;  // in the parameter dtype
  AlignedBytes gradient;   // in the gradient dtype
  std::vector<float> master_weight;
  std::vector<float> momentum;
  std::vector<float> variance;
};

// Thread rule: one thread.
class ReferenceTrainer {
 public:
  ReferenceTrainer(const GptConfig& config, const AdamOptions& options);

  // Returns the loss in nats.
  double step(const TextData::Batch& batch, double learning_rate);

  const std::vector<ReferenceTensor>& tensors() const { return tensors_; }

 private:
  void update(ReferenceTensor& tensor, double learning_rate) const;

  const GptConfig config_;
  const AdamOptions options_;
  std::uint64_t steps_ = 0;
  std::vector<ReferenceTensor> tensors_;
  std::vector<std::size_t> first_tensor_;      // of each layer
  std::vector<AlignedBytes> inputs_;           // of each layer
  std::vector<AlignedBytes> input_gradients_;  // of each layer
  AlignedBytes workspace_;
};

}  // namespace terrace::gpt
