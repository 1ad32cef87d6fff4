// Plans and results as text.
#pragma once

#include <cstdint>
#include <string>

#include "terrace/engine.h"
#include "terrace/forecast.h"

namespace terrace::cli {

// Budgets, reserved bytes by class, bytes and floor of every lane, forecast step and bottleneck.
std::string plan_text(const Forecast& forecast);

// Forecast against measured, per lane and step.
std::string lanes_text(const Forecast& forecast, const EngineStats& stats, std::uint64_t steps,
                       double mean_step_seconds);

// "1.2 s", "35 ms"
std::string duration_text(double seconds);
// "10.7M"
std::string count_text(std::uint64_t count);

}  // namespace terrace::cli
