// What the pool's workers do: jobs that are cut into tiles.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "terrace/adam.h"

namespace terrace {

class AdamJob {
 public:
  virtual ~AdamJob() = default;
  virtual std::uint64_t tiles() const = 0;
  virtual std::uint64_t bytes() const = 0;  // Completion.bytes
  virtual bool paced() const = 0;           // whether an emulated speed counts those bytes
  // Thread rule: any thread; different tiles at the same time.
  virtual void work(std::uint64_t tile) const = 0;
  // After all tiles, by one thread.
  virtual void finish() const {}
};

// Each throws Error(invalid_argument) saying what has no meaning.
std::unique_ptr<AdamJob> make_update_job(std::vector<AdamScalars> groups,
                                         std::vector<AdamRun> runs);
std::unique_ptr<AdamJob> make_gradient_job(GradientJob job);
std::unique_ptr<AdamJob> make_addition_job(const GradientAddition& addition);
std::unique_ptr<AdamJob> make_hash_job(const HashJob& job);

}  // namespace terrace
