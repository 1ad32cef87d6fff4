#include "runtime/extent_pool.h"

#include <algorithm>

#include "terrace/error.h"

namespace terrace {

ExtentPool::ExtentPool(Extent range) : high_water_(range.offset) {
  if (range.size.count > 0) holes_.emplace(range.offset.count, range.end().count);
}

std::optional<Extent> ExtentPool::allocate(Bytes size, PoolEnd end) {
  if (size.count == 0) return Extent{};
  const auto fits = [&](const auto& hole) { return hole.second - hole.first >= size.count; };
  if (end == PoolEnd::low) {
    const auto hole = std::find_if(holes_.begin(), holes_.end(), fits);
    if (hole == holes_.end()) return std::nullopt;
    return take(hole, hole->first, size.count);
  }
  const auto hole = std::find_if(holes_.rbegin(), holes_.rend(), fits);
  if (hole == holes_.rend()) return std::nullopt;
  return take(std::prev(hole.base()), hole->second - size.count, size.count);
}

Extent ExtentPool::take(std::map<std::uint64_t, std::uint64_t>::iterator hole,
                        std::uint64_t offset, std::uint64_t size) {
  const auto [first, end] = *hole;
  holes_.erase(hole);
  if (first < offset) holes_.emplace(first, offset);
  if (offset + size < end) holes_.emplace(offset + size, end);
  used_ += {size};
  peak_used_ = std::max(peak_used_, used_);
  high_water_ = std::max(high_water_, Bytes{offset + size});
  return {{offset}, {size}};
}

void ExtentPool::release(Extent extent) {
  if (extent.size.count == 0) return;
  std::uint64_t first = extent.offset.count;
  std::uint64_t end = extent.end().count;
  auto next = holes_.lower_bound(first);
  TERRACE_CHECK(next == holes_.end() || end <= next->first);
  if (next != holes_.end() && next->first == end) {
    end = next->second;
    next = holes_.erase(next);
  }
  if (next != holes_.begin()) {
    const auto previous = std::prev(next);
    TERRACE_CHECK(previous->second <= first);
    if (previous->second == first) {
      first = previous->first;
      holes_.erase(previous);
    }
  }
  holes_.emplace(first, end);
  used_ -= extent.size;
}

}  // namespace terrace
