// Which copy of each segment is good, and where the next one goes: the rule that the only good copy
// is never overwritten.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "nvme/store_format.h"
#include "nvme/store_geometry.h"

namespace terrace {

// Where the segments of one drive may lie in its file.
struct DriveSlots {
  std::vector<Bytes> slot;  // offsets of one slot or two
  Bytes spares;
  Bytes spare_bytes;
  std::uint64_t spare_count = 0;
};

// Thread rule: one thread at a time.
class SegmentTable {
 public:
  static constexpr std::uint64_t kNowhere = ~std::uint64_t{0};

  SegmentTable(const StoreGeometry& geometry, std::vector<DriveSlots> drives);

  // Offset of the newest good copy in the drive's file; kNowhere before the first write.
  std::uint64_t current(std::size_t segment) const { return entries_[segment].current; }
  // Where the next copy goes. With two slots never the committed copy; a copy that is not committed
  // may be overwritten.
  std::uint64_t target(std::size_t segment) const;

  // What the next copy will be.
  void stage(std::size_t segment, std::uint64_t checksum, std::uint64_t generation);
  // It is there.
  void written(std::size_t segment, std::uint64_t offset);
  std::uint64_t checksum(std::size_t segment) const { return entries_[segment].checksum; }
  std::uint64_t generation(std::size_t segment) const { return entries_[segment].generation; }

  // A place that refuses writes is used no more; target() is a spare instead. False when this drive
  // has none left.
  bool quarantine(std::size_t segment, std::uint64_t offset);
  std::uint64_t quarantined() const { return quarantined_; }

  // The current copies, of one drive, as they are written with a commit.
  std::vector<TableEntry> entries(std::uint32_t drive) const;
  // The current copies are the committed ones.
  void commit();
  // And the reverse: what was written since the last commit never was.
  void revert();
  // Takes over a committed table. Spares that it does not name are free again.
  void load(const std::vector<TableEntry>& entries);

 private:
  struct Entry {
    std::uint64_t current = kNowhere;
    std::uint64_t committed = kNowhere;
    std::uint64_t checksum = 0;    // of current
    std::uint64_t generation = 0;
    std::uint64_t committed_checksum = 0;
    std::uint64_t committed_generation = 0;
    std::uint64_t staged_checksum = 0;
    std::uint64_t staged_generation = 0;
  };

  // A slot's place, or the spare that stands for it.
  std::uint64_t place(std::size_t segment, std::size_t slot) const;

  const StoreGeometry& geometry_;
  const std::vector<DriveSlots> drives_;
  std::vector<Entry> entries_;
  std::vector<std::vector<bool>> spare_used_;  // by drive
  std::map<std::pair<std::size_t, std::size_t>, std::uint64_t> moved_;  // (segment, slot) → spare
  std::uint64_t quarantined_ = 0;
};

}  // namespace terrace
