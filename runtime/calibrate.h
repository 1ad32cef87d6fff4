// Measures what the configuration leaves open, so that the forecast speaks of this machine.
#pragma once

#include "runtime/drive_speeds.h"
#include "terrace/adam.h"
#include "terrace/config.h"
#include "terrace/forecast.h"

namespace terrace {

struct MeasuredSpeeds {
  Speeds speeds;                   // the drives' taken together
  std::vector<DriveSpeed> drives;  // by Config::nvme
};

// The speeds of `config`, and a quick measurement of each that is absent: copies and Adam in
// memory, each drive on a scratch file in its directory that is gone afterwards. Throttles are
// honoured. Takes a few tenths of a second. compute_tflops is not measured: absent, it stays at
// Speeds' default, and so do a drive's speeds without room or budget for the file.
MeasuredSpeeds measure_speeds(const Config& config, DType gradient_dtype, DType parameter_dtype);

}  // namespace terrace
