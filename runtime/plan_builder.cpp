#include "runtime/plan_builder.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "runtime/plan_buffers.h"
#include "runtime/update_runs.h"
#include "terrace/error.h"

namespace terrace {
namespace {

// Layers alternate between the two ends of the HBM pool. A use keeps everything on its layer's end,
// except what the next use needs, which goes to the other end: so what a serial step leaves behind
// never lies in the middle, and its peak is the sum of what one use needs.
PoolEnd end_of(LayerId layer) { return layer.value % 2 == 0 ? PoolEnd::low : PoolEnd::high; }
PoolEnd other_end(LayerId layer) { return layer.value % 2 == 0 ? PoolEnd::high : PoolEnd::low; }

class PlanBuilder {
 public:
  PlanBuilder(const ModelLayout& layout, const LayerSchedule& schedule, const Placement& placement,
              const MemoryMap& map, const PlanShape& shape, const PerTier<Bytes>& capacity)
      : layout_(layout),
        placement_(placement),
        map_(map),
        homes_(map.homes),
        shape_(shape),
        buffers_(map, capacity),
        layers_(layout.layers()) {
    plan_.schedule = schedule;
    run_bytes_ = {shape.run_segments * layout.segment_elements() *
                  layout.element_size(Content::parameter).count};
    if (schedule.training) {
      updates_ = list_update_runs(layout, schedule, placement, shape.run_segments);
    }
  }

  StepPlan build() {
    const auto& uses = plan_.schedule.uses;
    const LayerId first = uses.front().layer;
    layers_[first.value].input = allocate(Tier::hbm, Content::activation,
                                          layout_.input_size(first), end_of(first));
    for (std::size_t position = 0; position < uses.size(); ++position) {
      load_until(position);
      read_states_ahead(position);
      compute(position);
      while (drained_ + shape_.drain_lag <= position) drain(drained_++);
    }
    while (drained_ < uses.size()) drain(drained_++);
    if (commits()) commit();
    return std::move(plan_);
  }

  const PlanBuffers& buffers() const { return buffers_; }
  std::size_t operations() const { return plan_.operations.size(); }

 private:
  // A layer's buffers while they are alive.
  struct LayerBuffers {
    Extent parameter;
    Extent input;
    Extent input_gradient;
    Extent gradient;
    Extent saved;  // the input in DRAM or on NVMe, between forward and backward
  };

  struct Place {
    Tier tier;
    Extent extent;
  };

  // ---- what every part uses

  Extent allocate(Tier tier, Content content, Bytes size, PoolEnd end = PoolEnd::low) {
    return buffers_.allocate(tier, content, size, end);
  }

  OpIndex emit(OpKind kind, LayerId layer, const std::vector<Operand>& operands, Bytes bytes) {
    Operation operation;
    operation.kind = kind;
    operation.layer = layer;
    operation.first_operand = static_cast<std::uint32_t>(plan_.operands.size());
    for (const auto& operand : operands) {
      if (operand.extent.size.count > 0) plan_.operands.push_back(operand);
    }
    operation.operand_count =
        static_cast<std::uint32_t>(plan_.operands.size()) - operation.first_operand;
    operation.bytes = bytes;
    plan_.operations.push_back(operation);
    return static_cast<OpIndex>(plan_.operations.size() - 1);
  }

  void transfer(OpKind kind, Content content, LayerId layer, Bytes data_offset, Place source,
                Place destination) {
    if (source.extent.size.count == 0) return;
    emit(kind, layer,
         {{content, source.tier, Access::read, layer, data_offset, source.extent},
          {content, destination.tier, Access::write, layer, data_offset, destination.extent}},
         source.extent.size);
    // What an update reads or makes is hashed there, in cache.
    const bool saved = class_of(content) == TensorClass::activation;
    plan_.operations.back().hashed =
        (kind == OpKind::write && saved) ||
        (kind == OpKind::read && (saved || content == Content::parameter));
  }

  // Calls piece(offset, size) for `total` bytes cut into runs.
  template <class Piece>
  void for_each_run(Bytes total, Piece&& piece) const {
    for (Bytes done; done < total;) {
      const Bytes size = std::min(run_bytes_, total - done);
      piece(done, size);
      done += size;
    }
  }

  static Extent part(Extent whole, Bytes offset, Bytes size) {
    return {whole.offset + offset, size};
  }

  // A staging buffer that has done its work may be reused, but later ones come first.
  void retire(std::deque<Extent>& window, std::size_t limit, Extent extent) {
    window.push_back(extent);
    while (window.size() > limit) {
      buffers_.release(Tier::dram, Content::workspace, window.front());
      window.pop_front();
    }
  }

  // Moves `size` bytes between an NVMe extent and an HBM extent through DRAM, run by run.
  void through_dram(bool up, Content content, LayerId layer, Bytes data_offset, Extent nvme,
                    Extent hbm) {
    for_each_run(nvme.size, [&](Bytes offset, Bytes size) {
      const Extent stage = allocate(Tier::dram, content, size);
      const Place file{Tier::nvme, part(nvme, offset, size)};
      const Place host{Tier::dram, stage};
      const Place device{Tier::hbm, part(hbm, offset, size)};
      if (up) {
        transfer(OpKind::read, content, layer, data_offset + offset, file, host);
        transfer(OpKind::upload, content, layer, data_offset + offset, host, device);
      } else {
        transfer(OpKind::download, content, layer, data_offset + offset, device, host);
        transfer(OpKind::write, content, layer, data_offset + offset, host, file);
      }
      retire(staged_, shape_.staging_window, stage);
    });
  }

  // ---- fetching what a use needs

  // Loads the use at `position`, and as many after it as the shape allows.
  void load_until(std::size_t position) {
    const auto& uses = plan_.schedule.uses;
    for (; loaded_ <= position + shape_.prefetch_uses && loaded_ < uses.size(); ++loaded_) {
      if (!may_load(loaded_) && loaded_ > position) return;
      while (!may_load(loaded_)) drain(drained_++);
      load(loaded_);
    }
  }

  // A layer's backward is fetched after its forward has left the device.
  bool may_load(std::size_t position) const {
    const auto [phase, layer] = plan_.schedule.uses[position];
    const bool again = position > 0 && plan_.schedule.uses[position - 1].layer == layer;
    return phase == Phase::forward || again || drained_ > layer.value;
  }

  void load(std::size_t position) {
    const auto [phase, layer] = plan_.schedule.uses[position];
    buffers_.current_use = plan_.schedule.uses[position];
    const bool again = position > 0 && plan_.schedule.uses[position - 1].layer == layer;
    if (phase == Phase::backward && !kept_on_device(layer, position)) load_input(layer);
    if (!again) load_parameters(layer);
  }

  void load_parameters(LayerId layer) {
    auto& parameter = layers_[layer.value].parameter;
    const auto pieces = homes_.of(Content::parameter, layer);
    if (placement_[layer.value].parameter_hbm) {
      parameter = pieces.empty() ? Extent{} : pieces.front().extent;
      return;
    }
    parameter = allocate(Tier::hbm, Content::parameter,
                         layout_.block_size(layer, Content::parameter), end_of(layer));
    for (const auto& piece : pieces) {
      const Extent target = part(parameter, piece.data_offset, piece.extent.size);
      if (piece.tier == Tier::nvme) {
        through_dram(true, Content::parameter, layer, piece.data_offset, piece.extent, target);
      } else {
        transfer(OpKind::upload, Content::parameter, layer, piece.data_offset,
                 {Tier::dram, piece.extent}, {Tier::hbm, target});
      }
    }
  }

  void load_input(LayerId layer) {
    auto& buffers = layers_[layer.value];
    const Tier tier = placement_[layer.value].activation;
    buffers.input =
        allocate(Tier::hbm, Content::activation, layout_.input_size(layer), end_of(layer));
    if (tier == Tier::nvme) {
      through_dram(true, Content::activation, layer, {}, buffers.saved, buffers.input);
    } else {
      transfer(OpKind::upload, Content::activation, layer, {}, {Tier::dram, buffers.saved},
               {Tier::hbm, buffers.input});
    }
    buffers_.release(tier, Content::activation, buffers.saved);
  }

  // The input stays in HBM when that is its home, or when backward follows forward at once.
  // `position` is that of either use.
  bool kept_on_device(LayerId layer, std::size_t position) const {
    const auto& uses = plan_.schedule.uses;
    const auto same = [&](std::size_t p) { return p < uses.size() && uses[p].layer == layer; };
    const std::size_t neighbour =
        uses[position].phase == Phase::forward ? position + 1 : position - 1;
    return placement_[layer.value].activation == Tier::hbm || same(neighbour);
  }

  // ---- the layer function

  void compute(std::size_t position) {
    const auto [phase, layer] = plan_.schedule.uses[position];
    buffers_.current_use = plan_.schedule.uses[position];
    auto& buffers = layers_[layer.value];
    plan_.uses.push_back(phase == Phase::forward ? forward(layer) : backward(layer));
    const auto& spec = layout_.layer(layer);
    plan_.operations.back().flops =
        phase == Phase::forward ? spec.forward_flops : spec.backward_flops;
    const bool again = position + 1 < plan_.schedule.uses.size() &&
                       plan_.schedule.uses[position + 1].layer == layer;
    if (!again && !placement_[layer.value].parameter_hbm) {
      buffers_.release(Tier::hbm, Content::parameter, buffers.parameter);
    }
  }

  Extent workspace(LayerId layer, Bytes size) {
    const Extent extent =
        allocate(Tier::hbm, Content::workspace, round_up(size, kPage), end_of(layer));
    buffers_.release(Tier::hbm, Content::workspace, extent);
    return extent;
  }

  static Operand on_hbm(Content content, Access access, LayerId layer, Extent extent) {
    return {content, Tier::hbm, access, layer, {}, extent};
  }

  OpIndex forward(LayerId layer) {
    auto& buffers = layers_[layer.value];
    const LayerId above{layer.value + 1};
    Extent output;
    if (above.value < layers_.size()) {
      output = allocate(Tier::hbm, Content::activation, layout_.input_size(above),
                        other_end(layer));
      layers_[above.value].input = output;
    }
    const Extent scratch = workspace(layer, layout_.layer(layer).forward_workspace);
    const bool first = layer == plan_.schedule.uses.front().layer;
    return emit(OpKind::forward, layer,
                {on_hbm(Content::parameter, Access::read, layer, buffers.parameter),
                 on_hbm(Content::activation, first ? Access::write : Access::read, layer,
                        buffers.input),
                 on_hbm(Content::activation, Access::write, above, output),
                 on_hbm(Content::workspace, Access::write, layer, scratch)},
                {});
  }

  OpIndex backward(LayerId layer) {
    auto& buffers = layers_[layer.value];
    const auto& spec = layout_.layer(layer);
    const LayerId above{layer.value + 1};
    const Extent output_gradient =
        above.value < layers_.size() ? layers_[above.value].input_gradient : Extent{};
    if (spec.input_gradient) {
      buffers.input_gradient = allocate(Tier::hbm, Content::activation_gradient,
                                        layout_.input_size(layer), other_end(layer));
    }
    buffers.gradient = allocate(Tier::hbm, Content::gradient,
                                layout_.block_size(layer, Content::gradient), end_of(layer));
    const Extent scratch = workspace(layer, spec.backward_workspace);
    const OpIndex op = emit(
        OpKind::backward, layer,
        {on_hbm(Content::parameter, Access::read, layer, buffers.parameter),
         on_hbm(Content::activation, Access::read, layer, buffers.input),
         on_hbm(Content::activation_gradient, Access::read, above, output_gradient),
         on_hbm(Content::activation_gradient, Access::write, layer, buffers.input_gradient),
         on_hbm(Content::gradient, Access::write, layer, buffers.gradient),
         on_hbm(Content::workspace, Access::write, layer, scratch)},
        {});
    buffers_.release(Tier::hbm, Content::activation, buffers.input);
    if (output_gradient.size.count > 0) {
      buffers_.release(Tier::hbm, Content::activation_gradient, output_gradient);
      layers_[above.value].input_gradient = {};
    }
    return op;
  }

  // ---- what leaves the device after a use

  void drain(std::size_t position) {
    const auto [phase, layer] = plan_.schedule.uses[position];
    buffers_.current_use = plan_.schedule.uses[position];
    if (phase == Phase::backward) {
      update_layer(layer);
    } else if (!plan_.schedule.training) {
      buffers_.release(Tier::hbm, Content::activation, layers_[layer.value].input);
    } else if (!kept_on_device(layer, position)) {
      save_input(layer);
    }
  }

  void save_input(LayerId layer) {
    auto& buffers = layers_[layer.value];
    const Tier tier = placement_[layer.value].activation;
    buffers.saved = allocate(tier, Content::activation, layout_.input_size(layer));
    if (tier == Tier::nvme) {
      through_dram(false, Content::activation, layer, {}, buffers.saved, buffers.input);
    } else {
      transfer(OpKind::download, Content::activation, layer, {}, {Tier::hbm, buffers.input},
               {Tier::dram, buffers.saved});
    }
    buffers_.release(Tier::hbm, Content::activation, buffers.input);
  }

  // ---- the optimizer

  // Where these elements of a content live; they lie in one piece.
  Place home_of(Content content, const UpdateRun& run) const {
    const Bytes offset = run.elements.first * layout_.element_size(content);
    const Bytes size = run.elements.count * layout_.element_size(content);
    for (const auto& piece : homes_.of(content, run.layer)) {
      if (piece.data_offset <= offset &&
          offset + size <= piece.data_offset + piece.extent.size) {
        return {piece.tier, part(piece.extent, offset - piece.data_offset, size)};
      }
    }
    constexpr bool kRunCrossesTwoHomes = true;
    TERRACE_CHECK(!kRunCrossesTwoHomes);
    return {};
  }

  // The contents that an update writes.
  static constexpr Content kUpdated[] = {Content::master_weight, Content::momentum,
                                         Content::variance, Content::parameter};

  // Where the update finds a content in DRAM: at home, or in the run's set.
  Extent in_dram(Content content, const UpdateRun& run) const {
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

  Bytes data_offset(Content content, const UpdateRun& run) const {
    return run.elements.first * layout_.element_size(content);
  }

  // Reads the states of runs before `end`, as far as that was not done.
  void prepare_sets(std::size_t end) {
    for (; prepared_ < std::min(end, updates_.size()); ++prepared_) {
      auto& run = updates_[prepared_];
      Bytes size;
      for (const Content content : kUpdated) {
        const Place home = home_of(content, run);
        if (home.tier != Tier::dram) size += home.extent.size;
      }
      run.set = allocate(Tier::dram, Content::master_weight, size);
      for (const Content content : kOptimizerStates) {
        const Place home = home_of(content, run);
        if (home.tier == Tier::nvme) {
          transfer(OpKind::read, content, run.layer, data_offset(content, run), home,
                   {Tier::dram, in_dram(content, run)});
        }
      }
    }
  }

  // Spreads the first reads of states over the forward pass, so that they do not hold up the
  // parameters.
  void read_states_ahead(std::size_t position) {
    const std::size_t forwards = layers_.size();
    if (shape_.update_window < 2 || position >= forwards) return;
    prepare_sets(std::size_t{shape_.update_window} * (position + 1) / forwards);
  }

  void update_layer(LayerId layer) {
    const Extent gradient = layers_[layer.value].gradient;
    for (; updated_ < updates_.size() && updates_[updated_].layer == layer; ++updated_) {
      prepare_sets(updated_ + shape_.update_window);
      const auto& run = updates_[updated_];
      const Bytes offset = data_offset(Content::gradient, run);
      const Bytes size = run.elements.count * layout_.element_size(Content::gradient);
      const Extent landed = allocate(Tier::dram, Content::gradient, size);
      transfer(OpKind::download, Content::gradient, layer, offset,
               {Tier::hbm, part(gradient, offset, size)}, {Tier::dram, landed});
      emit_update(run, landed);
      write_back(run);
      buffers_.release(Tier::dram, Content::master_weight, run.set);
      retire(gradients_, shape_.gradient_window, landed);
    }
    buffers_.release(Tier::hbm, Content::gradient, gradient);
  }

  void emit_update(const UpdateRun& run, Extent gradient) {
    std::vector<Operand> operands{{Content::gradient, Tier::dram, Access::read, run.layer,
                                   data_offset(Content::gradient, run), gradient}};
    for (const Content content : kUpdated) {
      const Access access = content == Content::parameter ? Access::write : Access::read_write;
      const bool check =
          access == Access::read_write && home_of(content, run).tier == Tier::nvme;
      operands.push_back({content, Tier::dram, access, run.layer, data_offset(content, run),
                          in_dram(content, run), stored_extent(content, run), check});
    }
    emit(OpKind::update, run.layer, operands, update_bytes(layout_, run));
    plan_.operations.back().elements = run.elements;
  }

  bool commits() const { return plan_.schedule.commits && map_.durable.count > 0; }

  // Where these elements will lie on NVMe after the pass; size 0: not there.
  Extent stored_extent(Content content, const UpdateRun& run) const {
    const Place home = home_of(content, run);
    if (home.tier == Tier::nvme) return home.extent;
    if (!commits() || content == Content::parameter) return {};
    return durable_extent(map_, content, run.layer, data_offset(content, run), home.extent.size);
  }

  // Parameters need no durable copy: they are the rounded master weights.
  void commit() {
    emit(OpKind::commit, LayerId{0},
         {{Content::master_weight, Tier::nvme, Access::read, LayerId{0}, {}, {{}, map_.durable}}},
         map_.commit_bytes);
  }

  void write_back(const UpdateRun& run) {
    for (const Content content : {Content::parameter, Content::master_weight, Content::momentum,
                                  Content::variance}) {
      const Place home = home_of(content, run);
      if (home.tier == Tier::dram) {
        flush_home(content, run, home);
        continue;
      }
      transfer(home.tier == Tier::nvme ? OpKind::write : OpKind::upload, content, run.layer,
               data_offset(content, run), {Tier::dram, in_dram(content, run)}, home);
    }
  }

  // What lives in RAM gets its durable copy with the commit.
  void flush_home(Content content, const UpdateRun& run, Place home) {
    const Extent stored = stored_extent(content, run);
    if (stored.size.count == 0) return;
    transfer(OpKind::write, content, run.layer, data_offset(content, run), home,
             {Tier::nvme, stored});
  }

  const ModelLayout& layout_;
  const Placement& placement_;
  const MemoryMap& map_;
  const Homes& homes_;
  const PlanShape shape_;
  Bytes run_bytes_;
  PlanBuffers buffers_;
  StepPlan plan_;
  std::size_t loaded_ = 0;   // uses whose bytes are fetched
  std::size_t drained_ = 0;  // uses whose results have left
  std::vector<LayerBuffers> layers_;
  std::vector<UpdateRun> updates_;  // in the order in which backward makes their gradients
  std::size_t prepared_ = 0;        // of updates_: set allocated, reads emitted
  std::size_t updated_ = 0;         // of updates_: update emitted
  std::deque<Extent> staged_;
  std::deque<Extent> gradients_;
};

}  // namespace

BuildResult build_plan(const ModelLayout& layout, const LayerSchedule& schedule,
                       const Placement& placement, const MemoryMap& map, const PlanShape& shape,
                       const PerTier<Bytes>& capacity) {
  BuildResult result;
  PlanBuilder builder(layout, schedule, placement, map, shape, capacity);
  try {
    result.plan = builder.build();
  } catch (const NoPlace&) {
    result.operations = builder.operations();
  }
  if (result.plan) result.operations = result.plan->operations.size();
  builder.buffers().report(map, result);
  return result;
}

}  // namespace terrace
