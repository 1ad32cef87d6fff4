#include "nvme/load_memory.h"

#include <sys/mman.h>

#include <cstring>

#include "terrace/error.h"
#include "terrace/types.h"

namespace terrace::bench {
namespace {

struct Stamp {
  std::uint64_t seed;
  std::uint64_t place;  // in the file
  std::uint64_t page;   // of the source half whose other bytes were written
};

std::uint64_t mix(std::uint64_t value) {  // splitmix64's finalizer
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31);
}

}  // namespace

LoadMemory::LoadMemory(std::uint64_t bytes, std::uint64_t seed)
    : bytes_(round_up(bytes, kPage)), seed_(mix(seed + 1)) {
  void* memory =
      ::mmap(nullptr, 2 * bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(ErrorCode::unavailable, "there is no memory for the bench's buffers (" +
                                            to_string(Bytes{2 * bytes_}) +
                                            "); free some");
  }
  base_ = static_cast<std::byte*>(memory);
  // Both only make things faster; a refusal changes nothing.
  ::madvise(base_, 2 * bytes_, MADV_HUGEPAGE);
  ::madvise(base_, 2 * bytes_, MADV_DONTFORK);
  std::uint64_t state = seed_;
  for (std::uint64_t i = 0; i < bytes_; i += sizeof state) {
    state += 0x9e3779b97f4a7c15U;
    const auto word = mix(state);
    std::memcpy(base_ + i, &word, sizeof word);
  }
  std::memset(base_ + bytes_, 0, bytes_);  // touched now, not while something is measured
}

LoadMemory::~LoadMemory() { ::munmap(base_, 2 * bytes_); }

void LoadMemory::stamp(std::uint64_t offset, std::uint64_t bytes, std::uint64_t place) {
  for (std::uint64_t done = 0; done < bytes; done += kPage) {
    const Stamp stamp{seed_, place + done, (offset + done) / kPage};
    std::memcpy(base_ + offset + done, &stamp, sizeof stamp);
  }
}

std::optional<std::string> LoadMemory::check(std::span<const std::byte> data,
                                             std::uint64_t place) const {
  for (std::uint64_t done = 0; done + kPage <= data.size(); done += kPage) {
    Stamp stamp{};
    std::memcpy(&stamp, data.data() + done, sizeof stamp);
    const auto where = "offset " + std::to_string(place + done);
    if (stamp.seed != seed_) return where + " does not hold this run's data";
    if (stamp.place != place + done) {
      return where + " holds what was written to offset " + std::to_string(stamp.place);
    }
    if (stamp.page >= bytes_ / kPage) return where + " has a broken stamp";
    const auto* body = data.data() + done + sizeof stamp;
    const auto* wanted = base_ + stamp.page * kPage + sizeof stamp;
    if (std::memcmp(body, wanted, kPage - sizeof stamp) != 0) return where + " has other bytes";
  }
  return std::nullopt;
}

}  // namespace terrace::bench
