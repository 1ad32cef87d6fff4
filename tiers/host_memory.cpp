#include "tiers/host_memory.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kHugePage = 2 << 20;

std::uint64_t available_bytes() {
  struct sysinfo info {};
  if (::sysinfo(&info) != 0) return 0;
  return (info.freeram + info.bufferram) * static_cast<std::uint64_t>(info.mem_unit);
}

Error too_much(std::uint64_t bytes, const std::string& why) {
  return {ErrorCode::out_of_budget,
          "reserving " + std::to_string(bytes) + " bytes (" + to_string(Bytes{bytes}) +
              ") of host memory failed: " + why + "; about " +
              to_string(Bytes{available_bytes()}) +
              " are free. Lower the dram budget or free memory"};
}

// Touches every page, so that memory that does not exist is missed now and not in a step.
void populate(std::byte* memory, std::uint64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  if (::madvise(memory, bytes, MADV_POPULATE_WRITE) == 0) return;
  if (errno != EINVAL && errno != ENOSYS) throw too_much(bytes, std::strerror(errno));
#endif
  for (std::uint64_t i = 0; i < bytes; i += kPageBytes) memory[i] = std::byte{0};
}

}  // namespace

HostMemory::HostMemory(Bytes size, Device* device) : device_(device) {
  TERRACE_CHECK(size.count > 0);
  map(round_up(size, Bytes{kPageBytes}));
  try {
    populate(memory_.data(), memory_.size());
    if (device_ != nullptr) pin();
  } catch (...) {
    ::munmap(memory_.data(), memory_.size());
    throw;
  }
}

HostMemory::~HostMemory() {
  unpin();
  ::munmap(memory_.data(), memory_.size());
}

// Huge pages need an aligned start: more address space is mapped than wanted, and the slack on both
// sides is given back before anything is touched.
void HostMemory::map(Bytes size) {
  const std::uint64_t slack = size.count >= kHugePage ? kHugePage : 0;
  void* mapped = ::mmap(nullptr, size.count + slack, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw too_much(size.count, std::strerror(errno));
  auto* begin = static_cast<std::byte*>(mapped);
  if (slack > 0) {
    const auto address = reinterpret_cast<std::uintptr_t>(begin);
    const std::uint64_t skip = round_up(address, kHugePage) - address;
    if (skip > 0) ::munmap(begin, skip);
    if (skip < slack) ::munmap(begin + skip + size.count, slack - skip);
    begin += skip;
    ::madvise(begin, size.count, MADV_HUGEPAGE);  // a wish: small pages do as well
  }
  memory_ = {begin, size.count};
}

void HostMemory::pin() {
  try {
    for (std::size_t done = 0; done < memory_.size();) {
      const auto piece = memory_.subspan(done, std::min(memory_.size() - done,
                                                        std::size_t{kMaxPinned.count}));
      device_->pin(piece);
      pinned_.push_back(piece);
      done += piece.size();
    }
  } catch (...) {
    unpin();
    throw;
  }
}

void HostMemory::unpin() noexcept {
  for (const auto piece : pinned_) device_->unpin(piece);
  pinned_.clear();
}

}  // namespace terrace
