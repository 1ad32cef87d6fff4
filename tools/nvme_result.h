// What `terrace nvme bench` found out, before it is printed, drawn or written.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nvme/cliff.h"
#include "nvme/drive_statistics.h"
#include "nvme/measured_drive.h"
#include "nvme/sweep.h"
#include "nvme/training_verdict.h"
#include "nvme/uplink.h"
#include "tiers/drive_facts.h"

namespace terrace::cli {

// How long and how much.
struct Effort {
  std::string name;        // "quick", "standard", "thorough"
  double seconds = 60;     // of the whole run, fio aside
  double fio_seconds = 0;  // added by --fio
  Bytes file;              // the scratch file of each drive
  Bytes write_limit;       // written to each drive at most
  std::vector<std::uint64_t> blocks;
  std::vector<std::uint32_t> depths;
  Nanoseconds slice{0};  // of one visit to a cell
  bool extras = true;    // threads and engines are compared, too
};

// The same cell measured by fio, in turn with ours.
struct FioComparison {
  std::vector<double> gb_s;       // fio's
  bench::PairedRatio speed;       // ours over fio's
  bench::PairedRatio cpu;         // CPU seconds per GB, ours over fio's
  double cpu_seconds_per_gb = 0;  // fio's, median
  std::string command;
  bool huge_pages = false;  // fio's buffers lie in them, as ours do
  std::string noise;  // what disturbed it, when it is too noisy
};

struct CellResult {
  bench::Cell cell;
  std::vector<double> gb_s;  // of each visit
  std::vector<double> cpu_seconds_per_gb;
  std::vector<double> system_calls_per_gb;
  bench::LatencyHistogram read, write, flush;  // of all visits
  std::optional<FioComparison> fio;
  bool in_sweep = false;

  static CellResult of(const bench::Cell& cell, bool in_sweep = false);
  void add(const bench::Sample& sample);
  double median_gb_s() const { return bench::median(gb_s); }
  // Of the direction that the pattern is about: writes where it only writes, else reads.
  const bench::LatencyHistogram& latency() const { return read.count() > 0 ? read : write; }
};

// Something that was measured, or could not be, and does not count.
struct Refused {
  std::string directory;
  std::string what;  // "everything", "sweep", "read 1 MiB x 8", ...
  bench::Refusal why;
};

// Two settings or engines measured in turn.
struct Versus {
  std::string what;  // "1.00 MiB x 4 against the default 1.00 MiB x 32"
  bench::Pattern pattern = bench::Pattern::read;
  std::uint64_t block_bytes = 0;
  std::uint32_t depth = 0;
  bench::PairedRatio ratio;
};

struct DriveResult {
  std::string directory;
  DriveFacts facts;
  std::optional<double> temperature_after_c;
  bool measured = false;   // false: only facts and refusals
  bool read_only = false;  // a file that was there: nothing is written, there is no verdict
  IoFileInfo file;
  IoEngineInfo engine;
  std::string system_calls_note;
  std::vector<CellResult> cells;
  bench::Knee knee;
  std::vector<Versus> duels;    // settings over the runtime's default, by the optimizer's traffic
  std::vector<Versus> engines;  // threads over io_uring
  std::optional<bench::Cliff> cliff;
  std::vector<double> sustained_gb_s;  // over equal times, for the picture
  double sustained_seconds = 0;
  std::vector<Refused> refused;
  std::string fio_note;  // why there is no comparison
  std::string verified;  // what is wrong with data read back; empty: nothing
  int verified_blocks = 0;
  bench::Disturbance disturbance;
  bench::MovedBytes claimed;
  std::optional<bench::MovedBytes> counted;  // by the drive, others' included

  // The longest measurement of a pattern; null when there is none.
  const CellResult* of(bench::Pattern pattern) const;
  std::string name() const { return facts.device.empty() ? directory : facts.device; }
};

struct TogetherResult {
  bench::Scaling read;
  bench::Scaling write;
  std::vector<bench::SharedUplink> uplinks;  // by measurement of reads
  std::vector<std::string> notes;
};

struct ModelVerdict {
  std::string name;
  double parameters = 0;
  bench::TrainingVerdict verdict;
  bool too_noisy = false;    // at the speeds' upper limits it hides, at the lower ones it does not
  std::optional<bool> fits;  // on what is free
};

struct BenchResult {
  Effort effort;
  std::uint64_t seed = 0;
  bool with_fio = false;
  double seconds = 0;  // spent
  bool interrupted = false;
  std::vector<DriveResult> drives;
  std::optional<TogetherResult> together;
  std::vector<ModelVerdict> verdicts;
  std::optional<double> compute_seconds;
  std::optional<double> rated_bytes;
  std::optional<bench::DriveSpeeds> speeds;  // of one drive, that the verdict stands on
  std::string no_verdict;                    // why there is none
};

// "1.00 MiB x 8", with " x 2 threads" when there are several
std::string cell_text(const bench::Cell& cell);

// 0: measured, and every model hides if that was asked. 1: one does not. 2: not measured, or too
// noisy to tell. 130: interrupted.
int exit_code(const BenchResult& result);

}  // namespace terrace::cli
