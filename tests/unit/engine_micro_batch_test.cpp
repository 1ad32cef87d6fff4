// Steps of several micro-batches: their order, what abandoning one leaves, and what the sum means.
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "terrace/error.h"
#include "tests/support/directory.h"
#include "tests/support/mlp.h"

namespace terrace {
namespace {

class MicroBatches : public testing::Test {
 protected:
  void start(std::uint32_t micro_batches) {
    engine_.reset();
    mlp_.micro_batches = micro_batches;
    Config config;
    config.segment = 4_KiB;
    config.nvme = {{directory_.path(), {}, {}}};
    config.io.kind = IoEngineKind::memory;
    config.placement.momentum = TierFractions{0, 0.3, 0.7};
    config.budget.hbm = config.budget.dram = 16_MiB;
    config.micro_batches = micro_batches;
    EnginePorts ports;
    ports.speeds = Speeds{};
    engine_.emplace(config, mlp_.spec(), initialize, std::move(ports));
    plain_.emplace(mlp_, config.optimizer);
  }

  // The first `uses` of a step, whose gradients are of other data than those of any whole step.
  void visit(Step& step, std::uint32_t uses) {
    for (std::uint32_t use = 0; use < uses; ++use) {
      const auto at = use % (2 * mlp_.layers());
      if (at < mlp_.layers()) {
        const auto view = step.forward(LayerId{at});
        view.launch([this, at, b = buffers_of(view)] {
          if (at == 0) fill_input(mlp_, 777, b.input);
          forward(mlp_, at, b);
        });
        continue;
      }
      const std::uint32_t layer = 2 * mlp_.layers() - 1 - at;
      auto view = step.backward(LayerId{layer});
      view.launch([this, layer, b = buffers_of(view)] { backward(mlp_, layer, b, scratch_); });
      view.submit_gradients();
    }
  }

  void whole_step(std::uint64_t number) {
    train_step(*engine_, mlp_, 0.01, number);
    plain_->step(0.01, number);
  }

  std::string refused(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return "no error";
  }

  const Directory directory_{"micro_batches"};
  Mlp mlp_{{40, 30, 20}};
  std::vector<float> scratch_;
  std::optional<Engine> engine_;
  std::optional<Plain> plain_;
};

TEST_F(MicroBatches, ComeOneAfterTheOther) {
  start(3);
  auto step = engine_->begin_step();
  visit(step, 5);
  const auto early = refused([&] { step.finish(); });
  EXPECT_NE(early.find("forward of layer 'dense1' of micro-batch 2 of 3 comes next, and 7 uses are "
                       "missing"),
            std::string::npos)
      << early;
  const auto twice = refused([&] { step.forward(LayerId{0}); });
  EXPECT_NE(twice.find("micro-batch 2 of 3"), std::string::npos) << twice;
  step.forward(LayerId{1});
  for (const std::uint32_t layer : {1U, 0U}) step.backward(LayerId{layer}).submit_gradients();
  visit(step, 4);
  const auto more = refused([&] { step.forward(LayerId{0}); });
  EXPECT_NE(more.find("the end of the step comes next"), std::string::npos) << more;
  EXPECT_EQ(step.finish().step, 1U);
}

// Pending updates of the step before are made, wherever this one ends.
TEST_F(MicroBatches, AbandonedAnywhereLeaveTheStepBefore) {
  for (const std::uint32_t micro_batches : {2U, 3U}) {
    const std::uint32_t uses = micro_batches * 2 * mlp_.layers();
    for (std::uint32_t visited = 0; visited < uses; ++visited) {
      SCOPED_TRACE(std::to_string(visited) + " of " + std::to_string(uses));
      start(micro_batches);
      whole_step(1);
      {
        auto step = engine_->begin_step();
        visit(step, visited);
      }
      ASSERT_EQ(difference(*engine_, *plain_, mlp_.dtype), "");
      EXPECT_EQ(engine_->steps(), 1U);
      whole_step(2);
      ASSERT_EQ(difference(*engine_, *plain_, mlp_.dtype), "");
    }
  }
}

TEST_F(MicroBatches, ThatAreAllAlikeAreAsGoodAsOne) {
  std::string one;
  for (const std::uint32_t micro_batches : {1U, 4U}) {
    start(micro_batches);
    std::vector<float> weights(mlp_.widths[0] * mlp_.widths[1]);
    for (int i = 0; i < 3; ++i) {
      auto step = engine_->begin_step({0.01});
      visit(step, micro_batches * 2 * mlp_.layers());
      step.finish();
    }
    engine_->read("dense0.weight", Content::master_weight, 0, weights);
    std::string bits(reinterpret_cast<const char*>(weights.data()), weights.size() * 4);
    if (micro_batches == 1) one = bits;
    EXPECT_EQ(bits, one);
  }
}

TEST_F(MicroBatches, NeedADtypeThatHoldsTheirSum) {
  Config config;
  config.micro_batches = 2;
  config.accumulation_dtype = DType::fp16;
  const auto message = refused([&] { Engine engine(config, mlp_.spec(), initialize); });
  EXPECT_NE(message.find("bf16 cannot be accumulated in fp16"), std::string::npos) << message;
  config.micro_batches = 0;
  config.accumulation_dtype = DType::fp32;
  EXPECT_NE(refused([&] { Engine engine(config, mlp_.spec(), initialize); }).find("micro-batch"),
            std::string::npos);
}

}  // namespace
}  // namespace terrace
