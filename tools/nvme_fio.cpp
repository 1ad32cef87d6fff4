#include "tools/nvme_fio.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "terrace/error.h"
#include "tools/child_process.h"

namespace terrace::cli {
namespace {

using bench::Pattern;

constexpr std::uint64_t kHugeSlack = std::uint64_t{4} << 20;  // fio rounds up
constexpr double kStartSeconds = 10;                          // to say its version

const char* mode_of(Pattern pattern) {
  switch (pattern) {
    case Pattern::read: return "read";
    case Pattern::overwrite: return "write";
    case Pattern::mix: return "rw";
    default: return "";
  }
}

// fio takes a colon for the end of a file's name.
std::string one_name(const std::string& path) {
  std::string name;
  for (const char c : path) {
    if (c == ':') name += '\\';
    name += c;
  }
  return name;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// Warnings may stand before the JSON.
FioRun parse(const std::string& output) {
  const auto begin = output.find('{');
  const auto report =
      nlohmann::json::parse(begin == std::string::npos ? output : output.substr(begin));
  const auto& job = report.at("jobs").at(0);
  FioRun run;
  double bytes = 0;
  double seconds = 0;
  for (const char* direction : {"read", "write"}) {
    bytes += job.at(direction).at("io_bytes").get<double>();
    seconds = std::max(seconds, job.at(direction).at("runtime").get<double>() * 1e-3);
  }
  if (bytes <= 0 || seconds <= 0) throw Error(ErrorCode::unavailable, "fio moved nothing");
  run.gb_s = bytes / seconds * 1e-9;
  const double cpu = (job.at("usr_cpu").get<double>() + job.at("sys_cpu").get<double>()) / 100;
  run.cpu_seconds_per_gb = cpu * seconds / (bytes * 1e-9);
  return run;
}

// What the kernel has reserved and nobody uses: fio cannot have transparent huge pages.
std::uint64_t free_huge_bytes() {
  std::ifstream file("/proc/meminfo");
  std::uint64_t pages = 0;
  std::uint64_t page_kib = 0;
  std::string name;
  for (std::uint64_t value = 0; file >> name >> value; file.ignore(256, '\n')) {
    if (name == "HugePages_Free:") pages = value;
    if (name == "Hugepagesize:") page_kib = value;
  }
  return pages * page_kib * 1024;
}

}  // namespace

Fio::Fio() : program_(find_program("fio")) {
  if (program_.empty()) {
    throw Error(ErrorCode::unavailable,
                "--fio needs fio, which is not in PATH: install it (apt-get install fio, dnf "
                "install fio) or leave --fio out");
  }
  const auto result = run_child({program_, "--version"}, from_seconds(kStartSeconds));
  version_ = first_line(result.output);
  if (result.status != 0 || result.timed_out) {
    throw Error(ErrorCode::unavailable, program_ +
                                            " --version failed: " + first_line(result.errors) +
                                            "; mend it or leave --fio out");
  }
}

bool Fio::can(Pattern pattern) { return *mode_of(pattern) != '\0'; }

bool Fio::huge_pages(const bench::Cell& cell) {
  return free_huge_bytes() >= cell.block_bytes * cell.depth + kHugeSlack;
}

std::vector<std::string> Fio::arguments(const bench::Cell& cell, const std::string& path,
                                        const FioPlace& place, double seconds) {
  std::vector<std::string> result{"fio",
                                  "--name=terrace",
                                  "--filename=" + one_name(path),
                                  "--rw=" + std::string(mode_of(cell.pattern)),
                                  fmt::format("--bs={}", cell.block_bytes),
                                  fmt::format("--iodepth={}", cell.depth),
                                  fmt::format("--offset={}", place.offset),
                                  fmt::format("--size={}", place.bytes),
                                  fmt::format("--runtime={}ms", static_cast<int>(seconds * 1000)),
                                  "--time_based",
                                  "--ioengine=io_uring",
                                  "--direct=1",
                                  "--fixedbufs=1",
                                  "--registerfiles=1",
                                  "--thread",  // as we do, and gone at once when killed
                                  "--invalidate=0",
                                  "--scramble_buffers=0",  // both write the same again
                                  "--allow_file_create=0",
                                  "--output-format=json"};
  if (huge_pages(cell)) result.emplace_back("--mem=shmhuge");
  if (cell.pattern == Pattern::mix) result.emplace_back("--rwmixread=50");
  return result;
}

FioRun Fio::run(const bench::Cell& cell, const std::string& path, const FioPlace& place,
                double seconds, Nanoseconds at_most) const {
  auto command = arguments(cell, path, place, seconds);
  command.front() = program_;
  const auto result = run_child(command, at_most);
  const auto failure = [&](const std::string& why) {
    return Error(ErrorCode::unavailable,
                 "fio failed (" + why +
                     "): " + first_line(result.errors.empty() ? result.output : result.errors) +
                     "; try " + command_text(command));
  };
  if (result.timed_out) {
    throw failure(
        fmt::format("no end of a run of {:.2f} s within {:.0f} s", seconds, to_seconds(at_most)));
  }
  if (result.status != 0) throw failure("exit status " + std::to_string(result.status));
  try {
    return parse(result.output);
  } catch (const nlohmann::json::exception&) {
    throw failure("its report could not be read");
  }
}

FioPlace FioPlace::of_pair(std::size_t pair, std::uint64_t file_bytes, std::uint64_t block_bytes) {
  constexpr std::size_t kSteps = 7;  // 3 and 7 have no common factor: all steps are visited
  const auto blocks = file_bytes / block_bytes;
  const auto half = std::max<std::uint64_t>(blocks / 2, 1);
  const auto first = (blocks - half) * (pair * 3 % kSteps) / kSteps;
  return {first * block_bytes, half * block_bytes};
}

std::string command_text(const std::vector<std::string>& arguments) {
  std::string text;
  for (const auto& argument : arguments) {
    const bool plain =
        !argument.empty() && argument.find_first_of(" \t'\"$\\;&|<>()*?`") == std::string::npos;
    std::string quoted;
    for (const char c : argument) quoted += c == '\'' ? "'\\''" : std::string(1, c);
    text += (text.empty() ? "" : " ") + (plain ? argument : "'" + quoted + "'");
  }
  return text;
}

}  // namespace terrace::cli
