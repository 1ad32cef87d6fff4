// Where a store keeps its segments: pure arithmetic, shared by the planner and the store.
//
// A store's addresses are one row of regions; a region is cut into segments of one size; segments
// are dealt to the drives in proportion to their weights and lie back to back on each. The durable
// part has two slots for every segment in the file terrace.store, the rest one place in a file
// without a name:
//
//   terrace.store:  superblock (header, header, text, text), record 0, record 1, table 0, table 1,
//                   slot A, slot B, spares
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "terrace/types.h"

namespace terrace {

inline constexpr Bytes kStorePage{4096};          // of every offset and length in a store's files
inline constexpr Bytes kRecordBytes = 64_KiB;     // of a commit record's slot
inline constexpr Bytes kIdentityBytes{3072};      // the most that identity lines may take
inline constexpr std::size_t kRegionLine = 256;   // bytes that a superblock has for each region
inline constexpr std::size_t kTableEntryBytes = 32;

// Consecutive addresses cut into segments of one size; the last segment may be short. Offsets and
// sizes are multiples of kStorePage.
struct StoreRegion {
  std::string name;  // "momentum of block3"
  Extent extent;
  Bytes segment;
  Bytes tile;        // of checksums, at most a segment
};

// What one drive holds of a row of regions.
struct DriveShare {
  std::uint64_t segments = 0;
  Bytes bytes;
  Bytes largest;  // segment
};

// Integers that add up to about 1000, at least 1 each, in proportion to `speeds` (positive).
std::vector<std::uint32_t> stripe_weights(std::span<const double> speeds);

std::vector<DriveShare> share_out(std::span<const StoreRegion> regions,
                                  std::span<const std::uint32_t> weights);

// Offsets in one drive's terrace.store.
struct StoreFileLayout {
  Bytes header[2];    // of the superblock, a page each
  Bytes text[2];
  Bytes text_bytes;   // whole pages
  Bytes record[2];
  Bytes table[2];
  Bytes table_bytes;  // rounded up to pages
  Bytes slot[2];
  Bytes spares;       // spare_count segments of spare_bytes each
  Bytes spare_bytes;
  std::uint64_t spare_count = 0;
  Bytes size;
};
StoreFileLayout store_file_layout(const DriveShare& share, std::size_t regions);

struct SegmentPlace {
  std::uint32_t drive = 0;
  Bytes offset;  // on the drive, inside a slot
  Bytes size;
};

// Immutable; safe from any thread.
class StoreGeometry {
 public:
  StoreGeometry(std::vector<StoreRegion> regions, std::vector<std::uint32_t> weights);

  const std::vector<StoreRegion>& regions() const { return regions_; }
  const std::vector<std::uint32_t>& weights() const { return weights_; }
  std::size_t segments() const { return places_.size(); }
  const std::vector<DriveShare>& shares() const { return shares_; }
  // Addresses [begin, end).
  Bytes begin() const;
  Bytes end() const;

  const SegmentPlace& place(std::size_t segment) const { return places_[segment]; }
  // The segment that holds an address, and the region of a segment.
  std::size_t segment_at(Bytes address) const;
  std::size_t region_of(std::size_t segment) const;
  // First segment of a region.
  std::size_t first_segment(std::size_t region) const { return first_[region]; }
  Extent extent(std::size_t segment) const;

 private:
  std::size_t region_at(Bytes address) const;

  std::vector<StoreRegion> regions_;
  std::vector<std::uint32_t> weights_;
  std::vector<std::size_t> first_;  // segment of each region
  std::vector<SegmentPlace> places_;
  std::vector<DriveShare> shares_;
};

}  // namespace terrace
