#include "runtime/plan_forecast.h"

#include <algorithm>
#include <vector>

#include "runtime/cost_model.h"

namespace terrace {
namespace {

constexpr std::uint32_t kSimulatedBetween = 3;  // of the micro-batches between first and last

double cycle_seconds(const EnginePlan& plan, const std::vector<PassKind>& kinds,
                     const Speeds& speeds) {
  std::vector<CyclePass> passes;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const auto before = kinds[(i + kinds.size() - 1) % kinds.size()];
    passes.push_back({&plan.plan(kinds[i]), &plan.between(before, kinds[i])});
  }
  return steady_cycle_seconds(passes, speeds);
}

// Of a step whose first pass is of this kind and that follows its like.
double step_seconds(const EnginePlan& plan, PassKind first, const Speeds& speeds) {
  if (plan.form.micro_batches == 1) return cycle_seconds(plan, {first}, speeds);
  const auto between = plan.form.micro_batches - 2;
  const auto simulated = std::min(between, kSimulatedBetween);
  std::vector<PassKind> kinds{first};
  kinds.insert(kinds.end(), simulated, PassKind::adding);
  kinds.push_back(PassKind::closing);
  const double seconds = cycle_seconds(plan, kinds, speeds);
  if (between == simulated) return seconds;
  return seconds + (between - simulated) * cycle_seconds(plan, {PassKind::adding}, speeds);
}

PerLane<LaneForecast> step_totals(const EnginePlan& plan, PassKind first, const Speeds& speeds) {
  auto totals = lane_totals(plan.plan(first), speeds);
  const auto add = [&](PassKind kind, std::uint32_t times) {
    const auto pass = lane_totals(plan.plan(kind), speeds);
    for (const Lane lane : kLanes) {
      at(totals, lane).bytes += at(pass, lane).bytes * times;
      at(totals, lane).seconds += at(pass, lane).seconds * times;
    }
  };
  const auto micro_batches = plan.form.micro_batches;
  if (micro_batches > 1) add(PassKind::closing, 1);
  if (micro_batches > 2) add(PassKind::adding, micro_batches - 2);
  return totals;
}

DurabilityForecast durability(const EnginePlan& plan, const PlannerInput& input) {
  DurabilityForecast result;
  result.two_slots = input.durability.two_slots;
  if (!result.two_slots) return result;
  result.commit_interval = input.durability.commit_interval;
  result.copies = plan.map.durable;
  const auto training = lane_totals(plan.plan(PassKind::training), input.speeds);
  const auto committing = lane_totals(plan.plan(PassKind::committing), input.speeds);
  for (const Lane lane : {Lane::nvme_write, Lane::commit}) {
    result.commit_bytes += at(committing, lane).bytes - at(training, lane).bytes;
  }
  result.commit_step_seconds = step_seconds(plan, PassKind::committing, input.speeds);
  return result;
}

}  // namespace

Forecast forecast_of(const EnginePlan& plan, const PlannerInput& input) {
  Forecast result;
  const bool two_slots = input.durability.two_slots;
  const bool always = two_slots && input.durability.commit_interval == 1;
  const auto usual = always ? PassKind::committing : PassKind::training;
  result.updates_deferred = plan.form.update_time == UpdateTime::deferred;
  result.atomic_steps = result.updates_deferred || reversible(input.durability);
  result.step_seconds = step_seconds(plan, usual, input.speeds);
  result.lanes = step_totals(plan, usual, input.speeds);
  result.durability = durability(plan, input);
  if (two_slots && !always) {
    const double share = 1.0 / static_cast<double>(input.durability.commit_interval);
    result.step_seconds += share * (result.durability.commit_step_seconds - result.step_seconds);
  }
  result.exposed_seconds =
      std::max(0.0, result.step_seconds - at(result.lanes, Lane::compute).seconds);
  for (const Lane lane : kLanes) {
    if (at(result.lanes, lane).seconds > at(result.lanes, result.bottleneck).seconds) {
      result.bottleneck = lane;
    }
  }
  for (const Tier tier : kTiers) {
    auto& entry = at(result.tiers, tier);
    entry.budget = at(input.budget, tier);
    entry.peak = at(plan.map.peak, tier);
    entry.resident = at(plan.map.resident_class, tier);
    entry.transient = at(plan.map.peak, tier) - at(plan.map.resident, tier);
  }
  return result;
}

}  // namespace terrace
