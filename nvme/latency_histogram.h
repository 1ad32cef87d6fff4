// How long operations took, in buckets of at most 3 % width.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "terrace/clock.h"

namespace terrace::bench {

// Thread rule: one thread at a time.
class LatencyHistogram {
 public:
  static constexpr int kSubBits = 5;  // 32 buckets for each doubling
  static constexpr std::size_t kBuckets = 60U << kSubBits;

  void add(Nanoseconds latency) {
    const auto value = static_cast<std::uint64_t>(std::max<std::int64_t>(0, latency.count()));
    ++counts_[bucket_of(value)];
    ++count_;
    most_ = std::max(most_, value);
  }
  void add(const LatencyHistogram& other) {
    for (std::size_t i = 0; i < kBuckets; ++i) counts_[i] += other.counts_[i];
    count_ += other.count_;
    most_ = std::max(most_, other.most_);
  }

  std::uint64_t count() const { return count_; }
  double max_us() const { return static_cast<double>(most_) * 1e-3; }
  // The latency that the share `q` (0 to 1) of the operations kept to, at the upper end of its
  // bucket and never above the maximum. 0 when empty.
  double quantile_us(double q) const {
    if (count_ == 0) return 0;
    const auto wanted = static_cast<std::uint64_t>(q * static_cast<double>(count_) + 0.5);
    std::uint64_t seen = 0;
    for (std::size_t i = 0; i < kBuckets; ++i) {
      seen += counts_[i];
      if (seen >= std::max<std::uint64_t>(1, wanted)) {
        return static_cast<double>(std::min(most_, lower_bound(i + 1) - 1)) * 1e-3;
      }
    }
    return max_us();
  }

  std::uint64_t at(std::size_t bucket) const { return counts_[bucket]; }
  // Nanoseconds at which the bucket begins.
  static std::uint64_t lower_bound(std::size_t bucket) {
    constexpr std::size_t kSub = std::size_t{1} << kSubBits;
    if (bucket < kSub) return bucket;
    const auto octave = bucket / kSub;
    return (kSub + bucket % kSub) << (octave - 1);
  }

 private:
  static std::size_t bucket_of(std::uint64_t value) {
    constexpr std::uint64_t kSub = std::uint64_t{1} << kSubBits;
    if (value < kSub) return value;
    const int octave = static_cast<int>(std::bit_width(value)) - kSubBits;  // at least 1
    const auto sub = (value >> (octave - 1)) - kSub;
    return std::min(kBuckets - 1, static_cast<std::size_t>(octave) * kSub + sub);
  }

  std::array<std::uint64_t, kBuckets> counts_{};
  std::uint64_t count_ = 0;
  std::uint64_t most_ = 0;
};

}  // namespace terrace::bench
