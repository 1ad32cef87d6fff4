// One asynchronous operation, named by its caller, and the result that a port gives back for it.
#pragma once

#include <cstdint>

#include "terrace/clock.h"

namespace terrace {

// Chosen by whoever starts the operation; a port echoes it and gives it no meaning.
struct Ticket {
  std::uint64_t value = 0;
  friend constexpr auto operator<=>(Ticket, Ticket) = default;
};

// What a port says when an operation has ended. Each ticket is completed exactly once, success or
// not; a completion never throws.
struct Completion {
  Ticket ticket;
  int error = 0;                 // 0, or an errno value (device errors: EIO)
  std::uint64_t bytes = 0;       // bytes moved; all of them when error is 0
  Nanoseconds start{0};          // when the resource began to work on it, in the port's clock
  Nanoseconds end{0};            // when it was done; end - start is the lane's busy time
};

}  // namespace terrace
