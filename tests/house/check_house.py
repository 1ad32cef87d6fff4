#!/usr/bin/env python3
"""Checks the rules of the house: who may include whom, and how long things may be.

  check_house.py ROOT    prints "file:line: rule: what to do" for each violation; exit status 1
  check_house.py --self  plants violations and checks that each is found, and nothing else
"""

import pathlib
import re
import sys

FLOORS = {  # floor: the floors whose headers it may include
    "include": {"terrace"},
    "tiers": {"terrace", "tiers"},
    "nvme": {"terrace", "nvme"},
    "cpu_adam": {"terrace", "cpu_adam"},
    "runtime": {"terrace", "tiers", "nvme", "cpu_adam", "runtime"},
    "tools": {"terrace", "tiers", "nvme", "cpu_adam", "runtime", "tools"},
    "examples": {"terrace"},
    "tests": {"terrace", "tiers", "nvme", "cpu_adam", "runtime", "tools", "tests"},
}
THIRD_PARTY = {  # header: the files that may include it
    r"liburing\.h": r"nvme/uring_engine\.cpp",
    r"(oneapi/)?tbb/.*": r"cpu_adam/adam_pool\.cpp",
    r"hwloc\.h": r"tiers/topology\.cpp",
    r"hwy/.*": r"cpu_adam/adam_(kernel\.cpp|vectors-inl\.h)|tools/bench_adam_loops\.cpp|"
               r"tests/aarch64/highway\.cpp",
    r"Eigen/.*": r"(tools|tests)/.*",
    r"nlohmann/.*": r"runtime/config(_.*)?\.(cpp|h)|(tools|tests)/.*",
    r"cu(da|blas|rand).*": r"tiers/cuda_.*",
    r"nccl\.h": r"runtime/nccl_.*",
    r"mpi\.h": r"runtime/mpi_.*",
    r"xxhash\.h": r"nvme/checksum\.cpp|tools/.*",
    r"xxh_x86dispatch\.h": r"nvme/checksum\.cpp",
    r"(CLI|fmt|spdlog)/.*": r"tools/.*",
    r"(gtest|gmock)/.*": r"tests/.*",
}
SYSTEM = re.compile(
    r"(sys|linux)/\w+\.h|(unistd|fcntl|errno|poll|sched|pthread|signal|time|immintrin)\.h")
POLICY = re.compile(
    r"runtime/(partition|schedule|cost_model|placement(_search)?|planner|plan_builder|plan_check|plan_emitter|"
    r"plan_optimizer|"
    r"forecast|hazards|step_plan|memory_map|extent_pool|store_plan|update_runs|"
    r"drive_speeds)\.(h|cpp)")
POLICY_FLOOR = re.compile(r"tiers/(block_layout|residency|interval_map|range_set)\.h|nvme/store_geometry\.h")  # pure parts
POLICY_PORTS = {f"terrace/{port}.h" for port in ("device", "io_engine", "communicator", "engine")}
POLICY_STD = {"thread", "mutex", "shared_mutex", "condition_variable", "atomic", "chrono", "future",
              "fstream", "filesystem", "random"}
CLOCK = re.compile(r"\b(steady_clock|system_clock|high_resolution_clock)\b|\bClock\s*&")
MAX_COLUMNS = 100
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500

INCLUDE = re.compile(r'\s*#\s*include\s*([<"])([^>"]+)[>"]')
TOKENS = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<delimiter>[^(\s]*)\(.*?\)(?P=delimiter)"'
    r'|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
PREPROCESSOR = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.)*", re.MULTILINE | re.DOTALL)
CONTROL = re.compile(r"\b(if|for|while|switch|catch|do|else)\b")


def blank(match):
    return re.sub(r"[^\n]", " ", match.group())


def code_only(text):
    """The text with comments, literals and directives blanked; lines and columns stay."""
    return PREPROCESSOR.sub(blank, TOKENS.sub(blank, text))


def check_quoted(path, header):
    floor = path.split("/")[0]
    if "/" not in header or header.split("/")[0] not in FLOORS[floor]:
        return f"include-direction: {floor}/ may not include \"{header}\""
    return None


def check_angled(path, header):
    for pattern, files in THIRD_PARTY.items():
        if re.fullmatch(pattern, header):
            if re.fullmatch(files, path):
                return None
            return f"third-party: <{header}> belongs in {files}"
    standard = re.fullmatch(r"[a-z_]+", header)
    if path.startswith("include/") and not standard:
        return f"public-std-only: include/ may not include <{header}>"
    if not standard and not SYSTEM.fullmatch(header):
        return f"third-party: <{header}> is unknown; give it a file of its own in check_house.py"
    return None


def check_policy(path, header):
    if not POLICY.fullmatch(path):
        return None
    floor = header.split("/")[0]
    if floor in ("tiers", "nvme", "cpu_adam") and not POLICY_FLOOR.fullmatch(header):
        return f"policy-pure: policy may not include the implementation \"{header}\""
    if header in POLICY_PORTS or header in POLICY_STD:
        return f"policy-pure: policy may not include {header}: no port, thread, clock or file"
    return None


def check_includes(path, text):
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        kind, header = match.groups()
        found = check_quoted(path, header) if kind == '"' else check_angled(path, header)
        found = found or check_policy(path, header)
        if found:
            yield number, found


def check_clocks(path, text):
    if not POLICY.fullmatch(path):
        return
    for number, line in enumerate(code_only(text).splitlines(), 1):
        if CLOCK.search(line):
            yield number, "policy-pure: policy may not know a clock"


def check_lengths(path, text):
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            yield number, f"columns: {len(line)} columns; at most {MAX_COLUMNS}"
    if len(lines) > MAX_FILE_LINES:
        yield 1, f"file-length: {len(lines)} lines; at most {MAX_FILE_LINES}"


def scope_of(header):
    """What the brace after this text opens: names or types go on, anything else is a body."""
    if re.search(r"\b(namespace|class|struct|union|enum|extern)\b[^()]*$", header):
        return "names"
    if "(" in header and not CONTROL.search(header):
        return "function"
    return "body"


def functions(text):
    """(first line, lines) of each function that is not inside another one."""
    scopes = []
    header, header_line, line = "", 1, 1
    for character in code_only(text):
        if character == "\n":
            line += 1
        if character == "{":
            outer = any(scope == "function" for scope, _ in scopes)
            scopes.append(("body" if outer else scope_of(header), header_line))
        elif character == "}" and scopes:
            scope, first = scopes.pop()
            if scope == "function":
                yield first, line - first + 1
        if character in "{};":
            header = ""
            continue
        if not header.strip():
            header_line = line
        header += character


def check_functions(path, text):
    for first, lines in functions(text):
        if lines > MAX_FUNCTION_LINES:
            yield first, f"function-length: {lines} lines; at most {MAX_FUNCTION_LINES}"


CHECKS = (check_includes, check_clocks, check_lengths, check_functions)


def check_file(path, text):
    return [(number, found) for check in CHECKS for number, found in check(path, text)]


def check_tree(root):
    violations = []
    for floor in FLOORS:
        for file in sorted((root / floor).rglob("*")):
            if file.suffix not in (".h", ".cpp"):
                continue
            path = file.relative_to(root).as_posix()
            for number, found in check_file(path, file.read_text(encoding="utf-8")):
                violations.append(f"{path}:{number}: {found}")
    return violations


LONG_BODY = "  x();\n" * MAX_FUNCTION_LINES
PLANTED = (  # path, text, the rules that must be found
    ("tiers/a.h", '#include "nvme/engines.h"\n', ["include-direction"]),
    ("nvme/a.cpp", '#include "runtime/planner.h"\n', ["include-direction"]),
    ("cpu_adam/a.cpp", '#include "tiers/topology.h"\n', ["include-direction"]),
    ("runtime/a.cpp", '#include "tools/options.h"\n', ["include-direction"]),
    ("include/terrace/a.h", '#include "tiers/topology.h"\n', ["include-direction"]),
    ("tools/a.cpp", '#include "tests/contract/device_contract.h"\n', ["include-direction"]),
    ("tiers/a.cpp", '#include "topology.h"\n', ["include-direction"]),
    ("examples/a/main.cpp", '#include "cpu_adam/adam_jobs.h"\n', ["include-direction"]),
    ("tiers/a.cpp", '#include "terrace/types.h"\n#include "tiers/topology.h"\n', []),
    ("tests/unit/a.cpp", '#include "tools/options.h"\n#include "runtime/planner.h"\n', []),
    ("nvme/thread_engine.cpp", "#include <liburing.h>\n", ["third-party"]),
    ("nvme/uring_engine.cpp", "#include <liburing.h>\n#include <sys/eventfd.h>\n", []),
    ("runtime/executor.cpp", "#include <oneapi/tbb/task_arena.h>\n", ["third-party"]),
    ("cpu_adam/adam_pool.cpp", "#include <oneapi/tbb/task_arena.h>\n", []),
    ("tiers/host_memory.cpp", "#include <hwloc.h>\n", ["third-party"]),
    ("cpu_adam/adam.cpp", "#include <hwy/highway.h>\n", ["third-party"]),
    ("runtime/a.cpp", "#include <Eigen/Core>\n", ["third-party"]),
    ("runtime/engine.cpp", "#include <nlohmann/json.hpp>\n", ["third-party"]),
    ("runtime/config.cpp", "#include <nlohmann/json.hpp>\n", []),
    ("tiers/emulated_device.cpp", "#include <cuda_runtime.h>\n", ["third-party"]),
    ("tiers/cuda_device.cpp", "#include <cuda_runtime.h>\n", []),
    ("tools/a.cpp", "#include <boost/any.hpp>\n", ["third-party"]),
    ("include/terrace/a.h", "#include <unistd.h>\n", ["public-std-only"]),
    ("include/terrace/a.h", "#include <hwloc.h>\n", ["third-party"]),
    ("include/terrace/a.h", '#include <vector>\n#include "terrace/types.h"\n', []),
    ("runtime/planner.cpp", '#include "tiers/tensor_store.h"\n', ["policy-pure"]),
    ("runtime/placement.h", '#include "nvme/engines.h"\n', ["policy-pure"]),
    ("runtime/plan_check.cpp", '#include "terrace/device.h"\n', ["policy-pure"]),
    ("runtime/schedule.cpp", "#include <mutex>\n", ["policy-pure"]),
    ("runtime/cost_model.cpp", "auto t = steady_clock().now();\n", ["policy-pure"]),
    ("runtime/cost_model.cpp", '// no steady_clock\nauto t = "steady_clock";\n', []),
    ("runtime/planner.cpp", '#include "tiers/block_layout.h"\n#include <vector>\n', []),
    ("runtime/executor.cpp", '#include "tiers/tensor_store.h"\n#include <mutex>\n', []),
    ("nvme/a.cpp", "// " + "x" * MAX_COLUMNS + "\n", ["columns"]),
    ("nvme/a.cpp", "x" * MAX_COLUMNS + "\n", []),
    ("nvme/a.cpp", "int x;\n" * (MAX_FILE_LINES + 1), ["file-length"]),
    ("nvme/a.cpp", "int x;\n" * MAX_FILE_LINES, []),
    ("nvme/a.cpp", "int f() {\n" + LONG_BODY + "}\n", ["function-length"]),
    ("nvme/a.cpp", "namespace a {\nstruct B {\n  int f() const {\n" + LONG_BODY + "  }\n};\n}\n",
     ["function-length"]),
    ("nvme/a.cpp", "A::A() : b_{1}, c_(2) {\n" + LONG_BODY + "}\n", ["function-length"]),
    ("nvme/a.cpp", "int f() {\n  if (x) {\n" + LONG_BODY + "  }\n}\n", ["function-length"]),
    ("nvme/a.cpp", "int f() {\n  auto g = [] {\n" + LONG_BODY + "  };\n}\n", ["function-length"]),
    ("nvme/a.cpp", "namespace a {\n" + "int f() {\n  x();\n}\n" * 40 + "}\n", []),
    ("nvme/a.cpp", 'int f() {\n  return "{";\n}\n' + "// {\n" * 70, []),
    ("nvme/a.cpp", "struct A {\n" + "  int x;  // (\n" * 70 + "};\n", []),
    ("nvme/a.cpp", "char c = '{';\nint n = 1'000;\n" + "int f(int);\n" * 70, []),
)


def self_test():
    failures = []
    for path, text, expected in PLANTED:
        found = [rule.split(":")[0] for _, rule in check_file(path, text)]
        if found != expected:
            failures.append(f"{path} {text[:60]!r}: expected {expected}, found {found}")
    return failures


def main(arguments):
    if len(arguments) != 2:
        print(__doc__)
        return 2
    messages = self_test() if arguments[1] == "--self" else check_tree(pathlib.Path(arguments[1]))
    for message in messages:
        print(message)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
