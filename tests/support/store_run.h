// Short training runs over a disk that may lose its power or an operation, and what must come of
// them.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "nvme/simulation.h"
#include "terrace/terrace.h"
#include "tests/support/directory.h"
#include "tests/support/mlp.h"

namespace terrace {

// What a tap breaks, and what it only makes harder.
struct Spoil {
  Nanoseconds flush_delay{0};       // a commit takes so long that the next step catches up with it
  bool drop_flushes = false;        // tells them done and does nothing
  Bytes first_slot{};               // not the second: what is of the second goes to the first,
  Bytes second_slot{};              // and comes from there
  Bytes slot_bytes{};
};

// A call as a fault engine counts them.
struct TappedCall {
  IoCall call = IoCall::open;
  std::string path;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// What a tap saw. Read between runs.
struct TapState {
  std::atomic<std::uint64_t> flushes = 0;  // that have ended well
  std::vector<TappedCall> calls;
};

class ForwardingEngine : public IoEngine {
 public:
  explicit ForwardingEngine(std::unique_ptr<IoEngine> engine) : engine_(std::move(engine)) {}

  IoEngineInfo info() const override { return engine_->info(); }
  FileId open(const IoFileOptions& options) override { return engine_->open(options); }
  void close(FileId file) override { engine_->close(file); }
  bool exists(const std::string& path) const override { return engine_->exists(path); }
  void remove(const std::string& path) override { engine_->remove(path); }
  IoFileInfo file_info(FileId file) const override { return engine_->file_info(file); }
  void register_buffers(std::span<const std::span<std::byte>> buffers) override {
    engine_->register_buffers(buffers);
  }
  bool submit(const IoRequest& request) override { return engine_->submit(request); }
  void flush() override { engine_->flush(); }
  std::size_t pending() const override { return engine_->pending(); }
  std::size_t reap(std::vector<Completion>& completions, Nanoseconds timeout) override {
    return engine_->reap(completions, timeout);
  }
  void wake() override { engine_->wake(); }

 protected:
  const std::unique_ptr<IoEngine> engine_;
};

// Any engine, watched and, on request, broken in the ways that a store must not survive.
class TapEngine final : public ForwardingEngine {
 public:
  TapEngine(std::unique_ptr<IoEngine> engine, std::shared_ptr<TapState> state, Spoil spoil)
      : ForwardingEngine(std::move(engine)), state_(std::move(state)), spoil_(spoil) {}

  FileId open(const IoFileOptions& options) override {
    state_->calls.push_back({IoCall::open, options.path});
    return engine_->open(options);
  }
  void remove(const std::string& path) override {
    state_->calls.push_back({IoCall::remove, path});
    engine_->remove(path);
  }
  bool submit(const IoRequest& request) override {
    if (request.operation == IoOperation::flush && spoil_.flush_delay.count() > 0) {
      held_.emplace_back(request, steady_clock().now() + spoil_.flush_delay);
      return true;
    }
    return pass_on(request);
  }
  bool pass_on(const IoRequest& request) {
    IoRequest inner = request;
    if (spoil_.drop_flushes && request.operation == IoOperation::flush) {
      const auto now = steady_clock().now();
      ended_.push_back({request.ticket, 0, 0, now, now});
      return true;
    }
    if (in_second_slot(request)) {
      inner.offset -= (spoil_.second_slot - spoil_.first_slot).count;
    }
    if (!engine_->submit(inner)) return false;
    if (request.operation == IoOperation::flush) ++flushing_[request.ticket.value];
    const auto call = request.operation == IoOperation::read    ? IoCall::read
                      : request.operation == IoOperation::write ? IoCall::write
                                                                : IoCall::flush;
    state_->calls.push_back(
        {call, engine_->file_info(request.file).path, request.offset, request.bytes});
    return true;
  }
  std::size_t pending() const override {
    return engine_->pending() + ended_.size() + held_.size();
  }
  std::size_t reap(std::vector<Completion>& completions, Nanoseconds timeout) override {
    const auto first = completions.size();
    while (!held_.empty() && held_.front().second <= steady_clock().now() &&
           pass_on(held_.front().first)) {
      held_.pop_front();
    }
    if (!held_.empty()) {
      timeout = std::clamp(held_.front().second - steady_clock().now(), Nanoseconds{0}, timeout);
    }
    engine_->reap(completions, ended_.empty() ? timeout : Nanoseconds{0});
    for (auto i = first; i < completions.size(); ++i) {
      const auto found = flushing_.find(completions[i].ticket.value);
      if (found == flushing_.end()) continue;
      if (completions[i].error == 0) ++state_->flushes;
      flushing_.erase(found);
    }
    state_->flushes += ended_.size();
    completions.insert(completions.end(), ended_.begin(), ended_.end());
    ended_.clear();
    return completions.size() - first;
  }

 private:
  bool in_second_slot(const IoRequest& request) const {
    return spoil_.first_slot != spoil_.second_slot && request.operation != IoOperation::flush &&
           engine_->file_info(request.file).path.ends_with("terrace.store") &&
           request.offset >= spoil_.second_slot.count &&
           request.offset < (spoil_.second_slot + spoil_.slot_bytes).count;
  }

  const std::shared_ptr<TapState> state_;
  const Spoil spoil_;
  std::map<std::uint64_t, int> flushing_;  // by ticket, which is free again when it has ended
  std::vector<Completion> ended_;
  std::deque<std::pair<IoRequest, Nanoseconds>> held_;  // and when it is due
};

// Below the norms of small_mlp(): every step is clipped, and its updates wait for the next one.
inline constexpr double kSmallNorm = 1e-3;

// What is trained, how, and its exact states.
struct Course {
  Course(Mlp model, Config with, std::uint64_t count)
      : mlp(std::move(model)), config(std::move(with)), steps(count) {
    Plain plain(mlp, config.optimizer);
    after.push_back(plain);
    for (std::uint64_t s = 1; s <= steps; ++s) {
      const double most = config.gradient_clipping;
      if (most > 0) TERRACE_CHECK(plain.step(rate(s), s, s, most, 1) > most);
      else plain.step(rate(s), s);
      after.push_back(plain);
    }
  }
  static double rate(std::uint64_t step) { return 0.02 / static_cast<double>(step); }
  // More than a sector: a torn one must be noticed.
  static std::string kept(std::uint64_t step) {
    return "step " + std::to_string(step) + std::string(1500, static_cast<char>('a' + step));
  }

  Mlp mlp;
  Config config;
  std::uint64_t steps;
  std::vector<Plain> after;  // as many steps, from 0
};

// Layers of two segments and one, of 4 KiB each.
inline Mlp small_mlp() {
  Mlp mlp;
  mlp.widths = {16, 70, 8};
  mlp.batch = 2;
  mlp.dtype = DType::fp32;
  return mlp;
}

enum class States { nvme, dram, both };

inline Config small_config(const std::vector<std::string>& directories, States states) {
  Config config;
  for (const auto& directory : directories) config.nvme.push_back({directory, {}, {}});
  config.segment = 4_KiB;
  config.budget.hbm = 1_MiB;
  config.budget.dram = 1_MiB;
  config.optimizer.weight_decay = 0.01;
  config.adam_threads = 1;
  const TierFractions nvme{0, 0, 1};
  const TierFractions dram{0, 1, 0};
  config.placement.master_weight = states == States::dram ? dram : nvme;
  config.placement.momentum = states == States::nvme ? nvme : dram;
  config.placement.variance =
      states == States::both ? TierFractions{0, 0.5, 0.5} : config.placement.momentum;
  config.placement.parameter = nvme;
  config.placement.activation = nvme;
  config.store.mode = StoreMode::resume;
  return config;
}

using IoFactory = std::function<std::unique_ptr<IoEngine>()>;

struct Observed {
  std::optional<Error> error;
  bool created = false;                 // the engine stood
  std::optional<std::uint64_t> resumed;
  std::uint64_t finishing = 0;          // the newest step whose finish() was called
  std::string wrong;                    // "", or how bits differ from plain training
  std::vector<std::string> notes;
};

struct RunOptions {
  bool drain = false;    // after each step: its commit is over before the next begins
  bool compare = true;   // bits at the beginning and the end
  std::uint64_t commit_after = 0;  // asks for a commit after this step, and goes on if it fails
  Nanoseconds linger{0};           // after an error, before the engine goes
  bool stray = false;              // evaluates and abandons steps in between
};

// Passes that change nothing.
inline void stray(Engine& engine, const Mlp& mlp, std::uint64_t step) {
  if (step % 2 == 0) return evaluate(engine, mlp);
  auto abandoned = engine.begin_step();
  for (std::uint32_t l = 0; l < mlp.layers(); ++l) abandoned.forward(LayerId{l});
}

// From where the store stands to the course's end.
inline void train(Engine& engine, const Course& course, const RunOptions& options,
                  Observed& seen) {
  const auto compare = [&] {
    if (!options.compare || !seen.wrong.empty()) return;
    seen.wrong = difference(engine, course.after.at(engine.steps()), course.mlp.dtype);
  };
  compare();
  if (seen.resumed && engine.trainer_state() != Course::kept(*seen.resumed)) {
    seen.wrong = "the trainer's state is not that of step " + std::to_string(*seen.resumed);
  }
  for (auto s = engine.steps() + 1; s <= course.steps; ++s) {
    train_step(engine, course.mlp, Course::rate(s), s, [&](const StepReport& report) {
      seen.finishing = report.step;
      return Course::kept(report.step);
    });
    if (options.drain) engine.drain();
    if (options.stray) stray(engine, course.mlp, s);
    if (s != options.commit_after) continue;
    try {
      engine.commit(Course::kept(s));
    } catch (const Error& error) {
      seen.error = error;
    }
  }
  engine.drain();
  compare();
  seen.notes = engine.stats().store_notes;
}

inline Observed run(const Course& course, const IoFactory& make_io, const RunOptions& options) {
  Observed seen;
  std::optional<Engine> engine;
  try {
    EnginePorts ports;
    ports.speeds = Speeds{};
    ports.io_engine = make_io;
    engine.emplace(course.config, course.mlp.spec(), initialize, std::move(ports));
    seen.created = true;
    seen.resumed = engine->resumed_step();
    train(*engine, course, options, seen);
  } catch (const Error& error) {
    if (!seen.error) seen.error = error;
  }
  if (!seen.error || !engine || options.linger.count() == 0) return seen;
  steady_clock().sleep_until(steady_clock().now() + options.linger);
  try {
    engine->drain();
    seen.wrong = "the engine has forgotten its error";
  } catch (const Error&) {
  }
  return seen;
}

// The newest step whose commit had ended, known by the flushes that had: each commit takes two of
// every drive, and a new store three.
inline std::uint64_t last_committed(const Course& course, const RunOptions& options,
                                    const Observed& seen, std::uint64_t flushes) {
  if (!seen.created) return 0;
  const auto drives = course.config.nvme.size();
  const auto made = std::min<std::uint64_t>(flushes, seen.resumed ? 0 : 3 * drives);
  auto commits = (flushes - made) / (2 * drives);
  auto last = seen.resumed.value_or(0);
  for (auto s = last + 1; s <= course.steps; ++s) {
    const bool planned = s % course.config.store.commit_interval == 0;
    for (const bool commit : {planned, s == options.commit_after}) {
      if (!commit || commits == 0) continue;
      last = s;
      --commits;
    }
  }
  return last;
}

}  // namespace terrace
