// terrace train: the reference GPT, with what it prints and writes.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <numbers>
#include <numeric>

#include "terrace/error.h"
#include "tools/commands.h"
#include "tools/gpt_layers.h"
#include "tools/interrupt.h"
#include "tools/options.h"
#include "tools/progress.h"
#include "tools/report.h"
#include "tools/result_file.h"
#include "tools/tiered_trainer.h"

namespace terrace::cli {
namespace {

using gpt::ReferenceTrainer;
using gpt::TextData;
using gpt::TieredTrainer;

constexpr std::size_t kRecentSteps = 10;  // over which the final loss is averaged
constexpr std::uint64_t kMostSkips = 100;  // one after the other
using Losses = std::vector<double>;

struct TrainOptions {
  ModelOptions model;
  TierOptions tiers;
  GradientOptions gradients;
  std::string data = ".";
  std::uint64_t steps = 100;
  std::optional<double> learning_rate;
  std::string trace;
  std::string json;
  std::uint32_t sample = 0;
  bool verify = false;
  bool resume = false;
  bool discard = false;
};

// One run, from the options to the exit code.
class TrainRun {
 public:
  explicit TrainRun(const TrainOptions& options)
      : options_(options), config_(options.tiers.config()),
        gpt_(options.model.config(config_)),
        data_(options.data),
        json_(options.json, "--json") {
    options.gradients.apply(gpt_.parameter_dtype, config_);
    data_.require_context(gpt_.context);
    if (!options.trace.empty()) config_.trace = options.trace;
    rate_ = options.learning_rate.value_or(config_.learning_rate);
    if (options.resume) config_.store.mode = StoreMode::resume;
    if (options.discard) config_.store.mode = StoreMode::discard;
    config_.store.identity = identity();
    if (!config_.speeds.compute_tflops) {
      config_.speeds.compute_tflops =
          gpt::measure_tflops(gpt_) / (1 + config_.throttle.compute_delay);
    }
  }

  int run() {
    TieredTrainer trainer(gpt_, config_);
    Engine& engine = trainer.engine();
    if (options_.verify) {
      reference_ = std::make_unique<ReferenceTrainer>(
          gpt_, config_.optimizer,
          gpt::ReferenceGradients{config_.gradient_clipping, config_.loss_scale,
                                  config_.micro_batches, config_.accumulation_dtype});
    }
    introduce(engine);
    take_over(engine);
    train(trainer);
    const auto begin = std::chrono::steady_clock::now();
    engine.drain();
    tail_ = std::chrono::steady_clock::now() - begin;
    conclude(trainer);
    if (json_.wanted()) write_json(engine);
    if (store_gone_ || (identical_ && !*identical_)) return 1;
    if (!stats_.trace_error.empty()) return 2;
    return Interrupt::signal() != 0 ? 128 + Interrupt::signal() : 0;
  }

 private:
  // What makes another run of it; the learning rate may change on the way.
  std::vector<std::pair<std::string, std::string>> identity() const {
    return {{"model", fmt::format("gpt of {} blocks, width {}, {} heads, context {}", gpt_.layers,
                                  gpt_.width, gpt_.heads, gpt_.context)},
            {"batch", batch_text(gpt_.batch, config_)},
            {"seed", std::to_string(gpt_.seed)},
            {"data", fmt::format("{} bytes, hash {:016x}", data_.bytes(), data_.hash())}};
  }

  std::uint64_t state_bytes() const {
    const auto model = gpt::make_model(gpt_);
    return parameter_count(model) *
           (12 + size_of(gpt_.parameter_dtype).count + size_of(gpt_.gradient_dtype).count);
  }

  void introduce(Engine& engine) const {
    const auto stats = engine.stats();
    fmt::print(
        "model: {} parameters, state {} ({} blocks, width {}, {} heads, context {}, batch {})\n",
        count_text(parameter_count(engine.model())), to_string(Bytes{state_bytes()}), gpt_.layers,
        gpt_.width, gpt_.heads, gpt_.context, batch_text(gpt_.batch, config_));
    fmt::print("data: {} bytes in {} files, order-0 entropy {:.3f} bits per byte\n", data_.bytes(),
               data_.files(), data_.order0_entropy());
    fmt::print("I/O: {}, {}{}\n", stats.io.engine,
               stats.direct ? "direct" : "not direct (" + stats.direct_note + ")",
               stats.io.registered_buffers ? ", registered buffers" : "");
    for (const auto& note : stats.io.notes) fmt::print("note: {}\n", note);
    for (const auto& note : stats.store_notes) fmt::print("store: {}\n", note);
    if (const auto step = engine.resumed_step()) {
      fmt::print("resumed at step {} of {}\n", *step, options_.steps);
    }
    for (const auto& note : config_.notes) fmt::print("note: {}\n", note);
    fmt::print("plan\n{}{}", plan_text(engine.forecast()),
               updates_text(config_, engine.forecast()));
    std::fflush(stdout);
  }

  // What the steps before a resume left: the losses and the place in the data, kept with the
  // commit, and, to verify, the same steps in memory.
  void take_over(Engine& engine) {
    first_ = engine.steps();
    if (first_ == 0) return;
    const auto kept = nlohmann::json::parse(engine.trainer_state(), nullptr, false);
    if (kept.is_object() && kept.contains("losses")) {
      for (const auto& loss : kept["losses"]) {  // null: it was no number
        losses_.push_back(loss.is_number() ? loss.get<double>() : std::nan(""));
      }
    }
    batches_ = first_;
    if (kept.is_object() && kept.contains("batches")) batches_ = kept["batches"];
    if (kept.is_object() && kept.contains("rates")) kept["rates"].get_to(rates_);
    kept_losses_ = losses_.size();
    tell_changes(kept);
    if (!reference_) return;
    fmt::print("repeating {} steps in memory to verify ...\n", first_);
    std::fflush(stdout);
    std::uint64_t batch = 0;
    for (const auto& [count, rate] : rates_) {
      for (std::uint64_t i = 0; i < count; ++i) reference_->step(data_of(++batch), rate);
    }
  }

  // What may differ from the run before, and which steps in memory must then be told.
  void tell_changes(const nlohmann::json& kept) const {
    if (!rates_.empty() && rates_.back().second != rate_) {
      fmt::print("note: from here on the learning rate is {}; it was {}\n", rate_,
                 rates_.back().second);
    }
    const std::string before = kept.is_object() ? kept.value("optimizer", "") : "";
    if (before == optimizer_text(config_)) return;
    if (reference_) {
      throw Error(ErrorCode::invalid_argument,
                  "--verify repeats all steps with one optimizer: here it is " +
                      optimizer_text(config_) + ", and the steps so far were made with " +
                      (before.empty() ? "one that is not known" : before) +
                      "; leave --verify out, or set the same");
    }
    fmt::print("note: from here on the optimizer is {}; it was {}\n", optimizer_text(config_),
               before.empty() ? "one that is not known" : before);
  }

  std::uint64_t tokens_per_step() const {
    return std::uint64_t{gpt_.rows()} * config_.micro_batches;
  }

  std::vector<gpt::TextData::Batch> data_of(std::uint64_t step) const {
    return data_.step(gpt_, step, config_.micro_batches);
  }

  // The losses that the summary is made of, and how many batches were used.
  std::string keep(Losses losses) const {
    const auto recent = std::min(kRecentSteps, losses.size());
    losses.erase(losses.begin(), losses.end() - static_cast<std::ptrdiff_t>(recent));
    return nlohmann::json{{"losses", losses},
                          {"batches", batches_},
                          {"rates", rates_},
                          {"optimizer", optimizer_text(config_)}}
        .dump();
  }

  std::string keep_with(double loss) const {
    auto losses = losses_;
    losses.push_back(loss / std::numbers::ln2);
    return keep(std::move(losses));
  }

  void train(TieredTrainer& trainer) {
    const Interrupt interrupt;
    Progress progress(options_.steps, tokens_per_step(), first_);
    while (trainer.engine().steps() < options_.steps && Interrupt::signal() == 0) {
      const auto batch = data_of(++batches_);
      if (rates_.empty() || rates_.back().second != rate_) rates_.emplace_back(0, rate_);
      ++rates_.back().first;
      const auto begin = std::chrono::steady_clock::now();
      const auto result = trainer.step(batch, rate_, [&](double loss) { return keep_with(loss); });
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
      if (reference_) compare(result.report, reference_->step(batch, rate_));
      stall_seconds_ += result.report.stall_seconds;
      if (config_.loss_scale.enabled) loss_scale_ = result.report.next_loss_scale;
      if (result.report.skipped) {
        pass_by(result.report, progress);
        continue;
      }
      skips_in_a_row_ = 0;
      take(result, spent.count());
      const auto stats = trainer.engine().stats();
      progress.show({result.report.step, losses_.back(), spent.count(),
                     result.report.gradient_norm, scale_of(result.report)}, stats);
      watch_store(stats);
    }
    progress.end();
    commit_rest(trainer.engine());
  }

  void take(const TieredTrainer::Result& result, double seconds) {
    step_seconds_.push_back(seconds);
    losses_.push_back(result.loss / std::numbers::ln2);
    if (!result.report.gradient_norm) return;
    gradient_norms_.push_back(*result.report.gradient_norm);
    clipped_norms_.push_back(*result.report.clipped_norm);
  }

  std::optional<double> scale_of(const StepReport& report) const {
    if (!config_.loss_scale.enabled) return std::nullopt;
    return report.loss_scale;
  }

  // The step is made again with the next batch.
  void pass_by(const StepReport& report, const Progress& progress) {
    ++skips_in_this_run_;
    const auto where = fmt::format("gradient {}[{}] is not finite", report.bad_tensor,
                                   report.bad_index);
    std::string scale;
    if (config_.loss_scale.enabled) scale = fmt::format(" with loss scale {}", report.loss_scale);
    if (report.next_loss_scale != report.loss_scale) {
      scale += fmt::format("; the next is {}", report.next_loss_scale);
    }
    progress.tell(fmt::format("batch {} is passed by: {}{}", batches_, where, scale));
    if (++skips_in_a_row_ < kMostSkips) return;
    throw Error(ErrorCode::unavailable,
                fmt::format("{} batches in a row were passed by after step {}: {}{}; {}",
                            kMostSkips, report.step, where, scale,
                            config_.loss_scale.constant > 0
                                ? "choose a smaller --loss-scale, or 0"
                                : "choose a lower --learning-rate, or bf16 or fp32"));
  }

  void compare(const StepReport& report, const gpt::ReferenceResult& wanted) {
    if (!gradient_difference_.empty()) return;
    if (report.skipped != wanted.skipped) {
      gradient_difference_ = fmt::format("batch {} is skipped by one of both", batches_);
    } else if (report.gradient_norm != wanted.norm) {
      gradient_difference_ =
          fmt::format("the gradients' norm of batch {} is {:.17g}, in memory it is {:.17g}",
                      batches_, report.gradient_norm.value_or(0), wanted.norm.value_or(0));
    }
  }

  // Training goes on in a file that has no name any more, and nobody will find it again.
  void watch_store(const EngineStats& stats) {
    if (store_gone_ || config_.nvme.empty() || config_.store.slots != 2) return;
    for (const auto& drive : stats.drives) {
      std::error_code error;
      if (std::filesystem::exists(drive.path, error) || error) continue;
      fmt::print(stderr, "terrace: {} was removed while this run uses it: what it trains cannot be "
                         "resumed; stop it (Ctrl-C) unless the result alone is wanted\n",
                 drive.path);
      store_gone_ = true;
    }
  }

  // The last steps of a run are kept even when it was not their turn.
  void commit_rest(Engine& engine) const {
    const bool durable = engine.forecast().durability.two_slots;
    if (!durable || engine.steps() % config_.store.commit_interval == 0) return;
    engine.commit(keep(losses_));
  }

  double mean_step() const {
    const auto skip = step_seconds_.size() > 4 ? 1 : 0;  // the first step fills the pipeline
    return std::accumulate(step_seconds_.begin() + skip, step_seconds_.end(), 0.0) /
           static_cast<double>(step_seconds_.size() - static_cast<std::size_t>(skip));
  }

  // All steps, and what they left to be written.
  double stepped() const {
    return std::accumulate(step_seconds_.begin(), step_seconds_.end(), tail_.count());
  }

  // One batch is a noisy sample.
  double recent_loss() const {
    const auto count = std::min(kRecentSteps, losses_.size());
    return std::accumulate(losses_.end() - static_cast<std::ptrdiff_t>(count), losses_.end(), 0.0) /
           static_cast<double>(count);
  }

  void conclude(TieredTrainer& trainer) {
    Engine& engine = trainer.engine();
    if (Interrupt::signal() != 0) {
      fmt::print("interrupted: stopped after step {}\n", engine.steps());
    }
    stats_ = engine.stats();
    for (const auto& note : stats_.store_notes) {
      if (note.starts_with("writing ")) fmt::print("store: {}\n", note);
    }
    if (step_seconds_.empty()) fmt::print("nothing is left to do: {} steps are done\n", first_);
    if (!step_seconds_.empty()) {
      fmt::print("result\n{}",
                 lanes_text(engine.forecast(), stats_, step_seconds_.size() + skips_in_this_run_,
                            mean_step(), stepped()));
      fmt::print(
          "  loss {:.3f} bits per byte over the last {} steps (order-0 entropy {:.3f}); "
          "{:.0f} tokens/s; stalled {}\n",
          recent_loss(), std::min(kRecentSteps, losses_.size()), data_.order0_entropy(),
          static_cast<double>(tokens_per_step()) / mean_step(), duration_text(stall_seconds_));
    }
    hash_ = gpt::state_hash(engine);
    fmt::print("state hash: {}\n", hash_);
    if (reference_) {
      const auto found = gradient_difference_.empty() ? gpt::difference(engine, *reference_)
                                                      : gradient_difference_;
      identical_ = found.empty();
      fmt::print("identical to in-memory training: {}\n", found.empty() ? "yes" : "no: " + found);
    }
    if (options_.sample > 0) {
      const std::string prompt =
          data_.text().substr(0, std::min<std::size_t>(16, gpt_.context / 2));
      fmt::print("sample:\n{}\n",
                 printable(gpt::sample(trainer, prompt, options_.sample, gpt_.seed)));
    }
    if (!stats_.trace_error.empty()) {
      fmt::print(stderr, "terrace: {}\n", stats_.trace_error);
    } else if (!config_.trace.empty()) {
      fmt::print("trace: {} (open it at https://ui.perfetto.dev)\n", config_.trace);
    }
  }

  void write_gradients(nlohmann::json& out, Engine& engine) const {
    out["gradient_norm"] = gradient_norms_;
    out["clipped_norm"] = clipped_norms_;
    out["skipped_steps"] = batches_ - engine.steps();
    out["loss_scale"] = nullptr;
    if (loss_scale_) out["loss_scale"] = *loss_scale_;
  }

  void write_json(Engine& engine) {
    nlohmann::json out;
    const auto& forecast = engine.forecast();
    out["parameters"] = parameter_count(engine.model());
    out["micro_batches"] = config_.micro_batches;
    out["state_bytes"] = state_bytes();
    out["steps"] = engine.steps();
    out["resumed_from"] = nullptr;
    if (const auto step = engine.resumed_step()) out["resumed_from"] = *step;
    out["loss"] = Losses(losses_.begin() + static_cast<std::ptrdiff_t>(kept_losses_),
                         losses_.end());
    write_gradients(out, engine);
    out["order0_entropy"] = data_.order0_entropy();
    out["state_hash"] = hash_;
    out["identical_to_reference"] = nullptr;
    if (identical_) out["identical_to_reference"] = *identical_;
    out["step_seconds"] = step_seconds_;
    for (const Tier tier : kTiers) {
      const auto& planned = at(forecast.tiers, tier);
      out["tiers"][std::string(to_string(tier))] = {{"budget_bytes", planned.budget.count},
                                                    {"planned_peak_bytes", planned.peak.count},
                                                    {"peak_bytes", at(stats_.peak, tier).count}};
    }
    for (const Lane lane : kLanes) {
      const auto& seen = at(stats_.lanes, lane);
      out["lanes"][std::string(to_string(lane))] = {
          {"bytes", seen.bytes.count},
          {"planned_bytes", seen.planned_bytes.count},
          {"busy_seconds", seen.busy_seconds},
          {"floor_seconds", at(forecast.lanes, lane).seconds}};
    }
    out["forecast"] = {{"step_seconds", forecast.step_seconds},
                       {"exposed_seconds", forecast.exposed_seconds},
                       {"bottleneck", to_string(forecast.bottleneck)}};
    out["stall_seconds"] = stall_seconds_;
    out["io"] = {{"engine", stats_.io.engine},
                 {"direct", stats_.direct},
                 {"registered_buffers", stats_.io.registered_buffers},
                 {"notes", stats_.io.notes}};
    const auto& durability = forecast.durability;
    out["store"] = {{"slots", durability.two_slots ? 2 : 1},
                    {"commit_interval", durability.commit_interval},
                    {"checksums", config_.store.checksums},
                    {"notes", stats_.store_notes}};
    for (const auto& drive : stats_.drives) {
      out["store"]["drives"].push_back({{"path", drive.path},
                                        {"read_bytes", drive.read.count},
                                        {"written_bytes", drive.written.count},
                                        {"reserved_bytes", drive.reserved.count},
                                        {"direct", drive.direct},
                                        {"direct_note", drive.direct_note}});
    }
    json_.write(out.dump(2) + "\n");
  }

  const TrainOptions& options_;
  Config config_;
  const gpt::GptConfig gpt_;
  const TextData data_;
  ResultFile json_;
  double rate_ = 0;
  std::unique_ptr<ReferenceTrainer> reference_;
  Losses losses_;                // bits per byte; those kept by the run before first
  std::size_t kept_losses_ = 0;  // of them
  std::uint64_t first_ = 0;      // steps done before this run
  std::uint64_t batches_ = 0;    // used, by all runs; those of skipped steps too
  std::vector<std::pair<std::uint64_t, double>> rates_;  // of so many batches in a row, all of them
  std::uint64_t skips_in_this_run_ = 0;
  std::uint64_t skips_in_a_row_ = 0;
  std::optional<double> loss_scale_;    // of the next step, once one was made
  std::vector<double> gradient_norms_;  // of this run's steps, as they were and clipped
  std::vector<double> clipped_norms_;
  std::string gradient_difference_;     // between both trainers
  std::vector<double> step_seconds_;
  double stall_seconds_ = 0;
  std::chrono::duration<double> tail_{0};  // what was not written when the last step ended
  EngineStats stats_;
  std::string hash_;
  std::optional<bool> identical_;
  bool store_gone_ = false;  // somebody removed it
};

}  // namespace

void add_train(CLI::App& app, ExitCode& code) {
  auto* command = app.add_subcommand("train", "train the reference GPT through the tiers");
  auto options = std::make_shared<TrainOptions>();
  options->model.add(*command);
  options->tiers.add(*command);
  options->gradients.add(*command);
  command->add_option("--data", options->data, "text file or directory");
  command->add_option("--steps", options->steps, "optimizer steps")->check(whole_number(1));
  command->add_option("--learning-rate", options->learning_rate, "of every step")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--trace", options->trace, "write a trace for Perfetto to this file");
  command->add_option("--json", options->json, "write the result to this file");
  command->add_option("--sample", options->sample, "print so many bytes of generated text");
  command->add_flag("--verify", options->verify,
                    "train the same model in memory beside it and compare every bit");
  auto* resume = command->add_flag("--resume", options->resume,
                                   "continue at the last committed step of the store in --nvme");
  command
      ->add_flag("--discard", options->discard, "remove the store that lies in --nvme")
      ->excludes(resume);
  command->callback([options, &code] { code.value = TrainRun(*options).run(); });
}

}  // namespace terrace::cli
