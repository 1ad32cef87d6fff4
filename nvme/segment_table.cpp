#include "nvme/segment_table.h"

#include <algorithm>

namespace terrace {

SegmentTable::SegmentTable(const StoreGeometry& geometry, std::vector<DriveSlots> drives)
    : geometry_(geometry),
      drives_(std::move(drives)),
      entries_(geometry.segments()) {
  for (const auto& drive : drives_) spare_used_.emplace_back(drive.spare_count, false);
}

std::uint64_t SegmentTable::place(std::size_t segment, std::size_t slot) const {
  if (const auto moved = moved_.find({segment, slot}); moved != moved_.end()) return moved->second;
  const auto& where = geometry_.place(segment);
  return (drives_[where.drive].slot[slot] + where.offset).count;
}

std::uint64_t SegmentTable::target(std::size_t segment) const {
  const auto& entry = entries_[segment];
  const bool two = drives_[geometry_.place(segment).drive].slot.size() == 2;
  const auto first = place(segment, 0);
  if (!two) return first;
  if (first == entry.committed) return place(segment, 1);
  const auto second = place(segment, 1);
  if (second == entry.committed) return first;
  return entry.current == second ? second : first;
}

void SegmentTable::stage(std::size_t segment, std::uint64_t checksum, std::uint64_t generation) {
  entries_[segment].staged_checksum = checksum;
  entries_[segment].staged_generation = generation;
}

void SegmentTable::written(std::size_t segment, std::uint64_t offset) {
  auto& entry = entries_[segment];
  entry.current = offset;
  entry.checksum = entry.staged_checksum;
  entry.generation = entry.staged_generation;
}

bool SegmentTable::quarantine(std::size_t segment, std::uint64_t offset) {
  const auto drive = geometry_.place(segment).drive;
  auto& used = spare_used_[drive];
  const auto spare = std::find(used.begin(), used.end(), false);
  if (spare == used.end()) return false;
  const std::size_t slot = place(segment, 0) == offset ? 0 : 1;
  const auto number = static_cast<std::uint64_t>(spare - used.begin());
  moved_[{segment, slot}] = (drives_[drive].spares + drives_[drive].spare_bytes * number).count;
  *spare = true;
  ++quarantined_;
  return true;
}

std::vector<TableEntry> SegmentTable::entries(std::uint32_t drive) const {
  std::vector<TableEntry> result;
  for (std::size_t segment = 0; segment < entries_.size(); ++segment) {
    const auto& place = geometry_.place(segment);
    if (place.drive != drive) continue;
    const auto& entry = entries_[segment];
    result.push_back({entry.current, entry.checksum, entry.generation,
                      static_cast<std::uint32_t>(segment),
                      static_cast<std::uint32_t>(place.size.count)});
  }
  return result;
}

void SegmentTable::commit() {
  for (auto& entry : entries_) {
    entry.committed = entry.current;
    entry.committed_checksum = entry.checksum;
    entry.committed_generation = entry.generation;
  }
}

void SegmentTable::revert() {
  for (auto& entry : entries_) {
    entry.current = entry.committed;
    entry.checksum = entry.committed_checksum;
    entry.generation = entry.committed_generation;
  }
}

void SegmentTable::load(const std::vector<TableEntry>& entries) {
  for (const auto& found : entries) {
    auto& entry = entries_[found.segment];
    entry.current = entry.committed = found.offset;
    entry.checksum = entry.committed_checksum = found.checksum;
    entry.generation = entry.committed_generation = found.generation;
    const auto drive = geometry_.place(found.segment).drive;
    const auto& slots = drives_[drive];
    if (slots.spare_bytes.count > 0 && found.offset >= slots.spares.count) {
      const auto spare = (found.offset - slots.spares.count) / slots.spare_bytes.count;
      if (spare < slots.spare_count) spare_used_[drive][spare] = true;
    }
  }
}

}  // namespace terrace
