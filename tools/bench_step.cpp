#include "tools/bench_step.h"

#include <sys/resource.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "runtime/gradient_rules.h"
#include "terrace/error.h"
#include "tiers/topology.h"

namespace terrace::cli {
namespace {

constexpr std::uint32_t kWarmUpSteps = 2;
constexpr double kQuickCompute = 0.1;  // of the slowest lane's seconds, when compute is not it
constexpr double kLearningRate = 1e-3;
constexpr Bytes kActivation{64 << 10};

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

float initial(std::uint64_t layer, std::uint64_t index) {
  const auto bits = (layer * 0x9E3779B97F4A7C15U + index + 1) * 0xD1B54A32D192ED03U;
  return static_cast<float>(bits >> 40) * 0x1p-24F - 0.5F;
}

// Layers of one tensor each. A layer function takes a time; its gradient is its parameters' bytes.
ModelSpec model_of(const StepBenchOptions& options, double compute_seconds) {
  ModelSpec model;
  for (std::uint32_t l = 0; l < options.layers; ++l) {
    LayerSpec layer;
    layer.name = "layer" + std::to_string(l);
    layer.tensors = {{layer.name + ".weight", {options.layer_elements}}};
    layer.input_bytes = kActivation;
    layer.input_gradient = l > 0;
    // With a speed of 10^12 operations per second a forward is a third of a layer's time.
    layer.forward_flops = compute_seconds * 1e12 / (3.0 * options.layers);
    layer.backward_flops = 2 * layer.forward_flops;
    model.layers.push_back(layer);
  }
  return model;
}

void initialize(const TensorSpec& tensor, std::uint64_t first, std::span<float> values) {
  const auto layer = std::strtoull(tensor.name.c_str() + std::strlen("layer"), nullptr, 10);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = initial(layer, first + i);
}

// The same training without an engine.
class PlainRun {
 public:
  explicit PlainRun(const StepBenchOptions& options) : elements_(options.layer_elements) {
    for (std::uint32_t l = 0; l < options.layers; ++l) {
      Layer layer;
      for (std::uint64_t i = 0; i < elements_; ++i) {
        layer.weight.push_back(initial(l, i));
        layer.parameter.push_back(to_bfloat16(layer.weight.back()));
      }
      layer.momentum.assign(elements_, 0);
      layer.variance.assign(elements_, 0);
      layers_.push_back(std::move(layer));
    }
  }

  void step(std::uint64_t number, const AdamOptions& options, double clip) {
    std::vector<double> sums;
    for (const auto& layer : layers_) {
      sums.push_back(summarize({layer.parameter.data(), DType::bf16, elements_}).sum_of_squares);
    }
    const double factor = clip_factor(gradient_norm(sums, 1), clip);
    const auto scalars =
        adam_scalars(options, kLearningRate, number, gradient_factor(factor, 1));
    for (auto& layer : layers_) {
      const auto gradient = layer.parameter;
      adam_update(scalars, {gradient.data(), DType::bf16, layer.weight.data(),
                            layer.momentum.data(), layer.variance.data(),
                            layer.parameter.data(), DType::bf16, elements_});
    }
  }

  bool equals(Engine& engine) const {
    std::vector<float> values(elements_);
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const auto& layer = layers_[l];
      const auto same = [&](Content content, const std::vector<float>& expected) {
        engine.read(engine.model().layers[l].tensors[0].name, content, 0, values);
        return std::memcmp(values.data(), expected.data(), elements_ * sizeof(float)) == 0;
      };
      std::vector<float> parameter(elements_);
      std::transform(layer.parameter.begin(), layer.parameter.end(), parameter.begin(),
                     [](bfloat16 value) { return to_float(value); });
      if (!same(Content::master_weight, layer.weight) ||
          !same(Content::momentum, layer.momentum) ||
          !same(Content::variance, layer.variance) || !same(Content::parameter, parameter)) {
        return false;
      }
    }
    return true;
  }

 private:
  struct Layer {
    std::vector<float> weight, momentum, variance;
    std::vector<bfloat16> parameter;
  };
  const std::uint64_t elements_;
  std::vector<Layer> layers_;
};

// Speeds at which the lane needs `seconds` for a step's bytes; all states on NVMe, parameters in
// RAM.
void slow_down(Lane lane, const StepBenchOptions& options, double seconds, Config& config) {
  const auto elements = static_cast<double>(options.layers * options.layer_elements);
  const double transferred = 2 * elements * (2.0 * options.layers - 1) / options.layers;
  const auto gb_s = [&](double bytes) { return bytes / seconds * 1e-9; };
  switch (lane) {
    case Lane::nvme_read: config.io.read.gb_s = gb_s(12 * elements); break;
    case Lane::nvme_write: config.io.write.gb_s = gb_s(12 * elements); break;
    case Lane::host_to_device:
      config.throttle.host_to_device.gb_s = gb_s(transferred);
      config.speeds.host_to_device_gb_s = gb_s(transferred);  // need not be measured
      break;
    case Lane::device_to_host:
      config.throttle.device_to_host.gb_s = gb_s(2 * elements);
      config.speeds.device_to_host_gb_s = gb_s(2 * elements);
      break;
    case Lane::adam:
      config.throttle.adam_gb_s =
          gb_s(elements * (adam_bytes_per_element(DType::bf16, DType::bf16) + 2));
      config.speeds.adam_gb_s = config.throttle.adam_gb_s;
      break;
    default: break;  // compute takes its time by itself
  }
}

// A directory of the bench's own in each of those given, so that no store of the user's is touched.
// One that a killed bench left is used again.
class Scratch {
 public:
  explicit Scratch(const std::vector<std::string>& directories) {
    for (const auto& directory : directories) {
      paths_.push_back(std::filesystem::path(directory) / "terrace-bench");
      std::error_code error;
      std::filesystem::create_directory(paths_.back(), error);
      if (!error) continue;
      throw Error(ErrorCode::io, "the directory " + paths_.back().string() +
                                     " cannot be made: " + error.message() +
                                     "; name an existing directory that you may write to");
    }
  }
  ~Scratch() {
    std::error_code ignored;
    for (const auto& path : paths_) std::filesystem::remove_all(path, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  const std::vector<std::filesystem::path>& paths() const { return paths_; }

 private:
  std::vector<std::filesystem::path> paths_;
};

Config config_of(const StepCase& what, const StepBenchOptions& options, const Scratch& scratch) {
  Config config;
  for (const auto& path : scratch.paths()) config.nvme.push_back({path.string()});
  config.store.mode = StoreMode::discard;
  config.placement.parameter = TierFractions{0, 1, 0};
  config.placement.master_weight = config.placement.momentum = config.placement.variance =
      TierFractions{0, 0, 1};
  config.placement.activation = TierFractions{1, 0, 0};
  config.budget.hbm = Bytes{options.layers * (2 * kActivation.count) +
                            12 * options.layer_elements * sizeof(bfloat16)};
  config.budget.dram = Bytes{options.layers * options.layer_elements * 24 + (64U << 20)};
  config.speeds.compute_tflops = 1;
  config.gradient_clipping = what.clip;
  if (what.slowest) {
    slow_down(*what.slowest, options, options.seconds, config);
  } else {
    for (const Lane lane : kLanes) slow_down(lane, options, options.seconds, config);
  }
  return config;
}

double compute_of(const StepCase& what, const StepBenchOptions& options) {
  const bool slowest = !what.slowest || *what.slowest == Lane::compute;
  return options.seconds * (slowest ? 1 : kQuickCompute);
}

void train_step(Engine& engine, const StepBenchOptions& options, double compute) {
  const double forward = compute / (3.0 * options.layers);
  auto step = engine.begin_step({kLearningRate});
  for (std::uint32_t l = 0; l < options.layers; ++l) {
    step.forward(LayerId{l}).launch([forward] {
      steady_clock().sleep_until(steady_clock().now() + from_seconds(forward));
    });
  }
  for (std::uint32_t l = options.layers; l-- > 0;) {
    auto view = step.backward(LayerId{l});
    view.launch([forward, parameter = view.parameter(0), gradient = view.gradient(0),
                 bytes = options.layer_elements * sizeof(bfloat16)] {
      const auto end = steady_clock().now() + from_seconds(2 * forward);
      std::memcpy(gradient, parameter, bytes);
      steady_clock().sleep_until(end);
    });
    view.submit_gradients();
  }
  step.finish();
}

// Segments of 4 KiB make a lot of operations.
Config small_operations() {
  Config config;
  config.nvme = {{"."}};
  config.io.kind = IoEngineKind::memory;
  config.segment = 4_KiB;
  config.sub_group_elements = 1;
  config.store.slots = 1;
  config.store.checksums = false;
  config.atomic_steps = false;
  config.placement.parameter = config.placement.master_weight = config.placement.momentum =
      config.placement.variance = TierFractions{0, 0, 1};
  config.budget.hbm = config.budget.dram = 64_MiB;
  return config;
}

double quantile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(part * static_cast<double>(values.size() - 1))];
}

// Between two looks at the engine's counters.
void take_lanes(const EngineStats& before, const EngineStats& after, const Engine& engine,
                std::uint32_t steps, StepCaseResult& result) {
  double others = 0;
  for (const Lane lane : kLanes) {
    at(result.lane_floor, lane) = at(engine.forecast().lanes, lane).seconds;
    at(result.lane_busy, lane) =
        (at(after.lanes, lane).busy_seconds - at(before.lanes, lane).busy_seconds) / steps;
    result.floor_seconds = std::max(result.floor_seconds, at(result.lane_floor, lane));
    if (lane != Lane::compute) others += at(result.lane_busy, lane);
  }
  const double cores = std::max(1, detect_topology().cores);
  result.floor_seconds = std::max(result.floor_seconds, result.cpu_seconds / cores);
  result.exposed_seconds =
      std::max(0.0, result.step_seconds - at(result.lane_busy, Lane::compute));
  result.hidden_seconds = std::max(0.0, others - result.exposed_seconds);
}

void check(const StepBenchOptions& options) {
  if (options.nvme.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "bench step needs a directory on a drive; give --nvme DIR");
  }
  if (options.layers == 0 || options.layer_elements == 0 || options.steps == 0 ||
      options.layer_elements % kGradientLeaf != 0 || !(options.seconds > 0)) {
    throw Error(ErrorCode::invalid_argument,
                "bench step needs layers, steps and a time, and parameters in multiples of " +
                    std::to_string(kGradientLeaf));
  }
}

}  // namespace

ExecutorCost measure_executor(std::uint32_t steps) {
  StepBenchOptions options;
  options.layer_elements = 1 << 17;
  EnginePorts ports;
  ports.speeds = Speeds{};
  Engine engine(small_operations(), model_of(options, 0), initialize, std::move(ports));
  train_step(engine, options, 0);
  engine.drain();
  const auto before = engine.stats();
  for (std::uint32_t s = 0; s < steps; ++s) train_step(engine, options, 0);
  engine.drain();
  const auto after = engine.stats();
  ExecutorCost cost;
  cost.operations = after.operations - before.operations;
  cost.user_us_per_operation = (after.executor_user_seconds - before.executor_user_seconds) *
                               1e6 / static_cast<double>(cost.operations);
  return cost;
}

std::string name_of(const StepCase& what) {
  return what.slowest ? std::string(to_string(*what.slowest)) : "balanced";
}

std::vector<StepCase> step_cases() {
  std::vector<StepCase> cases;
  for (const double clip : {0.0, 1.0}) {
    for (const Lane lane : kLanes) {
      if (lane != Lane::commit) cases.push_back({lane, clip});
    }
    cases.push_back({std::nullopt, clip});
  }
  return cases;
}

StepCaseResult run_step_case(const StepCase& what, const StepBenchOptions& options) {
  check(options);
  const Scratch scratch(options.nvme);  // outlives the engine
  const Config config = config_of(what, options, scratch);
  const double compute = compute_of(what, options);
  Engine engine(config, model_of(options, compute), initialize);
  PlainRun plain(options);
  StepCaseResult result;
  result.what = what;
  for (std::uint32_t s = 0; s < kWarmUpSteps; ++s) train_step(engine, options, compute);
  const auto before = engine.stats();
  const double cpu = cpu_seconds();
  std::vector<double> seconds;
  for (std::uint32_t s = 0; s < options.steps; ++s) {
    const auto begin = steady_clock().now();
    train_step(engine, options, compute);
    seconds.push_back(to_seconds(steady_clock().now() - begin));
  }
  const auto after = engine.stats();
  result.cpu_seconds = (cpu_seconds() - cpu) / options.steps;
  result.step_seconds = quantile(seconds, 0.5);
  result.spread = (quantile(seconds, 0.75) - quantile(seconds, 0.25)) / result.step_seconds;
  result.forecast_seconds = engine.forecast().step_seconds;
  result.deferred = engine.forecast().updates_deferred;
  take_lanes(before, after, engine, options.steps, result);
  for (std::uint64_t s = 1; s <= kWarmUpSteps + options.steps; ++s) {
    plain.step(s, config.optimizer, what.clip);
  }
  result.state_identical = plain.equals(engine);
  return result;
}

}  // namespace terrace::cli
