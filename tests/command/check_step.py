"""`terrace bench step` on a small model: check_step.py TERRACE all.

Times are not judged: that is what the command is for.
"""

import json
import os

from training import TERRACE, Place, expect, run

SMALL = ["--layers", "3", "--elements", "262144", "--steps", "3", "--seconds", "0.04"]
CASES = ["nvme_read", "nvme_write", "host_to_device", "device_to_host", "adam", "compute",
         "balanced"]


def bench(*arguments):
    return run([TERRACE, "bench", "step", *SMALL, *arguments])


with Place() as place:
    drive = os.path.join(place.path, "drive")
    os.makedirs(drive, exist_ok=True)
    kept = os.path.join(drive, "terrace.store")  # of somebody's
    with open(kept, "w") as file:
        file.write("precious")
    out = os.path.join(place.path, "out.json")
    result = bench("--nvme", drive, "--json", out)
    expect(result.returncode == 0, "all cases make the state of a plain run", result)
    with open(out) as file:
        got = json.load(file)
    cases = got["cases"]
    expect(got["executor"]["operations"] > 1000 and
           got["executor"]["user_us_per_operation"] > 0, "what the executor costs", result)
    expect([(case["slowest_lane"], case["clip"]) for case in cases] ==
           [(name, clip) for clip in ("none", "global") for name in CASES], "every case", result)
    for case in cases:
        expect(case["state_identical"], f"{case['slowest_lane']}: the state differs", result)
        expect(case["updates"] == ("deferred" if case["clip"] == "global" else "overlapped"),
               "clipping defers updates", result)
        expect(case["floor_seconds"] > 0.035 or case["slowest_lane"] == "balanced",
               f"the slowest lane has its floor: {case}", result)
        expect(abs(case["ratio"] - case["step_seconds"] / case["floor_seconds"]) < 1e-9,
               "the ratio is of what is given", result)
        for lane in case["lanes"].values():
            expect(lane["floor_seconds"] >= 0 and lane["busy_seconds"] >= 0, "lanes", result)
        for key in ["forecast_seconds", "exposed_seconds", "hidden_seconds", "cpu_seconds"]:
            expect(case[key] >= 0, key, result)
    with open(kept) as file:
        expect(file.read() == "precious", "what lies in the directory is not touched")
    expect(os.listdir(drive) == ["terrace.store"], "and nothing is left")
    one = bench("--nvme", drive, "--lane", "adam", "--clip", "none")
    expect(one.returncode == 0 and len(one.stdout.splitlines()) == 3, "one case", one)
    for bad, word in [(["--lane", "warp"], "no case is left"), (["--elements", "1000"], "1024"),
                      (["--steps", "0"], "whole number"), (["--clip", "much"], "clip"),
                      (["--nvme", place.path + "/none"], "none/terrace-bench")]:
        refusal = bench("--nvme", drive, *bad)
        expect(refusal.returncode == 2 and word in refusal.stderr + refusal.stdout,
               f"{bad} is refused with '{word}'", refusal)
print("ok")
