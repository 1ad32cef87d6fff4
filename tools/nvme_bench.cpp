#include "tools/nvme_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <random>

#include "nvme/store_lock.h"
#include "terrace/error.h"
#include "tools/nvme_session.h"
#include "tools/nvme_text.h"

namespace terrace::cli {

using bench::Pattern;
using std::chrono::milliseconds;

namespace {

constexpr std::uint64_t operator""_K(unsigned long long n) { return n << 10; }
constexpr std::uint64_t operator""_M(unsigned long long n) { return n << 20; }
constexpr double kTogetherWeight = 25;
constexpr double kLeastSeconds = 5;
constexpr double kMostSeconds = 24 * 3600;
// Of the time, for what no phase accounts for: buffers, the file's end, the last slice's overrun.
constexpr double kMargin = 0.04;
constexpr double kLeastMarginSeconds = 0.9;
constexpr double kLeastGiven = 1e-6;  // seconds, terabytes: what a person may mean
constexpr double kMostGiven = 1e9;
constexpr double kLeastFioSeconds = 5;
constexpr Bytes kLeastFile = 64_MiB;
constexpr Bytes kLeastWriteLimit = 256_MiB;
constexpr int kSlices = 750;  // at least, in the time of a drive
constexpr Nanoseconds kLeastSlice = milliseconds(20);
constexpr std::size_t kMostPairDrives = 6;

Nanoseconds now() { return steady_clock().now(); }

using Sessions = std::vector<std::unique_ptr<DriveSession>>;

std::string introduction(const BenchResult& result, const Sessions& sessions) {
  const auto& effort = result.effort;
  const double seconds = effort.seconds + (result.with_fio ? effort.fio_seconds : 0);
  std::string text;
  for (const auto& drive : result.drives) text += facts_text(drive.directory, drive.facts);
  text += fmt::format("measuring for at most {:.0f} s{}; writing\n", seconds,
                      result.with_fio ? ", fio included" : "");
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    const auto& directory = result.drives[i].directory;
    if (std::filesystem::is_regular_file(directory)) {
      text += "  nothing: " + directory + " is a file and only read\n";
      continue;
    }
    if (sessions[i]->objection()) {
      text += "  nothing: " + directory + " is refused, see below\n";
      continue;
    }
    // A quarter more for the thread engine's.
    const auto size = sessions[i]->file_bytes();
    text += fmt::format("  a scratch file of {} into {}{}, up to {} altogether\n",
                        to_string(effort.extras ? size + size / 4 : size), directory,
                        size < effort.file ? " (for more there is no room)" : "",
                        to_string(effort.write_limit));
  }
  return text + "A scratch file has no name: nothing is left behind, however this ends.\n";
}

Error mistake(const std::string& what) { return {ErrorCode::invalid_argument, what}; }

void check_positive(const char* option, std::optional<double> value, const char* unit) {
  if (!value || (*value >= kLeastGiven && *value <= kMostGiven)) return;
  throw mistake(fmt::format("{} takes a positive number of {}, {} to {}", option, unit, kLeastGiven,
                            kMostGiven));
}

// Two directories on one device would measure it twice, and pass for two drives.
void refuse_same_device(const std::vector<DriveResult>& drives) {
  for (std::size_t i = 0; i < drives.size(); ++i) {
    for (std::size_t j = i + 1; j < drives.size(); ++j) {
      const auto& device = drives[i].facts.device;
      if (device.empty() || device != drives[j].facts.device) continue;
      throw mistake(drives[i].directory + " and " + drives[j].directory + " are both on " + device +
                    ": one drive, not two; name one directory on each drive");
    }
  }
}

void note_common_links(const std::vector<DriveResult>& drives, TogetherResult& together) {
  for (std::size_t i = 0; i < drives.size(); ++i) {
    for (std::size_t j = i + 1; j < drives.size(); ++j) {
      const auto& a = drives[i];
      const auto& b = drives[j];
      for (const auto& link : common_links(a.facts, b.facts)) {
        if (link.gb_s >= a.facts.ceiling_gb_s.value_or(0) + b.facts.ceiling_gb_s.value_or(0)) {
          continue;
        }
        together.notes.push_back(fmt::format(
            "{} and {} hang on one PCI Express link above {}, {} lanes at {} GT/s: {:.1f} GB/s",
            a.name(), b.name(), link.address, link.lanes, link.gigatransfers, link.gb_s));
      }
    }
  }
}

// Speeds of sets of drives, each set measured at once, all sets in turn until the deadline.
class TogetherBench {
 public:
  TogetherBench(Sessions& sessions, std::vector<std::size_t> which)
      : sessions_(sessions), which_(std::move(which)) {
    for (const auto i : which_) sets_.push_back({i});
    if (which_.size() <= kMostPairDrives && which_.size() > 2) {
      for (std::size_t a = 0; a < which_.size(); ++a) {
        for (std::size_t b = a + 1; b < which_.size(); ++b) {
          sets_.push_back({which_[a], which_[b]});
        }
      }
    }
    sets_.push_back(which_);
  }

  // GB/s of each set, in the order of sets().
  std::vector<double> measure(Pattern pattern, Nanoseconds deadline,
                              const std::atomic<bool>& stop) {
    std::vector<std::vector<double>> seen(sets_.size());
    const auto left = to_seconds(deadline - now());
    const bench::Timing timing{
        milliseconds(30),
        from_seconds(std::clamp(left / 3 / static_cast<double>(sets_.size()) - 0.06, 0.05, 1.0))};
    do {
      for (std::size_t i = 0; i < sets_.size() && !stop; ++i) {
        for (const auto drive : sets_[i]) {
          sessions_[drive]->drive()->start(sessions_[drive]->setting(pattern), timing);
        }
        double sum = 0;
        for (const auto drive : sets_[i]) sum += sessions_[drive]->drive()->finish().gb_s;
        seen[i].push_back(sum);
      }
    } while (now() < deadline && !stop);
    std::vector<double> medians;
    for (const auto& values : seen) medians.push_back(bench::median(values));
    return medians;
  }
  const std::vector<std::vector<std::size_t>>& sets() const { return sets_; }

 private:
  Sessions& sessions_;
  std::vector<std::size_t> which_;
  std::vector<std::vector<std::size_t>> sets_;
};

bench::Scaling scaling(const std::vector<std::vector<std::size_t>>& sets,
                       const std::vector<double>& speeds) {
  bench::Scaling result;
  for (std::size_t i = 0; i < sets.size(); ++i) {
    if (sets[i].size() == 1) result.alone_gb_s += speeds[i];
  }
  result.together_gb_s = speeds.back();
  return result;
}

std::optional<TogetherResult> measure_together(BenchResult& result, Sessions& sessions,
                                               Nanoseconds deadline,
                                               const std::atomic<bool>& stop) {
  std::vector<std::size_t> which;
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    if (sessions[i]->drive() != nullptr && sessions[i]->drive()->written_bytes() > 0) {
      which.push_back(i);
    }
  }
  if (which.size() < 2 || stop) return std::nullopt;
  TogetherResult together;
  TogetherBench bench(sessions, which);
  const auto half = now() + (deadline - now()) / 2;
  const auto reads = bench.measure(Pattern::read, half, stop);
  const bool writes = std::ranges::all_of(which, [&](auto i) {
    return sessions[i]->writes_allowed() && !std::filesystem::is_regular_file(
                                                result.drives[i].directory);
  });
  together.read = scaling(bench.sets(), reads);
  if (writes) {
    together.write = scaling(bench.sets(), bench.measure(Pattern::overwrite, deadline, stop));
  }
  if (stop) return std::nullopt;
  std::vector<double> alone(sessions.size(), 0.0);
  std::vector<bench::PairSpeed> pairs;
  for (std::size_t i = 0; i < bench.sets().size(); ++i) {
    const auto& set = bench.sets()[i];
    if (set.size() == 1) alone[set[0]] = reads[i];
    if (set.size() == 2) pairs.push_back({set[0], set[1], reads[i]});
  }
  together.uplinks = bench::shared_uplinks(alone, pairs);
  note_common_links(result.drives, together);
  return together;
}

}  // namespace

Effort effort_of(const BenchOptions& options) {
  if (options.quick && options.thorough) {
    throw mistake("--quick and --thorough contradict each other");
  }
  check_positive("--compute", options.compute_seconds, "seconds");
  check_positive("--tbw", options.rated_terabytes, "terabytes");
  Effort effort{"standard", 60, 60, 4_GiB, 200_GiB, {}, {1, 2, 4, 8, 16, 32}, milliseconds(60)};
  effort.blocks = {64_K, 128_K, 256_K, 512_K, 1_M, 2_M, 4_M, 8_M};
  if (options.quick) {
    effort = {"quick", 15, 25, 1_GiB, 48_GiB, {}, {1, 2, 4, 8, 16, 32}, milliseconds(20), false};
    effort.blocks = {128_K, 256_K, 512_K, 1_M, 2_M, 4_M};
  } else if (options.thorough) {
    effort = {"thorough", 300, 180, 16_GiB, 1_TiB, {}, {1, 2, 4, 8, 16, 32, 64}, milliseconds(200)};
    effort.blocks = {16_K, 32_K, 64_K, 128_K, 256_K, 512_K, 1_M, 2_M, 4_M, 8_M};
  }
  if (options.seconds) {
    effort.fio_seconds =
        std::clamp(*options.seconds, kLeastFioSeconds, std::max(60.0, effort.fio_seconds));
    effort.seconds = *options.seconds;
    if (!(effort.seconds >= kLeastSeconds && effort.seconds <= kMostSeconds)) {
      throw mistake(fmt::format("--seconds takes {} to {}", kLeastSeconds, kMostSeconds));
    }
  }
  if (!options.file_size.empty()) effort.file = parse_bytes(options.file_size);
  if (effort.file < kLeastFile) {
    throw mistake("--file-size takes " + to_string(kLeastFile) + " at least");
  }
  if (!options.write_limit.empty()) effort.write_limit = parse_bytes(options.write_limit);
  if (effort.write_limit < kLeastWriteLimit) {
    throw mistake("--write-limit takes " + to_string(kLeastWriteLimit) + " at least");
  }
  effort.file = std::min(effort.file, effort.write_limit / 4);
  const auto drives = static_cast<double>(std::max<std::size_t>(1, options.directories.size()));
  effort.slice = std::clamp(from_seconds(effort.seconds / drives) / kSlices, kLeastSlice,
                            std::max(kLeastSlice, effort.slice));
  return effort;
}

BenchResult run_bench(const BenchOptions& options, const BenchListener& listener,
                      const std::atomic<bool>& stop) {
  const auto begin = now();
  BenchResult result;
  result.effort = effort_of(options);
  result.seed = options.seed.value_or(std::random_device{}());
  result.compute_seconds = options.compute_seconds;
  if (options.rated_terabytes) result.rated_bytes = *options.rated_terabytes * 1e12;
  add_verdict(options, result);  // a mistake shows now, not after the measurement
  const auto kind =
      options.engine.empty() ? IoEngineKind::automatic : parse_io_engine(options.engine);
  if (kind == IoEngineKind::memory) throw mistake("--io takes auto, io_uring or threads here");
  refuse_one_directory_twice(options.directories);
  std::unique_ptr<Fio> fio;
  if (options.fio) fio = std::make_unique<Fio>();
  result.with_fio = options.fio;
  Sessions sessions;
  for (const auto& directory : options.directories) {
    SessionOptions session;
    session.directory = directory;
    session.effort = result.effort;
    session.engine = kind;
    session.sysfs_root = options.sysfs_root;
    session.allow_unproven = options.allow_unproven;
    session.seed = result.seed + 1000 * sessions.size();
    session.fio = fio.get();
    session.stop = &stop;
    session.progress = [&listener, directory](const std::string& text) {
      listener.progress(directory + ": " + text);
    };
    sessions.push_back(std::make_unique<DriveSession>(std::move(session)));
    result.drives.push_back({});
    result.drives.back().directory = directory;
    result.drives.back().facts = sessions.back()->facts();
  }
  refuse_same_device(result.drives);
  listener.introduce(introduction(result, sessions));
  const double length = result.effort.seconds + (fio ? result.effort.fio_seconds : 0);
  const bool several = sessions.size() > 1;
  const double drive_weight =
      PhaseWeights::own(result.effort) + (fio ? PhaseWeights::fio(result.effort) : 0.0);
  bench::TimePlan plan(
      begin, from_seconds(length - std::max(length * kMargin, kLeastMarginSeconds)),
      drive_weight * static_cast<double>(sessions.size()) + (several ? kTogetherWeight : 0.0));
  for (auto& session : sessions) session->run(plan);
  if (several) {
    result.together =
        measure_together(result, sessions, plan.deadline(now(), kTogetherWeight), stop);
  }
  for (std::size_t i = 0; i < sessions.size(); ++i) result.drives[i] = sessions[i]->take();
  result.interrupted = stop;
  add_verdict(options, result);
  result.seconds = to_seconds(now() - begin);
  return result;
}

}  // namespace terrace::cli
