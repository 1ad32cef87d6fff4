#include "tools/bench_team.h"

#include <utility>

#include "terrace/clock.h"
#include "tiers/topology.h"

namespace terrace::cli {

Team::Team(int threads)
    : threads_(threads),
      allowed_(CpuSet::of_this_thread()),
      bound_(detect_topology().numa_nodes.size() > 1 && threads <= allowed_.count()) {
  bind(0);
  for (int thread = 1; thread < threads; ++thread) {
    others_.emplace_back([this, thread] { serve(thread); });
  }
}

Team::~Team() {
  body_ = nullptr;
  round_.fetch_add(1, std::memory_order_release);
  for (auto& thread : others_) thread.join();
  if (bound_) allowed_.bind_this_thread();
}

// The CPU is the thread's share of all: neighbours may be two halves of one core.
void Team::bind(int thread) const {
  if (!bound_) return;
  int skipped = allowed_.count() / threads_ * thread;
  for (int cpu = 0;; ++cpu) {
    if (!allowed_.has(cpu) || skipped-- > 0) continue;
    return CpuSet({cpu}, allowed_).bind_this_thread();
  }
}

double Team::run(const std::function<void(int)>& body) {
  body_ = &body;
  working_.store(threads_ - 1, std::memory_order_relaxed);
  const auto begin = steady_clock().now();
  round_.fetch_add(1, std::memory_order_release);
  work(0);
  while (working_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
  const double seconds = to_seconds(steady_clock().now() - begin);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  return seconds;
}

void Team::serve(int thread) {
  bind(thread);
  for (std::uint64_t served = 0;; ++served) {
    while (round_.load(std::memory_order_acquire) == served) std::this_thread::yield();
    if (body_ == nullptr) return;
    work(thread);
    working_.fetch_sub(1, std::memory_order_release);
  }
}

void Team::work(int thread) {
  try {
    (*body_)(thread);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

}  // namespace terrace::cli
