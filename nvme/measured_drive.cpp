#include "nvme/measured_drive.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <utility>

#include "terrace/error.h"

namespace terrace::bench {
namespace {

constexpr std::uint32_t kMostDepth = 256;
constexpr std::uint64_t kMostBlock = std::uint64_t{64} << 20;
constexpr std::uint64_t kVerifyBlock = std::uint64_t{1} << 20;
constexpr std::uint64_t kStride = 7919;  // of the places where repeats begin; a prime

const char* name_of(IoOperation operation) {
  switch (operation) {
    case IoOperation::read: return "reading";
    case IoOperation::write: return "writing";
    case IoOperation::flush: return "flushing";
  }
  return "";
}

// Of times that a throughput is measured over, the sum of each thread's own.
void add(Sample& sample, LoadResult& result) {
  if (result.seconds > 0) {
    sample.read_gb_s += static_cast<double>(result.read_bytes) / result.seconds * 1e-9;
    sample.write_gb_s += static_cast<double>(result.written_bytes) / result.seconds * 1e-9;
  }
  if (result.all_seconds > 0) {
    sample.whole_gb_s += static_cast<double>(result.all_read_bytes + result.all_written_bytes) /
                         result.all_seconds * 1e-9;
  }
  sample.seconds = std::max(sample.seconds, result.seconds);
  sample.read.add(result.read);
  sample.write.add(result.write);
  sample.flush.add(result.flush);
  sample.moved.read += result.all_read_bytes;
  sample.moved.written += result.all_written_bytes;
  sample.complete = sample.complete && result.complete;
  if (sample.timeline.empty()) sample.timeline = std::move(result.timeline);
}

// Blocks complete out of order: of a file that is not written to its end, the last ones may have a
// gap among them.
std::uint64_t surely_written(std::uint64_t written, std::uint64_t wanted, std::uint64_t in_flight) {
  return written >= wanted ? written : written - std::min(written, in_flight);
}

}  // namespace

MeasuredDrive::MeasuredDrive(DriveOptions options) : options_(std::move(options)) {
  options_.engine.queue_depth = kMostDepth;
  options_.engine.block = {kMostBlock};
  read_only_ = std::filesystem::is_regular_file(options_.path);
  add_worker();
  if (read_only_) written_ = file().size.count;
}

// The first one makes the file; a scratch file has no name, but a path to the open one.
void MeasuredDrive::add_worker() {
  const bool first = workers_.empty();
  WorkerOptions worker;
  worker.file.path = options_.path;
  worker.file.mode = IoFileMode::existing;
  if (!read_only_ && first) {
    worker.file.path += "/terrace.bench";
    worker.file.mode = IoFileMode::scratch;
    worker.file.size = options_.size;
  } else if (!read_only_) {
    worker.file.path = file().path;
  }
  worker.buffer_bytes = first ? options_.buffer_bytes : options_.helper_buffer_bytes;
  worker.seed = options_.seed;  // the same data, so that one can check what another wrote
  worker.engine = options_.engine;
  worker.make_engine = options_.make_engine;
  workers_.push_back(std::make_unique<LoadWorker>(worker));
}

Sample MeasuredDrive::fill(std::uint64_t bytes, std::uint64_t block_bytes, std::uint32_t depth,
                           Nanoseconds at_most) {
  TERRACE_CHECK(!read_only_);
  const auto begin = written_;
  const auto end = std::min(file().size.count, begin + bytes);
  LoadJob job{Pattern::first_write, block_bytes, begin, end, 0, {}};
  job.limits = {.depth = depth, .measure = at_most, .stop = options_.stop};
  cpu_before_ = process_cpu_seconds();
  running_.clear();
  running_.push_back(workers_.front()->start(job));
  auto sample = finish();
  written_ = begin + surely_written(sample.moved.written, end - begin, depth * block_bytes);
  return sample;
}

void MeasuredDrive::prepare_threads(std::uint32_t threads) {
  while (workers_.size() < threads) add_worker();
}

bool MeasuredDrive::can(const Cell& cell) const {
  if (cell.threads > workers_.size() || cell.depth > kMostDepth || cell.block_bytes > kMostBlock) {
    return false;
  }
  if (cell.block_bytes % file().alignment != 0) return false;
  if (read_only_ && writes(cell.pattern)) return false;
  const auto most = cell.threads == 1 ? options_.buffer_bytes : options_.helper_buffer_bytes;
  if (cell.depth * cell.block_bytes > most) return false;
  return written_ >= 2 * cell.block_bytes * std::max<std::uint64_t>(cell.depth, 2);
}

Sample MeasuredDrive::measure(const Cell& cell, const Timing& timing) {
  start(cell, timing);
  return finish();
}

// Threads begin far from each other, so that they do not read and write one place at once.
void MeasuredDrive::start(const Cell& cell, const Timing& timing) {
  TERRACE_CHECK(can(cell));
  running_.clear();
  cpu_before_ = process_cpu_seconds();
  ++visits_;
  for (std::uint32_t i = 0; i < cell.threads; ++i) {
    const auto start = timing.first_block.value_or(visits_ * kStride) +
                       written_ / cell.block_bytes * i / cell.threads;
    LoadJob job{cell.pattern, cell.block_bytes, 0, written_, start, {}};
    job.limits = {cell.depth,           timing.warm_up, timing.measure, timing.most_bytes,
                  timing.timeline_step, options_.stop,  timing.same_data};
    running_.push_back(workers_[i]->start(job));
  }
}

Sample MeasuredDrive::finish() {
  std::vector<LoadResult> results;
  for (auto& running : running_) results.push_back(running.get());
  running_.clear();
  return join(results, process_cpu_seconds() - cpu_before_);
}

Sample MeasuredDrive::join(std::vector<LoadResult>& results, double cpu_seconds) {
  Sample sample;
  sample.complete = true;
  std::optional<double> calls = 0;
  for (auto& result : results) {
    cpu_seconds -= result.stamp_cpu_seconds;
    if (result.system_calls && calls) *calls += static_cast<double>(*result.system_calls);
    if (!result.system_calls) calls.reset();
    add(sample, result);
  }
  claimed_.read += sample.moved.read;
  claimed_.written += sample.moved.written;
  for (const auto& result : results) {
    if (result.error == 0) continue;
    throw Error(ErrorCode::io, std::string(name_of(result.failed)) + " at offset " +
                                   std::to_string(result.failed_offset) +
                                   " of the scratch file in " + options_.path +
                                   " failed: " + std::strerror(result.error) +
                                   "; see whether the drive is healthy (dmesg)");
  }
  sample.gb_s = sample.read_gb_s + sample.write_gb_s;
  const double gb = static_cast<double>(sample.moved.read + sample.moved.written) * 1e-9;
  if (gb > 0) {
    sample.cpu_seconds_per_gb = std::max(0.0, cpu_seconds) / gb;
    if (calls) sample.system_calls_per_gb = *calls / gb;
  }
  return sample;
}

std::string MeasuredDrive::verify(int blocks) {
  if (read_only_) return {};
  return workers_.front()->verify(written_, kVerifyBlock, blocks).get();
}

std::optional<Refusal> MeasuredDrive::refuse_file() const {
  const auto& path = file().path;
  if (auto refusal = refuse_extents(file_extents(path, written_), written_)) return refusal;
  return refuse_cached(cached_bytes(path, written_), written_);
}

}  // namespace terrace::bench
