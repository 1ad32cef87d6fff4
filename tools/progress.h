// Live progress: a bar on a terminal, some plain lines elsewhere.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "terrace/engine.h"

namespace terrace::cli {

// What a line of progress tells.
struct FinishedStep {
  std::uint64_t step = 0;  // from 1
  double loss = 0;         // bits per byte
  double seconds = 0;
  std::optional<double> gradient_norm{};
  std::optional<double> loss_scale{};
};

// Thread rule: one thread.
class Progress {
 public:
  // `before`: steps that a resumed run need not make again.
  Progress(std::uint64_t steps, std::uint64_t tokens_per_step, std::uint64_t before);

  void show(const FinishedStep& done, const EngineStats& stats);
  // A line of its own.
  void tell(const std::string& text) const;
  void end();

 private:
  std::string lanes(const EngineStats& stats, double seconds);

  const std::uint64_t steps_;
  const std::uint64_t tokens_;
  const std::uint64_t before_steps_;
  const bool terminal_;
  double spent_ = 0;
  double told_at_ = 0;  // of spent_
  PerLane<LaneStats> before_{};
};

}  // namespace terrace::cli
