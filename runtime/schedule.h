// The order in which layers are used.
#pragma once

#include <cstdint>
#include <vector>

#include "terrace/types.h"

namespace terrace {

enum class Phase : std::uint8_t { forward, backward };

struct LayerUse {
  Phase phase = Phase::forward;
  LayerId layer;
  friend bool operator==(LayerUse, LayerUse) = default;
};

struct LayerSchedule {
  std::vector<LayerUse> uses;
  bool training = false;  // inputs are saved and gradients lead to updates
  bool commits = false;   // and all state is made durable at the end
};

// The plans of an engine; each has its own schedule.
enum class PassKind : std::uint8_t { training, committing, evaluation };
inline constexpr std::size_t kPassKindCount = 3;
inline constexpr PassKind kPassKinds[] = {PassKind::training, PassKind::committing,
                                          PassKind::evaluation};

// Forward through layers 0..n-1, then backward through n-1..0.
LayerSchedule training_schedule(std::size_t layers, bool commits = false);
// Forward only; nothing is saved or changed.
LayerSchedule evaluation_schedule(std::size_t layers);

}  // namespace terrace
