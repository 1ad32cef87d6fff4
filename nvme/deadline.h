// Timeouts as points in time.
#pragma once

#include <algorithm>

#include "terrace/clock.h"

namespace terrace {

// `timeout` from `now`, with Nanoseconds::max() as "never" and negative timeouts as none.
constexpr Nanoseconds deadline_after(Nanoseconds now, Nanoseconds timeout) {
  const auto wait = std::max(timeout, Nanoseconds{0});
  return wait > Nanoseconds::max() - now ? Nanoseconds::max() : now + wait;
}

}  // namespace terrace
