// The memory behind a plan's addresses: one allocation on the device, one pinned arena in RAM.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "terrace/device.h"
#include "terrace/types.h"
#include "tiers/host_memory.h"

namespace terrace {

// Reserves everything at construction and nothing later. Immutable afterwards; safe from any
// thread.
class TensorStore {
 public:
  // The arena lies where `cpus` are; see HostMemory. Throws Error(out_of_budget) when the machine
  // or the device has less.
  TensorStore(Device& device, Bytes hbm, Bytes dram, const std::vector<int>& cpus = {});
  ~TensorStore();
  TensorStore(const TensorStore&) = delete;
  TensorStore& operator=(const TensorStore&) = delete;

  // The first byte of an extent of hbm (a device address) or dram.
  std::byte* address(Tier tier, Extent extent) const;
  std::span<std::byte> arena() const;  // of dram
  Bytes reserved(Tier tier) const;     // hbm, dram

 private:
  Device& device_;
  Bytes hbm_size_;
  std::byte* hbm_ = nullptr;
  std::optional<HostMemory> dram_;
};

}  // namespace terrace
