// Addresses for buffers whose lifetimes the planner knows: first fit from either end of a range.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "terrace/types.h"

namespace terrace {

enum class PoolEnd : std::uint8_t { low, high };

// Thread rule: one thread at a time.
class ExtentPool {
 public:
  explicit ExtentPool(Extent range);

  // The free place nearest to `end`, or nothing when no hole is large enough. Zero bytes take none.
  std::optional<Extent> allocate(Bytes size, PoolEnd end);
  void release(Extent extent);

  Bytes used() const { return used_; }
  Bytes peak_used() const { return peak_used_; }  // the most bytes in use at any time
  Bytes high_water() const { return high_water_; }  // the highest end of an extent handed out

 private:
  Extent take(std::map<std::uint64_t, std::uint64_t>::iterator hole, std::uint64_t offset,
              std::uint64_t size);

  std::map<std::uint64_t, std::uint64_t> holes_;  // first → end, disjoint and not adjacent
  Bytes used_;
  Bytes peak_used_;
  Bytes high_water_;
};

}  // namespace terrace
