// The reference GPT trained through a terrace::Engine: all that a trainer has to do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "terrace/engine.h"
#include "tools/gpt_model.h"
#include "tools/reference_trainer.h"
#include "tools/text_data.h"

namespace terrace::gpt {

// Thread rule: one thread.
class TieredTrainer {
 public:
  TieredTrainer(const GptConfig& config, const Config& engine, EnginePorts ports = {});

  struct Result {
    StepReport report;
    double loss = 0;  // mean cross-entropy in nats, unscaled, over all micro-batches
  };
  // keep(loss) is what a commit of this step keeps; see Step::finish().
  using Keep = std::function<std::string(double loss)>;
  // As many micro-batches as the engine's configuration says.
  Result step(const std::vector<TextData::Batch>& micro_batches, double learning_rate,
              const Keep& keep = {});

  // The logits [256] that follow `tokens`, of which the last context's worth is used.
  std::vector<float> next_logits(const std::vector<std::int32_t>& tokens);

  Engine& engine() { return engine_; }
  const GptConfig& config() const { return config_; }

 private:
  // Forward and backward of one micro-batch, enqueued; its loss comes with them.
  void enqueue(Step& step, const TextData::Batch& batch, double& loss);

  const GptConfig config_;
  Engine engine_;
};

// `count` bytes that follow `prompt`, drawn at temperature 0.8 from a generator seeded with `seed`.
std::string sample(TieredTrainer& trainer, const std::string& prompt, std::uint32_t count,
                   std::uint64_t seed);

// XXH3 over every tensor's parameters, master weights and moments, as 16 hexadecimal digits.
std::string state_hash(Engine& engine);

// Empty when every parameter and optimizer state has the same bits; otherwise names the first that
// has not.
std::string difference(Engine& engine, const ReferenceTrainer& reference);

}  // namespace terrace::gpt
