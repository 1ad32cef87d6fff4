// The optimizer's part of a step: states read ahead, gradients brought down, updates, what they
// made written back, and the commit.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "runtime/plan_builder.h"
#include "runtime/plan_emitter.h"
#include "runtime/update_runs.h"

namespace terrace {

// Thread rule: one thread.
class OptimizerFlow {
 public:
  OptimizerFlow(const ModelLayout& layout, const Placement& placement, const MemoryMap& map,
                const PlanShape& shape, PlanEmitter& out);

  // Before the use at `position`: spreads the first reads of states over the forward pass, so that
  // they do not hold up the parameters.
  void read_ahead(std::size_t position);
  // A layer's gradients lie in `gradient` of HBM; they are released as they leave.
  void take_gradients(LayerId layer, Extent gradient);
  // The pending updates of a layer, when the pass has any. Parameters that live on NVMe go from the
  // update to `parameter` in HBM (none: size 0) without touching the drive again.
  void settle(LayerId layer, Extent parameter);
  bool settles() const { return out_.plan.schedule.pending; }
  void finish();

 private:
  // Operations emitted between are the previous step's.
  class Pending;

  Place home_of(Content content, const UpdateRun& run) const;
  Extent in_dram(Content content, const UpdateRun& run) const;
  Content kept() const { return kept_gradient(out_.plan.schedule.accumulates); }
  // Brings a run's gradients down to `place`.
  void download(const UpdateRun& run, Extent gradient, Extent place);
  Extent stored_extent(Content content, const UpdateRun& run) const;
  Bytes data_offset(Content content, const UpdateRun& run) const;
  bool commits() const;
  void prepare_sets(std::size_t end);
  void take_and_update(LayerId layer, Extent gradient);
  void keep_gradients(LayerId layer, Extent gradient);
  void accumulate(const UpdateRun& run, Extent gradient);
  void measure(const UpdateRun& run, Content content, Extent gradient);
  void commit();
  void update(const UpdateRun& run, Content from, Extent gradient);
  void write_back(const UpdateRun& run);
  void flush_home(Content content, const UpdateRun& run, Place home);

  const ModelLayout& layout_;
  const MemoryMap& map_;
  const PlanShape shape_;
  PlanEmitter& out_;
  std::vector<UpdateRun> runs_;  // in the order in which backward makes their gradients
  std::size_t prepared_ = 0;     // of runs_: set allocated, reads emitted
  std::size_t updated_ = 0;      // of runs_: update emitted
  bool committed_ = false;
  std::deque<Extent> gradients_; // in DRAM, done with
};

}  // namespace terrace
