// The contract of Device, for every implementation: memory, copies, completions, failure. Nothing
// here knows which one it talks to. (Order between streams: device_order_test.cpp.)

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "terrace/error.h"
#include "tests/contract/device_contract.h"

namespace terrace {
namespace {

TEST_P(DeviceContract, AccountsAllocations) {
  EXPECT_FALSE(device_->info().name.empty());
  EXPECT_EQ(device_->allocated(), 0_B);
  auto* first = device_->allocate(64_KiB);
  auto* second = device_->allocate(128_KiB);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % 4096, 0u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(second) % 4096, 0u);
  EXPECT_EQ(device_->allocated(), 192_KiB);
  device_->release(first);
  EXPECT_EQ(device_->allocated(), 128_KiB);
  EXPECT_EQ(device_->peak_allocated(), 192_KiB);
  device_->release(second);
  EXPECT_EQ(device_->allocated(), 0_B);
}

TEST_P(DeviceContract, RefusesWhatDoesNotFitAndNamesTheBytes) {
  const Bytes capacity = device_->info().memory;
  auto* held = device_->allocate(8_KiB);
  try {
    device_->allocate(capacity);
    FAIL() << "allocated more than there is";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::out_of_budget);
    for (const Bytes bytes : {capacity, 8_KiB, capacity - 8_KiB}) {
      EXPECT_NE(std::string(error.what()).find(std::to_string(bytes.count)), std::string::npos)
          << error.what();
    }
  }
  EXPECT_EQ(device_->allocated(), 8_KiB);
  EXPECT_EQ(device_->peak_allocated(), 8_KiB);
  EXPECT_THROW(device_->allocate({~std::uint64_t{0}}), Error);
  auto* rest = device_->allocate(capacity - 8_KiB);  // and to the last byte, what does fit
  device_->release(rest);
  device_->release(held);
}

TEST_P(DeviceContract, RefusesToPinTwice) {
  const Pinned host(*device_, 64 << 10);
  for (const auto overlap : {host.span(), host.span().first(4096), host.span().last(4096)}) {
    try {
      device_->pin(overlap);
      ADD_FAILURE() << "pinned twice";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::device);
      EXPECT_NE(std::string(error.what()).find(std::to_string(overlap.size())), std::string::npos)
          << error.what();
    }
  }
}

TEST_P(DeviceContract, PinsAgainAfterUnpin) {
  for (int i = 0; i < 3; ++i) const Pinned host(*device_, 64 << 10);
}

TEST_P(DeviceContract, CopiesBothWays) {
  constexpr std::size_t kSize = 300'001;
  const Pinned source(*device_, kSize);
  const Pinned result(*device_, kSize);
  auto* memory = device_->allocate({kSize});
  fill(source.span(), 1);
  copy(kHostToDeviceStream, 1, memory, source.data(), kSize);
  const auto uploaded = device_->record(kHostToDeviceStream);
  device_->wait(kDeviceToHostStream, uploaded);
  copy(kDeviceToHostStream, 2, result.data(), memory, kSize);
  const auto completed = drain();
  ASSERT_EQ(completed.size(), 2u);
  for (const auto& [ticket, completion] : completed) {
    EXPECT_EQ(completion.error, 0);
    EXPECT_EQ(completion.bytes, kSize) << "ticket " << ticket;
  }
  EXPECT_LE(completed.at(1).end, completed.at(2).start);
  EXPECT_TRUE(std::ranges::equal(source.span(), result.span()));
  device_->release_event(uploaded);
  device_->release(memory);
}

// Pieces at odd offsets move their own bytes and no others.
TEST_P(DeviceContract, CopiesPieces) {
  constexpr std::size_t kSize = 64 << 10;
  const Pinned source(*device_, kSize);
  const Pinned result(*device_, kSize);
  auto* memory = device_->allocate({kSize});
  fill(source.span(), 2);
  std::ranges::fill(result.span(), std::byte{0xAB});
  copy(kHostToDeviceStream, 1, memory, source.data(), kSize);
  device_->synchronize(kHostToDeviceStream);
  std::uint64_t ticket = 2;
  for (std::size_t offset = 0; offset < kSize; offset += 4096) {
    copy(kDeviceToHostStream, ticket++, result.data() + offset + 3, memory + offset + 3, 1021);
  }
  copy(kDeviceToHostStream, ticket, result.data(), memory, 0);
  EXPECT_EQ(drain().size(), ticket);
  for (std::size_t i = 0; i < kSize; ++i) {
    const auto place = i % 4096;
    const auto expected = place >= 3 && place < 1024 ? source.span()[i] : std::byte{0xAB};
    ASSERT_EQ(result.span()[i], expected) << "byte " << i;
  }
  device_->release(memory);
}

// The last of many copies onto the same bytes wins, and busy intervals of a stream never overlap.
TEST_P(DeviceContract, KeepsTheOrderOfAStream) {
  constexpr std::size_t kSize = 4096;
  constexpr std::uint64_t kCopies = 200;
  const Pinned source(*device_, kSize * kCopies);
  const Pinned result(*device_, kSize);
  auto* memory = device_->allocate({kSize});
  fill(source.span(), 3);
  for (std::uint64_t i = 0; i < kCopies; ++i) {
    copy(kHostToDeviceStream, i, memory, source.data() + i * kSize, kSize);
  }
  const auto completed = drain();
  ASSERT_EQ(completed.size(), kCopies);
  for (std::uint64_t i = 1; i < kCopies; ++i) {
    EXPECT_LE(completed.at(i - 1).end, completed.at(i).start) << "copy " << i;
  }
  copy(kDeviceToHostStream, kCopies, result.data(), memory, kSize);
  drain();
  EXPECT_TRUE(std::ranges::equal(result.span(), source.span().last(kSize)));
  device_->release(memory);
}

TEST_P(DeviceContract, NeverBeatsItsThrottle) {
  const Throttle throttle = GetParam().throttle;
  if (!throttle.active()) GTEST_SKIP() << "this device is not throttled";
  constexpr std::size_t kSize = 100'000;
  constexpr std::uint64_t kCopies = 50;
  const Pinned host(*device_, kSize);
  auto* memory = device_->allocate({kSize});
  for (const auto stream : {kHostToDeviceStream, kDeviceToHostStream}) {
    const bool up = stream == kHostToDeviceStream;
    const auto begin = steady_clock().now();
    for (std::uint64_t i = 0; i < kCopies; ++i) {
      copy(stream, i, up ? memory : host.data(), up ? host.data() : memory, kSize);
    }
    EXPECT_EQ(drain().size(), kCopies);
    const double seconds = to_seconds(steady_clock().now() - begin);
    EXPECT_GE(seconds, static_cast<double>(kCopies) * throttle.seconds(kSize) - 1e-6);
  }
  device_->release(memory);
}

TEST_P(DeviceContract, CompletesEachTicketOnceUnderPolling) {
  constexpr std::size_t kSize = 1000;
  constexpr std::uint64_t kCopies = 2000;
  const Pinned host(*device_, kSize);
  auto* memory = device_->allocate({kSize});
  std::vector<Completion> completions;
  for (std::uint64_t i = 0; i < kCopies; ++i) {
    const bool up = i % 2 == 0;
    // Both streams touch the same bytes without order; so each has its own half.
    if (up) copy(kHostToDeviceStream, i, memory, host.data(), kSize / 2);
    if (!up) copy(kDeviceToHostStream, i, host.data() + kSize / 2, memory + kSize / 2, kSize / 2);
    device_->poll(completions);
  }
  for (const auto stream : kStreams) device_->synchronize(stream);
  device_->poll(completions);
  std::set<std::uint64_t> tickets;
  for (const auto& completion : completions) tickets.insert(completion.ticket.value);
  EXPECT_EQ(completions.size(), kCopies);
  EXPECT_EQ(tickets.size(), kCopies);
  device_->release(memory);
}

// A loop that sleeps until it is woken sees every completion.
TEST_P(DeviceContract, WakesAfterEachCompletion) {
  std::mutex mutex;
  std::condition_variable woken;
  bool wake = false;
  device_->set_waker([&] {
    const std::lock_guard lock(mutex);
    wake = true;
    woken.notify_one();
  });
  std::vector<Completion> completions;
  for (std::uint64_t i = 0; i < 200; ++i) {
    device_->notify(kStreams[i % 3], {i});
    while (completions.size() <= i) {
      std::unique_lock lock(mutex);
      woken.wait(lock, [&] { return wake; });
      wake = false;
      lock.unlock();
      device_->poll(completions);
    }
    ASSERT_EQ(completions.back().ticket.value, i);
  }
  device_->set_waker({});
  device_->notify(kComputeStream, {999});
  EXPECT_EQ(drain().size(), 1u);
  EXPECT_FALSE(wake);
}

TEST_P(DeviceContract, AReplacedWakerNoLongerRuns) {
  for (int round = 0; round < 50; ++round) {
    auto alive = std::make_unique<std::atomic<int>>(0);
    device_->set_waker([&counter = *alive] { ++counter; });
    for (std::uint64_t i = 0; i < 30; ++i) device_->notify(kStreams[i % 3], {i});
    device_->set_waker({});
    alive.reset();  // a waker that still ran would touch freed memory
  }
  for (const auto stream : kStreams) device_->synchronize(stream);
}

TEST_P(DeviceContract, AThrowingFunctionIsStickyAndNothingHangs) {
  if (!GetParam().host_functions) GTEST_SKIP() << "this device runs no host functions";
  constexpr std::size_t kSize = 4096;
  const Pinned host(*device_, kSize);
  auto* memory = device_->allocate({kSize});
  device_->notify(kComputeStream, {1});
  device_->synchronize(kComputeStream);
  EXPECT_EQ(device_->failure(), "");
  device_->launch(kComputeStream, [] { throw std::runtime_error("layer 7 is not a number"); });
  const auto failed = device_->record(kComputeStream);
  device_->notify(kComputeStream, {2});
  device_->wait(kHostToDeviceStream, failed);
  copy(kHostToDeviceStream, 3, memory, host.data(), kSize);
  device_->launch(kComputeStream, [] { throw std::logic_error("a later one"); });
  device_->notify(kComputeStream, {4});
  const auto completed = drain();
  ASSERT_EQ(completed.size(), 4u);
  EXPECT_EQ(completed.at(1).error, 0);
  for (const std::uint64_t ticket : {2u, 3u, 4u}) EXPECT_EQ(completed.at(ticket).error, EIO);
  const auto failure = device_->failure();
  EXPECT_NE(failure.find("layer 7 is not a number"), std::string::npos) << failure;
  EXPECT_EQ(failure.find("a later one"), std::string::npos) << failure;
  device_->release_event(failed);
  device_->release(memory);
}

TEST_P(DeviceContract, SurvivesAThrownInteger) {
  if (!GetParam().host_functions) GTEST_SKIP() << "this device runs no host functions";
  device_->launch(kComputeStream, [] { throw 42; });
  device_->notify(kComputeStream, {1});
  EXPECT_EQ(drain().at(1).error, EIO);
  EXPECT_FALSE(device_->failure().empty());
}

TEST_P(DeviceContract, DestructionWaitsForWhatIsEnqueued) {
  if (!GetParam().host_functions) GTEST_SKIP() << "this device runs no host functions";
  std::atomic<int> ran{0};
  for (int round = 0; round < 20; ++round) {
    auto previous = device_->record(kComputeStream);
    for (int i = 0; i < 30; ++i) {
      const auto stream = kStreams[i % 3];
      device_->wait(stream, previous);
      device_->launch(stream, [&] { ++ran; });
      device_->release_event(previous);
      previous = device_->record(stream);
    }
    device_ = GetParam().make();
    ASSERT_EQ(ran, 30 * (round + 1));
  }
}

TEST_P(DeviceContract, AbortsOnMistakes) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  constexpr std::size_t kSize = 8192;
  const Pinned host(*device_, kSize);
  std::vector<std::byte> pageable(kSize);
  auto* memory = device_->allocate({kSize});
  auto* other = device_->allocate({kSize});
  EXPECT_DEATH(copy(kHostToDeviceStream, 1, memory, pageable.data(), kSize), "check failed");
  EXPECT_DEATH(copy(kHostToDeviceStream, 1, memory, host.data() + 1, kSize), "check failed");
  EXPECT_DEATH(copy(kHostToDeviceStream, 1, memory + 1, host.data(), kSize), "check failed");
  EXPECT_DEATH(copy(kHostToDeviceStream, 1, memory, other, kSize), "check failed");
  EXPECT_DEATH(device_->copy(StreamId{9}, {{1}, memory, host.data(), {kSize}}), "check failed");
  EXPECT_DEATH(device_->release(memory + 4096), "check failed");
  EXPECT_DEATH(device_->unpin(host.span().first(4096)), "check failed");
  const auto event = device_->record(kComputeStream);
  device_->release_event(event);
  EXPECT_DEATH(device_->release_event(event), "check failed");
  EXPECT_DEATH(device_->wait(kComputeStream, event), "check failed");
  device_->release(other);
  device_->release(memory);
}

INSTANTIATE_TEST_SUITE_P(Every, DeviceContract, testing::ValuesIn(device_kinds()), device_name);

}  // namespace
}  // namespace terrace
