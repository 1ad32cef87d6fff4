// Threads that measure: the same work begun at the same time on all of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu_adam/cpu_set.h"

namespace terrace::cli {

// The caller is one of the threads. On a machine with several NUMA nodes each stays on a CPU of its
// own, so that it works where it touched its memory first. Between two runs they wait awake: a
// sleeping thread would begin late.
// Thread rule: one thread.
class Team {
 public:
  explicit Team(int threads);
  ~Team();  // the caller may run where it might before
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return threads_; }
  // body(thread) once on each; seconds until all are done. What one throws is thrown.
  double run(const std::function<void(int thread)>& body);

 private:
  void serve(int thread);
  void work(int thread);
  void bind(int thread) const;

  const int threads_;
  const CpuSet allowed_;
  const bool bound_;
  const std::function<void(int)>* body_ = nullptr;  // nullptr: the end
  std::atomic<std::uint64_t> round_{0};             // counts up when body_ is there
  std::atomic<int> working_{0};                     // of the others
  std::mutex mutex_;
  std::exception_ptr failure_;  // guarded by mutex_: the first of a round
  std::vector<std::thread> others_;
};

}  // namespace terrace::cli
