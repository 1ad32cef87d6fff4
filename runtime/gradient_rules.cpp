#include "runtime/gradient_rules.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "terrace/adam.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr double kNormSlack = 1e-6;
constexpr double kLargestScale = 0x1p60;  // far beyond fp16; keeps products finite in fp32
// A line, so that people can read what a store keeps. 17 digits give a double back.
constexpr const char* kSavedForm = "loss_scale %-24.17g good_steps %10u overflows_left %10u\n";
constexpr const char* kReadForm = "loss_scale %lf good_steps %u overflows_left %u";
constexpr std::size_t kSavedBytes = 84;

}  // namespace

double gradient_norm(std::span<const double> block_sums, double factor) {
  return std::sqrt(sum_of_leaves(block_sums)) * factor;
}

double clip_factor(double norm, double max_norm) {
  if (max_norm <= 0) return 1;
  return std::min(1.0, max_norm / (norm + kNormSlack));
}

double gradient_factor(double clip, double divisor) {
  return std::max(clip / divisor, static_cast<double>(std::numeric_limits<float>::denorm_min()));
}

LossScaler::LossScaler(const LossScaleConfig& config)
    : config_(config),
      scale_(!config.enabled       ? 1
             : config.constant > 0 ? config.constant
                                   : std::ldexp(1.0, static_cast<int>(config.initial_power))),
      overflows_left_(config.hysteresis) {}

void LossScaler::count(bool overflow) {
  if (!config_.enabled || config_.constant > 0) return;
  if (overflow) {
    good_steps_ = 0;
    if (overflows_left_ > 1) {
      --overflows_left_;
    } else {
      scale_ = std::max(scale_ / 2, config_.minimum);
    }
    return;
  }
  if (++good_steps_ < config_.window) return;
  good_steps_ = 0;
  overflows_left_ = config_.hysteresis;
  scale_ = std::min(scale_ * 2, kLargestScale);
}

std::string LossScaler::save() const {
  std::array<char, kSavedBytes + 1> text{};
  const int used = std::snprintf(text.data(), text.size(), kSavedForm, scale_, good_steps_,
                                 overflows_left_);
  TERRACE_CHECK(used == static_cast<int>(kSavedBytes));
  return text.data();
}

void LossScaler::restore(std::string& bytes) {
  const auto own = bytes.substr(0, kSavedBytes);
  LossScaler read = *this;
  const int fields = std::sscanf(own.c_str(), kReadForm, &read.scale_, &read.good_steps_,
                                 &read.overflows_left_);
  if (fields != 3 || read.save() != own) {
    throw Error(ErrorCode::corrupt,
                "the store's last commit does not hold the loss scale; discard it or turn loss "
                "scaling off");
  }
  scale_ = read.scale_;
  good_steps_ = read.good_steps_;
  overflows_left_ = read.overflows_left_;
  bytes.erase(0, kSavedBytes);
}

}  // namespace terrace
