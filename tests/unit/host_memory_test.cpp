#include "tiers/host_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "terrace/error.h"
#include "tiers/topology.h"

namespace terrace {
namespace {

std::string said_by(Bytes size) {
  try {
    const HostMemory memory(size, nullptr);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::out_of_budget);
    return error.what();
  }
  return "";
}

// Bytes of address space that this process has mapped.
std::uint64_t mapped_bytes() {
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

TEST(HostMemory, IsTheSizeAskedForInPages) {
  for (const Bytes size : {1_B, 4095_B, 4_KiB, 4097_B, 1_MiB, 2_MiB, 2_MiB + 1_B, 7_MiB + 12_KiB}) {
    const HostMemory memory(size, nullptr);
    EXPECT_EQ(memory.span().size(), round_up(size, 4_KiB).count);
    const auto address = reinterpret_cast<std::uintptr_t>(memory.span().data());
    EXPECT_EQ(address % (size >= 2_MiB ? 2_MiB : 4_KiB).count, 0u) << size.count;
    EXPECT_TRUE(std::ranges::all_of(memory.span(), [](auto byte) { return byte == std::byte{}; }));
    std::ranges::fill(memory.span(), std::byte{0xFF});
  }
}

TEST(HostMemory, IsThereFromTheStart) {
  for (const Bytes size : {16_KiB, 5_MiB + 4_KiB}) {
    const HostMemory memory(size, nullptr);
    std::vector<unsigned char> resident(memory.span().size() / 4096);
    ASSERT_EQ(::mincore(memory.span().data(), memory.span().size(), resident.data()), 0);
    EXPECT_TRUE(std::ranges::all_of(resident, [](auto page) { return (page & 1) != 0; }));
  }
}

TEST(HostMemory, WastesNoAddressesAndGivesAllBack) {
  constexpr Bytes kSize = 9_MiB + 4_KiB;
  constexpr Bytes kNoise = 512_KiB;  // of the process around it; the slack would be 2 MiB
  said_by(4_KiB);                    // whatever is set up once, is
  const auto before = mapped_bytes();
  for (int i = 0; i < 20; ++i) {
    const HostMemory memory(kSize, nullptr);
    EXPECT_LE(mapped_bytes(), before + kSize.count + kNoise.count);
  }
  EXPECT_LE(mapped_bytes(), before + kNoise.count);
}

TEST(HostMemory, RefusesWhatTheMachineDoesNotHave) {
  const auto available = available_memory();
  ASSERT_TRUE(available);
  for (const Bytes size : {*available + 8_GiB, 100_TiB, Bytes{~std::uint64_t{0}}}) {
    const auto said = said_by(size);
    EXPECT_NE(said.find("reserving " + std::to_string(size.count) + " bytes"), std::string::npos)
        << said;
    EXPECT_NE(said.find("of physical memory is available"), std::string::npos) << said;
  }
}

// Only pinning works; the `fail_at`-th piece fails.
class PinningDevice final : public Device {
 public:
  explicit PinningDevice(std::optional<int> fail_at = {}) : fail_at_(fail_at) {}

  void pin(std::span<std::byte> host) override {
    if (calls_++ == fail_at_) throw Error(ErrorCode::device, "no more");
    pinned.push_back(host);
  }
  void unpin(std::span<std::byte> host) noexcept override {
    std::erase_if(pinned, [&](auto piece) {
      return piece.data() == host.data() && piece.size() == host.size();
    });
  }

  DeviceInfo info() const override { return {}; }
  std::byte* allocate(Bytes) override { return nullptr; }
  void release(std::byte*) noexcept override {}
  Bytes allocated() const override { return {}; }
  Bytes peak_allocated() const override { return {}; }
  void copy(StreamId, const CopyRequest&) override {}
  void launch(StreamId, HostFunction) override {}
  EventId record(StreamId) override { return {}; }
  void wait(StreamId, EventId) override {}
  void release_event(EventId) noexcept override {}
  void notify(StreamId, Ticket) override {}
  std::size_t poll(std::vector<Completion>&) override { return 0; }
  void set_waker(std::function<void()>) override {}
  void synchronize(StreamId) override {}
  std::string failure() const override { return ""; }
  void* native_stream(StreamId) override { return nullptr; }

  std::vector<std::span<std::byte>> pinned;

 private:
  std::optional<int> fail_at_;
  int calls_ = 0;
};

TEST(HostMemory, PinsAllOfItInPieces) {
  PinningDevice device;
  {
    const HostMemory memory(10_MiB + 4_KiB, &device, 4_MiB);
    ASSERT_EQ(device.pinned.size(), 3u);
    auto* next = memory.span().data();
    for (const auto piece : device.pinned) {
      EXPECT_EQ(piece.data(), next);
      EXPECT_LE(piece.size(), (4_MiB).count);
      next += piece.size();
    }
    EXPECT_EQ(next, memory.span().data() + memory.span().size());
  }
  EXPECT_TRUE(device.pinned.empty());
}

TEST(HostMemory, PinsInOnePieceWhenItFits) {
  PinningDevice device;
  const HostMemory memory(3_MiB, &device);
  ASSERT_EQ(device.pinned.size(), 1u);
  EXPECT_EQ(device.pinned[0].size(), memory.span().size());
}

TEST(HostMemory, UnpinsAndUnmapsWhenAPieceFails) {
  said_by(4_KiB);
  const auto before = mapped_bytes();
  for (int fail_at = 0; fail_at < 4; ++fail_at) {
    PinningDevice device(fail_at);
    try {
      const HostMemory memory(8_MiB, &device, 2_MiB);
      FAIL() << "pinned although piece " << fail_at << " fails";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::device);
    }
    EXPECT_TRUE(device.pinned.empty());
  }
  EXPECT_LE(mapped_bytes(), before + (512_KiB).count);
}

}  // namespace
}  // namespace terrace
