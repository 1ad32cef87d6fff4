"""Kills at any instant and two runs in one directory."""

import os
import random
import re
import signal
import socket
import time

from harness import (expect, injecting, main, MODEL, must_be_named, must_equal, need_strace,
                     nothing_left, only_store_left, Place, private, resume_exact, run, Running, say,
                     Skip, sound, TERRACE)

KILLS = 20
KILLED_STEPS = 400


def measured(place, *arguments):
    """A training as users start it: with --nvme and measured speeds, so that plans may differ."""
    return [TERRACE, "train", *MODEL, "--data", place.data, "--nvme", place.drive, "--json",
            place.json, "--steps", str(KILLED_STEPS), *arguments]


def planned(place, *arguments):
    return place.train(*arguments, steps=KILLED_STEPS, slots=2)


def killed_again_and_again(command_of, *arguments):
    """KILLS kills, each followed by --resume; steps only grow, the end is the reference's."""
    with Place() as place:
        reference = place.reference(steps=KILLED_STEPS)
        command = command_of(place, *arguments)
        resumed = kill = 0
        for kill in range(KILLS):
            running = place.start([*command, "--resume"])
            if kill % 4 == 0:  # in the middle of the start
                time.sleep(random.uniform(0, 0.3))
            else:
                running.until_step(1)
                time.sleep(random.uniform(0, 0.25))
            running.kill()
            result = running.finish()
            found = re.search(r"resumed at step (\d+)", result.out)
            if found:
                expect(int(found.group(1)) >= resumed, f"it was at step {resumed} already", result)
                resumed = int(found.group(1))
            if result.returncode == 0:
                break
            expect(result.returncode == -signal.SIGKILL, "killed, not failed", result)
            only_store_left(place.drive, result)
        say(f"  at step {resumed} after {kill + 1} kills")
        result = resume_exact(place, reference, command, at_least=resumed)
        expect(run(["flock", "--nonblock", os.path.join(place.drive, "terrace.store"),
                    "true"]).returncode == 0, "no lock is held", result)
        place.clean_outside()


def killed_uring():
    killed_again_and_again(planned, "--io", "io_uring", "--throttle", "nvme_write=0.05")


def killed_threads():
    killed_again_and_again(planned, "--io", "threads", "--throttle", "nvme_write=0.05")


def killed_measured():
    killed_again_and_again(measured, "--dram", "400KiB", "--hbm", "600KiB", "--throttle",
                           "compute=5")


def killed_on_three_drives():
    def command_of(place, *arguments):
        drives = [place.drive, place.make("second"), place.make("third")]
        return place.train(*arguments, drives=drives, steps=KILLED_STEPS, slots=2)

    killed_again_and_again(command_of, "--throttle", "nvme_write=0.02")


def killed_at_every_write():
    """SIGKILL in the place of each write and flush of the first commits, one after the other."""
    need_strace()
    steps = 4
    with Place() as place:
        reference = place.reference(steps=steps)
        command = place.train("--io", "threads", steps=steps, io_threads=1, slots=2)
        for call, instants in [("fdatasync", range(1, 14)), ("pwrite64", range(1, 130, 3)),
                               ("fallocate", [1]), ("flock", [1]), ("unlink", [1])]:
            for instant in instants:
                killed = place.run([*command, "--discard"],
                                   wrapper=injecting(call, f"signal=KILL:when={instant}"))
                if killed.returncode == 0:
                    must_equal(killed, reference)
                    say(f"  {call}: {instant - 1} calls")
                    break
                resumed = resume_exact(place, reference, command)
                sound(place.drive)
                only_store_left(place.drive, resumed)


def interrupted():
    """SIGINT and SIGTERM: the store is as good as after a kill."""
    with Place() as place:
        reference = place.reference()
        for kind in [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]:
            command = place.train("--throttle", "nvme_write=0.02", slots=2)
            running = place.start([*command, "--discard"])
            step = running.until_step(random.randint(3, 8))
            running.process.send_signal(kind)
            result = running.finish()
            expect(result.returncode in (130, -kind, 128 + kind), "it ends by the signal", result)
            sound(place.drive)
            resume_exact(place, reference, command, at_least=step - 1)


def stopped_and_continued():
    with Place() as place:
        reference = place.reference()
        for engine in ["io_uring", "threads"]:
            running = place.start(place.train("--io", engine, "--throttle", "nvme_write=0.02",
                                              "--discard", slots=2))
            for _ in range(5):
                time.sleep(0.1)
                running.process.send_signal(signal.SIGSTOP)
                time.sleep(0.1)
                running.process.send_signal(signal.SIGCONT)
            must_equal(running.finish(), reference)


# ------------------------------------------------------------------------------------- two at once

def second_run(place, *arguments, wrapper=()):
    """Another run in the place's drive, with a JSON file of its own."""
    path = os.path.join(place.path, "second.json")
    command = place.train(*arguments, slots=2)
    command[command.index("--json") + 1] = path
    return run([*wrapper, *command], path, cwd=place.empty, env=place.env)


def refused_while(place, first, *arguments, wrapper=(), pid=None):
    began = time.monotonic()
    result = second_run(place, *arguments, wrapper=wrapper)
    must_be_named(result, rf"\b{pid or first.pid}\b", re.escape(socket.gethostname()),
                  re.escape(place.drive))
    expect(time.monotonic() - began < 10, "a refusal does not take long", result)
    expect(first.process.poll() is None, "the first one goes on", first.result())


def second_is_refused():
    with Place() as place:
        reference = place.reference()
        first = place.start(place.train("--throttle", "nvme_write=0.004", slots=2))
        first.until_step(1)
        for mode in [[], ["--resume"], ["--discard"]]:
            refused_while(place, first, *mode)
        must_equal(first.finish(), reference)
        only_store_left(place.drive)


def started_at_the_same_time():
    """Four at once, again and again: one trains, the others are refused, nobody is wrong."""
    with Place() as place:
        reference = place.reference()
        for _ in range(2):
            runs = []
            for index in range(4):
                command = place.train("--discard", "--throttle", "nvme_write=0.008", slots=2)
                path = os.path.join(place.path, f"run{index}.json")
                command[command.index("--json") + 1] = path
                runs.append((command, path))
            running = [Running(command, path, None, place.empty, place.env)
                       for command, path in runs]
            results = [one.finish() for one in running]
            right = [result for result in results if result.returncode == 0]
            expect(len(right) == 1, f"one of four trains: {[r.returncode for r in results]}",
                   results[0])
            for result in results:
                if result.returncode == 0:
                    must_equal(result, reference)
                else:
                    must_be_named(result, "in use|process")


def looked_at_beside_a_run():
    """`store verify` and `show` beside a training: no false alarm, no disturbance."""
    with Place() as place:
        reference = place.reference()
        first = place.start(place.train("--throttle", "nvme_write=0.02", slots=2))
        first.until_step(2)
        while first.process.poll() is None:
            for word in ["verify", "show"]:
                result = run([TERRACE, "store", word, place.drive])
                if result.returncode != 0 and first.process.poll() is None:
                    must_be_named(result, "in use")
        must_equal(first.finish(), reference)
        for word in ["verify", "show"]:
            result = run([TERRACE, "store", word, place.drive])
            expect(result.returncode == 0 and re.search(r"\b40\b", result.out), "step 40", result)


def stopped_holder():
    """A process that is stopped still holds its directory; killed, it gives it up at once."""
    with Place() as place:
        reference = place.reference()
        first = place.start(place.train("--throttle", "nvme_write=0.02", slots=2))
        step = first.until_step(4)
        first.process.send_signal(signal.SIGSTOP)
        refused_while(place, first, "--resume")
        first.kill()
        result = second_run(place, "--resume")  # the kernel may still be taking the first apart
        must_equal(result, reference)
        expect(result.json["resumed_from"] >= step - 1, "nothing is lost", result)


def holder_in_another_container():
    """Processes cannot see each other, and both are number so-and-so: the lock still holds."""
    if not private():
        raise Skip("a process namespace is not permitted here")
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with Place() as place:
        reference = place.reference()
        first = place.start(place.train("--throttle", "nvme_write=0.01", slots=2), wrapper=apart)
        first.until_step(2)
        result = second_run(place, "--resume", wrapper=apart)
        must_be_named(result, re.escape(socket.gethostname()))
        must_equal(first.finish(), reference)


def stale_lock():
    """What a lock file says does not matter; only who holds it does."""
    with Place() as place:
        reference = place.reference()
        command = place.train(slots=2)
        path = os.path.join(place.drive, "terrace.lock")
        for text in [f"process {os.getpid()} on {socket.gethostname()}", "", "\0" * 5000]:
            with open(path, "w") as file:
                file.write(text)
            must_equal(place.run([*command, "--discard"]), reference)


def another_run_is_refused():
    """A committed store is in the way of a new run, and of another model, seed or layout."""
    with Place() as place:
        reference = place.reference()
        half = place.run(place.train(steps=20, slots=2))
        expect(half.returncode == 0 and half.json["resumed_from"] is None, "half", half)
        must_be_named(place.run(place.train(slots=2)), "--resume", "--discard", "step 20|20 steps")
        for arguments, word in [(["--seed", "8"], "seed"), (["--width", "48"], "width"),
                                (["--layers", "3"], "layers"), (["--batch", "3"], "batch"),
                                (["--context", "4"], "context"),
                                (["--dtype", "fp32"], "dtype|fp32"),
                                (["--segment", "8KiB"], "layout|segment")]:
            result = place.run(place.train(*arguments, "--resume", slots=2))
            must_be_named(result, word, "--discard")
        resume_exact(place, reference, place.train(slots=2), at_least=20)
        done = place.run([*place.train(slots=2), "--resume"])  # nothing is left to do
        must_equal(done, reference)
        expect(done.json["resumed_from"] == 40 and done.json["loss"] == [], "no step", done)
        must_equal(place.run(place.train("--discard", slots=2)), reference)


def nothing_to_resume():
    with Place() as place:
        reference = place.reference()
        result = place.run(place.train("--resume", slots=2))
        must_equal(result, reference)
        expect(result.json["resumed_from"] is None, "it starts anew", result)
        expect(re.search("anew|nothing to resume", result.out), "and says so", result)


def single_slot_leaves_nothing():
    """Nothing is ever left by --slots 1, and many such runs share a directory."""
    with Place() as place:
        reference = place.reference()
        command = place.train("--throttle", "nvme_write=0.02", slots=1)
        for instant in [0.02, 0.05, 0.1, 0.2, 0.4, 0.8]:
            running = place.start(command)
            time.sleep(instant)
            expect(set(os.listdir(place.drive)) <= {"terrace.lock"}, "no name while it runs",
                   running.result())
            running.kill()
            running.finish()
            expect(set(os.listdir(place.drive)) <= {"terrace.lock"}, "nothing is left",
                   running.result())
        must_equal(place.run(place.train(slots=1)), reference)
        nothing_left(place.drive)


main({"kills": [killed_uring, killed_threads, killed_measured, killed_on_three_drives],
      "writes": [killed_at_every_write, interrupted, stopped_and_continued],
      "two_runs": [second_is_refused, started_at_the_same_time, looked_at_beside_a_run,
                   stopped_holder,
                   holder_in_another_container, stale_lock, another_run_is_refused,
                   nothing_to_resume, single_slot_leaves_nothing]})
