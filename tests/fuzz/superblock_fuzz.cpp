// Any bytes are a superblock that makes sense and would be written like this again, or refused with
// a reason. Checksums are made right: what is behind them is to be reached.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "nvme/checksum.h"
#include "nvme/store_format.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::uint64_t kMostSegments = 1 << 12;  // more take long

void check(const Superblock& superblock, std::span<const std::byte> text) {
  const auto again = encode(superblock, round_up(Bytes{text.size()}, kStorePage));
  TERRACE_CHECK(std::equal(text.begin(), text.end(), again.text.begin()));
  const auto header = decode_header(again.header);
  TERRACE_CHECK(header.header && header.header->text_used == text.size());
  std::uint64_t segments = 0;
  for (const auto& region : superblock.regions) {
    segments += region.extent.size.count / region.segment.count + 1;
  }
  if (segments > kMostSegments) return;
  const StoreGeometry geometry(superblock.regions, superblock.weights);
  const auto layout =
      store_file_layout(geometry.shares()[superblock.drive], superblock.regions.size());
  TERRACE_CHECK(layout.spares >= layout.slot[1] && layout.size >= layout.spares);
}

// A header page with these bytes and a right checksum.
void check_header(std::span<const std::byte> bytes) {
  constexpr std::size_t kHeader = 48;
  constexpr std::size_t kChecked = 16;
  std::vector<std::byte> page(kStorePage.count);
  std::memcpy(page.data(), bytes.data(), std::min(bytes.size(), page.size()));
  const std::uint64_t checksum = hash_bytes(page.data() + kChecked, kHeader - kChecked);
  std::memcpy(page.data() + 8, &checksum, sizeof checksum);
  const auto decoded = decode_header(page);
  TERRACE_CHECK(decoded.header.has_value() == decoded.why_not.empty());
  if (!decoded.header) return;
  TERRACE_CHECK(decoded.header->text_bytes.count % kStorePage.count == 0);
  TERRACE_CHECK(decoded.header->text_used <= decoded.header->text_bytes.count);
  TERRACE_CHECK(decoded.header->text_bytes <= 64_MiB);
}

}  // namespace
}  // namespace terrace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace terrace;
  if (size == 0) return 0;
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  check_header(bytes);
  decode_header(bytes);
  const SuperblockHeader header{round_up(Bytes{size}, kStorePage), size, hash_bytes(data, size)};
  const auto decoded = decode_superblock(header, bytes);
  TERRACE_CHECK(decoded.superblock.has_value() == decoded.why_not.empty());
  if (decoded.superblock) check(*decoded.superblock, bytes);
  return 0;
}
