// terrace nvme: what a drive can do for training.
#include <fmt/core.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include "terrace/error.h"
#include "tools/commands.h"
#include "tools/nvme_bench.h"
#include "tools/nvme_diff.h"
#include "tools/nvme_html.h"
#include "tools/nvme_json.h"
#include "tools/nvme_text.h"
#include "tools/nvme_tune.h"
#include "tools/result_file.h"

namespace terrace::cli {
namespace {

std::atomic<bool> stop_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler sets it");

// The second one ends the process at once; nothing is left on the drive then either.
void on_signal(int signal) {
  stop_requested = true;
  std::signal(signal, SIG_DFL);
}

// Signals end the bench early while this lives.
class StopSignals {
 public:
  StopSignals() {
    for (std::size_t i = 0; i < std::size(kSignals); ++i) {
      before_[i] = std::signal(kSignals[i], on_signal);
    }
  }
  ~StopSignals() {
    for (std::size_t i = 0; i < std::size(kSignals); ++i) std::signal(kSignals[i], before_[i]);
  }
  StopSignals(const StopSignals&) = delete;

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
  void (*before_[std::size(kSignals)])(int) = {};
};

// One line on a terminal that is written over; nothing elsewhere.
class ProgressLine {
 public:
  void show(const std::string& text) {
    if (!terminal_) return;
    fmt::print(stderr, "\r\x1b[K{}", text.substr(0, 100));
    std::fflush(stderr);
  }
  ~ProgressLine() {
    if (terminal_) fmt::print(stderr, "\r\x1b[K");
  }

 private:
  const bool terminal_ = ::isatty(STDERR_FILENO) == 1;
};

BenchResult bench_with_progress(const BenchOptions& options) {
  const StopSignals signals;
  ProgressLine line;
  BenchListener listener;
  listener.introduce = [](const std::string& text) {
    fmt::print("{}", text);
    std::fflush(stdout);
  };
  listener.progress = [&line](const std::string& text) { line.show(text); };
  return run_bench(options, listener, stop_requested);
}

// File names may hold any bytes.
constexpr auto kReplaceWrongBytes = nlohmann::json::error_handler_t::replace;

struct BenchCommand {
  BenchOptions bench;
  std::string json;
  std::string html;

  int run() const {
    if (!json.empty() && json == html) {
      throw Error(ErrorCode::invalid_argument, "--json and --html name one file; name two");
    }
    const ResultFile json_file(json, "--json");
    const ResultFile html_file(html, "--html");
    const auto result = bench_with_progress(bench);
    const bool color = ::isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr;
    fmt::print("{}", result_text(result, {color}));
    fmt::print("took {:.1f} s\n", result.seconds);
    const auto text = to_json(result).dump(2, ' ', false, kReplaceWrongBytes) + "\n";
    if (json_file.wanted()) json_file.write(text);
    if (html_file.wanted()) html_file.write(html_report(result, text));
    return exit_code(result);
  }
};

struct TuneCommand {
  BenchOptions bench;
  std::string out;
  std::string emit = "terrace";

  int run() const {
    for (const auto& directory : bench.directories) {
      if (!std::filesystem::is_regular_file(directory)) continue;
      throw Error(ErrorCode::invalid_argument, directory + " is a file, which is only read; name a "
                                                           "directory on its drive");
    }
    const bool deepspeed = emit == "deepspeed";
    const ResultFile file(out == "-" ? std::string{} : out, "--out");
    const auto result = bench_with_progress(bench);
    if (result.interrupted) return 130;
    const auto text = deepspeed ? deepspeed_config(result) : tuned_config(result);
    if (out.empty() && !deepspeed) {
      write_to_drives(result);
    } else if (file.wanted()) {
      file.write(text);
      fmt::print("written to {}\n", out);
    }
    fmt::print("{}", text);
    return 0;
  }

 private:
  // Into each directory what was found out about its drive.
  static void write_to_drives(const BenchResult& result) {
    for (const auto& drive : result.drives) {
      BenchResult alone;
      alone.drives.push_back(drive);
      const auto path = drive.directory + "/" + kTunedFile;
      ResultFile(path, "the tuned file").write(tuned_config(alone));
      fmt::print("written to {}; terrace train --nvme {} uses it\n", path, drive.directory);
    }
  }
};

struct DiffCommand {
  std::string before;
  std::string after;

  int run() const {
    const auto diff = diff_benches(read(before), read(after));
    fmt::print("{}", diff_text(diff));
    return diff.changed ? 1 : 0;
  }

 private:
  static nlohmann::json read(const std::string& path) {
    const bool there = std::filesystem::is_regular_file(path) && std::ifstream(path).is_open();
    nlohmann::json json(nlohmann::json::value_t::discarded);
    if (there) json = nlohmann::json::parse(std::ifstream(path), nullptr, false);
    if (json.is_discarded()) {
      throw Error(ErrorCode::invalid_argument,
                  path + (there ? " is no JSON" : " cannot be read") +
                      "; name a file written by terrace nvme bench --json");
    }
    return json;
  }
};

void add_bench_options(CLI::App& command, BenchOptions& options) {
  command
      .add_option("directory", options.directories,
                  "a directory on each drive, or a file to be read")
      ->required();
  command.add_flag("--quick", options.quick, "15 seconds instead of 60");
  command.add_flag("--thorough", options.thorough, "5 minutes, more cells, a longer write");
  command.add_option("--seconds", options.seconds, "so many seconds in all");
  command.add_option("--file-size", options.file_size, "of the scratch file (1GiB to 16GiB)");
  command.add_option("--write-limit", options.write_limit,
                     "the most that is written to each drive (48GiB to 1TiB)");
  command.add_option("--io", options.engine, "auto, io_uring or threads");
  command.add_option("--seed", options.seed, "of the data and of the order of cells");
  command.add_option("--sysfs-root", options.sysfs_root,
                     "a folder in front of /proc and /sys, for tests");
  command.add_flag("--allow-unproven", options.allow_unproven,
                   "measure network and overlay file systems, too");
}

void add_drive_bench(CLI::App& app, ExitCode& code) {
  auto* command = app.add_subcommand(
      "bench", "measure drives: speeds of training's patterns, a recommended setting, a verdict");
  auto state = std::make_shared<BenchCommand>();
  auto& options = state->bench;
  add_bench_options(*command, options);
  command->add_flag("--fio", options.fio, "measure the same by fio, in turn; takes longer");
  command->add_option("--model", options.model, "sizes for the verdict, for example 7B,13B");
  command->add_option("--parameters", options.parameters, "the same in numbers, for example 6.7e9");
  command->add_option("--compute", options.compute_seconds, "seconds of compute in a step");
  command->add_option("--tbw", options.rated_terabytes, "rated endurance of one drive in TB");
  command->add_option("--json", state->json, "write the result to this file");
  command->add_option("--html", state->html, "write a page with pictures to this file");
  command->callback([state, &code] { code.value = state->run(); });
}

void add_tune(CLI::App& app, ExitCode& code) {
  auto* command = app.add_subcommand(
      "tune", "measure drives and write the configuration that the runtime reads");
  auto state = std::make_shared<TuneCommand>();
  add_bench_options(*command, state->bench);
  command->add_option("--out", state->out,
                      std::string("a file, or - for the terminal alone; otherwise ") + kTunedFile +
                          " in each directory");
  command->add_option("--emit", state->emit, "terrace, or deepspeed for its aio block")
      ->check(CLI::IsMember({"terrace", "deepspeed"}));
  command->callback([state, &code] { code.value = state->run(); });
}

void add_diff(CLI::App& app, ExitCode& code) {
  auto* command =
      app.add_subcommand("diff", "what changed between two results, beyond the noise; exit 1 then");
  auto state = std::make_shared<DiffCommand>();
  command->add_option("first", state->before, "a file of bench --json")->required();
  command->add_option("second", state->after, "another")->required();
  command->callback([state, &code] { code.value = state->run(); });
}

}  // namespace

void add_nvme(CLI::App& app, ExitCode& code) {
  auto* command = app.add_subcommand("nvme", "what a drive can do for training");
  command->require_subcommand(1);
  add_drive_bench(*command, code);
  add_tune(*command, code);
  add_diff(*command, code);
}

}  // namespace terrace::cli
