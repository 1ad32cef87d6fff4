// Where segments lie: everywhere once, back to back, dealt to the drives by their weights.
#include "nvme/store_geometry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace terrace {
namespace {

using Weights = std::vector<std::uint32_t>;

// `segments` in two regions, of 8 KiB and 12 KiB; the last one of each is short.
std::vector<StoreRegion> regions_of(std::uint64_t segments) {
  std::vector<StoreRegion> regions;
  const std::uint64_t first = (segments + 1) / 2;
  Bytes end;
  const auto add = [&](std::uint64_t count, Bytes segment) {
    if (count == 0) return;
    const Bytes size = (count - 1) * segment + kStorePage;
    regions.push_back({"region", {end, size}, segment, kStorePage});
    end += size;
  };
  add(first, 8_KiB);
  add(segments - first, 12_KiB);
  return regions;
}

void expect_sound(const StoreGeometry& geometry, std::uint64_t segments) {
  ASSERT_EQ(geometry.segments(), segments);
  std::vector<DriveShare> found(geometry.weights().size());
  Bytes address;
  for (std::size_t s = 0; s < segments; ++s) {
    const auto extent = geometry.extent(s);
    const auto& place = geometry.place(s);
    ASSERT_LT(place.drive, found.size());
    EXPECT_EQ(extent.offset, address);
    EXPECT_EQ(extent.size, place.size);
    EXPECT_EQ(place.size.count % kStorePage.count, 0U);
    EXPECT_EQ(geometry.segment_at(extent.offset), s);
    EXPECT_EQ(geometry.segment_at(extent.end() - 1_B), s);
    EXPECT_EQ(geometry.regions()[geometry.region_of(s)].segment >= place.size, true);
    auto& share = found[place.drive];
    EXPECT_EQ(place.offset, share.bytes);  // behind what the drive has already
    ++share.segments;
    share.bytes += place.size;
    share.largest = std::max(share.largest, place.size);
    address = extent.end();
  }
  EXPECT_EQ(geometry.end(), address);
  for (std::size_t d = 0; d < found.size(); ++d) {
    EXPECT_EQ(geometry.shares()[d].segments, found[d].segments);
    EXPECT_EQ(geometry.shares()[d].bytes, found[d].bytes);
    EXPECT_EQ(geometry.shares()[d].largest, found[d].largest);
  }
}

// No drive is further from its share than one segment, anywhere on the way.
void expect_fair(const StoreGeometry& geometry) {
  const auto& weights = geometry.weights();
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<double> bytes(weights.size());
  double total = 0;
  for (std::size_t s = 0; s < geometry.segments(); ++s) {
    const auto& place = geometry.place(s);
    bytes[place.drive] += static_cast<double>(place.size.count);
    total += static_cast<double>(place.size.count);
    for (std::size_t d = 0; d < weights.size(); ++d) {
      EXPECT_LE(std::abs(bytes[d] - total * weights[d] / sum), 12.0 * 1024 + 1)
          << "drive " << d << " at segment " << s;
    }
  }
}

TEST(StoreGeometry, HoldsEverySegmentOnce) {
  for (std::uint64_t segments = 0; segments <= 9; ++segments) {
    for (const auto& weights :
         {Weights{1}, Weights{1, 1}, Weights{1, 3}, Weights{1, 1, 1}, Weights{3, 1, 2},
          Weights{1, 1, 1, 1, 1}, Weights{1000000, 1, 1, 1, 1}}) {
      const auto regions = regions_of(segments);
      SCOPED_TRACE(std::to_string(segments) + " segments on " + std::to_string(weights.size()));
      const StoreGeometry geometry(regions, weights);
      expect_sound(geometry, segments);
      const auto shares = share_out(regions, weights);
      ASSERT_EQ(shares.size(), weights.size());
      for (std::size_t d = 0; d < shares.size(); ++d) {
        EXPECT_EQ(shares[d].segments, geometry.shares()[d].segments);
        EXPECT_EQ(shares[d].bytes, geometry.shares()[d].bytes);
        EXPECT_EQ(shares[d].largest, geometry.shares()[d].largest);
      }
    }
  }
}

TEST(StoreGeometry, DealsByWeight) {
  for (const auto& weights : {Weights{1, 1}, Weights{1, 3}, Weights{1, 1, 1}, Weights{5, 1, 3},
                              Weights{200, 200, 200, 200, 200}}) {
    expect_fair(StoreGeometry(regions_of(2000), weights));
  }
  const StoreGeometry quarter({{"a", {{}, 400 * 8_KiB}, 8_KiB, 8_KiB}}, {1, 3});
  EXPECT_EQ(quarter.shares()[0].segments, 100U);
  EXPECT_EQ(quarter.shares()[1].segments, 300U);
}

TEST(StoreGeometry, IsTheSameEveryTime) {
  const StoreGeometry first(regions_of(500), {250, 750, 3});
  const StoreGeometry second(regions_of(500), {250, 750, 3});
  for (std::size_t s = 0; s < first.segments(); ++s) {
    EXPECT_EQ(first.place(s).drive, second.place(s).drive);
    EXPECT_EQ(first.place(s).offset, second.place(s).offset);
  }
  // A store that was made must be found by every later build.
  std::string drives;
  for (std::size_t s = 0; s < 12; ++s) drives += std::to_string(first.place(s).drive);
  EXPECT_EQ(drives, "110111011101");
}

TEST(StoreGeometry, BeginsWhereItsRegionsBegin) {
  const StoreGeometry geometry({{"scratch", {1_MiB, 20_KiB}, 8_KiB, 8_KiB}}, {1});
  EXPECT_EQ(geometry.begin(), 1_MiB);
  EXPECT_EQ(geometry.end(), 1_MiB + 20_KiB);
  EXPECT_EQ(geometry.segment_at(1_MiB + 16_KiB), 2U);
  EXPECT_EQ(geometry.extent(2), (Extent{1_MiB + 16_KiB, 4_KiB}));
  EXPECT_EQ(geometry.first_segment(0), 0U);
  EXPECT_EQ(StoreGeometry({}, {1}).end(), Bytes{});
}

TEST(StripeWeights, AddUpToAThousandAndLeaveNobodyOut) {
  const auto weights = [](std::vector<double> speeds) { return stripe_weights(speeds); };
  EXPECT_EQ(weights({7}), (Weights{1000}));
  EXPECT_EQ(weights({1, 3}), (Weights{250, 750}));
  EXPECT_EQ(weights({2, 2, 2, 2, 2}), (Weights{200, 200, 200, 200, 200}));
  EXPECT_EQ(weights({1e9, 1}), (Weights{1000, 1}));
  const auto thirds = weights({1, 1, 1});
  EXPECT_NEAR(std::accumulate(thirds.begin(), thirds.end(), 0.0), 1000, 1.5);
}

TEST(StoreFileLayout, LeavesNoGapAndNoOverlap) {
  for (const std::uint64_t segments : {0U, 1U, 127U, 128U, 129U, 100'000U}) {
    for (const std::size_t regions : {0U, 1U, 100U}) {
      const DriveShare share{segments, segments * 8_KiB, segments > 0 ? 8_KiB : Bytes{}};
      const auto layout = store_file_layout(share, regions);
      Bytes end;
      const auto next = [&](Bytes offset, Bytes size) {
        EXPECT_EQ(offset, end);
        EXPECT_EQ(size.count % kStorePage.count, 0U);
        end = offset + size;
      };
      for (const auto header : layout.header) next(header, kStorePage);
      for (const auto text : layout.text) next(text, layout.text_bytes);
      for (const auto record : layout.record) next(record, kRecordBytes);
      for (const auto table : layout.table) next(table, layout.table_bytes);
      for (const auto slot : layout.slot) next(slot, share.bytes);
      next(layout.spares, layout.spare_count * layout.spare_bytes);
      EXPECT_EQ(layout.size, end);
      EXPECT_GE(layout.table_bytes.count, segments * kTableEntryBytes);
      EXPECT_GE(layout.text_bytes, kIdentityBytes + regions * Bytes{kRegionLine});
      const auto spares = std::max<std::uint64_t>(2, segments / 4096);
      EXPECT_EQ(layout.spare_count, segments == 0 ? 0 : spares);
    }
  }
}

}  // namespace
}  // namespace terrace
