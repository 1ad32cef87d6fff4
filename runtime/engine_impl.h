// The engine behind the public face: checks the order of a trainer's calls, hands out addresses,
// and puts the parts together.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/calibrate.h"
#include "runtime/engine_store.h"
#include "runtime/executor_thread.h"
#include "runtime/gradient_rules.h"
#include "runtime/home_access.h"
#include "runtime/planner.h"
#include "terrace/engine.h"
#include "terrace/error.h"
#include "tiers/tensor_store.h"

namespace terrace {

// Thread rule: that of Engine.
class EngineImpl {
 public:
  EngineImpl(const Config& config, const ModelSpec& model, const Initializer& initializer,
             EnginePorts ports);
  ~EngineImpl() {
    abandon(pass_);
    try {
      settle();
    } catch (const Error&) {
      // The step that had failed has told so, or its end will be missed by a resume, which tells.
    }
    stop();
  }

  // ---- steps

  void begin(bool evaluation, const StepOptions& options);
  Step make_step() { return Step(this, pass_); }

  LayerView use(std::uint64_t pass, LayerUse wanted);

  void end_use(bool submitted) {
    leased_ = false;
    if (cancelled_) return;
    if (!submitted) return cancel();
    thread_->release();
    ++position_;
    const bool over = position_ == plan().schedule.uses.size();
    if (over && plan().schedule.training && !plan().schedule.last) begin_next_micro_batch();
  }

  StepReport finish(std::uint64_t pass, const TrainerState& state);
  double loss_scale() const { return scaler_.scale(); }

  // A step that is destroyed unfinished; errors are kept for the next call.
  void abandon(std::uint64_t pass) noexcept {
    if (!alive_ || pass != pass_) return;
    if (!cancelled_ && !leased_ && position_ == plan().schedule.uses.size()) {
      try {
        finish(pass, {});
      } catch (const Error&) {
        alive_ = false;  // sticky in the executor
        device_->synchronize(kComputeStream);  // as cancel() does
      }
      return;
    }
    alive_ = false;
    if (!cancelled_) cancel();
  }

  // ---- reading

  void read(std::string_view tensor, Content content, std::uint64_t first,
            std::span<float> values) {
    const auto place = layout_.find(tensor);
    const auto range = layout_.block(place.layer).tensors[place.index];
    if (alive_) throw Error(ErrorCode::invalid_argument, "read() is for between steps");
    settle();
    if (class_of(content) != TensorClass::parameter &&
        class_of(content) != TensorClass::optimizer_state) {
      throw Error(ErrorCode::invalid_argument,
                  "only parameters and optimizer states live between steps");
    }
    if (first > range.count || values.size() > range.count - first) {
      throw Error(ErrorCode::invalid_argument,
                  "tensor '" + std::string(tensor) + "' has " + std::to_string(range.count) +
                      " elements; [" + std::to_string(first) + ", " +
                      std::to_string(first + values.size()) + ") is outside");
    }
    const Bytes size = layout_.element_size(content);
    const DType dtype =
        content == Content::parameter ? layout_.model().parameter_dtype : DType::fp32;
    const Bytes offset = (range.first + first) * size;
    with_homes([&](HomeAccess& homes) {
      homes.read(content, place.layer, offset, values.size() * size,
                 [&](std::span<const std::byte> bytes, Bytes at_offset) {
                   widen(bytes, dtype, values.subspan((at_offset - offset).count / size.count));
                 });
    });
  }

  void drain() {
    if (alive_) throw Error(ErrorCode::invalid_argument, "drain() is for between steps");
    settle();
    thread_->run_idle([&](SegmentStore&) {
      if (trace_) trace_error_ = trace_->flush();
    });
  }

  void commit(const std::string& trainer) {
    if (alive_) throw Error(ErrorCode::invalid_argument, "commit() is for between steps");
    if (plans_->engine.map.durable.count == 0) {
      throw Error(ErrorCode::unavailable,
                  "there is no store to commit to: name an nvme directory and keep two slots");
    }
    check_trainer(trainer);
    settle();
    thread_->run_idle([&](SegmentStore& nvme) {
      HomeAccess homes(layout_, plans_->engine.map, *store_, *device_, nvme);
      homes.flush_homes(steps_);
      nvme.commit_now(steps_, with_scaler(trainer));
    });
  }

  std::optional<std::uint64_t> resumed_step() const {
    return resumed_ ? std::optional(resumed_->step) : std::nullopt;
  }
  const std::string& trainer_state() const { return trainer_state_; }

  EngineStats stats() {
    EngineStats result;
    result.lanes = thread_->stats();
    at(result.peak, Tier::hbm) = device_->peak_allocated();
    at(result.peak, Tier::dram) = store_->reserved(Tier::dram);
    result.io = thread_->io_info();
    result.drives = thread_->drive_stats();
    result.store_notes = thread_->store_notes();
    result.trace_error = trace_error_;
    result.operations = thread_->effort().operations;
    result.executor_user_seconds = thread_->effort().user_seconds;
    result.direct = !result.drives.empty();
    if (result.drives.empty()) result.direct_note = "nothing lives on nvme";
    for (const auto& drive : result.drives) {
      at(result.peak, Tier::nvme) += drive.reserved;
      if (drive.direct || !result.direct) continue;
      result.direct = false;
      result.direct_note = drive.direct_note;
    }
    return result;
  }

  const ModelLayout& layout() const { return layout_; }
  const Forecast& forecast() const { return plans_->engine.forecast; }
  const Speeds& speeds() const { return speeds_.speeds; }
  Device& device() { return *device_; }
  std::uint64_t steps() const { return steps_; }

  // ---- for views

  std::byte* hbm(OpIndex op, Content content, LayerId layer) const {
    for (const auto& operand : plan().operands_of(op)) {
      if (operand.content == content && operand.layer == layer) {
        return store_->address(Tier::hbm, operand.extent);
      }
    }
    return nullptr;
  }

 private:
  const StepPlan& plan() const { return plans_->engine.plan(kind_); }

  std::string name(LayerUse use) const {
    std::string text = std::string(use.phase == Phase::forward ? "forward" : "backward") +
                       " of layer '" + layout_.layer(use.layer).name + "'";
    if (!plan().schedule.accumulates || !plan().schedule.training) return text;
    return text + " of micro-batch " + std::to_string(micro_batch_ + 1) + " of " +
           std::to_string(form().micro_batches);
  }

  void refuse_over(std::uint64_t pass) const {
    if (alive_ && pass == pass_) return;
    throw Error(ErrorCode::invalid_argument, "this step is over; begin another");
  }

  void refuse_cancelled() const {
    if (!cancelled_) return;
    throw Error(ErrorCode::cancelled,
                "the step was cancelled: a backward layer view was dropped without "
                "submit_gradients()");
  }

  void cancel() noexcept;
  void undo_updates();

  double compute_seconds() { return at(thread_->stats(), Lane::compute).busy_seconds; }

  StepForm form() const { return plans_->engine.form; }
  bool deferred() const { return form().update_time == UpdateTime::deferred; }

  // What gradients are divided by: the sum of micro-batches becomes their mean.
  double divisor(double loss_scale) const { return loss_scale * form().micro_batches; }

  bool commits_at(std::uint64_t step) const {
    return plans_->engine.map.durable.count > 0 && step % config_.store.commit_interval == 0;
  }

  // What a commit keeps: the loss scale before the trainer's own bytes.
  std::string with_scaler(const std::string& trainer) const {
    return config_.loss_scale.enabled ? scaler_.save() + trainer : trainer;
  }

  void begin_next_micro_batch();
  void refuse_unfinished(std::uint64_t pass) const;
  // Makes the pending updates, without a step.
  void settle();
  PassOptions take_pending(PassKind plain, PassKind committing);
  void judge_gradients(StepReport& report);
  void skip_updated(const StepReport& report);
  std::string ask_trainer(const TrainerState& state, const StepReport& report);
  bool reversible() const;
  void defer(const StepReport& report, std::string kept);
  double measured_norm(double factor) const;

  static void check_trainer(const std::string& state) {
    if (state.size() <= most_trainer_bytes()) return;
    throw Error(ErrorCode::invalid_argument,
                "the trainer gives " + std::to_string(state.size()) +
                    " bytes to keep with a commit; at most " +
                    std::to_string(most_trainer_bytes()) + " are kept: keep more elsewhere");
  }

  std::unique_ptr<SegmentStore> open(IoEngine& io) {
    const auto arena = store_->arena();
    if (!arena.empty()) io.register_buffers(std::span(&arena, 1));
    auto nvme = std::make_unique<SegmentStore>(
        io, store_options(config_, layout_, plans_->engine.map, speeds_.drives));
    resumed_ = nvme->resumed();
    if (!resumed_) return nvme;
    trainer_state_ = resumed_->trainer;
    if (config_.loss_scale.enabled) scaler_.restore(trainer_state_);
    return nvme;
  }

  // Something may still write to this memory when the thread says so: it is never freed.
  void stop() {
    if (thread_->stop()) return;
    [[maybe_unused]] const auto* store_left = store_.release();
    [[maybe_unused]] const auto* device_left = device_.release();
  }

  void with_homes(const std::function<void(HomeAccess&)>& task) {
    thread_->run_idle([&](SegmentStore& nvme) {
      HomeAccess homes(layout_, plans_->engine.map, *store_, *device_, nvme);
      task(homes);
    });
  }

  static void widen(std::span<const std::byte> bytes, DType dtype, std::span<float> values) {
    const auto narrow = [&](auto value) {
      for (std::size_t i = 0; i < bytes.size() / sizeof value; ++i) {
        std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
        values[i] = to_float(value);
      }
    };
    switch (dtype) {
      case DType::fp32: std::memcpy(values.data(), bytes.data(), bytes.size()); break;
      case DType::bf16: narrow(bfloat16{}); break;
      case DType::fp16: narrow(float16{}); break;
    }
  }

  const Config config_;
  const ModelLayout layout_;
  std::unique_ptr<Device> device_;
  MeasuredSpeeds speeds_;
  std::optional<RunnablePlans> plans_;
  std::unique_ptr<TraceSink> trace_;
  std::string trace_error_;  // as of the last drain()
  std::unique_ptr<AdamPool> adam_;
  std::unique_ptr<TensorStore> store_;
  std::optional<CommitRecord> resumed_;  // written, as the next, on the executor's thread while
  std::string trainer_state_;            // it starts
  std::optional<ExecutorThread> thread_;  // destroyed first

  // A finished step whose updates are still to be made.
  struct Pending {
    AdamScalars scalars;
    std::uint64_t step = 0;
    bool commits = false;
    std::string trainer;
  };
  std::optional<Pending> pending_;
  LossScaler scaler_;
  Initializer initializer_;  // until a commit can take its place
  double learning_rate_ = 0;  // of the present step

  std::uint64_t steps_ = 0;
  std::uint64_t pass_ = 0;  // number of the present or last step or pass
  bool alive_ = false;      // its Step exists and is not finished
  PassKind kind_ = PassKind::training;  // of it
  bool cancelled_ = false;
  bool leased_ = false;     // a LayerView exists
  std::size_t position_ = 0;       // in its uses
  std::uint32_t micro_batch_ = 0;  // of the step, counted from 0
  Nanoseconds begin_time_{0};
  double compute_before_ = 0;
};

}  // namespace terrace
