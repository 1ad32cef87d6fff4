#include "nvme/load_runner.h"

#include <algorithm>

#include "nvme/measure_counters.h"
#include "terrace/error.h"

namespace terrace::bench {
namespace {

constexpr Nanoseconds kTurn = std::chrono::milliseconds(50);  // between looks at the stop flag

class Runner {
 public:
  Runner(IoEngine& engine, FileId file, LoadMemory& memory, LoadStream& stream,
         std::uint64_t block_bytes, const LoadLimits& limits)
      : engine_(engine),
        file_(file),
        memory_(memory),
        stream_(stream),
        block_(block_bytes),
        limits_(limits),
        lag_(stream.lag()),
        slots_(limits.depth) {
    TERRACE_CHECK(limits.depth >= 1 && limits.depth * block_bytes <= memory.bytes());
    for (auto slot = limits.depth; slot-- > 0;) free_.push_back(slot);
    completions_.reserve(limits.depth);
  }

  LoadResult run() {
    began_ = steady_clock().now();
    window_opens_ = began_ + limits_.warm_up;
    next_ = stream_.next();
    for (;;) {
      // 1. Keep the queue full.
      fill();
      if (free_.size() == slots_.size()) break;
      // 2. Wait for something to complete.
      completions_.clear();
      if (engine_.reap(completions_, kTurn) == 0) {
        look_at_stop();
        continue;
      }
      // 3. Count it.
      for (const auto& completion : completions_) settle(completion);
      // 4. Open or close the window at this point in time.
      turn_window(steady_clock().now());
      look_at_stop();
    }
    if (opened_ && !closed_) close_window(steady_clock().now());
    result_.all_seconds = to_seconds(steady_clock().now() - began_);
    result_.complete = closed_ && !stopped_ && result_.error == 0;
    return std::move(result_);
  }

 private:
  struct Slot {
    LoadRequest request;
    bool busy = false;
  };

  void look_at_stop() {
    if (limits_.stop == nullptr || !limits_.stop->load(std::memory_order_relaxed)) return;
    stopped_ = ending_ = true;
  }

  bool may_start(const LoadRequest& request) const {
    if (lag_ == LoadStream::kNoLag) return true;
    return std::ranges::none_of(slots_, [&](const Slot& slot) {
      return slot.busy && slot.request.group + lag_ <= request.group;
    });
  }

  void fill() {
    while (!ending_ && next_ && !free_.empty() && may_start(*next_)) {
      const auto index = free_.back();
      const auto place = index * block_;
      const auto& request = *next_;
      std::byte* data = nullptr;
      if (request.operation == IoOperation::write) {
        stamp(place, request);
        data = memory_.source(place);
      } else {
        data = memory_.target(place);
      }
      if (!engine_.submit(
              {Ticket{index}, request.operation, file_, request.offset, data, request.bytes})) {
        break;
      }
      free_.pop_back();
      slots_[index] = {request, true};
      started_bytes_ += request.bytes;
      next_ = stream_.next();
      if (started_bytes_ >= limits_.most_bytes) ending_ = true;
    }
  }

  void stamp(std::uint64_t place, const LoadRequest& request) {
    if (limits_.same_data) return;
    const double before = thread_cpu_seconds();
    memory_.stamp(place, request.bytes, request.offset);
    result_.stamp_cpu_seconds += thread_cpu_seconds() - before;
    result_.stamp_calls += 2;
  }

  void settle(const Completion& completion) {
    auto& slot = slots_[completion.ticket.value];
    const auto& request = slot.request;
    slot.busy = false;
    free_.push_back(static_cast<std::uint32_t>(completion.ticket.value));
    if (completion.error != 0) {
      if (result_.error == 0) {
        result_.error = completion.error;
        result_.failed = request.operation;
        result_.failed_offset = request.offset;
      }
      ending_ = true;
      return;
    }
    const bool counted = opened_ && !closed_;
    const auto latency = completion.end - completion.start;
    if (request.operation == IoOperation::read) result_.all_read_bytes += request.bytes;
    if (request.operation == IoOperation::write) result_.all_written_bytes += request.bytes;
    if (!counted) return;
    switch (request.operation) {
      case IoOperation::read: result_.read.add(latency); break;
      case IoOperation::write: result_.write.add(latency); break;
      case IoOperation::flush: result_.flush.add(latency); break;
    }
  }

  void turn_window(Nanoseconds now) {
    if (limits_.timeline_step > Nanoseconds{0} && now >= next_point_) {
      result_.timeline.push_back(
          {to_seconds(now - began_), result_.all_read_bytes + result_.all_written_bytes});
      next_point_ = now + limits_.timeline_step;
    }
    if (!opened_ && now >= window_opens_) {
      opened_ = true;
      opened_at_ = now;
      read_before_ = result_.all_read_bytes;
      written_before_ = result_.all_written_bytes;
    } else if (opened_ && !closed_ && (ending_ || !next_ || now >= opened_at_ + limits_.measure)) {
      close_window(now);
      ending_ = true;
    }
  }

  void close_window(Nanoseconds now) {
    closed_ = true;
    result_.seconds = to_seconds(now - opened_at_);
    result_.read_bytes = result_.all_read_bytes - read_before_;
    result_.written_bytes = result_.all_written_bytes - written_before_;
  }

  IoEngine& engine_;
  const FileId file_;
  LoadMemory& memory_;
  LoadStream& stream_;
  const std::uint64_t block_;
  const LoadLimits limits_;
  const std::uint64_t lag_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::vector<Completion> completions_;
  std::optional<LoadRequest> next_;
  std::uint64_t started_bytes_ = 0;
  std::uint64_t read_before_ = 0;
  std::uint64_t written_before_ = 0;
  bool opened_ = false;
  bool closed_ = false;
  bool ending_ = false;   // nothing more is started
  bool stopped_ = false;  // from outside
  Nanoseconds began_{0};
  Nanoseconds window_opens_{0};
  Nanoseconds opened_at_{0};
  Nanoseconds next_point_{0};
  LoadResult result_;
};

}  // namespace

LoadResult run_load(IoEngine& engine, FileId file, LoadMemory& memory, LoadStream& stream,
                    std::uint64_t block_bytes, const LoadLimits& limits) {
  return Runner(engine, file, memory, stream, block_bytes, limits).run();
}

}  // namespace terrace::bench
