// What a trainer sees: an engine that holds the model's state on its tiers, and steps over it.
//
//   terrace::Engine engine(config, model, initializer);
//   auto step = engine.begin_step({.learning_rate = rate});
//   for each micro-batch {
//     for (LayerId l : forward order)  { auto layer = step.forward(l);  enqueue work; }
//     for (LayerId l : backward order) { auto layer = step.backward(l); enqueue work;
//                                        layer.submit_gradients(); }
//   }
//   StepReport report = step.finish();
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "terrace/config.h"
#include "terrace/device.h"
#include "terrace/forecast.h"
#include "terrace/model.h"
#include "terrace/trace.h"

namespace terrace {

class EngineImpl;

// Per-step values; given at the beginning because updates start before finish().
struct StepOptions {
  std::optional<double> learning_rate;  // absent: Config::learning_rate
};

struct StepReport {
  std::uint64_t step = 0;               // finished so far, this one included unless it is skipped
  // A gradient was not finite: nothing of the state has changed, the step count included, and the
  // next step takes its place. The first such gradient, in the order of layers and elements.
  bool skipped = false;
  std::string bad_tensor;
  std::uint64_t bad_index = 0;          // of its elements
  // Of all gradients, unscaled and the mean over micro-batches, before and after clipping; absent
  // when the step is skipped.
  std::optional<double> gradient_norm;
  std::optional<double> clipped_norm;
  double loss_scale = 1;                // that this step's gradients were taken with
  double next_loss_scale = 1;           // and those of the next one
  double seconds = 0;                   // from begin_step() to the end of finish()
  double compute_seconds = 0;           // the compute stream was busy
  double stall_seconds = 0;             // seconds - compute_seconds
};

// Called by finish() when the step's updates are done, on the trainer's thread. What it returns is
// kept with the step's commit and given back by Engine::trainer_state() after a resume: data
// cursor, random state, ... At most 60 KiB. What it throws leaves finish() and cancels the step, as
// does too much (see Step).
using TrainerState = std::function<std::string(const StepReport&)>;

// A layer's bytes on the device, for as long as this object lives. All pointers are device
// addresses, 64-byte aligned. Work that uses them is enqueued on the compute stream
// (Device::launch or native_stream()) before this object is destroyed; it may run later.
// Thread rule: the trainer's thread.
class LayerView {
 public:
  LayerView(LayerView&& other) noexcept;
  LayerView& operator=(LayerView&&) = delete;
  ~LayerView();  // backward without submit_gradients(): the step is cancelled

  LayerId layer() const;
  // Parameters and gradients by index into LayerSpec::tensors, in ModelSpec's dtypes. Padding
  // between tensors is the engine's. gradient(): backward only; every element must be written.
  const std::byte* parameter(std::size_t tensor) const;
  std::byte* gradient(std::size_t tensor) const;
  // The saved input (LayerSpec::input_bytes). Writable in the forward of the first layer, where the
  // trainer provides it. Its bytes in backward are those that forward left there.
  std::byte* input() const;
  // Forward: the next layer's input, to be written. nullptr in the last layer and in backward.
  std::byte* output() const;
  // Backward: the gradient of the output, as the layer above wrote it (nullptr in the last layer),
  // and the place for the gradient of the input (nullptr when LayerSpec::input_gradient is false).
  const std::byte* output_gradient() const;
  std::byte* input_gradient() const;
  std::byte* workspace() const;

  // Enqueues `function` on the compute stream; see Device::launch.
  void launch(HostFunction function) const;
  // Blocks until the work enqueued on the compute stream has ended: for host code that looks.
  void synchronize() const;
  // Backward, exactly once: the gradients are (or, in stream order, will be) written.
  void submit_gradients();

 private:
  friend class EngineImpl;
  struct State;
  explicit LayerView(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// One training step, or one evaluation pass. Layers are visited in ModelSpec order, forward, then
// (training) in reverse, and all that once for each of Config::micro_batches; anything else throws
// Error(invalid_argument) and leaves the step usable.
// Only one step or pass may be alive, and none may outlive its engine. Destroying one that is not
// finished cancels it and waits for the work on the compute stream. The engine's state is then as
// before and the engine goes on: always where updates are deferred (Config::gradient_clipping), and
// otherwise before the first update has started, which may be any time after the first
// submit_gradients(); after it some layers are updated and some are not, and every later call
// throws Error(cancelled). A step whose layers were all visited is finished, not cancelled.
class Step {
 public:
  Step(Step&& other) noexcept;
  Step& operator=(Step&&) = delete;
  ~Step();

  // Blocks the host only until the layer's uploads are enqueued.
  LayerView forward(LayerId layer);
  LayerView backward(LayerId layer);
  // What the trainer multiplies its loss with, the mean over one micro-batch; 1 without
  // LossScaleConfig.
  double loss_scale() const;
  // Waits until every update of this step is done, or, where they are deferred, until every
  // gradient is there and measured. Updates that are deferred, writes to NVMe, and the commit when
  // it is this step's turn, go on behind the next step; read(), drain(), commit() and an
  // evaluation wait for the updates.
  StepReport finish(const TrainerState& state = {});

 private:
  friend class EngineImpl;
  Step(EngineImpl* engine, std::uint64_t pass) : engine_(engine), pass_(pass) {}
  EngineImpl* engine_;
  std::uint64_t pass_;  // a step that is over must not touch the next one
};

// The four ports and the trace, for whoever brings their own; absent ones are made from the config.
struct EnginePorts {
  std::unique_ptr<Device> device;
  // Called on the thread that will own the engine.
  std::function<std::unique_ptr<IoEngine>()> io_engine;
  std::unique_ptr<TraceSink> trace;
  // Skips the measurement at start, which is of the ports that the config describes: needed with
  // others.
  std::optional<Speeds> speeds;
};

struct LaneStats {
  Bytes bytes;              // moved since the engine was made, initialisation and read() excluded
  Bytes planned_bytes;      // what the plans of the same steps say
  double busy_seconds = 0;
};

struct DriveStats {
  std::string path;         // of its store, or of its scratch file
  Bytes read;               // by this engine, metadata included
  Bytes written;
  Bytes reserved;           // by its files
  bool direct = false;
  std::string direct_note;
};

struct EngineStats {
  PerLane<LaneStats> lanes;
  PerTier<Bytes> peak;      // reserved, as measured at the device, the arena and the file
  IoEngineInfo io;
  bool direct = false;      // all files are accessed past the page cache
  std::string direct_note;
  std::vector<DriveStats> drives;        // by Config::nvme
  std::vector<std::string> store_notes;  // what the store found and did: resumed, moved, ...
  std::uint64_t operations = 0;          // that the executor has run
  double executor_user_seconds = 0;      // CPU time of its thread, in user mode
  std::string trace_error;               // why the trace is not whole; empty: it is, up to now
};

// Thread rule: one thread makes all calls.
class Engine {
 public:
  // Plans, reserves all memory and space, and writes the initial values to where they live, or goes
  // on where the store's last commit stands (Config::store). `initializer` is copied, and may be
  // called until the first step has been finished. Throws Error(out_of_budget) before
  // anything is reserved when the plan does not fit.
  Engine(const Config& config, const ModelSpec& model, const Initializer& initializer,
         EnginePorts ports = {});
  ~Engine();  // waits for what is in flight
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  Step begin_step(const StepOptions& options = {});
  // A pass of forwards only: no state changes, no inputs are saved.
  Step begin_evaluation();

  // Copies elements [first, first + values.size()) of a tensor's parameter or optimizer state, as
  // fp32, wherever it lies. Between steps only. Throws Error(invalid_argument) for unknown names.
  void read(std::string_view tensor, Content content, std::uint64_t first,
            std::span<float> values);
  // Waits until everything in flight has ended, writes included. Between steps only.
  void drain();

  // Makes the present state durable now, whatever the commit interval, and waits for it. Between
  // steps only. Throws Error(unavailable) without a store of two slots. When the commit itself
  // fails, as any other, the engine goes no further: a resume finds the newest step that is whole.
  void commit(const std::string& trainer_state = {});
  // The step at which this engine took over a store, and what its trainer had kept there.
  std::optional<std::uint64_t> resumed_step() const;
  const std::string& trainer_state() const;

  const ModelSpec& model() const;
  const Forecast& forecast() const;
  const Speeds& speeds() const;
  EngineStats stats() const;
  Device& device();
  std::uint64_t steps() const;  // finished so far, those before a resume included

 private:
  std::unique_ptr<EngineImpl> impl_;
};

}  // namespace terrace
