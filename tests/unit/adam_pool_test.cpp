// AdamPool: the same bits for every number of threads, completions in order, exact pacing.
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu_adam/cpu_set.h"
#include "terrace/adam.h"
#include "terrace/error.h"
#include "tests/unit/adam_slices.h"

namespace terrace {
namespace {

struct Arrays {
  std::vector<bfloat16> gradient, parameter;
  std::vector<float> weight, momentum, variance;

  explicit Arrays(std::size_t elements)
      : gradient(elements), parameter(elements), weight(elements), momentum(elements),
        variance(elements) {
    for (std::size_t i = 0; i < elements; ++i) {
      gradient[i] = to_bfloat16(static_cast<float>(i * 7919 % 2003) - 1001);
      weight[i] = static_cast<float>(i * 104729 % 1009) * 0x1p-9F;
    }
  }
  AdamSlice view(std::size_t first, std::size_t elements) {
    return {gradient.data() + first, DType::bf16, weight.data() + first, momentum.data() + first,
            variance.data() + first, parameter.data() + first, DType::bf16, elements};
  }
  AdamSlice view() { return view(0, weight.size()); }
  friend bool operator==(const Arrays&, const Arrays&) = default;
};

AdamScalars scalars(std::uint64_t step = 1) {
  return adam_scalars({.weight_decay = 0.1}, 0.01, step);
}

std::vector<Completion> wait_for(AdamPool& pool, std::size_t count) {
  std::vector<Completion> completions;
  while (completions.size() < count) {
    if (pool.poll(completions) == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return completions;
}

// Lengths around the size of the tiles into which the pool cuts, and several of them.
TEST(AdamPool, TheNumberOfThreadsDoesNotShow) {
  for (const std::size_t elements : {1U, 32767U, 32768U, 32769U, 5 * 32768U + 17}) {
    Arrays expected(elements);
    adam_update(scalars(), expected.view());
    for (const int threads : {1, 2, 3}) {
      Arrays actual(elements);
      const auto pool = make_adam_pool({.threads = threads});
      EXPECT_EQ(pool->threads(), threads);
      pool->submit({7}, scalars(), actual.view());
      wait_for(*pool, 1);
      EXPECT_TRUE(actual == expected) << elements << " elements, " << threads << " threads";
    }
  }
}

TEST(AdamPool, AddsGradientsAsSpecified) {
  auto random = seeded();
  constexpr std::size_t kElements = 3 * (1 << 15) + 17;
  for (const int threads : {1, 2, 5}) {
    const auto pool = make_adam_pool({.threads = threads});
    for (const auto [gradient_dtype, sum_dtype] : kAdditionDtypes) {
      auto sum = random_array(sum_dtype, kElements, random);
      Fenced wanted = sum;
      std::uint64_t bytes = 0;
      for (const bool first : {true, false, false}) {
        auto gradient = random_array(gradient_dtype, kElements, random);
        add_as_specified(gradient, wanted, kElements, first);
        pool->submit_addition({1}, view(gradient, sum, kElements, first));
        const auto completions = pool->wait();
        ASSERT_EQ(completions.size(), 1U);
        bytes += completions[0].bytes;
      }
      EXPECT_TRUE(sum == wanted);
      EXPECT_TRUE(sum.fences_stand());
      const auto moved = 3 * size_of(gradient_dtype).count + 5 * size_of(sum_dtype).count;
      EXPECT_EQ(bytes, kElements * moved);
    }
  }
}

TEST(AdamPool, CompletesInOrderAndReports) {
  Arrays arrays(100'000);
  const auto pool = make_adam_pool({.threads = 2});
  const std::size_t lengths[] = {100'000, 0, 1, 70'000};
  for (std::uint64_t i = 0; i < 4; ++i) {
    pool->submit({i}, scalars(), arrays.view(0, lengths[i]));
  }
  const auto completions = wait_for(*pool, 4);
  ASSERT_EQ(completions.size(), 4U);
  for (std::uint64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(completions[i].ticket, Ticket{i});
    EXPECT_EQ(completions[i].error, 0);
    EXPECT_EQ(completions[i].bytes, 28 * lengths[i]);
    EXPECT_LE(completions[i].start, completions[i].end);
    if (i > 0) {
      EXPECT_GE(completions[i].start, completions[i - 1].end);
    }
  }
}

TEST(AdamPool, EveryDtypeIsCutWhereItsElementsAre) {
  auto random = seeded();
  const auto pool = make_adam_pool({.threads = 2});
  for (auto layout : dtype_tuples()) {
    layout.elements = 1000 + random() % 1000;
    layout.misalignment = random() % Fenced::kFence;
    Slice actual(layout, random);
    Slice expected = actual;
    expected.update_as_specified(scalars());
    AdamRun run{.whole = actual.view(), .updated = {{0, layout.elements}}, .tile = 101};
    pool->submit({1}, scalars(), std::move(run));
    EXPECT_EQ(pool->wait().front().bytes, layout.elements * adam_bytes_per_element(actual.view()));
    EXPECT_TRUE(actual == expected && actual.fences_stand()) << to_string(layout);
  }
}

// Slices that follow on one another: the second sees what the first wrote.
TEST(AdamPool, StepsOfOneRangeComeOneAfterTheOther) {
  Arrays actual(150'001);
  Arrays expected = actual;
  const auto pool = make_adam_pool({.threads = 3});
  for (std::uint64_t step = 1; step <= 8; ++step) {
    adam_update(scalars(step), expected.view());
    pool->submit({step}, scalars(step), actual.view());
  }
  wait_for(*pool, 8);
  EXPECT_TRUE(actual == expected);
}

TEST(AdamPool, CanBeWaitedFor) {
  Arrays actual(150'001);
  Arrays expected = actual;
  const auto pool = make_adam_pool({.threads = 2});
  EXPECT_TRUE(pool->wait().empty());
  for (std::uint64_t step = 1; step <= 3; ++step) {
    adam_update(scalars(step), expected.view());
    pool->submit({step}, scalars(step), actual.view());
  }
  const auto completions = pool->wait();
  EXPECT_TRUE(actual == expected);
  ASSERT_EQ(completions.size(), 3U);
  EXPECT_EQ(completions.back().ticket, Ticket{3});
  EXPECT_TRUE(pool->wait().empty());
}

TEST(AdamPool, EndsWhenEverySliceIsDone) {
  Arrays actual(200'003);
  Arrays expected = actual;
  adam_update(scalars(1), expected.view());
  adam_update(scalars(2), expected.view());
  {
    const auto pool = make_adam_pool({.threads = 2});
    pool->submit({1}, scalars(1), actual.view());
    pool->submit({2}, scalars(2), actual.view());
  }
  EXPECT_TRUE(actual == expected);
}

TEST(AdamPool, WakesAfterEachCompletionBecameVisible) {
  Arrays arrays(10);
  std::vector<Completion> seen;  // the waker's until set_waker() returned
  std::atomic<int> woken{0};
  const auto pool = make_adam_pool({.threads = 1});
  AdamPool* const raw = pool.get();
  // poll() belongs to one thread at a time: here to the waker's.
  pool->set_waker([&, raw] {
    raw->poll(seen);
    ++woken;
  });
  for (std::uint64_t i = 0; i < 5; ++i) pool->submit({i}, scalars(), arrays.view());
  while (woken < 5) std::this_thread::yield();
  pool->set_waker([] {});
  EXPECT_EQ(seen.size(), 5U);
  pool->submit({5}, scalars(), arrays.view());
  EXPECT_EQ(wait_for(*pool, 1).front().ticket, Ticket{5});
  EXPECT_EQ(woken, 5);
}

TEST(AdamPool, KeepsToAnEmulatedSpeed) {
  constexpr std::uint64_t kElements = 10'000;
  constexpr std::uint64_t kSlices = 10;
  Arrays arrays(kElements);
  const double gb_s = 28e-9 * kElements * 200;  // 5 ms a slice
  const auto pool = make_adam_pool({.threads = 1, .gb_s = gb_s});
  const auto before = std::chrono::steady_clock::now().time_since_epoch();
  for (std::uint64_t i = 0; i < kSlices; ++i) pool->submit({i}, scalars(), arrays.view());
  const auto completions = wait_for(*pool, kSlices);
  for (std::uint64_t i = 0; i < kSlices; ++i) {
    const auto deadline = before + std::chrono::milliseconds(5 * (i + 1));
    EXPECT_GE(completions[i].end, deadline - std::chrono::microseconds(1)) << i;
  }
}

int usable_cores() { return CpuSet::of_this_thread().count(); }

TEST(AdamPool, HasAThreadPerCoreUnlessTold) {
  EXPECT_EQ(make_adam_pool({})->threads(), usable_cores());
}

TEST(AdamPool, SharesTheCoresWithTheRanksOfItsNode) {
  EXPECT_EQ(make_adam_pool({.ranks_on_node = 2})->threads(), std::max(1, usable_cores() / 2));
  EXPECT_EQ(make_adam_pool({.ranks_on_node = 1'000'000})->threads(), 1);
  EXPECT_EQ(make_adam_pool({.threads = 3, .ranks_on_node = 2})->threads(), 3);
}

// Where the hash function has run. Hashing is the one thing that a test can watch from inside.
std::mutex seen_mutex;
std::set<int> seen_cpus;  // guarded by seen_mutex

std::uint64_t note_cpu(const void*, std::size_t) {
  const std::lock_guard lock(seen_mutex);
  seen_cpus.insert(::sched_getcpu());
  return 0;
}

TEST(AdamPool, StaysOnItsCpus) {
  const auto allowed = CpuSet::of_this_thread();
  for (int cpu = 0; cpu < 64; ++cpu) {
    if (!allowed.has(cpu)) continue;
    seen_cpus.clear();
    const auto pool = make_adam_pool({.threads = 4, .cpus = {cpu}});
    std::vector<std::uint64_t> hashes(1000);
    const std::vector<std::byte> data(1000);
    for (int i = 0; i < 5; ++i) {
      pool->submit_hash({1}, {data.data(), {1000}, {1}, note_cpu, hashes.data()});
    }
    pool->wait();
    EXPECT_EQ(seen_cpus, std::set<int>{cpu});
    EXPECT_EQ(make_adam_pool({.cpus = {cpu}})->threads(), 1);
  }
  EXPECT_EQ(CpuSet::of_this_thread().list(), allowed.list());  // the caller is not bound
}

std::atomic<int> narrowest{0};

std::uint64_t note_affinity(const void*, std::size_t) {
  const int count = CpuSet::of_this_thread().count();
  if (count < narrowest) narrowest = count;
  return 0;
}

// oneTBB's workers go back to where they could run before.
TEST(AdamPool, LeavesNoWorkerBound) {
  const auto allowed = CpuSet::of_this_thread();
  int first = 0;
  while (!allowed.has(first)) ++first;
  std::vector<std::uint64_t> hashes(3000);
  const std::vector<std::byte> data(3000);
  const HashJob job{data.data(), {3000}, {1}, note_affinity, hashes.data()};
  for (int i = 0; i < 10; ++i) {
    {
      const auto bound = make_adam_pool({.threads = 2, .cpus = {first}});
      bound->submit_hash({1}, job);
      bound->wait();
    }
    narrowest = allowed.count();
    const auto free = make_adam_pool({.threads = 2});
    free->submit_hash({1}, job);
    free->wait();
    EXPECT_EQ(narrowest, allowed.count());
  }
}

TEST(CpuSet, IsListedAsRanges) {
  const auto allowed = CpuSet::of_this_thread();
  EXPECT_FALSE(allowed.list().empty());
  EXPECT_FALSE(allowed.has(-1));
  EXPECT_FALSE(allowed.has(1 << 30));
  EXPECT_EQ(CpuSet({}, allowed).list(), "");
  EXPECT_EQ(CpuSet({}, allowed).count(), 0);
}

TEST(AdamPool, RefusesWhatHasNoMeaning) {
  const auto refusal = [](const AdamPoolOptions& options) -> std::string {
    try {
      make_adam_pool(options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return "";
  };
  EXPECT_NE(refusal({.threads = -2}).find("-2 threads"), std::string::npos);
  EXPECT_NE(refusal({.gb_s = -1}).find("-1.0"), std::string::npos);
  EXPECT_NE(refusal({.ranks_on_node = 0}).find("0 ranks"), std::string::npos);
  EXPECT_NE(refusal({.cpus = {-1}}).find("CPU -1; this process may run on"), std::string::npos);
  EXPECT_NE(refusal({.cpus = {1 << 20}}).find("CPU 1048576;"), std::string::npos);
}

}  // namespace
}  // namespace terrace
