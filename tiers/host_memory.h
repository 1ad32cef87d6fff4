// Pinned host memory of an exact size.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "terrace/device.h"
#include "terrace/types.h"

namespace terrace {

// An anonymous mapping, rounded up to whole pages and no further, aligned to and backed by huge
// pages where the system gives them, touched at construction so that memory that is not there is
// missed now and not in a step. Neither copied nor moved; any thread may read and write the bytes.
class HostMemory {
 public:
  static constexpr Bytes kMaxPinned = 64_GiB;

  // Pins through `device` (which must outlive this) unless it is nullptr, in pieces of at most
  // `pinned_piece`, all of them or none. First touched from these CPUs (none: from any), so that it
  // lies on their NUMA node as far as there is room. Throws Error(out_of_budget) naming the bytes
  // wanted and those available, or what Device::pin throws. `size` is above 0.
  HostMemory(Bytes size, Device* device, Bytes pinned_piece = kMaxPinned,
             const std::vector<int>& cpus = {});
  // Unpins. No copy may be in flight.
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // All of it: the size asked for, rounded up to whole pages.
  std::span<std::byte> span() const { return memory_; }

 private:
  void map(Bytes size);
  void populate_from(const std::vector<int>& cpus);
  void pin(Bytes piece);
  void unpin() noexcept;

  std::span<std::byte> memory_;
  Device* device_;
  std::vector<std::span<std::byte>> pinned_;  // the pieces
};

}  // namespace terrace
