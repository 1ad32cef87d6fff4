#include "tools/nvme_result.h"

#include <gtest/gtest.h>

#include <cmath>

#include "terrace/config.h"
#include "terrace/error.h"
#include "tools/nvme_bench.h"
#include "tools/nvme_diff.h"
#include "tools/nvme_html.h"
#include "tools/nvme_json.h"
#include "tools/nvme_text.h"
#include "tools/nvme_tune.h"

namespace terrace::cli {
namespace {

using bench::Pattern;

CellResult cell(Pattern pattern, std::vector<double> gb_s) {
  auto result = CellResult::of({pattern, 1 << 20, 8, 1});
  result.gb_s = std::move(gb_s);
  return result;
}

std::vector<double> around(double gb_s, double noise) {
  return {gb_s * (1 - noise),     gb_s * (1 - noise / 2), gb_s, gb_s, gb_s, gb_s,
          gb_s * (1 + noise / 2), gb_s * (1 + noise)};
}

// A drive of 2 GB/s in every direction.
BenchResult measured(double noise) {
  DriveResult drive;
  drive.directory = ".";
  drive.measured = true;
  drive.knee.found = true;
  drive.knee.block_bytes = 1 << 19;
  drive.knee.depth = 16;
  drive.facts.free = Bytes{std::uint64_t{1} << 40};
  for (const auto pattern : {Pattern::read, Pattern::overwrite, Pattern::optimizer_step}) {
    drive.cells.push_back(cell(pattern, around(2.0, noise)));
  }
  BenchResult result;
  result.drives.push_back(std::move(drive));
  return result;
}

BenchOptions asking(double compute_seconds) {
  BenchOptions options;
  options.directories = {"."};
  options.model = "1B";
  options.compute_seconds = compute_seconds;
  return options;
}

int code(BenchResult result, const BenchOptions& options) {
  result.compute_seconds = options.compute_seconds;
  add_verdict(options, result);
  return exit_code(result);
}

// 1B: 4 GB of parameters, 26 GB for the optimizer, at 2 GB/s: 15 s.
TEST(ExitCode, SaysWhetherItHides) {
  EXPECT_EQ(code(measured(0.01), asking(16)), 0);
  EXPECT_EQ(code(measured(0.01), asking(14)), 1);
  EXPECT_EQ(code(measured(0.5), asking(1000)), 0) << "noise does not matter far from the limit";
  EXPECT_EQ(code(measured(0.5), asking(1)), 1);
}

TEST(ExitCode, SaysWhenItCannotTell) {
  EXPECT_EQ(code(measured(0.5), asking(15.1)), 2);
  auto failed = measured(0.01);
  failed.drives.front().measured = false;
  EXPECT_EQ(code(failed, asking(16)), 2);
  EXPECT_EQ(code({}, asking(16)), 2);
  auto both = asking(15.1);
  both.model = "1B,70B";
  EXPECT_EQ(code(measured(0.5), both), 1) << "one surely does not";
  auto interrupted = measured(0.01);
  interrupted.interrupted = true;
  EXPECT_EQ(code(interrupted, asking(16)), 130);
}

// Without a question about compute, the setting is the answer.
TEST(ExitCode, WithoutASettingIsNotMeasured) {
  auto options = asking(1);
  options.compute_seconds.reset();
  EXPECT_EQ(code(measured(0.01), options), 0);
  auto noisy = measured(0.01);
  noisy.drives.front().knee = {};
  EXPECT_EQ(code(noisy, options), 2);
  EXPECT_EQ(code(noisy, asking(16)), 0);
}

TEST(Verdict, TooNoisyIsSaidEverywhere) {
  const auto options = asking(15.1);
  auto result = measured(0.5);
  result.compute_seconds = options.compute_seconds;
  add_verdict(options, result);
  ASSERT_EQ(result.verdicts.size(), 1U);
  EXPECT_TRUE(result.verdicts.front().too_noisy);
  EXPECT_NE(result_text(result, {}).find("too noisy to tell whether it hides"), std::string::npos);
  const auto json = to_json(result);
  EXPECT_TRUE(json.at("verdict").at(0).at("hides").is_null());
  EXPECT_TRUE(json.at("verdict").at(0).at("too_noisy"));
  const auto page = html_report(result, json.dump());
  EXPECT_NE(page.find("too noisy to tell whether it hides"), std::string::npos);
}

void expect_mistake(const BenchOptions& options, const std::string& words) {
  try {
    effort_of(options);
    FAIL() << "accepted; wanted: " << words;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

TEST(Effort, RefusesWhatMakesNoSense) {
  BenchOptions options;
  options.seconds = std::nan("");
  expect_mistake(options, "5 to 86400");
  options.seconds = 4.9;
  expect_mistake(options, "5 to 86400");
  options = asking(std::nan(""));
  expect_mistake(options, "--compute");
  expect_mistake(asking(0), "--compute");
  expect_mistake(asking(std::numeric_limits<double>::infinity()), "--compute");
  options = {};
  options.rated_terabytes = -1;
  expect_mistake(options, "--tbw");
  options = {};
  options.file_size = "1MiB";
  expect_mistake(options, "64.00 MiB");
  options = {};
  options.write_limit = "1MiB";
  expect_mistake(options, "256.00 MiB");
  options = {};
  options.quick = options.thorough = true;
  expect_mistake(options, "contradict");
}

TEST(Effort, KeepsToItsLimits) {
  BenchOptions options;
  EXPECT_EQ(effort_of(options).seconds, 60);
  options.quick = true;
  EXPECT_EQ(effort_of(options).seconds, 15);
  options.write_limit = "1GiB";
  EXPECT_EQ(effort_of(options).file, 256_MiB) << "several times over the file";
  options.seconds = 7;
  EXPECT_EQ(effort_of(options).seconds, 7);
  EXPECT_EQ(effort_of(options).fio_seconds, 7);
  options.directories = {"a", "b", "c"};
  EXPECT_GE(effort_of(options).slice, std::chrono::milliseconds(20));
}

// What tune writes is what the runtime reads.
TEST(Tune, WritesWhatLoadsBack) {
  const auto config = parse_config(tuned_config(measured(0.01)), "tuned");
  EXPECT_EQ(config.io.block, 512_KiB);
  EXPECT_EQ(config.io.queue_depth, 16U);
  EXPECT_EQ(config.io.threads, 16U);
  ASSERT_EQ(config.nvme.size(), 1U);
  EXPECT_EQ(config.nvme.front().read_gb_s, 2.0);
  EXPECT_EQ(config.nvme.front().write_gb_s, 2.0);
  const auto aio = nlohmann::json::parse(deepspeed_config(measured(0.01))).at("aio");
  EXPECT_EQ(aio.at("block_size"), 512 * 1024);
  EXPECT_EQ(aio.at("queue_depth"), 16);
  EXPECT_EQ(aio.at("intra_op_parallelism"), 1);
  EXPECT_EQ(parse_config(deepspeed_config(measured(0.01)), "theirs").io.queue_depth, 16U);
  auto noisy = measured(0.01);
  noisy.drives.front().knee = {};
  noisy.drives.front().knee.why_not = "too noisy: so it is";
  EXPECT_THROW(tuned_config(noisy), Error);
}

nlohmann::json with_speed(double gb_s) {
  auto result = measured(0.02);
  for (auto& each : result.drives.front().cells) each.gb_s = around(gb_s, 0.02);
  return to_json(result);
}

TEST(Diff, SaysWhatChangedBeyondTheNoise) {
  EXPECT_FALSE(diff_benches(with_speed(2), with_speed(2)).changed);
  EXPECT_FALSE(diff_benches(with_speed(2), with_speed(2.05)).changed) << "runs differ by so much";
  const auto diff = diff_benches(with_speed(2), with_speed(1));
  EXPECT_TRUE(diff.changed);
  ASSERT_EQ(diff.cells.size(), 3U);
  EXPECT_NE(diff_text(diff).find("-50.0 %"), std::string::npos) << diff_text(diff);
  EXPECT_THROW(diff_benches(nlohmann::json::object(), with_speed(1)), Error);
}

}  // namespace
}  // namespace terrace::cli
