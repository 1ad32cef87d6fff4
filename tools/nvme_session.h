// One drive, measured phase by phase.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <random>

#include "nvme/time_plan.h"
#include "tools/nvme_fio.h"
#include "tools/nvme_result.h"

namespace terrace::cli {

struct SessionOptions {
  std::string directory;
  Effort effort;
  IoEngineKind engine = IoEngineKind::automatic;
  std::string sysfs_root;
  bool allow_unproven = false;  // network and overlay file systems are measured, too
  std::uint64_t seed = 1;
  const Fio* fio = nullptr;  // null: no comparison
  const std::atomic<bool>* stop = nullptr;
  std::function<void(const std::string&)> progress = [](const std::string&) {};
};

// "optimizer step"
std::string pattern_name(bench::Pattern pattern);
// For requests in flight: a sixteenth of what is free, so that the machine does not swap.
std::uint64_t buffer_bytes();

// The shares of the time that a drive's phases get.
struct PhaseWeights {
  static constexpr double kFill = 12;
  static constexpr double kSweep = 38;
  static constexpr double kPatterns = 22;
  static constexpr double kSustained = 12;
  static constexpr double kDuel = 7;
  static constexpr double kThreads = 5;
  static constexpr double kEngines = 8;
  static constexpr double kVerify = 2;
  static double own(const Effort& effort);  // of one drive, without fio
  static double fio(const Effort& effort);  // of --fio, so that the other phases keep their time
};

// Thread rule: one thread at a time. The scratch files live as long as this.
class DriveSession {
 public:
  // Looks at the facts only; throws Error(io) when the directory cannot be looked at.
  explicit DriveSession(SessionOptions options);

  const DriveFacts& facts() const { return result_.facts; }
  // The scratch file's size, and the most that will be written in all.
  Bytes file_bytes() const { return file_bytes_; }
  // Why the directory is refused before anything is tried; absent: it is not.
  std::optional<bench::Refusal> objection() const;

  // Everything that concerns this drive alone; false when it was refused, failed or was stopped.
  bool run(bench::TimePlan& plan);

  // For measurements together with other drives; null before run(), or when that refused.
  bench::MeasuredDrive* drive() { return drive_.get(); }
  // The setting that patterns are measured with: the recommended one, or a usual one.
  bench::Cell setting(bench::Pattern pattern) const;
  bool writes_allowed() const;

  // The result; the session is over.
  DriveResult take();

 private:
  friend class PhaseProof;
  bool measure(bench::TimePlan& plan);
  bool open();
  bool prepare(Nanoseconds deadline);
  bool fill(Nanoseconds deadline);
  void sweep(Nanoseconds deadline);
  void patterns(Nanoseconds deadline);
  void pattern(bench::Pattern pattern, Nanoseconds length);
  void sustained(Nanoseconds deadline);
  void duel(Nanoseconds deadline);
  void judge_duel(const std::vector<bench::Cell>& rivals,
                  const std::vector<std::vector<double>>& seen);
  void beside(const std::function<void()>& comparison);
  void threads(Nanoseconds deadline);
  void engines(Nanoseconds deadline);
  void compare_with_fio(Nanoseconds deadline);
  void compare_with_fio(CellResult& cell, Nanoseconds deadline);
  void verify(Nanoseconds deadline);
  void conclude(const bench::MachineCounters& begin);
  bench::MovedBytes claims() const;

  bool stopped() const;
  std::uint64_t writes_left() const;
  // Whether the limit of writes has room for it.
  bool may_run(const bench::Cell& cell) const;
  bench::Timing slice(const bench::Cell& cell, Nanoseconds least) const;
  // How long a visit of the cell takes in all, about.
  Nanoseconds visit(const bench::Cell& cell, Nanoseconds least) const;
  void refuse(const std::string& what, const bench::Refusal& why);
  void refuse_impossible_speeds();

  SessionOptions options_;
  DriveResult result_;
  Bytes file_bytes_;
  std::unique_ptr<bench::MeasuredDrive> drive_;
  std::mt19937_64 random_;
  double speed_gb_s_ = 0.2;         // a guess from what was measured last, for lengths of slices
  bench::MovedBytes other_claims_;  // of files other than drive_'s
  std::uint64_t fio_written_ = 0;
};

}  // namespace terrace::cli
