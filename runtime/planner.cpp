#include "runtime/planner.h"

#include <algorithm>
#include <vector>

#include "runtime/cost_model.h"
#include "runtime/placement_search.h"
#include "runtime/plan_forecast.h"
#include "runtime/store_plan.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::uint64_t kMaxRuns = 1500;  // update runs of one step, unless the budgets need more
// Operations of all candidates whose step was simulated, after which the search takes the best so
// far: planning stays below a second for any model.
constexpr std::size_t kMaxSimulated = 80000;
constexpr std::size_t kMaxSearchLayers = 3;  // whose placements can all be tried
constexpr double kWorthwhile = 0.995;     // a larger shape must be this much faster

// How far HBM lets compute run ahead of the copies, richest first.
struct DeviceDepth {
  std::uint32_t prefetch_uses;
  std::uint32_t drain_lag;
};
constexpr DeviceDepth kDeviceDepths[] = {{4, 2}, {3, 2}, {2, 2}, {2, 1}, {1, 1}, {1, 0}, {0, 0}};

// How many runs are in flight in DRAM.
struct HostDepth {
  std::uint32_t staging_window;
  std::uint32_t update_window;
  std::uint32_t gradient_window;
};
constexpr HostDepth kHostDepths[] = {{8, 64, 32}, {8, 24, 12}, {6, 12, 8}, {4, 8, 6},
                                     {3, 5, 4},   {2, 3, 2},   {1, 2, 1},  {0, 1, 0}};

class Planner {
 public:
  explicit Planner(const PlannerInput& input) : input_(input), budget_(input.budget) {
    for (std::uint32_t l = 0; l < input.layout.layers(); ++l) {
      const auto& block = input.layout.block(LayerId{l});
      most_segments_ = std::max(most_segments_, block.segments);
      most_elements_ = std::max(most_elements_, block.elements);
    }
    list_run_lengths();
    if (!input.durability.two_slots) return;
    overhead_ = durable_overhead(input.layout, input.durability.weights);
    refuse_durable();
    input_.durability.commit_bytes = commit_bytes(input.layout, input.durability.weights);
    if (input.durability.keeps_bytes) {
      input_.durability.commit_bytes += kPage * input.durability.weights.size();
    }
    at(input_.budget, Tier::nvme) -= overhead_;
  }

  EnginePlan plan() {
    refuse_meaningless_placement();
    check_hbm();
    if (!search_shapes()) search_serially();
    if (!best_) refuse_storage();
    return finish();
  }

 private:
  // ---- shapes

  std::uint64_t runs(std::uint64_t run_segments) const {
    std::uint64_t count = 0;
    for (std::uint32_t l = 0; l < input_.layout.layers(); ++l) {
      const auto segments = input_.layout.block(LayerId{l}).segments;
      count += (segments + run_segments - 1) / run_segments;
    }
    return count;
  }

  // Powers of two from the longest that makes sense down to one segment; the first ones that keep
  // the plan small are tried together, the rest only when nothing else fits.
  void list_run_lengths() {
    std::uint64_t longest = 1;
    while (longest * 2 <= most_segments_) longest *= 2;
    if (input_.sub_group_elements) {
      const auto limit = std::max<std::uint64_t>(
          1, *input_.sub_group_elements / input_.layout.segment_elements());
      while (longest > limit) longest /= 2;
    }
    for (auto length = longest; length > 0; length /= 2) run_lengths_.push_back(length);
  }

  std::uint32_t max_prefetch() const {
    if (!input_.prefetch_elements || most_elements_ == 0) return ~0U;
    return static_cast<std::uint32_t>(
        std::min<std::uint64_t>(~0U, *input_.prefetch_elements / most_elements_));
  }

  PlanShape shape_of(DeviceDepth device, HostDepth host, std::uint64_t run_segments) const {
    return {std::min(device.prefetch_uses, max_prefetch()),
            device.drain_lag,
            run_segments,
            host.staging_window,
            host.update_window,
            host.gradient_window};
  }

  // Coordinate search: the device's depth first, then the host's, then the device's again. False
  // when no shape with a plan of reasonable size fits.
  bool search_shapes() {
    const HostDepth modest = kHostDepths[6];
    for (const auto length : run_lengths_) {
      if (runs(length) > kMaxRuns && length != run_lengths_.front()) break;
      for (const auto device : kDeviceDepths) consider(shape_of(device, modest, length));
      if (best_) break;
    }
    for (int pass = 0; pass < 2; ++pass) {
      const auto device = best_ ? DeviceDepth{best_->shape.prefetch_uses, best_->shape.drain_lag}
                                : DeviceDepth{0, 0};
      search_host(device);
      if (!best_) return false;
      const auto shape = best_->shape;
      for (const auto depth : kDeviceDepths) {
        consider(shape_of(depth, {shape.staging_window, shape.update_window,
                                  shape.gradient_window},
                          shape.run_segments));
      }
    }
    return true;
  }

  void search_host(DeviceDepth device) {
    std::size_t tried = 0;
    for (const auto length : run_lengths_) {
      if (runs(length) > kMaxRuns && length != run_lengths_.front()) break;
      if (++tried > 6 && best_) break;
      for (const auto host : kHostDepths) {
        if (host.update_window > 4 && host.update_window / 2 > runs(length)) continue;
        consider(shape_of(device, host, length));
      }
    }
  }

  // Last resorts: ever shorter runs, then every placement of whole blocks.
  void search_serially() {
    for (const auto length : run_lengths_) {
      consider(shape_of({0, 0}, kHostDepths[std::size(kHostDepths) - 1], length));
      if (best_) return;
    }
    if (input_.layout.layers() > kMaxSearchLayers) return;
    if (auto found = search_placements(input_)) keep(std::move(*found));
  }

  void consider(const PlanShape& shape) {
    if (std::find(seen_.begin(), seen_.end(), shape) != seen_.end()) return;
    seen_.push_back(shape);
    if (best_ && simulated_ > kMaxSimulated) return;
    if (auto candidate = fill_tiers(input_, shape)) keep(std::move(*candidate));
  }

  void keep(Candidate candidate) {
    if (best_ && floor_of(candidate) > best_seconds_ * kWorthwhile) return;
    simulated_ += candidate.training.operations.size();
    add_dependencies(candidate.training);
    if (candidate.closing) add_dependencies(*candidate.closing);
    const double seconds = judged_seconds(candidate);
    if (best_ && seconds > best_seconds_ * kWorthwhile) return;
    std::array<StepPlan, kPassKindCount> others;
    for (const auto kind : kPassKinds) {
      if (is_step(kind) || !exists(kind, input_.form)) continue;
      auto plan = lesser_plan(schedule(kind), candidate);
      if (!plan) return;
      others[static_cast<std::size_t>(kind)] = std::move(*plan);
    }
    best_ = std::move(candidate);
    best_seconds_ = seconds;
    others_ = std::move(others);
  }

  static bool is_step(PassKind kind) {
    return kind == PassKind::training || kind == PassKind::committing;
  }

  // A pass that does less than a training step takes the same buffers in another order, and may
  // need a little more for it, or less haste.
  std::optional<StepPlan> lesser_plan(const LayerSchedule& schedule, Candidate& candidate) const {
    auto shape = candidate.shape;
    for (const auto depth : {shape.prefetch_uses, 1U, 0U}) {
      shape.prefetch_uses = std::min(depth, shape.prefetch_uses);
      if (depth == 0) {
        shape.staging_window = shape.drain_lag = shape.gradient_window = 0;
        shape.update_window = 1;
      }
      auto built = build_plan(input_.layout, schedule, candidate.placement, candidate.map, shape,
                              candidate.capacity);
      if (!built.plan) continue;
      for (const Tier tier : kTiers) {
        auto& peak = at(candidate.map.peak, tier);
        peak = std::max(peak, at(built.high_water, tier));
      }
      add_dependencies(*built.plan);
      return std::move(built.plan);
    }
    return std::nullopt;
  }

  // Of a step, when each of its passes follows itself: what candidates are compared by.
  double judged_seconds(const Candidate& candidate) const {
    const auto alone = [&](const StepPlan& plan) {
      return steady_step_seconds(plan, boundary_dependencies(plan, plan), input_.speeds);
    };
    const double first = alone(candidate.training);
    if (!candidate.closing) return first;
    return first + (input_.form.micro_batches - 1) * alone(*candidate.closing);
  }

  LayerSchedule schedule(PassKind kind) const {
    return schedule_of(kind, input_.layout.layers(), input_.form);
  }

  // No step is shorter than its slowest lane.
  double floor_of(const Candidate& candidate) const {
    double floor = 0;
    for (const auto& lane : lane_totals(candidate.training, input_.speeds)) {
      floor = std::max(floor, lane.seconds);
    }
    return floor;
  }

  // ---- the result

  EnginePlan finish() {
    EnginePlan result;
    result.placement = best_->placement;
    result.shape = best_->shape;
    result.map = best_->map;
    result.form = input_.form;
    result.plans = std::move(others_);
    for (const auto kind : {PassKind::training, PassKind::committing}) {
      result.plans[static_cast<std::size_t>(kind)] = training_plan(schedule(kind));
    }
    for (const auto before : kPassKinds) {
      for (const auto after : kPassKinds) {
        if (!may_follow(before, after, input_.form)) continue;
        result.boundary[static_cast<std::size_t>(before)][static_cast<std::size_t>(after)] =
            boundary_dependencies(result.plan(before), result.plan(after));
      }
    }
    result.forecast = forecast_of(result, input_);
    for (const Tier tier : kTiers) {
      at(result.forecast.tiers, tier).budget = at(budget_, tier);
    }
    at(result.forecast.tiers, Tier::nvme).peak += overhead_;
    result.forecast.durability.overhead = overhead_;
    return result;
  }

  // Committing takes no buffers, so both kinds of step fall into the same places.
  StepPlan training_plan(const LayerSchedule& schedule) const {
    if (best_->training.schedule.commits == schedule.commits) return best_->training;
    if (schedule.commits && !input_.durability.two_slots) return best_->training;
    auto built = build_plan(input_.layout, schedule, best_->placement, best_->map, best_->shape,
                            best_->capacity);
    TERRACE_CHECK(built.plan.has_value());
    add_dependencies(*built.plan);
    return std::move(*built.plan);
  }

  // ---- refusals

  static std::string exact(Bytes bytes) {
    return std::to_string(bytes.count) + " bytes (" + to_string(bytes) + ")";
  }

  // The least HBM that any placement needs, with the use that needs it.
  void check_hbm() const {
    const auto placement = base_placement(input_, Tier::nvme);
    PlanShape serial;
    serial.run_segments = run_lengths_.front();
    const auto map = assign_homes(input_.layout, placement, home_options(input_));
    const auto built = build_plan(input_.layout, judged_schedule(input_), placement, map, serial,
                                  {kUnlimited, kUnlimited, kUnlimited});
    const Bytes needed = at(built.live_peak, Tier::hbm);
    const Bytes budget = at(input_.budget, Tier::hbm);
    if (needed <= budget) return;
    std::string classes;
    for (std::size_t c = 0; c < kContentCount; ++c) {
      if (built.peak_content[c].count == 0) continue;
      classes += "\n  " + std::string(to_string(static_cast<Content>(c))) + ": " +
                 exact(built.peak_content[c]);
    }
    if (at(map.resident, Tier::hbm).count > 0) {
      classes += "\n  parameters placed in hbm by the configuration: " +
                 exact(at(map.resident, Tier::hbm));
    }
    throw Error(ErrorCode::out_of_budget,
                "the hbm budget of " + exact(budget) + " is " + exact(needed - budget) +
                    " too small: layer '" + input_.layout.layer(built.peak_use.layer).name + "' " +
                    (built.peak_use.phase == Phase::forward ? "forward" : "backward") + " needs " +
                    exact(needed) + " at once:" + classes +
                    "\nGive --hbm at least that, or make the layer, batch or context smaller.");
  }

  // Two slots of all states must fit the drive, whatever else does.
  void refuse_durable() const {
    Bytes states;
    for (const auto& region : durable_regions(input_.layout)) states += region.extent.size;
    const Bytes need = states + overhead_;
    const Bytes budget = at(budget_, Tier::nvme);
    if (need <= budget) return;
    throw Error(ErrorCode::out_of_budget,
                "the nvme budget of " + exact(budget) +
                    " is too small for a store that survives: optimizer_state " + exact(states) +
                    " in two slots, with tables and spares, take " + exact(need) + ": missing " +
                    exact(need - budget) +
                    ".\nRaise the nvme budget, or keep one slot (--slots 1): then only what does "
                    "not fit elsewhere goes to nvme, and nothing survives the run.");
  }

  [[noreturn]] void refuse_storage() const {
    const Bytes dram = at(input_.budget, Tier::dram);
    const Bytes nvme = at(input_.budget, Tier::nvme);
    PlanShape serial;
    serial.run_segments = run_lengths_.back();
    if (runs(serial.run_segments) > kMaxRuns * 16) serial.run_segments = run_lengths_.front();
    const auto schedule = judged_schedule(input_);
    const auto placement = base_placement(input_, nvme.count > 0 ? Tier::nvme : Tier::dram);
    const auto map = assign_homes(input_.layout, placement, home_options(input_));
    const auto built = build_plan(input_.layout, schedule, placement, map, serial,
                                  {kUnlimited, kUnlimited, kUnlimited});
    std::string message = "the model's state does not fit:";
    std::string per_tier;
    for (const Tier tier : {Tier::dram, Tier::nvme}) {
      const Bytes need = at(built.high_water, tier);
      const Bytes budget = at(input_.budget, tier);
      per_tier += "\n  " + std::string(to_string(tier)) + ": needs " + exact(need) +
                  ", budget " + exact(budget) +
                  (need > budget ? ", missing " + exact(need - budget) : "") + classes(map, tier);
    }
    const Bytes all = at(built.high_water, Tier::dram) + at(built.high_water, Tier::nvme);
    if (at(built.high_water, Tier::dram) <= dram && all > dram + nvme) {
      message += " " + exact(all - (dram + nvme)) + " are missing on dram and nvme together.";
    }
    throw Error(ErrorCode::out_of_budget,
                message + " With as much as possible on " + (nvme.count > 0 ? "nvme" : "dram") +
                    ":" + per_tier + "\nRaise --dram" +
                    (nvme.count > 0 ? " or the nvme budget" : ", or give --nvme DIR") +
                    ", or make the model smaller.");
  }

  static std::string classes(const MemoryMap& map, Tier tier) {
    std::string text;
    for (std::size_t c = 0; c < kTensorClassCount; ++c) {
      const Bytes bytes = at(map.resident_class, tier)[c];
      if (bytes.count == 0) continue;
      text += "\n    " + std::string(to_string(static_cast<TensorClass>(c))) + ": " + exact(bytes);
    }
    return text;
  }

  void refuse_meaningless_placement() const {
    const auto& placement = input_.placement;
    check_fractions("parameter", placement.parameter, true);
    check_fractions("activation", placement.activation, true);
    check_fractions("master_weight", placement.master_weight, false);
    check_fractions("momentum", placement.momentum, false);
    check_fractions("variance", placement.variance, false);
  }

  void check_fractions(const std::string& what, const PlacementChoice& choice, bool hbm) const {
    if (!choice) return;
    const auto refuse = [&](const std::string& why) {
      return Error(ErrorCode::invalid_argument, "placement of " + what + ": " + why);
    };
    const double sum = choice->hbm + choice->dram + choice->nvme;
    if (!(choice->hbm >= 0 && choice->dram >= 0 && choice->nvme >= 0) || !(sum > 0.999999) ||
        !(sum < 1.000001)) {
      throw refuse("the fractions must not be negative and must add up to 1");
    }
    if (!hbm && choice->hbm > 0) {
      throw refuse("optimizer states can live in dram and on nvme; hbm is not possible yet");
    }
    if (choice->nvme > 0 && at(input_.budget, Tier::nvme).count == 0) {
      throw refuse("nvme is asked for and there is no nvme directory; give one");
    }
  }

  PlannerInput input_;            // its nvme budget without the overhead
  const PerTier<Bytes> budget_;   // as given
  Bytes overhead_;                // on nvme, of two slots
  std::uint64_t most_segments_ = 1;
  std::uint64_t most_elements_ = 0;
  std::vector<std::uint64_t> run_lengths_;  // longest first
  std::vector<PlanShape> seen_;
  std::optional<Candidate> best_;
  std::array<StepPlan, kPassKindCount> others_;  // that go with it, by kind
  double best_seconds_ = 0;
  std::size_t simulated_ = 0;
};

}  // namespace

EnginePlan plan_engine(const PlannerInput& input) { return Planner(input).plan(); }

UpdateRule update_rule(const Config& config) {
  return {config.micro_batches,
          config.gradient_clipping > 0 || config.loss_scale.enabled || config.micro_batches > 1,
          config.atomic_steps};
}

bool reversible(const DurabilityInput& durability) {
  return durability.two_slots && durability.commit_interval == 1;
}

EnginePlan plan_engine(PlannerInput input, const UpdateRule& rule) {
  input.form = {UpdateTime::deferred, rule.micro_batches};
  if (rule.needs_all_gradients) return plan_engine(input);
  if (rule.atomic && !reversible(input.durability)) {
    try {
      return plan_engine(input);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::out_of_budget) throw;
    }
  }
  input.form.update_time = UpdateTime::overlapped;
  return plan_engine(input);
}

}  // namespace terrace
