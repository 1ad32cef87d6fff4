#include "tools/tiered_trainer.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>

#include "tools/gpt_layers.h"

namespace terrace::gpt {
namespace {

constexpr std::size_t kReadElements = 1 << 18;  // of a tensor at a time
constexpr double kTemperature = 0.8;

LayerBuffers buffers_of(const LayerView& view, std::size_t tensors) {
  LayerBuffers b;
  for (std::size_t t = 0; t < tensors; ++t) {
    b.parameters[t] = view.parameter(t);
    b.gradients[t] = view.gradient(t);
  }
  b.input = view.input();
  b.output = reinterpret_cast<float*>(view.output());
  b.output_gradient = reinterpret_cast<const float*>(view.output_gradient());
  b.input_gradient = reinterpret_cast<float*>(view.input_gradient());
  b.workspace = view.workspace();
  return b;
}

constexpr Content kStateContents[] = {Content::parameter, Content::master_weight,
                                      Content::momentum, Content::variance};

// Calls piece(values, first) for a tensor's content, in pieces.
template <class Piece>
void for_each_piece(Engine& engine, const std::string& tensor, std::uint64_t elements,
                    Content content, Piece&& piece) {
  std::vector<float> values;
  for (std::uint64_t first = 0; first < elements; first += kReadElements) {
    values.resize(std::min<std::uint64_t>(kReadElements, elements - first));
    engine.read(tensor, content, first, values);
    if (!piece(std::span<const float>(values), first)) return;
  }
}

float expected(const ReferenceTensor& tensor, Content content, DType dtype, std::uint64_t i) {
  switch (content) {
    case Content::master_weight: return tensor.master_weight[i];
    case Content::momentum: return tensor.momentum[i];
    case Content::variance: return tensor.variance[i];
    default:
      if (dtype == DType::bf16) return to_float(tensor.parameter.as<const bfloat16>()[i]);
      if (dtype == DType::fp16) return to_float(tensor.parameter.as<const float16>()[i]);
      return tensor.parameter.as<const float>()[i];
  }
}

}  // namespace

TieredTrainer::TieredTrainer(const GptConfig& config, const Config& engine, EnginePorts ports)
    : config_(config),
      engine_(engine, make_model(config), make_initializer(config), std::move(ports)) {}

TieredTrainer::Result TieredTrainer::step(const std::vector<TextData::Batch>& micro_batches,
                                          double learning_rate, const Keep& keep) {
  Result result;
  std::vector<double> losses(micro_batches.size());
  auto step = engine_.begin_step({learning_rate});
  for (std::size_t m = 0; m < losses.size(); ++m) enqueue(step, micro_batches[m], losses[m]);
  const auto kept = [&](const StepReport&) {
    result.loss = mean(losses);
    return keep ? keep(result.loss) : std::string{};
  };
  result.report = step.finish(kept);
  return result;
}

void TieredTrainer::enqueue(Step& step, const TextData::Batch& batch, double& loss) {
  const auto run = [&](LayerView& view, auto function) {
    const auto l = view.layer().value;
    auto b = buffers_of(view, engine_.model().layers[l].tensors.size());
    b.targets = batch.targets.data();
    b.loss = &loss;
    b.loss_scale = static_cast<float>(step.loss_scale());
    view.launch([&config = config_, &batch, function, l, b] {
      if (l == 0)
        std::memcpy(b.input, batch.inputs.data(), batch.inputs.size() * sizeof(std::int32_t));
      function(config, l, b);
    });
  };
  for (std::uint32_t l = 0; l < config_.layer_count(); ++l) {
    auto view = step.forward(LayerId{l});
    if (l < config_.head_layer()) run(view, forward);  // the head's backward makes the loss
  }
  for (std::uint32_t l = config_.layer_count(); l-- > 0;) {
    auto view = step.backward(LayerId{l});
    run(view, backward);
    view.submit_gradients();
  }
}

std::vector<float> TieredTrainer::next_logits(const std::vector<std::int32_t>& tokens) {
  GptConfig one = config_;
  one.batch = 1;
  const std::size_t used = std::min<std::size_t>(tokens.size(), one.context);
  std::vector<std::int32_t> input(one.context, 0);
  std::copy(tokens.end() - static_cast<std::ptrdiff_t>(used), tokens.end(), input.begin());
  std::vector<float> logits(std::size_t{one.context} * kVocabulary);
  auto pass = engine_.begin_evaluation();
  for (std::uint32_t l = 0; l < config_.layer_count(); ++l) {
    const auto view = pass.forward(LayerId{l});
    auto b = buffers_of(view, engine_.model().layers[l].tensors.size());
    b.logits = logits.data();
    view.launch([one, l, b, &input] {
      if (l == 0) std::memcpy(b.input, input.data(), input.size() * sizeof(std::int32_t));
      forward(one, l, b);
    });
  }
  pass.finish();
  const auto* last = logits.data() + (used - 1) * kVocabulary;
  return {last, last + kVocabulary};
}

std::string sample(TieredTrainer& trainer, const std::string& prompt, std::uint32_t count,
                   std::uint64_t seed) {
  std::vector<std::int32_t> tokens;
  for (const char c : prompt) tokens.push_back(static_cast<unsigned char>(c));
  if (tokens.empty()) tokens.push_back('\n');
  std::string text;
  for (std::uint32_t n = 0; n < count; ++n) {
    const auto logits = trainer.next_logits(tokens);
    const float highest = *std::max_element(logits.begin(), logits.end());
    std::vector<double> weights;
    double sum = 0;
    for (const float logit : logits) {
      weights.push_back(std::exp(static_cast<double>(logit - highest) / kTemperature));
      sum += weights.back();
    }
    double left = sum * static_cast<double>(mix(seed, n) >> 11) * 0x1p-53;
    std::int32_t token = 0;
    while (token + 1 < static_cast<std::int32_t>(kVocabulary) &&
           left >= weights[static_cast<std::size_t>(token)]) {
      left -= weights[static_cast<std::size_t>(token++)];
    }
    tokens.push_back(token);
    text += static_cast<char>(token);
  }
  return text;
}

std::string state_hash(Engine& engine) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       XXH3_freeState);
  XXH3_64bits_reset(state.get());
  for (const auto& layer : engine.model().layers) {
    for (const auto& tensor : layer.tensors) {
      for (const Content content : kStateContents) {
        for_each_piece(engine, tensor.name, tensor.elements(), content,
                       [&](std::span<const float> values, std::uint64_t) {
                         XXH3_64bits_update(state.get(), values.data(), values.size_bytes());
                         return true;
                       });
      }
    }
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx",
                static_cast<unsigned long long>(XXH3_64bits_digest(state.get())));
  return text;
}

std::string difference(Engine& engine, const ReferenceTrainer& reference) {
  std::string found;
  for (const auto& tensor : reference.tensors()) {
    for (const Content content : kStateContents) {
      if (!found.empty()) return found;
      const DType dtype = engine.model().parameter_dtype;
      for_each_piece(engine, tensor.name, tensor.elements, content,
                     [&](std::span<const float> values, std::uint64_t first) {
                       for (std::size_t i = 0; i < values.size() && found.empty(); ++i) {
                         const float want = expected(tensor, content, dtype, first + i);
                         if (std::bit_cast<std::uint32_t>(values[i]) ==
                             std::bit_cast<std::uint32_t>(want)) {
                           continue;
                         }
                         found = std::string(to_string(content)) + " of " + tensor.name +
                                 " element " + std::to_string(first + i) + " is " +
                                 std::to_string(values[i]) + ", in memory it is " +
                                 std::to_string(want);
                       }
                       return found.empty();
                     });
    }
  }
  return found;
}

}  // namespace terrace::gpt
