#include "tiers/host_memory.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <thread>

#include "terrace/error.h"
#include "tiers/topology.h"

namespace terrace {
namespace {

constexpr Bytes kPage = 4_KiB;
constexpr Bytes kHugePage = 2_MiB;
constexpr Bytes kMaxMapping = 128_TiB;  // the address space of a process

std::string in_words(Bytes bytes) {
  return std::to_string(bytes.count) + " bytes (" + to_string(bytes) + ")";
}

Error too_much(Bytes size, const std::string& why) {
  const auto available = available_memory();
  return {ErrorCode::out_of_budget,
          "reserving " + in_words(size) + " of host memory failed: " + why + "; " +
              (available ? in_words(*available) : "an unknown amount") +
              " of physical memory is available. Lower the dram budget or free memory"};
}

// Before anything is touched: the kernel gives addresses freely, and ends the process when it finds
// no pages behind them.
void check_available(Bytes size) {
  const auto available = available_memory();
  if (size > kMaxMapping || (available && size > *available)) {
    throw too_much(size, "it is more than the machine has left");
  }
}

void populate(std::span<std::byte> memory) {
#ifdef MADV_POPULATE_WRITE
  if (::madvise(memory.data(), memory.size(), MADV_POPULATE_WRITE) == 0) return;
  if (errno != EINVAL) throw too_much({memory.size()}, std::strerror(errno));
#endif
  // A kernel before 5.14.
  for (std::size_t i = 0; i < memory.size(); i += kPage.count) memory[i] = std::byte{0};
}

}  // namespace

HostMemory::HostMemory(Bytes size, Device* device, Bytes pinned_piece,
                       const std::vector<int>& cpus)
    : device_(device) {
  TERRACE_CHECK(size.count > 0 && pinned_piece.count > 0);
  check_available(size);
  map(round_up(size, kPage));
  try {
    populate_from(cpus);
    if (device_ != nullptr) pin(pinned_piece);
  } catch (...) {
    unpin();
    ::munmap(memory_.data(), memory_.size());
    throw;
  }
}

HostMemory::~HostMemory() {
  unpin();
  ::munmap(memory_.data(), memory_.size());
}

// Huge pages need an aligned start: more address space is mapped than wanted, and the slack on both
// sides is given back before anything is touched. Nothing is reserved for it meanwhile.
void HostMemory::map(Bytes size) {
  const std::uint64_t slack = size >= kHugePage ? kHugePage.count : 0;
  void* mapped = ::mmap(nullptr, size.count + slack, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw too_much(size, std::strerror(errno));
  auto* begin = static_cast<std::byte*>(mapped);
  if (slack > 0) {
    const auto address = reinterpret_cast<std::uintptr_t>(begin);
    const std::uint64_t skip = round_up(address, kHugePage.count) - address;
    if (skip > 0) ::munmap(begin, skip);
    if (skip < slack) ::munmap(begin + skip + size.count, slack - skip);
    begin += skip;
    ::madvise(begin, size.count, MADV_HUGEPAGE);  // a wish: small pages do as well
  }
  memory_ = {begin, size.count};
}

// A thread of its own, since the caller's CPUs are the caller's matter. One that cannot be bound
// populates all the same.
void HostMemory::populate_from(const std::vector<int>& cpus) {
  if (cpus.empty()) return populate(memory_);
  std::exception_ptr error;
  std::thread([&] {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) {
      if (cpu < CPU_SETSIZE) CPU_SET(static_cast<unsigned>(cpu), &set);
    }
    ::sched_setaffinity(0, sizeof set, &set);
    try {
      populate(memory_);
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

void HostMemory::pin(Bytes piece) {
  for (std::size_t done = 0; done < memory_.size();) {
    const auto next = memory_.subspan(done, std::min(memory_.size() - done, piece.count));
    device_->pin(next);
    pinned_.push_back(next);
    done += next.size();
  }
}

void HostMemory::unpin() noexcept {
  for (const auto piece : pinned_) device_->unpin(piece);
  pinned_.clear();
}

}  // namespace terrace
