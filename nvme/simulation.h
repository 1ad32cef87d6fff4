// Engines for tests of what stands above them: a disk that can lose its power, and operations that
// fail on demand.
#pragma once

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>

#include "nvme/simulated_disk.h"
#include "terrace/io_engine.h"

namespace terrace {

// Operations on `disk`, which several engines may share, one after another or at once. They are
// done in reap().
std::unique_ptr<IoEngine> make_memory_engine(std::shared_ptr<SimulatedDisk> disk,
                                             std::uint32_t drives = kMaxIoFiles);

// What a fault engine counts: every open(), remove() and request taken, in one sequence.
enum class IoCall : std::uint8_t { open, remove, read, write, flush };
inline constexpr std::size_t kIoCallCount = 5;

enum class FaultKind : std::uint8_t {
  error,             // completes with FaultPlan::error; nothing is moved
  error_after_move,  // the same, but it has been done
  short_completion,  // a broken engine: no error, and fewer bytes than asked for (half, rounded
                     // down to the alignment) moved and told; a flush is told done and is not
  lost,              // nothing is moved and it never completes: pending() goes on counting it
};

// An open() or remove() that fails throws Error(io); those are never short or lost, but fail.
struct FaultPlan {
  std::uint64_t at = 0;        // the n-th call fails, counted from 1; 0: none does
  std::optional<IoCall> only{};  // counts calls of this kind alone
  FaultKind kind = FaultKind::error;
  int error = EIO;
  bool persistent = false;     // all later calls of the same kind fail too
};

// Shared with whoever made the engine. Engines that share it count on together: the n-th call is
// that of all of them. Read from any thread; such engines are used one after another.
struct FaultCounters {
  std::array<std::atomic<std::uint64_t>, kIoCallCount> calls{};  // by IoCall
  std::atomic<std::uint64_t> total = 0;
  std::atomic<std::uint64_t> failed = 0;
};

// `engine`, with the faults of `plan`. Operations that are lost hold up neither close() nor the
// destructor.
std::unique_ptr<IoEngine> make_fault_engine(std::unique_ptr<IoEngine> engine, FaultPlan plan,
                                            std::shared_ptr<FaultCounters> counters = nullptr);

}  // namespace terrace
