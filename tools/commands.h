// The sub-commands of `terrace`. Each adds itself to the command line; its callback runs it and
// leaves the exit code.
#pragma once

#include <CLI/CLI.hpp>

namespace terrace::cli {

// 0: done. 1: the answer is no (not identical, damaged, lost, does not hide, changed). 2: bad input
// or failure. 130: interrupted.
struct ExitCode {
  int value = 0;
};

void add_bench(CLI::App& app, ExitCode& code);
void add_info(CLI::App& app, ExitCode& code);
void add_nvme(CLI::App& app, ExitCode& code);
void add_plan(CLI::App& app, ExitCode& code);
void add_store(CLI::App& app, ExitCode& code);
void add_train(CLI::App& app, ExitCode& code);

}  // namespace terrace::cli
