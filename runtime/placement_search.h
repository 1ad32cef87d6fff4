// Which bytes get the fast tiers: from a shape and budgets to a placement that fits.
#pragma once

#include <optional>

#include "runtime/planner.h"

namespace terrace {

// A placement with its homes and a plan that fits the budgets.
struct Candidate {
  Placement placement;
  PlanShape shape;
  MemoryMap map;        // peak set
  StepPlan training;    // of the steps that matter most: committing when all are
  PerTier<Bytes> capacity{};  // in which it was built
  std::optional<StepPlan> closing{};  // of the last micro-batch of several
};

// Fills the fast tiers as far as `shape` leaves room; nothing when the shape itself does not fit.
std::optional<Candidate> fill_tiers(const PlannerInput& input, const PlanShape& shape);

// Tries every placement of whole blocks with the serial shape: for small models whose budgets leave
// fill_tiers() no way. Bounded in time.
std::optional<Candidate> search_placements(const PlannerInput& input);

// The placement with the least of HBM that the configuration allows, everything on `tier`.
Placement base_placement(const PlannerInput& input, Tier tier);

HomeOptions home_options(const PlannerInput& input);

// The schedule that placements are judged by.
LayerSchedule judged_schedule(const PlannerInput& input);

inline constexpr Bytes kUnlimited{std::uint64_t{1} << 56};

}  // namespace terrace
