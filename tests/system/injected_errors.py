"""Errors that strace puts in the place of a system call's result, once and as a storm: what may
pass passes unnoticed, the rest is a message, and --resume is exact."""

import random
import re

from harness import (expect, injecting, main, must_be_named, need_strace, only_store_left, Place,
                     resume_exact, right_or_named, say, sound, WHERE)

ONE_THREAD = 1  # strace counts the calls of each thread
STEPS = 12
ANY_ERROR = (r"terrace\S*store|/proc/\d+/fd/\d+|io_uring", )


def injected(place, reference, engine, call, what):
    """A new run with an injection; whether it was right. What it has left is continued."""
    command = place.train("--io", engine, steps=STEPS, io_threads=ONE_THREAD, slots=2)
    result = place.run([*command, "--discard"], wrapper=injecting(call, what))
    right = right_or_named(result, reference, *ANY_ERROR)
    only_store_left(place.drive, result)
    if not right:
        named_well(result, what)
        sound(place.drive)
        resume_exact(place, reference, command)
    return result, right


NAMES = {"EIO": "Input/output error", "ENOSPC": "No space left", "EDQUOT": "quota exceeded",
         "EINTR": "Interrupted|makes no progress|no operation",
         "EAGAIN": "temporarily unavailable|makes no progress|no operation",
         "EBUSY": "busy|makes no progress|no operation"}


def named_well(result, what):
    """The message names the error, the place and what helps."""
    error = re.search(r"error=(\w+)", what).group(1)
    must_be_named(result, NAMES[error], *(WHERE if "io_uring_enter" not in result.error else ()))


def on_threads(cases):
    need_strace()
    with Place(memory=True) as place:
        reference = place.reference(steps=STEPS)
        for call, what, passes in cases:
            result, right = injected(place, reference, "threads", call, what)
            say(f"  {call} {what}: {'right' if right else result.error.strip()}")
            if passes:
                expect(right, f"{call} {what} must pass unnoticed", result)
        place.clean_outside()


def passing_errors():
    """Interruptions, also many in a row or at every second call."""
    on_threads([(call, f"error={error}:when={when}", True)
                for call in ["pread64", "pwrite64", "fdatasync"]
                for error in ["EINTR", "EAGAIN"]
                for when in ["15", "15+2", "15..90"]
                if call != "fdatasync" or error == "EINTR"])


def endless_errors():
    """Nothing but interruptions: the bound ends it."""
    on_threads([(call, f"error={error}:when=15+", False)
                for call in ["pread64", "pwrite64", "fdatasync"]
                for error in ["EINTR", "EAGAIN"]])


def drive_errors():
    """An error once may be survived by writing elsewhere; for good it ends the run."""
    on_threads([(call, f"error={error}:when={when}", False)
                for call in ["pread64", "pwrite64", "fdatasync"]
                for error in ["EIO", "ENOSPC", "EDQUOT"]
                for when in [str(random.randint(9, 40)), "15+7", "20+"]
                if call != "pread64" or error == "EIO"])


def short_transfers():
    """A call that moves nothing, or less than asked for and not a whole sector of it."""
    need_strace()
    with Place(memory=True) as place:
        reference = place.reference(steps=STEPS)
        for call in ["pread64", "pwrite64"]:
            for what in ["retval=0:when=15", "retval=100:when=15", "retval=0:when=15+9"]:
                command = place.train("--io", "threads", steps=STEPS, io_threads=ONE_THREAD,
                                      slots=2)
                result = place.run([*command, "--discard"], wrapper=injecting(call, what))
                right = right_or_named(result, reference, *ANY_ERROR)
                say(f"  {call} {what}: {'right' if right else result.error.strip()}")
                if not right:
                    resume_exact(place, reference, command)


def opening_errors():
    """While files are made, locked and found again."""
    need_strace()
    cases = [("fallocate", "EIO"), ("fallocate", "ENOSPC"), ("fallocate", "EINTR"),
             ("ftruncate", "EIO"), ("flock", "EINTR"), ("flock", "ENOLCK"), ("fcntl", "EINVAL"),
             ("statx", "ENOSYS"), ("fstat", "EIO"), ("fsync", "EIO"), ("fdatasync", "EIO")]
    with Place(memory=True) as place:
        reference = place.reference(steps=STEPS)
        command = place.train("--io", "threads", steps=STEPS, io_threads=ONE_THREAD, slots=2)
        for call, error in cases:
            place.empty_drive()
            result = place.run(command, wrapper=injecting(call, f"error={error}:when=1"))
            if result.returncode == 2 and not result.out:
                must_be_named(result)
            else:
                right_or_named(result, reference)
            say(f"  {call} {error}: {result.error.strip() or 'right'}")
            resume_exact(place, reference, command)


def ring_errors():
    need_strace()
    with Place(memory=True) as place:
        reference = place.reference(steps=STEPS)
        for error in ["EINTR", "EAGAIN", "EBUSY"]:
            for when in ["5", "3+2", "5..400"]:
                result, right = injected(place, reference, "io_uring", "io_uring_enter",
                                         f"error={error}:when={when}")
                expect(right, f"io_uring_enter {error} {when} must pass unnoticed", result)
        for error in ["ENOMEM", "EBADR", "EINVAL"]:
            command = place.train("--io", "io_uring", steps=STEPS, slots=2)
            result = place.run([*command, "--discard"],
                               wrapper=injecting("io_uring_enter", f"error={error}:when=60"))
            right = right_or_named(result, reference, "io_uring", "threads")
            say(f"  io_uring_enter {error}: {'right' if right else result.error.strip()}")
            if not right:
                resume_exact(place, reference, command)


def ring_storm():
    """The kernel takes nothing any more: a message within the patience for a silent drive."""
    need_strace()
    with Place(memory=True) as place:
        reference = place.reference(steps=STEPS)
        result, right = injected(place, reference, "io_uring", "io_uring_enter",
                                 f"error={random.choice(['EINTR', 'EAGAIN', 'EBUSY'])}:when=40+")
        expect(not right, "it cannot go on", result)
        say(f"  after {result.seconds:.0f} s: {result.error.strip()}")


main({"threads": [passing_errors, endless_errors, drive_errors, short_transfers, opening_errors],
      "ring": [ring_errors], "storm": [ring_storm]})
