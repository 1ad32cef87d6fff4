// Phases of a session that hold one thing against another, and every phase against the kernel.
#pragma once

#include <string>

#include "nvme/measure_counters.h"
#include "tools/nvme_session.h"

namespace terrace::cli {

// Holds what is claimed during a phase against what the kernel counts.
class PhaseProof {
 public:
  PhaseProof(DriveSession& session, std::string what);
  // Takes the phase's cells back, and says why, when they are not the drive's.
  bool holds();

 private:
  DriveSession& session_;
  std::string what_;
  std::size_t first_;  // of the phase's cells
  bench::MovedBytes claimed_;
  bench::MachineCounters counters_;
};

// "steal 12 % of the CPU, ..." or "nothing else that the kernel counts"
std::string disturbance_text(const bench::Disturbance& disturbance);

}  // namespace terrace::cli
