// terrace bench: what the optimizer and a whole step reach of what the machine can do.
#include "tools/bench_command.h"

namespace terrace::cli {

void add_bench(CLI::App& app, ExitCode& code) {
  auto* bench =
      app.add_subcommand("bench", "measure the optimizer and a training step against their floors");
  bench->require_subcommand(1);
  add_bench_adam(*bench, code);
  add_bench_step(*bench, code);
}

}  // namespace terrace::cli
