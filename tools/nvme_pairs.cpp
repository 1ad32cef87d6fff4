#include "tools/nvme_pairs.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "terrace/error.h"
#include "tiers/topology.h"

namespace terrace::cli {

using bench::Cell;
using bench::Pattern;
using std::chrono::milliseconds;

namespace {

constexpr std::uint64_t kUsualBlock = std::uint64_t{1} << 20;
constexpr std::uint32_t kUsualDepth = 8;
constexpr std::uint64_t kLargeBlock = std::uint64_t{4} << 20;
constexpr std::size_t kMostPairs = 40;
constexpr double kFioOverheadSeconds = 0.35;  // fio's start and end
constexpr double kSliceOverheadSeconds = 0.03;
constexpr double kNotSlower = 0.98;  // of the default's speed

Nanoseconds now() { return steady_clock().now(); }

struct Series {
  std::vector<double> first;
  std::vector<double> second;

  std::size_t size() const { return first.size(); }
  // Measures both, in the other order every time.
  template <class First, class Second>
  void add(First&& measure_first, Second&& measure_second) {
    double a = 0;
    double b = 0;
    if (size() % 2 == 0) {
      a = measure_first();
      b = measure_second();
    } else {
      b = measure_second();
      a = measure_first();
    }
    first.push_back(a);
    second.push_back(b);
  }
};

// How long one of a pair may take for kLeastPairs and some more to fit.
Nanoseconds pair_slice(Nanoseconds left, double series, double overhead, double most) {
  const double each = to_seconds(left) / (2 * (bench::kLeastPairs + 2) * series) - overhead;
  return from_seconds(std::clamp(each, 0.03, most));
}

FioComparison compared(const Series& speed, const Series& cpu) {
  FioComparison fio;
  fio.gb_s = speed.second;
  fio.speed = bench::compare_pairs(speed.first, speed.second);
  fio.cpu = bench::compare_pairs(cpu.first, cpu.second);
  fio.cpu_seconds_per_gb = bench::median(cpu.second);
  return fio;
}

// Runs of one cell by fio and by us.
class FioPairs {
 public:
  FioPairs(const Fio& fio, bench::MeasuredDrive& drive, const Cell& cell, Nanoseconds length)
      : fio_(fio), drive_(drive), cell_(cell), length_(length) {}

  Nanoseconds takes() const { return 2 * length_ + 2 * rest_; }

  // Throws what fio does.
  void add(const FioPlace& place, Nanoseconds deadline) {
    double our_cpu = 0;
    double fio_cpu = 0;
    speed.add(
        [&] {
          std::this_thread::sleep_for(rest_ / 2);
          const auto sample =
              drive_.measure(cell_, {.warm_up = Nanoseconds{0},
                                     .measure = length_,
                                     .same_data = true,
                                     .first_block = place.offset / cell_.block_bytes});
          std::this_thread::sleep_for(rest_ / 2);
          our_cpu = sample.cpu_seconds_per_gb;
          return sample.whole_gb_s;
        },
        [&] {
          const auto began = now();
          const auto at_most = std::max(deadline - began, length_ + from_seconds(1));
          const auto run = fio_.run(cell_, drive_.file().path, place, to_seconds(length_), at_most);
          rest_ = std::max(Nanoseconds{0}, now() - began - length_);
          fio_cpu = run.cpu_seconds_per_gb;
          if (bench::writes(cell_.pattern)) {
            foreign_bytes += static_cast<std::uint64_t>(run.gb_s * 1e9 * to_seconds(length_));
          }
          return run.gb_s;
        });
    cpu.first.push_back(our_cpu);
    cpu.second.push_back(fio_cpu);
  }

  Series speed;
  Series cpu;
  std::uint64_t foreign_bytes = 0;  // that fio wrote, at most

 private:
  const Fio& fio_;
  bench::MeasuredDrive& drive_;
  const Cell cell_;
  const Nanoseconds length_;
  // fio lets the drive rest while it starts and ends, after which many a drive is faster for a
  // while: ours get the same rest.
  Nanoseconds rest_ = from_seconds(kFioOverheadSeconds);
};

}  // namespace

PhaseProof::PhaseProof(DriveSession& session, std::string what)
    : session_(session),
      what_(std::move(what)),
      first_(session.result_.cells.size()),
      claimed_(session.claims()),
      counters_(bench::machine_counters(session.facts().folder)) {}

bool PhaseProof::holds() {
  const auto after = bench::machine_counters(session_.facts().folder);
  bench::Moved moved{session_.claims() - claimed_, {}, {}};
  if (counters_.drive && after.drive) moved.drive = *after.drive - *counters_.drive;
  if (counters_.process && after.process) moved.process = *after.process - *counters_.process;
  const auto refusal = bench::refuse_counters(moved);
  if (!refusal) return true;
  session_.refuse(what_, *refusal);
  auto& cells = session_.result_.cells;
  cells.erase(cells.begin() + static_cast<std::ptrdiff_t>(first_), cells.end());
  return false;
}

std::string disturbance_text(const bench::Disturbance& disturbance) {
  std::string text = fmt::format(
      "the hypervisor took {:.0f} % of the CPU, other processes {:.0f} %, load {:.1f}",
      100 * disturbance.stolen_share, 100 * disturbance.others_cpu_share, disturbance.load);
  if (disturbance.others_bytes) {
    text += fmt::format(", others read {} and wrote {} on the drive",
                        to_string(Bytes{disturbance.others_bytes->read}),
                        to_string(Bytes{disturbance.others_bytes->written}));
  }
  return text + fmt::format(" in {:.0f} s", disturbance.seconds);
}

// The knee, the best and what the runtime does by default, in rotation on the traffic that counts:
// the one with the fewest bytes in flight that is not slower than the default is recommended.
void DriveSession::duel(Nanoseconds deadline) {
  if (!result_.knee.found) return;
  const IoEngineOptions runtime;
  const auto& knee = result_.knee;
  const Cell usual{Pattern::optimizer_step, runtime.block.count, runtime.queue_depth, 1};
  std::vector<Cell> rivals{usual};
  const auto enter = [&](const Cell& cell) {
    if (std::ranges::find(rivals, cell) == rivals.end() && drive_->can(cell)) {
      rivals.push_back(cell);
    }
  };
  enter(setting(Pattern::optimizer_step));
  enter({Pattern::optimizer_step, knee.best_block_bytes, knee.best_depth, 1});
  if (rivals.size() < 2 || !drive_->can(usual)) return;
  options_.progress("recommended against default");
  const auto length = pair_slice(deadline - now(), static_cast<double>(rivals.size()) / 2,
                                 kSliceOverheadSeconds, 0.4);
  std::vector<std::vector<double>> seen(rivals.size());
  while (seen.back().size() < kMostPairs && writes_allowed() &&
         now() + static_cast<int>(rivals.size()) * length < deadline) {
    const auto first = seen.back().size() % rivals.size();
    for (std::size_t i = 0; i < rivals.size(); ++i) {
      const auto turn = (first + i) % rivals.size();
      seen[turn].push_back(drive_->measure(rivals[turn], slice(rivals[turn], length)).gb_s);
      if (stopped()) return;
    }
  }
  judge_duel(rivals, seen);
}

void DriveSession::judge_duel(const std::vector<Cell>& rivals,
                              const std::vector<std::vector<double>>& seen) {
  const auto in_flight = [](const Cell& cell) { return cell.block_bytes * cell.depth; };
  const auto& usual = rivals.front();
  auto& knee = result_.knee;
  Cell chosen = usual;
  for (std::size_t i = 1; i < rivals.size(); ++i) {
    const auto ratio = bench::compare_pairs(seen[i], seen[0]);
    result_.duels.push_back(
        {fmt::format("{} against the default {}", cell_text(rivals[i]), cell_text(usual)),
         Pattern::optimizer_step, rivals[i].block_bytes, rivals[i].depth, ratio});
    const bool good = ratio.ratio >= kNotSlower;
    if (good && (chosen == usual || in_flight(rivals[i]) < in_flight(chosen))) {
      chosen = rivals[i];
    }
  }
  if (chosen == usual) {
    const bool noisy =
        std::ranges::any_of(result_.duels, [](const Versus& duel) { return duel.ratio.too_noisy; });
    knee.reason = noisy ? "the runtime's default: it is too noisy here to tell whether the "
                          "optimizer can do with less in flight"
                        : "the runtime's default: what needs less in flight was slower for the "
                          "optimizer";
  }
  knee.block_bytes = chosen.block_bytes;
  knee.depth = chosen.depth;
}

void DriveSession::threads(Nanoseconds deadline) {
  if (!result_.knee.found || stopped()) return;
  options_.progress("several threads");
  const auto helpers = static_cast<std::uint32_t>(std::clamp(detect_topology().cores, 1, 4));
  PhaseProof proof(*this, "threads");
  drive_->prepare_threads(helpers);
  std::vector<CellResult> results;
  for (std::uint32_t count = 2; count <= helpers; count *= 2) {
    for (const auto each : {Pattern::read, Pattern::overwrite}) {
      Cell cell = setting(each);
      cell.threads = count;
      if (!drive_->can(cell)) continue;
      results.push_back(CellResult::of(cell, true));
    }
  }
  bool time = true;
  while (!results.empty() && time && !stopped() && writes_allowed()) {
    for (auto& result : results) {
      time = now() + visit(result.cell, options_.effort.slice) < deadline;
      if (stopped() || !time) break;
      const auto sample = drive_->measure(result.cell, slice(result.cell, options_.effort.slice));
      if (sample.complete) result.add(sample);
    }
  }
  for (auto& result : results) {
    if (!result.gb_s.empty()) result_.cells.push_back(std::move(result));
  }
  proof.holds();
}

void DriveSession::engines(Nanoseconds deadline) {
  if (result_.engine.engine != "io_uring" || result_.read_only || stopped()) return;
  options_.progress("threads against io_uring");
  const auto usual = setting(Pattern::read);
  const auto depth = std::max<std::uint32_t>(usual.depth, 4);
  bench::DriveOptions options;
  options.path = options_.directory;
  options.size = std::max(file_bytes_ / 4, Bytes{2 * kLargeBlock * depth});
  options.buffer_bytes = std::min<std::uint64_t>(buffer_bytes(), kLargeBlock * depth);
  options.seed = options_.seed + 100;
  options.engine.kind = IoEngineKind::threads;
  options.engine.threads = depth;
  options.stop = options_.stop;
  bench::MeasuredDrive other(std::move(options));
  other.fill(other.file().size.count, kUsualBlock, kUsualDepth, (deadline - now()) / 3);
  std::vector<Versus> all;
  for (const auto size : {std::max(usual.block_bytes, kUsualBlock), kLargeBlock}) {
    if (!all.empty() && all.back().block_bytes == size) continue;
    for (const auto each : {Pattern::read, Pattern::overwrite}) {
      const Cell cell{each, size, depth, 1};
      if (!drive_->can(cell) || !other.can(cell)) continue;
      all.push_back({pattern_name(each) + ", " + cell_text(cell), each, size, depth, {}});
    }
  }
  const auto length =
      pair_slice(deadline - now(), static_cast<double>(all.size()), kSliceOverheadSeconds, 0.3);
  std::vector<Series> series(all.size());
  const auto before = other_claims_;
  const auto claim = [&] {
    other_claims_.read = before.read + other.claimed().read;
    other_claims_.written = before.written + other.claimed().written;
  };
  claim();
  bool time = true;
  while (!all.empty() && time && writes_allowed() && !stopped()) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Cell cell{all[i].pattern, all[i].block_bytes, all[i].depth, 1};
      time = now() + 2 * visit(cell, length) < deadline;
      if (!time || stopped()) break;
      series[i].add([&] { return other.measure(cell, slice(cell, length)).gb_s; },
                    [&] { return drive_->measure(cell, slice(cell, length)).gb_s; });
      claim();
    }
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].ratio = bench::compare_pairs(series[i].first, series[i].second);
    if (series[i].size() > 0) result_.engines.push_back(std::move(all[i]));
  }
}

void DriveSession::compare_with_fio(Nanoseconds deadline) {
  std::vector<CellResult*> cells;
  for (const auto each : {Pattern::read, Pattern::overwrite, Pattern::mix}) {
    for (auto& cell : result_.cells) {
      if (result_.of(each) == &cell) cells.push_back(&cell);
    }
  }
  for (auto left = static_cast<double>(cells.size()); auto* cell : cells) {
    if (stopped()) return;
    compare_with_fio(*cell, now() + from_seconds(to_seconds(deadline - now()) / left--));
  }
}

// What a failure of fio interrupts keeps the pairs that it has.
void DriveSession::compare_with_fio(CellResult& cell, Nanoseconds deadline) {
  options_.progress("fio and terrace in turn: " + pattern_name(cell.cell.pattern));
  const auto before = bench::machine_counters(facts().folder);
  const auto length =
      pair_slice(deadline - now(), 1, kSliceOverheadSeconds + kFioOverheadSeconds, 0.3);
  const auto& path = drive_->file().path;
  const auto bytes = drive_->written_bytes() / cell.cell.block_bytes * cell.cell.block_bytes;
  FioPairs pairs(*options_.fio, *drive_, cell.cell, length);
  try {
    while (pairs.speed.size() < kMostPairs && now() + pairs.takes() < deadline && !stopped() &&
           may_run(cell.cell)) {
      // Both read and write the same place, another one in every pair.
      pairs.add(FioPlace::of_pair(pairs.speed.size(), bytes, cell.cell.block_bytes), deadline);
    }
  } catch (const Error& error) {
    result_.fio_note = error.what();
  }
  fio_written_ += pairs.foreign_bytes;
  if (stopped()) return;
  if (pairs.speed.size() == 0) {
    if (result_.fio_note.empty()) {
      result_.fio_note =
          may_run(cell.cell) ? "there was no time for it" : "--write-limit is reached";
    }
    return;
  }
  auto fio = compared(pairs.speed, pairs.cpu);
  fio.command = command_text(Fio::arguments(
      cell.cell, path, FioPlace::of_pair(0, bytes, cell.cell.block_bytes), to_seconds(length)));
  fio.huge_pages = Fio::huge_pages(cell.cell);
  if (fio.speed.too_noisy) {
    fio.noise = fmt::format(
        "{} pairs, interval {:.2f} wide; {}", pairs.speed.size(), fio.speed.interval.width(),
        disturbance_text(bench::disturbance(before, bench::machine_counters(facts().folder))));
  }
  cell.fio = std::move(fio);
}

}  // namespace terrace::cli
