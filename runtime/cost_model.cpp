#include "runtime/cost_model.h"

#include <algorithm>
#include <memory>
#include <vector>

namespace terrace {
namespace {

constexpr int kWarmUpSteps = 3;  // after which the pipeline is in steady state

double gb_per_second(Lane lane, const Speeds& speeds) {
  switch (lane) {
    case Lane::nvme_read: return speeds.nvme_read_gb_s;
    case Lane::nvme_write: return speeds.nvme_write_gb_s;
    case Lane::host_to_device: return speeds.host_to_device_gb_s;
    case Lane::device_to_host: return speeds.device_to_host_gb_s;
    case Lane::adam: return speeds.adam_gb_s;
    case Lane::commit: return speeds.nvme_write_gb_s;
    case Lane::compute: break;
  }
  return 1;
}

// One step of a sequence: when each operation ends, and when the trainer sees the step's end.
class StepTimes {
 public:
  StepTimes(const StepPlan& plan, const Speeds& speeds) : plan_(plan), speeds_(speeds) {}

  void run(const StepTimes* previous, const BoundaryDependencies& boundary) {
    const double begin = previous ? previous->finish_ : 0;
    if (previous) lane_free_ = previous->lane_free_;
    ends_.resize(plan_.operations.size());
    auto crossing = boundary.begin();
    finish_ = begin;
    for (OpIndex op = 0; op < plan_.operations.size(); ++op) {
      const auto& operation = plan_.operations[op];
      auto& free = at(lane_free_, lane_of(operation.kind));
      double start = std::max(begin, free);
      for (const auto dependency : plan_.dependencies_of(op)) {
        start = std::max(start, ends_[dependency]);
      }
      for (; previous && crossing != boundary.end() && crossing->first == op; ++crossing) {
        start = std::max(start, previous->ends_[crossing->second]);
      }
      free = ends_[op] = start + seconds_of(operation, speeds_);
      const Lane lane = lane_of(operation.kind);
      if (lane == Lane::compute || lane == Lane::adam) finish_ = std::max(finish_, ends_[op]);
    }
  }

  double finish() const { return finish_; }

 private:
  const StepPlan& plan_;
  const Speeds& speeds_;
  std::vector<double> ends_;
  PerLane<double> lane_free_{};
  double finish_ = 0;
};

}  // namespace

double seconds_of(const Operation& operation, const Speeds& speeds) {
  const Lane lane = lane_of(operation.kind);
  if (lane == Lane::compute) return operation.flops / (speeds.compute_tflops * 1e12);
  return (lane == Lane::commit ? speeds.commit_ms * 1e-3 : speeds.latency_us * 1e-6) +
         static_cast<double>(operation.bytes.count) / (gb_per_second(lane, speeds) * 1e9);
}

PerLane<LaneForecast> lane_totals(const StepPlan& plan, const Speeds& speeds) {
  PerLane<LaneForecast> totals{};
  for (const auto& operation : plan.operations) {
    auto& lane = at(totals, lane_of(operation.kind));
    lane.bytes += operation.bytes;
    lane.seconds += seconds_of(operation, speeds);
  }
  return totals;
}

double steady_cycle_seconds(std::span<const CyclePass> passes, const Speeds& speeds) {
  std::unique_ptr<StepTimes> before;
  double step = 0;
  double end = 0;
  for (int i = 0; i <= kWarmUpSteps; ++i) {
    for (const auto& pass : passes) {
      auto now = std::make_unique<StepTimes>(*pass.plan, speeds);
      now->run(before.get(), *pass.boundary);
      before = std::move(now);
    }
    step = before->finish() - end;
    end = before->finish();
  }
  return step;
}

double steady_step_seconds(const StepPlan& plan, const BoundaryDependencies& self,
                           const Speeds& speeds) {
  const CyclePass pass{&plan, &self};
  return steady_cycle_seconds({&pass, 1}, speeds);
}

}  // namespace terrace
