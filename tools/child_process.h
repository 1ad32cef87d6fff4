// Another program, run to its end.
#pragma once

#include <string>
#include <vector>

#include "terrace/clock.h"

namespace terrace::cli {

struct ChildResult {
  int status = 0;  // its exit code; 128 + n when signal n ended it
  bool timed_out = false;
  std::string output;  // standard output
  std::string errors;  // standard error
};

// The path of `program`, as the shell would find it in PATH; empty when it is not there.
std::string find_program(const std::string& program);

// Runs arguments[0] (a path) and reads what it prints. It is killed after `at_most`, and when this
// process dies, however that happens. Throws Error(unavailable) when it cannot be started.
ChildResult run_child(const std::vector<std::string>& arguments, Nanoseconds at_most);

}  // namespace terrace::cli
