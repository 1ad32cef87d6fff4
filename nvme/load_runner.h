// Runs a load on one file through an I/O engine and times it.
#pragma once

#include <atomic>
#include <optional>
#include <vector>

#include "nvme/latency_histogram.h"
#include "nvme/load_memory.h"
#include "nvme/load_stream.h"
#include "terrace/io_engine.h"

namespace terrace::bench {

struct LoadLimits {
  std::uint32_t depth = 1;                       // requests in flight
  Nanoseconds warm_up{0};                        // not counted
  Nanoseconds measure{0};                        // counted, until the next completion after it
  std::uint64_t most_bytes = ~std::uint64_t{0};  // moved in all; the load ends when it is reached
  Nanoseconds timeline_step{0};                  // 0: no timeline
  const std::atomic<bool>* stop = nullptr;       // ends the load early; may be null
  bool same_data = false;                        // do not stamp what is written
};

// Bytes that had been moved `seconds` after the beginning.
struct TimelinePoint {
  double seconds = 0;
  std::uint64_t bytes = 0;
};

// The window between two completions is counted: bytes completed in it over its length, with the
// queue full at both ends, so that neither ramp-up nor drain is in the speed.
struct LoadResult {
  double seconds = 0;
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
  std::uint64_t all_read_bytes = 0;  // with ramp-up and drain, over all_seconds
  std::uint64_t all_written_bytes = 0;
  double all_seconds = 0;
  double stamp_cpu_seconds = 0;  // of making the data, which is no part of the I/O
  std::uint64_t stamp_calls = 0;  // to the system, to find that out
  LatencyHistogram read, write, flush;        // of the operations counted
  std::optional<std::uint64_t> system_calls;  // for all bytes, without those of stamps
  std::vector<TimelinePoint> timeline;
  int error = 0;  // errno of the first failed operation; the load ended there
  IoOperation failed = IoOperation::read;
  std::uint64_t failed_offset = 0;
  bool complete = true;  // false: stopped, or the window never opened

  double gb_s() const {
    return seconds > 0 ? static_cast<double>(read_bytes + written_bytes) / seconds * 1e-9 : 0;
  }
};

// At most depth · block bytes are in flight, which must not be more than memory.bytes().
// Returns when nothing is in flight. Thread rule: the engine's owner.
LoadResult run_load(IoEngine& engine, FileId file, LoadMemory& memory, LoadStream& stream,
                    std::uint64_t block_bytes, const LoadLimits& limits);

}  // namespace terrace::bench
