"""A place to train in, for the tests of `terrace store` and of kills."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

TERRACE = os.path.abspath(sys.argv[1])
SMALL = ["--layers", "2", "--width", "64", "--heads", "2", "--context", "16", "--batch", "2",
         "--segment", "4KiB"]
PAGE = 4096


def expect(condition, message, result=None):
    if condition:
        return
    if result is not None:
        message += (f"\n{' '.join(map(str, result.args))}\nexit {result.returncode}\n"
                    f"{result.stdout[-3000:]}{result.stderr[-3000:]}")
    sys.exit("FAILED: " + message)


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=240, **options)


def store(action, *arguments):
    return run([TERRACE, "store", action, *arguments])


def store_json(action, *arguments):
    result = store(action, "--json", *arguments)
    expect(result.stdout.startswith("{"), f"store {action} prints JSON", result)
    return json.loads(result.stdout), result


class Place:
    """A directory of its own with a text in it, inside the current one (so on a real drive)."""

    def __init__(self, drives=1, known_speeds=True):
        self.count = drives
        self.known_speeds = known_speeds

    def __enter__(self):
        self.path = os.path.abspath(tempfile.mkdtemp(prefix="command-", dir="."))
        self.drives = [os.path.join(self.path, f"drive{d}") for d in range(self.count)]
        for drive in self.drives:
            os.mkdir(drive)
        self.data = os.path.join(self.path, "data.txt")
        with open(self.data, "w") as file:
            file.write("the quick brown fox jumps over the lazy dog. " * 200)
        self.json = os.path.join(self.path, "out.json")
        self.config = os.path.join(self.path, "config.json")
        self.configure()
        return self

    def __exit__(self, *unused):
        shutil.rmtree(self.path)

    def configure(self):
        """Speeds that are given are not measured; unequal ones deal unequally."""
        nvme = [{"path": drive} for drive in self.drives]
        terrace = {"nvme": nvme}
        if self.known_speeds:
            for d, drive in enumerate(nvme):
                drive.update(read_gb_s=2.0 + d, write_gb_s=1.0 + d)
            terrace["speeds"] = {"host_to_device_gb_s": 5, "device_to_host_gb_s": 5,
                                 "adam_gb_s": 5, "compute_tflops": 0.05}
        with open(self.config, "w") as file:
            json.dump({"terrace": terrace}, file)

    def train(self, *arguments, model=SMALL):
        return [TERRACE, "train", *model, "--data", self.data, "--config", self.config,
                "--json", self.json, *arguments]

    def trained(self, *arguments, **options):
        """What a run that must succeed wrote."""
        result = run(self.train(*arguments, **options))
        expect(result.returncode == 0, "training must succeed", result)
        with open(self.json) as file:
            return json.load(file)

    def file(self, drive=0):
        return os.path.join(self.drives[drive], "terrace.store")


def said(result, *words):
    for word in words:
        expect(re.search(word, result.stdout + result.stderr), f"it must say '{word}'", result)
    expect("terminate" not in result.stderr, "no abort", result)
