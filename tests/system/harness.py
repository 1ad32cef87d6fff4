"""What the system tests share: a private place, a training and its judgement, limits and faults.

Every test file is run as `FILE TERRACE AREA`. It runs in a mount and process namespace of its own
where that is permitted: whatever happens to it, the kernel then unmounts, detaches and ends all
that it has left. Exit status 77 says that the system does not permit or have what an area needs.
"""

import ctypes
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

TERRACE = os.path.abspath(sys.argv[1])
# Small and fast: 658 KiB of state in 10 segments or so, all of it on the drive.
MODEL = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "8", "--batch", "2",
         "--segment", "4KiB"]
STEPS = 40
HANG_SECONDS = 100  # a run takes one; the product gives a silent drive 60
SPEEDS = {"host_to_device_gb_s": 4, "device_to_host_gb_s": 4, "adam_gb_s": 8,
          "compute_tflops": 0.01}  # given, so that nothing is measured and every plan is the same
ON_NVME = dict.fromkeys(["parameter", "master_weight", "momentum", "variance"], "nvme")
STORE_FILES = {"terrace.store", "terrace.lock"}
NOBODY = 65534
INSIDE = "TERRACE_SYSTEM_TEST_INSIDE"


class Skip(Exception):
    """The system does not permit or have what the check needs."""


class Failed(Exception):
    """The product is wrong."""


class Result:
    """How a command ended: exit status (negative: a signal), what it printed, its JSON."""

    def __init__(self, command, returncode, out, error, seconds, json_path=None):
        self.command, self.returncode, self.seconds = command, returncode, seconds
        self.out, self.error = out, error
        self.json = None
        if json_path and returncode == 0:
            with open(json_path) as file:
                self.json = json.load(file)

    def __str__(self):
        out = re.sub(r"^(step \d+/|  ).*\n", "", self.out, flags=re.MULTILINE)  # what matters less
        return (f"{' '.join(self.command)}\nexit {self.returncode} after step "
                f"{last_step(self.out)}, {self.seconds:.1f} s\n"
                f"{out[-2500:]}{self.error[-2500:]}")


def expect(condition, message, result=None):
    if not condition:
        raise Failed(message if result is None else f"{message}\n{result}")


def say(text):
    print(text, flush=True)


# ---------------------------------------------------------------------------------------- commands

def system(*command, check=True):
    """Runs a system program; its output. What is missing or not permitted skips the check."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS,
                              stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise Skip(f"{command[0]} is not installed") from None
    if check and done.returncode != 0:
        raise Skip(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


def run(command, json_path=None, timeout=HANG_SECONDS, before=None, cwd=None, env=None):
    """Runs it to its end. One that does not end fails the test and leaves no process."""
    return Running(command, json_path, before, cwd, env).finish(timeout)


_started = []


class Running:
    """A command that has been started, in a session of its own."""

    def __init__(self, command, json_path=None, before=None, cwd=None, env=None):
        self.command, self.json_path, self.began = command, json_path, time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        stdin=subprocess.DEVNULL, text=True, preexec_fn=before,
                                        start_new_session=True, cwd=cwd, env=env)
        self.texts = {"out": "", "error": ""}
        self.news = threading.Condition()
        self.readers = [threading.Thread(target=self.read, args=(name, pipe), daemon=True)
                        for name, pipe in [("out", self.process.stdout),
                                           ("error", self.process.stderr)]]
        for reader in self.readers:
            reader.start()
        _started.append(self)

    def read(self, name, pipe):
        for line in pipe:
            with self.news:
                self.texts[name] += line
                self.news.notify_all()

    @property
    def pid(self):
        return self.process.pid

    def until(self, happened, what, timeout=HANG_SECONDS):
        """Waits until `happened(output so far)` is true; its value, or None when the command ended
        without."""
        deadline = time.monotonic() + timeout
        while True:
            over = self.process.poll() is not None
            if over:
                self.join()
            with self.news:
                value = happened(self.texts["out"])
                if value or over:
                    return value or None
                self.news.wait(0.02)
            if time.monotonic() > deadline:
                self.end()
                raise Failed(f"{what} did not happen within {timeout} s:\n{self.result()}")

    def until_step(self, step):
        """Waits until this step or a later one has been reported; its number."""
        seen = self.until(lambda text: last_step(text) >= step and last_step(text), f"step {step}")
        expect(seen is not None, f"the run must reach step {step}", self.result())
        return seen

    def kill(self):
        self.process.send_signal(signal.SIGKILL)

    def end(self):
        """Kills it and all that it has started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.join()

    def join(self):
        for reader in self.readers:
            reader.join(10)

    def result(self):
        return Result(self.command, self.process.poll(), self.texts["out"], self.texts["error"],
                      time.monotonic() - self.began, self.json_path)

    def finish(self, timeout=HANG_SECONDS):
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            where = waiting_where(self.pid)
            self.end()
            raise Failed(f"it hangs ({where}):\n{self.result()}") from None
        self.join()
        return self.result()


def last_step(text):
    """The last step that a run has reported."""
    steps = re.findall(r"^step (\d+)/", text, re.MULTILINE)
    return int(steps[-1]) if steps else 0


def waiting_where(pid):
    """What each thread of a process waits for, as the kernel names it."""
    names = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/wchan") as file:
                names.append(file.read() or "running")
    except OSError:
        pass
    return ", ".join(sorted(names))


# ------------------------------------------------------------------------------------ a training

class Place:
    """A directory of its own inside the current one (so on a real drive): text, drive, scratch.

    `memory`: a file system in RAM where that is permitted, for many runs whose drive is no matter.
    """

    def __init__(self, memory=False):
        self.memory = memory and private()

    def __enter__(self):
        self.path = os.path.abspath(tempfile.mkdtemp(prefix="system-", dir="."))
        if self.memory:
            system("mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", self.path)
        self.drive = self.make("drive")
        self.empty = self.make("cwd")  # of the runs: nothing may appear there
        self.scratch = self.make("tmp")  # their TMPDIR: the same
        self.data = os.path.join(self.path, "data.txt")
        with open(self.data, "w") as file:
            file.write("the quick brown fox jumps over the lazy dog. " * 200)
        self.json = os.path.join(self.path, "out.json")
        self.env = dict(os.environ, TMPDIR=self.scratch)
        self.configs = 0
        return self

    def __exit__(self, *unused):
        if self.memory:
            run(["umount", "--lazy", self.path])
        shutil.rmtree(self.path, ignore_errors=True)

    def empty_drive(self):
        for name in os.listdir(self.drive):
            os.unlink(os.path.join(self.drive, name))

    def make(self, name):
        path = os.path.join(self.path, name)
        os.makedirs(path, exist_ok=True)
        return path

    def config(self, drives, placement, aio):
        self.configs += 1
        path = os.path.join(self.path, f"config{self.configs}.json")
        nvme = [{"path": drive, "read_gb_s": 1, "write_gb_s": 1} for drive in drives]
        with open(path, "w") as file:
            json.dump({"aio": aio, "terrace": {"placement": placement, "nvme": nvme,
                                               "speeds": SPEEDS}}, file)
        return path

    def train(self, *arguments, drive=None, drives=None, model=None, steps=STEPS, io_threads=4,
              slots=None, placement=None):
        """The command of a training on `drive` (the place's own) or `drives`: nothing measured."""
        config = self.config(drives or [drive or self.drive], placement or ON_NVME,
                             {"thread_count": io_threads})
        if slots:
            arguments += ("--slots", str(slots))
        return [TERRACE, "train", *(model or MODEL), "--config", config, "--data", self.data,
                "--steps", str(steps), "--json", self.json, *arguments]

    def start(self, command, before=None, wrapper=()):
        if os.path.exists(self.json):
            os.unlink(self.json)
        return Running([*wrapper, *command], self.json, before, self.empty, self.env)

    def run(self, command, before=None, wrapper=(), timeout=HANG_SECONDS):
        return self.start(command, before, wrapper).finish(timeout)

    def reference(self, model=None, steps=STEPS):
        """An undisturbed run without a drive, itself compared with plain training."""
        key = (tuple(model or MODEL), steps)
        if key not in _references:
            result = self.run(self.train("--io", "memory", "--verify", model=model, steps=steps,
                                         slots=1))
            expect(result.returncode == 0 and result.json["identical_to_reference"],
                   "the undisturbed run must be right", result)
            _references[key] = result.json
        return _references[key]

    def clean_outside(self):
        """Nothing is left outside of the drive."""
        for folder in [self.empty, self.scratch]:
            expect(os.listdir(folder) == [], f"left outside the drive: {os.listdir(folder)}")


    def shared(self, *more):
        """Lets the user nobody work here; the wrapper that makes a run theirs."""
        if os.geteuid() != 0:
            raise Skip("becoming another user needs root")
        user = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
        for folder in [self.path, self.drive, self.empty, self.scratch, *more]:
            os.chmod(folder, 0o777)
        if run([*user, "test", "-w", self.drive]).returncode != 0:
            raise Skip("another user cannot reach this folder")
        return user


_references = {}


def files_of(drive):
    """The names on a drive, without what the file system itself puts there."""
    return sorted(set(os.listdir(drive)) - {"lost+found"})


def nothing_left(drive, result=None):
    left = files_of(drive)
    expect(left == [], f"nothing may be left on the drive, but {left}", result)


def only_store_left(drive, result=None):
    left = set(files_of(drive))
    expect(left <= STORE_FILES, f"only the store may be on the drive, but {sorted(left)}", result)


# ------------------------------------------------------------------------------------- judgement

def must_equal(result, reference):
    """The run ended well and is right: state and every loss."""
    expect(result.returncode == 0, "the run must end well", result)
    got = result.json
    expect(got["state_hash"] == reference["state_hash"],
           f"WRONG DATA: the state is {got['state_hash']}, not {reference['state_hash']}", result)
    first = got.get("resumed_from") or 0
    wanted = reference["loss"][first:]
    expect(got["loss"] == wanted, f"the losses from step {first + 1} on are {got['loss']}, "
           f"not {wanted}", result)


def must_be_named(result, *words):
    """The run ended with a message that says what happened; `words` are patterns it must have."""
    expect(result.returncode == 2, "it must end with exit status 2", result)
    expect(re.search(r"^terrace: ", result.error, re.MULTILINE), "a message is wanted", result)
    for crash in ["terminate called", "Assertion", "TERRACE_CHECK", "Sanitizer"]:
        expect(crash not in result.error + result.out, f"no {crash}", result)
    for word in words:
        if not re.search(word, result.error):
            _complaints.setdefault(word, result)


_complaints = {}  # patterns that messages lack: the check goes on, so that more is seen, and fails


def settle_complaints():
    texts = {}
    for word, result in _complaints.items():
        texts.setdefault(str(result), []).append(word)
    _complaints.clear()
    expect(not texts, "\n".join(f"a message must say {' and '.join(words)}\n{text}"
                                for text, words in texts.items()))


# An I/O error's message: where, and what helps.
WHERE = (r"(terrace\S*\.store|/proc/\d+/fd/\d+)", r"offset \d+", r"\d+ bytes",
         r"(; |\. )(.* )?(--\w+|\b(free|raise|name|see|make|mount|run|choose|check|repair)\b)")


def right_or_named(result, reference, *words):
    """The rule of all disturbances; True when the run was right."""
    if result.returncode == 0:
        must_equal(result, reference)
        return True
    must_be_named(result, *words)
    return False


def verify_store(*drives):
    return run([TERRACE, "store", "verify", *drives])


def sound(*drives):
    """Nothing is damaged; a commit that was interrupted is no damage. No store is sound, too: an
    error before the first commit may leave none."""
    if any(os.path.exists(os.path.join(drive, "terrace.store")) for drive in drives):
        result = verify_store(*drives)
        expect(result.returncode == 0, "the store must be sound", result)


def resume_exact(place, reference, command, at_least=0):
    """`command` with --resume ends as if nothing had happened, and loses no committed step."""
    result = place.run([*command, "--resume"])
    must_equal(result, reference)
    step = result.json["resumed_from"] or 0
    expect(step >= at_least, f"resumed at step {step}; step {at_least} was committed", result)
    only_store_left(place.drive, result)
    return result


# ------------------------------------------------------------------------------- limits, refusals

def limited(**limits):
    """For `before`: resource limits by name, for example FSIZE=4096."""
    def apply():
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    return apply


ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NR_SETUP, NR_ENTER, NR_REGISTER = 425, 426, 427  # io_uring's calls, the same on all machines
NR_FALLOCATE = {"x86_64": 285}.get(os.uname().machine, 47)


def refusing(calls, error):
    """For `before`: a seccomp filter that answers these system calls with an error."""
    def code(instruction, value, yes=0, no=0):
        return struct.pack("HBBI", instruction, yes, no, value)

    program = code(0x20, 0)  # the call's number
    for call in calls:
        program += code(0x15, call, 0, 1) + code(0x06, ERRNO | error)
    program += code(0x06, ALLOW)

    def apply():
        class Program(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

        libc = ctypes.CDLL(None, use_errno=True)
        buffer = ctypes.create_string_buffer(program)
        wanted = Program(len(program) // 8, ctypes.addressof(buffer))
        if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.prctl(22, 2, ctypes.byref(wanted), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "no seccomp filter")
    return apply


def injecting(call, what):
    """As `wrapper`: strace that injects, for example injecting("pwrite64", "error=EIO:when=5")."""
    return ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e",
            f"inject={call}:{what}"]


def need_strace():
    probe = run(injecting("getpid", "error=EIO:when=1000") + ["true"]) \
        if shutil.which("strace") else None
    if probe is None:
        raise Skip("strace is not installed")
    if probe.returncode != 0:
        raise Skip("strace is not permitted: " + probe.error.strip()[-200:])


# --------------------------------------------------------------------------------------- the main

def enter_namespace():
    """Runs this script again with mounts and processes that are its own; root only."""
    if os.environ.get(INSIDE) or os.geteuid() != 0:
        return
    wrapper = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        permitted = subprocess.run([*wrapper, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        permitted = False
    if permitted:
        os.environ[INSIDE] = "yes"
        os.execvp(wrapper[0], [*wrapper, sys.executable, *sys.argv])


def private():
    """Whether mounts made here are seen by nobody else."""
    return bool(os.environ.get(INSIDE))


def main(areas):
    """Runs the checks of the area that the command line names: {area: [function, ...]}."""
    enter_namespace()
    seed = int(os.environ.get("TERRACE_SEED", random.randrange(1 << 32)))
    say(f"TERRACE_SEED={seed} repeats the random choices")
    done = failed = 0
    for check in areas[sys.argv[2]]:
        name = check.__name__
        began = time.monotonic()
        random.seed(f"{seed} {name}")
        try:
            check()
            settle_complaints()
        except Skip as reason:
            say(f"{name}: left out: {reason}")
            continue
        except Failed as failure:
            say(f"FAILED: {name}: {failure}")
            failed += 1
            continue
        finally:
            _complaints.clear()
            for running in _started:
                if running.process.poll() is None:
                    running.end()
            _started.clear()
        done += 1
        say(f"{name}: ok ({time.monotonic() - began:.1f} s)")
    sys.exit(1 if failed else 0 if done else 77)
