"""`terrace bench adam` on arrays of no size: check_adam.py TERRACE all.

Speeds are not judged: that is what the command is for.
"""

import json
import os
import signal
import statistics
import subprocess
import time

from training import TERRACE, Place, expect, run

SMALL = ["--elements", "30000", "--seconds", "0.001"]
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
USUAL = ["bf16/fp32/bf16", "fp16/fp32/fp16", "fp32/fp32/bf16", "fp32/fp32/fp32", "bf16/bf16/bf16"]


def bench(*arguments):
    return run([TERRACE, "bench", "adam", *SMALL, *arguments])


def types(entry):
    return f"{entry['gradient']}/{entry['moments']}/{entry['parameter']}"


def near(a, b):
    return abs(a - b) <= 1e-9 * abs(b)


def ratio(entry, other):
    expect(len(entry["seconds"]) == len(entry[other]) >= 5, f"pairs: {entry}")
    return sorted(b / a for a, b in zip(entry["seconds"], entry[other]))[
        (len(entry["seconds"]) - 1) // 2]


def consistent(got):
    """What every result says of itself."""
    for entry in got["roof"] + got["results"] + got["fused"]:
        bytes_moved = (8 + WIDTH[entry["gradient"]] + 4 * WIDTH[entry["moments"]] +
                       WIDTH[entry["parameter"]])
        expect(entry["bytes_per_element"] == bytes_moved, f"the bytes of {entry}")
    for entry in got["roof"]:
        expect(entry["gb_s"] == max(entry["gb_s_with"].values()) > 0 and
               entry["gb_s"] == entry["gb_s_with"][entry["stores"]], f"the best stores: {entry}")
    for entry in got["results"]:
        expect(near(entry["gb_s"], entry["elements_per_s"] * entry["bytes_per_element"] * 1e-9),
               f"GB/s are bytes times elements: {entry}")
        expect(near(entry["fraction_of_roof"], ratio(entry, "roof_seconds")),
               f"the fraction is the median of the pairs: {entry}")
        rates = statistics.median_low(entry["seconds"]) / statistics.median_low(
            entry["roof_seconds"])
        expect(near(entry["roof_gb_s"], entry["gb_s"] * rates), f"the roof of the pairs: {entry}")
    for entry in got["fused"]:
        expect(near(entry["speedup"], ratio(entry, "separate_seconds")), f"the speedup: {entry}")


def measured(path, *arguments):
    result = bench("--json", path, *arguments)
    expect(result.returncode == 0 and "about" in result.stdout, f"{arguments} measures", result)
    with open(path) as file:
        got = json.load(file)
    consistent(got)
    return got


with Place() as place:
    out = os.path.join(place.path, "out.json")
    got = measured(out)
    sets, cores = got["instruction_sets"], len(os.sched_getaffinity(0))
    threads = sorted({1, cores})
    expect([entry["threads"] for entry in got["stream"]] == threads and
           all(entry["copy_gb_s"] > 0 < entry["triad_gb_s"] for entry in got["stream"]), "STREAM")
    for key in ["roof", "fused"]:
        expect([(entry["threads"], types(entry)) for entry in got[key]] ==
               [(n, name) for n in threads for name in USUAL], f"{key} of all types")
    expect([(entry["threads"], types(entry), entry["isa"]) for entry in got["results"]] ==
           [(n, name, isa) for n in threads for name in USUAL
            for isa in (sets if name == USUAL[0] else sets[:1])], "every kernel")
    expect(near(got["fused_speedup"], [entry["speedup"] for entry in got["fused"]
                                       if entry["threads"] == cores][0]), "the speedup")
    expect(got["working_set_bytes"] == 30000 * 16, "the working set is that of --elements")

    got = measured(out, "--types", "all", "--isa", "all", "--threads", "1")
    expect(len({types(entry) for entry in got["results"]}) == 18 and
           len(got["results"]) == 18 * len(sets), "all types on all instruction sets")
    got = measured(out, "--quick", "--isa", sets[-1].lower(), "--isa", "best")
    expect({entry["isa"] for entry in got["results"]} == {sets[0], sets[-1]} and
           {types(entry) for entry in got["results"]} == {USUAL[0]}, "those that are named")

    for bad, word in [(["--isa", "AVX9"], f"'AVX9'; this CPU has {sets[0]}"),
                      (["--types", "bf16"], "gradient/moments/parameter"),
                      (["--types", "bf16/fp16/bf16"], "moments are fp32 or bf16"),
                      (["--types", "fp8/fp32/bf16"], "fp32, bf16"),
                      (["--threads", "0"], "cores"),
                      (["--threads", str(cores + 1)], f"may use {cores} cores"),
                      (["--elements", "1000000000000"], "give fewer --elements"),
                      (["--elements", "0"], "whole number"), (["--seconds", "0"], "seconds"),
                      (["--json", place.path + "/none/out.json"], "--json")]:
        refusal = bench(*bad)
        expect(refusal.returncode == 2 and word in refusal.stderr + refusal.stdout,
               f"{bad} is refused with '{word}'", refusal)
    started = subprocess.Popen([TERRACE, "bench", "adam", *SMALL[:2], "--seconds", "60", "--json", out],
                               stdout=subprocess.PIPE, text=True)
    started.stdout.readline()
    time.sleep(0.5)
    started.send_signal(signal.SIGINT)
    rest, _ = started.communicate(timeout=30)
    expect(started.returncode == 130 and rest.endswith("interrupted\n") and
           not os.path.exists(out), f"Ctrl-C ends it, without a result: {rest}")
print("ok")
