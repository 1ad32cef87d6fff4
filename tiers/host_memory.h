// Pinned host memory of an exact size.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "terrace/device.h"
#include "terrace/types.h"

namespace terrace {

// An anonymous mapping, rounded up to whole pages and no further, backed by huge pages where the
// system gives them, touched at construction so that memory that is not there fails now. Movable by
// nobody; safe to read and write from any thread.
class HostMemory {
 public:
  // Pins through `device` (which must outlive this) unless it is nullptr, in pieces of at most
  // kMaxPinned, all of them or none. Throws Error(out_of_budget) naming the bytes wanted and what the
  // machine has free, or what Device::pin throws.
  HostMemory(Bytes size, Device* device);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  std::span<std::byte> span() const { return memory_; }

  static constexpr Bytes kMaxPinned = 64_GiB;

 private:
  void map(Bytes size);
  void pin();
  void unpin() noexcept;

  std::span<std::byte> memory_;
  Device* device_;
  std::vector<std::span<std::byte>> pinned_;
};

}  // namespace terrace
