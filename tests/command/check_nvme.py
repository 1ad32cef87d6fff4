"""`terrace nvme` as a user runs it: check_nvme.py TERRACE AREA.

Exit status 77 when the system does not permit or have what an area needs (the reason is printed).
Speeds are compared with nothing but throttles that the test sets itself.
"""

import json
import os
import re
import shutil
import stat
import signal
import subprocess
import sys
import tempfile
import time

from training import SMALL, TERRACE, expect, run, said

SHORT = ["--seconds", "5", "--file-size", "128MiB", "--seed", "1"]
PATTERNS = {"first_write", "read", "overwrite", "mix", "optimizer_step", "layer_prefetch",
            "commit", "sustained_write"}


class Drive:
    """A directory on the drive of the current one; its files are listed without asking it."""

    def __enter__(self):
        self.path = os.path.abspath(tempfile.mkdtemp(prefix="nvme-", dir="."))
        self.drive = os.path.join(self.path, "drive")
        os.mkdir(self.drive)
        return self

    def __exit__(self, *unused):
        shutil.rmtree(self.path)

    def at(self, name):
        return os.path.join(self.path, name)

    def empty(self, result=None, drive=None):
        left = os.listdir(drive or self.drive)
        expect(left == [], f"nothing may be left on the drive, but {left} is", result)


def nvme(action, *arguments, **options):
    return run([TERRACE, "nvme", action, *arguments], **options)


def skip(reason):
    print(reason)
    sys.exit(77)


def read_json(path):
    with open(path) as file:
        return json.load(file)


def refused(result, *words):
    expect(result.returncode == 2, "it must be refused", result)
    said(result, *words)


def on_a_drive(drive):
    """Skips where the tests lie on something that the bench rightly refuses."""
    kind = run(["stat", "-fc%T", drive]).stdout.strip()
    if kind in ("tmpfs", "ramfs", "overlayfs", "nfs", "cifs", "fuseblk", "fuse", "zfs"):
        skip(f"these tests do not lie on a drive but on {kind}")
    try:
        os.close(os.open(drive, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        skip(f"these tests do not lie on a drive with direct I/O: {error}")


# ------------------------------------------------------------------------------------- bad input

def results_go_where_they_are_sent(place):
    """Links stay links, devices stay devices, and what else lies there stays as it is."""
    def bench(*options):
        return nvme("bench", "/dev/shm", *options)  # refused at once, and told so in the file

    target, link = place.at("target.json"), place.at("link.json")
    with open(target, "w") as file:
        file.write("old")
    os.symlink(target, link)
    bench("--json", link)
    expect(os.path.islink(link) and json.load(open(target))["refused"], "the link's target")
    null = place.at("null")
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        null = "/dev/null"
    bench("--json", null)
    expect(stat.S_ISCHR(os.stat(null).st_mode), "a device is written, not replaced")
    result = bench("--json", "/dev/stdout")
    expect('"cells"' in result.stdout, "the standard output is one", result)
    refused(bench("--json", "-"), "--json - cannot be written")
    refused(bench("--json", target, "--html", target), "name one file")
    for name in [target, link, place.at("null")]:
        if os.path.lexists(name):
            os.unlink(name)


def bad_input():
    with Drive() as place:
        drive = place.drive
        for options, words in [
                (["--quick", "--thorough"], "contradict"),
                (["--seconds", "4"], "5 to 86400"),
                (["--seconds", "nan"], "5 to 86400"),
                (["--compute", "-1"], "--compute takes a positive number of seconds"),
                (["--compute", "nan"], "--compute takes a positive number of seconds"),
                (["--tbw", "0"], "--tbw takes a positive number of terabytes"),
                (["--file-size", "1"], "64.00 MiB at least"),
                (["--file-size", "big"], "big"),
                (["--write-limit", "0"], "256.00 MiB at least"),
                (["--model", "2X"], "write 7B"),
                (["--parameters", "0"], "write 7B"),
                (["--io", "fast"], "io_uring"),
                (["--io", "memory"], "auto, io_uring or threads"),
                (["--json", place.at("no/such/file")], "cannot be written"),
                (["--html", place.path], "cannot be written")]:
            result = nvme("bench", drive, *options)
            refused(result, words)
            expect("measuring" not in result.stdout and "drive behind" not in result.stdout,
                   "before anything is done", result)
        refused(nvme("bench"), "directory is required")
        refused(nvme("bench", drive, drive + "/."), "are one directory; name each drive once")
        refused(nvme("bench", "/dev/null"), "neither a directory nor a regular file")
        refused(nvme("bench", place.at("none")), "none cannot be used", "create it")
        refused(nvme("tune", drive, "--emit", "other"), "deepspeed")
        refused(nvme("tune", TERRACE), "is a file, which is only read")
        refused(nvme("tune", drive, "--out", place.at("no/such/file")), "cannot be written")
        result = nvme("bench", drive, *SHORT, "--fio", env={**os.environ, "PATH": "/nowhere"})
        refused(result, "fio, which is not in PATH", "install it")
        bad_diffs(place)
        results_go_where_they_are_sent(place)
        place.empty()


def bad_diffs(place):
    file = place.at("file.json")
    for content, words in [("{", "is no JSON"), ("", "is no JSON"), ("{}", "is no result"),
                           ("[1]", "is no result"), ('{"cells": 3, "drives": []}', "is no result")]:
        with open(file, "w") as out:
            out.write(content)
        refused(nvme("diff", file, file), words)
    refused(nvme("diff", place.path, file), "cannot be read")
    refused(nvme("diff", place.at("none"), file), "cannot be read", "bench --json")


# --------------------------------------------------------------------------------------- refused

def refused_places():
    with Drive() as place:
        on_a_drive(place.drive)
        out = place.at("out.json")
        written = place.at("written")
        with open(written, "wb") as file:
            file.write(os.urandom(32 << 20))
            os.fsync(file.fileno())
        result = nvme("bench", written, *SHORT, "--json", out)  # its pages are in the cache still
        refused(result, "page cache", "no verdict", "nothing: .* is a file and only read")
        kinds = [entry["kind"] for entry in read_json(out)["refused"]]
        expect(kinds == ["cached"] and read_json(out)["cells"] == [], f"{kinds}", result)
        sparse = place.at("sparse")
        with open(sparse, "wb") as file:
            file.truncate(32 << 20)
        refused(nvme("bench", sparse, *SHORT), "holes")
        reserved = place.at("reserved")
        with open(reserved, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 32 << 20)
        result = nvme("bench", reserved, *SHORT)
        if "holes" not in result.stdout:  # where reserving writes nothing
            refused(result, "never written")
        small = place.at("small")
        with open(small, "wb") as file:
            file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        refused(nvme("bench", small, *SHORT), "the file has 1.00 MiB")
        refused(nvme("bench", "/dev/null", *SHORT), "name a directory on")
        other_file_systems(place)
        another_machine(place)
        no_permission()
        mounted(place)


def other_file_systems(place):
    if os.path.isdir("/dev/shm") and run(["stat", "-fc%T", "/dev/shm"]).stdout.strip() == "tmpfs":
        out = place.at("out.json")
        result = nvme("bench", "/dev/shm", *SHORT, "--json", out, "--compute", "1")
        refused(result, "keeps files in memory", "nothing: /dev/shm is refused")
        expect(read_json(out)["refused"][0]["kind"] == "memory", "kind", result)
        refused(nvme("tune", "/dev/shm", *SHORT), "no recommended setting", "in memory")


def another_machine(place):
    """--sysfs-root: a machine whose files lie on a server, on layers, on a drive of its own."""
    root = place.at("root")
    os.makedirs(os.path.join(root, "proc/self"))
    for line, words in [("nfs4 server:/export rw", ["server:/export", "local file system"]),
                        ("overlay overlay rw,upperdir=/var/lib/up", ["/var/lib/up", "docker run"]),
                        ("fuse.thing thing rw", ["another process"])]:
        with open(os.path.join(root, "proc/self/mountinfo"), "w") as file:
            file.write(f"1 0 0:99 / / rw - {line}\n")
        refused(nvme("bench", place.drive, *SHORT, "--sysfs-root", root), *words)


def no_permission():
    def nobody():
        os.setgid(65534)
        os.setuid(65534)

    # Outside, whoever owns the directories above the tests'.
    outside = tempfile.mkdtemp(prefix="terrace-nvme-", dir="/var/tmp")
    try:
        os.chmod(outside, 0o555)
        result = nvme("bench", outside, *SHORT,
                      preexec_fn=nobody if os.getuid() == 0 else None, cwd="/")
        refused(result, "/var/tmp", "writable|name (another|a) ")
    except PermissionError:
        print("another user cannot run the command here: permissions are not tested")
    finally:
        os.rmdir(outside)


def mounted(place):
    """A small and a full file system, one that is only read, and layers."""
    image, mount = place.at("image"), place.at("mount")
    os.mkdir(mount)
    with open(image, "wb") as file:
        file.truncate(400 << 20)
    try:
        made = run(["mkfs.ext4", "-q", image]).returncode == 0
    except FileNotFoundError:
        made = False
    if not made or run(["mount", "-o", "loop", image, mount]).returncode != 0:
        print("no file system can be mounted here: small, read-only and layered are not tested")
        return
    try:
        shutil.rmtree(os.path.join(mount, "lost+found"))
        layers = [os.path.join(mount, name) for name in ["low", "up", "work", "all"]]
        for layer in layers:
            os.mkdir(layer)
        low, up, work, layered = layers
        options = f"lowerdir={low},upperdir={up},workdir={work}"
        if run(["mount", "-t", "overlay", "-o", options, "overlay", layered]).returncode == 0:
            refused(nvme("bench", layered, *SHORT), "container", "docker run")
            run(["umount", layered])
        for layer in layers:
            shutil.rmtree(layer)
        run(["mount", "-o", "remount,ro", mount])
        refused(nvme("bench", mount, *SHORT), "Read-only file system", "name another")
        run(["mount", "-o", "remount,rw", mount])
        with open(os.path.join(mount, "fill"), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 200 << 20)
        refused(nvme("bench", mount, *SHORT), "free", "name another directory")
        os.remove(os.path.join(mount, "fill"))
        place.empty(drive=mount)
    finally:
        run(["umount", mount])


# --------------------------------------------------------------------------------------- results

def check_result(got, result):
    for key in ["cells", "direct", "refused", "recommended", "verdict", "fio_command",
                "environment", "drives"]:
        expect(key in got, f"{key} is in the JSON", result)
    expect(got["direct"] is True and got["interrupted"] is False, "direct", result)
    expect(got["seconds"] <= got["stated_seconds"] == 5, "it keeps its time", result)
    for cell in got["cells"]:
        for key in ["pattern", "block_bytes", "depth", "threads", "gb_s", "spread", "p50_us",
                    "p99_us", "cpu_seconds_per_gb"]:
            expect(key in cell, f"{key} is in {cell}")
        expect(cell["gb_s"] > 0 and cell["p99_us"] >= cell["p50_us"] > 0, str(cell))
    patterns = {cell["pattern"] for cell in got["cells"]}
    expect(patterns == PATTERNS, f"{PATTERNS ^ patterns} is missing or unknown", result)
    for cell in got["cells"]:
        for direction in ["read", "write"]:
            latency = cell[direction + "_latency"]
            if latency:
                order = [latency[key] for key in ["p50_us", "p90_us", "p99_us", "p999_us",
                                                  "max_us"]]
                expect(order == sorted(order), str(order))


def results():
    with Drive() as place:
        on_a_drive(place.drive)
        first, second = place.at("first.json"), place.at("second.json")
        page = place.at("page.html")
        # Nothing hides beneath a microsecond, everything beneath a year.
        result = nvme("bench", place.drive, *SHORT, "--json", first, "--html", page, "--model",
                      "1B,7B", "--compute", "1e-6", "--tbw", "600")
        expect(result.returncode == 1, "it does not hide", result)
        said(result, "does not hide", "a scratch file of", "up to 200.00 GiB altogether",
             "nothing is left behind", "rated endurance lasts", "read back and equal",
             "latency of read", "read in GB/s, block by depth")
        got = read_json(first)
        check_result(got, result)
        expect([v["hides"] for v in got["verdict"]] == [False, False], "verdict", result)
        for verdict in got["verdict"]:
            p = verdict["parameters"]
            expect(verdict["read_bytes_per_step"] == 16 * p and
                   verdict["written_bytes_per_step"] == 14 * p, "the formulas")
            expect(verdict["drive_seconds"] == verdict["overlapped_seconds"], str(verdict))
            expect(verdict["drives_needed"] > 1 and verdict["steps_to_wear_out"] > 0, str(verdict))
        check_page(page, got)
        place.empty(result)
        result = nvme("bench", place.drive, *SHORT, "--json", second, "--compute", "1e9",
                      "--parameters", "1e9", "--io", "threads")
        expect(result.returncode == 0, "it hides", result)
        said(result, "hides: ")
        expect(read_json(second)["drives"][0]["engine"] == "threads", "the engine", result)
        place.empty(result)
        check_diff(place, first, second)


def check_page(page, got):
    with open(page) as file:
        text = file.read()
    expect("<svg" in text and "prefers-color-scheme: dark" in text, "pictures, and both themes")
    expect(not re.search(r"(src|href)=|@import|url\(", text), "the page needs no other file")
    data = re.search(r'<script type="application/json" id="result">(.*?)</script>', text, re.S)
    expect(json.loads(data.group(1).replace("<\\/", "</")) == got, "the page holds the result")


def check_diff(place, first, second):
    result = nvme("diff", first, first)
    expect(result.returncode == 0, "nothing differs from itself", result)
    said(result, "nothing changed beyond the noise")
    result = nvme("diff", first, second)
    expect(result.returncode in (0, 1), "two results can be compared", result)
    faster = read_json(first)
    for cell in faster["cells"]:
        cell["samples_gb_s"] = [2 * s for s in cell["samples_gb_s"]]
    faster["drives"][0]["facts"]["scheduler"] = "another"
    with open(place.at("faster.json"), "w") as file:
        json.dump(faster, file)
    result = nvme("diff", first, place.at("faster.json"))
    said(result, r"\+100.0 %", "scheduler: .*, now another")
    expect(("changed beyond the noise" in result.stdout) and result.returncode in (0, 1), "", result)


# ------------------------------------------------------------------------------------------ fio

def fio():
    if not shutil.which("fio"):
        skip("fio is not installed: the comparison is not tested")
    with Drive() as place:
        on_a_drive(place.drive)
        out = place.at("out.json")
        result = nvme("bench", place.drive, *SHORT, "--fio", "--json", out)
        expect(result.returncode in (0, 2), "measured, or too noisy for a setting", result)
        said(result, "fio included")
        got = read_json(out)
        cells = [cell for cell in got["cells"] if "fio_gb_s" in cell]
        compared = {cell["pattern"] for cell in cells}
        if compared != {"read", "overwrite", "mix"}:
            note = got["drives"][0]["fio_note"]
            expect(note, "why there is no comparison", result)
            skip(f"fio was too slow here for the time that it had: {note}")
        said(result, "against fio")
        for cell in cells:
            low, high = cell["ratio_interval"]
            expect(cell["fio_gb_s"] > 0 and 0 < low <= cell["ratio_to_fio"] <= high, str(cell))
            expect("fio_cpu_seconds_per_gb" in cell and "too_noisy" in cell, str(cell))
        for word in ["--ioengine=io_uring", "--direct=1", "--fixedbufs=1", "--registerfiles=1"]:
            expect(word in got["fio_command"], word, result)
        place.empty(result)


# ----------------------------------------------------------------------------------------- tune

def tune():
    with Drive() as place:
        on_a_drive(place.drive)
        result = tuned(place, "--out", place.at("tuned.json"))
        said(result, "written to " + re.escape(place.at("tuned.json")))
        got = read_json(place.at("tuned.json"))
        expect(got["terrace"]["nvme"][0]["path"] == place.drive, "the drive's path", result)
        expect(result.stdout.endswith(json.dumps(got, indent=2) + "\n"), "what is printed", result)
        trains_with(place, "--config", place.at("tuned.json"))
        place.empty(result)
        expect(got["aio"]["queue_depth"] >= 1, "a depth", result)
        # As found in the drive's own directory.
        with open(os.path.join(place.drive, "terrace.tuned.json"), "w") as file:
            json.dump(got, file)
        trained = trains_with(place, "--nvme", place.drive)
        said(trained, "come from .*terrace.tuned.json")
        expect(os.listdir(place.drive) == ["terrace.tuned.json"], "nothing else is left", trained)
        os.remove(os.path.join(place.drive, "terrace.tuned.json"))
        result = tuned(place, "--emit", "deepspeed")
        block = json.loads(result.stdout[result.stdout.index("\n{") + 1:])
        expect(sorted(block) == ["aio"] and sorted(block["aio"]) == [
            "block_size", "intra_op_parallelism", "overlap_events", "queue_depth",
            "single_submit"], "the names that DeepSpeed reads", result)
        place.empty(result)


def tuned(place, *arguments):
    """A tune that finds a setting; on a machine that is too noisy for one, tries again."""
    for _ in range(3):
        result = nvme("tune", place.drive, *SHORT, *arguments)
        if result.returncode == 0:
            return result
        refused(result, "too noisy|in the time that there was|no setting is within")
    skip("this machine is too noisy for a recommendation:\n" + result.stderr)


def trains_with(place, *arguments):
    data = place.at("data.txt")
    with open(data, "w") as file:
        file.write("the quick brown fox jumps over the lazy dog. " * 200)
    result = run([TERRACE, "train", *SMALL, "--data", data, "--steps", "2", "--slots", "1",
                  "--verify", *arguments])
    expect(result.returncode == 0, "training takes what tune wrote", result)
    said(result, "identical to in-memory training: yes")
    return result


# --------------------------------------------------------------------------------- interruption

def children_of(process):
    try:
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
            return file.read().split()
    except OSError:
        return []


def interruption():
    with Drive() as place:
        on_a_drive(place.drive)
        out = place.at("out.json")
        kinds = [(signal.SIGINT, 1.5), (signal.SIGTERM, 0.3), (signal.SIGKILL, 0.2),
                 (signal.SIGKILL, 2)]
        for kind, after in kinds:
            process = subprocess.Popen(
                [TERRACE, "nvme", "bench", place.drive, "--seconds", "60", "--file-size", "256MiB",
                 "--json", out], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            while "nothing is left behind" not in process.stdout.readline():
                expect(process.poll() is None, "the run must start")
            time.sleep(after)
            process.send_signal(kind)
            text, error = process.communicate(timeout=30)
            place.empty()
            if kind == signal.SIGKILL:
                expect(process.returncode == -kind, f"{process.returncode}\n{text}{error}")
                continue
            expect(process.returncode == 130, f"exit {process.returncode}\n{text}{error}")
            expect("interrupted: what is above is not complete" in text, text)
            expect(read_json(out)["interrupted"] is True, "so says the JSON")
        with_a_child(place)


def with_a_child(place):
    """A killed bench takes fio along, which would go on writing."""
    if not shutil.which("fio"):
        print("fio is not installed: its end is not tested")
        return
    process = subprocess.Popen([TERRACE, "nvme", "bench", place.drive, *SHORT, "--fio",
                                "--write-limit", "512MiB"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        children = children_of(process)
        if children and time.sleep(0.1) is None and children == children_of(process):
            break
        time.sleep(0.005)
    expect(process.poll() is None, "fio must be seen")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(os.path.exists("/proc/" + child) for child in children):
        expect(time.monotonic() < deadline, "fio must end with the bench")
        time.sleep(0.01)
    place.empty()


# ------------------------------------------------------------------------------------- throttle

def throttled():
    """A drive behind the kernel's own throttle is measured at it."""
    with Drive() as place:
        on_a_drive(place.drive)
        read, write = 100 << 20, 60 << 20  # bytes per second
        enter, leave = throttle_group(place.drive, read, write)
        try:
            out = place.at("out.json")
            result = nvme("bench", place.drive, "--seconds", "10", "--file-size", "64MiB",
                          "--json", out, "--compute", "1", "--model", "1B", preexec_fn=enter)
            got = read_json(out)
            for pattern, wanted in [("read", read), ("layer_prefetch", read),
                                    ("overwrite", write), ("sustained_write", write)]:
                cell = [cell for cell in got["cells"] if cell["pattern"] == pattern and
                        not cell["sweep"]][-1]
                # Never more; less when others keep this machine busy.
                expect(0.7 <= cell["gb_s"] * 1e9 / wanted <= 1.05,
                       f"{pattern}: {cell['gb_s']} GB/s instead of {wanted * 1e-9}", result)
            expect(got["seconds"] <= got["stated_seconds"], "in its time", result)
        finally:
            leave()


def throttle_group(drive, read, write):
    """A control group with limits for the drive: (how to enter it, how to remove it)."""
    number = os.stat(drive).st_dev
    device = os.path.realpath(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if os.path.exists(os.path.join(device, "partition")):
        device = os.path.dirname(device)
    try:
        with open(os.path.join(device, "dev")) as file:
            name = file.read().strip()
    except OSError:
        skip("the drive behind the tests has no number: no throttle can be set")
    group = f"terrace-nvme-{os.getpid()}"
    for root, limits in [
            ("/sys/fs/cgroup/blkio", {"blkio.throttle.read_bps_device": f"{name} {read}",
                                      "blkio.throttle.write_bps_device": f"{name} {write}"}),
            ("/sys/fs/cgroup", {"io.max": f"{name} rbps={read} wbps={write}"})]:
        path = os.path.join(root, group)
        try:
            os.mkdir(path)
            for file_name, limit in limits.items():
                with open(os.path.join(path, file_name), "w") as file:
                    file.write(limit)
        except OSError:
            if os.path.isdir(path):
                os.rmdir(path)
            continue

        def enter():
            with open(os.path.join(path, "cgroup.procs"), "w") as file:
                file.write(str(os.getpid()))

        def leave():
            for _ in range(50):
                try:
                    return os.rmdir(path)
                except OSError:
                    time.sleep(0.1)

        return enter, leave
    return skip("no control group with a limit for drives can be made here")


{"bad_input": bad_input, "refused": refused_places, "results": results, "fio": fio, "tune": tune,
 "interruption": interruption, "throttled": throttled}[sys.argv[2]]()
print("ok")
