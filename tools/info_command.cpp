// terrace info: what this machine has, what Terrace will use of it, and why not more.
#include <fmt/core.h>

#include <ctime>
#include <memory>
#include <vector>

#include "nvme/checksum.h"
#include "terrace/adam.h"
#include "terrace/error.h"
#include "terrace/io_engine.h"
#include "tiers/drive_facts.h"
#include "tiers/topology.h"
#include "tools/commands.h"

namespace terrace::cli {
namespace {

void line(const char* what, const std::string& value) { fmt::print("  {:<18}{}\n", what, value); }
void note(const std::string& text) { fmt::print("  {:<18}  note: {}\n", "", text); }

void show_machine() {
  const auto machine = detect_topology();
  fmt::print("machine\n");
  line("cores", std::to_string(machine.cores));
  line("NUMA nodes", std::to_string(machine.numa_nodes.size()));
  line("memory", to_string(machine.memory) +
                     (machine.memory_limit ? " (the control group's limit)" : ""));
  line("last-level cache", to_string(machine.last_level_cache));
  line("huge pages", machine.huge_pages.empty() ? "unknown" : machine.huge_pages);
  if (machine.huge_pages == "never") {
    note("the arena uses small pages; echo madvise > "
         "/sys/kernel/mm/transparent_hugepage/enabled");
  }
  line("locked memory", machine.memlock ? to_string(*machine.memlock) : "unlimited");
  if (machine.memlock && *machine.memlock < 64_MiB) {
    note("without the right to lock more, buffers are not registered with io_uring; ulimit -l");
  }
}

void show_device() {
  fmt::print("device\n");
  line("in use", "emulated (host memory and threads stand for the device)");
  note("this version has no CUDA device; everything runs on the emulated one");
}

void show_optimizer() {
  fmt::print("CPU Adam\n");
  line("instruction set", adam_instruction_set());
  std::string all;
  for (const auto& name : adam_instruction_sets()) all += (all.empty() ? "" : ", ") + name;
  line("this CPU runs", all);
  line("threads", std::to_string(make_adam_pool({})->threads()));
}

void show_drive(const std::string& directory) {
  fmt::print("drive behind {}\n", directory);
  const auto drive = drive_facts(directory);
  const auto known = [](const std::string& text) { return text.empty() ? "unknown" : text; };
  line("device", known(drive.device) + (drive.model.empty() ? "" : " (" + drive.model + ")"));
  if (drive.rotational) line("kind", *drive.rotational ? "rotating disk" : "flash or virtual");
  line("file system", known(drive.file_system));
  line("scheduler", known(drive.scheduler));
  line("free", to_string(drive.free) + " of " + to_string(drive.size));
  const auto engine = make_io_engine({});
  const auto file = engine->open(
      {.path = directory + "/terrace.info", .size = 64_KiB, .mode = IoFileMode::scratch});
  const auto facts = engine->file_info(file);
  line("direct I/O", facts.direct ? "yes, aligned to " + std::to_string(facts.alignment) : "no");
  if (!facts.direct) note(facts.direct_note);
  engine->close(file);
}

// Of tiles that lie in a core's cache, as those of an update do.
double checksum_seconds_per_gb() {
  constexpr std::size_t kTile = 128 << 10;
  constexpr int kRounds = 4000;
  const std::vector<std::byte> tile(kTile, std::byte{1});
  std::uint64_t sum = 0;
  const auto begin = std::clock();
  for (int i = 0; i < kRounds; ++i) sum += hash_bytes(tile.data(), kTile);
  const auto spent = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  TERRACE_CHECK(sum != 0);  // or the compiler may leave the work out
  return spent / (static_cast<double>(kTile) * kRounds / 1e9);
}

void show_engine() {
  fmt::print("file I/O\n");
  const auto engine = make_io_engine({});
  const auto info = engine->info();
  line("engine", info.engine + (info.registered_files ? ", registered files" : ""));
  for (const auto& text : info.notes) note(text);
  line("checksums", fmt::format("XXH3, {:.3f} core-seconds per GB", checksum_seconds_per_gb()));
}

}  // namespace

void add_info(CLI::App& app, ExitCode&) {
  auto* command =
      app.add_subcommand("info", "what this machine has and what Terrace will use of it");
  auto directory = std::make_shared<std::string>(".");
  command->add_option("--nvme", *directory, "directory on the drive to look at");
  command->callback([directory] {
    show_machine();
    show_device();
    show_optimizer();
    show_engine();
    show_drive(*directory);
  });
}

}  // namespace terrace::cli
