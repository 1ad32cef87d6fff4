"""Runs `terrace` as a user does and reads what it prints: check_command.py TERRACE AREA.

Exit status 77 when the system does not permit what an area needs (the reason is printed).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

TERRACE = os.path.abspath(sys.argv[1])
SMALL = ["--layers", "2", "--width", "64", "--heads", "2", "--context", "16", "--batch", "2",
         "--segment", "4KiB"]
LANES = ["nvme_read", "nvme_write", "host_to_device", "device_to_host", "adam", "compute",
         "commit"]


class Place:
    """A directory of its own with a text in it, inside the current one (so on a real drive)."""

    def __enter__(self):
        self.path = tempfile.mkdtemp(prefix="command-", dir=".")
        self.drive = os.path.join(self.path, "drive")
        os.mkdir(self.drive)
        self.data = os.path.join(self.path, "data.txt")
        with open(self.data, "w") as file:
            file.write("the quick brown fox jumps over the lazy dog. " * 200)
        return self

    def __exit__(self, *unused):
        shutil.rmtree(self.path)

    # One slot: nothing may be left on the drive. Stores are the matter of check_store.py.
    def train(self, *arguments, model=SMALL, data=None, drive=None):
        return [TERRACE, "train", *model, "--data", data or self.data, "--nvme",
                drive or self.drive, "--slots", "1", *arguments]


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=240, **options)


def expect(condition, message, result=None):
    if condition:
        return
    if result is not None:
        message += f"\nexit {result.returncode}\n{result.stdout[-3000:]}{result.stderr[-3000:]}"
    sys.exit("FAILED: " + message)


def refused(place, command, *words):
    result = run(command)
    expect(result.returncode == 2, f"{command[1:]} must be refused", result)
    text = result.stderr
    for word in words:
        expect(re.search(word, text), f"the message must say '{word}'", result)
    expect("terminate" not in text, "no abort", result)
    expect(os.listdir(place.drive) == [], "nothing may be left on the drive", result)
    return text


def bad_input():
    with Place() as place:
        text = refused(place, place.train("--hbm", "4096"), "hbm budget", "backward", "gradient:")
        needed = int(re.search(r"needs (\d+) bytes", text).group(1))
        refused(place, place.train("--hbm", str(needed - 1)), "is 1 bytes")
        result = run(place.train("--hbm", str(needed), "--steps", "1"))
        expect(result.returncode == 0, "exactly enough HBM must do", result)
        refused(place, place.train("--dram", "8KiB"), "dram", "missing \\d+ bytes|bytes", "Raise")
        refused(place, place.train("--dram", "200KiB", "--nvme-budget", "64KiB"), "nvme",
                "optimizer_state")
        refused(place, place.train(drive=place.path + "/nowhere"), "nowhere", "create")
        refused(place, place.train(drive=place.data), "data.txt")
        refused(place, place.train(data=place.path + "/none.txt"), "none.txt", "does not exist")
        empty = os.path.join(place.path, "empty.txt")
        open(empty, "w").close()
        refused(place, place.train(data=empty), "empty.txt", "no text")
        refused(place, place.train("--context", "100000"), "9000", "100001")
        refused(place, place.train("--heads", "3"), "3 heads do not divide the width of 64")
        refused(place, place.train("--layers", "0"), "--layers")
        refused(place, place.train("--segment", "5000"), "power of two")
        refused(place, place.train("--throttle", "nvme=1"), "nvme_read")
        refused(place, place.train("--throttle", "adam=fast"), "fast")
        refused(place, place.train("--hbm", "12 parsecs"), "parsecs")
        refused(place, place.train("--json", place.path + "/no/such/file"), "cannot be written")
        refused(place, place.train("--learning-rate", "nan"), "learning")
        config = os.path.join(place.path, "config.json")
        for content, words in [
                ('{"optimiser": {}}', "nearest known one is 'optimizer'"),
                ('{"terrace": {"budget": {"hmb": 1}}}', "terrace.budget.hmb.*hbm'"),
                ('{"aio": {}, "aio": {}}', "twice"),
                ('{"aio": 5}', "object"),
                ('{', "not JSON"),
                ('{"terrace": {"clip": "speculative"}}', "not available yet"),
                ('{"gradient_clipping": -1.0}', "gradient_clipping: .*not negative"),
                ('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "choose one")]:
            with open(config, "w") as file:
                file.write(content)
            refused(place, place.train("--config", config), "config.json", words)
        for norm in ["0", "-1", "nan", "inf", "1x", "all"]:
            refused(place, place.train("--clip", norm), f"--clip {norm}: a positive norm", "none")
        refused(place, place.train("--dtype", "fp8"), "fp8", "fp16")
        refused(place, place.train("--loss-scale", "2"), "--loss-scale is for fp16, not for bf16")
        for scale in ["-1", "nan", "1e30"]:
            refused(place, place.train("--dtype", "fp16", "--loss-scale", scale),
                    "--loss-scale: 0 .* positive factor up to 2\\^60")
        refused(place, place.train("--dtype", "fp16", "--loss-scale", "1e17", "--verify"),
                "100 batches in a row were passed by after step 0", r"gradient \S+\[\d+\] is not",
                "choose a smaller --loss-scale")
        refused(place, [TERRACE, "plan", "--model", "2X"], "no built-in size", "1T")
        result = run([TERRACE, "fly"])
        expect(result.returncode == 2, "an unknown command must be refused", result)


def results():
    with Place() as place:
        out = os.path.join(place.path, "out.json")
        hashes = set()
        for engine, budget in [("auto", ["--dram", "400KiB", "--hbm", "600KiB"]),
                               ("threads", ["--dram", "400KiB", "--adam-threads", "1"]),
                               ("memory", ["--dram", "2MiB", "--segment", "16KiB"]),
                               ("auto", [])]:
            result = run(place.train("--steps", "6", "--verify", "--sample", "5", "--json", out,
                                     "--io", engine, *budget))
            expect(result.returncode == 0, "training must succeed", result)
            expect("identical to in-memory training: yes" in result.stdout, "identical", result)
            with open(out) as file:
                got = json.load(file)
            hashes.add(got["state_hash"])
            expect(got["identical_to_reference"] is True, "identical in JSON", result)
            expect(len(got["loss"]) == got["steps"] == len(got["step_seconds"]) == 6, "6 steps")
            expect(got["loss"][-1] < got["loss"][0], "the loss falls", result)
            expect(got["state_bytes"] == 16 * got["parameters"], "16 bytes per parameter")
            for tier in got["tiers"].values():
                expect(tier["peak_bytes"] == tier["planned_peak_bytes"] <= tier["budget_bytes"],
                       f"peak equals the plan and keeps the budget: {tier}")
            expect(sorted(got["lanes"]) == sorted(LANES), "lanes")
            for name, lane in got["lanes"].items():
                expect(lane["bytes"] == lane["planned_bytes"], f"{name}: {lane}")
            expect(got["lanes"]["adam"]["bytes"] == 6 * (28 + 2) * got["parameters"],
                   "Adam's formula, and a look at the gradients")
            expect(got["forecast"]["bottleneck"] in LANES, "bottleneck")
            for key in ["stall_seconds", "io"]:
                expect(key in got, key)
            expect(os.listdir(place.drive) == [], "nothing may be left on the drive")
        expect(len(hashes) == 1, f"budget, engine and threads must not matter: {hashes}")
        result = run([TERRACE, "info", "--nvme", place.drive])
        expect(result.returncode == 0 and "instruction set" in result.stdout, "info", result)
        result = run([TERRACE, "plan", "--model", "1T", "--hbm", "80GiB", "--dram", "512GiB",
                      "--nvme", place.drive, "--nvme-budget", "32TiB"])
        expect(result.returncode == 0 and "bottleneck" in result.stdout, "plan", result)


def micro_batches():
    """Accumulated gradients: the same bits as in memory, over tiers and a resume."""
    with Place() as place:
        out = os.path.join(place.path, "out.json")
        config = os.path.join(place.path, "config.json")
        with open(config, "w") as file:
            json.dump({"train_batch_size": 6, "gradient_accumulation_steps": 3,
                       "gradient_clipping": 1.0, "data_types": {"grad_accum_dtype": "bf16"}}, file)

        def command(*arguments):
            return [TERRACE, "train", *SMALL, "--data", place.data, "--nvme", place.drive,
                    *arguments]

        def train(*arguments):
            result = run(command("--verify", "--json", out, *arguments))
            expect(result.returncode == 0, "training must succeed", result)
            expect("identical to in-memory training: yes" in result.stdout, "identical", result)
            with open(out) as file:
                return json.load(file), result

        hashes = {}
        for rules, text in [(["--micro-batches", "3"], "batch 3 x 2 summed in fp32"),
                            (["--micro-batches", "2", "--dtype", "fp16", "--accumulation-dtype",
                              "fp16"], "batch 2 x 2 summed in fp16"),
                            (["--config", config], "batch 3 x 2 summed in bf16")]:
            for budget in [[], ["--dram", "1MiB", "--hbm", "640KiB"]]:
                got, result = train("--steps", "6", "--discard", *rules, *budget)
                expect(text in result.stdout, text, result)
                expect("micro-batches" in result.stdout and got["micro_batches"] in [2, 3],
                       "told", result)
                hashes.setdefault(tuple(rules), set()).add(got["state_hash"])
            half = train("--steps", "3", "--discard", *rules)[0]
            rest = train("--steps", "6", "--resume", *rules, *budget)[0]
            expect(half["steps"] == 3 and rest["resumed_from"] == 3, "resumed")
            hashes[tuple(rules)].add(rest["state_hash"])
        other = run(command("--steps", "9", "--resume", "--micro-batches", "5"))
        expect(other.returncode == 2 and "5 x 2" in other.stderr, "another batch", other)
        expect(all(len(found) == 1 for found in hashes.values()), f"the same bits: {hashes}")
        expect(len(hashes) == len(set.union(*hashes.values())), f"different rules: {hashes}")
        for wrong, words in [(["--micro-batches", "0"], "1 to 1000000"),
                             (["--accumulation-dtype", "fp16"], "fp32 or in their own"),
                             (["--accumulation-dtype", "int4"], "int4")]:
            result = run(command("--steps", "1", "--discard", *wrong))
            expect(result.returncode != 0 and words in result.stderr, f"{wrong} refused", result)


def gradients():
    """Clipping and loss scaling: the same bits as in memory, on every tier."""
    with Place() as place:
        out = os.path.join(place.path, "out.json")
        config = os.path.join(place.path, "config.json")
        with open(config, "w") as file:
            json.dump({"gradient_clipping": 0.5,
                       "fp16": {"enabled": True, "initial_scale_power": 22, "hysteresis": 1,
                                "loss_scale_window": 4}}, file)

        def train(*arguments):
            result = run(place.train("--steps", "8", "--verify", "--json", out, *arguments))
            expect(result.returncode == 0, "training must succeed", result)
            expect("identical to in-memory training: yes" in result.stdout, "identical", result)
            with open(out) as file:
                got = json.load(file)
            expect(got["steps"] == len(got["loss"]) == 8, "skipped steps do not count", result)
            return got, result

        hashes = {}
        for budget in [[], ["--dram", "700KiB", "--hbm", "640KiB"]]:
            for rules, norm in [(["--clip", "1.0"], 1.0), (["--dtype", "fp16"], None),
                                (["--dtype", "fp16", "--clip", "1.0"], 1.0),
                                (["--config", config], 0.5),
                                (["--config", config, "--clip", "none"], None),
                                (["--dtype", "fp16", "--loss-scale", "1000"], None)]:
                got, result = train(*rules, *budget)
                hashes.setdefault(tuple(rules), set()).add(got["state_hash"])
                expect(len(got["gradient_norm"]) == len(got["clipped_norm"]) == 8, "norms", result)
                for before, after in zip(got["gradient_norm"], got["clipped_norm"]):
                    expect(0 < after <= before and after <= (norm or after), "clipped", result)
                fp16 = "fp16" in rules or "--config" in rules
                expect((got["loss_scale"] is not None) == fp16, "a loss scale", result)
                expect("in the next step's forward" in result.stdout, "deferred", result)
                expect(re.search("^step 1/8 .* norm [0-9.]+ " + (" scale" if fp16 else ""),
                                 result.stdout, re.M), "norm and scale", result)
                if "--config" in rules:
                    expect(got["skipped_steps"] >= 4, "2^22 is too large a scale", result)
                    told = re.findall(r"^batch (\d+) is passed by: gradient \S+\[\d+\] is not "
                                      r"finite with loss scale (\d+); the next is (\d+)$",
                                      result.stdout, re.M)
                    expect(len(told) == got["skipped_steps"], "skips are told", result)
                    expect(told[0] == ("1", str(1 << 22), str(1 << 21)), "with scales", result)
        expect(all(len(found) == 1 for found in hashes.values()), f"budgets: {hashes}")
        got, result = train("--config", config, "--clip", "none", "--dtype", "bf16")
        expect(got["gradient_norm"] == got["clipped_norm"] and got["loss_scale"] is None, "plain",
               result)
        expect("for steps that are skipped whole" in result.stdout, "nothing could undo", result)
        plan = [TERRACE, "plan", "--model", "1M"]
        for rules, words in [([], "for steps that are skipped whole"),
                             (["--clip", "2"], "for clipping to norm 2\n"),
                             (["--dtype", "fp16"], "for the dynamic loss scale\n"),
                             (["--dtype", "fp16", "--loss-scale", "8", "--clip", "3"],
                              "for clipping to norm 3 and the loss scale 8\n")]:
            result = run([*plan, *rules])
            expect(result.returncode == 0 and words in result.stdout, words, result)
            expect("wait in dram" in result.stdout, "gradients wait", result)
        drive = ["--nvme", place.drive, "--nvme-budget", "1GiB"]
        result = run([*plan, *drive])
        expect("own backward" in result.stdout and "undoes the step" in result.stdout,
               "a commit at every step can undo", result)


def memory_group(limit):
    """A control group with a memory limit: (its processes file, how to remove it)."""
    name = f"terrace-test-{os.getpid()}"
    for root, limit_file in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
                             ("/sys/fs/cgroup", "memory.max")]:
        group = os.path.join(root, name)
        try:
            os.mkdir(group)
            with open(os.path.join(group, limit_file), "w") as file:
                file.write(str(limit))
            return os.path.join(group, "cgroup.procs"), lambda: os.rmdir(group)
        except OSError:
            if os.path.isdir(group):
                os.rmdir(group)
    print("no memory control group can be made here")
    sys.exit(77)


# What the process needs beside HBM and DRAM budgets: code, libraries, threads, the plan, the text
# and the packing buffers of matrix products.
PROCESS_BYTES = 64 << 20


def limits():
    """Device memory is no illusion: the process keeps HBM + DRAM + a constant."""
    hbm, dram = 24 << 20, 40 << 20
    procs, remove = memory_group(hbm + dram + PROCESS_BYTES)
    try:
        with Place() as place:
            model = ["--layers", "4", "--width", "384", "--heads", "6", "--context", "64",
                     "--batch", "4"]  # 120 MiB of state
            command = place.train("--steps", "3", "--hbm", str(hbm), "--dram", str(dram),
                                  "--throttle", "nvme_read=0.5,nvme_write=0.5", model=model)

            def enter():
                with open(procs, "w") as file:
                    file.write(str(os.getpid()))

            result = run(command, preexec_fn=enter)
            expect(result.returncode == 0, "training must keep to its memory", result)
            full_disk(place)
    finally:
        time.sleep(0.2)
        remove()


def full_disk(place):
    mount = os.path.join(place.path, "full")
    os.mkdir(mount)
    if run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount]).returncode != 0:
        print("no file system can be mounted here: the full disk is not tested")
        return
    try:
        result = run(place.train("--dram", "100KiB", "--steps", "1", "--nvme-budget", "1GiB",
                                 "--width", "128", drive=mount))
        expect(result.returncode == 2, "a full disk must be refused", result)
        expect(re.search("free|No space", result.stderr), "the message helps", result)
        expect(os.listdir(mount) == [], "nothing may be left on the full disk")
    finally:
        run(["umount", mount])


def interruption():
    with Place() as place:
        command = place.train("--steps", "100000", "--json", place.path + "/out.json")
        for kind in [signal.SIGKILL, signal.SIGINT]:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       text=True)
            while not process.stdout.readline().startswith("step 1/"):
                expect(process.poll() is None, "the run must start")
            process.send_signal(kind)
            out, error = process.communicate(timeout=60)
            expect(os.listdir(place.drive) == [], "nothing may be left on the drive")
            if kind == signal.SIGINT:
                expect(process.returncode == 130, f"exit {process.returncode}\n{out}{error}")
                expect("interrupted: stopped after step" in out and "state hash" in out,
                       "the summary is printed: " + out)
        with open(place.path + "/out.json") as file:
            expect(json.load(file)["steps"] >= 1, "the steps so far are in the JSON")


{"bad_input": bad_input, "results": results, "gradients": gradients,
 "micro_batches": micro_batches, "limits": limits,
 "interruption": interruption}[sys.argv[2]]()
print("ok")
