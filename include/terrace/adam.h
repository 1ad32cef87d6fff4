// CPU Adam and AdamW, usable alone: link terrace::cpu_adam, include this header, nothing else.
//
// One pass over memory unscales and clips the gradients, updates fp32 master weights and their
// moments, and writes the parameters. The same bits come out on every instruction set, for every
// slicing and for every number of threads.
//
//   gradient, parameter   fp32, bf16, fp16
//   momentum, variance    fp32, bf16 (rounded to nearest even)
//   master weight         fp32
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
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
//   g = gradient * gradient_factor
//   adam:   g' = fma(weight_decay, w, g), g when weight_decay is 0;  w' = w
//   adamw:  g' = g;  w' = w * (1 - learning_rate * weight_decay)
//   m = fma(beta1, m, (1 - beta1) * g')
//   v = fma(beta2, v, (1 - beta2) * g' * g')        evaluated as ((1 - beta2) * g') * g'
//   w = fma(-step_size, m / fma(sqrt(v), inverse_sqrt_correction2, epsilon), w')
//   step_size = learning_rate / (1 - beta1^t),  inverse_sqrt_correction2 = 1 / sqrt(1 - beta2^t)
// All in fp32; every product that is not inside an fma is rounded on its own, sqrt and division
// are rounded correctly. An update rounds to nearest even and keeps subnormals, whatever the
// calling thread has set. w is computed from the m and v that are not yet rounded to their dtype.
// A w, m or v that is NaN is stored as the NaN 0x7fc00000 and as what that is in bf16 and fp16.
struct AdamScalars {
  float beta1 = 0, one_minus_beta1 = 0;
  float beta2 = 0, one_minus_beta2 = 0;
  float epsilon = 0;
  float step_size = 0;
  float inverse_sqrt_correction2 = 1;
  float l2 = 0;            // adam: weight_decay; adamw: 0
  float decay_factor = 1;  // adamw: 1 - learning_rate * weight_decay; adam: 1
  float gradient_factor = 1;
};

// `step` counts from 1. `gradient_factor` is what every gradient is multiplied with: the clip
// factor divided by the loss scale and by the number of accumulated gradients, all in double.
// Throws Error(invalid_argument) naming the value for step 0, betas outside [0, 1), epsilon <= 0,
// negative or non-finite learning rate or weight decay, a gradient_factor that is not positive and
// finite in fp32.
AdamScalars adam_scalars(const AdamOptions& options, double learning_rate, std::uint64_t step,
                         double gradient_factor = 1);

// One contiguous range of elements. No two arrays overlap, except that parameter may equal gradient
// when their dtypes are the same.
struct AdamSlice {
  const void* gradient = nullptr;
  DType gradient_dtype = DType::fp32;
  float* master_weight = nullptr;  // in and out
  void* momentum = nullptr;        // in and out
  void* variance = nullptr;        // in and out
  // out; nullptr: not wanted. One of 1 MiB and more is written past the caches.
  void* parameter = nullptr;
  DType parameter_dtype = DType::fp32;
  std::uint64_t elements = 0;      // any number, any alignment of the element type
  DType momentum_dtype = DType::fp32;
  // In bf16 a variance stops shrinking where 1 - beta2 is below 2^-9: the change is rounded away.
  DType variance_dtype = DType::fp32;
  std::uint32_t group = 0;         // which of the scalars that come with it are its own
};

// Updates one slice on the calling thread with the best instruction set of this CPU.
// Throws Error(invalid_argument) naming the dtype that a moment cannot have.
void adam_update(const AdamScalars& scalars, const AdamSlice& slice);

// Updates several, of any length and alignment, each with the scalars of its group. A group that
// `groups` does not have is refused as above, before anything is updated.
void adam_update(std::span<const AdamScalars> groups, std::span<const AdamSlice> slices);

// The gradients before the update: their sum of squares, for the norm, and whether all are finite.
struct GradientSlice {
  const void* gradient = nullptr;
  DType dtype = DType::fp32;
  std::uint64_t elements = 0;
};

inline constexpr std::uint64_t kAllFinite = ~std::uint64_t{0};

struct GradientSummary {
  double sum_of_squares = 0;                     // infinity when an element is not finite
  std::uint64_t first_not_finite = kAllFinite;   // the index of that element
};

// Reads one slice on the calling thread. The gradients are summed as they are: with a factor f the
// norm is f * sqrt(sum_of_squares). Squares are exact; the sum is a tree that is the same on every
// instruction set:
//   a leaf is kGradientLeaf elements (the last may be short); its element i goes to lane i % 32,
//   each lane adds in ascending order, and half the lanes are added to the other half until one is
//   left; sum_of_leaves() adds the leaves.
// So the sum of an array that is cut between leaves is sum_of_leaves() over those of all its parts.
GradientSummary summarize(const GradientSlice& slice);

inline constexpr std::uint64_t kGradientLeaf = 1024;  // elements

// The leaves of a longer list than one are cut at the largest power of two below its length, and
// the sums of both parts added. No leaves: 0.
double sum_of_leaves(std::span<const double> leaves);

// Adds gradients of a micro-batch to those of the ones before it, in fp32, rounded to the dtype of
// the sum.
struct GradientAddition {
  const void* gradient = nullptr;
  DType gradient_dtype = DType::fp32;
  void* sum = nullptr;             // in and out; does not overlap the gradient
  DType sum_dtype = DType::fp32;   // fp32, or the gradient's
  bool first = false;              // the sum becomes the gradient, whatever it held
  std::uint64_t elements = 0;      // any number, any alignment of the element type
};

// On the calling thread. A NaN becomes the one that an update would store.
// Throws Error(invalid_argument) naming the dtype that a sum of such gradients cannot have.
void add_gradients(const GradientAddition& addition);

// Bytes that it moves: the gradient and the sum read, the sum written.
constexpr std::uint64_t addition_bytes_per_element(DType gradient, DType sum, bool first) {
  return size_of(gradient).count + (first ? 1 : 2) * size_of(sum).count;
}

// The instruction sets that this CPU can run, best first, and the one in use ("AVX3", "AVX2", ...).
std::vector<std::string> adam_instruction_sets();
std::string adam_instruction_set();

struct AdamRange {
  std::uint64_t first = 0, count = 0;  // elements
  std::uint32_t group = 0;             // which of the scalars update them
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

// summarize() for a run: padding counts as 0 and may hold anything.
struct GradientJob {
  GradientSlice whole{};
  std::vector<AdamRange> counted{};           // ascending, disjoint; their group has no meaning
  double* leaves = nullptr;                   // out: one per kGradientLeaf elements
  std::uint64_t* first_not_finite = nullptr;  // out: an index into the run, or kAllFinite
};

// The number of tiles, and of hashes.
constexpr std::uint64_t tiles_of(const AdamRun& run) {
  return run.whole.elements / run.tile + (run.whole.elements % run.tile != 0 ? 1 : 0);
}
constexpr std::uint64_t tiles_of(const HashJob& job) {
  return job.size.count / job.tile.count + (job.size.count % job.tile.count != 0 ? 1 : 0);
}
constexpr std::uint64_t leaves_of(std::uint64_t elements) {
  return elements / kGradientLeaf + (elements % kGradientLeaf != 0 ? 1 : 0);
}

// Works on worker threads: on one job after the other, each cut over all workers.
// Each job is completed exactly once and without error. Completion.bytes is adam_bytes_per_element
// for each updated element of a run, addition_bytes_per_element for each element of an addition,
// the bytes of the counted gradients, the size of a hash job.
// What a job wrote, hashes included, is visible to the thread that polled its completion; until
// then its memory belongs to the pool. Jobs without meaning (ranges outside the run, a tile of 0, a
// group that is not there) throw Error(invalid_argument).
// Thread rule: submit, poll() and wait() from one thread; completions are announced by the waker.
class AdamPool {
 public:
  virtual ~AdamPool() = default;  // waits for what was submitted
  virtual int threads() const = 0;  // at most this many work at a time
  // One job. The same element in two runs, or in two slices, is a data race.
  virtual void submit(Ticket ticket, std::vector<AdamScalars> groups,
                      std::vector<AdamRun> runs) = 0;
  virtual void submit_gradients(Ticket ticket, GradientJob job) = 0;
  virtual void submit_addition(Ticket ticket, const GradientAddition& addition) = 0;
  virtual void submit_hash(Ticket ticket, const HashJob& job) = 0;

  void submit(Ticket ticket, const AdamScalars& scalars, AdamRun run);
  // Whole slices.
  void submit(Ticket ticket, std::vector<AdamScalars> groups, std::span<const AdamSlice> slices);
  void submit(Ticket ticket, const AdamScalars& scalars, const AdamSlice& slice);

  virtual std::size_t poll(std::vector<Completion>& completions) = 0;
  // Blocks until everything that was submitted is complete, and returns what poll() would.
  virtual std::vector<Completion> wait() = 0;
  // Called from a worker after each completion became visible to poll(). When set_waker() returns,
  // the waker before is not running and will not be called again.
  virtual void set_waker(std::function<void()> waker) = 0;
};

struct AdamPoolOptions {
  int threads = 0;        // 0: cores / ranks_on_node, at least one
  // An emulated speed of all but hashing, over Completion.bytes; 0: unbounded.
  double gb_s = 0;
  int ranks_on_node = 1;  // how many processes share the cores
  // The cores: the workers stay on these CPUs, those of the NUMA node that holds the arrays for
  // example. Empty: all on which the calling thread may run, and no worker is bound.
  std::vector<int> cpus{};
};

// The workers come from oneTBB, which has no more of them than the process has cores and the
// application allows. Throws Error(invalid_argument) naming what has no meaning: a negative number,
// a CPU on which the calling thread may not run.
std::unique_ptr<AdamPool> make_adam_pool(const AdamPoolOptions& options);

// Bytes that updating one element moves: master and moments read and written, gradient read,
// parameter written. 28 for a bf16 gradient, a bf16 parameter and fp32 moments.
constexpr std::uint64_t adam_bytes_per_element(DType gradient, DType parameter,
                                               DType momentum = DType::fp32,
                                               DType variance = DType::fp32) {
  return 8 + 2 * size_of(momentum).count + 2 * size_of(variance).count + size_of(gradient).count +
         size_of(parameter).count;
}
constexpr std::uint64_t adam_bytes_per_element(const AdamSlice& slice) {
  const auto with_parameter = adam_bytes_per_element(slice.gradient_dtype, slice.parameter_dtype,
                                                     slice.momentum_dtype, slice.variance_dtype);
  return with_parameter - (slice.parameter == nullptr ? size_of(slice.parameter_dtype).count : 0);
}

}  // namespace terrace
