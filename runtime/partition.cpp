#include "runtime/partition.h"

#include <algorithm>

#include "terrace/error.h"

namespace terrace {

ElementRange shard_of(std::uint64_t elements, std::uint32_t ranks, std::uint32_t rank,
                      std::uint64_t alignment) {
  TERRACE_CHECK(ranks > 0 && rank < ranks && alignment > 0);
  const std::uint64_t size = round_up((elements + ranks - 1) / ranks, alignment);
  const std::uint64_t first = std::min(elements, rank * size);
  return {first, std::min(elements - first, size)};
}

}  // namespace terrace
