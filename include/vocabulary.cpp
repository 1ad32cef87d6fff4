// The few functions behind the public vocabulary: names, sizes in text, checks, the real clock.
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <set>
#include <thread>

#include "terrace/clock.h"
#include "terrace/dtype.h"
#include "terrace/error.h"
#include "terrace/io_engine.h"
#include "terrace/model.h"
#include "terrace/types.h"

namespace terrace {
namespace {

template <std::size_t N, class Enum>
std::string_view name_of(const std::array<std::string_view, N>& names, Enum value) {
  const auto index = static_cast<std::size_t>(value);
  TERRACE_CHECK(index < N);
  return names[index];
}

constexpr std::array<std::string_view, 4> kEngineNames{"auto", "io_uring", "threads", "memory"};
constexpr std::array<std::string_view, 3> kDTypeNames{"fp32", "bf16", "fp16"};

template <class Enum, std::size_t N>
Enum parse_name(const std::array<std::string_view, N>& names, std::string_view text,
                const char* what) {
  std::string known;
  for (std::size_t i = 0; i < N; ++i) {
    if (names[i] == text) return static_cast<Enum>(i);
    known += (i == 0 ? "" : ", ") + std::string(names[i]);
  }
  throw Error(ErrorCode::invalid_argument,
              "'" + std::string(text) + "' is no " + what + "; it is one of " + known);
}

// The factor of a unit suffix, or 0.
double unit_factor(std::string_view unit) {
  struct Unit {
    std::string_view name;
    double factor;
  };
  static constexpr Unit kUnits[] = {
      {"", 1},           {"B", 1},           {"KiB", 0x1p10},    {"MiB", 0x1p20}, {"GiB", 0x1p30},
      {"TiB", 0x1p40},   {"PiB", 0x1p50},    {"K", 0x1p10},      {"M", 0x1p20},   {"G", 0x1p30},
      {"T", 0x1p40},     {"KB", 1e3},        {"kB", 1e3},        {"MB", 1e6},     {"GB", 1e9},
      {"TB", 1e12},      {"PB", 1e15},
  };
  for (const auto& known : kUnits) {
    if (known.name == unit) return known.factor;
  }
  return 0;
}

class SteadyClock final : public Clock {
 public:
  Nanoseconds now() const override {
    return std::chrono::duration_cast<Nanoseconds>(
        std::chrono::steady_clock::now().time_since_epoch());
  }
  void sleep_until(Nanoseconds deadline) override {
    std::this_thread::sleep_until(std::chrono::steady_clock::time_point(deadline));
  }
};

}  // namespace

std::string_view to_string(Tier tier) {
  return name_of(std::array<std::string_view, 3>{"hbm", "dram", "nvme"}, tier);
}

std::string_view to_string(TensorClass tensor_class) {
  return name_of(std::array<std::string_view, 4>{"parameter", "gradient", "optimizer_state",
                                                 "activation"},
                 tensor_class);
}

std::string_view to_string(Content content) {
  return name_of(std::array<std::string_view, kContentCount>{
                     "parameter", "gradient", "master_weight", "momentum", "variance", "activation",
                     "activation_gradient", "workspace", "gradient_sum", "accumulated_gradient"},
                 content);
}

std::string_view to_string(Lane lane) {
  return name_of(std::array<std::string_view, kLaneCount>{"nvme_read", "nvme_write",
                                                          "host_to_device", "device_to_host",
                                                          "adam", "compute", "commit"},
                 lane);
}

std::string_view to_string(DType dtype) { return name_of(kDTypeNames, dtype); }
DType parse_dtype(std::string_view text) {
  return parse_name<DType>(kDTypeNames, text, "element type");
}

std::string_view to_string(IoEngineKind kind) { return name_of(kEngineNames, kind); }
IoEngineKind parse_io_engine(std::string_view text) {
  return parse_name<IoEngineKind>(kEngineNames, text, "I/O engine");
}

std::string_view to_string(ErrorCode code) {
  return name_of(std::array<std::string_view, 8>{"invalid_argument", "unavailable", "out_of_budget",
                                                 "io", "device", "communication", "corrupt",
                                                 "cancelled"},
                 code);
}

std::string to_string(Bytes bytes) {
  static constexpr const char* kNames[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  auto value = static_cast<double>(bytes.count);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kNames)) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.2f %s", value, kNames[unit]);
  return text.data();
}

Bytes parse_bytes(std::string_view text) {
  const auto refuse = [&](const std::string& why) {
    return Error(ErrorCode::invalid_argument, "'" + std::string(text) + "' is no size: " + why +
                                                  "; write for example 4096, 512MiB or 1.5GiB");
  };
  const auto digits = text.find_first_not_of("0123456789.-+eE");
  const auto number = text.substr(0, digits);
  std::string_view unit = digits == std::string_view::npos ? "" : text.substr(digits);
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  if (number.empty()) throw refuse("it does not begin with a number");
  const double factor = unit_factor(unit);
  if (factor == 0) throw refuse("the unit '" + std::string(unit) + "' is unknown");
  const char* last = number.data() + number.size();
  std::uint64_t whole = 0;
  const auto integer = std::from_chars(number.data(), last, whole);
  if (integer.ec == std::errc{} && integer.ptr == last) {  // exact up to the last byte
    const auto scale = static_cast<std::uint64_t>(factor);
    if (whole >= (std::uint64_t{1} << 63) / scale) throw refuse("it is 2^63 bytes or more");
    return {whole * scale};
  }
  double value = 0;
  const auto decimal = std::from_chars(number.data(), last, value);
  if (decimal.ec != std::errc{} || decimal.ptr != last) throw refuse("the number cannot be read");
  const double bytes = value * factor;
  if (!(bytes >= 0)) throw refuse("it is negative");
  if (!(bytes < 0x1p63)) throw refuse("it is 2^63 bytes or more");
  // Decimal fractions of a unit are not exact in binary: what is meant is the nearest byte.
  const double nearest = std::round(bytes);
  if (std::abs(bytes - nearest) > 1e-6 * factor) throw refuse("it is not a whole number of bytes");
  return {static_cast<std::uint64_t>(nearest)};
}

Clock& steady_clock() {
  static SteadyClock clock;
  return clock;
}

void validate(const ModelSpec& model) {
  const auto refuse = [](const std::string& message) {
    return Error(ErrorCode::invalid_argument, message);
  };
  if (model.layers.empty()) throw refuse("the model has no layers");
  std::set<std::string_view> layer_names;
  std::set<std::string_view> tensor_names;
  for (const auto& layer : model.layers) {
    if (layer.name.empty()) throw refuse("a layer has no name");
    if (!layer_names.insert(layer.name).second) {
      throw refuse("two layers are named '" + layer.name + "'; names must be unique");
    }
    for (const auto& tensor : layer.tensors) {
      if (tensor.name.empty()) throw refuse("a tensor of layer '" + layer.name + "' has no name");
      if (!tensor_names.insert(tensor.name).second) {
        throw refuse("two tensors are named '" + tensor.name + "'; names must be unique");
      }
      long double product = 1;
      for (const auto dimension : tensor.shape) product *= static_cast<long double>(dimension);
      if (product > 0x1p50L) {
        throw refuse("tensor '" + tensor.name + "' has more than 2^50 elements");
      }
    }
  }
}

std::uint64_t parameter_count(const ModelSpec& model) {
  std::uint64_t count = 0;
  for (const auto& layer : model.layers) {
    for (const auto& tensor : layer.tensors) count += tensor.elements();
  }
  return count;
}

namespace internal {

void check_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "terrace: check failed at %s:%d: %s\n", file, line, condition);
  std::abort();
}

}  // namespace internal
}  // namespace terrace
