"""Kills training at random instants, again and again: check_kill.py TERRACE [KILLS].

Every run is followed by --resume until the training is complete, and then all begins anew. After
each kill the store must be sound and stand at a step that no earlier one was ahead of; at the end
the state and all losses must be those of a run that nobody disturbed. The seed is printed;
TERRACE_SEED repeats the instants, as far as the machine does.
"""

import collections
import concurrent.futures
import fcntl
import itertools
import json
import os
import random
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time

from training import Place, expect, run, store_json

KILLS = int(sys.argv[2]) if len(sys.argv) > 2 else 200
SEED = int(os.environ.get("TERRACE_SEED", random.SystemRandom().randrange(1 << 32)))
WORKERS = 2
STEPS = 24
# Steps that were reported and not yet committed, beside those of the commit interval: one more when
# updates are made in the next step.
LOST = 2
LOST_DEFERRED = 3
RULES = {"plain": ["--clip", "none"],
         "clipped": ["--clip", "2.5"],  # most norms of this training are above it
         "accumulated": ["--micro-batches", "3"]}
HOMES = [
    {"master_weight": {"dram": 0.5, "nvme": 0.5}, "momentum": "nvme", "variance": "dram"},
    {"master_weight": "nvme", "momentum": {"dram": 0.3, "nvme": 0.7}, "variance": "nvme"},
    {"parameter": "nvme", "momentum": "dram"},
    {},
]
KINDS = [dict(zip(("drives", "interval", "io", "rules"), kind))
         for kind in itertools.product([1, 2], [1, 3], ["io_uring", "threads"], RULES)]


class Seen:
    """What the test found, over all kinds."""

    def __init__(self):
        self.phases = collections.Counter()
        self.most_lost = 0
        self.losses = set()  # steps whose loss was compared


class Chain:
    """Runs in the same directories until the training is complete."""

    def __init__(self, place, kind, reference, seen, chance):
        self.place, self.kind, self.reference = place, kind, reference
        self.seen, self.chance = seen, chance
        self.step = None  # that is committed
        self.sizes = {}   # of files, by store and drive

    def command(self, *arguments):
        chance = self.chance
        config = json.load(open(self.place.config))
        config["terrace"]["placement"] = chance.choice(HOMES)
        path = os.path.join(self.place.path, "run.json")
        if chance.random() < 0.1:  # with the measurement at start
            config["terrace"].pop("speeds")
            for drive in config["terrace"]["nvme"]:
                del drive["read_gb_s"], drive["write_gb_s"]
        with open(path, "w") as file:
            json.dump(config, file)
        return self.place.train("--config", path, "--steps", str(STEPS), "--io", self.kind["io"],
                                "--commit-interval", str(self.kind["interval"]),
                                *RULES[self.kind["rules"]], *arguments)

    def killed_run(self, *arguments):
        """(what it printed, whether it was killed): at an instant from the very start on, while
        the store is made, or some steps later."""
        chance = self.chance
        stores = [self.place.file(d) for d in range(len(self.place.drives))]
        process = subprocess.Popen(self.command(*arguments), stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT)
        out = b""
        wanted = (self.step or 0) + chance.randrange(1, 6)
        until = time.monotonic() + chance.uniform(0, 0.25) if chance.random() < 0.4 else None
        if not os.path.exists(stores[0]) and chance.random() < 0.5:
            first = chance.choice(stores)
            while process.poll() is None and not os.path.exists(first):
                pass  # what follows takes a few milliseconds
            until = time.monotonic() + chance.uniform(0, 0.012)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                wait = 60 if until is None else max(0, until - time.monotonic())
                if not selector.select(wait):
                    break
                data = os.read(process.stdout.fileno(), 1 << 16)
                out += data
                if not data:
                    break
                if until is None and b"step %d/" % wanted in out:
                    until = time.monotonic() + chance.uniform(0, 0.03)
        process.send_signal(signal.SIGKILL)
        out += process.communicate()[0]
        out = out.decode(errors="replace")
        expect(process.returncode in (0, -signal.SIGKILL), f"exit {process.returncode}\n{out}")
        return out, process.returncode != 0

    # ---- after a kill

    def check_files(self):
        for drive in self.place.drives:
            names = set(os.listdir(drive))
            expect(names <= {"terrace.store", "terrace.lock"}, f"leaked files: {names}")
            for name in names:
                status = os.stat(os.path.join(drive, name))
                expect(status.st_size < 1 << 23, f"{name} has {status.st_size} bytes")
                # The file system's own notes about the file come and go.
                expect(status.st_blocks * 512 <= status.st_size + (64 << 10),
                       f"{name}: {status.st_size} bytes in {status.st_blocks} blocks")
            self.check_lock(os.path.join(drive, "terrace.lock"))

    @staticmethod
    def check_lock(path):
        """Nobody holds it, after the short while that a dead owner may take."""
        if not os.path.exists(path):
            return
        with open(path) as file:
            for _ in range(200):
                try:
                    return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(0.01)
        expect(False, f"{path} is held")

    def check_store(self):
        """The store is sound, or what a creation that was cut short leaves. Its verdict."""
        there = [drive for d, drive in enumerate(self.place.drives)
                 if os.path.exists(self.place.file(d))]
        if not there:
            return None
        checked, result = store_json("verify", *there)
        wrong = {(damage["place"], damage.get("copy"), damage["why"])
                 for damage in checked["damages"]}
        unfinished = {("file", None, "its creation was cut short"), ("header", 1, "it is blank")}
        for drive in there:
            size = os.path.getsize(os.path.join(drive, "terrace.store"))
            first = self.sizes.setdefault((checked.get("store"), drive), size)
            expect(first == size or "store" not in checked, f"{drive}: {size} after {first} bytes")
        if checked["state"] == "committed":
            expect(result.returncode == 0 and len(there) == len(self.place.drives),
                   "a committed store is sound", result)
            expect(checked["sound"] == checked["segments"] > 0, "all segments are sound", result)
        else:
            expect(checked["state"] == "empty" and wrong <= unfinished, "an empty store", result)
            expect(result.returncode == (1 if wrong else 2 if checked["missing_drives"] else 0),
                   "exit code", result)
        return checked

    def check_commit(self, checked):
        """The committed step is one, and no earlier one than before; with its losses."""
        commit = checked["commit"] if checked else None
        if commit is None:
            return expect(self.step is None, f"step {self.step} was committed, now none is")
        step = commit["step"]
        expect(step % self.kind["interval"] == 0 or step == STEPS, f"step {step} is no commit's")
        expect(step >= (self.step or 0), f"step {step} is committed, {self.step} was")
        self.step = step
        shown, result = store_json("show", *self.place.drives)
        expect(shown["commit"]["step"] == step and shown["in_use_by"] is None, "show", result)
        self.compare(json.loads(shown["trainer"])["losses"], step, "kept with the commit")
        return shown

    def compare(self, losses, last, where):
        first = last - len(losses)
        expect(losses == self.reference["loss"][first:last],
               f"losses {where} of steps {first + 1} to {last}: {losses}, undisturbed "
               f"{self.reference['loss'][first:last]}")
        self.seen.losses.update(range(first + 1, last + 1))

    def check_lost(self, out):
        reported = [int(step) for step in re.findall(r"^step (\d+)/", out, re.MULTILINE)]
        if not reported:
            return
        lost = reported[-1] - (self.step or 0)
        self.seen.most_lost = max(self.seen.most_lost, lost)
        # Without a commit at every step updates are deferred as well, and with them the commit.
        deferred = self.kind["interval"] > 1 or self.kind["rules"] != "plain"
        expect(lost <= self.kind["interval"] - 1 + (LOST_DEFERRED if deferred else LOST),
               f"step {reported[-1]} was reported and {self.step} is committed\n{out}")

    def phase(self, checked, shown, out):
        if checked is None:
            return "before the store is made"
        if checked["state"] == "empty":
            if checked["damages"] or len(checked["drives"]) < len(self.place.drives):
                return "while the store is made"
            records = re.search("that commit was cut short", checked["outcome"])
            return "during the first commit" if records else "before the first commit"
        if not re.search(r"^step ", out, re.MULTILINE):
            return "during the start of a resume"
        newest = checked["commit"]["generation"]
        for drive in shown["drives"]:
            for record in drive["records"]:
                if record["given_up"]:
                    return "during a commit: tables are being written, records are not"
                if record.get("generation", 0) > newest:
                    return "during a commit: some drives' records are written"
        if checked["older"]["sound"] < checked["older"]["segments"]:
            return "while states are written"
        return "before anything of the next step is written"

    # ---- the whole

    def run(self, most_kills):
        """Kills as often as it may, and compares the end. The number of kills."""
        kills = 0
        complete = False
        while not complete:
            before = self.step
            if kills < most_kills:
                out, killed = self.killed_run("--resume")
            else:
                result = run(self.command("--resume"))
                expect(result.returncode == 0, "the last run ends", result)
                out, killed = result.stdout, False
            found = re.search(r"resumed at step (\d+) of", out)
            if found:
                expect(int(found.group(1)) == before, f"it stood at step {before}\n{out}")
            else:
                expect(before is None or "plan" not in out, f"it must resume at {before}\n{out}")
            self.check_files()
            checked = self.check_store()
            shown = self.check_commit(checked)
            if killed:
                kills += 1
                self.check_lost(out)
                self.seen.phases[self.phase(checked, shown, out)] += 1
            complete = not killed
        self.finish(before, out)
        return kills

    def finish(self, before, out):
        with open(self.place.json) as file:
            result = json.load(file)
        expect(result["state_hash"] == self.reference["state_hash"], "the state differs\n" + out)
        expect(result["steps"] == STEPS == self.step and result["resumed_from"] == before,
               f"{result['steps']} steps, resumed from {result['resumed_from']}")
        self.compare(result["loss"], STEPS, "of the last run")
        for drive in self.place.drives:
            expect(os.listdir(drive) == ["terrace.store"], "only the store is left at the end")


def begin_anew(place, chance, chain):
    """The directories as a new chain finds them: empty, or with a store that is discarded, by a
    run that is killed as well."""
    if chance.random() < 0.5:
        for drive in place.drives:
            shutil.rmtree(drive)
            os.mkdir(drive)
        return
    old = store_json("show", *place.drives)[0]["store"]
    chain.step = None
    for _ in range(5):
        chain.killed_run("--discard")
        chain.check_files()
        checked = chain.check_store()
        if checked is None or checked["state"] == "empty":
            return
        shown = store_json("show", *place.drives)[0]
        if shown["store"] != old:
            chain.step = checked["commit"]["step"]
            return
    return begin_anew(place, chance, chain)


def kill_kind(kind, kills, seed, reference, seen):
    """Trainings of one kind, until so many runs were killed."""
    chance = random.Random(seed)
    begin = time.monotonic()
    trainings = 0
    with Place(kind["drives"]) as place:
        chain = Chain(place, kind, reference, seen, chance)
        left = kills
        while left > 0:
            left -= chain.run(left)
            trainings += 1
            chain = Chain(place, kind, reference, seen, chance)
            if left > 0:
                begin_anew(place, chance, chain)
    print(f"  {kind}: {kills} kills in {trainings} trainings, {time.monotonic() - begin:.0f} s",
          flush=True)


def main():
    print(f"TERRACE_SEED={SEED} repeats these instants", flush=True)
    seen = Seen()
    with Place(1) as place:
        references = {name: place.trained("--steps", str(STEPS), "--slots", "1", *rules)
                      for name, rules in RULES.items()}
    expect(len({reference["state_hash"] for reference in references.values()}) == len(RULES),
           "every rule has an effect")
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        for future in [pool.submit(kill_kind, kind, KILLS * (n + 1) // len(KINDS) -
                                   KILLS * n // len(KINDS), SEED + n, references[kind["rules"]], seen)
                       for n, kind in enumerate(KINDS)]:
            future.result()
    for phase, count in seen.phases.most_common():
        print(f"  {count:4} {phase}")
    print(f"{sum(seen.phases.values())} kills; at most {seen.most_lost} reported steps had to be "
          f"made again; losses of {len(seen.losses)} of {STEPS} steps compared")


main()
print("ok")
