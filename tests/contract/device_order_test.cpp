// The contract of Device, for every implementation: the order that streams, events and notify keep.

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/contract/device_contract.h"

namespace terrace {
namespace {

TEST_P(DeviceContract, NotifyFollowsAllEarlierWork) {
  constexpr std::size_t kSize = 256 << 10;
  const Pinned host(*device_, kSize);
  auto* memory = device_->allocate({kSize});
  for (std::uint64_t i = 0; i < 20; ++i) {
    copy(kHostToDeviceStream, 2 * i, memory, host.data(), kSize);
    device_->notify(kHostToDeviceStream, {2 * i + 1});
  }
  device_->notify(kComputeStream, {100});  // an empty stream answers as well
  const auto completed = drain();
  ASSERT_EQ(completed.size(), 41u);
  for (std::uint64_t i = 0; i < 20; ++i) {
    const auto& mark = completed.at(2 * i + 1);
    EXPECT_EQ(mark.error, 0);
    EXPECT_EQ(mark.start, mark.end);
    EXPECT_GE(mark.start, completed.at(2 * i).end);
    const auto next = completed.find(2 * i + 2);
    if (next != completed.end()) {
      EXPECT_LE(mark.end, next->second.start);
    }
  }
  device_->release(memory);
}

TEST_P(DeviceContract, RunsFunctionsInOrderBesideTheHost) {
  if (!GetParam().host_functions) GTEST_SKIP() << "this device runs no host functions";
  std::mutex gate;
  gate.lock();  // launch() returns although the stream cannot move
  std::vector<int> order;
  device_->launch(kComputeStream, [&] { const std::lock_guard pass(gate); });
  for (int i = 0; i < 100; ++i) device_->launch(kComputeStream, [&, i] { order.push_back(i); });
  device_->notify(kComputeStream, {7});
  std::vector<Completion> none;
  EXPECT_EQ(device_->poll(none), 0u);
  gate.unlock();
  EXPECT_EQ(drain().size(), 1u);
  std::vector<int> expected(100);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
}

// wait() means the record that the event marks now: what is recorded later does not matter, and
// neither does releasing the event while the wait is pending.
TEST_P(DeviceContract, WaitCapturesTheRecord) {
  if (!GetParam().host_functions) GTEST_SKIP() << "this device runs no host functions";
  std::mutex gate;
  gate.lock();
  std::atomic<bool> opened{false};
  device_->launch(kComputeStream, [&] {
    const std::lock_guard pass(gate);
    opened = true;
  });
  const auto blocked = device_->record(kComputeStream);
  std::atomic<int> seen_late{0};
  for (const auto stream : {kHostToDeviceStream, kDeviceToHostStream}) {
    device_->wait(stream, blocked);
    device_->launch(stream, [&] { seen_late += opened ? 1 : 0; });
  }
  device_->release_event(blocked);
  for (int i = 0; i < 100; ++i) device_->release_event(device_->record(kComputeStream));
  device_->notify(kHostToDeviceStream, {1});
  std::vector<Completion> none;
  EXPECT_EQ(device_->poll(none), 0u);
  gate.unlock();
  EXPECT_EQ(drain().size(), 1u);
  EXPECT_EQ(seen_late, 2);
}

TEST_P(DeviceContract, WaitingForAReachedEventIsNoOp) {
  const auto event = device_->record(kComputeStream);
  device_->synchronize(kComputeStream);
  for (int i = 0; i < 1000; ++i) {
    for (const auto stream : kStreams) device_->wait(stream, event);
  }
  device_->release_event(event);
  device_->notify(kHostToDeviceStream, {1});
  EXPECT_EQ(drain().size(), 1u);
}

TEST_P(DeviceContract, EventsAreReused) {
  std::set<std::uint32_t> seen;
  for (int round = 0; round < 20'000; ++round) {
    const auto stream = kStreams[round % 3];
    const auto event = device_->record(stream);
    seen.insert(event.value);
    device_->wait(kStreams[(round + 1) % 3], event);
    device_->release_event(event);
  }
  device_->notify(kComputeStream, {1});
  EXPECT_EQ(drain().size(), 1u);
}

// Random work on all streams. Each step waits for a random choice of earlier events; the log of
// what ran must hold every such event's step before the step itself, and each stream in order.
class RandomSchedule {
 public:
  RandomSchedule(Device& device, unsigned seed) : device_(device), random_(seed) {}

  void enqueue(int steps) {
    for (int step = 0; step < steps; ++step) {
      const auto stream = kStreams[random_() % kStreamCount];
      auto& own = steps_.emplace_back(Step{stream, {}, {}});
      for (auto count = random_() % 3; count > 0 && step > 0; --count) {
        const auto other = static_cast<std::size_t>(random_() % static_cast<unsigned>(step));
        if (!steps_[other].event) continue;  // released
        device_.wait(stream, *steps_[other].event);
        own.after.push_back(static_cast<int>(other));
      }
      device_.launch(stream, [this, step] { log(step); });
      own.event = device_.record(stream);
      if (step >= kKept) release(steps_[static_cast<std::size_t>(step - kKept)]);
    }
    for (auto& step : steps_) release(step);
  }

  void check() const {
    ASSERT_EQ(log_.size(), steps_.size());
    std::vector<std::size_t> position(steps_.size());
    for (std::size_t i = 0; i < log_.size(); ++i) position[static_cast<std::size_t>(log_[i])] = i;
    std::map<StreamId, std::size_t> last;
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      for (const int other : steps_[i].after) {
        EXPECT_LT(position[static_cast<std::size_t>(other)], position[i]) << "step " << i;
      }
      const auto before = last.find(steps_[i].stream);
      if (before != last.end()) {
        EXPECT_LT(before->second, position[i]) << "step " << i;
      }
      last[steps_[i].stream] = position[i];
    }
  }

 private:
  static constexpr int kKept = 12;
  struct Step {
    StreamId stream;
    std::optional<EventId> event;
    std::vector<int> after;
  };

  void log(int step) {
    const std::lock_guard lock(mutex_);
    log_.push_back(step);
  }
  void release(Step& step) {
    if (step.event) device_.release_event(*step.event);
    step.event.reset();
  }

  Device& device_;
  std::mt19937 random_;
  std::vector<Step> steps_;
  std::mutex mutex_;
  std::vector<int> log_;  // guarded by mutex_ while the streams run
};

TEST_P(DeviceContract, RecordAndWaitOrderStreams) {
  if (!GetParam().host_functions) GTEST_SKIP() << "this device runs no host functions";
  const unsigned first_seed = std::random_device()();
  for (unsigned seed = first_seed; seed < first_seed + 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomSchedule schedule(*device_, seed);
    schedule.enqueue(300);
    drain();
    schedule.check();
    if (HasFailure()) return;
  }
}

// Data handed from stream to stream: up, changed on the device, down, and up again.
TEST_P(DeviceContract, ChainsOverAllStreamsCarryData) {
  if (!GetParam().host_functions) GTEST_SKIP() << "this device runs no host functions";
  constexpr std::size_t kSize = 8 << 10;
  constexpr int kRounds = 60;
  const Pinned host(*device_, kSize);
  auto* memory = device_->allocate({kSize});
  std::ranges::fill(host.span(), std::byte{0});
  std::optional<EventId> previous;
  std::uint64_t ticket = 0;
  const auto hand_over = [&](StreamId to) {
    if (previous) device_->wait(to, *previous);
    if (previous) device_->release_event(*previous);
  };
  for (int round = 0; round < kRounds; ++round) {
    hand_over(kHostToDeviceStream);
    copy(kHostToDeviceStream, ticket++, memory, host.data(), kSize);
    previous = device_->record(kHostToDeviceStream);
    hand_over(kComputeStream);
    device_->launch(kComputeStream, [=] {
      for (auto& byte : std::span(memory, kSize)) {
        byte = static_cast<std::byte>(std::to_integer<int>(byte) + 1);
      }
    });
    previous = device_->record(kComputeStream);
    hand_over(kDeviceToHostStream);
    copy(kDeviceToHostStream, ticket++, host.data(), memory, kSize);
    previous = device_->record(kDeviceToHostStream);
  }
  EXPECT_EQ(drain().size(), ticket);
  for (const auto byte : host.span()) ASSERT_EQ(byte, static_cast<std::byte>(kRounds));
  device_->release_event(*previous);
  device_->release(memory);
}

INSTANTIATE_TEST_SUITE_P(Every, DeviceContract, testing::ValuesIn(device_kinds()), device_name);

}  // namespace
}  // namespace terrace
