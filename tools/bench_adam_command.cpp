// terrace bench adam: the command, its table and its JSON.
#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <memory>
#include <nlohmann/json.hpp>

#include "terrace/adam.h"
#include "terrace/error.h"
#include "tools/bench_adam.h"
#include "tools/bench_command.h"
#include "tools/interrupt.h"
#include "tools/options.h"
#include "tools/result_file.h"

namespace terrace::cli {
namespace {

constexpr double kQuickSeconds = 0.2;
constexpr int kInterrupted = 130;

struct Request {
  AdamBenchOptions options;
  std::vector<std::string> isa, types;
  bool quick = false;
  std::string json;
};

// One line for each result.
class Table final : public AdamBenchListener {
 public:
  void found(const StreamResult& result) override {
    fmt::print(
        "\nthreads {}: STREAM copy {:.2f} GB/s, triad {:.2f} GB/s\n{:<17}{:<31}{:>13}{:>9}"
        "{:>10}{:>9}\n",
        result.threads, result.copy_gb_s, result.triad_gb_s, "types", "loop", "Melements/s", "GB/s",
        "of roof", "spread");
    flush();
    streams.push_back({{"threads", result.threads},
                       {"copy_gb_s", result.copy_gb_s},
                       {"triad_gb_s", result.triad_gb_s}});
  }

  void found(const RoofResult& result) override {
    row(result.types, fmt::format("roof ({})", to_string(result.stores)),
        result.gb_s * 1e9 / static_cast<double>(result.types.moved_bytes()), result.gb_s);
    fmt::print("\n");
    flush();
    auto json = json_of(result.types, result.threads);
    json["stores"] = to_string(result.stores);
    json["gb_s"] = result.gb_s;
    for (std::size_t i = 0; i < kAllStores.size(); ++i) {
      json["gb_s_with"][to_string(kAllStores[i])] = result.gb_s_with[i];
    }
    roof.push_back(json);
  }

  void found(const KernelResult& result) override {
    row(result.types, result.instruction_set, result.elements_per_s, result.gb_s);
    fmt::print("{:>10.3f}{:>8.1f}%\n", result.pairs.ratio(), 100 * result.pairs.spread());
    flush();
    auto json = json_of(result.types, result.threads);
    json["isa"] = result.instruction_set;
    json["elements_per_s"] = result.elements_per_s;
    json["gb_s"] = result.gb_s;
    json["roof_gb_s"] = result.roof_gb_s;
    json["fraction_of_roof"] = result.pairs.ratio();
    add_pairs(json, result.pairs, "roof_seconds");
    results.push_back(json);
  }

  void found(const FusedResult& result) override {
    fmt::print("{:<17}{:<31}{:>13.1f}\n", to_string(result.types), "with sum of squares",
               result.elements_per_s * 1e-6);
    fmt::print("{:<17}{:<31}{:>13.1f}{:>9}{:>10}{:>8.1f}%  fused {:.2f} times as fast\n",
               to_string(result.types), "separate passes", result.separate_elements_per_s * 1e-6,
               "", "", 100 * result.pairs.spread(), result.pairs.ratio());
    flush();
    auto json = json_of(result.types, result.threads);
    json["elements_per_s"] = result.elements_per_s;
    json["separate_elements_per_s"] = result.separate_elements_per_s;
    json["speedup"] = result.pairs.ratio();
    add_pairs(json, result.pairs, "separate_seconds");
    fused.push_back(json);
  }

  bool stop() const override { return Interrupt::signal() != 0; }

  nlohmann::json streams = nlohmann::json::array(), roof = streams, results = streams,
                 fused = streams;

 private:
  static void row(const AdamTypes& types, const std::string& loop, double elements, double gb_s) {
    fmt::print("{:<17}{:<31}{:>13.1f}{:>9.2f}", to_string(types), loop, elements * 1e-6, gb_s);
  }
  static void flush() { std::fflush(stdout); }

  static nlohmann::json json_of(const AdamTypes& types, int threads) {
    return {{"threads", threads},
            {"gradient", to_string(types.gradient)},
            {"moments", to_string(types.moments)},
            {"parameter", to_string(types.parameter)},
            {"bytes_per_element", types.moved_bytes()}};
  }

  static void add_pairs(nlohmann::json& json, const Pairs& pairs, const char* other) {
    json["spread"] = pairs.spread();
    json["seconds"] = pairs.seconds;
    json[other] = pairs.other_seconds;
  }
};

std::string upper(std::string text) {
  std::ranges::transform(text, text.begin(),
                         [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return text;
}

AdamTypes parse_types(const std::string& text) {
  const auto first = text.find('/');
  const auto second = text.find('/', first + 1);
  if (first == std::string::npos || second == std::string::npos) {
    throw Error(ErrorCode::invalid_argument,
                "--types '" + text + "': give gradient/moments/parameter, as in " +
                    to_string(usual_adam_types().front()) + ", or all");
  }
  return {.gradient = parse_dtype(text.substr(0, first)),
          .moments = parse_dtype(text.substr(first + 1, second - first - 1)),
          .parameter = parse_dtype(text.substr(second + 1))};
}

AdamBenchOptions options_of(const Request& request) {
  auto options = request.options;
  if (request.quick) {
    options.seconds = std::min(options.seconds, kQuickSeconds);
    options.types.resize(1);
  }
  if (!request.types.empty()) options.types.clear();
  for (const auto& text : request.types) {
    if (text == "all") {
      options.types = all_adam_types();
      break;
    }
    options.types.push_back(parse_types(text));
  }
  for (const auto& name : request.isa) {
    if (name == "all") {
      options.instruction_sets = adam_instruction_sets();
      break;
    }
    options.instruction_sets.push_back(name == "best" ? adam_instruction_set() : upper(name));
  }
  return options;
}

void introduce(const AdamBenchPlan& plan) {
  const auto caches = plan.caches.count > 0 ? to_string(plan.caches) : "unknown";
  fmt::print("working set {}, last-level caches {}; about {:.0f} s\n", to_string(plan.working_set),
             caches, plan.seconds);
  if (plan.working_set < 4 * plan.caches) {
    fmt::print("That is less than four times the caches: they show in the figures.\n");
  }
  std::fflush(stdout);
}

nlohmann::json json_of(const AdamBenchPlan& plan, const Table& table) {
  // Of the first types and the most threads.
  const auto& types = plan.options.types.front();
  const auto threads = *std::ranges::max_element(plan.options.threads);
  double speedup = 0;
  for (const auto& result : table.fused) {
    if (result["threads"] == threads && result["gradient"] == to_string(types.gradient) &&
        result["moments"] == to_string(types.moments) &&
        result["parameter"] == to_string(types.parameter)) {
      speedup = result["speedup"];
    }
  }
  return {{"working_set_bytes", plan.working_set.count},
          {"last_level_caches_bytes", plan.caches.count},
          {"instruction_sets", adam_instruction_sets()},
          {"stream", table.streams},
          {"roof", table.roof},
          {"results", table.results},
          {"fused", table.fused},
          {"fused_speedup", speedup}};
}

int run(const Request& request) {
  const auto plan = plan_adam_bench(options_of(request));
  ResultFile json(request.json, "--json");
  introduce(plan);
  Table table;
  try {
    const Interrupt interrupt;
    run_adam_bench(plan, table);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::cancelled) throw;
    fmt::print("interrupted\n");
    return kInterrupted;
  }
  if (json.wanted()) json.write(json_of(plan, table).dump(2) + "\n");
  return 0;
}

}  // namespace

void add_bench_adam(CLI::App& bench, ExitCode& code) {
  auto* command = bench.add_subcommand(
      "adam", "the update against the same streams without arithmetic, and separate passes");
  auto request = std::make_shared<Request>();
  auto& options = request->options;
  command
      ->add_option("--isa", request->isa,
                   "instruction sets: names, best or all; otherwise all "
                   "for the first types, the best for the others")
      ->take_all();
  command
      ->add_option("--types", request->types,
                   "gradient/moments/parameter, as in "
                   "bf16/fp32/bf16, or all; otherwise those in use")
      ->take_all();
  command->add_option("--threads", options.threads, "otherwise 1 and all cores")->take_all();
  command
      ->add_option("--elements", options.elements,
                   "otherwise a working set of four times the "
                   "last-level caches, or half the memory")
      ->check(whole_number(1));
  command->add_option("--seconds", options.seconds, "for each comparison")
      ->check(CLI::PositiveNumber);
  command->add_flag("--quick", request->quick, "the first types only, 0.2 s for each comparison");
  command->add_option("--json", request->json, "write the result to this file");
  command->callback([request, &code] { code.value = run(*request); });
}

}  // namespace terrace::cli
