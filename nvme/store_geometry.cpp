#include "nvme/store_geometry.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::uint64_t kSegmentsPerSpare = 4096;
constexpr std::uint64_t kLeastSpares = 2;

// Each segment goes to the drive that would then be least full for its weight: bytes are shared in
// proportion over any stretch. Correctly rounded divisions give the same answer on every machine.
class Dealer {
 public:
  explicit Dealer(std::span<const std::uint32_t> weights)
      : weights_(weights.begin(), weights.end()), bytes_(weights.size()) {}

  std::uint32_t next(Bytes size) {
    std::size_t best = 0;
    for (std::size_t d = 1; d < weights_.size(); ++d) {
      if (fullness(d, size) < fullness(best, size)) best = d;
    }
    bytes_[best] += size;
    return static_cast<std::uint32_t>(best);
  }

 private:
  double fullness(std::size_t drive, Bytes size) const {
    return static_cast<double>((bytes_[drive] + size).count) / weights_[drive];
  }

  std::vector<double> weights_;
  std::vector<Bytes> bytes_;
};

// Calls visit(drive, size) for every segment in order.
template <class Visit>
void deal(std::span<const StoreRegion> regions, std::span<const std::uint32_t> weights,
          Visit&& visit) {
  Dealer dealer(weights);
  for (const auto& region : regions) {
    for (Bytes done; done < region.extent.size;) {
      const Bytes size = std::min(region.segment, region.extent.size - done);
      visit(weights.size() == 1 ? 0U : dealer.next(size), size);
      done += size;
    }
  }
}

std::uint64_t spares_for(const DriveShare& share) {
  if (share.segments == 0) return 0;
  return std::max(kLeastSpares, share.segments / kSegmentsPerSpare);
}

}  // namespace

std::vector<std::uint32_t> stripe_weights(std::span<const double> speeds) {
  const double sum = std::accumulate(speeds.begin(), speeds.end(), 0.0);
  std::vector<std::uint32_t> weights;
  for (const double speed : speeds) {
    weights.push_back(std::max(1U, static_cast<std::uint32_t>(std::lround(speed / sum * 1000))));
  }
  return weights;
}

std::vector<DriveShare> share_out(std::span<const StoreRegion> regions,
                                  std::span<const std::uint32_t> weights) {
  std::vector<DriveShare> shares(weights.size());
  deal(regions, weights, [&](std::uint32_t drive, Bytes size) {
    auto& share = shares[drive];
    ++share.segments;
    share.bytes += size;
    share.largest = std::max(share.largest, size);
  });
  return shares;
}

StoreFileLayout store_file_layout(const DriveShare& share, std::size_t regions) {
  StoreFileLayout layout;
  Bytes end;
  const auto take = [&](Bytes size) {
    const Bytes offset = end;
    end += round_up(size, kStorePage);
    return offset;
  };
  layout.text_bytes = round_up(kStorePage + Bytes{kRegionLine} * regions, kStorePage);
  layout.table_bytes = round_up(Bytes{kTableEntryBytes} * share.segments, kStorePage);
  for (auto& header : layout.header) header = take(kStorePage);
  for (auto& text : layout.text) text = take(layout.text_bytes);
  for (auto& record : layout.record) record = take(kRecordBytes);
  for (auto& table : layout.table) table = take(layout.table_bytes);
  for (auto& slot : layout.slot) slot = take(share.bytes);
  layout.spare_count = spares_for(share);
  layout.spare_bytes = share.largest;
  layout.spares = take(share.largest * layout.spare_count);
  layout.size = end;
  return layout;
}

StoreGeometry::StoreGeometry(std::vector<StoreRegion> regions, std::vector<std::uint32_t> weights)
    : regions_(std::move(regions)), weights_(std::move(weights)), shares_(weights_.size()) {
  TERRACE_CHECK(!weights_.empty());
  Bytes expected = begin();
  std::size_t count = 0;
  for (const auto& region : regions_) {
    TERRACE_CHECK(region.extent.offset == expected && region.segment.count > 0);
    TERRACE_CHECK(region.extent.size.count % kStorePage.count == 0);
    expected = region.extent.end();
    first_.push_back(count);
    count += (region.extent.size.count + region.segment.count - 1) / region.segment.count;
  }
  places_.reserve(count);
  deal(regions_, weights_, [&](std::uint32_t drive, Bytes size) {
    auto& share = shares_[drive];
    places_.push_back({drive, share.bytes, size});
    ++share.segments;
    share.bytes += size;
    share.largest = std::max(share.largest, size);
  });
}

Bytes StoreGeometry::begin() const {
  return regions_.empty() ? Bytes{} : regions_.front().extent.offset;
}
Bytes StoreGeometry::end() const {
  return regions_.empty() ? Bytes{} : regions_.back().extent.end();
}

std::size_t StoreGeometry::region_at(Bytes address) const {
  TERRACE_CHECK(address >= begin() && address < end());
  const auto after = std::upper_bound(
      regions_.begin(), regions_.end(), address,
      [](Bytes value, const StoreRegion& region) { return value < region.extent.end(); });
  return static_cast<std::size_t>(after - regions_.begin());
}

std::size_t StoreGeometry::segment_at(Bytes address) const {
  const auto region = region_at(address);
  const Bytes inside = address - regions_[region].extent.offset;
  return first_[region] + inside.count / regions_[region].segment.count;
}

std::size_t StoreGeometry::region_of(std::size_t segment) const {
  const auto after = std::upper_bound(first_.begin(), first_.end(), segment);
  return static_cast<std::size_t>(after - first_.begin()) - 1;
}

Extent StoreGeometry::extent(std::size_t segment) const {
  const auto region = region_of(segment);
  const Bytes inside = regions_[region].segment * (segment - first_[region]);
  return {regions_[region].extent.offset + inside, places_[segment].size};
}

}  // namespace terrace
