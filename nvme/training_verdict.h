// What a drive's speeds mean for training. Pure functions; every formula is written out here.
#pragma once

#include <cstdint>
#include <optional>

namespace terrace::bench {

// Bytes that one parameter costs on NVMe when parameters and optimizer states live there.
inline constexpr double kFetchBytes = 4;       // read: 2 in forward, 2 in backward
inline constexpr double kStateReadBytes = 12;  // master weight, momentum, variance
inline constexpr double kWrittenBytes = 14;    // the three states and the new parameter
inline constexpr double kStoredBytes = 26;     // on the drive: the states in two slots

// GB/s, of one drive.
struct DriveSpeeds {
  double read_gb_s = 0;       // alone
  double write_gb_s = 0;      // alone, what remains when the fast cache is full
  double optimizer_gb_s = 0;  // both directions together, in the optimizer's proportion
};

struct TrainingQuestion {
  double parameters = 0;
  std::optional<double> compute_seconds;  // per step, without I/O
  std::optional<double> rated_bytes;      // endurance that is left, per drive
  double drives = 1;                      // that share the work, scaling as measured
};

struct TrainingVerdict {
  double read_bytes_per_step = 0;     // parameters · (4 + 12)
  double written_bytes_per_step = 0;  // parameters · 14
  double stored_bytes = 0;            // parameters · 26
  // 4·P / read + max(26·P / optimizer, 14·P / write): what the drive needs when nothing else waits.
  double drive_seconds = 0;
  // Nothing overlaps: compute + max(16·P / read + 14·P / write, drive_seconds), the latter for a
  // drive that is slower with both directions at once. Absent without compute_seconds.
  std::optional<double> serial_seconds;
  // Everything overlaps: max(compute, drive_seconds). Absent without compute_seconds.
  std::optional<double> overlapped_seconds;
  std::optional<bool> hides;   // drive_seconds ≤ compute
  double seconds_to_hide = 0;  // the compute beneath which it would: drive_seconds
  // (16 + 14)·P / compute: both directions together.
  std::optional<double> needed_gb_s;
  // ceil(drives · drive_seconds / compute)
  std::optional<std::uint64_t> drives_needed;
  std::optional<double> steps_to_wear_out;  // rated · drives / written per step
  // steps · max(compute, drive_seconds) / 86400
  std::optional<double> days_to_wear_out;
};

// Speeds must be positive.
TrainingVerdict judge(const DriveSpeeds& speeds, const TrainingQuestion& question);

// Reads "7B", "350M", "1.5e9", "70b". Throws Error(invalid_argument).
double parse_parameters(const char* text);

}  // namespace terrace::bench
