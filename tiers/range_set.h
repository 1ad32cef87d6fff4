// Which addresses are known: a set of disjoint ranges of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <span>

namespace terrace {

// Thread rule: one thread at a time.
class RangeSet {
 public:
  // False, and nothing added, when `size` is 0 or a byte of the range is in the set already.
  bool add(const std::byte* first, std::size_t size) {
    const auto begin = address(first);
    const auto next = ranges_.lower_bound(begin);
    if (size == 0) return false;
    if (next != ranges_.end() && next->first - begin < size) return false;
    if (next != ranges_.begin()) {
      const auto& [before, before_size] = *std::prev(next);
      if (begin - before < before_size) return false;
    }
    ranges_.emplace_hint(next, begin, size);
    return true;
  }

  // Removes the range that begins at `first` and returns its size; 0 when there is none.
  std::size_t remove(const std::byte* first) {
    const auto found = ranges_.find(address(first));
    if (found == ranges_.end()) return 0;
    const auto size = found->second;
    ranges_.erase(found);
    return size;
  }

  // Whether one range holds all of [first, first + size); neighbours do not join.
  bool contains(const std::byte* first, std::size_t size) const {
    const auto begin = address(first);
    const auto next = ranges_.upper_bound(begin);
    if (next == ranges_.begin()) return false;
    const auto& [range, range_size] = *std::prev(next);
    const auto offset = begin - range;
    return offset <= range_size && size <= range_size - offset;
  }

  // Whether ranges that touch each other hold all of [first, first + size) together.
  bool covers(const std::byte* first, std::size_t size) const {
    const auto begin = address(first);
    auto range = ranges_.upper_bound(begin);
    if (range == ranges_.begin()) return false;
    --range;
    auto end = range->first + range->second;
    if (end < begin) return false;
    while (end - begin < size && ++range != ranges_.end() && range->first == end) {
      end += range->second;
    }
    return size <= end - begin;
  }

  // The lowest range; nothing when the set is empty.
  std::optional<std::span<std::byte>> front() const {
    if (ranges_.empty()) return std::nullopt;
    const auto& [begin, size] = *ranges_.begin();
    return std::span(reinterpret_cast<std::byte*>(begin), size);
  }

 private:
  static std::uintptr_t address(const std::byte* memory) {
    return reinterpret_cast<std::uintptr_t>(memory);
  }

  std::map<std::uintptr_t, std::size_t> ranges_;  // first → size
};

}  // namespace terrace
