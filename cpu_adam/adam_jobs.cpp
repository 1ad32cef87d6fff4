#include "cpu_adam/adam_jobs.h"

#include <algorithm>
#include <string>
#include <utility>

#include "cpu_adam/adam_gradient.h"
#include "cpu_adam/adam_kernel.h"
#include "cpu_adam/floating_point.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::uint64_t kLeavesPerTile = 32;

Error refused(const std::string& what) {
  return Error(ErrorCode::invalid_argument, "the Adam pool cannot take " + what);
}

void check_ranges(const std::vector<AdamRange>& ranges, std::uint64_t elements) {
  std::uint64_t end = 0;
  for (const auto& range : ranges) {
    const auto behind = elements - std::min(range.first, elements);
    if (range.first < end || range.count > behind) {
      throw refused(std::to_string(range.count) + " elements from " + std::to_string(range.first) +
                    " on: the ranges of a run must ascend, be disjoint and lie within its " +
                    std::to_string(elements) + " elements");
    }
    end = range.first + range.count;
  }
}

std::uint64_t total(const std::vector<AdamRange>& ranges) {
  std::uint64_t elements = 0;
  for (const auto& range : ranges) elements += range.count;
  return elements;
}

// Calls body(range) with what [first, end) has of each range.
template <class Body>
void for_each_within(const std::vector<AdamRange>& ranges, std::uint64_t first, std::uint64_t end,
                     const Body& body) {
  auto range = std::partition_point(ranges.begin(), ranges.end(), [&](const AdamRange& r) {
    return r.first + r.count <= first;
  });
  for (; range != ranges.end() && range->first < end; ++range) {
    const auto from = std::max(first, range->first);
    body(AdamRange{from, std::min(end, range->first + range->count) - from, range->group});
  }
}

// Hashes `elements` elements of `dtype` into the tile's place, if anybody wants it.
void hash_into(std::uint64_t* hashes, std::uint64_t tile, HashFunction hash, const void* data,
               DType dtype, std::uint64_t elements) {
  if (hashes != nullptr) hashes[tile] = hash(data, elements * size_of(dtype).count);
}

void hash_states(const std::array<std::uint64_t*, 3>& hashes, std::uint64_t tile,
                 HashFunction hash, const AdamSlice& found) {
  hash_into(hashes[0], tile, hash, found.master_weight, DType::fp32, found.elements);
  hash_into(hashes[1], tile, hash, found.momentum, found.momentum_dtype, found.elements);
  hash_into(hashes[2], tile, hash, found.variance, found.variance_dtype, found.elements);
}

class UpdateJob final : public AdamJob {
 public:
  UpdateJob(std::vector<AdamScalars> groups, std::vector<AdamRun> runs)
      : groups_(std::move(groups)), runs_(std::move(runs)) {
    for (const auto& run : runs_) {
      check_run(run);
      tiles_ += tiles_of(run);
      end_tiles_.push_back(tiles_);
      bytes_ += total(run.updated) * adam_bytes_per_element(run.whole);
    }
  }

  std::uint64_t tiles() const override { return tiles_; }
  std::uint64_t bytes() const override { return bytes_; }
  bool paced() const override { return true; }

  void work(std::uint64_t tile) const override {
    const auto found = std::upper_bound(end_tiles_.begin(), end_tiles_.end(), tile);
    const auto& run = runs_[static_cast<std::size_t>(found - end_tiles_.begin())];
    work(run, tile - (*found - tiles_of(run)));
  }

 private:
  void check_run(const AdamRun& run) const {
    if (run.tile == 0) throw refused("a run with tiles of 0 elements");
    check(run.whole);
    check_ranges(run.updated, run.whole.elements);
    for (const auto& range : run.updated) check_group(range.group, groups_.size());
    if (run.hash != nullptr && run.after[3] != nullptr && run.whole.parameter == nullptr) {
      throw refused("a run that hashes the parameter and does not write one");
    }
  }

  void work(const AdamRun& run, std::uint64_t tile) const {
    const std::uint64_t first = tile * run.tile;
    const std::uint64_t end = first + std::min(run.tile, run.whole.elements - first);
    const AdamSlice all = part(run.whole, first, end - first);
    if (run.hash != nullptr) hash_states(run.before, tile, run.hash, all);
    const bool hashed = run.hash != nullptr && run.after[3] != nullptr;
    const auto stores = hashed ? ParameterStores::ordinary : parameter_stores(run.whole);
    {
      const DefaultFloatingPoint environment;
      for_each_within(run.updated, first, end, [&](const AdamRange& range) {
        adam_kernels().front().update(groups_[range.group],
                                      part(run.whole, range.first, range.count), stores);
      });
    }
    if (run.hash == nullptr) return;
    hash_states({run.after[0], run.after[1], run.after[2]}, tile, run.hash, all);
    hash_into(run.after[3], tile, run.hash, all.parameter, run.whole.parameter_dtype,
              all.elements);
  }

  const std::vector<AdamScalars> groups_;
  const std::vector<AdamRun> runs_;
  std::vector<std::uint64_t> end_tiles_;  // of each run, counted over all
  std::uint64_t tiles_ = 0;
  std::uint64_t bytes_ = 0;
};

class GradientsJob final : public AdamJob {
 public:
  explicit GradientsJob(GradientJob job) : job_(std::move(job)) {
    check_ranges(job_.counted, job_.whole.elements);
    if (job_.leaves == nullptr && job_.whole.elements > 0) {
      throw refused("gradients without a place for the leaves");
    }
  }

  std::uint64_t tiles() const override {
    return (leaves_of(job_.whole.elements) + kLeavesPerTile - 1) / kLeavesPerTile;
  }
  std::uint64_t bytes() const override {
    return total(job_.counted) * size_of(job_.whole.dtype).count;
  }
  bool paced() const override { return true; }

  void work(std::uint64_t tile) const override {
    const DefaultFloatingPoint environment;
    const auto leaves = leaves_of(job_.whole.elements);
    const auto end = std::min((tile + 1) * kLeavesPerTile, leaves);
    for (auto leaf = tile * kLeavesPerTile; leaf < end; ++leaf) {
      LeafSum sum(job_.whole, leaf);
      for_each_in_leaf(leaf, [&](const AdamRange& range) { sum.add(range.first, range.count); });
      job_.leaves[leaf] = sum.result();
    }
  }

  void finish() const override {
    if (job_.first_not_finite == nullptr) return;
    *job_.first_not_finite = kAllFinite;
    const auto leaf = first_bad_leaf({job_.leaves, leaves_of(job_.whole.elements)});
    for_each_in_leaf(leaf, [&](const AdamRange& range) {
      *job_.first_not_finite =
          std::min(*job_.first_not_finite, first_bad(job_.whole, range.first, range.count));
    });
  }

 private:
  template <class Body>
  void for_each_in_leaf(std::uint64_t leaf, const Body& body) const {
    if (leaf >= leaves_of(job_.whole.elements)) return;
    const auto first = leaf * kGradientLeaf;
    const auto count = std::min(kGradientLeaf, job_.whole.elements - first);
    for_each_within(job_.counted, first, first + count, body);
  }

  const GradientJob job_;
};

class AdditionJob final : public AdamJob {
 public:
  explicit AdditionJob(const GradientAddition& addition) : addition_(addition) {
    check(addition);
  }

  std::uint64_t tiles() const override {
    return (addition_.elements + kTileElements - 1) / kTileElements;
  }
  std::uint64_t bytes() const override {
    return addition_.elements * addition_bytes_per_element(addition_.gradient_dtype,
                                                           addition_.sum_dtype, addition_.first);
  }
  bool paced() const override { return true; }

  void work(std::uint64_t tile) const override {
    const DefaultFloatingPoint environment;
    const std::uint64_t first = tile * kTileElements;
    GradientAddition own = addition_;
    own.gradient = static_cast<const std::byte*>(own.gradient) +
                   first * size_of(own.gradient_dtype).count;
    own.sum = static_cast<std::byte*>(own.sum) + first * size_of(own.sum_dtype).count;
    own.elements = std::min(kTileElements, addition_.elements - first);
    adam_kernels().front().add(own);
  }

 private:
  static constexpr std::uint64_t kTileElements = kLeavesPerTile * kGradientLeaf;

  const GradientAddition addition_;
};

class HashingJob final : public AdamJob {
 public:
  explicit HashingJob(const HashJob& job) : job_(job) {
    if (job.hash == nullptr || job.out == nullptr) throw refused("a hash job without hash or out");
    if (job.tile.count == 0) throw refused("a hash job with tiles of 0 bytes");
  }

  std::uint64_t tiles() const override { return tiles_of(job_); }
  std::uint64_t bytes() const override { return job_.size.count; }
  bool paced() const override { return false; }

  void work(std::uint64_t tile) const override {
    const std::uint64_t first = tile * job_.tile.count;
    const auto count = std::min(job_.tile.count, job_.size.count - first);
    job_.out[tile] = job_.hash(job_.data + first, count);
  }

 private:
  const HashJob job_;
};

}  // namespace

std::unique_ptr<AdamJob> make_update_job(std::vector<AdamScalars> groups,
                                         std::vector<AdamRun> runs) {
  return std::make_unique<UpdateJob>(std::move(groups), std::move(runs));
}
std::unique_ptr<AdamJob> make_gradient_job(GradientJob job) {
  return std::make_unique<GradientsJob>(std::move(job));
}
std::unique_ptr<AdamJob> make_addition_job(const GradientAddition& addition) {
  return std::make_unique<AdditionJob>(addition);
}
std::unique_ptr<AdamJob> make_hash_job(const HashJob& job) {
  return std::make_unique<HashingJob>(job);
}

void AdamPool::submit(Ticket ticket, const AdamScalars& scalars, AdamRun run) {
  std::vector<AdamRun> runs;
  runs.push_back(std::move(run));
  submit(ticket, std::vector{scalars}, std::move(runs));
}

void AdamPool::submit(Ticket ticket, std::vector<AdamScalars> groups,
                      std::span<const AdamSlice> slices) {
  std::vector<AdamRun> runs;
  for (const auto& slice : slices) {
    runs.push_back({.whole = slice, .updated = {{0, slice.elements, slice.group}}});
  }
  submit(ticket, std::move(groups), std::move(runs));
}

void AdamPool::submit(Ticket ticket, const AdamScalars& scalars, const AdamSlice& slice) {
  submit(ticket, std::vector{scalars}, std::span(&slice, 1));
}

}  // namespace terrace
