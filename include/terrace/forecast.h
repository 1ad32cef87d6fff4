// What the plan says beforehand and the run is held against.
#pragma once

#include <array>
#include <cstdint>

#include "terrace/types.h"

namespace terrace {

// Bytes per class, indexed by TensorClass.
using ClassBytes = std::array<Bytes, kTensorClassCount>;
// Indexed by Lane.
template <class T>
using PerLane = std::array<T, kLaneCount>;
// Indexed by Tier.
template <class T>
using PerTier = std::array<T, kTierCount>;

template <class T, std::size_t N, class Enum>
constexpr T& at(std::array<T, N>& values, Enum index) {
  return values[static_cast<std::size_t>(index)];
}
template <class T, std::size_t N, class Enum>
constexpr const T& at(const std::array<T, N>& values, Enum index) {
  return values[static_cast<std::size_t>(index)];
}

struct TierForecast {
  Bytes budget;        // as given, or the tier's size
  Bytes peak;          // reserved at start; never more, never less
  ClassBytes resident; // of it: bytes that live here between uses
  Bytes transient;     // of it: buffers through which the rest passes
};

struct LaneForecast {
  Bytes bytes;         // per step; compute: 0
  double seconds = 0;  // per step, at the lane's speed alone: its floor
};

// What it costs that a run can be killed at any instant.
struct DurabilityForecast {
  bool two_slots = false;            // false: nothing survives, and the rest is 0
  std::uint64_t commit_interval = 0; // steps
  Bytes copies;                      // of the states' current values on NVMe
  Bytes overhead;                    // second slot, tables, records, spares
  Bytes commit_bytes;                // written by a committing step beyond what another one writes
  double commit_step_seconds = 0;    // a step that commits; the same as step_seconds at interval 1
};

struct Forecast {
  double step_seconds = 0;           // in steady state; the mean when only some steps commit
  double exposed_seconds = 0;        // of it, in which compute waits for another lane
  Lane bottleneck = Lane::compute;   // the lane with the highest floor
  PerLane<LaneForecast> lanes;
  PerTier<TierForecast> tiers;
  DurabilityForecast durability;
  bool updates_deferred = false;     // made in the next step's forward, not in this one's backward
  // A gradient that is not finite, or a step that is abandoned, leaves the state as it was; else,
  // once updates have begun, it ends the run.
  bool atomic_steps = false;
};

// Speeds that a plan is made for. 10^9 bytes (or 10^12 operations) per second; all positive.
struct Speeds {
  double nvme_read_gb_s = 3.0;
  double nvme_write_gb_s = 2.0;
  double host_to_device_gb_s = 25;
  double device_to_host_gb_s = 25;
  double adam_gb_s = 20;           // over adam_bytes_per_element
  double compute_tflops = 100;
  double latency_us = 50;          // per operation, every lane
  double commit_ms = 4;            // of a commit's two flushes, beside its bytes
};

}  // namespace terrace
