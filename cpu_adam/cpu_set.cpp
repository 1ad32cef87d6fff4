#include "cpu_adam/cpu_set.h"

#include <pthread.h>

#include <cerrno>

#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::size_t kMostSets = 64;  // 65536 CPUs

}  // namespace

CpuSet CpuSet::of_this_thread() {
  CpuSet result;
  for (std::size_t sets = 1; sets <= kMostSets; sets *= 2) {
    result.sets_.assign(sets, cpu_set_t{});
    if (::sched_getaffinity(0, result.bytes(), result.sets_.data()) == 0) return result;
    if (errno != EINVAL) break;  // EINVAL: the kernel's sets are larger
  }
  throw Error(ErrorCode::unavailable, "the CPUs of this process cannot be read (errno " +
                                          std::to_string(errno) + ")");
}

CpuSet::CpuSet(const std::vector<int>& cpus, const CpuSet& allowed)
    : sets_(allowed.sets_.size(), cpu_set_t{}) {
  for (const int cpu : cpus) {
    if (!allowed.has(cpu)) {
      throw Error(ErrorCode::invalid_argument,
                  "the Adam pool cannot have CPU " + std::to_string(cpu) +
                      "; this process may run on " + allowed.list());
    }
    CPU_SET_S(static_cast<std::size_t>(cpu), bytes(), sets_.data());
  }
}

int CpuSet::count() const { return CPU_COUNT_S(bytes(), sets_.data()); }

bool CpuSet::has(int cpu) const {
  return cpu >= 0 && static_cast<std::size_t>(cpu) < 8 * bytes() &&
         CPU_ISSET_S(static_cast<std::size_t>(cpu), bytes(), sets_.data());
}

std::string CpuSet::list() const {
  std::string text;
  const int end = static_cast<int>(8 * bytes());
  for (int first = 0; first < end; ++first) {
    if (!has(first)) continue;
    int last = first;
    while (has(last + 1)) ++last;
    text.append(text.empty() ? "" : ",").append(std::to_string(first));
    if (last > first) text.append("-").append(std::to_string(last));
    first = last;
  }
  return text;
}

// What was allowed when the set was made may have changed since; then the thread stays where it is.
void CpuSet::bind_this_thread() const {
  ::pthread_setaffinity_np(::pthread_self(), bytes(), sets_.data());
}

}  // namespace terrace
