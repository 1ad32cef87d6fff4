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

// When the updates that a step's gradients lead to are made.
enum class UpdateTime : std::uint8_t {
  overlapped,  // during its own backward
  deferred,    // in the next pass, each layer's before its forward: all gradients are known then
};

struct LayerSchedule {
  std::vector<LayerUse> uses;
  bool training = false;  // inputs are saved and gradients lead to updates
  UpdateTime update_time = UpdateTime::overlapped;
  bool pending = false;  // deferred: the updates of the step before are made
  bool commits = false;  // once the updates of this pass are written, all state is made durable
};

// The plans of an engine; each has its own schedule.
enum class PassKind : std::uint8_t {
  training,
  committing,
  evaluation,  // deferred: only when no updates are pending
  fresh,       // deferred: a training step when no updates are pending
  settling,    // deferred: nothing but the pending updates
  settling_committing,
};
inline constexpr std::size_t kPassKindCount = 6;
inline constexpr PassKind kPassKinds[] = {PassKind::training,   PassKind::committing,
                                          PassKind::evaluation, PassKind::fresh,
                                          PassKind::settling,   PassKind::settling_committing};

// Whether an engine has such passes, and one directly after the other.
bool exists(PassKind kind, UpdateTime time);
bool may_follow(PassKind previous, PassKind next, UpdateTime time);

// Training: forward through layers 0..n-1, then backward through n-1..0. Evaluation: forward only;
// nothing is saved or changed. Settling: no uses.
LayerSchedule schedule_of(PassKind kind, std::size_t layers, UpdateTime time);

}  // namespace terrace
