#include "tiers/residency.h"

namespace terrace {
namespace {

std::string describe(const DataId& data) {
  return std::string(to_string(data.content)) + " of layer " + std::to_string(data.layer.value) +
         " version " + std::to_string(data.version);
}

}  // namespace

void Residency::place(Tier tier, Extent extent, DataId data, Bytes data_offset) {
  tiers_[static_cast<std::size_t>(tier)].assign(
      extent, {data, extent.offset.count - data_offset.count});
}

void Residency::forget(Tier tier, Extent extent) {
  tiers_[static_cast<std::size_t>(tier)].erase(extent);
}

std::string Residency::mismatch(Tier tier, Extent extent, DataId data, Bytes data_offset) {
  std::uint64_t covered = 0;
  std::string wrong;
  const std::uint64_t bias = extent.offset.count - data_offset.count;
  tiers_[static_cast<std::size_t>(tier)].visit(extent, [&](Extent part, Entry& entry) {
    covered += part.size.count;
    if (entry.data != data) wrong = describe(entry.data) + " lies there";
    else if (entry.bias != bias) wrong = "other bytes of it lie there";
  });
  if (wrong.empty() && covered != extent.size.count) wrong = "nothing lies in part of it";
  if (wrong.empty()) return {};
  return std::string(to_string(tier)) + " [" + std::to_string(extent.offset.count) + ", " +
         std::to_string(extent.end().count) + ") should hold " + describe(data) + ": " + wrong;
}

}  // namespace terrace
