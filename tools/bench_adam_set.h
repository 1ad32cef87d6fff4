// The arrays that bench adam works on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "terrace/adam.h"
#include "terrace/types.h"
#include "tiers/host_memory.h"
#include "tools/bench_team.h"

namespace terrace::cli {

struct AdamTypes {
  DType gradient = DType::bf16;
  DType moments = DType::fp32;
  DType parameter = DType::bf16;

  // Of an element, the fp32 master weight included.
  Bytes occupied() const {
    return 4_B + size_of(gradient) + 2 * size_of(moments) + size_of(parameter);
  }
  std::uint64_t moved_bytes() const {
    return adam_bytes_per_element(gradient, parameter, moments, moments);
  }
  friend bool operator==(const AdamTypes&, const AdamTypes&) = default;
};
std::string to_string(const AdamTypes& types);  // "bf16/fp32/bf16"

// How many elements, of what.
struct AdamShape {
  AdamTypes types{};
  std::uint64_t elements = 0;
  bool unscaled = false;  // another fp32 array, as separate passes need it

  Bytes occupied() const { return types.occupied() + (unscaled ? 4_B : 0_B); }
};

// Each thread has arrays of its own, in memory like the engine's, which it touched first. They are
// cut into pieces. Every pass is over the next piece, so that all others were worked on
// since it was last in a cache.
// Thread rule: that of the team; slice() and unscaled() from any thread.
class AdamSet {
 public:
  // A prime: loops that are measured in turn come to every piece, however many there are.
  static constexpr std::uint64_t kPieces = 11;

  AdamSet(Team& team, Bytes bytes_per_thread);

  // The elements are rounded up to whole pieces.
  static Bytes bytes_per_thread(const AdamShape& shape, int threads);
  // Fills the arrays with what training has in them. It must fit.
  void lay_out(const AdamShape& shape);

  std::uint64_t piece_elements() const { return arrays_.size() * piece_; }  // all threads'
  AdamSlice slice(int thread, std::uint64_t piece) const;
  float* unscaled(int thread, std::uint64_t piece) const;

  // One pass after the other; returns the seconds they took.
  using Pass = std::function<void(int thread, std::uint64_t piece)>;
  double run(const std::vector<Pass>& passes);

 private:
  struct Arrays {
    std::unique_ptr<HostMemory> memory;
    AdamSlice whole;
    float* unscaled = nullptr;
  };

  void fill(Arrays& arrays, const AdamShape& shape) const;

  Team& team_;
  std::vector<Arrays> arrays_;  // of each thread
  std::uint64_t piece_ = 0;     // elements, of a thread
  std::uint64_t next_ = 0;
};

}  // namespace terrace::cli
