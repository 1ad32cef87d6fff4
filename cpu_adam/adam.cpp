#include "terrace/adam.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>

#include "cpu_adam/adam_kernel.h"
#include "cpu_adam/floating_point.h"
#include "terrace/error.h"

namespace terrace {
namespace {

void require(bool holds, const char* name, double value, const char* range) {
  if (holds) return;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.9g", value);
  throw Error(ErrorCode::invalid_argument,
              std::string(name) + " is " + text.data() + "; it must be " + range);
}

bool fits_fp32(double value) { return std::abs(value) <= std::numeric_limits<float>::max(); }

void validate(const AdamOptions& options, double learning_rate, std::uint64_t step) {
  const auto not_negative = [](double value) { return value >= 0 && fits_fp32(value); };
  require(step > 0, "the step", static_cast<double>(step), "at least 1");
  require(options.beta1 >= 0 && options.beta1 < 1, "beta1", options.beta1, "in [0, 1)");
  require(options.beta2 >= 0 && options.beta2 < 1, "beta2", options.beta2, "in [0, 1)");
  // An epsilon that is 0 as fp32 would divide 0 by 0 wherever no gradient has arrived yet.
  require(fits_fp32(options.epsilon) && static_cast<float>(options.epsilon) > 0, "epsilon",
          options.epsilon, "positive and finite in fp32");
  require(not_negative(learning_rate), "the learning rate", learning_rate,
          "finite in fp32 and not negative");
  require(not_negative(options.weight_decay), "weight_decay", options.weight_decay,
          "finite in fp32 and not negative");
}

void require_moment(const char* name, DType dtype) {
  if (dtype == DType::fp32 || dtype == DType::bf16) return;
  throw Error(ErrorCode::invalid_argument, std::string("the ") + name + " is " +
                                               std::string(to_string(dtype)) +
                                               "; Adam keeps it in fp32 or bf16");
}

void* advance(void* array, DType dtype, std::uint64_t elements) {
  return static_cast<std::byte*>(array) + elements * size_of(dtype).count;
}

}  // namespace

ParameterStores parameter_stores(const AdamSlice& whole) {
  constexpr Bytes kLong = 1_MiB;
  return size_of(whole.parameter_dtype) * whole.elements < kLong ? ParameterStores::ordinary
                                                                 : ParameterStores::streaming;
}

AdamSlice part(const AdamSlice& slice, std::uint64_t first, std::uint64_t count) {
  AdamSlice result = slice;
  result.gradient = static_cast<const std::byte*>(slice.gradient) +
                    first * size_of(slice.gradient_dtype).count;
  result.master_weight += first;
  result.momentum = advance(slice.momentum, slice.momentum_dtype, first);
  result.variance = advance(slice.variance, slice.variance_dtype, first);
  if (slice.parameter != nullptr) {
    result.parameter = advance(slice.parameter, slice.parameter_dtype, first);
  }
  result.elements = count;
  return result;
}

void check(const AdamSlice& slice) {
  require_moment("momentum", slice.momentum_dtype);
  require_moment("variance", slice.variance_dtype);
}

void check(const GradientAddition& addition) {
  if (addition.sum_dtype == DType::fp32 || addition.sum_dtype == addition.gradient_dtype) return;
  throw Error(ErrorCode::invalid_argument,
              "gradients in " + std::string(to_string(addition.gradient_dtype)) +
                  " cannot be summed in " + std::string(to_string(addition.sum_dtype)) +
                  "; the sum is kept in fp32 or in their own dtype");
}

void check_group(std::uint32_t group, std::size_t groups) {
  if (group < groups) return;
  throw Error(ErrorCode::invalid_argument,
              "a slice is of group " + std::to_string(group) + ", and there are scalars for " +
                  std::to_string(groups) + " groups");
}

AdamScalars adam_scalars(const AdamOptions& options, double learning_rate, std::uint64_t step,
                         double gradient_factor) {
  validate(options, learning_rate, step);
  require(fits_fp32(gradient_factor) && static_cast<float>(gradient_factor) > 0,
          "the gradient factor", gradient_factor, "positive and finite in fp32");
  const auto t = static_cast<double>(step);
  const bool correct = options.bias_correction;
  const double correction1 = correct ? 1 - std::pow(options.beta1, t) : 1;
  const double correction2 = correct ? 1 - std::pow(options.beta2, t) : 1;
  const bool decoupled = options.mode == AdamMode::adamw;
  const double step_size = learning_rate / correction1;
  const double decay_factor = decoupled ? 1 - learning_rate * options.weight_decay : 1;
  require(fits_fp32(step_size) && fits_fp32(decay_factor), "the learning rate", learning_rate,
          "so small that its products with the corrections and weight_decay are finite in fp32");
  AdamScalars scalars;
  scalars.beta1 = static_cast<float>(options.beta1);
  scalars.one_minus_beta1 = static_cast<float>(1 - options.beta1);
  scalars.beta2 = static_cast<float>(options.beta2);
  scalars.one_minus_beta2 = static_cast<float>(1 - options.beta2);
  scalars.epsilon = static_cast<float>(options.epsilon);
  scalars.step_size = static_cast<float>(step_size);
  scalars.inverse_sqrt_correction2 = static_cast<float>(1 / std::sqrt(correction2));
  scalars.l2 = decoupled ? 0.0F : static_cast<float>(options.weight_decay);
  scalars.decay_factor = static_cast<float>(decay_factor);
  scalars.gradient_factor = static_cast<float>(gradient_factor);
  return scalars;
}

void adam_update(const AdamScalars& scalars, const AdamSlice& slice) {
  check(slice);
  const DefaultFloatingPoint environment;
  adam_kernels().front().update(scalars, slice, parameter_stores(slice));
}

void adam_update(std::span<const AdamScalars> groups, std::span<const AdamSlice> slices) {
  for (const auto& slice : slices) {
    check(slice);
    check_group(slice.group, groups.size());
  }
  const DefaultFloatingPoint environment;
  for (const auto& slice : slices) {
    adam_kernels().front().update(groups[slice.group], slice, parameter_stores(slice));
  }
}

void add_gradients(const GradientAddition& addition) {
  check(addition);
  const DefaultFloatingPoint environment;
  adam_kernels().front().add(addition);
}

std::vector<std::string> adam_instruction_sets() {
  std::vector<std::string> names;
  for (const auto& kernel : adam_kernels()) names.emplace_back(kernel.instruction_set);
  return names;
}

std::string adam_instruction_set() { return adam_kernels().front().instruction_set; }

}  // namespace terrace
