#include "runtime/plan_builder.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "runtime/plan_optimizer.h"
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
        homes_(map.homes),
        shape_(shape),
        run_bytes_{shape.run_segments * layout.segment_elements() *
                   layout.element_size(Content::parameter).count},
        out_(schedule, map, capacity),
        optimizer_(layout, placement, map, shape, out_),
        layers_(layout.layers()) {}

  StepPlan build() {
    const auto& uses = out_.plan.schedule.uses;
    if (uses.empty()) return settle_only();
    const LayerId first = uses.front().layer;
    layers_[first.value].input = out_.allocate(Tier::hbm, Content::activation,
                                               layout_.input_size(first), end_of(first));
    for (std::size_t position = 0; position < uses.size(); ++position) {
      load_until(position);
      optimizer_.read_ahead(position);
      compute(position);
      while (drained_ + shape_.drain_lag <= position) drain(drained_++);
    }
    while (drained_ < uses.size()) drain(drained_++);
    optimizer_.finish();
    return std::move(out_.plan);
  }

  StepPlan settle_only() {
    for (std::uint32_t l = 0; l < layers_.size(); ++l) optimizer_.settle(LayerId{l}, {});
    optimizer_.finish();
    return std::move(out_.plan);
  }

  const PlanBuffers& buffers() const { return out_.buffers; }
  std::size_t operations() const { return out_.plan.operations.size(); }

 private:
  // A layer's buffers while they are alive.
  struct LayerBuffers {
    Extent parameter;
    Extent input;
    Extent input_gradient;
    Extent gradient;
    Extent saved;  // the input in DRAM or on NVMe, between forward and backward
  };

  // Moves `size` bytes between an NVMe extent and an HBM extent through DRAM, run by run.
  void through_dram(bool up, Content content, LayerId layer, Bytes data_offset, Extent nvme,
                    Extent hbm) {
    for (Bytes offset; offset < nvme.size; offset += run_bytes_) {
      const Bytes size = std::min(run_bytes_, nvme.size - offset);
      const Extent stage = out_.allocate(Tier::dram, content, size);
      const Place file{Tier::nvme, part(nvme, offset, size)};
      const Place host{Tier::dram, stage};
      const Place device{Tier::hbm, part(hbm, offset, size)};
      if (up) {
        out_.transfer(OpKind::read, content, layer, data_offset + offset, file, host);
        out_.transfer(OpKind::upload, content, layer, data_offset + offset, host, device);
      } else {
        out_.transfer(OpKind::download, content, layer, data_offset + offset, device, host);
        out_.transfer(OpKind::write, content, layer, data_offset + offset, host, file);
      }
      out_.retire(staged_, shape_.staging_window, stage);
    }
  }

  // ---- fetching what a use needs

  // Loads the use at `position`, and as many after it as the shape allows.
  void load_until(std::size_t position) {
    const auto& uses = out_.plan.schedule.uses;
    for (; loaded_ <= position + shape_.prefetch_uses && loaded_ < uses.size(); ++loaded_) {
      if (!may_load(loaded_) && loaded_ > position) return;
      while (!may_load(loaded_)) drain(drained_++);
      load(loaded_);
    }
  }

  // A layer's backward is fetched after its forward has left the device.
  bool may_load(std::size_t position) const {
    const auto [phase, layer] = out_.plan.schedule.uses[position];
    const bool again = position > 0 && out_.plan.schedule.uses[position - 1].layer == layer;
    return phase == Phase::forward || again || drained_ > layer.value;
  }

  void load(std::size_t position) {
    const auto [phase, layer] = out_.plan.schedule.uses[position];
    out_.buffers.current_use = out_.plan.schedule.uses[position];
    const bool again = position > 0 && out_.plan.schedule.uses[position - 1].layer == layer;
    if (phase == Phase::backward && !kept_on_device(layer, position)) load_input(layer);
    if (!again) load_parameters(layer, phase == Phase::forward && optimizer_.settles());
  }

  void load_parameters(LayerId layer, bool settle) {
    auto& parameter = layers_[layer.value].parameter;
    const auto pieces = homes_.of(Content::parameter, layer);
    if (placement_[layer.value].parameter_hbm) {
      if (settle) optimizer_.settle(layer, {});
      parameter = pieces.empty() ? Extent{} : pieces.front().extent;
      return;
    }
    parameter = out_.allocate(Tier::hbm, Content::parameter,
                              layout_.block_size(layer, Content::parameter), end_of(layer));
    if (settle) optimizer_.settle(layer, parameter);
    for (const auto& piece : pieces) {
      const Extent target = part(parameter, piece.data_offset, piece.extent.size);
      if (piece.tier == Tier::nvme) {
        if (settle) continue;  // it came with the updates
        through_dram(true, Content::parameter, layer, piece.data_offset, piece.extent, target);
      } else {
        out_.transfer(OpKind::upload, Content::parameter, layer, piece.data_offset,
                      {Tier::dram, piece.extent}, {Tier::hbm, target});
      }
    }
  }

  void load_input(LayerId layer) {
    auto& buffers = layers_[layer.value];
    const Tier tier = placement_[layer.value].activation;
    buffers.input =
        out_.allocate(Tier::hbm, Content::activation, layout_.input_size(layer), end_of(layer));
    if (tier == Tier::nvme) {
      through_dram(true, Content::activation, layer, {}, buffers.saved, buffers.input);
    } else {
      out_.transfer(OpKind::upload, Content::activation, layer, {}, {Tier::dram, buffers.saved},
                    {Tier::hbm, buffers.input});
    }
    out_.buffers.release(tier, Content::activation, buffers.saved);
  }

  // The input stays in HBM when that is its home, or when backward follows forward at once.
  // `position` is that of either use.
  bool kept_on_device(LayerId layer, std::size_t position) const {
    const auto& uses = out_.plan.schedule.uses;
    const auto same = [&](std::size_t p) { return p < uses.size() && uses[p].layer == layer; };
    const std::size_t neighbour =
        uses[position].phase == Phase::forward ? position + 1 : position - 1;
    return placement_[layer.value].activation == Tier::hbm || same(neighbour);
  }

  // ---- the layer function

  void compute(std::size_t position) {
    const auto [phase, layer] = out_.plan.schedule.uses[position];
    out_.buffers.current_use = out_.plan.schedule.uses[position];
    auto& buffers = layers_[layer.value];
    out_.plan.uses.push_back(phase == Phase::forward ? forward(layer) : backward(layer));
    const auto& spec = layout_.layer(layer);
    out_.plan.operations.back().flops =
        phase == Phase::forward ? spec.forward_flops : spec.backward_flops;
    const bool again = position + 1 < out_.plan.schedule.uses.size() &&
                       out_.plan.schedule.uses[position + 1].layer == layer;
    if (!again && !placement_[layer.value].parameter_hbm) {
      out_.buffers.release(Tier::hbm, Content::parameter, buffers.parameter);
    }
  }

  Extent workspace(LayerId layer, Bytes size) {
    const Extent extent =
        out_.allocate(Tier::hbm, Content::workspace, round_up(size, kPage), end_of(layer));
    out_.buffers.release(Tier::hbm, Content::workspace, extent);
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
      output = out_.allocate(Tier::hbm, Content::activation, layout_.input_size(above),
                             other_end(layer));
      layers_[above.value].input = output;
    }
    const Extent scratch = workspace(layer, layout_.layer(layer).forward_workspace);
    const bool first = layer == out_.plan.schedule.uses.front().layer;
    return out_.emit(OpKind::forward, layer,
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
      buffers.input_gradient = out_.allocate(Tier::hbm, Content::activation_gradient,
                                             layout_.input_size(layer), other_end(layer));
    }
    buffers.gradient = out_.allocate(Tier::hbm, Content::gradient,
                                     layout_.block_size(layer, Content::gradient), end_of(layer));
    const Extent scratch = workspace(layer, spec.backward_workspace);
    const OpIndex op = out_.emit(
        OpKind::backward, layer,
        {on_hbm(Content::parameter, Access::read, layer, buffers.parameter),
         on_hbm(Content::activation, Access::read, layer, buffers.input),
         on_hbm(Content::activation_gradient, Access::read, above, output_gradient),
         on_hbm(Content::activation_gradient, Access::write, layer, buffers.input_gradient),
         on_hbm(Content::gradient, Access::write, layer, buffers.gradient),
         on_hbm(Content::workspace, Access::write, layer, scratch)},
        {});
    out_.buffers.release(Tier::hbm, Content::activation, buffers.input);
    if (output_gradient.size.count > 0) {
      out_.buffers.release(Tier::hbm, Content::activation_gradient, output_gradient);
      layers_[above.value].input_gradient = {};
    }
    return op;
  }

  // ---- what leaves the device after a use

  void drain(std::size_t position) {
    const auto [phase, layer] = out_.plan.schedule.uses[position];
    out_.buffers.current_use = out_.plan.schedule.uses[position];
    if (phase == Phase::backward) {
      optimizer_.take_gradients(layer, layers_[layer.value].gradient);
    } else if (!out_.plan.schedule.training) {
      out_.buffers.release(Tier::hbm, Content::activation, layers_[layer.value].input);
    } else if (!kept_on_device(layer, position)) {
      save_input(layer);
    }
  }

  void save_input(LayerId layer) {
    auto& buffers = layers_[layer.value];
    const Tier tier = placement_[layer.value].activation;
    buffers.saved = out_.allocate(tier, Content::activation, layout_.input_size(layer));
    if (tier == Tier::nvme) {
      through_dram(false, Content::activation, layer, {}, buffers.saved, buffers.input);
    } else {
      out_.transfer(OpKind::download, Content::activation, layer, {}, {Tier::hbm, buffers.input},
                    {Tier::dram, buffers.saved});
    }
    out_.buffers.release(Tier::hbm, Content::activation, buffers.input);
  }

  const ModelLayout& layout_;
  const Placement& placement_;
  const Homes& homes_;
  const PlanShape shape_;
  const Bytes run_bytes_;  // of parameters or saved inputs in one transfer
  PlanEmitter out_;
  OptimizerFlow optimizer_;
  std::size_t loaded_ = 0;   // uses whose bytes are fetched
  std::size_t drained_ = 0;  // uses whose results have left
  std::vector<LayerBuffers> layers_;
  std::deque<Extent> staged_;
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
