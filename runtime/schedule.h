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

// What an engine's steps are made of.
struct StepForm {
  UpdateTime update_time = UpdateTime::overlapped;
  std::uint32_t micro_batches = 1;  // passes of a step; more than one: updates are deferred
  friend bool operator==(StepForm, StepForm) = default;
};

struct LayerSchedule {
  std::vector<LayerUse> uses;
  bool training = false;  // inputs are saved and gradients lead to updates
  UpdateTime update_time = UpdateTime::overlapped;
  bool pending = false;  // deferred: the updates of the step before are made
  bool commits = false;  // once the updates of this pass are written, all state is made durable
  bool accumulates = false;  // the step has several micro-batches, whose gradients are added up
  bool first = true;         // and this pass is of the first, or of the last
  bool last = true;
};

// What deferred updates find.
constexpr Content kept_gradient(bool accumulates) {
  return accumulates ? Content::accumulated_gradient : Content::gradient;
}

// The plans of an engine; each has its own schedule.
enum class PassKind : std::uint8_t {
  training,
  committing,
  evaluation,  // deferred: only when no updates are pending
  fresh,       // deferred: a training step when no updates are pending
  settling,    // deferred: nothing but the pending updates
  settling_committing,
  adding,   // a micro-batch that is neither the first nor the last of its step
  closing,  // the last of several; the others above that train are the first then
};
inline constexpr std::size_t kPassKindCount = 8;
inline constexpr PassKind kPassKinds[] = {
    PassKind::training, PassKind::committing,          PassKind::evaluation, PassKind::fresh,
    PassKind::settling, PassKind::settling_committing, PassKind::adding,     PassKind::closing};

// Whether an engine has such passes, and one directly after the other.
bool exists(PassKind kind, StepForm form);
bool may_follow(PassKind previous, PassKind next, StepForm form);
// The pass of a micro-batch, counted from 0, behind the first.
PassKind kind_of(std::uint32_t micro_batch, StepForm form);

// Training: forward through layers 0..n-1, then backward through n-1..0. Evaluation: forward only;
// nothing is saved or changed. Settling: no uses.
LayerSchedule schedule_of(PassKind kind, std::size_t layers, StepForm form);

}  // namespace terrace
