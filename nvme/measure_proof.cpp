#include "nvme/measure_proof.h"

#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "terrace/error.h"
#include "terrace/types.h"

namespace terrace::bench {
namespace {

constexpr std::uint64_t kPageBytes = 4096;
constexpr double kMostCached = 0.01;     // of the file; a few pages are harmless
constexpr double kMostUnwritten = 0.01;  // of the file
constexpr double kLeastServed = 0.98;    // of what is claimed
constexpr double kCeilingSlack = 1.02;
constexpr std::uint64_t kLeastClaim = std::uint64_t{16} << 20;  // below it counters say too little
constexpr std::size_t kExtentsAtOnce = 256;
constexpr std::uint64_t kMaxExtents = 1 << 22;  // a bound for the loop over a very torn file
constexpr long kCachestat = 451;                // the number on every architecture

class Descriptor {
 public:
  explicit Descriptor(const std::string& path)
      : value_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (value_ < 0) {
      throw Error(ErrorCode::io, "looking at " + path + " failed: " + std::strerror(errno) +
                                     "; name a file or directory that this user may read");
    }
  }
  ~Descriptor() { ::close(value_); }
  Descriptor(const Descriptor&) = delete;
  int get() const { return value_; }

 private:
  int value_;
};

void add_extent(Extents& result, const fiemap_extent& extent, std::uint64_t bytes) {
  const std::uint64_t begin = extent.fe_logical;
  const std::uint64_t end = std::min<std::uint64_t>(bytes, begin + extent.fe_length);
  const auto length = end - std::min(end, begin);
  constexpr auto kPacked = FIEMAP_EXTENT_DATA_INLINE | FIEMAP_EXTENT_DATA_TAIL |
                           FIEMAP_EXTENT_DELALLOC | FIEMAP_EXTENT_UNKNOWN | FIEMAP_EXTENT_ENCODED;
  if ((extent.fe_flags & FIEMAP_EXTENT_UNWRITTEN) != 0) {
    result.reserved += length;
  } else if ((extent.fe_flags & kPacked) != 0) {
    result.packed += length;
  } else {
    result.written += length;
  }
}

std::optional<std::uint64_t> resident(int descriptor, std::uint64_t bytes) {
  void* map = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, 0);
  if (map == MAP_FAILED) return std::nullopt;
  std::vector<unsigned char> pages((bytes + kPageBytes - 1) / kPageBytes);
  const bool told = ::mincore(map, bytes, pages.data()) == 0;
  ::munmap(map, bytes);
  if (!told) return std::nullopt;
  return kPageBytes *
         static_cast<std::uint64_t>(std::ranges::count_if(pages, [](auto p) { return p & 1; }));
}

std::string size(std::uint64_t bytes) { return to_string(Bytes{bytes}); }

}  // namespace

Extents file_extents(const std::string& path, std::uint64_t bytes) {
  const Descriptor file(path);
  ::fdatasync(file.get());  // only so that delayed allocation is over
  Extents result;
  // The kernel's structure ends in an array without a length.
  std::vector<std::uint64_t> memory((sizeof(fiemap) + kExtentsAtOnce * sizeof(fiemap_extent)) /
                                    sizeof(std::uint64_t));
  auto* request = reinterpret_cast<fiemap*>(memory.data());
  std::uint64_t at = 0;
  for (std::uint64_t count = 0; at < bytes && count < kMaxExtents;) {
    std::memset(request, 0, sizeof *request);
    request->fm_start = at;
    request->fm_length = bytes - at;
    request->fm_extent_count = kExtentsAtOnce;
    if (::ioctl(file.get(), FS_IOC_FIEMAP, request) != 0) return {};
    const auto found = request->fm_mapped_extents;
    if (found == 0) break;
    for (std::uint32_t i = 0; i < found; ++i) add_extent(result, request->fm_extents[i], bytes);
    const auto& last = request->fm_extents[found - 1];
    count += found;
    at = last.fe_logical + last.fe_length;
    if ((last.fe_flags & FIEMAP_EXTENT_LAST) != 0) break;
  }
  result.known = true;
  const auto there = result.written + result.reserved + result.packed;
  result.holes = bytes - std::min(bytes, there);
  return result;
}

std::optional<std::uint64_t> cached_bytes(const std::string& path, std::uint64_t bytes) {
  const Descriptor file(path);
  struct {
    std::uint64_t offset, length;
  } range{0, bytes};
  struct {
    std::uint64_t cache, dirty, writeback, evicted, recently_evicted;
  } state{};
  if (::syscall(kCachestat, file.get(), &range, &state, 0) == 0) return state.cache * kPageBytes;
  return resident(file.get(), bytes);
}

std::optional<Refusal> refuse_extents(const Extents& extents, std::uint64_t bytes) {
  const auto limit = kMostUnwritten * static_cast<double>(bytes);
  if (!extents.known) return std::nullopt;
  if (static_cast<double>(extents.holes) > limit) {
    return Refusal{"sparse", size(extents.holes) + " of the file's " + size(bytes) +
                                 " are holes, which read as zeros without touching the drive; "
                                 "write the file first"};
  }
  if (static_cast<double>(extents.reserved) > limit) {
    return Refusal{"preallocated",
                   size(extents.reserved) + " of the file's " + size(bytes) +
                       " are reserved and were never written: they read as zeros without touching "
                       "the drive; write the file first"};
  }
  return std::nullopt;
}

std::optional<Refusal> refuse_cached(std::optional<std::uint64_t> cached, std::uint64_t bytes) {
  if (!cached || static_cast<double>(*cached) <= kMostCached * static_cast<double>(bytes)) {
    return std::nullopt;
  }
  return Refusal{"cached",
                 size(*cached) + " of the file's " + size(bytes) +
                     " are in the page cache, so memory was measured and not the drive; drop a "
                     "file of your own from it (dd if=FILE iflag=nocache count=0), or use a file "
                     "system with direct I/O (ext4 without data=journal, XFS)"};
}

std::optional<Refusal> refuse_counters(const Moved& moved) {
  const bool of_drive = moved.drive.has_value();
  const auto& counted = of_drive ? moved.drive : moved.process;
  if (!counted) return std::nullopt;
  const auto short_of = [&](std::uint64_t claimed, std::uint64_t seen, const char* verb) {
    std::optional<Refusal> refusal;
    if (claimed < kLeastClaim ||
        static_cast<double>(seen) >= kLeastServed * static_cast<double>(claimed)) {
      return refusal;
    }
    refusal = Refusal{"not_the_drive", size(claimed) + " were " + verb +
                                           " but the kernel counted only " + size(seen) +
                                           (of_drive ? " on the drive" : " for this process") +
                                           ": something else, such as a cache, served the rest"};
    return refusal;
  };
  if (auto refusal = short_of(moved.claimed.read, counted->read, "read")) return refusal;
  return short_of(moved.claimed.written, counted->written, "written");
}

std::optional<Refusal> refuse_ceiling(double gb_s, std::optional<double> ceiling_gb_s) {
  if (!ceiling_gb_s || gb_s <= *ceiling_gb_s * kCeilingSlack) return std::nullopt;
  char text[160];
  std::snprintf(text, sizeof text,
                "%.2f GB/s is more than the drive's link can carry (%.2f GB/s): a cache served it",
                gb_s, *ceiling_gb_s);
  return Refusal{"above_ceiling", text};
}

}  // namespace terrace::bench
