// What the kernel counted while something was measured: the proof that a drive was, and the reasons
// when it was disturbed. Any thread.
//
// `root` stands before every path under /proc and /sys: "" for this machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "terrace/clock.h"

namespace terrace::bench {

// Bytes that a drive, or this process, has moved since some beginning.
struct MovedBytes {
  std::uint64_t read = 0;
  std::uint64_t written = 0;
  friend MovedBytes operator-(MovedBytes a, MovedBytes b) {
    return {a.read - b.read, a.written - b.written};
  }
};

// From a drive's `stat` file (/sys/block/NAME/stat); absent when it cannot be read or counts
// nothing (queue/iostats is 0).
std::optional<MovedBytes> drive_moved(const std::string& drive_folder);

// From /proc/self/io: what this process caused drives to move.
std::optional<MovedBytes> process_moved();

// CPU seconds of all threads of this process, its kernel workers included.
double process_cpu_seconds();
double thread_cpu_seconds();  // of the calling thread

// System calls of this thread, counted by the kernel from construction on. Needs tracefs and the
// right to use perf events; says why it cannot count otherwise.
// Thread rule: constructed and read on the thread that is counted.
class SystemCallCounter {
 public:
  SystemCallCounter();
  ~SystemCallCounter();
  SystemCallCounter(const SystemCallCounter&) = delete;
  std::optional<std::uint64_t> count() const;
  const std::string& why_not() const { return why_not_; }

 private:
  int descriptor_ = -1;
  std::string why_not_;
};

// What else went on, to explain noise.
struct Disturbance {
  double seconds = 0;
  double stolen_share = 0;                 // of the CPU time, taken by the hypervisor
  double others_cpu_share = 0;             // of the CPU time, used by other processes
  double load = 0;                         // runnable tasks, mean of the last minute
  std::optional<MovedBytes> others_bytes;  // on the drive, not by this process
};

struct MachineCounters {
  Nanoseconds at{0};
  double cpu_total = 0;  // seconds, all cores
  double cpu_idle = 0;
  double cpu_stolen = 0;
  double cpu_own = 0;
  double load = 0;
  std::optional<MovedBytes> drive;
  std::optional<MovedBytes> process;
};
MachineCounters machine_counters(const std::string& drive_folder);
Disturbance disturbance(const MachineCounters& before, const MachineCounters& after);

}  // namespace terrace::bench
