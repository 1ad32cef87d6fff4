// Live progress: a bar on a terminal, some plain lines elsewhere.
#pragma once

#include <cstdint>
#include <string>

#include "terrace/engine.h"

namespace terrace::cli {

// Thread rule: one thread.
class Progress {
 public:
  // `before`: steps that a resumed run need not make again.
  Progress(std::uint64_t steps, std::uint64_t tokens_per_step, std::uint64_t before);

  // After step `step` (from 1); loss in bits per byte.
  void show(std::uint64_t step, double loss, double seconds, const EngineStats& stats);
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
