// Any bytes are a commit record that would be written like this again, or refused with a reason. As
// they come, and with a right beginning and checksum before them.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "nvme/checksum.h"
#include "nvme/store_format.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::size_t kEnvelope = 24;
constexpr std::size_t kChecked = 16;

void check(std::span<const std::byte> bytes) {
  const auto decoded = decode_record(bytes);
  TERRACE_CHECK(decoded.record.has_value() == decoded.why_not.empty());
  if (!decoded.record) return;
  TERRACE_CHECK(!decoded.blank && decoded.record->table <= 1);
  TERRACE_CHECK(decoded.record->trainer.size() <= most_trainer_bytes());
  if (!decoded.trainer_problem.empty()) {
    TERRACE_CHECK(decoded.record->trainer.empty());
    return;
  }
  const auto again = decode_record(encode(*decoded.record));
  TERRACE_CHECK(again.record && again.trainer_problem.empty());
  TERRACE_CHECK(encode(*again.record) == encode(*decoded.record));
}

// The fields are the input's first bytes, the trainer's bytes the rest.
std::vector<std::byte> sealed(std::span<const std::byte> input) {
  static const auto model = encode(CommitRecord{});
  const auto fields = std::min<std::size_t>(input.size(), 80);
  const auto trainer = input.subspan(fields);
  std::vector<std::byte> bytes = model;
  std::memcpy(bytes.data() + kEnvelope, input.data(), fields);
  const std::uint64_t trainer_checksum = hash_bytes(trainer.data(), trainer.size());
  std::memcpy(bytes.data() + kEnvelope + 72, &trainer_checksum, sizeof trainer_checksum);
  const std::uint64_t checksum = hash_bytes(bytes.data() + kChecked, kEnvelope + 80 - kChecked);
  std::memcpy(bytes.data() + 8, &checksum, sizeof checksum);
  bytes.insert(bytes.end(), trainer.begin(), trainer.end());
  return bytes;
}

}  // namespace
}  // namespace terrace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace terrace;
  if (size == 0) return 0;
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  check(bytes);
  check(sealed(bytes));
  return 0;
}
