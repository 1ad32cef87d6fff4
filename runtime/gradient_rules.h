// What a step's gradients decide, all of them together: the norm, the clip factor, the loss scale,
// and whether the step counts at all. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "terrace/config.h"

namespace terrace {

// The norm over all blocks from the sums of squares of each, in the order of layers:
// sqrt(sum_of_leaves(block sums)) * factor. Doubles; the same for every cut into runs and tiers.
double gradient_norm(std::span<const double> block_sums, double factor);

// min(1, max_norm / (norm + 1e-6)), as PyTorch's clip_grad_norm_; 1 when max_norm is 0.
double clip_factor(double norm, double max_norm);

// What every gradient is multiplied with: clip / divisor, positive in fp32.
double gradient_factor(double clip, double divisor);

// The loss scale of fp16 training. Constant, or dynamic: halved (not below `minimum`) when
// `hysteresis` overflows were seen since it last grew or shrank, doubled after `window` steps
// without one.
// Thread rule: one thread at a time.
class LossScaler {
 public:
  explicit LossScaler(const LossScaleConfig& config);

  double scale() const { return scale_; }
  void count(bool overflow);

  // What goes on after a resume; fixed length.
  std::string save() const;
  // Takes it off the front of `bytes`. Throws Error(corrupt) when it is not there.
  void restore(std::string& bytes);

 private:
  const LossScaleConfig config_;
  double scale_ = 1;
  std::uint32_t good_steps_ = 0;      // since the scale last changed or an overflow was seen
  std::uint32_t overflows_left_ = 1;  // that are forgiven, and one
};

}  // namespace terrace
