// The trace file: valid JSON whatever the names are, exact times, one named row per lane.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "terrace/error.h"
#include "terrace/trace.h"

namespace terrace {
namespace {

using nlohmann::json;

class TraceWriterTest : public testing::Test {
 protected:
  ~TraceWriterTest() override { std::filesystem::remove(path_); }

  json written(const std::vector<TraceSpan>& spans) const {
    {
      const auto writer = make_trace_writer(path_);
      for (const auto& span : spans) writer->span(span);
    }
    std::ifstream file(path_);
    return json::parse(file);
  }

  static std::vector<json> complete_events(const json& trace) {
    std::vector<json> events;
    for (const auto& event : trace) {
      if (event.at("ph") == "X") events.push_back(event);
    }
    return events;
  }

  const std::string path_ = testing::TempDir() + "terrace_trace_" + std::to_string(::getpid()) +
                            ".json";
};

TEST_F(TraceWriterTest, TellsThatItCouldNotWrite) {
  const auto writer = make_trace_writer("/dev/full");
  for (int i = 0; i < 1000; ++i) writer->span({Lane::adam, "update", {}, {}, 1, 1});
  const auto said = writer->flush();
  EXPECT_NE(said.find("/dev/full failed: No space left"), std::string::npos) << said;
}

TEST_F(TraceWriterTest, EmptyTraceNamesEveryLane) {
  std::map<int, std::string> rows;
  for (const auto& event : written({})) {
    EXPECT_EQ(event.at("ph"), "M");
    EXPECT_EQ(event.at("name"), "thread_name");
    EXPECT_EQ(event.at("pid"), 1);
    rows[event.at("tid").get<int>()] = event.at("args").at("name").get<std::string>();
  }
  EXPECT_EQ(rows.size(), kLaneCount);
  std::size_t found = 0;
  for (const Lane lane : kLanes) {
    for (const auto& [row, name] : rows) found += name == to_string(lane) ? 1 : 0;
  }
  EXPECT_EQ(found, kLaneCount);
}

TEST_F(TraceWriterTest, SpansKeepLaneTimesStepAndBytes) {
  const Nanoseconds start{123456789};
  const auto events = complete_events(written(
      {{Lane::adam, "update", start, start + Nanoseconds{1500}, 28, 3},
       {Lane::compute, "forward", start + Nanoseconds{2001}, start + Nanoseconds{2001}, 0, 4}}));
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].at("name"), "update");
  EXPECT_DOUBLE_EQ(events[0].at("ts").get<double>(), 0);
  EXPECT_DOUBLE_EQ(events[0].at("dur").get<double>(), 1.5);
  EXPECT_EQ(events[0].at("args"), json({{"step", 3}, {"bytes", 28}}));
  EXPECT_DOUBLE_EQ(events[1].at("ts").get<double>(), 2.001);
  EXPECT_DOUBLE_EQ(events[1].at("dur").get<double>(), 0);
  EXPECT_NE(events[0].at("tid"), events[1].at("tid"));
}

TEST_F(TraceWriterTest, ASpanThatStartedBeforeTheFirstOneIsNegative) {
  const auto events = complete_events(
      written({{Lane::adam, "late", Nanoseconds{5000}, Nanoseconds{6000}, 0, 1},
               {Lane::adam, "early", Nanoseconds{3500}, Nanoseconds{4000}, 0, 1}}));
  EXPECT_DOUBLE_EQ(events.at(1).at("ts").get<double>(), -1.5);
}

TEST_F(TraceWriterTest, LongTimesKeepTheirNanoseconds) {
  const Nanoseconds start{0};
  static_cast<void>(written({{Lane::adam, "a", start, start, 0, 1},
                             {Lane::adam, "b", Nanoseconds{9'007'199'254'740'993}, start, 0, 1}}));
  std::ifstream file(path_);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  EXPECT_NE(text.find("\"ts\":9007199254740.993"), std::string::npos);
}

TEST_F(TraceWriterTest, NamesAreEscaped) {
  const std::string odd = std::string("quote \" backslash \\ tab \t line \n nul ") + '\0' + " end";
  const std::string accents = "Gr\xC3\xBC\xC3\x9F \xE2\x82\xAC \xF0\x9F\x99\x82";
  const auto events = complete_events(
      written({{Lane::adam, odd, {}, {}, 0, 1}, {Lane::adam, accents, {}, {}, 0, 1}}));
  EXPECT_EQ(events.at(0).at("name"), odd);
  EXPECT_EQ(events.at(1).at("name"), accents);
}

TEST_F(TraceWriterTest, BytesThatAreNoUtf8AreReplaced) {
  const std::string replacement = "\xEF\xBF\xBD";
  const std::map<std::string, std::string> cases{
      {"a\xFFz", "a" + replacement + "z"},
      {"cut \xE2\x82", "cut " + replacement + replacement},
      {"\xC0\xAF", replacement + replacement},                              // overlong
      {"\xED\xA0\x80", replacement + replacement + replacement},            // surrogate
      {"\xF4\x90\x80\x80", replacement + replacement + replacement + replacement},
  };
  for (const auto& [name, expected] : cases) {
    const auto events = complete_events(written({{Lane::adam, name, {}, {}, 0, 1}}));
    EXPECT_EQ(events.at(0).at("name"), expected);
  }
}

TEST_F(TraceWriterTest, ManySpansStayOneDocument) {
  std::vector<TraceSpan> spans(10'000, {Lane::nvme_read, "read", {}, Nanoseconds{1}, 4096, 1});
  EXPECT_EQ(complete_events(written(spans)).size(), spans.size());
}

TEST_F(TraceWriterTest, ADirectoryThatIsNotThereIsNamed) {
  try {
    static_cast<void>(make_trace_writer("/nowhere/at/all/trace.json"));
    FAIL() << "created";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_NE(std::string(error.what()).find("/nowhere/at/all/trace.json"), std::string::npos);
  }
}

}  // namespace
}  // namespace terrace
