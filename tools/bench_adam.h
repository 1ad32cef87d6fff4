// How near the Adam kernels come to what the memory gives, and what separate passes would take.
//
// Everything is compared in pairs: two loops in turn, each on the next piece of a working set that
// no cache holds, so that what else the machine does hits both alike. A ratio is the median of the
// ratios of its pairs.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "terrace/types.h"
#include "tools/bench_adam_loops.h"
#include "tools/bench_adam_set.h"

namespace terrace::cli {

std::vector<AdamTypes> usual_adam_types();  // the first is what mixed precision means
std::vector<AdamTypes> all_adam_types();

struct AdamBenchOptions {
  // Empty: every one for the first types, the best one for the others.
  std::vector<std::string> instruction_sets{};
  std::vector<AdamTypes> types = usual_adam_types();
  std::vector<int> threads{};  // empty: 1 and all cores
  std::uint64_t elements = 0;  // 0: a working set of 4 last-level caches or half of the memory
  double seconds = 1;          // for each comparison, which makes a few pairs at least
};

// A loop and another one that it is held against.
struct Pairs {
  std::vector<double> seconds;
  std::vector<double> other_seconds;
  double ratio() const;   // median of other / loop: above 1 where the loop is faster
  double spread() const;  // (third quartile - first) / median of these ratios
};

struct StreamResult {  // STREAM's way of counting: nothing for reading what is overwritten
  int threads = 0;
  double copy_gb_s = 0;
  double triad_gb_s = 0;
};

struct RoofResult {
  int threads = 0;
  AdamTypes types{};
  Stores stores{};                                    // the best
  double gb_s = 0;                                    // with these, median
  std::array<double, kAllStores.size()> gb_s_with{};  // each of kAllStores
};

struct KernelResult {
  std::string instruction_set;
  int threads = 0;
  AdamTypes types{};
  double elements_per_s = 0;
  double gb_s = 0;
  double roof_gb_s = 0;  // of the same pairs
  Pairs pairs{};         // ratio(): the fraction of the roof
};

// The sum of squares and the update, against unscaling, sum of squares, clipping, update and cast.
struct FusedResult {
  int threads = 0;
  AdamTypes types{};
  double elements_per_s = 0;
  double separate_elements_per_s = 0;
  Pairs pairs{};  // ratio(): the speedup
};

struct AdamBenchPlan {
  AdamBenchOptions options;  // checked, with the threads
  Bytes working_set;         // of the first types
  Bytes caches;              // all of the last level; 0 when unknown
  double seconds = 0;        // about, in all
};

// Throws Error(invalid_argument) naming what has no meaning, and the choices; Error(out_of_budget)
// when the working set is more than the machine has left.
AdamBenchPlan plan_adam_bench(AdamBenchOptions options);

// Hears of each result when it is there.
class AdamBenchListener {
 public:
  virtual ~AdamBenchListener() = default;
  virtual void found(const StreamResult& result) = 0;
  virtual void found(const RoofResult& result) = 0;
  virtual void found(const KernelResult& result) = 0;
  virtual void found(const FusedResult& result) = 0;
  virtual bool stop() const = 0;  // asked between two measurements; nothing is found any more then
};

void run_adam_bench(const AdamBenchPlan& plan, AdamBenchListener& listener);

}  // namespace terrace::cli
