// Any engine, with one operation, or all of a kind from some time on, that fails as planned.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "nvme/simulation.h"
#include "nvme/transfers.h"
#include "terrace/error.h"

namespace terrace {
namespace {

IoCall call_of(IoOperation operation) {
  switch (operation) {
    case IoOperation::read: return IoCall::read;
    case IoOperation::write: return IoCall::write;
    case IoOperation::flush: break;
  }
  return IoCall::flush;
}

class FaultEngine final : public IoEngine {
 public:
  FaultEngine(std::unique_ptr<IoEngine> engine, FaultPlan plan,
              std::shared_ptr<FaultCounters> counters)
      : engine_(std::move(engine)), plan_(plan), counters_(std::move(counters)) {}

  IoEngineInfo info() const override {
    auto info = engine_->info();
    if (plan_.at > 0) info.notes.push_back("operations are made to fail on request");
    return info;
  }

  FileId open(const IoFileOptions& options) override {
    if (fails(IoCall::open)) throw failure("opening " + options.path);
    return engine_->open(options);
  }
  void close(FileId file) override { engine_->close(file); }
  bool exists(const std::string& path) const override { return engine_->exists(path); }
  void remove(const std::string& path) override {
    if (fails(IoCall::remove)) throw failure("removing " + path);
    engine_->remove(path);
  }
  IoFileInfo file_info(FileId file) const override { return engine_->file_info(file); }
  void register_buffers(std::span<const std::span<std::byte>> buffers) override {
    engine_->register_buffers(buffers);
  }

  // The inner engine sees tickets of our own, which lead to the caller's and to the fault.
  bool submit(const IoRequest& request) override {
    if (ended_.size() + lost_ == kMaxRequests) return false;
    const auto call = call_of(request.operation);
    if (!is_next(call)) {
      if (!pass_on(request, {})) return false;
      fails(call);  // counts it
      return true;
    }
    if (plan_.kind == FaultKind::lost) {
      ++lost_;
    } else if (plan_.kind == FaultKind::error) {
      end(request, plan_.error);
    } else if (plan_.kind == FaultKind::error_after_move) {
      if (!pass_on(request, plan_.error)) return false;
    } else if (!shorten(request)) {
      return false;
    }
    fails(call);
    return true;
  }
  void flush() override { engine_->flush(); }
  std::size_t pending() const override { return under_way_.size() + ended_.size() + lost_; }

  std::size_t reap(std::vector<Completion>& completions, Nanoseconds timeout) override {
    arrived_.clear();
    engine_->reap(arrived_, ended_.empty() ? timeout : Nanoseconds{0});
    for (auto& completion : arrived_) {
      const auto found = under_way_.find(completion.ticket.value);
      TERRACE_CHECK(found != under_way_.end());
      completion.ticket = found->second.ticket;
      if (found->second.error != 0) {
        completion.error = found->second.error;
        completion.bytes = 0;
      }
      under_way_.erase(found);
    }
    const auto count = arrived_.size() + ended_.size();
    completions.insert(completions.end(), arrived_.begin(), arrived_.end());
    completions.insert(completions.end(), ended_.begin(), ended_.end());
    ended_.clear();
    return count;
  }
  void wake() override { engine_->wake(); }

 private:
  struct UnderWay {
    Ticket ticket;  // the caller's
    int error = 0;  // to be told, whatever the inner engine says
  };

  // Whether the next call of this kind is to fail.
  bool is_next(IoCall call) const {
    if (plan_.at == 0 || (plan_.only && *plan_.only != call)) return false;
    if (plan_.persistent && failing_ == call) return true;
    const auto& counted =
        plan_.only ? counters_->calls[static_cast<std::size_t>(call)] : counters_->total;
    return counted + 1 == plan_.at;
  }

  // Counts a call, and says whether it is to fail.
  bool fails(IoCall call) {
    const bool chosen = is_next(call);
    ++counters_->calls[static_cast<std::size_t>(call)];
    ++counters_->total;
    if (!chosen) return false;
    failing_ = call;
    ++counters_->failed;
    return true;
  }

  Error failure(const std::string& what) const {
    return {ErrorCode::io, what + " failed: " + std::strerror(plan_.error) +
                               "; the failure was asked for, so plan another"};
  }

  bool pass_on(const IoRequest& request, int error) {
    IoRequest inner = request;
    inner.ticket = {next_};
    if (!engine_->submit(inner)) return false;
    under_way_[next_++] = {request.ticket, error};
    return true;
  }

  void end(const IoRequest& request, int error) {
    const auto now = steady_clock().now();
    ended_.push_back({request.ticket, error, 0, now, now});
  }

  bool shorten(const IoRequest& request) {
    if (request.operation == IoOperation::flush) {
      end(request, 0);
      return true;
    }
    IoRequest half = request;
    half.bytes /= 2;
    half.bytes -= half.bytes % engine_->file_info(request.file).alignment;
    return pass_on(half, 0);
  }

  std::unique_ptr<IoEngine> engine_;
  const FaultPlan plan_;
  const std::shared_ptr<FaultCounters> counters_;
  std::optional<IoCall> failing_;  // the kind that a persistent fault has struck
  std::uint64_t next_ = 0;
  std::map<std::uint64_t, UnderWay> under_way_;  // by the inner ticket
  std::vector<Completion> ended_;                // without the inner engine
  std::size_t lost_ = 0;
  std::vector<Completion> arrived_;
};

}  // namespace

std::unique_ptr<IoEngine> make_fault_engine(std::unique_ptr<IoEngine> engine, FaultPlan plan,
                                            std::shared_ptr<FaultCounters> counters) {
  if (counters == nullptr) counters = std::make_shared<FaultCounters>();
  return std::make_unique<FaultEngine>(std::move(engine), plan, std::move(counters));
}

}  // namespace terrace
