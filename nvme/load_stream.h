// What a load asks of a drive, piece by piece: the access patterns of training.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "terrace/io_engine.h"

namespace terrace::bench {

enum class Pattern : std::uint8_t {
  read,            // one end to the other, and again
  overwrite,       // the same, onto extents that hold data
  first_write,     // once, onto extents that are reserved and were never written
  mix,             // reads and overwrites in turn, half a file apart
  optimizer_step,  // 12 bytes read and 14 written per parameter, run by run, a few runs in flight
  layer_prefetch,  // reads layer by layer, the next one begun while the last is not yet used
  commit,          // data, a flush, a record of one page, a flush; then the next
  sustained_write  // overwrites for longer than a drive's fast cache lasts
};
inline constexpr Pattern kPatterns[] = {Pattern::read,           Pattern::overwrite,
                                        Pattern::first_write,    Pattern::mix,
                                        Pattern::optimizer_step, Pattern::layer_prefetch,
                                        Pattern::commit,         Pattern::sustained_write};

std::string_view to_string(Pattern pattern);   // "read", "optimizer_step", ...
Pattern parse_pattern(std::string_view text);  // throws Error(invalid_argument)
bool writes(Pattern pattern);

// One request of at most a block.
struct LoadRequest {
  IoOperation operation = IoOperation::read;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t group = 0;  // never falls from one request to the next
};

// Requests without end, or until the file is full (first_write).
// A request of group g may start when all groups up to g - lag() are complete: that is how data
// that must have arrived, and buffers that must be free, hold a load back.
// Thread rule: one thread at a time.
class LoadStream {
 public:
  virtual ~LoadStream() = default;
  virtual std::optional<LoadRequest> next() = 0;
  virtual std::uint64_t lag() const { return kNoLag; }

  static constexpr std::uint64_t kNoLag = ~std::uint64_t{0};
};

// The part of a file that a load may use: [begin, end), at least two blocks. Offsets and lengths
// are multiples of the alignment.
struct LoadRegion {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint32_t alignment = 4096;
  std::uint64_t bytes() const { return end - begin; }
};

// `start`: where in the region to begin (taken modulo its blocks), so that repeats differ.
std::unique_ptr<LoadStream> make_stream(Pattern pattern, LoadRegion region,
                                        std::uint64_t block_bytes, std::uint64_t start);

// The optimizer's traffic as the planner lays it out: a run of parameters, its three fp32 states,
// and its 16-bit parameters. Here and nowhere else, so that it can be moved onto the store's own
// engine.
struct OptimizerTraffic {
  static constexpr std::uint64_t kReadPerParameter = 12;
  static constexpr std::uint64_t kWrittenPerParameter = 14;
  static constexpr std::uint64_t kWindow = 3;  // runs read ahead of the one that is written
};

}  // namespace terrace::bench
