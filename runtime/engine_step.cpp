// A step's beginning and end, and when its updates are made.
#include "runtime/engine_impl.h"

namespace terrace {

void EngineImpl::begin(bool evaluation, const StepOptions& options) {
  if (alive_) {
    throw Error(ErrorCode::invalid_argument,
                "a step is still alive; finish or destroy it before the next one begins");
  }
  if (leased_) {
    throw Error(ErrorCode::invalid_argument,
                "a layer view of an earlier step is still alive; let it end first");
  }
  thread_->check();
  learning_rate_ = options.learning_rate.value_or(config_.learning_rate);
  const auto scalars = adam_scalars(config_.optimizer, learning_rate_, steps_ + 1);
  if (evaluation) settle();
  begin_time_ = steady_clock().now();
  compute_before_ = compute_seconds();
  PassOptions pass{PassKind::evaluation, scalars, steps_ + 1};
  if (!evaluation && deferred()) {
    pass = take_pending(PassKind::training, PassKind::committing);
  } else if (!evaluation) {
    pass.kind = commits_at(steps_ + 1) ? PassKind::committing : PassKind::training;
  }
  thread_->begin(pass);
  ++pass_;
  alive_ = true;
  cancelled_ = false;
  kind_ = pass.kind;
  position_ = 0;
  micro_batch_ = 0;
}

// As soon as the one before is enqueued, so that what it needs is fetched meanwhile.
void EngineImpl::begin_next_micro_batch() {
  kind_ = kind_of(++micro_batch_, form());
  position_ = 0;
  thread_->begin({kind_, {}, steps_});
}

// A pass that makes the pending updates, or a fresh one when there are none.
PassOptions EngineImpl::take_pending(PassKind plain, PassKind committing) {
  if (!pending_) return {PassKind::fresh, {}, steps_};
  PassOptions pass{pending_->commits ? committing : plain, pending_->scalars, pending_->step};
  pass.trainer = std::move(pending_->trainer);
  pending_.reset();
  return pass;
}

void EngineImpl::settle() {
  if (pending_) thread_->begin(take_pending(PassKind::settling, PassKind::settling_committing));
}

void EngineImpl::refuse_unfinished(std::uint64_t pass) const {
  refuse_over(pass);
  refuse_cancelled();
  const auto& uses = plan().schedule.uses;
  if (leased_) throw Error(ErrorCode::invalid_argument, "a layer view is still alive");
  if (position_ < uses.size()) {
    const auto later = plan().schedule.training ? form().micro_batches - 1 - micro_batch_ : 0;
    throw Error(ErrorCode::invalid_argument,
                "the step is not complete: " + name(uses[position_]) + " comes next, and " +
                    std::to_string(uses.size() - position_ + later * uses.size()) +
                    " uses are missing");
  }
}

StepReport EngineImpl::finish(std::uint64_t pass, const TrainerState& state) {
  refuse_over(pass);
  refuse_cancelled();
  thread_->check();  // before what is missing because of it
  refuse_unfinished(pass);
  thread_->wait_for_updates();
  const bool training = plan().schedule.training;
  StepReport report;
  report.loss_scale = scaler_.scale();
  if (training) judge_gradients(report);
  if (report.skipped && !deferred()) skip_updated(report);
  report.step = steps_ + (training && !report.skipped ? 1 : 0);
  report.seconds = to_seconds(steady_clock().now() - begin_time_);
  report.compute_seconds = compute_seconds() - compute_before_;
  report.stall_seconds = std::max(0.0, report.seconds - report.compute_seconds);
  std::string kept = training ? ask_trainer(state, report) : std::string{};
  alive_ = false;
  if (training) scaler_.count(report.skipped);
  report.next_loss_scale = scaler_.scale();
  if (report.skipped) return report;
  steps_ = report.step;
  if (!training || !deferred()) {
    thread_->finish_pass(std::move(kept));
  } else {
    defer(report, std::move(kept));
  }
  if (training) initializer_ = {};
  return report;
}

// What it throws cancels the step: a commit without the trainer's part would be of no use.
std::string EngineImpl::ask_trainer(const TrainerState& state, const StepReport& report) {
  if (!state) return {};
  try {
    std::string kept = state(report);
    check_trainer(kept);
    return kept;
  } catch (...) {
    if (!report.skipped) cancel();
    alive_ = false;
    throw;
  }
}

bool EngineImpl::reversible() const {
  return terrace::reversible(durability_of(config_, speeds_.drives));
}

// Updates were made all the same.
void EngineImpl::skip_updated(const StepReport& report) {
  if (reversible()) {
    thread_->cancel();
    return undo_updates();
  }
  const Error error(
      ErrorCode::corrupt,
      "element " + std::to_string(report.bad_index) + " of the gradient of '" + report.bad_tensor +
          "' is not finite, and layers had been updated with the others: the state in memory "
          "belongs to no step. Give the engine two slots and a commit at every step, more RAM to "
          "keep gradients in, or a norm to clip to: then such a step is skipped");
  thread_->fail(error);
}

// The state becomes that of the step before.
void EngineImpl::undo_updates() {
  thread_->undo([&](SegmentStore& nvme) {
    nvme.revert();
    HomeAccess homes(layout_, plans_->engine.map, *store_, *device_, nvme);
    if (initializer_) homes.initialize(initializer_);
    else homes.restore();
  });
}

void EngineImpl::cancel() noexcept {
  cancelled_ = true;
  bool updated = false;
  try {
    updated = !thread_->cancel();
  } catch (const Error&) {
    // Sticky in the executor; the next call reports it.
  }
  // What the trainer enqueued may use memory of the trainer's that goes with the step.
  device_->synchronize(kComputeStream);
  if (!updated) return;
  try {
    if (reversible()) return undo_updates();
    thread_->fail({ErrorCode::cancelled,
                   "the step was abandoned after some layers had been updated and before all "
                   "were; the state in memory belongs to no step. Create the engine anew; a store "
                   "with two slots resumes at its last commit"});
  } catch (const Error&) {
    // Sticky as well.
  }
}

void EngineImpl::judge_gradients(StepReport& report) {
  if (const auto bad = thread_->bad_gradient()) {
    report.skipped = true;
    const auto& tensors = layout_.block(bad->layer).tensors;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      if (bad->element < tensors[t].first || bad->element >= tensors[t].end()) continue;
      report.bad_tensor = layout_.layer(bad->layer).tensors[t].name;
      report.bad_index = bad->element - tensors[t].first;
    }
    return;
  }
  const double norm = measured_norm(1 / divisor(report.loss_scale));
  report.gradient_norm = norm;
  report.clipped_norm = norm * clip_factor(norm, config_.gradient_clipping);
}

// What the pass has measured lies in DRAM, untouched until the next one.
double EngineImpl::measured_norm(double factor) const {
  const auto& sums = plans_->engine.map.gradient_sums;
  std::vector<double> blocks;
  for (std::uint32_t l = 0; l < layout_.layers(); ++l) {
    const auto leaves = leaves_of(layout_.block(LayerId{l}).elements);
    if (leaves == 0) continue;
    const auto* first = reinterpret_cast<const double*>(store_->address(Tier::dram, sums[l]));
    blocks.push_back(sum_of_leaves({first, leaves}));
  }
  return gradient_norm(blocks, factor);
}

void EngineImpl::defer(const StepReport& report, std::string kept) {
  const double clip = clip_factor(*report.gradient_norm, config_.gradient_clipping);
  Pending pending;
  pending.scalars = adam_scalars(config_.optimizer, learning_rate_, steps_,
                                 gradient_factor(clip, divisor(report.loss_scale)));
  pending.step = steps_;
  pending.commits = commits_at(steps_);
  pending.trainer = with_scaler(kept);
  pending_ = std::move(pending);
}

}  // namespace terrace
