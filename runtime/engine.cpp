// The trainer's side: checks the order of calls, hands out addresses, and puts the parts together.
#include "terrace/engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "runtime/calibrate.h"
#include "runtime/executor_thread.h"
#include "runtime/home_access.h"
#include "runtime/planner.h"
#include "terrace/error.h"
#include "tiers/tensor_store.h"
#include "tiers/topology.h"

namespace terrace {
namespace {

std::unique_ptr<Device> device_for(const Config& config, EnginePorts& ports) {
  if (ports.device) return std::move(ports.device);
  EmulatedDeviceOptions options;
  options.memory = config.budget.hbm.value_or(detect_topology().memory / 2);
  options.host_to_device = config.throttle.host_to_device;
  options.device_to_host = config.throttle.device_to_host;
  options.compute_delay_per_second = config.throttle.compute_delay;
  return make_emulated_device(options);
}

PerTier<Bytes> budgets_of(const Config& config, const Device& device) {
  PerTier<Bytes> budget{};
  at(budget, Tier::hbm) = config.budget.hbm.value_or(device.info().memory);
  at(budget, Tier::dram) = config.budget.dram.value_or(detect_topology().memory);
  if (config.nvme.empty()) return budget;
  const auto& path = config.nvme.front().path;
  std::error_code error;
  const auto space = std::filesystem::space(path, error);
  if (!error && !std::filesystem::is_directory(path, error)) {
    error = std::make_error_code(std::errc::not_a_directory);
  }
  if (!error && ::access(path.c_str(), W_OK | X_OK) != 0) {
    error.assign(errno, std::system_category());
  }
  if (error) {
    throw Error(ErrorCode::io, "the nvme directory " + path + " cannot be used: " +
                                   error.message() + "; create it or name another one");
  }
  at(budget, Tier::nvme) = config.budget.nvme.value_or(Bytes{space.available});
  return budget;
}

void check_config(const Config& config) {
  if (config.nvme.size() > 1) {
    throw Error(ErrorCode::unavailable,
                "several nvme directories are not supported yet; name one");
  }
  if (config.nvme.empty() && config.budget.nvme.value_or(Bytes{}).count > 0) {
    throw Error(ErrorCode::invalid_argument,
                "an nvme budget is given and no nvme directory; name one");
  }
}

}  // namespace

class EngineImpl {
 public:
  EngineImpl(const Config& config, const ModelSpec& model, const Initializer& initializer,
             EnginePorts ports)
      : config_(config), layout_(model, config.segment) {
    check_config(config);
    device_ = device_for(config, ports);
    const auto budget = budgets_of(config, *device_);
    speeds_ = ports.speeds ? *ports.speeds
                           : measure_speeds(config, model.gradient_dtype, model.parameter_dtype);
    plans_.emplace(plan_engine({layout_, budget, config.placement, speeds_,
                                config.sub_group_elements, config.prefetch_elements}));
    const auto& map = plans_->engine.map;
    trace_ = std::move(ports.trace);
    if (!trace_ && !config.trace.empty()) trace_ = make_trace_writer(config.trace);
    adam_ = make_adam_pool({config.adam_threads, config.throttle.adam_gb_s});
    store_.emplace(*device_, at(map.peak, Tier::hbm), at(map.peak, Tier::dram));
    auto make_io = ports.io_engine;
    if (!make_io) make_io = [&] { return make_io_engine(config_.io); };
    thread_.emplace(make_io, [&](IoEngine& io) { return open(io); }, *device_, *adam_,
                    trace_.get());
    with_homes([&](HomeAccess& homes) { homes.initialize(initializer); });
  }

  ~EngineImpl() { abandon(pass_); }

  // ---- steps

  void begin(bool evaluation, const StepOptions& options) {
    if (alive_) {
      throw Error(ErrorCode::invalid_argument,
                  "a step is still alive; finish or destroy it before the next one begins");
    }
    if (leased_) {
      throw Error(ErrorCode::invalid_argument,
                  "a layer view of an earlier step is still alive; let it end first");
    }
    thread_->check();
    const double rate = options.learning_rate.value_or(config_.learning_rate);
    const auto scalars = adam_scalars(config_.optimizer, rate, steps_ + 1);
    begin_time_ = steady_clock().now();
    compute_before_ = compute_seconds();
    thread_->begin(evaluation, scalars);
    ++pass_;
    alive_ = true;
    cancelled_ = false;
    evaluation_ = evaluation;
    position_ = 0;
  }

  Step make_step() { return Step(this, pass_); }

  LayerView use(std::uint64_t pass, LayerUse wanted);

  void end_use(bool submitted) {
    leased_ = false;
    if (cancelled_) return;
    if (!submitted) return cancel();
    thread_->release();
    ++position_;
  }

  StepReport finish(std::uint64_t pass) {
    refuse_over(pass);
    refuse_cancelled();
    const auto& uses = plan().schedule.uses;
    if (leased_) throw Error(ErrorCode::invalid_argument, "a layer view is still alive");
    if (position_ < uses.size()) {
      throw Error(ErrorCode::invalid_argument,
                  "the step is not complete: " + name(uses[position_]) + " comes next, and " +
                      std::to_string(uses.size() - position_) + " uses are missing");
    }
    thread_->wait_for_updates();
    alive_ = false;
    if (!evaluation_) ++steps_;
    StepReport report;
    report.step = steps_;
    report.seconds = to_seconds(steady_clock().now() - begin_time_);
    report.compute_seconds = compute_seconds() - compute_before_;
    report.stall_seconds = std::max(0.0, report.seconds - report.compute_seconds);
    return report;
  }

  // A step that is destroyed unfinished; errors are kept for the next call.
  void abandon(std::uint64_t pass) noexcept {
    if (!alive_ || pass != pass_) return;
    if (!cancelled_ && !leased_ && position_ == plan().schedule.uses.size()) {
      try {
        finish(pass);
      } catch (const Error&) {
        alive_ = false;  // sticky in the executor
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
    const Bytes offset = (range.first + first) * size;
    with_homes([&](HomeAccess& homes) {
      homes.read(content, place.layer, offset, values.size() * size,
                 [&](std::span<const std::byte> bytes, Bytes at_offset) {
                   widen(bytes, size, values.subspan((at_offset - offset).count / size.count));
                 });
    });
  }

  void drain() {
    if (alive_) throw Error(ErrorCode::invalid_argument, "drain() is for between steps");
    thread_->wait_until_idle();
  }

  EngineStats stats() {
    EngineStats result;
    result.lanes = thread_->stats();
    at(result.peak, Tier::hbm) = device_->peak_allocated();
    at(result.peak, Tier::dram) = store_->reserved(Tier::dram);
    at(result.peak, Tier::nvme) = file_info_ ? file_info_->size : Bytes{};
    result.io = io_info_;
    result.direct = file_info_ && file_info_->direct;
    result.direct_note = file_info_ ? file_info_->direct_note : "nothing lives on nvme";
    return result;
  }

  const ModelLayout& layout() const { return layout_; }
  const Forecast& forecast() const { return plans_->engine.forecast; }
  const Speeds& speeds() const { return speeds_; }
  Device& device() { return *device_; }
  std::uint64_t steps() const { return steps_; }
  std::string store_path() const { return file_info_ ? file_info_->path : std::string{}; }

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
  const StepPlan& plan() const { return plans_->engine.plan(evaluation_); }

  std::string name(LayerUse use) const {
    return std::string(use.phase == Phase::forward ? "forward" : "backward") + " of layer '" +
           layout_.layer(use.layer).name + "'";
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

  void cancel() noexcept {
    cancelled_ = true;
    try {
      thread_->cancel();
    } catch (const Error&) {
      // Sticky in the executor; the next call reports it.
    }
    // What the trainer enqueued may use memory of the trainer's that goes with the step.
    device_->synchronize(kComputeStream);
  }

  double compute_seconds() { return at(thread_->stats(), Lane::compute).busy_seconds; }

  ExecutorContext open(IoEngine& io) {
    const Bytes size = at(plans_->engine.map.peak, Tier::nvme);
    const auto arena = store_->arena();
    if (!arena.empty()) io.register_buffers(std::span(&arena, 1));
    if (size.count > 0) {
      const std::string path =
          config_.nvme.front().path + "/terrace-" + std::to_string(::getpid()) + ".store";
      file_ = io.open({.path = path, .size = size, .mode = IoFileMode::scratch});
      file_info_ = io.file_info(file_);
    }
    io_info_ = io.info();
    return {*plans_, layout_, *store_, file_};
  }

  void with_homes(const std::function<void(HomeAccess&)>& task) {
    thread_->run_idle([&](IoEngine& io) {
      HomeAccess homes(layout_, plans_->engine.map, *store_, *device_, io, file_);
      task(homes);
    });
  }

  static void widen(std::span<const std::byte> bytes, Bytes element, std::span<float> values) {
    const std::size_t count = bytes.size() / element.count;
    if (element == size_of(DType::fp32)) {
      std::memcpy(values.data(), bytes.data(), bytes.size());
      return;
    }
    for (std::size_t i = 0; i < count; ++i) {
      bfloat16 narrow;
      std::memcpy(&narrow, bytes.data() + i * sizeof narrow, sizeof narrow);
      values[i] = to_float(narrow);
    }
  }

  const Config config_;
  const ModelLayout layout_;
  std::unique_ptr<Device> device_;
  Speeds speeds_;
  std::optional<RunnablePlans> plans_;
  std::unique_ptr<TraceSink> trace_;
  std::unique_ptr<AdamPool> adam_;
  std::optional<TensorStore> store_;
  FileId file_;
  std::optional<IoFileInfo> file_info_;  // both written on the executor's thread while it starts
  IoEngineInfo io_info_;
  std::optional<ExecutorThread> thread_;  // destroyed first

  std::uint64_t steps_ = 0;
  std::uint64_t pass_ = 0;  // number of the present or last step or pass
  bool alive_ = false;      // its Step exists and is not finished
  bool evaluation_ = false;
  bool cancelled_ = false;
  bool leased_ = false;     // a LayerView exists
  std::size_t position_ = 0;
  Nanoseconds begin_time_{0};
  double compute_before_ = 0;
};

// ---- LayerView

struct LayerView::State {
  EngineImpl* engine;
  LayerUse use;
  OpIndex op;
  bool submitted;
};

LayerView EngineImpl::use(std::uint64_t pass, LayerUse wanted) {
  refuse_over(pass);
  refuse_cancelled();
  thread_->check();
  const auto& uses = plan().schedule.uses;
  if (leased_) {
    throw Error(ErrorCode::invalid_argument,
                "the view of the layer before is still alive; let it end first");
  }
  if (position_ >= uses.size() || uses[position_] != wanted) {
    const std::string expected =
        position_ < uses.size() ? name(uses[position_]) : std::string("the end of the step");
    const std::string asked = wanted.layer.value < layout_.layers()
                                  ? name(wanted)
                                  : "layer " + std::to_string(wanted.layer.value);
    throw Error(ErrorCode::invalid_argument,
                asked + " was asked for, but " + expected + " comes next in the plan");
  }
  thread_->lease();
  leased_ = true;
  return LayerView(std::make_unique<LayerView::State>(LayerView::State{
      this, wanted, plan().uses[position_], wanted.phase == Phase::forward}));
}

LayerView::LayerView(std::unique_ptr<State> state) : state_(std::move(state)) {}
LayerView::LayerView(LayerView&& other) noexcept = default;

LayerView::~LayerView() {
  if (!state_) return;
  try {
    state_->engine->end_use(state_->submitted);
  } catch (const Error&) {
    // The executor has failed; its message is sticky and the next call throws it.
  }
}

LayerId LayerView::layer() const { return state_->use.layer; }

const std::byte* LayerView::parameter(std::size_t tensor) const {
  const auto& layout = state_->engine->layout();
  const std::byte* block = state_->engine->hbm(state_->op, Content::parameter, layer());
  if (block == nullptr) return nullptr;
  return block + layout.block(layer()).tensors.at(tensor).first *
                     layout.element_size(Content::parameter).count;
}

std::byte* LayerView::gradient(std::size_t tensor) const {
  const auto& layout = state_->engine->layout();
  std::byte* block = state_->engine->hbm(state_->op, Content::gradient, layer());
  if (block == nullptr) return nullptr;
  return block + layout.block(layer()).tensors.at(tensor).first *
                     layout.element_size(Content::gradient).count;
}

std::byte* LayerView::input() const {
  return state_->engine->hbm(state_->op, Content::activation, layer());
}

std::byte* LayerView::output() const {
  if (state_->use.phase == Phase::backward) return nullptr;
  return state_->engine->hbm(state_->op, Content::activation, {layer().value + 1});
}

const std::byte* LayerView::output_gradient() const {
  return state_->engine->hbm(state_->op, Content::activation_gradient, {layer().value + 1});
}

std::byte* LayerView::input_gradient() const {
  return state_->engine->hbm(state_->op, Content::activation_gradient, layer());
}

std::byte* LayerView::workspace() const {
  return state_->engine->hbm(state_->op, Content::workspace, layer());
}

void LayerView::launch(HostFunction function) const {
  state_->engine->device().launch(kComputeStream, std::move(function));
}

void LayerView::synchronize() const { state_->engine->device().synchronize(kComputeStream); }

void LayerView::submit_gradients() {
  if (state_->use.phase != Phase::backward) {
    throw Error(ErrorCode::invalid_argument, "submit_gradients() belongs to backward");
  }
  if (state_->submitted) {
    throw Error(ErrorCode::invalid_argument, "the gradients of layer '" +
                                                 state_->engine->layout().layer(layer()).name +
                                                 "' were submitted already");
  }
  state_->submitted = true;
}

// ---- Step

Step::Step(Step&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)), pass_(other.pass_) {}

Step::~Step() {
  if (engine_ != nullptr) engine_->abandon(pass_);
}

LayerView Step::forward(LayerId layer) {
  TERRACE_CHECK(engine_ != nullptr);  // moved from
  return engine_->use(pass_, {Phase::forward, layer});
}
LayerView Step::backward(LayerId layer) {
  TERRACE_CHECK(engine_ != nullptr);
  return engine_->use(pass_, {Phase::backward, layer});
}
StepReport Step::finish() {
  TERRACE_CHECK(engine_ != nullptr);
  return engine_->finish(pass_);
}

// ---- Engine

Engine::Engine(const Config& config, const ModelSpec& model, const Initializer& initializer,
               EnginePorts ports)
    : impl_(std::make_unique<EngineImpl>(config, model, initializer, std::move(ports))) {}
Engine::~Engine() = default;

Step Engine::begin_step(const StepOptions& options) {
  impl_->begin(false, options);
  return impl_->make_step();
}

Step Engine::begin_evaluation() {
  impl_->begin(true, {});
  return impl_->make_step();
}

void Engine::read(std::string_view tensor, Content content, std::uint64_t first,
                  std::span<float> values) {
  impl_->read(tensor, content, first, values);
}

void Engine::drain() { impl_->drain(); }
const ModelSpec& Engine::model() const { return impl_->layout().model(); }
const Forecast& Engine::forecast() const { return impl_->forecast(); }
const Speeds& Engine::speeds() const { return impl_->speeds(); }
EngineStats Engine::stats() const { return impl_->stats(); }
Device& Engine::device() { return impl_->device(); }
std::uint64_t Engine::steps() const { return impl_->steps(); }
std::string Engine::store_path() const { return impl_->store_path(); }

}  // namespace terrace
