// Chrome trace event JSON, streamed: one event a line, so that a file cut short is easily mended.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <optional>

#include "terrace/error.h"
#include "terrace/trace.h"

namespace terrace {
namespace {

// The length of the well-formed UTF-8 sequence at the start of `text`, or 0. Overlong forms,
// surrogates and what is above U+10FFFF are not well-formed (Unicode 15, table 3-7).
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
  };
  const auto within = [&](std::size_t i, unsigned low, unsigned high) {
    return byte(i) >= low && byte(i) <= high;
  };
  const auto tail = [&](std::size_t i) { return within(i, 0x80, 0xBF); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return tail(1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    const bool second = within(1, lead == 0xE0 ? 0xA0 : 0x80, lead == 0xED ? 0x9F : 0xBF);
    return second && tail(2) ? 3 : 0;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    const bool second = within(1, lead == 0xF0 ? 0x90 : 0x80, lead == 0xF4 ? 0x8F : 0xBF);
    return second && tail(2) && tail(3) ? 4 : 0;
  }
  return 0;
}

// A JSON string with its quotes. Names are the trainer's own: bytes that are no UTF-8 become
// U+FFFD, so that one odd name does not spoil the file.
std::string quoted(std::string_view text) {
  std::string result = "\"";
  while (!text.empty()) {
    const auto length = utf8_length(text);
    const char first = text.front();
    if (length == 0) {
      result += "\\ufffd";
    } else if (first == '"' || first == '\\') {
      result += {'\\', first};
    } else if (static_cast<unsigned char>(first) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(first));
      result += escape;
    } else {
      result += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return result + "\"";
}

// Microseconds with nanosecond digits, exactly: a double would round after months of uptime.
std::string microseconds(Nanoseconds time) {
  const auto count = time.count();
  const auto whole = count < 0 ? 0ULL - static_cast<unsigned long long>(count)
                               : static_cast<unsigned long long>(count);
  char text[32];
  std::snprintf(text, sizeof text, "%s%llu.%03llu", count < 0 ? "-" : "", whole / 1000,
                whole % 1000);
  return text;
}

class TraceWriter final : public TraceSink {
 public:
  explicit TraceWriter(const std::string& path) : path_(path), file_(path, std::ios::trunc) {
    if (!file_) {
      throw Error(ErrorCode::io, "the trace file " + path +
                                     " cannot be created; name a file in a writable directory");
    }
    file_ << '[';
    for (const Lane lane : kLanes) name_row(lane);
  }
  ~TraceWriter() override { file_ << "\n]\n"; }

  void span(const TraceSpan& span) override {
    if (!file_) return;
    errno = 0;
    if (!origin_) origin_ = span.start;
    begin_event(span.name, 'X', span.lane)
        << ",\"ts\":" << microseconds(span.start - *origin_)
        << ",\"dur\":" << microseconds(span.end - span.start)
        << ",\"args\":{\"step\":" << span.step << ",\"bytes\":" << span.bytes << "}}";
    note_failure();
  }

  std::string flush() override {
    errno = 0;
    file_.flush();
    note_failure();
    if (file_) return {};
    return "writing the trace " + path_ + " failed" + (why_.empty() ? "" : ": " + why_) +
           "; what came later is missing";
  }

 private:
  void note_failure() {
    if (!file_ && why_.empty() && errno != 0) why_ = std::strerror(errno);
  }

  std::ostream& begin_event(std::string_view name, char phase, Lane lane) {
    file_ << (first_ ? "\n" : ",\n") << "{\"name\":" << quoted(name) << ",\"ph\":\"" << phase
          << "\",\"pid\":1,\"tid\":" << static_cast<int>(lane) + 1;
    first_ = false;
    return file_;
  }

  void name_row(Lane lane) {
    begin_event("thread_name", 'M', lane)
        << ",\"args\":{\"name\":" << quoted(to_string(lane)) << "}}";
  }

  const std::string path_;
  std::ofstream file_;
  std::string why_;
  bool first_ = true;
  std::optional<Nanoseconds> origin_;  // the first span's start is the file's time 0
};

}  // namespace

std::unique_ptr<TraceSink> make_trace_writer(const std::string& path) {
  return std::make_unique<TraceWriter>(path);
}

}  // namespace terrace
