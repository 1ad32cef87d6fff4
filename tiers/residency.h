// Which bytes of which tensor lie where: the table on which a plan is replayed and checked.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "terrace/types.h"
#include "tiers/interval_map.h"

namespace terrace {

// One version of one layer's content. Versions count the updates (or uses) that made the bytes.
struct DataId {
  Content content = Content::parameter;
  LayerId layer;
  std::uint64_t version = 0;
  friend bool operator==(const DataId&, const DataId&) = default;
};

// Thread rule: one thread at a time.
class Residency {
 public:
  // The bytes of `extent` are now those of `data` from `data_offset` on.
  void place(Tier tier, Extent extent, DataId data, Bytes data_offset);
  // They are now worth nothing.
  void forget(Tier tier, Extent extent);
  // Empty when every byte of `extent` is that of `data` from `data_offset` on; otherwise a sentence
  // that says what lies there instead.
  std::string mismatch(Tier tier, Extent extent, DataId data, Bytes data_offset);

 private:
  struct Entry {
    DataId data;
    std::uint64_t bias = 0;  // address - data offset, modulo 2^64: the same for the whole run
  };
  std::array<IntervalMap<Entry>, kTierCount> tiers_;
};

}  // namespace terrace
