// A segment table that is accepted points into its file, and the store that goes on from it does
// not overwrite what it points to.
#include <cstdint>
#include <cstring>
#include <vector>

#include "nvme/segment_table.h"
#include "nvme/store_format.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::uint32_t kDrives = 2;

StoreGeometry geometry() {
  const StoreRegion first{"a", {{}, 100_KiB}, 8_KiB, 8_KiB};
  const StoreRegion second{"b", {100_KiB, 60_KiB}, 16_KiB, 8_KiB};
  return StoreGeometry({first, second}, {1, 1});
}

void check_accepted(const std::vector<TableEntry>& entries, const StoreGeometry& geometry,
                    std::uint32_t drive, const StoreFileLayout& layout) {
  for (const auto& entry : entries) {
    TERRACE_CHECK(entry.segment < geometry.segments());
    TERRACE_CHECK(entry.offset >= layout.slot[0].count);
    TERRACE_CHECK(entry.offset + entry.length <= layout.size.count);
  }
  std::vector<DriveSlots> slots(kDrives);
  slots[drive] = {{layout.slot[0], layout.slot[1]}, layout.spares, layout.spare_bytes,
                  layout.spare_count};
  SegmentTable table(geometry, slots);
  table.load(entries);
  for (const auto& entry : entries) {
    for (std::uint64_t i = 0; i <= layout.spare_count; ++i) {
      const auto target = table.target(entry.segment);
      TERRACE_CHECK(target != entry.offset && target + entry.length <= layout.size.count);
      if (!table.quarantine(entry.segment, target)) break;
    }
  }
  TERRACE_CHECK(table.entries(drive) == entries);
}

}  // namespace
}  // namespace terrace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace terrace;
  static const auto where = geometry();
  if (size < 1 + sizeof(TableEntry)) return 0;
  const std::uint32_t drive = data[0] % kDrives;
  const auto layout = store_file_layout(where.shares()[drive], where.regions().size());
  std::vector<TableEntry> entries((size - 1) / sizeof(TableEntry));
  std::memcpy(entries.data(), data + 1, entries.size() * sizeof(TableEntry));
  if (table_problem(entries, where, drive, layout).empty()) {
    check_accepted(entries, where, drive, layout);
  }
  return 0;
}
