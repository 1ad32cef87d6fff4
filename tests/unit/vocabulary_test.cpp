// The small words that everything else is written in: sizes, names, models, time.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "terrace/clock.h"
#include "terrace/dtype.h"
#include "terrace/error.h"
#include "terrace/io_engine.h"
#include "terrace/model.h"
#include "terrace/pacer.h"
#include "terrace/types.h"

namespace terrace {
namespace {

// What `call` is refused with; "" when it is not.
template <class Call>
std::string refusal(Call call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Bytes, ParsesSizes) {
  const std::pair<const char*, Bytes> cases[] = {
      {"0", 0_B},           {"4096", 4_KiB},          {"512 B", 512_B},
      {"24GiB", 24_GiB},    {"1.5 MiB", 1536_KiB},    {"200GB", {200'000'000'000}},
      {"3K", 3_KiB},        {"7M", 7_MiB},            {"2G", 2_GiB},
      {"1T", 1_TiB},        {"1TiB", 1_TiB},          {"5kB", {5'000}},
      {"5KB", {5'000}},     {"6MB", {6'000'000}},     {"8TB", {8'000'000'000'000}},
      {"9007199254740993", {9007199254740993}}, {"1.001kB", {1001}},
      {"0.5KiB", 512_B},    {"0.25 GiB", 256_MiB},    {"1PB", {1'000'000'000'000'000}},
  };
  for (const auto& [text, bytes] : cases) EXPECT_EQ(parse_bytes(text), bytes) << text;
}

TEST(Bytes, RefusesWhatIsNoSizeAndNamesIt) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "does not begin with a number"}, {"GiB", "does not begin with a number"},
      {"-1", "negative"},                   {"-2GiB", "negative"},
      {"1.5", "not a whole number"},        {"0.3KiB", "not a whole number"},
      {"5 parsecs", "'parsecs' is unknown"}, {"4096x", "'x' is unknown"},
      {"1 GiB 2", "is unknown"},            {"9223372036854775808", "2^63"},
      {"8388608 TiB", "2^63"},              {"inf", "number"},
      {"1e400", ""},                        {"nan", "number"},
      {"9223372036854775807KiB", "2^63"},   {"--5", ""},
  };
  for (const auto& [text, why] : cases) {
    const auto said = refusal([&, t = text] { parse_bytes(t); });
    EXPECT_TRUE(contains(said, std::string(1, '\'').append(text) + "'")) << text << ": " << said;
    EXPECT_TRUE(contains(said, why)) << text << ": " << said;
  }
}

TEST(Bytes, AreWrittenForPeople) {
  EXPECT_EQ(to_string(0_B), "0 B");
  EXPECT_EQ(to_string(1023_B), "1023 B");
  EXPECT_EQ(to_string(1_KiB), "1.00 KiB");
  EXPECT_EQ(to_string(1536_KiB), "1.50 MiB");
  EXPECT_EQ(to_string(141_GiB), "141.00 GiB");
  EXPECT_EQ(to_string(3_TiB), "3.00 TiB");
  EXPECT_EQ(to_string(Bytes{std::numeric_limits<std::uint64_t>::max()}), "16.00 EiB");
}

TEST(Bytes, WhatIsWrittenIsReadBack) {
  for (const Bytes size : {0_B, 1_B, 1023_B, 1_KiB, 1536_KiB, 24_GiB, 3_TiB}) {
    EXPECT_EQ(parse_bytes(to_string(size)), size);
  }
}

TEST(Bytes, RoundUp) {
  EXPECT_EQ(round_up(0_B, 4_KiB), 0_B);
  EXPECT_EQ(round_up(1_B, 4_KiB), 4_KiB);
  EXPECT_EQ(round_up(4_KiB, 4_KiB), 4_KiB);
  EXPECT_EQ(round_up(4097_B, 4_KiB), 8_KiB);
}

TEST(Extents, OverlapOnlyWhereTheyShareAByte) {
  const Extent extent{4_KiB, 4_KiB};
  EXPECT_TRUE(extent.overlaps(extent));
  EXPECT_TRUE(extent.overlaps({0_B, 4097_B}));
  EXPECT_FALSE(extent.overlaps({0_B, 4_KiB}));
  EXPECT_FALSE(extent.overlaps({8_KiB, 4_KiB}));
}

// Every value has a name of its own.
TEST(Names, AreDistinct) {
  std::multiset<std::string_view> names;
  for (const auto tier : kTiers) names.insert(to_string(tier));
  EXPECT_EQ(names, (std::multiset<std::string_view>{"hbm", "dram", "nvme"}));
  std::set<std::string_view> contents;
  for (std::size_t i = 0; i < kContentCount; ++i) {
    contents.insert(to_string(static_cast<Content>(i)));
  }
  EXPECT_EQ(contents.size(), kContentCount);
  std::set<std::string_view> lanes;
  for (const auto lane : kLanes) lanes.insert(to_string(lane));
  EXPECT_EQ(lanes.size(), kLaneCount);
  std::set<std::string_view> classes;
  for (std::size_t i = 0; i < kTensorClassCount; ++i) {
    classes.insert(to_string(static_cast<TensorClass>(i)));
  }
  EXPECT_EQ(classes.size(), kTensorClassCount);
  EXPECT_EQ(to_string(ErrorCode::out_of_budget), "out_of_budget");
}

TEST(Names, AreReadBack) {
  for (const auto dtype : {DType::fp32, DType::bf16, DType::fp16}) {
    EXPECT_EQ(parse_dtype(to_string(dtype)), dtype);
  }
  EXPECT_EQ(parse_io_engine("io_uring"), IoEngineKind::io_uring);
  const auto said = refusal([] { parse_dtype("fp7"); });
  EXPECT_TRUE(contains(said, "'fp7'") && contains(said, "fp32, bf16, fp16")) << said;
}

LayerSpec layer(std::string name, std::vector<TensorSpec> tensors) {
  LayerSpec result;
  result.name = std::move(name);
  result.tensors = std::move(tensors);
  return result;
}

ModelSpec model(std::vector<LayerSpec> layers) {
  ModelSpec result;
  result.layers = std::move(layers);
  return result;
}

TEST(Model, AcceptsScalarsEmptyTensorsAndLayersWithoutAny) {
  const auto spec = model({layer("first", {{"a", {}}, {"b", {0, 7}}, {"c", {3, 5}}}),
                           layer("second", {})});
  EXPECT_NO_THROW(validate(spec));
  EXPECT_EQ(parameter_count(spec), 16u);
}

TEST(Model, RefusesWhatIsAmbiguousAndNamesIt) {
  const std::pair<ModelSpec, const char*> cases[] = {
      {model({}), "no layers"},
      {model({layer("", {})}), "no name"},
      {model({layer("twin", {}), layer("twin", {})}), "'twin'"},
      {model({layer("a", {{"", {1}}})}), "'a'"},
      {model({layer("a", {{"w", {1}}, {"w", {2}}})}), "'w'"},
      {model({layer("a", {{"w", {1}}}), layer("b", {{"w", {2}}})}), "'w'"},
      {model({layer("a", {{"huge", {1ull << 32, 1ull << 32}}})}), "'huge'"},
      {model({layer("a", {{"huge", {1ull << 40, 1ull << 11}}})}), "'huge'"},
  };
  for (const auto& [spec, part] : cases) {
    const auto said = refusal([&, &checked = spec] { validate(checked); });
    EXPECT_TRUE(contains(said, part)) << said;
  }
}

TEST(Throttle, TakesLatencyAndBytes) {
  EXPECT_FALSE(Throttle{}.active());
  EXPECT_EQ(Throttle{}.seconds(1 << 30), 0.0);
  constexpr Throttle both{.gb_s = 2, .latency_us = 100};
  EXPECT_TRUE(both.active());
  EXPECT_DOUBLE_EQ(both.seconds(1'000'000), 600e-6);
  constexpr Throttle latency{.gb_s = 0, .latency_us = 5};
  EXPECT_TRUE(latency.active());
  EXPECT_DOUBLE_EQ(latency.seconds(1'000'000'000), 5e-6);
}

TEST(Pacer, WithoutThrottleEndsAtOnce) {
  Pacer pacer{Throttle{}};
  EXPECT_FALSE(pacer.active());
  const auto slot = pacer.reserve(Nanoseconds{50}, 1 << 30);
  EXPECT_EQ(slot.start, Nanoseconds{50});
  EXPECT_EQ(slot.end, Nanoseconds{50});
}

// 1 GB/s: a byte takes a nanosecond.
TEST(Pacer, ServesOneAfterTheOther) {
  Pacer pacer{{.gb_s = 1, .latency_us = 0}};
  const auto first = pacer.reserve(Nanoseconds{100}, 1000);
  EXPECT_EQ(first.start, Nanoseconds{100});
  EXPECT_EQ(first.end, Nanoseconds{1100});
  const auto queued = pacer.reserve(Nanoseconds{100}, 500);  // asked for at the same time
  EXPECT_EQ(queued.start, Nanoseconds{1100});
  EXPECT_EQ(queued.end, Nanoseconds{1600});
  const auto after_idling = pacer.reserve(Nanoseconds{5000}, 10);  // idle time is not saved up
  EXPECT_EQ(after_idling.start, Nanoseconds{5000});
  EXPECT_EQ(after_idling.end, Nanoseconds{5010});
}

// Asked for early enough, n operations take n times one, however late each was noticed.
TEST(Pacer, AveragesExactly) {
  constexpr Throttle throttle{.gb_s = 3.3, .latency_us = 7};
  constexpr std::uint64_t kOperations = 10'000;
  constexpr std::uint64_t kBytes = 123'457;
  Pacer pacer{throttle};
  Nanoseconds end{0};
  for (std::uint64_t i = 0; i < kOperations; ++i) {
    const auto slot = pacer.reserve(Nanoseconds{0}, kBytes);
    EXPECT_EQ(slot.start, end);
    end = slot.end;
  }
  const double exact = throttle.seconds(kBytes) * static_cast<double>(kOperations);
  EXPECT_LE(to_seconds(end), exact);
  EXPECT_GE(to_seconds(end), exact - kOperations * 1e-9);  // each is rounded down to a nanosecond
}

TEST(SteadyClock, SleepsLongEnoughAndNeverGoesBack) {
  auto& clock = steady_clock();
  const auto begin = clock.now();
  clock.sleep_until(begin - Nanoseconds{1'000'000'000});
  clock.sleep_until(begin + Nanoseconds{200'000});
  EXPECT_GE(clock.now(), begin + Nanoseconds{200'000});
}

}  // namespace
}  // namespace terrace
