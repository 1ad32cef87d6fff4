#include "tools/nvme_session.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "terrace/error.h"
#include "tiers/topology.h"
#include "tools/nvme_pairs.h"

namespace terrace::cli {

using bench::Cell;
using bench::Pattern;
using bench::Timing;
using std::chrono::milliseconds;

namespace {

constexpr std::uint64_t kUsualBlock = std::uint64_t{1} << 20;
constexpr std::uint32_t kUsualDepth = 8;
constexpr Bytes kLeastFile = 64_MiB;
constexpr Bytes kLeastWritten = 16_MiB;
constexpr std::uint64_t kFillParts = 8;
constexpr int kVerifyBlocks = 64;
constexpr int kLeastVerifyBlocks = 8;
constexpr std::size_t kWindows = 8;  // that a pattern's run is cut into
constexpr Nanoseconds kWarmUp = milliseconds(8);

Nanoseconds now() { return steady_clock().now(); }

}  // namespace

std::uint64_t buffer_bytes() {
  const auto free = available_memory().value_or(1_GiB).count;
  return std::clamp<std::uint64_t>(free / 16 >> 20 << 20, 8 << 20, 64 << 20);
}

std::string pattern_name(Pattern pattern) {
  std::string name(bench::to_string(pattern));
  std::ranges::replace(name, '_', ' ');
  return name;
}

double PhaseWeights::own(const Effort& effort) {
  return kFill + kSweep + kPatterns + kSustained + kDuel + kVerify +
         (effort.extras ? kThreads + kEngines : 0);
}

double PhaseWeights::fio(const Effort& effort) {
  return own(effort) * effort.fio_seconds / effort.seconds;
}

DriveSession::DriveSession(SessionOptions options)
    : options_(std::move(options)), random_(options_.seed) {
  result_.directory = options_.directory;
  result_.facts = drive_facts(options_.directory, options_.sysfs_root);
  constexpr std::uint64_t kMiB = 1 << 20;
  file_bytes_ = {std::min(options_.effort.file.count, result_.facts.free.count / 4 / kMiB * kMiB)};
}

bool DriveSession::stopped() const { return options_.stop != nullptr && options_.stop->load(); }

void DriveSession::refuse(const std::string& what, const bench::Refusal& why) {
  result_.refused.push_back({result_.directory, what, why});
}

Cell DriveSession::setting(Pattern pattern) const {
  if (result_.knee.found) return {pattern, result_.knee.block_bytes, result_.knee.depth, 1};
  Cell cell{pattern, kUsualBlock, kUsualDepth, 1};
  while (drive_ && !drive_->can(cell) && cell.depth > 1) cell.depth /= 2;
  while (drive_ && !drive_->can(cell) && cell.block_bytes > drive_->file().alignment) {
    cell.block_bytes /= 2;
  }
  return cell;
}

std::uint64_t DriveSession::writes_left() const {
  const auto limit = options_.effort.write_limit.count;
  return limit - std::min(limit, claims().written + fio_written_);
}

bool DriveSession::writes_allowed() const { return writes_left() > 0; }

bool DriveSession::may_run(const Cell& cell) const {
  return writes_allowed() || !bench::writes(cell.pattern);
}

// Long enough that the queue turns over a few times, whatever the drive's speed.
Timing DriveSession::slice(const Cell& cell, Nanoseconds least) const {
  const double queue = static_cast<double>(cell.block_bytes * cell.depth * cell.threads) /
                       (std::max(speed_gb_s_, 1e-3) * 1e9);
  Timing timing;
  timing.warm_up = std::max(kWarmUp, from_seconds(queue));
  timing.measure = std::max(least, from_seconds(3 * queue));
  if (bench::writes(cell.pattern)) timing.most_bytes = writes_left();
  return timing;
}

Nanoseconds DriveSession::visit(const Cell& cell, Nanoseconds least) const {
  const auto timing = slice(cell, least);
  return timing.warm_up + timing.measure + std::max(kWarmUp, timing.warm_up);  // and the drain
}

std::optional<bench::Refusal> DriveSession::objection() const {
  const auto& facts = result_.facts;
  const auto reason = why_no_drive(options_.directory, facts);
  const bool memory = facts.kind == FileSystemKind::memory;
  if (!reason.empty() && (memory || !options_.allow_unproven)) {
    return bench::Refusal{std::string(to_string(facts.kind)), reason};
  }
  if (std::filesystem::is_regular_file(options_.directory)) return std::nullopt;
  if (file_bytes_ >= kLeastFile) return std::nullopt;
  return bench::Refusal{"no_space", fmt::format("{} has {} free, and {} are needed for the scratch "
                                                "files; free some or name another directory",
                                                options_.directory, to_string(facts.free),
                                                to_string(4 * kLeastFile))};
}

bool DriveSession::open() {
  if (const auto refusal = objection()) {
    refuse("everything", *refusal);
    return false;
  }
  result_.read_only = std::filesystem::is_regular_file(options_.directory);
  bench::DriveOptions drive;
  drive.path = options_.directory;
  drive.size = file_bytes_;
  drive.buffer_bytes = buffer_bytes();
  drive.helper_buffer_bytes = std::min<std::uint64_t>(drive.buffer_bytes, 16 << 20);
  drive.seed = options_.seed;
  drive.engine.kind = options_.engine;
  drive.stop = options_.stop;
  try {
    drive_ = std::make_unique<bench::MeasuredDrive>(std::move(drive));
  } catch (const Error& error) {
    refuse("everything", {"not_usable", error.what()});
    return false;
  }
  result_.file = drive_->file();
  result_.engine = drive_->engine();
  result_.system_calls_note = drive_->system_calls_note();
  if (options_.allow_unproven) return true;
  if (result_.file.direct && result_.facts.cached_loop) {
    refuse("everything", {"cached_loop", options_.directory + " is on " + result_.facts.device +
                                             ", a loop device whose file goes through the page "
                                             "cache: memory would be measured; losetup "
                                             "--direct-io=on, or name a directory on the drive"});
    return false;
  }
  if (result_.file.direct) return true;
  refuse("everything", {"not_direct", options_.directory + ": " + result_.file.direct_note +
                                          ", so memory would be measured; use ext4 or XFS"});
  return false;
}

bool DriveSession::prepare(Nanoseconds deadline) {
  if (!result_.read_only) return fill(deadline);
  if (const auto refusal = drive_->refuse_file()) {
    refuse("everything", *refusal);
    return false;
  }
  if (drive_->written_bytes() >= kLeastWritten.count) return true;
  refuse("everything", {"too_small", fmt::format("the file has {}; name one of {} at least, or its "
                                                 "directory",
                                                 to_string(Bytes{drive_->written_bytes()}),
                                                 to_string(kLeastWritten))});
  return false;
}

bool DriveSession::fill(Nanoseconds deadline) {
  options_.progress("first write");
  PhaseProof proof(*this, "first write");
  auto cell = CellResult::of({Pattern::first_write, kUsualBlock, kUsualDepth, 1});
  const auto part = round_up(file_bytes_.count / kFillParts, kUsualBlock);
  while (drive_->written_bytes() < file_bytes_.count && now() < deadline && !stopped()) {
    cell.add(drive_->fill(part, kUsualBlock, kUsualDepth, deadline - now()));
  }
  if (stopped()) return false;
  if (drive_->written_bytes() < kLeastWritten.count) {
    refuse("everything", {"too_slow", fmt::format("only {} were written in the time for it; give "
                                                  "the run more time (--seconds)",
                                                  to_string(Bytes{drive_->written_bytes()}))});
    return false;
  }
  speed_gb_s_ = bench::quantile(cell.gb_s, 0.25);  // a throttle may let the first part pass
  result_.cells.push_back(std::move(cell));
  if (const auto refusal = drive_->refuse_file()) {
    refuse("everything", *refusal);
    return false;
  }
  return proof.holds();
}

void DriveSession::sweep(Nanoseconds deadline) {
  const std::uint64_t most = std::min(buffer_bytes(), drive_->written_bytes() / 4);
  std::vector<Pattern> both{Pattern::read};
  if (!result_.read_only) both.push_back(Pattern::overwrite);
  const auto least = options_.effort.slice;
  auto cells = bench::fitting_grid(
      both, options_.effort.blocks, options_.effort.depths, most,
      [&](const Cell& cell) { return to_seconds(visit(cell, least)); },
      to_seconds(deadline - now()));
  std::erase_if(cells, [&](const Cell& cell) { return !drive_->can(cell); });
  bench::Sweep sweep(cells, options_.seed);
  std::vector<CellResult> results;
  for (const auto& cell : cells) results.push_back(CellResult::of(cell, true));
  PhaseProof proof(*this, "sweep");
  const auto before = bench::machine_counters(facts().folder);
  std::size_t visits = 0;
  double slowness = 1;  // of late, against what was planned
  while (now() < deadline && !stopped()) {
    const auto next = sweep.next();
    if (!next) break;
    const auto& cell = cells[*next];
    if (!may_run(cell)) break;
    const double best = sweep.best(cell.pattern);
    if (best > 0) speed_gb_s_ = best;
    const auto planned = visit(cell, least);
    if (now() + from_seconds(slowness * to_seconds(planned)) > deadline) break;
    const auto began = now();
    const auto sample = drive_->measure(cell, slice(cell, least));
    slowness = std::max({1.0, to_seconds(now() - began) / to_seconds(planned), slowness / 2});
    if (!sample.complete) break;
    sweep.add(*next, sample.gb_s);
    results[*next].add(sample);
    if (++visits % 8 == 0) {
      options_.progress(fmt::format("sweep: {} visits to {} cells", visits, cells.size()));
    }
  }
  result_.disturbance = bench::disturbance(before, bench::machine_counters(facts().folder));
  for (auto& cell : results) {
    if (!cell.gb_s.empty()) result_.cells.push_back(std::move(cell));
  }
  if (proof.holds()) {
    result_.knee = bench::find_knee(sweep.cells());
  } else {
    result_.knee.why_not = "the sweep did not measure the drive";
  }
}

void DriveSession::pattern(Pattern pattern, Nanoseconds length) {
  const auto cell = setting(pattern);
  if (!drive_->can(cell) || !may_run(cell)) return;
  options_.progress(pattern_name(pattern));
  auto timing = slice(cell, length);
  timing.timeline_step = milliseconds(2);
  const auto sample = drive_->measure(cell, timing);
  if (!sample.complete) return;
  auto result = CellResult::of(cell);
  result.add(sample);
  // One run without a pause in it, cut into windows: a throttle's burst cannot flatter it.
  auto windows = bench::speeds_of(sample.timeline, kWindows + 1);
  if (windows.size() == kWindows + 1) {
    windows.erase(windows.begin());
    result.gb_s = std::move(windows);
  }
  speed_gb_s_ = sample.gb_s;
  result_.cells.push_back(std::move(result));
}

void DriveSession::patterns(Nanoseconds deadline) {
  std::vector<Pattern> wanted{Pattern::read,           Pattern::overwrite,      Pattern::mix,
                              Pattern::optimizer_step, Pattern::layer_prefetch, Pattern::commit};
  PhaseProof proof(*this, "patterns");
  for (auto left = static_cast<double>(wanted.size()); const auto each : wanted) {
    if (stopped()) return;
    const auto share = to_seconds(deadline - now()) / left--;
    pattern(each, from_seconds(std::max(0.05, share - to_seconds(2 * kWarmUp))));
  }
  proof.holds();
}

void DriveSession::sustained(Nanoseconds deadline) {
  if (stopped()) return;
  const auto cell = setting(Pattern::sustained_write);
  if (!drive_->can(cell) || !writes_allowed()) return;
  options_.progress("sustained write");
  PhaseProof proof(*this, "sustained write");
  const auto length = std::max(deadline - now(), milliseconds(100) + Nanoseconds{0});
  Timing timing{kWarmUp, length, length / 2000, writes_left()};
  const auto sample = drive_->measure(cell, timing);
  if (stopped()) return;
  auto result = CellResult::of(cell);
  result.add(sample);
  result_.cells.push_back(std::move(result));
  if (!proof.holds()) return;
  result_.cliff = bench::find_cliff(sample.timeline);
  result_.sustained_gb_s = bench::speeds_of(sample.timeline, 160);
  if (!sample.timeline.empty()) result_.sustained_seconds = sample.timeline.back().seconds;
}

// As many blocks as a slow drive reads in that time.
void DriveSession::verify(Nanoseconds deadline) {
  options_.progress("reading back");
  const double in_time = to_seconds(deadline - now()) * speed_gb_s_ * 1e9 / kUsualBlock;
  const int blocks =
      static_cast<int>(std::clamp<double>(in_time, kLeastVerifyBlocks, kVerifyBlocks));
  result_.verified = drive_->verify(blocks);
  result_.verified_blocks = blocks;
  if (!result_.verified.empty()) {
    refuse("everything", {"wrong_data", "data that was read back is not what was written: " +
                                            result_.verified + "; do not use this drive"});
  }
}

// With one of them goes all that was made from the same measurements.
void DriveSession::refuse_impossible_speeds() {
  const auto refused = std::erase_if(result_.cells, [&](const CellResult& cell) {
    const double fastest =
        cell.cell.pattern == Pattern::mix || cell.cell.pattern == Pattern::optimizer_step
            ? cell.median_gb_s() / 2  // the link carries both ways at once
            : cell.median_gb_s();
    const auto refusal = bench::refuse_ceiling(fastest, facts().ceiling_gb_s);
    if (!refusal) return false;
    refuse(pattern_name(cell.cell.pattern) + " " + cell_text(cell.cell), *refusal);
    return true;
  });
  if (refused == 0) return;
  result_.knee = {};
  result_.knee.why_not = "speeds above the link's ceiling were refused";
  result_.cliff = {};
  result_.sustained_gb_s.clear();
  result_.duels.clear();
  result_.engines.clear();
}

bool DriveSession::run(bench::TimePlan& plan) {
  try {
    return measure(plan);
  } catch (const Error& error) {  // the other drives can be measured still
    refuse("everything", {"failed", error.what()});
    result_.measured = false;
    drive_.reset();
    return false;
  }
}

// What is only compared must not cost what was measured.
void DriveSession::beside(const std::function<void()>& comparison) {
  try {
    comparison();
  } catch (const Error& error) {
    result_.engine.notes.push_back(std::string("not compared: ") + error.what());
  }
}

bool DriveSession::measure(bench::TimePlan& plan) {
  const auto& effort = options_.effort;
  double weights =
      PhaseWeights::own(effort) + (options_.fio != nullptr ? PhaseWeights::fio(effort) : 0.0);
  const auto phase = [&](double weight) {
    weights -= weight;
    return plan.deadline(now(), weight);
  };
  const auto begin = bench::machine_counters(facts().folder);
  if (!open() || !prepare(phase(PhaseWeights::kFill))) {
    plan.drop(weights);
    return false;
  }
  sweep(phase(PhaseWeights::kSweep));
  duel(phase(PhaseWeights::kDuel));
  patterns(phase(PhaseWeights::kPatterns));
  sustained(phase(PhaseWeights::kSustained));
  if (effort.extras) {
    const auto by = phase(PhaseWeights::kThreads);
    beside([&] { threads(by); });
    const auto then_by = phase(PhaseWeights::kEngines);
    beside([&] { engines(then_by); });
  }
  // Before fio, which leaves its own data in the file.
  const auto verified_by = phase(PhaseWeights::kVerify);
  if (!stopped() && !result_.read_only) verify(verified_by);
  if (options_.fio != nullptr) compare_with_fio(phase(PhaseWeights::fio(effort)));
  plan.drop(weights);
  if (stopped()) return false;
  conclude(begin);
  return result_.measured;
}

void DriveSession::conclude(const bench::MachineCounters& begin) {
  if (const auto refusal = drive_->refuse_file()) refuse("everything", *refusal);
  refuse_impossible_speeds();
  result_.claimed = claims();
  const auto end = bench::machine_counters(facts().folder);
  if (begin.drive && end.drive) result_.counted = *end.drive - *begin.drive;
  result_.temperature_after_c = drive_facts(options_.directory, options_.sysfs_root).temperature_c;
  const bool refused = std::ranges::any_of(
      result_.refused, [](const Refused& each) { return each.what == "everything"; });
  const bool written =
      result_.of(Pattern::overwrite) != nullptr && result_.of(Pattern::optimizer_step) != nullptr;
  result_.measured =
      !refused && result_.of(Pattern::read) != nullptr && (written || result_.read_only);
}

bench::MovedBytes DriveSession::claims() const {
  auto claims = other_claims_;
  if (!drive_) return claims;
  claims.read += drive_->claimed().read;
  claims.written += drive_->claimed().written;
  return claims;
}

DriveResult DriveSession::take() {
  drive_.reset();
  return std::move(result_);
}

}  // namespace terrace::cli
