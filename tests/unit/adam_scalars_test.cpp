// The scalars of a step, and what Adam and AdamW make of them: golden values, and the textbook's
// algorithm in double within a bound derived from the roundings.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "terrace/adam.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr double kUnit = 0x1p-24;  // the largest relative error of one rounding to fp32

std::string refusal(const AdamOptions& options, double learning_rate, std::uint64_t step) {
  try {
    adam_scalars(options, learning_rate, step);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "";
}

TEST(AdamScalars, AreDerivedInDouble) {
  const auto s = adam_scalars({}, 1e-3, 1);
  // 1 - 0.999F is 0.00100004673.
  EXPECT_EQ(s.one_minus_beta2, 0.001F);
  EXPECT_EQ(s.one_minus_beta1, 0.1F);
  EXPECT_EQ(s.step_size, 0.01F);                  // 1e-3 / (1 - 0.9)
  EXPECT_FLOAT_EQ(s.inverse_sqrt_correction2, 31.6227766F);  // 1 / sqrt(1 - 0.999)
  EXPECT_EQ(s.epsilon, 1e-8F);
}

TEST(AdamScalars, OfAVeryLateStepHaveNoCorrectionLeft) {
  for (const std::uint64_t step : {std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
    const auto s = adam_scalars({}, 1e-3, step);
    EXPECT_EQ(s.step_size, 1e-3F);
    EXPECT_EQ(s.inverse_sqrt_correction2, 1.0F);
  }
}

TEST(AdamScalars, CanDoWithoutBiasCorrection) {
  const auto s = adam_scalars({.bias_correction = false}, 1e-3, 1);
  EXPECT_EQ(s.step_size, 1e-3F);
  EXPECT_EQ(s.inverse_sqrt_correction2, 1.0F);
}

TEST(AdamScalars, PutTheDecayWhereTheModeWantsIt) {
  const auto adam = adam_scalars({.mode = AdamMode::adam, .weight_decay = 0.25}, 0.5, 1);
  EXPECT_EQ(adam.l2, 0.25F);
  EXPECT_EQ(adam.decay_factor, 1.0F);
  const auto adamw = adam_scalars({.mode = AdamMode::adamw, .weight_decay = 0.25}, 0.5, 1);
  EXPECT_EQ(adamw.l2, 0.0F);
  EXPECT_EQ(adamw.decay_factor, 0.875F);
}

TEST(AdamScalars, RoundTheGradientFactorOnce) {
  EXPECT_EQ(adam_scalars({}, 1e-3, 1).gradient_factor, 1.0F);
  // Rounded on its own, 1 / 3 would give 0x1.c71c74p-5.
  EXPECT_EQ(adam_scalars({}, 1e-3, 1, 1.0 / 3 / 6).gradient_factor, 0x1.c71c72p-5F);
}

TEST(AdamScalars, RefuseAGradientFactorThatIsNone) {
  for (const double factor : {0.0, -1.0, 1e-60, 1e60, std::nan("")}) {
    EXPECT_THROW(adam_scalars({}, 1e-3, 1, factor), Error) << factor;
  }
}

TEST(AdamScalars, RefuseWhatHasNoMeaningAndNameIt) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  struct Case {
    AdamOptions options;
    double learning_rate;
    std::uint64_t step;
    const char* text;
  };
  const Case cases[] = {
      {{}, 1e-3, 0, "the step is 0;"},
      {{.beta1 = 1}, 1e-3, 1, "beta1 is 1;"},
      {{.beta1 = -0.5}, 1e-3, 1, "beta1 is -0.5;"},
      {{.beta1 = kNan}, 1e-3, 1, "beta1 is nan;"},
      {{.beta2 = 1.5}, 1e-3, 1, "beta2 is 1.5;"},
      {{.beta2 = -1e-9}, 1e-3, 1, "beta2 is -1e-09;"},
      {{.epsilon = 0}, 1e-3, 1, "epsilon is 0;"},
      {{.epsilon = -1e-8}, 1e-3, 1, "epsilon is -1e-08;"},
      {{.epsilon = 1e-60}, 1e-3, 1, "epsilon is 1e-60;"},
      {{.epsilon = kInfinity}, 1e-3, 1, "epsilon is inf;"},
      {{.weight_decay = -1}, 1e-3, 1, "weight_decay is -1;"},
      {{.weight_decay = kNan}, 1e-3, 1, "weight_decay is nan;"},
      {{}, -1e-3, 1, "the learning rate is -0.001;"},
      {{}, kNan, 1, "the learning rate is nan;"},
      {{}, kInfinity, 1, "the learning rate is inf;"},
      {{}, 1e38, 1, "the learning rate is 1e+38;"},  // a step size of 1e39
      {{.weight_decay = 1e30}, 1e30, 1, "the learning rate is 1e+30;"},
  };
  for (const auto& [options, learning_rate, step, text] : cases) {
    const auto said = refusal(options, learning_rate, step);
    EXPECT_EQ(said.substr(0, std::string(text).size()), text);
  }
  EXPECT_EQ(refusal({.beta1 = 0, .beta2 = 0}, 0, 1), "");
}

struct Element {
  float weight = 0, momentum = 0, variance = 0;

  void update(const AdamOptions& options, double learning_rate, std::uint64_t step,
              float gradient, double factor = 1) {
    adam_update(adam_scalars(options, learning_rate, step, factor),
                {.gradient = &gradient, .master_weight = &weight, .momentum = &momentum,
                 .variance = &variance, .elements = 1});
  }
};

// The same with moments in bf16.
struct NarrowElement {
  float weight = 0;
  bfloat16 momentum{}, variance{};

  void update(const AdamOptions& options, double learning_rate, std::uint64_t step,
              float gradient, double factor) {
    adam_update(adam_scalars(options, learning_rate, step, factor),
                {.gradient = &gradient, .master_weight = &weight, .momentum = &momentum,
                 .variance = &variance, .elements = 1, .momentum_dtype = DType::bf16,
                 .variance_dtype = DType::bf16});
  }
};

double value(float x) { return static_cast<double>(x); }
double value(bfloat16 x) { return static_cast<double>(to_float(x)); }

// From moments of 0 the first step moves by learning_rate * g / (|g| + epsilon). The L2 term turns
// the gradient of -0.1 into 0.1; decoupled decay takes 0.1 * 0.2 off the weight and leaves it.
TEST(Adam, L2AndDecoupledDecayDifferAsComputedByHand) {
  Element adam{.weight = 1};
  adam.update({.mode = AdamMode::adam, .weight_decay = 0.2}, 0.1, 1, -0.1F);
  EXPECT_NEAR(adam.weight, 0.9, 4e-7);
  EXPECT_NEAR(adam.momentum, 0.01, 1e-8);
  EXPECT_NEAR(adam.variance, 1e-5, 1e-11);
  Element adamw{.weight = 1};
  adamw.update({.mode = AdamMode::adamw, .weight_decay = 0.2}, 0.1, 1, -0.1F);
  EXPECT_NEAR(adamw.weight, 1.08, 4e-7);
  EXPECT_NEAR(adamw.momentum, -0.01, 1e-8);
  EXPECT_NEAR(adamw.variance, 1e-5, 1e-11);
}

// Kingma & Ba's algorithm 1 and Loshchilov & Hutter's algorithm 2 in double, with the bound on what
// fp32 makes of them: relative errors in units of 2^-24, to first order, for positive gradients and
// weights, where nothing cancels.
struct Textbook {
  double weight, momentum = 0, variance = 0;
  double store_units = 0;   // the rounding of a moment when it is stored: 2^16 in bf16
  double weight_error = 0;  // absolute
  double momentum_units = 0, variance_units = 0;

  void update(const AdamOptions& o, double learning_rate, int step, double gradient) {
    const bool l2 = o.mode == AdamMode::adam;
    const double g = l2 ? gradient + o.weight_decay * weight : gradient;
    const double decay = l2 ? 1 : 1 - learning_rate * o.weight_decay;
    momentum = o.beta1 * momentum + (1 - o.beta1) * g;
    variance = o.beta2 * variance + (1 - o.beta2) * g * g;
    const double m = momentum / (1 - std::pow(o.beta1, step));
    const double v = variance / (1 - std::pow(o.beta2, step));
    const double change = learning_rate * m / (std::sqrt(v) + o.epsilon);
    // g': the rounded factor and its product; the error of w and of the decay, the fma's own.
    const double g_units = 2 + (l2 ? weight_error / weight / kUnit + 2 : 0);
    // Either the old value times a rounded beta, or a rounded 1 - beta and its products; one fma.
    momentum_units = std::max(momentum_units + 2, g_units + 3);
    variance_units = std::max(variance_units + 2, 2 * g_units + 4);
    // Half of v's, sqrt, the rounded correction, the fma; then the division and the step size.
    const double change_units = momentum_units + (variance_units / 2 + 3) + 2;
    const double old_weight = weight;
    weight = decay * weight - change;
    // The rounded decay factor, its product, and the fma's rounding of the new weight.
    weight_error = decay * weight_error + kUnit * (2 * decay * old_weight + weight) +
                   kUnit * change_units * change;
    momentum_units += store_units;
    variance_units += store_units;
  }
};

// `slack` stands for the terms of second order.
template <class AnyElement>
void expect_bounded(AdamMode mode, double store_units, double slack) {
  const AdamOptions options{.mode = mode, .weight_decay = 0.1};
  const double learning_rate = 0.01;
  const double factor = 0.3;
  AnyElement element{.weight = 1.5F};
  Textbook textbook{.weight = 1.5, .store_units = store_units};
  for (int step = 1; step <= 30; ++step) {
    const float gradient = 0.125F + 0.0625F * static_cast<float>(step % 7);
    element.update(options, learning_rate, static_cast<std::uint64_t>(step), gradient, factor);
    textbook.update(options, learning_rate, step, static_cast<double>(gradient) * factor);
    EXPECT_NEAR(element.weight, textbook.weight, slack * textbook.weight_error) << step;
    EXPECT_NEAR(value(element.momentum), textbook.momentum,
                slack * kUnit * textbook.momentum_units * textbook.momentum) << step;
    EXPECT_NEAR(value(element.variance), textbook.variance,
                slack * kUnit * textbook.variance_units * textbook.variance) << step;
  }
  // Or the bound would prove little.
  EXPECT_LT(textbook.weight_error, store_units == 0 ? 1e-5 : 0.03);
}

TEST(Adam, StaysWithinTheDerivedBoundOfTheTextbook) {
  for (const auto mode : {AdamMode::adam, AdamMode::adamw}) {
    expect_bounded<Element>(mode, 0, 1 + 1e-4);
    expect_bounded<NarrowElement>(mode, 0x1p16, 1.2);
  }
}

}  // namespace
}  // namespace terrace
