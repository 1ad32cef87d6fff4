// What the user chooses. Every field has a default; load_config() reads the JSON form.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "terrace/adam.h"
#include "terrace/dtype.h"
#include "terrace/io_engine.h"
#include "terrace/pacer.h"
#include "terrace/types.h"

namespace terrace {

// An absent budget is the tier's size on this machine.
struct BudgetConfig {
  std::optional<Bytes> hbm;
  std::optional<Bytes> dram;
  std::optional<Bytes> nvme;
};

// A directory on a drive. Speeds in 10^9 bytes per second; absent: measured at start.
struct NvmeConfig {
  std::string path;
  std::optional<double> read_gb_s{};
  std::optional<double> write_gb_s{};
  Bytes keep_free{};  // of its file system: never taken
};

// What becomes of a store that lies in the directories already.
enum class StoreMode : std::uint8_t {
  fresh,    // refused when it holds a committed step
  resume,   // continued; where there is none, training starts anew
  discard,  // removed
};

// What survives the process. Needs a directory on a drive.
struct StoreConfig {
  std::uint32_t slots = 2;            // of optimizer states; 1: half the space, nothing survives
  std::uint64_t commit_interval = 1;  // steps between commits
  bool checksums = true;              // of everything on NVMe
  StoreMode mode = StoreMode::fresh;
  double timeout_seconds = 60;        // without any progress of a drive: the run fails and says so
  // What must be the same for a store to be continued, beside model, optimizer and layout, which
  // are compared anyway: the trainer's seed, data, ... At most 3 KiB in all; no line ends.
  std::vector<std::pair<std::string, std::string>> identity;
};

// Where a class of bytes lives between uses. Absent ("auto"): the planner chooses. Otherwise the
// fractions over {hbm, dram, nvme} add up to 1 and are met to the segment.
struct TierFractions {
  double hbm = 0;
  double dram = 0;
  double nvme = 0;
  friend bool operator==(const TierFractions&, const TierFractions&) = default;
};
using PlacementChoice = std::optional<TierFractions>;

struct PlacementConfig {
  PlacementChoice parameter;
  PlacementChoice master_weight;  // the optimizer's states: dram and nvme
  PlacementChoice momentum;
  PlacementChoice variance;
  PlacementChoice activation;     // whole layers: those used again last go lowest
};

// Speeds for the forecast, in 10^9 bytes per second. Absent: measured at start.
struct SpeedConfig {
  std::optional<double> host_to_device_gb_s;
  std::optional<double> device_to_host_gb_s;
  std::optional<double> adam_gb_s;
  std::optional<double> compute_tflops;
};

// Emulated speeds: upper bounds put on the real lanes, to measure overlap on any machine.
// Those of NVMe are in IoEngineOptions.
struct ThrottleConfig {
  Throttle host_to_device;
  Throttle device_to_host;
  double adam_gb_s = 0;
  double compute_delay = 0;  // each layer function of t seconds is stretched by t * compute_delay
};

// Keeps small fp16 gradients from vanishing: the trainer multiplies its loss by Step::loss_scale(),
// updates divide. Dynamic: halved when gradients overflow, doubled after a time without.
struct LossScaleConfig {
  bool enabled = false;
  double constant = 0;            // 0: dynamic
  std::uint32_t initial_power = 16;  // the first scale is 2 to this power
  std::uint32_t window = 1000;    // steps without an overflow before it is doubled
  std::uint32_t hysteresis = 2;   // overflows before it is halved
  double minimum = 1;
};

struct Config {
  BudgetConfig budget;
  std::vector<NvmeConfig> nvme;  // a directory on each drive; none: nothing lives on NVMe
  StoreConfig store;
  PlacementConfig placement;
  SpeedConfig speeds;
  ThrottleConfig throttle;

  AdamOptions optimizer;
  double learning_rate = 1e-3;   // the trainer may give another at every step
  // The largest norm of all gradients together; they are scaled down to it. 0: they are not
  // clipped. With a norm or a loss scale, a step's updates are made in the next one's forward.
  double gradient_clipping = 0;
  LossScaleConfig loss_scale;
  // Forward and backward passes of a step; their gradients are added up and divided by this number.
  // With more than one, updates are made in the next step's first forward, as with a norm.
  std::uint32_t micro_batches = 1;
  DType accumulation_dtype = DType::fp32;  // of the sums; or the gradient's
  // A step with a gradient that is not finite, or that is abandoned, leaves the state as it was.
  // That costs nothing with two slots and a commit at every step; otherwise updates are deferred as
  // with a norm, if the gradients find room in RAM. False: updates are never deferred for it.
  bool atomic_steps = true;

  // The parameter bytes of one segment: the unit of placement, at least 4096, a power of two.
  Bytes segment = 1_MiB;
  // Upper bounds for the planner; absent: as it sees fit.
  std::optional<std::uint64_t> sub_group_elements;   // of one optimizer update (sub_group_size)
  std::optional<std::uint64_t> prefetch_elements;    // parameters fetched ahead of use

  IoEngineOptions io;
  int adam_threads = 0;          // 0: one per core
  // The arena in RAM lies on this NUMA node and the optimizer's workers stay on its CPUs. Absent:
  // the whole machine.
  std::optional<int> numa_node;
  std::string trace;             // path of a trace file; empty: none

  // Absent: the trainer decides (the dtypes of ModelSpec win over the config).
  std::optional<DType> parameter_dtype;
  std::optional<std::uint64_t> train_micro_batch_size;

  // What the user should know about keys that were accepted without effect; one sentence each.
  std::vector<std::string> notes;
};

// Reads the de-facto standard JSON form and its "terrace" block (docs/config.md). Unknown and
// duplicate keys, wrong types and values that Terrace cannot honour throw Error(invalid_argument)
// with the key's path, the nearest known key, and what to write instead.
Config parse_config(std::string_view json_text, std::string_view origin = "config");
Config load_config(const std::string& path);

}  // namespace terrace
