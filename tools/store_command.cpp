// terrace store: whether a store is sound, and what it holds.
#include <fmt/core.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "nvme/store_files.h"
#include "nvme/store_lock.h"
#include "terrace/error.h"
#include "tools/commands.h"
#include "tools/report.h"
#include "tools/store_report.h"

namespace terrace::cli {
namespace {

constexpr Bytes kLarge = 1_GiB;  // from here on progress is shown
constexpr Nanoseconds kShowEvery = std::chrono::milliseconds(250);
constexpr int kMostLooks = 20;   // at a store that a run is committing to
constexpr Nanoseconds kLookAgain = std::chrono::milliseconds(20);

struct StoreCommand {
  std::vector<std::string> directories;
  std::string io_engine = "auto";
  bool json = false;

  void add(CLI::App& command) {
    command
        .add_option("directories", directories, "those of the run's --nvme, in any order")
        ->required()
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    command.add_option("--io", io_engine, "auto, io_uring or threads");
    command.add_flag("--json", json, "print numbers as JSON");
  }

  // A store's file stands for its directory.
  void tidy() {
    for (auto& directory : directories) {
      std::filesystem::path path = directory;
      if (path.filename() == "terrace.store" && std::filesystem::is_regular_file(path)) {
        path = path.has_parent_path() ? path.parent_path() : ".";
      }
      directory = path.string();
    }
    refuse_one_directory_twice(directories);
  }

  std::unique_ptr<IoEngine> engine() const {
    IoEngineOptions options;
    options.kind = parse_io_engine(io_engine);
    if (directories.size() > kMaxIoFiles) {
      throw Error(ErrorCode::invalid_argument, "a store has at most " +
                                                   std::to_string(kMaxIoFiles) + " drives");
    }
    options.drives = static_cast<std::uint32_t>(directories.size());
    return make_io_engine(options);
  }
};

// One line that is written over and over, on a terminal.
class CheckBar {
 public:
  void show(Bytes done, Bytes total) {
    const auto now = steady_clock().now();
    if (total < kLarge || ::isatty(STDOUT_FILENO) == 0 || now - shown_ < kShowEvery) return;
    shown_ = now;
    const double seconds = to_seconds(now - begin_);
    const auto bytes = static_cast<double>(done.count);
    fmt::print("\r{} of {}  {:.2f} GB/s  {} left \x1b[K", to_string(done), to_string(total),
               bytes / seconds / 1e9,
               duration_text(seconds * (static_cast<double>(total.count) / bytes - 1)));
    std::fflush(stdout);
  }
  // Takes the line away; seconds since the beginning.
  double end() const {
    if (shown_ != Nanoseconds{0}) fmt::print("\r\x1b[K");
    return to_seconds(steady_clock().now() - begin_);
  }

 private:
  const Nanoseconds begin_ = steady_clock().now();
  Nanoseconds shown_{0};
};

// Where no lock can be made, a run that holds one is seen, and one that begins is not.
void take_lock(const std::string& directory, std::vector<StoreLock>& locks) {
  if (::access(directory.c_str(), W_OK) == 0) return void(locks.emplace_back(directory));
  const bool changes = errno != EROFS;
  if (const auto holder = lock_holder(directory)) {
    throw Error(ErrorCode::unavailable,
                directory + " is in use by " + *holder + "; wait for it");
  }
  if (!changes) return;
  fmt::print(stderr, "note: {} is not writable, so no lock is held: let no run begin there\n",
             directory);
}

int verify(const StoreCommand& command) {
  auto io = command.engine();
  std::vector<StoreLock> locks;
  for (const auto& directory : command.directories) {
    if (io->exists(store_path(directory))) take_lock(directory, locks);
  }
  try {
    const auto store = find_store(*io, command.directories);
    if (!command.json) fmt::print("{}", head_text(store));
    CheckBar bar;
    const auto check = check_store(*io, store, [&](Bytes done, Bytes total) {
      if (!command.json) bar.show(done, total);
    });
    const double seconds = bar.end();
    if (command.json) fmt::print("{}\n", check_json(store, check, seconds).dump(2));
    else fmt::print("{}", check_text(store, check, seconds));
    return exit_code(store, check);
  } catch (...) {
    // An operation that hangs would hang the engine's destructor too.
    if (io->pending() > 0) [[maybe_unused]] const auto* left = io.release();
    throw;
  }
}

int show(const StoreCommand& command) {
  const auto io = command.engine();
  auto store = find_store(*io, command.directories);
  std::optional<std::string> holder;
  for (const auto& directory : command.directories) {
    if (!holder) holder = lock_holder(directory);
  }
  // Record and table are read one after the other; a run may have committed in between.
  for (int look = 1; holder && store.newest() == nullptr && look < kMostLooks; ++look) {
    steady_clock().sleep_until(steady_clock().now() + kLookAgain);
    inspect_again(*io, store);
  }
  if (command.json) fmt::print("{}\n", store_json(store, *io, holder).dump(2));
  else fmt::print("{}", store_text(store, *io, holder));
  return store.superblock() != nullptr || store.outlook.state == StoreOutlook::State::empty ? 0 : 2;
}

}  // namespace

void add_store(CLI::App& app, ExitCode& code) {
  auto* group = app.add_subcommand("store", "look at what a run keeps on its drives");
  group->require_subcommand(1);
  const auto add = [&](const char* name, const char* what, int (*function)(const StoreCommand&)) {
    auto* command = group->add_subcommand(name, what);
    auto options = std::make_shared<StoreCommand>();
    options->add(*command);
    command->callback([options, function, &code] {
      options->tidy();
      code.value = function(*options);
    });
  };
  add("verify", "read all of it and compare every checksum; exit code 1: damaged", verify);
  add("show", "what it holds: model, step, drives, commits; works while a run uses it", show);
}

}  // namespace terrace::cli
