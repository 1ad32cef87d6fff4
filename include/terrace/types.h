// Vocabulary: ids, byte counts, tiers, tensor classes and contents.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace terrace {

// A 32-bit index that cannot be mistaken for another kind of index.
template <class Tag>
struct Id {
  std::uint32_t value = 0;
  friend constexpr auto operator<=>(Id, Id) = default;
};

using LayerId = Id<struct LayerTag>;    // index into ModelSpec::layers
using StreamId = Id<struct StreamTag>;  // an in-order queue of a Device
using EventId = Id<struct EventTag>;    // a point in a stream's order
using FileId = Id<struct FileTag>;      // a file opened through an IoEngine

// A count of bytes. Arithmetic is on whole bytes; subtraction must not go below zero.
struct Bytes {
  std::uint64_t count = 0;

  friend constexpr auto operator<=>(Bytes, Bytes) = default;
  friend constexpr Bytes operator+(Bytes a, Bytes b) { return {a.count + b.count}; }
  friend constexpr Bytes operator-(Bytes a, Bytes b) { return {a.count - b.count}; }
  friend constexpr Bytes operator*(Bytes a, std::uint64_t n) { return {a.count * n}; }
  friend constexpr Bytes operator*(std::uint64_t n, Bytes a) { return {a.count * n}; }
  friend constexpr Bytes operator/(Bytes a, std::uint64_t n) { return {a.count / n}; }
  constexpr Bytes& operator+=(Bytes b) { return *this = *this + b; }
  constexpr Bytes& operator-=(Bytes b) { return *this = *this - b; }
};

inline namespace literals {
constexpr Bytes operator""_B(unsigned long long n) { return {n}; }
constexpr Bytes operator""_KiB(unsigned long long n) { return {n << 10}; }
constexpr Bytes operator""_MiB(unsigned long long n) { return {n << 20}; }
constexpr Bytes operator""_GiB(unsigned long long n) { return {n << 30}; }
constexpr Bytes operator""_TiB(unsigned long long n) { return {n << 40}; }
}  // namespace literals

// The smallest multiple of `alignment` (> 0) that is at least `value`.
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}
constexpr Bytes round_up(Bytes value, Bytes alignment) {
  return {round_up(value.count, alignment.count)};
}

// A contiguous byte range of one tier: [offset, offset + size).
struct Extent {
  Bytes offset;
  Bytes size;

  constexpr Bytes end() const { return offset + size; }
  constexpr bool overlaps(Extent other) const {
    return offset < other.end() && other.offset < end();
  }
  friend constexpr bool operator==(Extent, Extent) = default;
};

// Where bytes can live, fastest first.
enum class Tier : std::uint8_t { hbm, dram, nvme };
inline constexpr std::size_t kTierCount = 3;
inline constexpr Tier kTiers[] = {Tier::hbm, Tier::dram, Tier::nvme};

// What the bytes are; placement and memory reports are per class.
enum class TensorClass : std::uint8_t { parameter, gradient, optimizer_state, activation };
inline constexpr std::size_t kTensorClassCount = 4;

// Everything that moves or is reserved, finer than TensorClass: the optimizer's states one by one,
// and what a layer function needs on the device while it runs.
enum class Content : std::uint8_t {
  parameter,            // what the layer function reads (parameter dtype)
  gradient,             // what it writes in backward (gradient dtype)
  master_weight,        // fp32 copy that the optimizer updates
  momentum,             // Adam's first moment, fp32
  variance,             // Adam's second moment, fp32
  activation,           // a layer's input, saved from forward to backward
  activation_gradient,  // the loss's gradient with respect to a layer's input
  workspace,            // scratch of one layer function; holds nothing between uses
  gradient_sum,         // sums of squares of kGradientLeaf gradients each (double), for the norm
  accumulated_gradient, // the sum of a step's micro-batches (fp32 or gradient dtype)
};
inline constexpr std::size_t kContentCount = 10;
inline constexpr Content kOptimizerStates[] = {Content::master_weight, Content::momentum,
                                               Content::variance};
inline constexpr std::size_t kOptimizerStateCount = 3;

// The class that `content` is accounted under (activation gradients and workspace: activation).
constexpr TensorClass class_of(Content content) {
  switch (content) {
    case Content::parameter: return TensorClass::parameter;
    case Content::gradient:
    case Content::gradient_sum:
    case Content::accumulated_gradient: return TensorClass::gradient;
    case Content::master_weight:
    case Content::momentum:
    case Content::variance: return TensorClass::optimizer_state;
    default: return TensorClass::activation;
  }
}

// A lane is one resource that works in first-in first-out order.
enum class Lane : std::uint8_t {
  nvme_read,
  nvme_write,
  host_to_device,
  device_to_host,
  adam,
  compute,
  commit,  // makes what was written to NVMe durable
};
inline constexpr std::size_t kLaneCount = 7;
inline constexpr Lane kLanes[] = {Lane::nvme_read, Lane::nvme_write, Lane::host_to_device,
                                  Lane::device_to_host, Lane::adam, Lane::compute, Lane::commit};

// The names used in configuration, reports and JSON ("hbm", "master_weight", "nvme_read", ...).
std::string_view to_string(Tier tier);
std::string_view to_string(TensorClass tensor_class);
std::string_view to_string(Content content);
std::string_view to_string(Lane lane);

// "512 B", "1.50 MiB": binary units, for people.
std::string to_string(Bytes bytes);

// Reads "4096", "24GiB", "1.5 MiB", "200GB" (GB = 10^9). Throws Error(invalid_argument) naming the
// text when it is not a whole number of bytes, is negative or exceeds 2^63.
Bytes parse_bytes(std::string_view text);

}  // namespace terrace

template <class Tag>
struct std::hash<terrace::Id<Tag>> {
  std::size_t operator()(terrace::Id<Tag> id) const noexcept { return id.value; }
};
