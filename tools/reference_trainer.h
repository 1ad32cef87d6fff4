// Training plainly in memory: what tiered training must equal bit for bit. Shares the layer
// functions with it and nothing else; storage, norm, loss scale and optimizer are written apart.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "terrace/adam.h"
#include "terrace/config.h"
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
  AlignedBytes gradient;   // of one micro-batch, in the gradient dtype
  AlignedBytes sum;        // of several, in the dtype of accumulation
  std::vector<float> master_weight;
  std::vector<float> momentum;
  std::vector<float> variance;
};

// What is done with the gradients before the update.
struct ReferenceGradients {
  double clip_norm = 0;  // 0: not clipped
  LossScaleConfig loss_scale;
  std::uint32_t micro_batches = 1;  // of a step
  DType accumulation = DType::fp32;
};

struct ReferenceResult {
  double loss = 0;       // in nats
  bool skipped = false;  // a gradient was not finite: nothing has changed but the loss scale
  std::optional<double> norm;  // of all gradients, unscaled; when all are finite
};

// Thread rule: one thread.
class ReferenceTrainer {
 public:
  ReferenceTrainer(const GptConfig& config, const AdamOptions& options,
                   const ReferenceGradients& gradients = {});

  ReferenceResult step(const std::vector<TextData::Batch>& micro_batches, double learning_rate);

  double loss_scale() const { return loss_scale_; }  // of the next step
  std::uint64_t steps() const { return steps_; }     // that were not skipped

  const std::vector<ReferenceTensor>& tensors() const { return tensors_; }

 private:
  double compute_gradients(const TextData::Batch& batch);  // the loss
  void accumulate(ReferenceTensor& tensor, bool first) const;
  // What the update is made from.
  DType kept_dtype() const;
  const AlignedBytes& kept(const ReferenceTensor& tensor) const;
  bool all_finite() const;
  double norm() const;
  double layer_sum(std::size_t layer) const;
  void adapt_loss_scale(bool overflow);
  void update(ReferenceTensor& tensor, double learning_rate, double factor) const;

  const GptConfig config_;
  const AdamOptions options_;
  const ReferenceGradients rules_;
  std::uint64_t steps_ = 0;
  double loss_scale_ = 1;
  std::uint64_t without_overflow_ = 0;  // steps, since one or since the scale grew
  std::uint64_t overflows_ = 0;         // since the scale grew
  std::vector<ReferenceTensor> tensors_;
  std::vector<std::size_t> first_tensor_;      // of each layer
  std::vector<AlignedBytes> inputs_;           // of each layer
  std::vector<AlignedBytes> input_gradients_;  // of each layer
  AlignedBytes workspace_;
};

}  // namespace terrace::gpt
