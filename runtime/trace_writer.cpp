// Chrome trace event JSON, streamed.
#include <fstream>
#include <nlohmann/json.hpp>

#include "terrace/error.h"
#include "terrace/trace.h"

namespace terrace {
namespace {

class TraceWriter final : public TraceSink {
 public:
  explicit TraceWriter(const std::string& path) : file_(path, std::ios::trunc) {
    if (!file_) {
      throw Error(ErrorCode::io, "the trace file " + path +
                                     " cannot be created; name a file in a writable directory");
    }
    file_ << "[";
    for (const Lane lane : kLanes) name_row(lane);
  }
  ~TraceWriter() override { file_ << "\n]\n"; }

  void span(const TraceSpan& span) override {
    const auto microseconds = [](Nanoseconds time) {
      return static_cast<double>(time.count()) / 1e3;
    };
    if (origin_ < Nanoseconds{0}) origin_ = span.start;
    put({{"name", span.name},
         {"ph", "X"},
         {"pid", 1},
         {"tid", row(span.lane)},
         {"ts", microseconds(span.start - origin_)},
         {"dur", microseconds(span.end - span.start)},
         {"args", {{"step", span.step}, {"bytes", span.bytes}}}});
  }

 private:
  static int row(Lane lane) { return static_cast<int>(lane) + 1; }

  void name_row(Lane lane) {
    put({{"name", "thread_name"},
         {"ph", "M"},
         {"pid", 1},
         {"tid", row(lane)},
         {"args", {{"name", to_string(lane)}}}});
  }

  void put(const nlohmann::json& event) {
    file_ << (first_ ? "\n" : ",\n") << event.dump();
    first_ = false;
  }

  std::ofstream file_;
  bool first_ = true;
  Nanoseconds origin_{-1};
};

}  // namespace

std::unique_ptr<TraceSink> make_trace_writer(const std::string& path) {
  return std::make_unique<TraceWriter>(path);
}

}  // namespace terrace
