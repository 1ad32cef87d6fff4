// A disk in memory whose writes are safe only once they are flushed, and whose power can be cut.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "terrace/io_engine.h"

namespace terrace {

struct SimulatedDiskOptions {
  bool write_cache = true;  // false: a write is durable when it completes
  bool shuffled = true;     // false: requests complete in order, all of them in the next reap()
  std::uint64_t seed = 0;   // of the order of completions
};

// Files by path, used through the engines of make_memory_engine(disk). Operations are requests,
// opens and removals, counted together from 1 in the order of their submission.
//
// A write is seen by reads when it completes and lies in the cache until a flush of its file covers
// it: a flush covers the writes that had completed when it was submitted. The creation and removal
// of names, and a file's size, are durable when open() and remove() return. A power cut takes what
// lies in the cache (see restart()) and all scratch files.
//
// Thread rule: any thread; one lock. Owned by whoever restarts it, and by the engines.
class SimulatedDisk {
 public:
  explicit SimulatedDisk(SimulatedDiskOptions options = {});
  ~SimulatedDisk();

  // From the n-th operation since construction or restart() on, nothing happens and everything
  // fails with EIO, as do earlier requests that are not complete by then; of their writes any part
  // may survive. 0: never. A number that has passed: now.
  void cut_power_at(std::uint64_t operation);
  bool has_power() const;
  std::uint64_t operations() const;

  // Cuts the power, if it is on, and gives it back. Of the writes that were not durable any set of
  // sectors (512 bytes) survives, and of several to one sector any one wins: `seed` chooses, among
  // other outcomes that none and that all do. Engines made before have lost the disk and fail with
  // EIO for ever; new ones find the files with mode `existing`. Counting begins again.
  void restart(std::uint64_t seed);

  // Another disk with the same names, bytes, caches and options, with power, used by no engine yet;
  // scratch files are not on it. No write may be in flight.
  std::shared_ptr<SimulatedDisk> copy() const;

  // For the memory engine.
  struct File;
  // A request that was taken: what it may still do, and what a flush covers.
  struct Admission {
    std::uint64_t epoch = 0;
    bool powered = false;
    std::uint64_t covered = 0;
  };
  std::uint64_t epoch() const;
  std::shared_ptr<File> open(const IoFileOptions& options, std::uint64_t epoch);
  bool exists(const std::string& path, std::uint64_t epoch) const;
  void remove(const std::string& path, std::uint64_t epoch);
  static Bytes size_of(const File& file);
  Admission admit(const File& file, std::uint64_t epoch);
  // Does what `request` asks for, when it still can: 0 or EIO. Within the file and aligned.
  int serve(const IoRequest& request, File& file, const Admission& admission);
  // How many of `waiting` requests the next reap() serves, and which of them comes next.
  std::size_t batch(std::size_t waiting);
  std::size_t pick(std::size_t waiting);

 private:
  bool powered(std::uint64_t epoch) const;
  bool count(std::uint64_t epoch);
  void refuse_without_power(const std::string& what, std::uint64_t epoch) const;
  std::shared_ptr<File> find(const std::string& path) const;
  std::shared_ptr<File> make(const IoFileOptions& options) const;
  void write(const IoRequest& request, File& file);

  const SimulatedDiskOptions options_;
  mutable std::mutex mutex_;  // guards everything below
  std::map<std::string, std::shared_ptr<File>> names_;
  std::mt19937_64 random_;
  std::uint64_t epoch_ = 0;  // number of restarts
  std::uint64_t operations_ = 0;
  std::uint64_t cut_at_ = 0;
};

}  // namespace terrace
