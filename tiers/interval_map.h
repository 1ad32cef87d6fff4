// Values over address ranges: a map from disjoint intervals to T that splits where it must.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "terrace/types.h"

namespace terrace {

// Thread rule: one thread at a time.
template <class T>
class IntervalMap {
 public:
  // Calls visit(Extent part, T& value) for the parts of `range` that hold a value, in order.
  // Intervals are split at the ends of `range` first, so each part lies wholly inside it.
  template <class Visit>
  void visit(Extent range, Visit&& visit) {
    if (range.size.count == 0) return;
    split(range.offset.count);
    split(range.end().count);
    for (auto it = intervals_.lower_bound(range.offset.count);
         it != intervals_.end() && it->first < range.end().count; ++it) {
      visit(Extent{{it->first}, {it->second.first - it->first}}, it->second.second);
    }
  }

  // Every address of `range` gets `value`.
  void assign(Extent range, T value) {
    if (range.size.count == 0) return;
    erase(range);
    intervals_.emplace(range.offset.count, std::pair(range.end().count, std::move(value)));
  }

  void erase(Extent range) {
    if (range.size.count == 0) return;
    split(range.offset.count);
    split(range.end().count);
    intervals_.erase(intervals_.lower_bound(range.offset.count),
                     intervals_.lower_bound(range.end().count));
  }

 private:
  // Makes `address` a boundary.
  void split(std::uint64_t address) {
    auto it = intervals_.upper_bound(address);
    if (it == intervals_.begin()) return;
    --it;
    if (it->first == address || it->second.first <= address) return;
    const auto end = std::exchange(it->second.first, address);
    T copy = it->second.second;
    intervals_.emplace_hint(std::next(it), address, std::pair(end, std::move(copy)));
  }

  std::map<std::uint64_t, std::pair<std::uint64_t, T>> intervals_;  // first → (end, value)
};

}  // namespace terrace
