#include "runtime/plan_optimizer.h"

#include <algorithm>

#include "terrace/adam.h"
#include "terrace/error.h"

namespace terrace {
namespace {

// The contents that an update writes.
constexpr Content kUpdated[] = {Content::master_weight, Content::momentum, Content::variance,
                                Content::parameter};

}  // namespace

class OptimizerFlow::Pending {
 public:
  explicit Pending(StepPlan& plan) : plan_(plan), first_(plan.operations.size()) {}
  ~Pending() {
    if (!plan_.schedule.pending) return;
    for (auto op = first_; op < plan_.operations.size(); ++op) plan_.operations[op].pending = true;
  }
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

 private:
  StepPlan& plan_;
  const std::size_t first_;
};

OptimizerFlow::OptimizerFlow(const ModelLayout& layout, const Placement& placement,
                             const MemoryMap& map, const PlanShape& shape, PlanEmitter& out)
    : layout_(layout), map_(map), shape_(shape), out_(out) {
  if (!out.plan.schedule.training && !out.plan.schedule.pending) return;
  runs_ = list_update_runs(layout, out.plan.schedule, placement, shape.run_segments);
}

// Where these elements of a content live; they lie in one piece.
Place OptimizerFlow::home_of(Content content, const UpdateRun& run) const {
  const Bytes offset = run.elements.first * layout_.element_size(content);
  const Bytes size = run.elements.count * layout_.element_size(content);
  for (const auto& piece : map_.homes.of(content, run.layer)) {
    if (piece.data_offset <= offset &&
        offset + size <= piece.data_offset + piece.extent.size) {
      return {piece.tier, part(piece.extent, offset - piece.data_offset, size)};
    }
  }
  constexpr bool kRunCrossesTwoHomes = true;
  TERRACE_CHECK(!kRunCrossesTwoHomes);
  return {};
}

// Where the update finds a content in DRAM: at home, or in the run's set.
Extent OptimizerFlow::in_dram(Content content, const UpdateRun& run) const {
  Bytes offset;
  for (const Content other : kUpdated) {
    const Place home = home_of(other, run);
    if (other == content) {
      return home.tier == Tier::dram ? home.extent : part(run.set, offset, home.extent.size);
    }
    if (home.tier != Tier::dram) offset += home.extent.size;
  }
  TERRACE_CHECK(content == Content::parameter);  // the last one that updates write
  return {};
}

Bytes OptimizerFlow::data_offset(Content content, const UpdateRun& run) const {
  return run.elements.first * layout_.element_size(content);
}

// Reads the states of runs before `end`, as far as that was not done.
void OptimizerFlow::prepare_sets(std::size_t end) {
  for (; prepared_ < std::min(end, runs_.size()); ++prepared_) {
    auto& run = runs_[prepared_];
    Bytes size;
    for (const Content content : kUpdated) {
      const Place home = home_of(content, run);
      if (home.tier != Tier::dram) size += home.extent.size;
    }
    run.set = out_.allocate(Tier::dram, Content::master_weight, size);
    for (const Content content : kOptimizerStates) {
      const Place home = home_of(content, run);
      if (home.tier == Tier::nvme) {
        out_.transfer(OpKind::read, content, run.layer, data_offset(content, run), home,
                      {Tier::dram, in_dram(content, run)});
      }
    }
  }
}

// Spreads the first reads of states over the forward pass, so that they do not hold up the
// parameters.
void OptimizerFlow::read_ahead(std::size_t position) {
  const std::size_t forwards = layout_.layers();
  if (out_.plan.schedule.update_time == UpdateTime::deferred) return;
  if (shape_.update_window < 2 || position >= forwards) return;
  prepare_sets(std::size_t{shape_.update_window} * (position + 1) / forwards);
}

void OptimizerFlow::take_gradients(LayerId layer, Extent gradient) {
  if (out_.plan.schedule.update_time == UpdateTime::deferred) {
    keep_gradients(layer, gradient);
  } else {
    take_and_update(layer, gradient);
  }
  out_.buffers.release(Tier::hbm, Content::gradient, gradient);
}

// The next step uses them, once the norm is known.
void OptimizerFlow::keep_gradients(LayerId layer, Extent gradient) {
  const auto& schedule = out_.plan.schedule;
  for (const auto& run : runs_) {
    if (run.layer != layer) continue;
    const Extent home = home_of(kept(), run).extent;
    if (schedule.accumulates) {
      accumulate(run, gradient);
    } else {
      download(run, gradient, home);
    }
    if (schedule.last) measure(run, kept(), home);
  }
}

void OptimizerFlow::download(const UpdateRun& run, Extent gradient, Extent place) {
  const Bytes offset = data_offset(Content::gradient, run);
  out_.transfer(OpKind::download, Content::gradient, run.layer, offset,
                {Tier::hbm, part(gradient, offset, place.size)}, {Tier::dram, place});
}

void OptimizerFlow::accumulate(const UpdateRun& run, Extent gradient) {
  const bool first = out_.plan.schedule.first;
  const DType from = layout_.dtype(Content::gradient);
  const Extent landed = out_.allocate(Tier::dram, Content::gradient,
                                      run.elements.count * size_of(from));
  download(run, gradient, landed);
  out_.emit(OpKind::accumulate, run.layer,
            {{Content::gradient, Tier::dram, Access::read, run.layer,
              data_offset(Content::gradient, run), landed},
             {kept(), Tier::dram, first ? Access::write : Access::read_write, run.layer,
              data_offset(kept(), run), home_of(kept(), run).extent}},
            {run.elements.count * addition_bytes_per_element(from, layout_.dtype(kept()), first)});
  out_.plan.operations.back().elements = run.elements;
  out_.retire(gradients_, shape_.gradient_window, landed);
}

void OptimizerFlow::measure(const UpdateRun& run, Content content, Extent gradient) {
  const auto leaf = [](std::uint64_t elements) {
    return Bytes{sizeof(double) * leaves_of(elements)};
  };
  const Extent sums =
      part(map_.gradient_sums[run.layer.value], leaf(run.elements.first), leaf(run.elements.count));
  out_.emit(OpKind::measure, run.layer,
            {{content, Tier::dram, Access::read, run.layer, data_offset(content, run), gradient},
             {Content::gradient_sum, Tier::dram, Access::write, run.layer, leaf(run.elements.first),
              sums}},
            updated_elements(layout_, run) * layout_.element_size(content));
  out_.plan.operations.back().elements = run.elements;
}

void OptimizerFlow::settle(LayerId layer, Extent parameter) {
  if (!settles()) return;
  for (; updated_ < runs_.size() && runs_[updated_].layer == layer; ++updated_) {
    const auto& run = runs_[updated_];
    {
      const Pending mark(out_.plan);
      prepare_sets(updated_ + shape_.update_window);
      update(run, kept(), home_of(kept(), run).extent);
      write_back(run);
    }
    if (parameter.size.count > 0 && home_of(Content::parameter, run).tier == Tier::nvme) {
      const Extent made = in_dram(Content::parameter, run);
      const Bytes offset = data_offset(Content::parameter, run);
      out_.transfer(OpKind::upload, Content::parameter, layer, offset, {Tier::dram, made},
                    {Tier::hbm, part(parameter, offset, made.size)});
    }
    out_.buffers.release(Tier::dram, Content::master_weight, run.set);
  }
  if (updated_ == runs_.size()) commit();
}

void OptimizerFlow::take_and_update(LayerId layer, Extent gradient) {
  for (; updated_ < runs_.size() && runs_[updated_].layer == layer; ++updated_) {
    prepare_sets(updated_ + shape_.update_window);
    const auto& run = runs_[updated_];
    const Bytes size = run.elements.count * layout_.element_size(Content::gradient);
    const Extent landed = out_.allocate(Tier::dram, Content::gradient, size);
    download(run, gradient, landed);
    measure(run, Content::gradient, landed);
    update(run, Content::gradient, landed);
    write_back(run);
    out_.buffers.release(Tier::dram, Content::master_weight, run.set);
    out_.retire(gradients_, shape_.gradient_window, landed);
  }
}

void OptimizerFlow::update(const UpdateRun& run, Content from, Extent gradient) {
  std::vector<Operand> operands{
      {from, Tier::dram, Access::read, run.layer, data_offset(from, run), gradient}};
  for (const Content content : kUpdated) {
    const Access access = content == Content::parameter ? Access::write : Access::read_write;
    const bool check =
        access == Access::read_write && home_of(content, run).tier == Tier::nvme;
    operands.push_back({content, Tier::dram, access, run.layer, data_offset(content, run),
                        in_dram(content, run), stored_extent(content, run), check});
  }
  out_.emit(OpKind::update, run.layer, operands,
            update_bytes(layout_, run, layout_.dtype(from)));
  out_.plan.operations.back().elements = run.elements;
}

bool OptimizerFlow::commits() const { return out_.plan.schedule.commits && map_.durable.count > 0; }

// Where these elements will lie on NVMe after the pass; size 0: not there.
Extent OptimizerFlow::stored_extent(Content content, const UpdateRun& run) const {
  const Place home = home_of(content, run);
  if (home.tier == Tier::nvme) return home.extent;
  if (!commits() || content == Content::parameter) return {};
  return durable_extent(map_, content, run.layer, data_offset(content, run), home.extent.size);
}

// Parameters need no durable copy: they are the rounded master weights.
void OptimizerFlow::finish() { commit(); }

void OptimizerFlow::commit() {
  if (!commits() || committed_) return;
  committed_ = true;
  const Pending mark(out_.plan);
  out_.emit(OpKind::commit, LayerId{0},
       {{Content::master_weight, Tier::nvme, Access::read, LayerId{0}, {}, {{}, map_.durable}}},
       map_.commit_bytes);
}

void OptimizerFlow::write_back(const UpdateRun& run) {
  for (const Content content : {Content::parameter, Content::master_weight, Content::momentum,
                                Content::variance}) {
    const Place home = home_of(content, run);
    if (home.tier == Tier::dram) {
      flush_home(content, run, home);
      continue;
    }
    out_.transfer(home.tier == Tier::nvme ? OpKind::write : OpKind::upload, content, run.layer,
                  data_offset(content, run), {Tier::dram, in_dram(content, run)}, home);
  }
}

// What lives in RAM gets its durable copy with the commit.
void OptimizerFlow::flush_home(Content content, const UpdateRun& run, Place home) {
  const Extent stored = stored_extent(content, run);
  if (stored.size.count == 0) return;
  out_.transfer(OpKind::write, content, run.layer, data_offset(content, run), home,
                {Tier::nvme, stored});
}

}  // namespace terrace
