#include "tiers/tensor_store.h"

#include "terrace/error.h"

namespace terrace {

TensorStore::TensorStore(Device& device, Bytes hbm, Bytes dram, const std::vector<int>& cpus)
    : device_(device), hbm_size_(hbm) {
  if (dram.count > 0) dram_.emplace(dram, &device, HostMemory::kMaxPinned, cpus);
  if (hbm.count > 0) hbm_ = device.allocate(hbm);
}

TensorStore::~TensorStore() {
  if (hbm_ != nullptr) device_.release(hbm_);
}

std::byte* TensorStore::address(Tier tier, Extent extent) const {
  TERRACE_CHECK(tier != Tier::nvme && extent.end() <= reserved(tier));
  return (tier == Tier::hbm ? hbm_ : arena().data()) + extent.offset.count;
}

std::span<std::byte> TensorStore::arena() const {
  return dram_ ? dram_->span() : std::span<std::byte>{};
}

Bytes TensorStore::reserved(Tier tier) const {
  if (tier == Tier::hbm) return hbm_size_;
  return {arena().size()};
}

}  // namespace terrace
