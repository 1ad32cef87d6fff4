#include "tools/bench_adam.h"

#include <algorithm>
#include <array>

#include "cpu_adam/adam_kernel.h"
#include "terrace/clock.h"
#include "terrace/error.h"
#include "tiers/topology.h"

namespace terrace::cli {
namespace {

constexpr std::size_t kLeastRounds = 5;
constexpr std::uint64_t kCachesInSet = 4;
constexpr Bytes kAssumedCache = 64_MiB;  // where the system does not tell
constexpr double kFillGbS = 2;           // about, of a thread that fills the arrays

constexpr float kUnscale = 0x1p-4F;  // as if losses had been scaled
constexpr float kClip = 0.99F;       // so near to 1 that a gradient clipped again is still one
constexpr AdamTypes kStreamTypes{DType::fp32, DType::fp32, DType::fp32};
constexpr std::uint64_t kMostElements = std::uint64_t{1} << 44;

double quantile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(part * static_cast<double>(values.size() - 1))];
}
double median(const std::vector<double>& values) { return quantile(values, 0.5); }

std::vector<double> ratios(const Pairs& pairs) {
  std::vector<double> result;
  for (std::size_t i = 0; i < pairs.seconds.size(); ++i) {
    result.push_back(pairs.other_seconds[i] / pairs.seconds[i]);
  }
  return result;
}

AdamScalars scalars_of_a_step(double gradient_factor) {
  return adam_scalars({.weight_decay = 0.1}, 1e-4, 1000, gradient_factor);
}

// Everything with one number of threads.
class Measurement {
 public:
  Measurement(const AdamBenchOptions& options, int threads, Bytes bytes_per_thread,
              AdamBenchListener& listener)
      : options_(options), listener_(listener), team_(threads), set_(team_, bytes_per_thread) {}

  void streams(const AdamShape& shape);
  void update(const AdamShape& shape, const std::vector<std::string>& instruction_sets);
  void separate_passes(const AdamShape& shape);

 private:
  using Passes = std::vector<AdamSet::Pass>;

  std::vector<std::vector<double>> in_turn(const std::vector<Passes>& loops);
  Pairs pairs(const Passes& loop, const Passes& other);
  double per_second(const std::vector<double>& seconds) const;
  RoofResult roof(const AdamTypes& types);

  Passes stream_loop(bool triads, Stores stores) const;
  Passes touch_loop(Stores stores) const;
  Passes update_loop(const AdamKernel& kernel) const;
  Passes fused_loop() const;
  Passes separate_loop() const;

  const AdamBenchOptions& options_;
  AdamBenchListener& listener_;
  Team team_;
  AdamSet set_;
};

// ---- what is measured

Measurement::Passes Measurement::stream_loop(bool triads, Stores stores) const {
  return {[this, triads, stores](int thread, std::uint64_t piece) {
    const auto at = set_.slice(thread, piece);
    const auto* const a = static_cast<const float*>(at.gradient);
    auto* const to = static_cast<float*>(at.momentum);
    triads ? triad(a, at.master_weight, to, at.elements, stores) : copy(a, to, at.elements, stores);
  }};
}

Measurement::Passes Measurement::touch_loop(Stores stores) const {
  return {[this, stores](int thread, std::uint64_t piece) {
    touch_streams(set_.slice(thread, piece), stores);
  }};
}

Measurement::Passes Measurement::update_loop(const AdamKernel& kernel) const {
  return {[this, &kernel, scalars = scalars_of_a_step(double{kUnscale} * kClip)](
              int thread, std::uint64_t piece) {
    const auto slice = set_.slice(thread, piece);
    kernel.update(scalars, slice, parameter_stores(slice));
  }};
}

AdamSet::Pass sum_of_squares(const AdamSet& set, bool unscaled) {
  return [&set, unscaled](int thread, std::uint64_t piece) {
    const auto at = set.slice(thread, piece);
    unscaled ? summarize({set.unscaled(thread, piece), DType::fp32, at.elements})
             : summarize({at.gradient, at.gradient_dtype, at.elements});
  };
}

Measurement::Passes Measurement::fused_loop() const {
  auto passes = update_loop(adam_kernels().front());
  passes.insert(passes.begin(), sum_of_squares(set_, false));
  return passes;
}

Measurement::Passes Measurement::separate_loop() const {
  const auto pass = [this](auto body) -> AdamSet::Pass {
    return [this, body](int thread, std::uint64_t piece) {
      body(set_.slice(thread, piece), set_.unscaled(thread, piece));
    };
  };
  return {pass([](const AdamSlice& at, float* unscaled) {
            unscale(at.gradient, at.gradient_dtype, kUnscale, unscaled, at.elements);
          }),
          sum_of_squares(set_, true),
          pass([](const AdamSlice& at, float* unscaled) { scale(unscaled, kClip, at.elements); }),
          pass([scalars = scalars_of_a_step(1)](AdamSlice at, float* unscaled) {
            at.gradient = unscaled;
            at.gradient_dtype = DType::fp32;
            at.parameter = nullptr;
            adam_update(scalars, at);
          }),
          pass([](const AdamSlice& at, float*) {
            cast(at.master_weight, at.parameter, at.parameter_dtype, at.elements);
          })};
}

// ---- how

// The seconds of each loop in each round. Every other round goes backwards, so that no loop always
// follows the same one.
std::vector<std::vector<double>> Measurement::in_turn(const std::vector<Passes>& loops) {
  std::vector<std::vector<double>> seconds(loops.size());
  const auto end = steady_clock().now() + from_seconds(options_.seconds);
  for (std::size_t round = 0; round < kLeastRounds || steady_clock().now() < end; ++round) {
    for (std::size_t i = 0; i < loops.size(); ++i) {
      if (listener_.stop()) throw Error(ErrorCode::cancelled, "bench adam was interrupted");
      const auto loop = round % 2 == 0 ? i : loops.size() - 1 - i;
      seconds[loop].push_back(set_.run(loops[loop]));
    }
  }
  return seconds;
}

Pairs Measurement::pairs(const Passes& loop, const Passes& other) {
  auto seconds = in_turn({loop, other});
  return {std::move(seconds[0]), std::move(seconds[1])};
}

// Elements.
double Measurement::per_second(const std::vector<double>& seconds) const {
  return static_cast<double>(set_.piece_elements()) / median(seconds);
}

void Measurement::streams(const AdamShape& shape) {
  set_.lay_out(shape);
  const auto seconds =
      in_turn({stream_loop(false, Stores::ordinary), stream_loop(false, Stores::non_temporal),
               stream_loop(true, Stores::ordinary), stream_loop(true, Stores::non_temporal)});
  const auto best = [&](std::size_t first, double bytes) {
    return bytes * 1e-9 * std::max(per_second(seconds[first]), per_second(seconds[first + 1]));
  };
  listener_.found(StreamResult{team_.threads(), best(0, 8), best(2, 12)});
}

RoofResult Measurement::roof(const AdamTypes& types) {
  std::vector<Passes> loops;
  for (const auto stores : kAllStores) loops.push_back(touch_loop(stores));
  const auto seconds = in_turn(loops);
  RoofResult best{.threads = team_.threads(), .types = types};
  for (std::size_t i = 0; i < kAllStores.size(); ++i) {
    const double gb_s = per_second(seconds[i]) * static_cast<double>(types.moved_bytes()) * 1e-9;
    best.gb_s_with[i] = gb_s;
    if (gb_s <= best.gb_s) continue;
    best.gb_s = gb_s;
    best.stores = kAllStores[i];
  }
  return best;
}

void Measurement::update(const AdamShape& shape, const std::vector<std::string>& instruction_sets) {
  set_.lay_out(shape);
  const auto best = roof(shape.types);
  listener_.found(best);
  const double bytes = static_cast<double>(shape.types.moved_bytes());
  for (const auto& kernel : adam_kernels()) {
    if (std::ranges::find(instruction_sets, kernel.instruction_set) == instruction_sets.end()) {
      continue;
    }
    KernelResult result{.instruction_set = kernel.instruction_set,
                        .threads = team_.threads(),
                        .types = shape.types};
    result.pairs = pairs(update_loop(kernel), touch_loop(best.stores));
    result.elements_per_s = per_second(result.pairs.seconds);
    result.gb_s = result.elements_per_s * bytes * 1e-9;
    result.roof_gb_s = per_second(result.pairs.other_seconds) * bytes * 1e-9;
    listener_.found(result);
  }
}

void Measurement::separate_passes(const AdamShape& shape) {
  set_.lay_out(shape);
  FusedResult result{.threads = team_.threads(), .types = shape.types};
  result.pairs = pairs(fused_loop(), separate_loop());
  result.elements_per_s = per_second(result.pairs.seconds);
  result.separate_elements_per_s = per_second(result.pairs.other_seconds);
  listener_.found(result);
}

// ---- the plan

AdamShape shape_of(const AdamBenchPlan& plan, const AdamTypes& types, bool unscaled = false) {
  AdamShape shape{.types = types, .unscaled = unscaled};
  shape.elements = plan.options.elements > 0 ? plan.options.elements
                                             : plan.working_set.count / shape.occupied().count;
  return shape;
}

// What the layout takes that needs most.
Bytes bytes_per_thread(const AdamBenchPlan& plan, int threads) {
  Bytes most = AdamSet::bytes_per_thread(shape_of(plan, kStreamTypes), threads);
  for (const auto& types : plan.options.types) {
    most = std::max(most, AdamSet::bytes_per_thread(shape_of(plan, types, true), threads));
  }
  return most;
}

std::vector<std::string> instruction_sets_for(const AdamBenchOptions& options, std::size_t types) {
  if (!options.instruction_sets.empty()) return options.instruction_sets;
  return types == 0 ? adam_instruction_sets() : std::vector{adam_instruction_set()};
}

void refuse(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, "bench adam cannot measure " + what);
}

void check(const AdamBenchOptions& options, int cores) {
  const auto known = adam_instruction_sets();
  std::string names;
  for (const auto& name : known) names += (names.empty() ? "" : ", ") + name;
  for (const auto& name : options.instruction_sets) {
    if (std::ranges::find(known, name) != known.end()) continue;
    refuse("instruction set '" + name + "'; this CPU has " + names);
  }
  for (const auto& types : options.types) {
    if (types.moments != DType::fp16) continue;
    refuse(to_string(types) + ": moments are fp32 or bf16");
  }
  for (const int threads : options.threads) {
    if (threads >= 1 && threads <= cores) continue;
    refuse(std::to_string(threads) + " threads; this process may use " + std::to_string(cores) +
           " cores");
  }
  if (options.elements > kMostElements) refuse("more than 2^44 elements");
}

void check_memory(const AdamBenchPlan& plan) {
  const auto available = available_memory();
  for (const int threads : plan.options.threads) {
    const auto needed = bytes_per_thread(plan, threads) * static_cast<std::uint64_t>(threads);
    if (!available || needed <= *available) continue;
    throw Error(ErrorCode::out_of_budget, "bench adam needs " + to_string(needed) +
                                              " of memory and " + to_string(*available) +
                                              " is available; free some, or give fewer --elements");
  }
}

double forecast_seconds(const AdamBenchPlan& plan) {
  const auto& options = plan.options;
  double seconds = 0;
  for (const int threads : options.threads) {
    const double fill =
        static_cast<double>(bytes_per_thread(plan, threads).count) * 1e-9 / kFillGbS;
    seconds += 2 * fill + options.seconds;
    for (std::size_t i = 0; i < options.types.size(); ++i) {
      const auto kernels = instruction_sets_for(options, i).size();
      seconds += 2 * fill + static_cast<double>(kernels + 2) * options.seconds;
    }
  }
  return seconds;
}

}  // namespace

double Pairs::ratio() const { return median(ratios(*this)); }
double Pairs::spread() const {
  const auto all = ratios(*this);
  return (quantile(all, 0.75) - quantile(all, 0.25)) / median(all);
}

std::vector<AdamTypes> usual_adam_types() {
  return {{DType::bf16, DType::fp32, DType::bf16},
          {DType::fp16, DType::fp32, DType::fp16},
          {DType::fp32, DType::fp32, DType::bf16},
          {DType::fp32, DType::fp32, DType::fp32},
          {DType::bf16, DType::bf16, DType::bf16}};
}

std::vector<AdamTypes> all_adam_types() {
  constexpr std::array kAll{DType::fp32, DType::bf16, DType::fp16};
  std::vector<AdamTypes> result;
  for (const auto gradient : kAll) {
    for (const auto moments : {DType::fp32, DType::bf16}) {
      for (const auto parameter : kAll) result.push_back({gradient, moments, parameter});
    }
  }
  return result;
}

AdamBenchPlan plan_adam_bench(AdamBenchOptions options) {
  const auto machine = detect_topology();
  if (options.threads.empty()) options.threads = {1, machine.cores};
  if (options.threads == std::vector{1, 1}) options.threads = {1};
  check(options, machine.cores);
  AdamBenchPlan plan;
  plan.options = std::move(options);
  plan.caches = machine.last_level_cache * static_cast<std::uint64_t>(machine.last_level_caches);
  const auto caches = plan.caches.count > 0 ? plan.caches : kAssumedCache;
  plan.working_set = std::min(caches * kCachesInSet, machine.memory / 2);
  if (plan.options.elements > 0) {
    plan.working_set = plan.options.types.front().occupied() * plan.options.elements;
  }
  check_memory(plan);
  plan.seconds = forecast_seconds(plan);
  return plan;
}

void run_adam_bench(const AdamBenchPlan& plan, AdamBenchListener& listener) {
  for (const int threads : plan.options.threads) {
    Measurement measurement(plan.options, threads, bytes_per_thread(plan, threads), listener);
    measurement.streams(shape_of(plan, kStreamTypes));
    for (std::size_t i = 0; i < plan.options.types.size(); ++i) {
      const auto& types = plan.options.types[i];
      measurement.update(shape_of(plan, types), instruction_sets_for(plan.options, i));
      measurement.separate_passes(shape_of(plan, types, true));
    }
  }
}

}  // namespace terrace::cli
