#include "nvme/load_worker.h"

#include <cstring>
#include <utility>

#include "nvme/measure_counters.h"
#include "terrace/error.h"

namespace terrace::bench {
namespace {

constexpr Nanoseconds kTurn = std::chrono::milliseconds(100);

// Counts the system calls made while `load` runs.
template <class Load>
LoadResult counted(const SystemCallCounter& calls, Load&& load) {
  const auto before = calls.count();
  auto result = load();
  const auto after = calls.count();
  constexpr std::uint64_t kToCount = 1;  // reading the counter
  if (before && after) result.system_calls = *after - *before - kToCount - result.stamp_calls;
  return result;
}

// Reads [offset, offset + bytes) into the memory's target half.
void read_back(IoEngine& engine, FileId file, const LoadMemory& memory, std::uint64_t offset,
               std::uint64_t bytes) {
  TERRACE_CHECK(
      engine.submit({Ticket{}, IoOperation::read, file, offset, memory.target(0), bytes}));
  engine.flush();
  std::vector<Completion> completions;
  while (completions.empty()) engine.reap(completions, kTurn);
  const int error = completions.front().error;
  if (error != 0) {
    throw Error(ErrorCode::io, "reading back " + std::to_string(bytes) + " bytes at offset " +
                                   std::to_string(offset) + " of " + engine.file_info(file).path +
                                   " failed: " + std::strerror(error) +
                                   "; see whether the drive is healthy (dmesg)");
  }
}

}  // namespace

// Members are made in this order: the counter must see the engine's own threads.
struct LoadWorker::Tools {
  explicit Tools(const WorkerOptions& options)
      : memory(options.buffer_bytes, options.seed), engine(options.make_engine(options.engine)) {
    file = engine->open(options.file);
    const std::span<std::byte> whole = memory.whole();
    engine->register_buffers({&whole, 1});
  }
  ~Tools() { engine->close(file); }
  Tools(const Tools&) = delete;

  SystemCallCounter calls;
  LoadMemory memory;
  std::unique_ptr<IoEngine> engine;
  FileId file;
};

LoadWorker::LoadWorker(const WorkerOptions& options) {
  std::promise<void> opened;
  auto ready = opened.get_future();
  thread_ = std::thread([this, options, promise = std::move(opened)]() mutable {
    work(options, std::move(promise));
  });
  try {
    ready.get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

LoadWorker::~LoadWorker() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  posted_.notify_one();
  thread_.join();
}

void LoadWorker::work(const WorkerOptions& options, std::promise<void> opened) {
  std::optional<Tools> tools;
  try {
    tools.emplace(options);
    file_ = tools->engine->file_info(tools->file);
    engine_ = tools->engine->info();
    system_calls_note_ = tools->calls.why_not();
  } catch (...) {
    opened.set_exception(std::current_exception());
    return;
  }
  opened.set_value();
  for (;;) {
    std::unique_lock lock(mutex_);
    posted_.wait(lock, [&] { return stop_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    const auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task(*tools);
  }
}

void LoadWorker::post(std::function<void(Tools&)> task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  posted_.notify_one();
}

std::future<LoadResult> LoadWorker::start(const LoadJob& job) {
  auto task = std::make_shared<std::packaged_task<LoadResult(Tools&)>>([job](Tools& tools) {
    const auto alignment = tools.engine->file_info(tools.file).alignment;
    const auto stream =
        make_stream(job.pattern, {job.begin, job.end, alignment}, job.block_bytes, job.start);
    return counted(tools.calls, [&] {
      return run_load(*tools.engine, tools.file, tools.memory, *stream, job.block_bytes,
                      job.limits);
    });
  });
  auto result = task->get_future();
  post([task](Tools& tools) { (*task)(tools); });
  return result;
}

std::future<std::string> LoadWorker::verify(std::uint64_t region_bytes, std::uint64_t block_bytes,
                                            int count) {
  auto task = std::make_shared<std::packaged_task<std::string(Tools&)>>([=](Tools& tools) {
    const auto blocks = region_bytes / block_bytes;
    for (int i = 0; i < count && blocks > 0; ++i) {
      const auto part = static_cast<std::uint64_t>(i) * blocks / static_cast<std::uint64_t>(count);
      const auto offset = part * block_bytes;
      read_back(*tools.engine, tools.file, tools.memory, offset, block_bytes);
      const auto wrong = tools.memory.check({tools.memory.target(0), block_bytes}, offset);
      if (wrong) return *wrong;
    }
    return std::string();
  });
  auto result = task->get_future();
  post([task](Tools& tools) { (*task)(tools); });
  return result;
}

}  // namespace terrace::bench
