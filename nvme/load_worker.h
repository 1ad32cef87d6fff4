// A thread that owns an I/O engine with one file, and runs loads on it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

#include "nvme/load_runner.h"

namespace terrace::bench {

using EngineFactory = std::function<std::unique_ptr<IoEngine>(const IoEngineOptions&)>;

struct WorkerOptions {
  IoFileOptions file;
  std::uint64_t buffer_bytes = 0;  // the most that is in flight
  std::uint64_t seed = 0;          // of the data
  IoEngineOptions engine;
  EngineFactory make_engine = make_io_engine;
};

struct LoadJob {
  Pattern pattern = Pattern::read;
  std::uint64_t block_bytes = 0;
  std::uint64_t begin = 0;  // of the part of the file that is used
  std::uint64_t end = 0;
  std::uint64_t start = 0;
  LoadLimits limits;
};

// Thread rule: one thread at a time. Errors of the thread come out of the futures.
class LoadWorker {
 public:
  // Returns when the file is open; throws what opening it threw, and leaves nothing behind.
  explicit LoadWorker(const WorkerOptions& options);
  // Waits for what was started.
  ~LoadWorker();
  LoadWorker(const LoadWorker&) = delete;

  const IoFileInfo& file() const { return file_; }
  const IoEngineInfo& engine() const { return engine_; }
  const std::string& system_calls_note() const { return system_calls_note_; }

  std::future<LoadResult> start(const LoadJob& job);
  // Reads `count` blocks, evenly spread over the first `region_bytes`, and compares them with what
  // was written there. Empty when all are right; otherwise what is wrong with the first.
  std::future<std::string> verify(std::uint64_t region_bytes, std::uint64_t block_bytes, int count);

 private:
  struct Tools;  // what the thread owns
  void work(const WorkerOptions& options, std::promise<void> opened);
  void post(std::function<void(Tools&)> task);

  IoFileInfo file_;
  IoEngineInfo engine_;
  std::string system_calls_note_;
  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<std::function<void(Tools&)>> tasks_;  // guarded by mutex_
  bool stop_ = false;                              // guarded by mutex_
  std::thread thread_;
};

}  // namespace terrace::bench
