// CPU Adam and AdamW, usable alone: link terrace::cpu_adam, include this header, nothing else.
//
// One pass over memory updates fp32 master weights and moments from fp32 or bf16 gradients and
// writes the fp32 or bf16 parameters. The same bits come out on every instruction set, for every
// slicing and for every number of threads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "terrace/completion.h"
#include "terrace/dtype.h"
#include "terrace/types.h"

namespace terrace {

enum class AdamMode : std::uint8_t {
  adam,   // weight decay as an L2 term added to the gradient (Kingma & Ba 2015)
  adamw,  // decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2)
};

struct AdamOptions {
  AdamMode mode = AdamMode::adamw;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;
  bool bias_correction = true;
  friend bool operator==(const AdamOptions&, const AdamOptions&) = default;
};

// The scalars of one step, derived in double from the options and rounded to float once.
//
//   adam:   g' = fma(weight_decay, w, g), g when weight_decay is 0;  w' = w
//   adamw:  g' = g;  w' = w * (1 - learning_rate * weight_decay)
//   m = fma(beta1, m, (1 - beta1) * g')
//   v = fma(beta2, v, (1 - beta2) * g' * g')        evaluated as ((1 - beta2) * g') * g'
//   w = fma(-step_size, m / fma(sqrt(v), inverse_sqrt_correction2, epsilon), w')
//   step_size = learning_rate / (1 - beta1^t),  inverse_sqrt_correction2 = 1 / sqrt(1 - beta2^t)
// All in fp32; every product that is not inside an fma is rounded on its own, sqrt and division
// are rounded correctly. An update rounds to nearest even and keeps subnormals, whatever the
// calling thread has set. A w, m or v that is NaN is stored as the NaN 0x7fc00000.
struct AdamScalars {
  float beta1 = 0, one_minus_beta1 = 0;
  float beta2 = 0, one_minus_beta2 = 0;
  float epsilon = 0;
  float step_size = 0;
  float inverse_sqrt_correction2 = 1;
  float l2 = 0;            // adam: weight_decay; adamw: 0
  float decay_factor = 1;  // adamw: 1 - learning_rate * weight_decay; adam: 1
};

// `step` counts from 1. Throws Error(invalid_argument) naming the value for step 0, betas outside
// [0, 1), epsilon <= 0, negative or non-finite learning rate or weight decay.
AdamScalars adam_scalars(const AdamOptions& options, double learning_rate, std::uint64_t step);

// One contiguous range of elements. No two arrays overlap, except that parameter may equal gradient
// when their dtypes are the same.
struct AdamSlice {
  const void* gradient = nullptr;
  DType gradient_dtype = DType::fp32;
  float* master_weight = nullptr;  // in and out
  float* momentum = nullptr;       // in and out
  float* variance = nullptr;       // in and out
  void* parameter = nullptr;       // out; nullptr: not wanted
  DType parameter_dtype = DType::fp32;
  std::uint64_t elements = 0;      // any number, any alignment of the element type
};

// Updates one slice on the calling thread with the best instruction set of this CPU.
void adam_update(const AdamScalars& scalars, const AdamSlice& slice);

// The instruction sets that this CPU can run, best first, and the one in use ("AVX3", "AVX2", ...).
std::vector<std::string> adam_instruction_sets();
std::string adam_instruction_set();

struct AdamRange {
  std::uint64_t first = 0, count = 0;  // elements
  friend bool operator==(const AdamRange&, const AdamRange&) = default;
};

// Any hash of `bytes` bytes at `data`. Thread rule: called from several threads at a time.
using HashFunction = std::uint64_t (*)(const void* data, std::size_t bytes);

// Consecutive elements of one block, padding between tensors included. The unit of work and of
// hashing is a tile: it is hashed, updated and hashed again while it is in a core's cache.
struct AdamRun {
  AdamSlice whole{};                 // pointers to element 0 of the run; elements: all of them
  std::vector<AdamRange> updated{};  // ascending, disjoint; the rest (padding) keeps its bytes
  std::uint64_t tile = 1 << 15;      // elements
  HashFunction hash = nullptr;       // nullptr: nothing is hashed
  // One hash per tile (the last may be short), over all bytes of the tile, padding included;
  // nullptr: not wanted.
  std::array<std::uint64_t*, 3> before{};  // master_weight, momentum, variance as found
  std::array<std::uint64_t*, 4> after{};   // master_weight, momentum, variance, parameter as left
};

// One hash per `tile` bytes of `data`; the last may be short.
struct HashJob {
  const std::byte* data = nullptr;
  Bytes size{};
  Bytes tile{};
  HashFunction hash = nullptr;
  std::uint64_t* out = nullptr;
};

// The number of tiles, and of hashes.
constexpr std::uint64_t tiles_of(const AdamRun& run) {
  return run.whole.elements / run.tile + (run.whole.elements % run.tile != 0 ? 1 : 0);
}
constexpr std::uint64_t tiles_of(const HashJob& job) {
  return job.size.count / job.tile.count + (job.size.count % job.tile.count != 0 ? 1 : 0);
}

// Works on worker threads: on one job after the other, each cut over all workers.
// Each job is completed exactly once and without error. Completion.bytes is adam_bytes_per_element
// for each updated element of a run, and the size of a hash job. What a job wrote, hashes included,
// is visible to the thread that polled its completion; until then its memory belongs to the pool.
// Jobs without meaning (ranges outside the run, a tile of 0) throw Error(invalid_argument).
// Thread rule: submit and poll() from one thread; completions are announced by the waker.
class AdamPool {
 public:
  virtual ~AdamPool() = default;  // waits for what was submitted
  virtual int threads() const = 0;
  virtual void submit(Ticket ticket, const AdamScalars& scalars, AdamRun run) = 0;
  virtual void submit_hash(Ticket ticket, const HashJob& job) = 0;
  // The run of all its elements.
  void submit(Ticket ticket, const AdamScalars& scalars, const AdamSlice& slice);
  virtual std::size_t poll(std::vector<Completion>& completions) = 0;
  // Called from a worker after each completion became visible to poll(). When set_waker() returns,
  // the waker before is not running and will not be called again.
  virtual void set_waker(std::function<void()> waker) = 0;
};

struct AdamPoolOptions {
  int threads = 0;           // 0: one per core that this process may use
  double gb_s = 0;           // an emulated speed of updates, in Completion.bytes; 0: unbounded
};

std::unique_ptr<AdamPool> make_adam_pool(const AdamPoolOptions& options);

// Bytes that updating one element moves: master, moments read and written, gradient read, parameter
// written. 28 for a bf16 gradient and a bf16 parameter.
constexpr std::uint64_t adam_bytes_per_element(DType gradient, DType parameter) {
  return 24 + size_of(gradient).count + size_of(parameter).count;
}

}  // namespace terrace
