// One training step on the emulated device, each lane the slowest in turn: how near it comes to its
// floor, to its forecast, and whether the state is what a plain run makes.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "terrace/engine.h"

namespace terrace::cli {

struct StepBenchOptions {
  std::vector<std::string> nvme;  // a directory on each drive
  std::uint32_t layers = 8;
  std::uint64_t layer_elements = 1 << 20;  // parameters of a layer; a multiple of kGradientLeaf
  std::uint32_t steps = 8;                 // measured, after two that fill the pipeline
  double seconds = 0.8;                    // that the slowest lane needs for a step
};

// A lane that is made the slowest, or none: all lanes alike.
struct StepCase {
  std::optional<Lane> slowest;
  double clip = 0;  // the norm; 0: none
};

struct StepCaseResult {
  StepCase what;
  double step_seconds = 0;      // median
  double spread = 0;            // of steps: (third quartile - first) / median
  double forecast_seconds = 0;
  double floor_seconds = 0;     // the slowest lane's, or CPU seconds / cores when that is more
  double cpu_seconds = 0;       // of a step, all threads
  PerLane<double> lane_floor{};
  PerLane<double> lane_busy{};  // of a step
  double exposed_seconds = 0;   // of a step, in which the device computed nothing
  double hidden_seconds = 0;    // of the other lanes' work, beneath each other or compute
  bool deferred = false;
  bool state_identical = false;

  double ratio() const { return step_seconds / floor_seconds; }
  double ratio_to_forecast() const { return step_seconds / forecast_seconds; }
};

// Every lane without clipping and with it, then all lanes alike.
std::vector<StepCase> step_cases();

// Throws Error for options without meaning, and what the engine throws.
StepCaseResult run_step_case(const StepCase& what, const StepBenchOptions& options);

// What the executor itself costs: a step of many small operations on the memory engine, without
// checksums.
struct ExecutorCost {
  std::uint64_t operations = 0;
  double user_us_per_operation = 0;  // of its own thread, which copies for the memory engine too
};
ExecutorCost measure_executor(std::uint32_t steps);

std::string name_of(const StepCase& what);

}  // namespace terrace::cli
