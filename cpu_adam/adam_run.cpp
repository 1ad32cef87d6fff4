#include "cpu_adam/adam_run.h"

#include <algorithm>
#include <string>

#include "terrace/error.h"

namespace terrace {
namespace {

Error refused(const std::string& what) {
  return Error(ErrorCode::invalid_argument, "the Adam pool cannot take " + what);
}

AdamSlice part(const AdamSlice& slice, std::uint64_t first, std::uint64_t end) {
  AdamSlice result = slice;
  result.gradient = static_cast<const std::byte*>(slice.gradient) +
                    first * size_of(slice.gradient_dtype).count;
  result.master_weight += first;
  result.momentum += first;
  result.variance += first;
  if (slice.parameter != nullptr) {
    result.parameter = static_cast<std::byte*>(slice.parameter) +
                       first * size_of(slice.parameter_dtype).count;
  }
  result.elements = end - first;
  return result;
}

// Hashes `elements` elements of `dtype` into the tile's place, if anybody wants it.
void hash_into(std::uint64_t* hashes, std::uint64_t tile, HashFunction hash, const void* data,
               DType dtype, std::uint64_t elements) {
  if (hashes != nullptr) hashes[tile] = hash(data, elements * size_of(dtype).count);
}

void hash_states(const std::array<std::uint64_t*, 3>& hashes, std::uint64_t tile,
                 HashFunction hash, const AdamSlice& found) {
  hash_into(hashes[0], tile, hash, found.master_weight, DType::fp32, found.elements);
  hash_into(hashes[1], tile, hash, found.momentum, DType::fp32, found.elements);
  hash_into(hashes[2], tile, hash, found.variance, DType::fp32, found.elements);
}

}  // namespace

void check(const AdamRun& run) {
  if (run.tile == 0) throw refused("a run with tiles of 0 elements");
  std::uint64_t end = 0;
  for (const auto& range : run.updated) {
    const auto behind = run.whole.elements - std::min(range.first, run.whole.elements);
    if (range.first < end || range.count > behind) {
      throw refused(std::to_string(range.count) + " elements from " + std::to_string(range.first) +
                    " on: the ranges of a run must ascend, be disjoint and lie within its " +
                    std::to_string(run.whole.elements) + " elements");
    }
    end = range.first + range.count;
  }
  if (run.hash != nullptr && run.after[3] != nullptr && run.whole.parameter == nullptr) {
    throw refused("a run that hashes the parameter and does not write one");
  }
}

void check(const HashJob& job) {
  if (job.hash == nullptr || job.out == nullptr) throw refused("a hash job without hash or out");
  if (job.tile.count == 0) throw refused("a hash job with tiles of 0 bytes");
}

std::uint64_t updated_bytes(const AdamRun& run) {
  std::uint64_t elements = 0;
  for (const auto& range : run.updated) elements += range.count;
  return elements * adam_bytes_per_element(run.whole.gradient_dtype, run.whole.parameter_dtype);
}

void update_tile(const AdamScalars& scalars, const AdamRun& run, std::uint64_t tile) {
  const std::uint64_t first = tile * run.tile;
  const std::uint64_t end = first + std::min(run.tile, run.whole.elements - first);
  const AdamSlice all = part(run.whole, first, end);
  if (run.hash != nullptr) hash_states(run.before, tile, run.hash, all);
  auto range = std::partition_point(
      run.updated.begin(), run.updated.end(),
      [&](const AdamRange& r) { return r.first + r.count <= first; });
  for (; range != run.updated.end() && range->first < end; ++range) {
    adam_update(scalars, part(run.whole, std::max(first, range->first),
                              std::min(end, range->first + range->count)));
  }
  if (run.hash == nullptr) return;
  hash_states({run.after[0], run.after[1], run.after[2]}, tile, run.hash, all);
  hash_into(run.after[3], tile, run.hash, all.parameter, run.whole.parameter_dtype, all.elements);
}

void hash_tile(const HashJob& job, std::uint64_t tile) {
  const std::uint64_t first = tile * job.tile.count;
  job.out[tile] = job.hash(job.data + first, std::min(job.tile.count, job.size.count - first));
}

void AdamPool::submit(Ticket ticket, const AdamScalars& scalars, const AdamSlice& slice) {
  AdamRun run;
  run.whole = slice;
  run.updated = {{0, slice.elements}};
  submit(ticket, scalars, std::move(run));
}

}  // namespace terrace
