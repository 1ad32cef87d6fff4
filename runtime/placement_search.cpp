#include "runtime/placement_search.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "terrace/error.h"

namespace terrace {
namespace {

constexpr int kMaxFillRounds = 6;
constexpr std::size_t kMaxSearchOperations = 4000000;  // built in all; a few seconds

std::uint64_t rounded_part(double fraction, std::uint64_t whole) {
  return std::min(whole, static_cast<std::uint64_t>(
                             std::llround(fraction * static_cast<double>(whole))));
}

const PlacementChoice& choice_of(const PlacementConfig& config, std::size_t state) {
  return state == 0 ? config.master_weight : state == 1 ? config.momentum : config.variance;
}

MemoryMap assign_all(const PlannerInput& input, const Placement& placement) {
  auto map = assign_homes(input.layout, placement, home_options(input));
  map.commit_bytes = input.durability.commit_bytes;
  return map;
}

// The micro-batches behind the first share its homes and shape. False when they find no place.
bool add_closing(const PlannerInput& input, Candidate& candidate) {
  if (input.form.micro_batches == 1) return true;
  auto built =
      build_plan(input.layout, schedule_of(PassKind::closing, input.layout.layers(), input.form),
                 candidate.placement, candidate.map, candidate.shape, candidate.capacity);
  candidate.closing = std::move(built.plan);
  for (const Tier tier : kTiers) {
    auto& peak = at(candidate.map.peak, tier);
    peak = std::max(peak, at(built.high_water, tier));
  }
  return candidate.closing.has_value();
}

// A placement that may still be improved, and the room that is left for it.
class Filler {
 public:
  Filler(const PlannerInput& input, const PlanShape& shape)
      : input_(input), shape_(shape), schedule_(judged_schedule(input)) {}

  std::optional<Candidate> run(Tier base) {
    Placement placement = base_placement(input_, base);
    if (!measure(placement)) return std::nullopt;
    std::uint64_t divisor = 1;  // of the room: halved when promotion needed more than it freed
    for (int round = 0; round < kMaxFillRounds; ++round) {
      Placement better = placement;
      promote(better, divisor);
      if (better == placement) break;
      const auto before = need_;
      if (measure(better)) {
        placement = std::move(better);
      } else {
        need_ = before;
        divisor *= 2;
      }
    }
    return settle(std::move(placement));
  }

 private:
  // What the placement needs with unbounded pools; false when HBM or DRAM would overflow. NVMe may:
  // promotion is what relieves it.
  bool measure(const Placement& placement) {
    const auto map = homes(placement);
    const auto built = build_plan(input_.layout, schedule_, placement, map, shape_,
                                  {kUnlimited, kUnlimited, kUnlimited});
    need_ = built.high_water;
    at(need_, Tier::hbm) = at(built.live_peak, Tier::hbm);
    return fits(Tier::hbm) && fits(Tier::dram);
  }

  MemoryMap homes(const Placement& placement) const { return assign_all(input_, placement); }

  bool fits(Tier tier) const { return at(need_, tier) <= at(input_.budget, tier); }

  // Tight addresses: HBM buffers alternate between the ends of a pool, so the pool must be no
  // larger than it has to be.
  std::optional<Candidate> settle(Placement placement) {
    if (!fits(Tier::nvme)) return std::nullopt;
    Candidate candidate{std::move(placement), shape_, {}, {}, {}, {}};
    candidate.map = homes(candidate.placement);
    const Bytes budget = at(input_.budget, Tier::hbm);
    for (const std::uint64_t percent : {100U, 102U, 105U, 110U, 125U, 150U, 200U}) {
      const Bytes wanted = round_up(at(need_, Tier::hbm) * percent / 100, kPage);
      const Bytes hbm = std::min(wanted, budget);
      auto built = build_plan(input_.layout, schedule_, candidate.placement, candidate.map, shape_,
                              {hbm, at(input_.budget, Tier::dram), at(input_.budget, Tier::nvme)});
      if (built.plan) {
        candidate.training = std::move(*built.plan);
        candidate.map.peak = built.high_water;
        candidate.capacity = {hbm, at(input_.budget, Tier::dram), at(input_.budget, Tier::nvme)};
        if (add_closing(input_, candidate)) return candidate;
      }
      if (wanted > budget) break;
    }
    return std::nullopt;
  }

  // ---- promotion

  void promote(Placement& placement, std::uint64_t divisor) const {
    const auto slack = [&](Tier tier) {
      return (at(input_.budget, tier) - at(need_, tier)) / divisor;
    };
    Bytes hbm = slack(Tier::hbm);
    Bytes dram = slack(Tier::dram);
    if (!input_.placement.activation) promote_activations(placement, Tier::hbm, hbm);
    if (!input_.placement.parameter) {
      promote_parameters_to_hbm(placement, hbm);
      promote_parameters_to_dram(placement, dram);
    }
    if (!input_.placement.activation) promote_activations(placement, Tier::dram, dram);
    promote_states(placement, dram);
  }

  // The inputs of the highest layers are used again first.
  void promote_activations(Placement& placement, Tier tier, Bytes& room) const {
    for (auto l = static_cast<std::uint32_t>(placement.size()); l-- > 0;) {
      if (placement[l].activation <= tier) continue;
      const Bytes size = input_.layout.input_size(LayerId{l});
      if (size > room) return;
      placement[l].activation = tier;
      room -= size;
    }
  }

  // The lowest layers are updated last and used first.
  void promote_parameters_to_hbm(Placement& placement, Bytes& room) const {
    for (std::uint32_t l = 0; l < placement.size(); ++l) {
      const Bytes size = input_.layout.block_size(LayerId{l}, Content::parameter);
      if (placement[l].parameter_hbm || size.count == 0) continue;
      if (size > room) return;
      placement[l].parameter_hbm = true;
      room -= size;
    }
  }

  void promote_parameters_to_dram(Placement& placement, Bytes& room) const {
    for (std::uint32_t l = 0; l < placement.size(); ++l) {
      if (placement[l].parameter_hbm) continue;
      if (!raise(LayerId{l}, Content::parameter, placement[l].parameter_dram_segments, ~0ULL,
                 room)) {
        return;
      }
    }
  }

  // An equal share of every layer, so that the drive's lanes stay evenly loaded; what rounding
  // leaves goes to the lowest layers.
  void promote_states(Placement& placement, Bytes& room) const {
    Bytes below;
    for (std::uint32_t l = 0; l < placement.size(); ++l) {
      for (std::size_t s = 0; s < kOptimizerStateCount; ++s) {
        if (choice_of(input_.placement, s)) continue;
        const auto count = placement[l].state_dram_segments[s];
        const auto rest = input_.layout.block(LayerId{l}).segments - count;
        below += input_.layout.segment_range(LayerId{l}, count, rest).count *
                 input_.layout.element_size(kOptimizerStates[s]);
      }
    }
    if (below.count == 0) return;
    const double share =
        std::min(1.0, static_cast<double>(room.count) / static_cast<double>(below.count));
    raise_states(placement, share, room);
    raise_states(placement, 1.0, room);
  }

  void raise_states(Placement& placement, double share, Bytes& room) const {
    for (std::uint32_t l = 0; l < placement.size(); ++l) {
      for (std::size_t s = 0; s < kOptimizerStateCount; ++s) {
        if (choice_of(input_.placement, s)) continue;
        auto& count = placement[l].state_dram_segments[s];
        const auto rest = input_.layout.block(LayerId{l}).segments - count;
        const auto more =
            static_cast<std::uint64_t>(std::floor(share * static_cast<double>(rest)));
        raise(LayerId{l}, kOptimizerStates[s], count, count + more, room);
      }
    }
  }

  // Raises a count of DRAM segments up to `limit` while there is room; false when room ended.
  bool raise(LayerId layer, Content content, std::uint64_t& count, std::uint64_t limit,
             Bytes& room) const {
    const auto& layout = input_.layout;
    limit = std::min(limit, layout.block(layer).segments);
    while (count < limit) {
      const Bytes size = layout.segment_range(layer, count, 1).count * layout.element_size(content);
      const std::uint64_t whole = size.count > 0 ? room.count / size.count : 0;
      if (whole == 0) return false;
      // All but the last segment of a block are equal: take many at once.
      const std::uint64_t more =
          std::max<std::uint64_t>(1, std::min(whole, limit - count) - (limit - count > 1 ? 1 : 0));
      const std::uint64_t taken = std::min(more, limit - count);
      room -= layout.segment_range(layer, count, taken).count * layout.element_size(content);
      count += taken;
    }
    return true;
  }

  const PlannerInput& input_;
  const PlanShape shape_;
  const LayerSchedule schedule_;
  PerTier<Bytes> need_{};
};

// Depth-first over the homes of whole blocks, with the homes' sums as the bound.
class Search {
 public:
  explicit Search(const PlannerInput& input)
      : input_(input), schedule_(judged_schedule(input)) {}

  std::optional<Candidate> run() {
    placement_ = base_placement(input_, Tier::nvme);
    descend(0, {});
    return std::move(found_);
  }

 private:
  bool done() const { return found_.has_value() || operations_ >= kMaxSearchOperations; }

  void descend(std::uint32_t layer, PerTier<Bytes> resident) {
    for (const Tier tier : kTiers) {
      if (at(resident, tier) > at(input_.budget, tier)) return;
    }
    if (layer == placement_.size()) return try_leaf();
    choose_parameter(layer, resident);
  }

  void choose_parameter(std::uint32_t l, const PerTier<Bytes>& resident) {
    const auto segments = input_.layout.block(LayerId{l}).segments;
    const Bytes size = input_.layout.block_size(LayerId{l}, Content::parameter);
    for (const Tier tier : kTiers) {
      if (done() || (input_.placement.parameter && tier != Tier::hbm)) break;
      if (!input_.placement.parameter) {
        placement_[l].parameter_hbm = tier == Tier::hbm;
        placement_[l].parameter_dram_segments = tier == Tier::dram ? segments : 0;
      }
      auto sum = resident;
      at(sum, tier) += input_.placement.parameter ? Bytes{} : size;
      choose_states(l, sum);
    }
  }

  // The states are of one size, so only their number in DRAM matters.
  void choose_states(std::uint32_t l, const PerTier<Bytes>& resident) {
    std::vector<std::size_t> free;
    for (std::size_t s = 0; s < kOptimizerStateCount; ++s) {
      if (!choice_of(input_.placement, s)) free.push_back(s);
    }
    const Bytes size = input_.layout.block_size(LayerId{l}, Content::master_weight);
    for (std::size_t in_dram = 0; in_dram <= free.size() && !done(); ++in_dram) {
      for (std::size_t i = 0; i < free.size(); ++i) {
        placement_[l].state_dram_segments[free[i]] =
            i < in_dram ? input_.layout.block(LayerId{l}).segments : 0;
      }
      auto sum = resident;
      at(sum, Tier::dram) += size * in_dram;
      if (!input_.durability.two_slots) at(sum, Tier::nvme) += size * (free.size() - in_dram);
      choose_activation(l, sum);
    }
  }

  void choose_activation(std::uint32_t l, const PerTier<Bytes>& resident) {
    const auto fixed = placement_[l].activation;
    for (const Tier tier : kTiers) {
      if (done()) return;
      if (input_.placement.activation && tier != fixed) continue;
      placement_[l].activation = tier;
      descend(l + 1, resident);
      placement_[l].activation = fixed;
    }
  }

  MemoryMap homes(const Placement& placement) const { return assign_all(input_, placement); }

  void try_leaf() {
    const auto map = homes(placement_);
    for (const Tier tier : kTiers) {  // gradients that are kept lie in DRAM as well
      if (at(map.resident, tier) > at(input_.budget, tier)) return;
    }
    auto built = build_plan(input_.layout, schedule_, placement_, map, PlanShape{}, input_.budget);
    operations_ += built.operations;
    if (!built.plan) return;
    Candidate candidate{placement_, {}, map, std::move(*built.plan), input_.budget, {}};
    candidate.map.peak = built.high_water;
    if (add_closing(input_, candidate)) found_ = std::move(candidate);
  }

  const PlannerInput& input_;
  const LayerSchedule schedule_;
  Placement placement_;
  std::optional<Candidate> found_;
  std::size_t operations_ = 0;
};

void place_states(const PlannerInput& input, std::uint32_t l, LayerPlacement& where) {
  const auto segments = input.layout.block(LayerId{l}).segments;
  for (std::size_t s = 0; s < kOptimizerStateCount; ++s) {
    if (const auto& choice = choice_of(input.placement, s)) {
      where.state_dram_segments[s] = rounded_part(choice->dram, segments);
    }
  }
}

}  // namespace

LayerSchedule judged_schedule(const PlannerInput& input) {
  const auto& durability = input.durability;
  const bool always = durability.two_slots && durability.commit_interval == 1;
  return schedule_of(always ? PassKind::committing : PassKind::training, input.layout.layers(),
                     input.form);
}

HomeOptions home_options(const PlannerInput& input) {
  return {input.durability.two_slots, input.form};
}

Placement base_placement(const PlannerInput& input, Tier tier) {
  Placement placement = all_on(input.layout, tier);
  const std::size_t layers = placement.size();
  for (std::uint32_t l = 0; l < layers; ++l) {
    auto& where = placement[l];
    place_states(input, l, where);
    if (const auto& choice = input.placement.parameter) {
      where.parameter_hbm = l < rounded_part(choice->hbm, layers);
      const double dram = choice->hbm < 1 ? choice->dram / (1 - choice->hbm) : 0;
      where.parameter_dram_segments = rounded_part(dram, input.layout.block(LayerId{l}).segments);
    }
    if (const auto& choice = input.placement.activation) {
      const std::size_t from_top = layers - 1 - l;
      where.activation = from_top < rounded_part(choice->hbm, layers) ? Tier::hbm
                         : from_top < rounded_part(choice->hbm + choice->dram, layers)
                             ? Tier::dram
                             : Tier::nvme;
    }
  }
  return placement;
}

std::optional<Candidate> fill_tiers(const PlannerInput& input, const PlanShape& shape) {
  Filler filler(input, shape);
  if (auto everything = filler.run(Tier::dram)) return everything;
  if (at(input.budget, Tier::nvme).count == 0) return std::nullopt;
  return filler.run(Tier::nvme);
}

std::optional<Candidate> search_placements(const PlannerInput& input) {
  return Search(input).run();
}

}  // namespace terrace
