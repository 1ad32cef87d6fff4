// terrace: one binary, sub-commands.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <system_error>

#include <fmt/core.h>

#include "tools/commands.h"

int main(int argc, char** argv) {
  CLI::App app{"Trains models larger than the device through HBM, RAM and NVMe."};
  app.require_subcommand(1);
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  terrace::cli::ExitCode code;
  terrace::cli::add_info(app, code);
  terrace::cli::add_nvme(app, code);
  terrace::cli::add_plan(app, code);
  terrace::cli::add_train(app, code);
  terrace::cli::add_store(app, code);
  terrace::cli::add_bench(app, code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int result = app.exit(error);
    return result == 0 ? 0 : 2;
  } catch (const std::system_error& error) {
    const bool threads = error.code() == std::errc::resource_unavailable_try_again;
    fmt::print(stderr, "terrace: {}{}\n", error.what(),
               threads ? ": no more threads may be started; raise the limit of processes "
                         "(ulimit -u)"
                       : "");
    return 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "terrace: {}\n", error.what());
    return 2;
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    fmt::print(stderr, "terrace: what was printed could not all be written: {}\n",
               std::strerror(errno));
    return 2;
  }
  return code.value;
}
