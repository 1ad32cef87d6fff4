#include "terrace/engine.h"

#include <algorithm>
#include <utility>

#include "runtime/engine_impl.h"
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

PerTier<Bytes> budgets_of(const Config& config, const Device& device,
                          const std::vector<std::uint32_t>& weights) {
  PerTier<Bytes> budget{};
  at(budget, Tier::hbm) = config.budget.hbm.value_or(device.info().memory);
  at(budget, Tier::dram) = config.budget.dram.value_or(detect_topology().memory);
  if (config.nvme.empty()) return budget;
  const Bytes free = free_on_drives(config.nvme, weights, config.store.mode);
  at(budget, Tier::nvme) = config.budget.nvme.value_or(free);
  return budget;
}

// Speeds of ports that were handed in; the drives share evenly unless the config knows better.
MeasuredSpeeds given_speeds(const Config& config, const Speeds& speeds) {
  MeasuredSpeeds given{speeds, {}};
  for (const auto& drive : config.nvme) {
    given.drives.push_back({drive.read_gb_s.value_or(speeds.nvme_read_gb_s),
                            drive.write_gb_s.value_or(speeds.nvme_write_gb_s)});
  }
  return given;
}

Config with_drives(Config config) {
  config.io.drives = static_cast<std::uint32_t>(std::max<std::size_t>(1, config.nvme.size()));
  return config;
}

}  // namespace

EngineImpl::EngineImpl(const Config& config, const ModelSpec& model, const Initializer& initializer,
                       EnginePorts ports)
    : config_(with_drives(config)),
      layout_(model, config.segment, config.accumulation_dtype),
      scaler_(config.loss_scale) {
  check_config(config);
  device_ = device_for(config, ports);
  budgets_of(config, *device_, std::vector<std::uint32_t>(config.nvme.size(), 1));  // or refused
  speeds_ = ports.speeds ? given_speeds(config, *ports.speeds)
                         : measure_speeds(config_, model.gradient_dtype, model.parameter_dtype);
  const auto durability = durability_of(config, speeds_.drives);
  const auto budget = budgets_of(config, *device_, durability.weights);
  try {
    plans_.emplace(
        plan_engine({layout_, budget, config.placement, speeds_.speeds, config.sub_group_elements,
                     config.prefetch_elements, durability, {}},
                    update_rule(config)));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::out_of_budget || config.budget.nvme) throw;
    throw Error(error.code(), error.what() + free_text(config.nvme));
  }
  const auto& map = plans_->engine.map;
  trace_ = std::move(ports.trace);
  if (!trace_ && !config.trace.empty()) trace_ = make_trace_writer(config.trace);
  const auto home = numa_home(detect_topology(), config.numa_node, 0, 1);
  adam_ = make_adam_pool(
      {config.adam_threads, config.throttle.adam_gb_s, home.ranks, home.cpus});
  store_ = std::make_unique<TensorStore>(*device_, at(map.peak, Tier::hbm),
                                         at(map.peak, Tier::dram), home.cpus);
  auto make_io = ports.io_engine;
  if (!make_io) make_io = [&] { return make_io_engine(config_.io); };
  thread_.emplace(make_io, [&](IoEngine& io) { return open(io); },
                  ExecutorContext{*plans_, layout_, *store_}, *device_, *adam_, trace_.get());
  if (resumed_) steps_ = resumed_->step;
  try {
    with_homes([&](HomeAccess& homes) {
      if (resumed_) homes.restore();
      else homes.initialize(initializer);
    });
    if (!resumed_) initializer_ = initializer;
  } catch (...) {
    stop();
    throw;
  }
}

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
double Step::loss_scale() const {
  TERRACE_CHECK(engine_ != nullptr);
  return engine_->loss_scale();
}
StepReport Step::finish(const TrainerState& state) {
  TERRACE_CHECK(engine_ != nullptr);
  return engine_->finish(pass_, state);
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
void Engine::commit(const std::string& trainer_state) { impl_->commit(trainer_state); }
std::optional<std::uint64_t> Engine::resumed_step() const { return impl_->resumed_step(); }
const std::string& Engine::trainer_state() const { return impl_->trainer_state(); }

}  // namespace terrace
