// A directory on a drive, as the bench sees it: a scratch file in it, and speeds measured on that.
#pragma once

#include <memory>
#include <vector>

#include "nvme/load_worker.h"
#include "nvme/measure_proof.h"

namespace terrace::bench {

// One way to use a drive. Each thread has its own engine and `depth` requests in flight.
struct Cell {
  Pattern pattern = Pattern::read;
  std::uint64_t block_bytes = 1 << 20;
  std::uint32_t depth = 1;
  std::uint32_t threads = 1;
  friend auto operator<=>(const Cell&, const Cell&) = default;
};

// One visit to a cell.
struct Sample {
  double gb_s = 0;  // both directions together
  double read_gb_s = 0;
  double write_gb_s = 0;
  double seconds = 0;  // counted
  double cpu_seconds_per_gb = 0;  // the making of the data apart
  std::optional<double> system_calls_per_gb;
  LatencyHistogram read, write, flush;
  MovedBytes moved;       // with ramp-up and drain, which are not counted
  double whole_gb_s = 0;  // with them, as tools without a window report it
  std::vector<TimelinePoint> timeline;
  bool complete = false;  // false: interrupted, or too slow for its time
};

struct Timing {
  Nanoseconds warm_up = std::chrono::milliseconds(10);
  Nanoseconds measure = std::chrono::milliseconds(50);
  Nanoseconds timeline_step{0};
  std::uint64_t most_bytes = ~std::uint64_t{0};
  // Every write carries what its buffer held before, as fio does without scrambling: nothing
  // written so is found again by verify().
  bool same_data = false;
  std::optional<std::uint64_t> first_block = std::nullopt;  // absent: another one every time
};

struct DriveOptions {
  // A directory, for a scratch file in it that is gone afterwards, or when the process is killed;
  // or a regular file, which is only read.
  std::string path;
  Bytes size;                                    // of the scratch file
  std::uint64_t buffer_bytes = 64 << 20;         // in flight at most, of the first thread
  std::uint64_t helper_buffer_bytes = 16 << 20;  // of each further thread
  std::uint64_t seed = 1;
  IoEngineOptions engine;
  EngineFactory make_engine = make_io_engine;
  const std::atomic<bool>* stop = nullptr;
};

// Thread rule: one thread at a time.
class MeasuredDrive {
 public:
  // Makes and reserves the scratch file, or opens the one that is there. Throws Error(io) with what
  // to do.
  explicit MeasuredDrive(DriveOptions options);

  const IoFileInfo& file() const { return workers_.front()->file(); }
  const IoEngineInfo& engine() const { return workers_.front()->engine(); }
  const std::string& system_calls_note() const { return workers_.front()->system_calls_note(); }
  bool read_only() const { return read_only_; }
  // Loads keep to them. 0 before fill(); the whole file when it was there.
  std::uint64_t written_bytes() const { return written_; }

  // Goes on writing the file where it is not written yet, `bytes` more for at most `at_most`: the
  // first-write pattern, and what all others stand on.
  Sample fill(std::uint64_t bytes, std::uint64_t block_bytes, std::uint32_t depth,
              Nanoseconds at_most);
  // Makes sure that so many threads can work on the file.
  void prepare_threads(std::uint32_t threads);

  // Whether there is memory and written file for it. In-flight bytes are bounded by the buffers.
  bool can(const Cell& cell) const;
  // Error(io) when the drive refuses an operation.
  Sample measure(const Cell& cell, const Timing& timing);
  // The same in two halves, so that several drives can be measured at once.
  void start(const Cell& cell, const Timing& timing);
  Sample finish();

  // What was read back and compared differs: why. Empty: all right.
  std::string verify(int blocks);
  // Why the file is none that proves anything: its extents, or that it is cached.
  std::optional<Refusal> refuse_file() const;

  // Everything that was asked of the drive so far.
  MovedBytes claimed() const { return claimed_; }

 private:
  void add_worker();
  Sample join(std::vector<LoadResult>& results, double cpu_seconds);

  DriveOptions options_;
  std::vector<std::unique_ptr<LoadWorker>> workers_;
  std::uint64_t written_ = 0;
  bool read_only_ = false;
  std::vector<std::future<LoadResult>> running_;
  double cpu_before_ = 0;
  std::uint64_t visits_ = 0;
  MovedBytes claimed_;
};

}  // namespace terrace::bench
