// Ten thousand steps on one store: nothing grows.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "nvme/segment_store.h"
#include "nvme/simulation.h"
#include "tests/support/directory.h"

namespace {

std::atomic<std::int64_t> live_allocations = 0;

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t size) {
  void* memory = std::malloc(size > 0 ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  ++live_allocations;
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  if (memory != nullptr) --live_allocations;
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  operator delete(memory);
}

namespace terrace {
namespace {

TEST(StoreEndurance, TenThousandStepsLeaveNothingBehind) {
  const Directory first("endurance-a");
  const Directory second("endurance-b");
  const auto disk = std::make_shared<SimulatedDisk>();
  const auto counters = std::make_shared<FaultCounters>();
  const auto engine = make_fault_engine(make_memory_engine(disk), {}, counters);
  StoreOptions options;
  options.drives = {{first.path(), 1, {}}, {second.path(), 1, {}}};
  options.durable = {{"states", {{}, 64_KiB}, 8_KiB, 8_KiB}};
  options.scratch = {{"inputs", {64_KiB, 32_KiB}, 8_KiB, 8_KiB}};
  options.transient = 64_KiB;
  SegmentStore store(*engine, options);
  PageBuffer buffer(64_KiB);
  const auto calls = [&](IoCall call) {
    return counters->calls[static_cast<std::size_t>(call)].load();
  };
  std::int64_t live = 0;
  std::uint64_t until_1000 = 0;
  std::uint64_t until_4000 = 0;
  for (std::uint64_t step = 1; step <= 10'000; ++step) {
    buffer.data()[step % buffer.size()] = static_cast<std::byte>(step);
    store.write_now({{}, 64_KiB}, buffer.span(), step);
    const Extent input{64_KiB + (step % 3) * 4_KiB, 16_KiB};
    store.write_now(input, buffer.span().first(16384), step);
    store.read_now(input, buffer.span().first(16384));
    store.commit_now(step, step % 2 == 0 ? "even" : "");
    store.read_now({{}, 64_KiB}, buffer.span());
    if (step == 1000) live = live_allocations;
    if (step == 1000) until_1000 = counters->total;
    if (step == 4000) until_4000 = counters->total;
    ASSERT_EQ(engine->pending(), 0U);
    ASSERT_EQ(store.pending(), 0U);
  }
  EXPECT_LE(live_allocations, live + 8);
  EXPECT_EQ(counters->total - until_4000, 2 * (until_4000 - until_1000));
  EXPECT_EQ(calls(IoCall::open), 4U);
  EXPECT_EQ(calls(IoCall::remove), 0U);
  EXPECT_TRUE(store.notes().empty());
}

}  // namespace
}  // namespace terrace
