// The one exception type of Terrace, and the check for programmer errors.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace terrace {

enum class ErrorCode : std::uint8_t {
  invalid_argument,  // the caller asked for something that has no meaning
  unavailable,       // this machine, build or state cannot do it
  out_of_budget,     // it does not fit; the message names the missing bytes
  io,                // a file operation failed; the message names path, offset, length, errno
  device,            // the device failed
  communication,     // a rank failed
  corrupt,           // stored bytes are not what was written
  cancelled,         // the operation was given up because of an earlier error or an abandoned step
};

std::string_view to_string(ErrorCode code);

// what(): one sentence or a few lines that say what happened, where, and what to do next.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

namespace internal {
[[noreturn]] void check_failed(const char* condition, const char* file, int line);
}

}  // namespace terrace

// Aborts with file and line when `condition` is false: for mistakes in the program, never for bad
// input. Stays on in release builds.
#define TERRACE_CHECK(condition) \
  ((condition) ? static_cast<void>(0) \
               : ::terrace::internal::check_failed(#condition, __FILE__, __LINE__))
