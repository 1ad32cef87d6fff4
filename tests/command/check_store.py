"""`terrace store verify` and `show` as a user runs them: check_store.py TERRACE AREA."""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time

from training import PAGE, TERRACE, Place, expect, run, said, store, store_json

ENTRY = struct.Struct("<QQQII")  # offset, checksum, generation, segment, length


class Bytes:
    """A store's file whose bytes are changed for a while."""

    def __init__(self, path):
        self.path = path
        with open(path, "rb") as file:
            self.pristine = file.read()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        with open(self.path, "wb") as file:
            file.write(self.pristine)

    def flip(self, offset, count=1):
        with open(self.path, "r+b") as file:
            file.seek(offset)
            file.write(bytes(b ^ 0x5A for b in self.pristine[offset:offset + count]))
        return self

    def put(self, offset, data):
        with open(self.path, "r+b") as file:
            file.seek(offset)
            file.write(data)
        return self


def made(place, *arguments):
    return place.trained("--steps", "4", "--dram", "400KiB", *arguments)


def table_of(place, drive, record):
    """Entries of the table that a record names, read without Terrace's help."""
    shown = store_json("show", *place.drives)[0]["drives"][drive]
    offset = shown["layout"]["table"][shown["records"][record]["table"]]
    with open(place.file(drive), "rb") as file:
        data = file.read()[offset:offset + ENTRY.size * shown["segments"]]
    return [ENTRY.unpack_from(data, at) for at in range(0, len(data), ENTRY.size)]


def newest_record(shown):
    records = shown["records"]
    return max((0, 1), key=lambda i: records[i].get("generation", 0))


def sound():
    for drives in [1, 2]:
        with Place(drives) as place:
            trained = made(place)
            result = store("verify", *place.drives)
            expect(result.returncode == 0, "a store that was just made is sound", result)
            said(result, "step 4", r"GB/s\): (\d+) of \1 segments sound",
                 r"(\d+) of \1 copies still hold", "sound: --resume continues at step 4")
            checked, result = store_json("verify", *place.drives)
            expect(checked["sound"] == checked["segments"] == checked["older"]["sound"] > 0 and
                   checked["damages"] == [] and checked["exit_code"] == 0, "JSON", result)
            threads, result = store_json("verify", "--io", "threads", *reversed(place.drives))
            expect(threads["sound"] == checked["segments"], "any engine, any order", result)
            shown, result = store_json("show", *reversed(place.drives))
            expect(result.returncode == 0 and shown["in_use_by"] is None, "show", result)
            expect(shown["commit"]["step"] == 4 and shown["state"] == "committed", "step", result)
            kept = json.loads(shown["trainer"])["losses"]
            expect(kept == trained["loss"], "the trainer's bytes are the losses", result)
            expect([d["drive"] for d in shown["drives"]] == list(range(drives)), "order", result)
            expect(sum(d["segments"] for d in shown["drives"]) == checked["segments"], "segments")
            for d, drive in enumerate(shown["drives"]):
                expect(drive["path"] == place.file(d), "paths", result)
                used = drive["in_use"]
                expect(used["slot_a"] + used["slot_b"] == drive["segments"] and
                       used["spares"] == 0, "where segments lie", result)
                expect(drive["bytes_written"] > 5 * drive["share_bytes"] / 2, "wear", result)
                expect(drive["size_bytes"] == os.path.getsize(place.file(d)), "size", result)
            result = store("show", *place.drives)
            said(result, "gpt of 2 blocks, width 64", "seed +1", "step 4", "losses", "slot A",
                 "per step", "record 0", "record 1", r"direct")
            for drive in place.drives:
                expect(os.listdir(drive) == ["terrace.store"], "nothing else is left there")


def expect_damage(place, file, wanted, words=(), code=1):
    """wanted: {(place, copy or None)}; what verify must find, and nothing else."""
    checked, result = store_json("verify", *place.drives)
    found = {(damage["place"], damage.get("copy")) for damage in checked["damages"]}
    expect(found == wanted, f"wanted {wanted}, found {found}", result)
    expect(result.returncode == code == checked["exit_code"], f"exit code {code}", result)
    for damage in checked["damages"]:
        expect(damage["path"] == file.path and damage["bytes"] > 0 and damage["why"], str(damage))
    result = store("verify", *place.drives)
    expect(result.returncode == code, "the same as text", result)
    said(result, *words)
    shown = store("show", *place.drives)
    lost = place.count == 1 and any("both copies" in word for word in words)
    expect(shown.returncode == (2 if lost else 0), "show copes", shown)
    return checked


def resumes(place, step, *words):
    """Whether --resume does what verify says; the store is worth nothing afterwards."""
    result = run(place.train("--steps", "5", "--dram", "400KiB", "--resume"))
    if step is None:
        expect(result.returncode == 2, "--resume must refuse", result)
    else:
        expect(result.returncode == 0, "--resume must continue", result)
        said(result, f"resumed at step {step} of 5")
    said(result, *words)


def metadata(place, file, drive):
    """Each copy of everything that a store writes about itself."""
    shown = store_json("show", *place.drives)[0]["drives"][drive]
    layout = shown["layout"]
    newest = newest_record(shown)
    older = 1 - newest
    for copy in [0, 1]:
        with file.flip(layout["header"][copy] + 30):
            expect_damage(place, file, {("header", copy)},
                          [f"header {copy}: its checksum is wrong", "the other copy is whole",
                           "all segments are sound: --resume continues at step 4"])
            if drive == 0:
                resumes(place, 4)
        with file.flip(layout["text"][copy] + 9):
            expect_damage(place, file, {("text", copy)}, ["other copy", "step 4"])
    with file.put(layout["header"][1], bytes(PAGE)):
        expect_damage(place, file, {("header", 1)}, ["it is blank"])
    with file.flip(layout["record"][newest] + 50):
        expect_damage(place, file, {("record", newest)},
                      [f"record {newest}", "power cut", "--resume continues at step 3"])
        if drive == 0:
            resumes(place, 3)
    with file.flip(layout["record"][older] + 50):
        expect_damage(place, file, {("record", older)}, ["power cut", "continues at step 4"])
    table = shown["records"][newest]["table"]
    with file.flip(layout["table"][table] + 40):
        expect_damage(place, file, {("table", table)}, [f"table {table}", "continues at step 3"])
        if drive == 0:
            resumes(place, 3)
    with file.flip(layout["table"][1 - table] + 40):
        expect_damage(place, file, set(), ["sound: --resume continues at step 4"], 0)
    # The trainer's bytes are written before the record's page: an older commit's may be gone.
    with file.flip(layout["record"][older] + PAGE):
        expect_damage(place, file, set(), ["sound: --resume continues at step 4"], 0)
        said(store("show", *place.drives), "given up to the next commit")
    with file.flip(layout["record"][newest] + PAGE):
        expect_damage(place, file, {("record", newest)}, ["trainer's bytes", "at step 3"])
    with file.flip(layout["header"][0] + 30).flip(layout["text"][1] + 9):
        expect_damage(place, file, {("header", 0), ("text", 1)}, ["step 4"])
    with file.flip(layout["header"][0] + 30).flip(layout["header"][1] + 30):
        expect_damage(place, file, {("header", 0), ("header", 1)},
                      ["refuses this store: .* both copies"])
    with file.put(0, bytes(2 * PAGE)):
        expect_damage(place, file, {("header", 0), ("header", 1)},
                      ["refuses this store: .* both copies"])
        resumes(place, None, "both copies", "store verify", "--discard")
    with file.flip(layout["record"][0] + 50).flip(layout["record"][1] + 50):
        expect_damage(place, file, {("record", 0), ("record", 1)},
                      ["refuses this store", "commit record 0", "no other"])
        resumes(place, None, "commit record 0 is damaged")


def data(place, file, drive):
    shown = store_json("show", *place.drives)[0]["drives"][drive]
    layout = shown["layout"]
    newest = newest_record(shown)
    entries = table_of(place, drive, newest)
    offset, checksum, generation, segment, length = entries[len(entries) // 2]
    with file.flip(offset + length // 2):
        checked = expect_damage(place, file, {("segment", None)},
                                [f"segment {segment} \\((master_weight|momentum|variance) of ",
                                 f"step {generation}", f"checksum {checksum} is expected",
                                 "--resume stops at what is damaged"])
        damage = checked["damages"][0]
        expect((damage["offset"], damage["bytes"], damage["segment"], damage["expected"]) ==
               (offset, length, segment, checksum), str(damage))
        expect(checked["sound"] == checked["segments"] - 1, "the others are sound")
        resumes(place, None, f"checksum {checksum} is expected", "store verify")
    # A whole segment where another one belongs, and what an older step wrote.
    other = next(e for e in entries if e[4] == length and e[3] != segment)
    with file.put(offset, file.pristine[other[0]:other[0] + length]):
        expect_damage(place, file, {("segment", None)}, [f"segment {segment} "])
    old = next(e for e in table_of(place, drive, 1 - newest) if e[3] == segment)
    with file.put(offset, file.pristine[old[0]:old[0] + length]):
        expect_damage(place, file, {("segment", None)}, [f"segment {segment} "])
    with file.flip(old[0] + length - 1):
        checked = expect_damage(place, file, set(), ["sound: --resume continues at step 4"], 0)
        older = checked["older"]
        expect(older["sound"] == older["segments"] - 1, f"the older copy is counted: {older}")
    # What nobody reads: spares, and what lies behind the used part of a page or a record's slot.
    for unused in [layout["spares"] + 5, layout["header"][0] + PAGE - 1,
                   layout["text"][1] + layout["text_bytes"] - 1,
                   layout["record"][newest] + layout["record_bytes"] - 1,
                   layout["table"][0] + layout["table_bytes"] - 1]:
        with file.flip(unused):
            expect_damage(place, file, set(), ["sound: --resume continues at step 4"], 0)
    with file.flip(layout["slot"][0], 2 * shown["share_bytes"]):
        checked = expect_damage(place, file, {("segment", None)},
                                [r"damaged: [^\n]*\n", "GB/s\\): \\d+ of"])
        expect(checked["damaged"] == shown["segments"] and checked["older"]["sound"] ==
               checked["older"]["segments"] - shown["segments"], "all of the drive's", None)


def flips(drives):
    with Place(drives) as place:
        made(place)
        for drive in range(drives):
            file = Bytes(place.file(drive))
            kept = [Bytes(place.file(d)) for d in range(drives)]

            class All(Bytes):
                """Resuming changes all drives."""

                def __exit__(self, *unused):
                    for other in kept:
                        other.__exit__()

            file.__class__ = All
            metadata(place, file, drive)
            data(place, file, drive)


def flips_on_one():
    flips(1)


def flips_on_two():
    flips(2)


def sizes():
    """Files that are cut short, empty, blank, garbage; drives that are missing or strangers."""
    with Place(1) as place:
        result = store("verify", *place.drives)
        expect(result.returncode == 2, "an empty directory", result)
        said(result, "there is no store in", place.drives[0])
        expect(os.listdir(place.drives[0]) == [], "nothing is left there")
        for action in ["verify", "show"]:
            for path in [place.path + "/nowhere", place.data]:
                result = store(action, path)
                expect(result.returncode == 2, "no store there", result)
                said(result, "there is no store in")
        made(place)
        result = store("verify", place.file())
        expect(result.returncode == 0, "a store's file stands for its directory", result)
        result = store("verify", place.drives[0], place.drives[0] + "/.")
        expect(result.returncode == 2, "the same twice", result)
        said(result, "name each drive once")
        with Bytes(place.file()) as file:
            size = len(file.pristine)
            os.truncate(file.path, size - PAGE)
            expect_damage(place, file, {("file", None)},
                          ["cut short by 1 of 2 spares", "all segments are sound"])
            resumes(place, 4, "cut short by 1 of 2 spares")
            for length in [size // 2 + 123, 100000]:
                os.truncate(file.path, length)
                expect_damage(place, file, {("file", None)}, ["cut short", "refuses this store"])
                resumes(place, None, "cut short")
            for length in [0, 1, PAGE, 2 * PAGE - 1]:
                os.truncate(file.path, length)
                checked, result = store_json("verify", *place.drives)
                expect(result.returncode == 1 and checked["state"] == "empty", "cut off", result)
                said(store("verify", *place.drives), "no step is committed")
            for content in [os.urandom(65536), b"terrace " * 10000]:
                with open(file.path, "wb") as garbage:
                    garbage.write(content)
                result = store("verify", *place.drives)
                expect(result.returncode == 1, "garbage", result)
                said(result, "both copies of its superblock are damaged", "--discard")
                expect(store("show", *place.drives).returncode == 2, "nothing to show", result)
        os.chmod(place.file(), 0o600)
    with Place(2) as place, Place(1) as other:
        made(place)
        made(other)
        for alone in [0, 1]:
            result = store("verify", place.drives[alone])
            expect(result.returncode == 2, "a missing drive", result)
            said(result, f"drive {1 - alone} of 2 is missing")
            said(store("show", place.drives[alone]), f"drive {1 - alone} of 2 is missing")
        for strangers in [[place.drives[0], other.drives[0]], [other.drives[0], *place.drives]]:
            result = store("verify", *strangers)
            expect(result.returncode == 2, "two stores", result)
            said(result, "drives of two stores")
        shutil.copy(place.file(0), other.file(0))
        result = store("verify", *place.drives, other.drives[0])
        expect(result.returncode == 2, "the same drive twice", result)
        said(result, "both hold drive 0")
        with Bytes(place.file(1)) as file:
            os.truncate(file.path, 0)
            result = store("verify", *place.drives)
            expect(result.returncode == 1, "one drive is blank", result)
            said(result, "refuses this store", "it is blank, and the store's other drives are not")
            resumes(place, None, "it is blank")
    with Place(1) as place:
        made(place)
        config = json.load(open(place.config))
        config["terrace"]["checksums"] = False
        json.dump(config, open(place.config, "w"))
        made(place, "--discard")
        result = store("verify", *place.drives)
        expect(result.returncode == 0, "checksums are off", result)
        said(result, "checksums are off", "only what the files say about themselves")


def in_use():
    with Place(2) as place:
        process = subprocess.Popen(place.train("--steps", "100000", "--dram", "400KiB"),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            while not process.stdout.readline().startswith("step 1/"):
                expect(process.poll() is None, "the run must start")
            steps = []
            for _ in range(20):
                shown, result = store_json("show", *place.drives)
                expect(result.returncode == 0, "show works meanwhile", result)
                expect(f"process {process.pid} on " in shown["in_use_by"], "by whom", result)
                expect(shown["commit"] is not None, "there is always a commit", result)
                steps.append(shown["commit"]["step"])
            expect(steps == sorted(steps) and steps[0] < steps[-1], f"it goes on: {steps}")
            said(store("show", *place.drives), f"in use by process {process.pid} on")
            begin = time.monotonic()
            result = store("verify", *place.drives)
            expect(result.returncode == 2, "verify must wait for the run's end", result)
            said(result, "is in use by process " + str(process.pid))
            expect(time.monotonic() - begin < 30, "and say so soon")
        finally:
            process.send_signal(signal.SIGINT)
            out = process.communicate(timeout=60)[0]
        expect("interrupted" in out, "the run was not disturbed: " + out[-2000:])
        result = store("verify", *place.drives)
        expect(result.returncode == 0, "afterwards it can be checked", result)
        shown = store_json("show", *place.drives)[0]
        step = int(re.search(r"stopped after step (\d+)", out).group(1))
        expect(shown["commit"]["step"] == step and shown["in_use_by"] is None, "all is kept")
        command = [TERRACE, "store", "verify", *place.drives]
        both = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        for one in both:
            out = one.communicate(timeout=60)[0]
            expect(one.returncode == 0, f"two at once wait for each other: {out}")


def skips():
    """Kills between skipped steps: no batch is used twice and none is left out."""
    with Place(2) as place:
        with open(place.config) as file:
            config = json.load(file)
        config["fp16"] = {"enabled": True, "initial_scale_power": 22, "hysteresis": 1,
                          "loss_scale_window": 3}
        with open(place.config, "w") as file:
            json.dump(config, file)
        rules = ["--steps", "16", "--clip", "1.0"]
        whole = place.trained(*rules, "--slots", "1")
        expect(whole["skipped_steps"] >= 5, f"2^22 is too large: {whole}")
        for commits in ["1", "3"]:
            command = place.train(*rules, "--dram", "700KiB", "--commit-interval", commits)
            for step in [1, 6, 11]:
                process = subprocess.Popen([*command, "--discard" if step == 1 else "--resume"],
                                           stdout=subprocess.PIPE, text=True)
                while not process.stdout.readline().startswith(f"step {step}/"):
                    expect(process.poll() is None, "the run must go on")
                process.kill()
                process.communicate(timeout=60)
            got = place.trained(*rules, "--commit-interval", commits, "--resume", "--verify")
            first = got["resumed_from"]
            expect(first is not None and first >= 11 - int(commits) - 2, f"resumed at {first}")
            expect(got["identical_to_reference"], "identical")
            expect(got["state_hash"] == whole["state_hash"], "the same state as without kills")
            for key in ["loss", "gradient_norm", "clipped_norm"]:
                expect(got[key] == whole[key][first:], f"{key}: {got[key]}")
            for key in ["skipped_steps", "loss_scale"]:
                expect(got[key] == whole[key], f"{key}: {got[key]}, not {whole[key]}")
            expect(store("verify", *place.drives).returncode == 0, "the store is sound")


def full():
    """A drive without free space goes on with the store that it holds, whatever speeds are."""
    with Place(2) as place:
        mounts = []
        try:
            for drive in place.drives:
                if run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", drive]).returncode != 0:
                    print("no file system can be mounted here")
                    sys.exit(77)
                mounts.append(drive)
            made(place, "--dram", "4MiB")
            for drive in mounts:
                space = os.statvfs(drive)
                with open(os.path.join(drive, "filler"), "wb") as file:
                    file.write(bytes(space.f_bavail * space.f_frsize))
            with open(place.config) as file:
                config = json.load(file)
            for speeds in [(9.0, 0.5), (0.5, 9.0)]:  # other shares than the store's
                for drive, speed in zip(config["terrace"]["nvme"], speeds):
                    drive.update(read_gb_s=speed, write_gb_s=speed)
                with open(place.config, "w") as file:
                    json.dump(config, file)
                result = run(place.train("--steps", "6", "--dram", "4MiB", "--resume"))
                expect(result.returncode == 0, "a full drive's store is continued", result)
            expect(store("verify", *place.drives).returncode == 0, "and is sound")
            os.unlink(place.file(0))
            os.unlink(place.file(1))
            os.unlink(os.path.join(mounts[0], "filler"))
            result = run(place.train("--steps", "6", "--dram", "4MiB"))
            expect(result.returncode == 2, "there is no space for a new one", result)
            said(result, "nvme budget of", f"Free in {place.drives[1]}")
        finally:
            for drive in mounts:
                run(["umount", drive])


{"full": full, "sound": sound, "flips_on_one": flips_on_one, "flips_on_two": flips_on_two,
 "sizes": sizes, "in_use": in_use, "skips": skips}[sys.argv[2]]()
print("ok")
