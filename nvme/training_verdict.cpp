#include "nvme/training_verdict.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <string>

#include "terrace/error.h"

namespace terrace::bench {
namespace {

constexpr double kGiga = 1e9;
constexpr double kSecondsPerDay = 86400;
constexpr double kMostParameters = 1e15;

}  // namespace

TrainingVerdict judge(const DriveSpeeds& speeds, const TrainingQuestion& question) {
  TERRACE_CHECK(speeds.read_gb_s > 0 && speeds.write_gb_s > 0 && speeds.optimizer_gb_s > 0);
  const double p = question.parameters;
  const double read = speeds.read_gb_s * kGiga * question.drives;
  const double write = speeds.write_gb_s * kGiga * question.drives;
  const double optimizer = speeds.optimizer_gb_s * kGiga * question.drives;
  TrainingVerdict verdict;
  verdict.read_bytes_per_step = p * (kFetchBytes + kStateReadBytes);
  verdict.written_bytes_per_step = p * kWrittenBytes;
  verdict.stored_bytes = p * kStoredBytes;
  verdict.drive_seconds =
      p * kFetchBytes / read +
      std::max(p * (kStateReadBytes + kWrittenBytes) / optimizer, p * kWrittenBytes / write);
  verdict.seconds_to_hide = verdict.drive_seconds;
  double step = verdict.drive_seconds;
  if (question.compute_seconds) {
    const double compute = *question.compute_seconds;
    step = std::max(compute, verdict.drive_seconds);
    const double in_turn =
        verdict.read_bytes_per_step / read + verdict.written_bytes_per_step / write;
    verdict.serial_seconds = compute + std::max(in_turn, verdict.drive_seconds);
    verdict.overlapped_seconds = step;
    verdict.hides = verdict.drive_seconds <= compute;
    if (compute > 0) {
      verdict.needed_gb_s =
          (verdict.read_bytes_per_step + verdict.written_bytes_per_step) / compute / kGiga;
      verdict.drives_needed = static_cast<std::uint64_t>(std::min(
          kMostParameters, std::ceil(question.drives * verdict.drive_seconds / compute - 1e-9)));
    }
  }
  if (question.rated_bytes) {
    verdict.steps_to_wear_out =
        *question.rated_bytes * question.drives / verdict.written_bytes_per_step;
    verdict.days_to_wear_out = *verdict.steps_to_wear_out * step / kSecondsPerDay;
  }
  return verdict;
}

double parse_parameters(const char* text) {
  char* end = nullptr;
  double value = std::strtod(text, &end);
  const std::string unit(end);
  const auto scale = [&]() -> double {
    if (unit.empty()) return 1;
    if (unit.size() > 1) return 0;
    switch (std::toupper(static_cast<unsigned char>(unit[0]))) {
      case 'K': return 1e3;
      case 'M': return 1e6;
      case 'B': return 1e9;
      case 'T': return 1e12;
      default: return 0;
    }
  }();
  value *= scale;
  if (end == text || !(value >= 1) || value > kMostParameters) {
    throw Error(ErrorCode::invalid_argument,
                "'" + std::string(text) + "' is no number of parameters; write 7B, 350M or 1.5e9");
  }
  return value;
}

}  // namespace terrace::bench
