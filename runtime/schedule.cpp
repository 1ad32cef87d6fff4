#include "runtime/schedule.h"

namespace terrace {
namespace {

bool settles(PassKind kind) {
  return kind == PassKind::settling || kind == PassKind::settling_committing;
}

bool trains(PassKind kind) { return kind != PassKind::evaluation && !settles(kind); }

// A micro-batch behind the first.
bool goes_on(PassKind kind) { return kind == PassKind::adding || kind == PassKind::closing; }

// Whether the pass ends a step.
bool ends(PassKind kind, StepForm form) {
  return kind == PassKind::closing || (trains(kind) && form.micro_batches == 1);
}

// Whether the pass makes the updates of the step before.
bool needs_pending(PassKind kind) {
  return kind != PassKind::evaluation && kind != PassKind::fresh && !goes_on(kind);
}

}  // namespace

bool exists(PassKind kind, StepForm form) {
  if (kind == PassKind::closing) return form.micro_batches > 1;
  if (kind == PassKind::adding) return form.micro_batches > 2;
  return form.update_time == UpdateTime::deferred || kind == PassKind::training ||
         kind == PassKind::committing || kind == PassKind::evaluation;
}

// A skipped step leaves nothing pending, so a fresh one may follow any step.
bool may_follow(PassKind previous, PassKind next, StepForm form) {
  if (!exists(previous, form) || !exists(next, form)) return false;
  if (form.update_time == UpdateTime::overlapped) return true;
  const bool open = trains(previous) && !ends(previous, form);
  if (open || goes_on(next)) {
    return open && goes_on(next) && (next == PassKind::adding || form.micro_batches == 2 ||
                                     previous == PassKind::adding);
  }
  return ends(previous, form) || !needs_pending(next);
}

PassKind kind_of(std::uint32_t micro_batch, StepForm form) {
  return micro_batch + 1 == form.micro_batches ? PassKind::closing : PassKind::adding;
}

LayerSchedule schedule_of(PassKind kind, std::size_t layers, StepForm form) {
  LayerSchedule schedule;
  schedule.update_time = form.update_time;
  schedule.training = trains(kind);
  schedule.pending = form.update_time == UpdateTime::deferred && needs_pending(kind);
  schedule.commits = kind == PassKind::committing || kind == PassKind::settling_committing;
  schedule.accumulates = form.micro_batches > 1;
  schedule.first = !goes_on(kind);
  schedule.last = ends(kind, form);
  if (settles(kind)) return schedule;
  const auto count = static_cast<std::uint32_t>(layers);
  for (std::uint32_t l = 0; l < count; ++l) {
    schedule.uses.push_back({Phase::forward, LayerId{l}});
  }
  if (!schedule.training) return schedule;
  for (auto l = count; l-- > 0;) schedule.uses.push_back({Phase::backward, LayerId{l}});
  return schedule;
}

}  // namespace terrace
