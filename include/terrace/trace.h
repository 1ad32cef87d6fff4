// Where the executor reports what it did when; the writer makes a file that opens in Perfetto.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "terrace/clock.h"
#include "terrace/types.h"

namespace terrace {

struct TraceSpan {
  Lane lane = Lane::compute;
  std::string_view name;     // "forward block3", "read momentum block3 [0, 4)"
  Nanoseconds start{0};
  Nanoseconds end{0};
  std::uint64_t bytes = 0;
  std::uint64_t step = 0;
};

// Thread rule: one thread at a time.
class TraceSink {
 public:
  virtual ~TraceSink() = default;
  virtual void span(const TraceSpan& span) = 0;
  // Why not everything up to now is written; empty: it is.
  virtual std::string flush() { return {}; }
};

// Chrome trace event JSON, one row per lane, written as it goes and complete after destruction.
// Throws Error(io) with the path when the file cannot be created; what fails later ends the trace,
// not the run, and flush() tells.
std::unique_ptr<TraceSink> make_trace_writer(const std::string& path);

}  // namespace terrace
