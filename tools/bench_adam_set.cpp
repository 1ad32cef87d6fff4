#include "tools/bench_adam_set.h"

#include <array>
#include <cstring>

#include "cpu_adam/adam_kernel.h"
#include "terrace/error.h"
#include "tools/bench_adam_loops.h"

namespace terrace::cli {
namespace {

constexpr Bytes kPage = 4_KiB;  // every array begins at one
constexpr std::uint64_t kArrays = 6;

std::uint64_t elements_of_piece(const AdamShape& shape, int threads) {
  const auto parts = AdamSet::kPieces * static_cast<std::uint64_t>(threads);
  return round_up((shape.elements + parts - 1) / parts, kGradientLeaf);
}

// Cuts memory into arrays.
class Carver {
 public:
  Carver(std::byte* memory, std::uint64_t elements) : next_(memory), elements_(elements) {}

  // An array in which the values around `middle` repeat.
  void* take(DType dtype, float middle) {
    alignas(kLoopAlignment) std::array<float, kGradientLeaf> values{};
    alignas(kLoopAlignment) std::array<float, kGradientLeaf> narrow{};
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = middle * (0.5F + static_cast<float>(i) / kGradientLeaf);
    }
    cast(values.data(), narrow.data(), dtype, kGradientLeaf);
    const auto bytes = size_of(dtype).count * kGradientLeaf;
    std::byte* const array = next_;
    for (std::uint64_t i = 0; i < elements_ / kGradientLeaf; ++i, next_ += bytes) {
      std::memcpy(next_, narrow.data(), bytes);
    }
    next_ = array + round_up(size_of(dtype) * elements_, kPage).count;
    return array;
  }

 private:
  std::byte* next_;
  const std::uint64_t elements_;
};

}  // namespace

std::string to_string(const AdamTypes& types) {
  std::string text(to_string(types.gradient));
  text.append("/").append(to_string(types.moments));
  return text.append("/").append(to_string(types.parameter));
}

AdamSet::AdamSet(Team& team, Bytes bytes_per_thread)
    : team_(team), arrays_(static_cast<std::size_t>(team.threads())) {
  team_.run([&](int thread) {
    arrays_[static_cast<std::size_t>(thread)].memory =
        std::make_unique<HostMemory>(bytes_per_thread, nullptr);
  });
}

Bytes AdamSet::bytes_per_thread(const AdamShape& shape, int threads) {
  return shape.occupied() * (kPieces * elements_of_piece(shape, threads)) + kPage * kArrays;
}

void AdamSet::lay_out(const AdamShape& shape) {
  piece_ = elements_of_piece(shape, team_.threads());
  const auto bytes = bytes_per_thread(shape, team_.threads());
  TERRACE_CHECK(bytes.count <= arrays_.front().memory->span().size());
  team_.run([&](int thread) { fill(arrays_[static_cast<std::size_t>(thread)], shape); });
}

void AdamSet::fill(Arrays& arrays, const AdamShape& shape) const {
  const auto& types = shape.types;
  const auto elements = kPieces * piece_;
  Carver carver(arrays.memory->span().data(), elements);
  arrays.whole = {.gradient = carver.take(types.gradient, 1e-3F),
                  .gradient_dtype = types.gradient,
                  .master_weight = static_cast<float*>(carver.take(DType::fp32, 0.5F)),
                  .momentum = carver.take(types.moments, 1e-4F),
                  .variance = carver.take(types.moments, 1e-6F),
                  .parameter = carver.take(types.parameter, 0.5F),
                  .parameter_dtype = types.parameter,
                  .elements = elements,
                  .momentum_dtype = types.moments,
                  .variance_dtype = types.moments};
  arrays.unscaled = shape.unscaled ? static_cast<float*>(carver.take(DType::fp32, 1e-3F)) : nullptr;
}

AdamSlice AdamSet::slice(int thread, std::uint64_t piece) const {
  return part(arrays_[static_cast<std::size_t>(thread)].whole, piece * piece_, piece_);
}

float* AdamSet::unscaled(int thread, std::uint64_t piece) const {
  return arrays_[static_cast<std::size_t>(thread)].unscaled + piece * piece_;
}

double AdamSet::run(const std::vector<Pass>& passes) {
  double seconds = 0;
  for (const auto& pass : passes) {
    seconds += team_.run([&](int thread) { pass(thread, next_); });
    next_ = (next_ + 1) % kPieces;
  }
  return seconds;
}

}  // namespace terrace::cli
