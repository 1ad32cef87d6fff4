#include "nvme/measure_counters.h"

#include <linux/perf_event.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

namespace terrace::bench {
namespace {

constexpr std::uint64_t kSector = 512;  // the unit of the kernel's counters, whatever the drive's

double seconds_of(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
}

// "cpu  user nice system idle iowait irq softirq steal ..."
void add_processors(MachineCounters& counters) {
  std::ifstream file("/proc/stat");
  std::string word;
  file >> word;
  const double tick = 1.0 / static_cast<double>(::sysconf(_SC_CLK_TCK));
  double value = 0;
  for (int field = 0; field < 8 && file >> value; ++field) {
    counters.cpu_total += value * tick;
    if (field == 3 || field == 4) counters.cpu_idle += value * tick;
    if (field == 7) counters.cpu_stolen += value * tick;
  }
}

std::uint64_t less(std::uint64_t a, std::uint64_t b) { return a - std::min(a, b); }

int tracepoint_id() {
  for (const char* root : {"/sys/kernel/tracing", "/sys/kernel/debug/tracing"}) {
    int id = -1;
    if (std::ifstream(std::string(root) + "/events/raw_syscalls/sys_enter/id") >> id) return id;
  }
  return -1;
}

}  // namespace

std::optional<MovedBytes> drive_moved(const std::string& drive_folder) {
  if (drive_folder.empty()) return std::nullopt;
  int counting = 1;
  std::ifstream(drive_folder + "/queue/iostats") >> counting;
  std::ifstream file(drive_folder + "/stat");
  std::uint64_t field[7] = {};
  for (auto& value : field) {
    if (!(file >> value)) return std::nullopt;
  }
  if (counting == 0) return std::nullopt;
  return MovedBytes{field[2] * kSector, field[6] * kSector};
}

std::optional<MovedBytes> process_moved() {
  std::ifstream file("/proc/self/io");
  MovedBytes moved;
  int found = 0;
  std::string key;
  for (std::uint64_t value = 0; file >> key >> value;) {
    if (key == "read_bytes:") moved.read = value, ++found;
    if (key == "write_bytes:") moved.written = value, ++found;
  }
  if (found != 2) return std::nullopt;
  return moved;
}

double process_cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime);
}

double thread_cpu_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

SystemCallCounter::SystemCallCounter() {
  const int id = tracepoint_id();
  if (id < 0) {
    why_not_ =
        "system calls are not counted: tracefs is not readable; as root, mount -t tracefs "
        "nodev /sys/kernel/tracing";
    return;
  }
  perf_event_attr attributes{};
  attributes.type = PERF_TYPE_TRACEPOINT;
  attributes.size = sizeof attributes;
  attributes.config = static_cast<std::uint64_t>(id);
  attributes.inherit = 1;
  descriptor_ = static_cast<int>(
      ::syscall(SYS_perf_event_open, &attributes, 0, -1, -1, PERF_FLAG_FD_CLOEXEC));
  if (descriptor_ >= 0) return;
  why_not_ = std::string("system calls are not counted: perf events are refused (") +
             std::strerror(errno) + "); run as root or lower kernel.perf_event_paranoid";
}

SystemCallCounter::~SystemCallCounter() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

std::optional<std::uint64_t> SystemCallCounter::count() const {
  std::uint64_t value = 0;
  if (descriptor_ < 0 || ::read(descriptor_, &value, sizeof value) != sizeof value) {
    return std::nullopt;
  }
  return value;
}

MachineCounters machine_counters(const std::string& drive_folder) {
  MachineCounters counters;
  counters.at = steady_clock().now();
  add_processors(counters);
  counters.cpu_own = process_cpu_seconds();
  std::ifstream("/proc/loadavg") >> counters.load;
  counters.drive = drive_moved(drive_folder);
  counters.process = process_moved();
  return counters;
}

Disturbance disturbance(const MachineCounters& before, const MachineCounters& after) {
  Disturbance result;
  result.seconds = to_seconds(after.at - before.at);
  result.load = after.load;
  const double total = after.cpu_total - before.cpu_total;
  if (total > 0) {
    const double stolen = after.cpu_stolen - before.cpu_stolen;
    const double busy = total - (after.cpu_idle - before.cpu_idle) - stolen;
    result.stolen_share = stolen / total;
    result.others_cpu_share = std::max(0.0, busy - (after.cpu_own - before.cpu_own)) / total;
  }
  if (before.drive && after.drive && before.process && after.process) {
    const auto drive = *after.drive - *before.drive;
    const auto own = *after.process - *before.process;
    result.others_bytes = MovedBytes{less(drive.read, own.read), less(drive.written, own.written)};
  }
  return result;
}

}  // namespace terrace::bench
