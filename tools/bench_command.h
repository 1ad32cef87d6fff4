// The parts of `terrace bench`.
#pragma once

#include "tools/commands.h"

namespace terrace::cli {

void add_bench_adam(CLI::App& bench, ExitCode& code);
void add_bench_step(CLI::App& bench, ExitCode& code);

}  // namespace terrace::cli
