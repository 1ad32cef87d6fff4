// The engine seen from a trainer that makes mistakes. Everything is in memory.
#include "terrace/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "nvme/engines.h"
#include "nvme/simulation.h"
#include "terrace/error.h"
#include "tests/support/directory.h"

namespace terrace {
namespace {

constexpr std::uint32_t kLayers = 3;

// Layers of so many parameters each; the middle one has none. Gradients are a constant.
ModelSpec model() {
  ModelSpec spec;
  spec.parameter_dtype = spec.gradient_dtype = DType::fp32;
  for (std::uint32_t l = 0; l < kLayers; ++l) {
    LayerSpec layer;
    layer.name = "layer" + std::to_string(l);
    if (l != 1) layer.tensors = {{layer.name + ".w", {3000}}, {layer.name + ".empty", {0}}};
    layer.input_bytes = {l == 2 ? 0U : 64U};
    layer.input_gradient = l > 0;
    spec.layers.push_back(layer);
  }
  return spec;
}

void initialize(const TensorSpec&, std::uint64_t first, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(first + i);
}

class EngineTest : public testing::Test {
 protected:
  EngineTest() { start({}); }

  // Writes that fail: from the n-th on, when `fault` says so.
  void start(const FaultPlan& fault) {
    engine_.reset();
    counters_ = std::make_shared<FaultCounters>();
    Config config;
    config.segment = 4_KiB;
    config.nvme = {{directory_.path(), {}, {}}};
    config.io.kind = IoEngineKind::memory;
    config.placement.master_weight = config.placement.momentum = config.placement.variance =
        TierFractions{0, 0.3, 0.7};
    config.budget.hbm = 4_MiB;
    config.gradient_clipping = clip_;
    config.store.commit_interval = interval_;
    config.atomic_steps = interval_ == 1;
    EnginePorts ports;
    ports.speeds = Speeds{};
    ports.io_engine = [fault, counters = counters_] {
      return make_fault_engine(make_memory_engine(1), fault, counters);
    };
    engine_.emplace(config, model(), initialize, std::move(ports));
  }

  // With clipping the updates of a step are made in the next.
  void defer() {
    clip_ = 1e-3;
    start({});
  }

  static void write_gradients(const LayerView& view, float first = 1) {
    if (view.layer().value == 1) return;
    view.launch([first, gradient = view.gradient(0)] {
      std::vector<float> ones(3000, 1.0F);
      ones[0] = first;
      std::memcpy(gradient, ones.data(), ones.size() * sizeof(float));
    });
  }

  void forward_all(Step& step) {
    for (std::uint32_t l = 0; l < kLayers; ++l) step.forward(LayerId{l});
  }

  void whole_step() {
    auto step = engine_->begin_step();
    forward_all(step);
    for (std::uint32_t l = kLayers; l-- > 0;) {
      auto view = step.backward(LayerId{l});
      write_gradients(view);
      view.submit_gradients();
    }
    step.finish();
  }

  void abandon_after_updates() {
    const auto done = at(engine_->stats().lanes, Lane::adam).bytes;
    auto step = engine_->begin_step();
    forward_all(step);
    for (const std::uint32_t l : {2U, 1U}) {
      auto view = step.backward(LayerId{l});
      write_gradients(view, 77);
      view.submit_gradients();
    }
    const auto wait = step.backward(LayerId{0});  // by now layer 2 may be updated
    engine_->device().synchronize(kComputeStream);
    while (at(engine_->stats().lanes, Lane::adam).bytes < done + Bytes{3000 * 36}) {
      steady_clock().sleep_until(steady_clock().now() + std::chrono::milliseconds(1));
    }
  }

  void expect_skipped() {
    const auto before = weights();
    const auto steps = engine_->steps();
    auto step = engine_->begin_step();
    forward_all(step);
    for (std::uint32_t l = kLayers; l-- > 0;) {
      auto view = step.backward(LayerId{l});
      write_gradients(view, l == 2 ? NAN : INFINITY);
      view.submit_gradients();
    }
    bool told = false;
    const auto report = step.finish([&](const StepReport& seen) {
      told = seen.skipped;
      return std::string();
    });
    EXPECT_TRUE(report.skipped && told);
    EXPECT_EQ(report.bad_tensor, "layer0.w");  // in the order of layers, not of time
    EXPECT_EQ(report.bad_index, 0U);
    EXPECT_EQ(report.step, steps);
    EXPECT_EQ(weights(), before);
    whole_step();
    EXPECT_EQ(engine_->steps(), steps + 1);
    EXPECT_NE(weights(), before);
  }

  std::vector<float> weights() {
    std::vector<float> values(3000);
    engine_->read("layer0.w", Content::master_weight, 0, values);
    return values;
  }

  static ErrorCode code_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      said_ = error.what();
      return error.code();
    }
    ADD_FAILURE() << "no error";
    return ErrorCode::io;
  }

  const Directory directory_{"engine"};
  double clip_ = 0;
  std::uint64_t interval_ = 1;
  std::shared_ptr<FaultCounters> counters_;
  std::optional<Engine> engine_;
  static inline std::string said_;
};

TEST_F(EngineTest, ReadsPiecesOfEveryTensor) {
  std::vector<float> values(10);
  engine_->read("layer2.w", Content::parameter, 2990, values);
  EXPECT_EQ(values.front(), 2990.0F);
  engine_->read("layer2.w", Content::momentum, 0, values);
  EXPECT_EQ(values.back(), 0.0F);
  engine_->read("layer0.empty", Content::parameter, 0, {});
  const auto read = [&](const char* name, Content content, std::uint64_t first) {
    return code_of([&] { engine_->read(name, content, first, values); });
  };
  EXPECT_EQ(read("nobody", Content::parameter, 0), ErrorCode::invalid_argument);
  EXPECT_EQ(read("layer0.w", Content::gradient, 0), ErrorCode::invalid_argument);
  EXPECT_EQ(read("layer0.w", Content::parameter, 2991), ErrorCode::invalid_argument);
  EXPECT_EQ(read("layer0.w", Content::parameter, ~0ULL), ErrorCode::invalid_argument);
}

TEST_F(EngineTest, ALayerOutOfOrderIsAnErrorAndTheStepGoesOn) {
  const auto before = weights();
  auto step = engine_->begin_step();
  EXPECT_EQ(code_of([&] { step.forward(LayerId{1}); }), ErrorCode::invalid_argument);
  EXPECT_NE(said_.find("'layer0'"), std::string::npos) << said_;
  EXPECT_EQ(code_of([&] { step.backward(LayerId{0}); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { step.forward(LayerId{77}); }), ErrorCode::invalid_argument);
  step.forward(LayerId{0});
  EXPECT_EQ(code_of([&] { step.forward(LayerId{0}); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { step.finish(); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { engine_->begin_step(); }), ErrorCode::invalid_argument);
  {
    auto view = step.forward(LayerId{1});
    EXPECT_EQ(code_of([&] { step.forward(LayerId{2}); }), ErrorCode::invalid_argument);
    EXPECT_EQ(code_of([&] { view.submit_gradients(); }), ErrorCode::invalid_argument);
  }
  step.forward(LayerId{2});
  for (std::uint32_t l = kLayers; l-- > 0;) {
    auto view = step.backward(LayerId{l});
    write_gradients(view);
    view.submit_gradients();
    EXPECT_EQ(code_of([&] { view.submit_gradients(); }), ErrorCode::invalid_argument);
  }
  EXPECT_EQ(step.finish().step, 1U);
  EXPECT_NE(weights(), before);
}

TEST_F(EngineTest, AStepAbandonedInForwardLeavesTheStateAsItWas) {
  whole_step();
  const auto before = weights();
  for (std::uint32_t visited = 0; visited <= kLayers; ++visited) {
    auto step = engine_->begin_step();
    for (std::uint32_t l = 0; l < visited; ++l) step.forward(LayerId{l});
  }
  EXPECT_EQ(weights(), before);
  EXPECT_EQ(engine_->steps(), 1U);
  whole_step();
  EXPECT_EQ(engine_->steps(), 2U);
  EXPECT_NE(weights(), before);
}

TEST_F(EngineTest, AnExceptionInForwardLeavesTheEngineUsable) {
  const auto before = weights();
  try {
    auto step = engine_->begin_step();
    const auto view = step.forward(LayerId{0});
    throw std::runtime_error("the trainer's own");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(weights(), before);
  whole_step();
  EXPECT_EQ(engine_->steps(), 1U);
}

TEST_F(EngineTest, GradientsThatWereNotSubmittedCancelTheStep) {
  const auto before = weights();
  {
    auto step = engine_->begin_step();
    forward_all(step);
    { const auto view = step.backward(LayerId{2}); }
    EXPECT_EQ(code_of([&] { step.backward(LayerId{1}); }), ErrorCode::cancelled);
    EXPECT_EQ(code_of([&] { step.finish(); }), ErrorCode::cancelled);
  }
  EXPECT_EQ(weights(), before);
  whole_step();
  EXPECT_EQ(engine_->steps(), 1U);
}

// Nothing undoes updates when the last commit holds an earlier step.
TEST_F(EngineTest, AStepAbandonedAfterUpdatesMayFailTheEngineForGood) {
  interval_ = 2;
  start({});
  abandon_after_updates();
  EXPECT_EQ(code_of([&] { engine_->begin_step(); }), ErrorCode::cancelled);
  EXPECT_NE(said_.find("abandoned"), std::string::npos) << said_;
}

TEST_F(EngineTest, AStepAbandonedAfterUpdatesIsUndone) {
  auto before = weights();
  for (std::uint64_t step = 0; step < 3; ++step) {
    abandon_after_updates();
    EXPECT_EQ(weights(), before);
    EXPECT_EQ(engine_->steps(), step);
    whole_step();
    EXPECT_NE(weights(), before);
    before = weights();
  }
}

// Whatever was visited, the step before is made whole and this one leaves nothing.
TEST_F(EngineTest, ADeferredStepAbandonedAnywhereLeavesTheStepBefore) {
  defer();
  std::vector<float> after_one;
  for (std::uint32_t visited = 0; visited < 2 * kLayers; ++visited) {
    defer();
    whole_step();
    {
      auto step = engine_->begin_step();
      for (std::uint32_t u = 0; u < visited; ++u) {
        if (u < kLayers) {
          step.forward(LayerId{u});
          continue;
        }
        auto view = step.backward(LayerId{2 * kLayers - 1 - u});
        write_gradients(view, 77);
        view.submit_gradients();
      }
    }
    if (visited == 0) after_one = weights();
    EXPECT_EQ(weights(), after_one) << visited;
    EXPECT_EQ(engine_->steps(), 1U);
    whole_step();
    EXPECT_EQ(engine_->steps(), 2U);
    EXPECT_NE(weights(), after_one) << visited;
  }
}

TEST_F(EngineTest, AGradientThatIsNotFiniteSkipsTheStep) {
  for (const bool deferred : {false, true}) {
    if (deferred) defer();
    expect_skipped();  // the first
    whole_step();
    expect_skipped();
  }
}

TEST_F(EngineTest, AGradientThatIsNotFiniteMayEndTheRun) {
  interval_ = 2;
  start({});
  EXPECT_EQ(code_of([&] { expect_skipped(); }), ErrorCode::corrupt);
  EXPECT_NE(said_.find("element 0 of the gradient of 'layer0.w'"), std::string::npos) << said_;
  EXPECT_EQ(code_of([&] { engine_->begin_step(); }), ErrorCode::corrupt);
}

// A commit would wait for what the trainer wants kept.
TEST_F(EngineTest, ATrainerStateThatFailsCancelsTheStep) {
  const TrainerState kFailing[] = {
      [](const StepReport&) -> std::string { throw std::runtime_error("the trainer's own"); },
      [](const StepReport&) { return std::string(1 << 20, 'x'); }};
  for (const bool deferred : {false, true}) {
    if (deferred) defer();
    whole_step();
    const auto before = weights();
    for (const auto& state : kFailing) {
      auto step = engine_->begin_step();
      forward_all(step);
      for (std::uint32_t l = kLayers; l-- > 0;) {
        auto view = step.backward(LayerId{l});
        write_gradients(view, 77);
        view.submit_gradients();
      }
      EXPECT_ANY_THROW(step.finish(state));
      EXPECT_EQ(engine_->steps(), 1U);
      EXPECT_EQ(weights(), before);
    }
    whole_step();
    EXPECT_EQ(engine_->steps(), 2U);
    EXPECT_NE(weights(), before);
  }
}

TEST_F(EngineTest, NormsAreThoseOfAllGradients) {
  defer();
  auto step = engine_->begin_step();
  forward_all(step);
  for (std::uint32_t l = kLayers; l-- > 0;) {
    auto view = step.backward(LayerId{l});
    write_gradients(view);
    view.submit_gradients();
  }
  const auto report = step.finish();
  EXPECT_EQ(report.gradient_norm, std::sqrt(6000.0));
  EXPECT_NEAR(report.clipped_norm.value_or(0), 1e-3, 1e-10);
  EXPECT_FALSE(report.skipped);
}

TEST_F(EngineTest, AVisitedStepThatIsDestroyedIsFinished) {
  {
    auto step = engine_->begin_step();
    forward_all(step);
    for (std::uint32_t l = kLayers; l-- > 0;) {
      auto view = step.backward(LayerId{l});
      write_gradients(view);
      view.submit_gradients();
    }
  }
  EXPECT_EQ(engine_->steps(), 1U);
  {
    auto pass = engine_->begin_evaluation();
    for (std::uint32_t l = 0; l < kLayers; ++l) pass.forward(LayerId{l});
    engine_->device().synchronize(kComputeStream);
    steady_clock().sleep_until(steady_clock().now() + std::chrono::milliseconds(5));
  }
  whole_step();
  EXPECT_EQ(engine_->steps(), 2U);
}

TEST_F(EngineTest, AStepThatIsOverDoesNotTouchTheNext) {
  std::optional<Step> old = engine_->begin_evaluation();
  for (std::uint32_t l = 0; l < kLayers; ++l) old->forward(LayerId{l});
  old->finish();
  auto step = engine_->begin_step();
  EXPECT_EQ(code_of([&] { old->forward(LayerId{0}); }), ErrorCode::invalid_argument);
  old.reset();
  step.forward(LayerId{0});
  EXPECT_EQ(code_of([&] { engine_->drain(); }), ErrorCode::invalid_argument);
}

TEST_F(EngineTest, AViewThatOutlivesItsStepIsNoticed) {
  std::optional<Step> step = engine_->begin_step();
  std::optional<LayerView> view = step->forward(LayerId{0});
  step.reset();
  EXPECT_EQ(code_of([&] { engine_->begin_step(); }), ErrorCode::invalid_argument);
  view.reset();
  whole_step();
  EXPECT_EQ(engine_->steps(), 1U);
}

TEST_F(EngineTest, WorkOfAnAbandonedStepHasEndedWhenTheStepIsGone) {
  bool ran = false;
  {
    auto step = engine_->begin_step();
    step.forward(LayerId{0}).launch([&] {
      steady_clock().sleep_until(steady_clock().now() + std::chrono::milliseconds(20));
      ran = true;
    });
  }
  EXPECT_TRUE(ran);
}

// What the layer functions use may be the trainer's, and goes when the step has gone.
TEST_F(EngineTest, WorkOfAStepThatCannotFinishHasEndedWhenTheStepIsGone) {
  const auto writes = counters_->calls[static_cast<std::size_t>(IoCall::write)].load();
  start({.at = writes + 1, .only = IoCall::write, .persistent = true});
  std::atomic<bool> visited = false;
  std::atomic<bool> ran = false;
  EXPECT_EQ(code_of([&] {
              auto step = engine_->begin_step();
              forward_all(step);
              for (std::uint32_t l = kLayers; l-- > 0;) {
                auto view = step.backward(LayerId{l});
                if (l == 2) view.launch([&] { visited.wait(false); });  // no update before
                write_gradients(view);
                view.submit_gradients();
                if (l > 0) continue;
                view.launch([&] {
                  steady_clock().sleep_until(steady_clock().now() + std::chrono::milliseconds(50));
                  ran = true;
                });
              }
              visited = true;
              visited.notify_all();
              step.finish();
            }),
            ErrorCode::io);
  EXPECT_TRUE(ran);
}

TEST_F(EngineTest, AFunctionThatThrowsOnTheDeviceEndsTheStepWithItsMessage) {
  auto step = engine_->begin_step();
  {
    const auto view = step.forward(LayerId{0});
    view.launch([] { throw std::runtime_error("kernel of layer 0 broke"); });
  }
  EXPECT_EQ(code_of([&] {
              for (std::uint32_t l = 1; l < kLayers; ++l) step.forward(LayerId{l});
              for (std::uint32_t l = kLayers; l-- > 0;) {
                step.backward(LayerId{l}).submit_gradients();
              }
              step.finish();
            }),
            ErrorCode::device);
  EXPECT_NE(said_.find("kernel of layer 0 broke"), std::string::npos) << said_;
}

}  // namespace
}  // namespace terrace
