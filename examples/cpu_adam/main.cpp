// Terrace's Adam in the place of an application's own: two parameter groups, bf16 gradients that
// carry a loss scale, clipping by the global norm, a step with a bad gradient left out.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "terrace/adam.h"

namespace {

using terrace::bfloat16;

// What the application has for each tensor.
struct Tensor {
  std::vector<bfloat16> parameter, gradient;      // what the device computes with
  std::vector<float> master, momentum, variance;  // what Adam keeps
  std::uint32_t group = 0;                        // 0: weights, 1: biases and gains

  Tensor(std::size_t elements, std::uint32_t its_group)
      : parameter(elements), gradient(elements), master(elements), momentum(elements),
        variance(elements), group(its_group) {}

  terrace::AdamSlice slice() {
    return {.gradient = gradient.data(), .gradient_dtype = terrace::DType::bf16,
            .master_weight = master.data(), .momentum = momentum.data(),
            .variance = variance.data(), .parameter = parameter.data(),
            .parameter_dtype = terrace::DType::bf16, .elements = master.size(), .group = group};
  }
};

class Optimizer {
 public:
  explicit Optimizer(std::vector<Tensor>& tensors) : tensors_(tensors) {}

  // False: a gradient was not finite, nothing changed, and the loss scale is half of what it was.
  bool step(double learning_rate) {
    double sum_of_squares = 0;
    for (const auto& tensor : tensors_) {
      sum_of_squares += terrace::summarize({tensor.gradient.data(), terrace::DType::bf16,
                                            tensor.gradient.size()}).sum_of_squares;
    }
    if (!std::isfinite(sum_of_squares)) {
      loss_scale_ /= 2;
      return false;
    }
    const double norm = std::sqrt(sum_of_squares) / loss_scale_;
    const double factor = std::min(1.0, kMaxNorm / (norm + 1e-6)) / loss_scale_;
    ++step_;
    const terrace::AdamOptions decayed{.beta2 = 0.95, .weight_decay = 0.1};
    const terrace::AdamOptions plain{.beta2 = 0.95};
    std::vector<terrace::AdamSlice> slices;
    for (auto& tensor : tensors_) slices.push_back(tensor.slice());
    pool_->submit(terrace::Ticket{step_},
                  {terrace::adam_scalars(decayed, learning_rate, step_, factor),
                   terrace::adam_scalars(plain, learning_rate, step_, factor)},
                  slices);
    pool_->wait();
    return true;
  }
  double loss_scale() const { return loss_scale_; }

 private:
  static constexpr double kMaxNorm = 1.0;

  std::vector<Tensor>& tensors_;
  std::unique_ptr<terrace::AdamPool> pool_ = terrace::make_adam_pool({});  // a thread per core
  double loss_scale_ = 1024;
  std::uint64_t step_ = 0;
};

// The application's backward pass: here every parameter is drawn to 1.
double backward(std::vector<Tensor>& tensors, double loss_scale) {
  double loss = 0;
  for (auto& tensor : tensors) {
    for (std::size_t i = 0; i < tensor.parameter.size(); ++i) {
      const float distance = terrace::to_float(tensor.parameter[i]) - 1;
      loss += 0.5 * static_cast<double>(distance * distance);
      tensor.gradient[i] = terrace::to_bfloat16(static_cast<float>(loss_scale) * distance);
    }
  }
  return loss;
}

}  // namespace

int main() {
  std::vector<Tensor> tensors{{100'003, 0}, {317, 1}};
  Optimizer optimizer(tensors);
  const double first = backward(tensors, optimizer.loss_scale());
  tensors[1].gradient[5] = terrace::to_bfloat16(HUGE_VALF);  // as an overflow would leave it
  const bool skipped = !optimizer.step(0.01) && optimizer.loss_scale() == 512;
  double last = first;
  for (int step = 0; step < 200; ++step) {
    last = backward(tensors, optimizer.loss_scale());
    optimizer.step(0.01);
  }
  std::printf("%s: loss %.0f to %.3f\n", terrace::adam_instruction_set().c_str(), first, last);
  return skipped && last < first / 20 ? 0 : 1;
}
