// The memory that a load writes from and reads into: data that no drive can compress and that says
// where it belongs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace terrace::bench {

inline constexpr std::uint64_t kPage = 4096;

// Two halves, one to write from and one to read into, each filled with random bytes. A page is
// stamped with its place before it is written, so that no two pages on the drive are alike and each
// proves, read back, that it is the one that was written there.
// Thread rule: one thread at a time.
class LoadMemory {
 public:
  // `bytes` of each half, rounded up to pages. The same seed gives the same bytes.
  LoadMemory(std::uint64_t bytes, std::uint64_t seed);
  ~LoadMemory();
  LoadMemory(const LoadMemory&) = delete;

  std::span<std::byte> whole() const { return {base_, 2 * bytes_}; }
  std::uint64_t bytes() const { return bytes_; }
  std::byte* source(std::uint64_t offset) const { return base_ + offset; }
  std::byte* target(std::uint64_t offset) const { return base_ + bytes_ + offset; }

  // Marks the pages of [offset, offset + bytes) of the source half as file bytes [place, ...).
  void stamp(std::uint64_t offset, std::uint64_t bytes, std::uint64_t place);
  // Why `data`, read from file offset `place`, is not what was written there; empty when it is.
  std::optional<std::string> check(std::span<const std::byte> data, std::uint64_t place) const;

 private:
  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::uint64_t seed_ = 0;
};

}  // namespace terrace::bench
