// Sets of CPUs, and threads bound to them.
#pragma once

#include <sched.h>

#include <string>
#include <vector>

namespace terrace {

// Thread rule: a value.
class CpuSet {
 public:
  static CpuSet of_this_thread();  // where the calling thread may run; never empty
  // Those of `cpus` that are in `allowed`. Throws Error(invalid_argument) naming one that is not.
  CpuSet(const std::vector<int>& cpus, const CpuSet& allowed);

  int count() const;
  bool has(int cpu) const;
  std::string list() const;  // "0-3,8"
  void bind_this_thread() const;

 private:
  CpuSet() = default;

  std::size_t bytes() const { return sets_.size() * sizeof(cpu_set_t); }

  std::vector<cpu_set_t> sets_;  // one holds 1024 CPUs; as many as the kernel asks for
};

}  // namespace terrace
