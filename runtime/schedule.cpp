#include "runtime/schedule.h"

namespace terrace {
namespace {

bool settles(PassKind kind) {
  return kind == PassKind::settling || kind == PassKind::settling_committing;
}

bool trains(PassKind kind) { return kind != PassKind::evaluation && !settles(kind); }

// Whether the pass makes the updates of the one before.
bool needs_pending(PassKind kind) {
  return kind != PassKind::evaluation && kind != PassKind::fresh;
}

}  // namespace

bool exists(PassKind kind, UpdateTime time) {
  return time == UpdateTime::deferred || kind == PassKind::training ||
         kind == PassKind::committing || kind == PassKind::evaluation;
}

// A skipped step leaves nothing pending, so a fresh one may follow any training.
bool may_follow(PassKind previous, PassKind next, UpdateTime time) {
  if (!exists(previous, time) || !exists(next, time)) return false;
  if (time == UpdateTime::overlapped) return true;
  return trains(previous) || !needs_pending(next);
}

LayerSchedule schedule_of(PassKind kind, std::size_t layers, UpdateTime time) {
  LayerSchedule schedule;
  schedule.update_time = time;
  schedule.training = trains(kind);
  schedule.pending = time == UpdateTime::deferred && needs_pending(kind);
  schedule.commits = kind == PassKind::committing || kind == PassKind::settling_committing;
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
