// Runs and hash jobs of the pool, with random ranges, tiles and threads, against updating slice by
// slice and hashing plainly.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "terrace/adam.h"
#include "terrace/clock.h"
#include "terrace/error.h"
#include "tests/unit/adam_slices.h"

namespace terrace {
namespace {

std::uint64_t fnv(const void* data, std::size_t bytes) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  const auto* at = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ at[i]) * 0x100000001b3U;
  return hash;
}

using Hashes = std::vector<std::uint64_t>;

Hashes hashed(const void* data, std::size_t bytes, std::size_t tile) {
  Hashes hashes;
  for (std::size_t i = 0; i < bytes; i += tile) {
    hashes.push_back(fnv(static_cast<const std::byte*>(data) + i, std::min(tile, bytes - i)));
  }
  return hashes;
}

template <class T>
Hashes hashed(const std::vector<T>& values, std::size_t tile) {
  return hashed(values.data(), values.size() * sizeof(T), tile * sizeof(T));
}

// One block: random values everywhere, padding included.
struct Block {
  std::vector<bfloat16> gradient, parameter;
  std::vector<float> weight, momentum, variance;

  Block(std::size_t elements, Random& random) {
    for (std::size_t i = 0; i < elements; ++i) {
      const auto value = [&] { return static_cast<float>(random() % 2001) * 0x1p-10F - 1; };
      gradient.push_back(to_bfloat16(value()));
      parameter.push_back(to_bfloat16(value()));
      weight.push_back(value());
      momentum.push_back(value());
      variance.push_back(value() + 1);
    }
  }
  AdamSlice view(std::size_t first, std::size_t elements) {
    return {gradient.data() + first, DType::bf16, weight.data() + first, momentum.data() + first,
            variance.data() + first, parameter.data() + first, DType::bf16, elements};
  }
  AdamSlice view() { return view(0, weight.size()); }
  std::array<Hashes, 3> states(std::size_t tile) const {
    return {hashed(weight, tile), hashed(momentum, tile), hashed(variance, tile)};
  }
  friend bool operator==(const Block&, const Block&) = default;
};

std::vector<AdamRange> random_ranges(std::uint64_t elements, Random& random) {
  std::vector<AdamRange> ranges;
  const std::uint64_t longest = 1 + random() % elements;
  for (std::uint64_t at = 0; at < elements;) {
    const auto first = at + (random() % 3 == 0 ? 0 : random() % (1 + longest / 8));
    if (first >= elements) break;
    const auto count = std::min(random() % longest, elements - first);  // 0 at times
    ranges.push_back({first, count, static_cast<std::uint32_t>(random() % 3)});
    at = first + count + (count == 0 ? 1 : 0);
  }
  return ranges;
}

std::uint64_t total(const std::vector<AdamRange>& ranges) {
  std::uint64_t sum = 0;
  for (const auto& range : ranges) sum += range.count;
  return sum;
}

AdamScalars scalars(std::uint64_t step) {
  return adam_scalars({.weight_decay = 0.1}, 0.01, step);
}

std::vector<AdamScalars> groups(std::uint64_t step) {
  return {scalars(step), adam_scalars({}, 0.02, step),
          adam_scalars({.mode = AdamMode::adam, .beta1 = 0.8, .weight_decay = 0.2}, 0.01, step)};
}

// One run of several groups.
void submit(AdamPool& pool, Ticket ticket, std::uint64_t step, AdamRun run) {
  std::vector<AdamRun> runs;
  runs.push_back(std::move(run));
  pool.submit(ticket, groups(step), std::move(runs));
}

void update_plainly(Block& block, std::uint64_t step, const std::vector<AdamRange>& ranges) {
  for (const auto& range : ranges) {
    adam_update(groups(step)[range.group], block.view(range.first, range.count));
  }
}

std::vector<Completion> wait_for(AdamPool& pool, std::size_t count) {
  std::vector<Completion> completions;
  while (completions.size() < count) {
    if (pool.poll(completions) == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return completions;
}

// A run, and where its hashes go. Some are not wanted.
class HashedRun {
 public:
  HashedRun(AdamSlice whole, std::vector<AdamRange> ranges, std::uint64_t tile, Random& random) {
    run_.whole = whole;
    run_.updated = std::move(ranges);
    run_.tile = tile;
    run_.hash = random() % 4 == 0 ? nullptr : fnv;
    for (auto& hashes : hashes_) hashes.assign(tiles_of(run_), 0);
    for (std::size_t i = 0; i < 3; ++i) run_.before[i] = wanted(i, random);
    for (std::size_t i = 0; i < 4; ++i) run_.after[i] = wanted(3 + i, random);
  }
  const AdamRun& run() const { return run_; }

  void expect(const std::array<Hashes, 3>& found, const std::array<Hashes, 3>& left,
              const Hashes& parameter) const {
    for (std::size_t i = 0; i < 3; ++i) {
      expect_one(run_.before[i], hashes_[i], found[i]);
      expect_one(run_.after[i], hashes_[3 + i], left[i]);
    }
    expect_one(run_.after[3], hashes_[6], parameter);
  }

 private:
  std::uint64_t* wanted(std::size_t index, Random& random) {
    return random() % 4 == 0 ? nullptr : hashes_[index].data();
  }
  void expect_one(const std::uint64_t* wanted, const Hashes& actual, const Hashes& hashes) const {
    if (run_.hash == nullptr || wanted == nullptr) {
      EXPECT_EQ(actual, Hashes(hashes.size(), 0));
    } else {
      EXPECT_EQ(actual, hashes);
    }
  }

  AdamRun run_;
  std::array<Hashes, 7> hashes_;
};

TEST(AdamRun, IsUpdatingSliceBySliceAndHashingPlainly) {
  auto random = seeded();
  for (int round = 0; round < 60; ++round) {
    const std::uint64_t elements = 1 + random() % (round % 10 == 0 ? 200'000 : 3000);
    const std::uint64_t tile = 1 + random() % (random() % 2 == 0 ? elements + 10 : 97);
    const auto ranges = random_ranges(elements, random);
    Block actual(elements, random);
    Block expected = actual;
    const auto found = expected.states(tile);
    update_plainly(expected, 3, ranges);
    const HashedRun hashed_run(actual.view(), ranges, tile, random);
    const auto pool = make_adam_pool({.threads = 1 + static_cast<int>(random() % 4)});
    submit(*pool, {1}, 3, hashed_run.run());
    const auto completion = wait_for(*pool, 1).front();
    EXPECT_EQ(completion.bytes, 28 * total(ranges));
    ASSERT_TRUE(actual == expected) << "round " << round;
    hashed_run.expect(found, expected.states(tile), hashed(expected.parameter, tile));
  }
}

TEST(AdamRun, HashJobsHashPlainly) {
  auto random = seeded();
  const auto pool = make_adam_pool({.threads = 3});
  for (int round = 0; round < 50; ++round) {
    std::vector<std::byte> data(random() % 100'000);
    for (auto& byte : data) byte = static_cast<std::byte>(random());
    const std::uint64_t tile = 1 + random() % 70'000;
    Hashes actual(tiles_of(HashJob{nullptr, {data.size()}, {tile}, fnv, nullptr}));
    pool->submit_hash({5}, {data.data(), {data.size()}, {tile}, fnv, actual.data()});
    EXPECT_EQ(wait_for(*pool, 1).front().bytes, data.size());
    EXPECT_EQ(actual, hashed(data.data(), data.size(), tile));
  }
}

// Several blocks in one job, each with its own tiles.
TEST(AdamRun, SeveralRunsAreOneJob) {
  auto random = seeded();
  for (int round = 0; round < 20; ++round) {
    std::vector<Block> actual;
    for (int i = 0; i < round % 6; ++i) actual.emplace_back(random() % 5000, random);
    auto expected = actual;
    std::vector<AdamRun> runs;
    std::uint64_t updated = 0;
    for (std::size_t i = 0; i < actual.size(); ++i) {
      std::vector<AdamRange> ranges;
      if (!actual[i].weight.empty()) ranges = random_ranges(actual[i].weight.size(), random);
      updated += total(ranges);
      update_plainly(expected[i], 2, ranges);
      runs.push_back({.whole = actual[i].view(), .updated = ranges, .tile = 1 + random() % 3000});
    }
    const auto pool = make_adam_pool({.threads = 2});
    pool->submit({9}, groups(2), std::move(runs));
    EXPECT_EQ(wait_for(*pool, 1).front().bytes, 28 * updated);
    ASSERT_TRUE(actual == expected) << "round " << round;
  }
}

TEST(AdamRun, WholeTensorsOfSeveralGroupsAreOneJob) {
  auto random = seeded();
  std::vector<Block> actual;
  for (int i = 0; i < 12; ++i) actual.emplace_back(random() % 70'000, random);
  auto expected = actual;
  std::vector<AdamSlice> slices;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    slices.push_back(actual[i].view());
    slices.back().group = static_cast<std::uint32_t>(i % 3);
    update_plainly(expected[i], 5, {{0, actual[i].weight.size(), slices.back().group}});
  }
  const auto pool = make_adam_pool({.threads = 2});
  pool->submit({1}, groups(5), slices);
  wait_for(*pool, 1);
  EXPECT_TRUE(actual == expected);
}

// Padding holds anything, NaN for example, and counts as 0.
TEST(AdamRun, GradientsAreSummarizedAsIfPaddingWereZero) {
  auto random = seeded();
  for (int round = 0; round < 40; ++round) {
    const std::uint64_t elements = 1 + random() % (round % 10 == 0 ? 300'000 : 9000);
    std::vector<float> gradient(elements, std::numeric_limits<float>::quiet_NaN());
    std::vector<float> without_padding(elements, 0.0F);
    const auto ranges = random_ranges(elements, random);
    const bool bad = random() % 3 == 0;
    for (const auto& range : ranges) {
      for (auto i = range.first; i < range.first + range.count; ++i) {
        gradient[i] = static_cast<float>(random() % 2001) - 1000;
        if (bad && random() % 1000 == 0) gradient[i] = std::numeric_limits<float>::infinity();
        without_padding[i] = gradient[i];
      }
    }
    const auto expected = summarize({without_padding.data(), DType::fp32, elements});
    std::vector<double> leaves(leaves_of(elements), -1);
    std::uint64_t first_not_finite = 17;
    const auto pool = make_adam_pool({.threads = 1 + static_cast<int>(random() % 3)});
    pool->submit_gradients({3}, {{gradient.data(), DType::fp32, elements}, ranges, leaves.data(),
                                 &first_not_finite});
    EXPECT_EQ(wait_for(*pool, 1).front().bytes, 4 * total(ranges));
    ASSERT_EQ(sum_of_leaves(leaves), expected.sum_of_squares);
    ASSERT_EQ(first_not_finite, expected.first_not_finite);
  }
}

// Each hash job sees what the update before it left, and not what the one after it does.
TEST(AdamRun, JobsRunInTheOrderInWhichTheyCome) {
  auto random = seeded();
  constexpr std::uint64_t kElements = 70'001;
  constexpr std::uint64_t kTile = 4096;
  constexpr std::uint64_t kSteps = 12;
  Block actual(kElements, random);
  Block expected = actual;
  const auto pool = make_adam_pool({.threads = 3});
  std::vector<Hashes> seen(kSteps, Hashes((kElements + kTile - 1) / kTile));
  const auto ranges = random_ranges(kElements, random);
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    submit(*pool, {2 * step}, step,
           {.whole = actual.view(), .updated = ranges, .tile = 1 + random() % 9000});
    pool->submit_hash({2 * step + 1},
                      {reinterpret_cast<const std::byte*>(actual.weight.data()),
                       {4 * kElements}, {4 * kTile}, fnv, seen[step - 1].data()});
  }
  const auto completions = wait_for(*pool, 2 * kSteps);
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    update_plainly(expected, step, ranges);
    EXPECT_EQ(seen[step - 1], hashed(expected.weight, kTile)) << step;
    EXPECT_EQ(completions[2 * step - 2].ticket, Ticket{2 * step});
    EXPECT_EQ(completions[2 * step - 1].ticket, Ticket{2 * step + 1});
  }
  EXPECT_TRUE(actual == expected);
}

// A millisecond for each element that is updated. Padding and hash jobs would take 200 times as
// long if they were counted, so that no load on the machine can be mistaken for it.
TEST(AdamRun, TheEmulatedSpeedCountsWhatIsUpdated) {
  auto random = seeded();
  Block block(4000, random);
  Hashes hashes(1);
  const auto pool = make_adam_pool({.threads = 1, .gb_s = 28e-9 * 1000});
  const auto before = steady_clock().now();
  for (std::uint64_t i = 0; i < 4; ++i) {
    pool->submit({i}, scalars(1), AdamRun{.whole = block.view(), .updated = {{500, 5}}});
    pool->submit_hash({i}, {reinterpret_cast<const std::byte*>(block.weight.data()), {16'000},
                            {16'000}, fnv, hashes.data()});
  }
  const auto completions = wait_for(*pool, 8);
  const auto took = completions.back().end - before;
  EXPECT_GE(took, std::chrono::milliseconds(20) - std::chrono::microseconds(1));
  EXPECT_LT(took, std::chrono::milliseconds(2000));
}

TEST(AdamRun, NothingToDoCompletes) {
  const auto pool = make_adam_pool({.threads = 2});
  pool->submit({1}, scalars(1), AdamRun{});
  pool->submit_hash({2}, {nullptr, {0}, {64}, fnv, Hashes(1).data()});
  const auto completions = wait_for(*pool, 2);
  EXPECT_EQ(completions[0].bytes, 0U);
  EXPECT_EQ(completions[1].bytes, 0U);
}

TEST(AdamRun, WhatHasNoMeaningIsRefused) {
  auto random = seeded();
  Block block(100, random);
  const auto pool = make_adam_pool({.threads = 1});
  const auto refusal = [&](auto&& submit) -> std::string {
    try {
      submit();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return "";
  };
  const auto of_ranges = [&](std::vector<AdamRange> ranges) {
    return refusal([&] {
      pool->submit({1}, scalars(1), AdamRun{.whole = block.view(), .updated = std::move(ranges)});
    });
  };
  EXPECT_EQ(of_ranges({{0, 50}, {50, 50}, {100, 0}}), "");
  EXPECT_NE(of_ranges({{0, 101}}).find("101 elements from 0 on"), std::string::npos);
  EXPECT_NE(of_ranges({{101, 0}, {99, 1}}).find("1 elements from 99 on"), std::string::npos);
  EXPECT_NE(of_ranges({{50, 10}, {59, 1}}).find("1 elements from 59 on"), std::string::npos);
  EXPECT_NE(of_ranges({{1, ~std::uint64_t{0}}}).find("within its 100"), std::string::npos);
  EXPECT_NE(refusal([&] {
              pool->submit({1}, scalars(1), AdamRun{.whole = block.view(), .tile = 0});
            }).find("tiles of 0 elements"), std::string::npos);
  EXPECT_NE(of_ranges({{0, 1, 1}}).find("group 1, and there are scalars for 1 groups"),
            std::string::npos);
  const auto narrow = [&] {
    auto whole = block.view();
    whole.momentum_dtype = DType::fp16;
    pool->submit({1}, scalars(1), AdamRun{.whole = whole});
  };
  EXPECT_NE(refusal(narrow).find("the momentum is fp16"), std::string::npos);
  EXPECT_NE(refusal([&] {
              pool->submit_gradients({1}, {{block.gradient.data(), DType::bf16, 100}});
            }).find("place for the leaves"), std::string::npos);
  Hashes out(1);
  EXPECT_NE(refusal([&] { pool->submit_hash({1}, {nullptr, {1}, {0}, fnv, out.data()}); })
                .find("tiles of 0 bytes"), std::string::npos);
  EXPECT_NE(refusal([&] { pool->submit_hash({1}, {nullptr, {1}, {1}, nullptr, out.data()}); })
                .find("without hash"), std::string::npos);
  wait_for(*pool, 1);
}

}  // namespace
}  // namespace terrace
