#include "terrace/adam.h"

#include <cmath>

#include "cpu_adam/adam_kernel.h"
#include "terrace/error.h"

namespace terrace {
namespace {

void require(bool holds, const char* name, double value, const char* range) {
  if (holds) return;
  throw Error(ErrorCode::invalid_argument, std::string(name) + " is " + std::to_string(value) +
                                               "; it must be " + range);
}

}  // namespace

AdamScalars adam_scalars(const AdamOptions& options, double learning_rate, std::uint64_t step) {
  const auto not_negative = [](double value) { return std::isfinite(value) && value >= 0; };
  require(step > 0, "the step", static_cast<double>(step), "at least 1");
  require(options.beta1 >= 0 && options.beta1 < 1, "beta1", options.beta1, "in [0, 1)");
  require(options.beta2 >= 0 && options.beta2 < 1, "beta2", options.beta2, "in [0, 1)");
  require(std::isfinite(options.epsilon) && options.epsilon > 0, "epsilon", options.epsilon,
          "positive and finite");
  require(not_negative(learning_rate), "the learning rate", learning_rate,
          "finite and not negative");
  require(not_negative(options.weight_decay), "weight_decay", options.weight_decay,
          "finite and not negative");
  const auto t = static_cast<double>(step);
  const bool correct = options.bias_correction;
  const double correction1 = correct ? 1 - std::pow(options.beta1, t) : 1;
  const double correction2 = correct ? 1 - std::pow(options.beta2, t) : 1;
  const bool decoupled = options.mode == AdamMode::adamw;
  AdamScalars scalars;
  scalars.beta1 = static_cast<float>(options.beta1);
  scalars.one_minus_beta1 = static_cast<float>(1 - options.beta1);
  scalars.beta2 = static_cast<float>(options.beta2);
  scalars.one_minus_beta2 = static_cast<float>(1 - options.beta2);
  scalars.epsilon = static_cast<float>(options.epsilon);
  scalars.step_size = static_cast<float>(learning_rate / correction1);
  scalars.inverse_sqrt_correction2 = static_cast<float>(1 / std::sqrt(correction2));
  scalars.l2 = decoupled ? 0.0F : static_cast<float>(options.weight_decay);
  scalars.decay_factor =
      decoupled ? static_cast<float>(1 - learning_rate * options.weight_decay) : 1.0F;
  return scalars;
}

void adam_update(const AdamScalars& scalars, const AdamSlice& slice) {
  adam_kernels().front().update(scalars, slice);
}

std::vector<std::string> adam_instruction_sets() {
  std::vector<std::string> names;
  for (const auto& kernel : adam_kernels()) names.push_back(kernel.instruction_set);
  return names;
}

std::string adam_instruction_set() { return adam_kernels().front().instruction_set; }

}  // namespace terrace
