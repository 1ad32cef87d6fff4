#include "runtime/schedule.h"

namespace terrace {

LayerSchedule evaluation_schedule(std::size_t layers) {
  LayerSchedule schedule;
  for (std::uint32_t l = 0; l < layers; ++l) schedule.uses.push_back({Phase::forward, LayerId{l}});
  return schedule;
}

LayerSchedule training_schedule(std::size_t layers, bool commits) {
  LayerSchedule schedule = evaluation_schedule(layers);
  for (auto l = static_cast<std::uint32_t>(layers); l-- > 0;) {
    schedule.uses.push_back({Phase::backward, LayerId{l}});
  }
  schedule.training = true;
  schedule.commits = commits;
  return schedule;
}

}  // namespace terrace
