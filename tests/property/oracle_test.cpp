// Tiered training equals plain in-memory training, bit for bit: over budgets, segment sizes, I/O
// engines and thread counts. The model is a small multi-layer perceptron written here.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>

#include "runtime/planner.h"
#include "terrace/terrace.h"

namespace terrace {
namespace {

using Random = std::mt19937_64;

std::uint64_t pick(Random& random, std::uint64_t low, std::uint64_t high) {
  return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
}

// TERRACE_SEED repeats a run.
std::uint64_t fresh_seed() {
  const char* given = std::getenv("TERRACE_SEED");
  const std::uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

// A chain of dense layers with tanh-like squashing: y = x W / n + b, out = y / (1 + |y|).
struct Mlp {
  std::vector<std::uint32_t> widths;  // of input, hidden..., output
  std::uint32_t batch = 4;
  DType dtype = DType::bf16;

  std::uint32_t layers() const { return static_cast<std::uint32_t>(widths.size()) - 1; }

  ModelSpec spec() const {
    ModelSpec model;
    model.parameter_dtype = model.gradient_dtype = dtype;
    for (std::uint32_t l = 0; l < layers(); ++l) {
      LayerSpec layer;
      layer.name = "dense" + std::to_string(l);
      layer.tensors = {{layer.name + ".weight", {widths[l], widths[l + 1]}},
                       {layer.name + ".bias", {widths[l + 1]}}};
      layer.input_bytes = Bytes{std::uint64_t{batch} * widths[l] * 4};
      layer.input_gradient = l > 0;
      layer.forward_workspace =
          layer.backward_workspace = {std::uint64_t{batch} * widths[l + 1] * 8};
      layer.forward_flops = 1e5;
      layer.backward_flops = 2e5;
      model.layers.push_back(layer);
    }
    return model;
  }
};

float initial(const TensorSpec& tensor, std::uint64_t index) {
  const auto hash = std::hash<std::string>{}(tensor.name) + index * 0x9E3779B97F4A7C15ULL;
  return static_cast<float>(static_cast<std::int64_t>(hash >> 40) - (1 << 23)) / (1 << 23);
}

void initialize(const TensorSpec& tensor, std::uint64_t first, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = initial(tensor, first + i);
}

float load(const std::byte* base, std::size_t index, DType dtype) {
  if (dtype == DType::bf16) {
    bfloat16 value;
    std::memcpy(&value, base + index * 2, 2);
    return to_float(value);
  }
  float value = 0;
  std::memcpy(&value, base + index * 4, 4);
  return value;
}

void store(std::byte* base, std::size_t index, DType dtype, float value) {
  if (dtype == DType::bf16) {
    const bfloat16 narrow = to_bfloat16(value);
    std::memcpy(base + index * 2, &narrow, 2);
  } else {
    std::memcpy(base + index * 4, &value, 4);
  }
}

struct Buffers {
  const std::byte* weight;
  const std::byte* bias;
  std::byte* weight_gradient;
  std::byte* bias_gradient;
  float* input;
  float* output;
  const float* output_gradient;
  float* input_gradient;
};

// y before squashing, for one row and column.
float dense(const Mlp& mlp, std::uint32_t l, const Buffers& b, std::uint32_t row, std::uint32_t j) {
  const auto in = mlp.widths[l];
  const auto out = mlp.widths[l + 1];
  float sum = load(b.bias, j, mlp.dtype);
  for (std::uint32_t i = 0; i < in; ++i) {
    sum += b.input[row * in + i] * load(b.weight, std::size_t{i} * out + j, mlp.dtype) /
           static_cast<float>(in);
  }
  return sum;
}

void forward(const Mlp& mlp, std::uint32_t l, const Buffers& b) {
  if (b.output == nullptr) return;
  const auto out = mlp.widths[l + 1];
  for (std::uint32_t row = 0; row < mlp.batch; ++row) {
    for (std::uint32_t j = 0; j < out; ++j) {
      const float y = dense(mlp, l, b, row, j);
      b.output[row * out + j] = y / (1 + std::abs(y));
    }
  }
}

// The last layer's loss is the mean of (out - 0.5)^2.
void backward(const Mlp& mlp, std::uint32_t l, const Buffers& b, std::vector<float>& scratch) {
  const auto in = mlp.widths[l];
  const auto out = mlp.widths[l + 1];
  scratch.assign(std::size_t{mlp.batch} * out, 0);
  for (std::uint32_t row = 0; row < mlp.batch; ++row) {
    for (std::uint32_t j = 0; j < out; ++j) {
      const float y = dense(mlp, l, b, row, j);
      const float squashed = 1 + std::abs(y);
      const float above = b.output_gradient != nullptr ? b.output_gradient[row * out + j]
                                                       : 2 * (y / squashed - 0.5F);
      scratch[row * out + j] = above / (squashed * squashed);
    }
  }
  for (std::uint32_t j = 0; j < out; ++j) {
    float bias = 0;
    for (std::uint32_t row = 0; row < mlp.batch; ++row) bias += scratch[row * out + j];
    store(b.bias_gradient, j, mlp.dtype, bias);
    for (std::uint32_t i = 0; i < in; ++i) {
      float sum = 0;
      for (std::uint32_t row = 0; row < mlp.batch; ++row) {
        sum += b.input[row * in + i] * scratch[row * out + j] / static_cast<float>(in);
      }
      store(b.weight_gradient, std::size_t{i} * out + j, mlp.dtype, sum);
    }
  }
  if (b.input_gradient == nullptr) return;
  for (std::uint32_t row = 0; row < mlp.batch; ++row) {
    for (std::uint32_t i = 0; i < in; ++i) {
      float sum = 0;
      for (std::uint32_t j = 0; j < out; ++j) {
        sum += scratch[row * out + j] * load(b.weight, std::size_t{i} * out + j, mlp.dtype) /
               static_cast<float>(in);
      }
      b.input_gradient[row * in + i] = sum;
    }
  }
}

void fill_input(const Mlp& mlp, std::uint64_t step, float* input) {
  for (std::uint32_t i = 0; i < mlp.batch * mlp.widths[0]; ++i) {
    input[i] = static_cast<float>((i * 37 + step * 101) % 97) / 97.0F - 0.5F;
  }
}

// ---- plainly in memory

struct PlainTensor {
  std::string name;
  std::vector<float> master, momentum, variance;
  std::vector<std::byte> parameter, gradient;
};

class Plain {
 public:
  Plain(const Mlp& mlp, const AdamOptions& options) : mlp_(mlp), options_(options) {
    for (const auto& layer : mlp.spec().layers) {
      for (const auto& spec : layer.tensors) {
        PlainTensor t{spec.name, {}, {}, {}, {}, {}};
        const auto n = spec.elements();
        t.master.resize(n);
        t.momentum.assign(n, 0);
        t.variance.assign(n, 0);
        t.parameter.resize(n * 4);
        t.gradient.resize(n * 4);
        initialize(spec, 0, t.master);
        for (std::size_t i = 0; i < n; ++i) store(t.parameter.data(), i, mlp.dtype, t.master[i]);
        tensors_.push_back(std::move(t));
      }
    }
    for (const auto width : mlp.widths) {
      inputs_.emplace_back(std::size_t{mlp.batch} * width);
      gradients_.emplace_back(std::size_t{mlp.batch} * width);
    }
  }

  void step(double rate, std::uint64_t number) {
    fill_input(mlp_, number, inputs_[0].data());
    std::vector<float> scratch;
    for (std::uint32_t l = 0; l < mlp_.layers(); ++l) forward(mlp_, l, buffers(l));
    for (std::uint32_t l = mlp_.layers(); l-- > 0;) backward(mlp_, l, buffers(l), scratch);
    for (auto& tensor : tensors_) update(tensor, rate, number);
  }

  const std::vector<PlainTensor>& tensors() const { return tensors_; }

 private:
  Buffers buffers(std::uint32_t l) {
    auto& weight = tensors_[l * 2];
    auto& bias = tensors_[l * 2 + 1];
    const bool last = l + 1 == mlp_.layers();
    return {weight.parameter.data(), bias.parameter.data(), weight.gradient.data(),
            bias.gradient.data(), inputs_[l].data(), last ? nullptr : inputs_[l + 1].data(),
            last ? nullptr : gradients_[l + 1].data(), l > 0 ? gradients_[l].data() : nullptr};
  }

  // The documented formula, written again.
  void update(PlainTensor& t, double rate, std::uint64_t number) {
    const auto& o = options_;
    const double n = static_cast<double>(number);
    const auto b1 = static_cast<float>(o.beta1), c1 = static_cast<float>(1 - o.beta1);
    const auto b2 = static_cast<float>(o.beta2), c2 = static_cast<float>(1 - o.beta2);
    const auto size = static_cast<float>(rate / (1 - std::pow(o.beta1, n)));
    const auto root = static_cast<float>(1 / std::sqrt(1 - std::pow(o.beta2, n)));
    const auto decay = static_cast<float>(1 - rate * o.weight_decay);
    for (std::size_t i = 0; i < t.master.size(); ++i) {
      const float g = load(t.gradient.data(), i, mlp_.dtype);
      const float g1 = c1 * g;
      const float g2 = c2 * g;
      const float g3 = g2 * g;
      t.momentum[i] = std::fma(b1, t.momentum[i], g1);
      t.variance[i] = std::fma(b2, t.variance[i], g3);
      const float d = std::fma(std::sqrt(t.variance[i]), root, static_cast<float>(o.epsilon));
      const float w = t.master[i] * decay;
      t.master[i] = std::fma(-size, t.momentum[i] / d, w);
      store(t.parameter.data(), i, mlp_.dtype, t.master[i]);
    }
  }

  const Mlp mlp_;
  const AdamOptions options_;
  std::vector<PlainTensor> tensors_;
  std::vector<std::vector<float>> inputs_, gradients_;
};

// ---- through the tiers

Buffers buffers_of(const LayerView& view) {
  return {view.parameter(0), view.parameter(1), view.gradient(0), view.gradient(1),
          reinterpret_cast<float*>(view.input()), reinterpret_cast<float*>(view.output()),
          reinterpret_cast<const float*>(view.output_gradient()),
          reinterpret_cast<float*>(view.input_gradient())};
}

void train_step(Engine& engine, const Mlp& mlp, double rate, std::uint64_t number) {
  auto step = engine.begin_step({rate});
  std::vector<float> scratch;
  for (std::uint32_t l = 0; l < mlp.layers(); ++l) {
    const auto view = step.forward(LayerId{l});
    view.launch([&mlp, l, number, b = buffers_of(view)] {
      if (l == 0) fill_input(mlp, number, b.input);
      forward(mlp, l, b);
    });
  }
  for (std::uint32_t l = mlp.layers(); l-- > 0;) {
    auto view = step.backward(LayerId{l});
    view.launch([&mlp, &scratch, l, b = buffers_of(view)] { backward(mlp, l, b, scratch); });
    view.submit_gradients();
  }
  step.finish();
}

void evaluate(Engine& engine, const Mlp& mlp) {
  auto step = engine.begin_evaluation();
  for (std::uint32_t l = 0; l < mlp.layers(); ++l) {
    const auto view = step.forward(LayerId{l});
    view.launch([&mlp, l, b = buffers_of(view)] {
      if (l == 0) fill_input(mlp, 12345, b.input);
      forward(mlp, l, b);
    });
  }
  step.finish();
}

void expect_equal(Engine& engine, const Plain& plain, DType dtype) {
  for (const auto& tensor : plain.tensors()) {
    std::vector<float> values(tensor.master.size());
    const auto compare = [&](Content content, auto&& expected) {
      engine.read(tensor.name, content, 0, values);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const float wanted = expected(i);
        ASSERT_EQ(std::bit_cast<std::uint32_t>(values[i]), std::bit_cast<std::uint32_t>(wanted))
            << tensor.name << " " << to_string(content) << "[" << i << "]";
      }
    };
    compare(Content::parameter,
            [&](std::size_t i) { return load(tensor.parameter.data(), i, dtype); });
    compare(Content::master_weight, [&](std::size_t i) { return tensor.master[i]; });
    compare(Content::momentum, [&](std::size_t i) { return tensor.momentum[i]; });
    compare(Content::variance, [&](std::size_t i) { return tensor.variance[i]; });
  }
}

// A store locks its directory, and tests run side by side.
class Directory {
 public:
  Directory() : path_(std::filesystem::current_path() / ("oracle-" + std::to_string(::getpid()))) {
    std::filesystem::create_directory(path_);
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  Directory(const Directory&) = delete;
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

Config base_config(IoEngineKind engine, const Directory& directory) {
  Config config;
  config.nvme = {{directory.path(), {}, {}}};
  config.io.kind = engine;
  config.io.block = 64_KiB;
  config.optimizer.weight_decay = 0.01;
  config.store.mode = StoreMode::discard;
  return config;
}

EnginePorts quick() {
  EnginePorts ports;
  ports.speeds = Speeds{};
  return ports;
}

// The smallest budget of a tier, in whole pages, that the planner takes with the others as they
// are.
Bytes smallest(const Config& config, const ModelLayout& layout, PerTier<Bytes> budget, Tier tier) {
  std::uint64_t refused = 0;
  std::uint64_t taken = at(budget, tier).count / kPage.count;
  while (refused + 1 < taken) {
    const auto middle = refused + (taken - refused) / 2;
    at(budget, tier) = middle * kPage;
    try {
      plan_engine({layout, budget, config.placement, Speeds{}, 1, 0,
                   {config.store.slots == 2, config.store.commit_interval, {1}, {}}});
      taken = middle;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::out_of_budget) << error.what();
      refused = middle;
    }
  }
  return taken * kPage;
}

// Plenty, the smallest that the planner takes, or a little more than that.
void choose_budgets(Config& config, const Mlp& mlp, Random& random) {
  config.budget.hbm = 64_MiB;
  config.budget.dram = 64_MiB;
  const auto size = pick(random, 0, 2);
  if (size == 2) return;
  const ModelLayout layout(mlp.spec(), config.segment);
  PerTier<Bytes> budget{64_MiB, 64_MiB, 1_GiB};
  config.budget.dram = at(budget, Tier::dram) = smallest(config, layout, budget, Tier::dram);
  config.budget.hbm = smallest(config, layout, budget, Tier::hbm);
  if (size == 0) return;
  *config.budget.dram += Bytes{pick(random, 0, 300000)};
  *config.budget.hbm += Bytes{pick(random, 0, 300000)};
}

void train_and_compare(const Config& config, const Mlp& mlp, Plain& plain, Random& random,
                       std::uint64_t steps) {
  Engine engine(config, mlp.spec(), initialize, quick());
  const bool resumes = config.store.mode == StoreMode::resume;
  ASSERT_EQ(engine.resumed_step().has_value(), resumes);
  if (resumes) expect_equal(engine, plain, mlp.dtype);
  const auto first = engine.steps();
  for (std::uint64_t s = first + 1; s <= first + steps; ++s) {
    const double rate = 0.01 / static_cast<double>(s);
    train_step(engine, mlp, rate, s);
    plain.step(rate, s);
    if (pick(random, 0, 1) == 0) evaluate(engine, mlp);
  }
  engine.drain();
  const auto stats = engine.stats();
  expect_equal(engine, plain, mlp.dtype);
  for (const Tier tier : kTiers) {
    EXPECT_EQ(at(stats.peak, tier), at(engine.forecast().tiers, tier).peak);
    EXPECT_LE(at(stats.peak, tier), at(engine.forecast().tiers, tier).budget);
  }
  for (const Lane lane : kLanes) {
    EXPECT_EQ(at(stats.lanes, lane).bytes, at(stats.lanes, lane).planned_bytes)
        << to_string(lane);
  }
  if (config.store.slots == 2) engine.commit("kept");
}

class Oracle : public testing::TestWithParam<IoEngineKind> {};

TEST_P(Oracle, TieredTrainingEqualsPlainTraining) {
  const auto seed = fresh_seed();
  const Directory directory;
  for (std::uint64_t trial = 0; trial < 12; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(seed) + " trial " + std::to_string(trial));
    Random random(seed + trial);
    Mlp mlp;
    const auto depth = pick(random, 2, 6);
    for (std::uint64_t i = 0; i < depth; ++i) {
      mlp.widths.push_back(static_cast<std::uint32_t>(pick(random, 1, 90)));
    }
    mlp.dtype = pick(random, 0, 1) == 0 ? DType::bf16 : DType::fp32;
    Config config = base_config(GetParam(), directory);
    config.segment = Bytes{4096ULL << pick(random, 0, 3)};
    config.adam_threads = static_cast<int>(pick(random, 1, 2));
    config.store.slots = static_cast<std::uint32_t>(pick(random, 1, 2));
    config.store.commit_interval = pick(random, 1, 3);
    config.store.checksums = pick(random, 0, 3) != 0;
    Plain plain(mlp, config.optimizer);
    choose_budgets(config, mlp, random);
    train_and_compare(config, mlp, plain, random, 4);
    if (config.store.slots == 2 && GetParam() != IoEngineKind::memory) {
      config.store.mode = StoreMode::resume;  // from where the last one committed, in other homes
      choose_budgets(config, mlp, random);
      train_and_compare(config, mlp, plain, random, 3);
    }
    if (HasFailure()) break;
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, Oracle,
                         testing::Values(IoEngineKind::automatic, IoEngineKind::threads,
                                         IoEngineKind::memory),
                         [](const auto& engine) { return std::string(to_string(engine.param)); });

}  // namespace
}  // namespace terrace
