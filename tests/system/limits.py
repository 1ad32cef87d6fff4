"""Limits that a machine, a container or an administrator sets: the run is right without what it is
refused and says so, or it is refused with the limit's name and leaves nothing."""

import errno
import os
import re
import shutil

from harness import (expect, limited, main, must_be_named, must_equal, nothing_left, NR_ENTER,
                     NR_FALLOCATE, NR_REGISTER, NR_SETUP, only_store_left, Place, refusing,
                     resume_exact, right_or_named, say, Skip)

SYSCTL = "/proc/sys/kernel/io_uring_disabled"


def notes(result):
    return "\n".join(re.findall(r"^note: .*", result.out, re.MULTILINE))


# ---------------------------------------------------------------------------------- resource limits

def file_size():
    """A limit below what the store needs is named; SIGXFSZ would have killed without a word."""
    with Place() as place:
        reference = place.reference()
        for engine in ["io_uring", "threads"]:
            for limit in [4096, 65536, 300000]:
                result = place.run(place.train("--io", engine, slots=2), limited(FSIZE=limit))
                must_be_named(result, r"ulimit -f|file size limit", r"\d+ bytes")
                nothing_left(place.drive, result)
            result = place.run(place.train("--io", engine, slots=2), limited(FSIZE=64 << 20))
            must_equal(result, reference)
            place.empty_drive()
        place.clean_outside()


def file_size_at_resume():
    """The store is there already and larger than the limit of the run that continues it."""
    with Place() as place:
        reference = place.reference()
        command = place.train(slots=2)
        half = place.run(place.train("--steps", str(20), slots=2))
        expect(half.returncode == 0, "half of the steps", half)
        result = place.run([*command, "--resume"], limited(FSIZE=65536))
        if not right_or_named(result, reference, r"ulimit -f|file size limit|[Ff]ile too large"):
            resume_exact(place, reference, command, at_least=20)


def locked_memory():
    """Without CAP_IPC_LOCK the limit counts; buffers are then not registered, said in one line."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        raise Skip("setpriv is not installed")
    without = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"]
    with Place() as place:
        reference = place.reference()
        for limit in [0, 64 << 10, 256 << 10, 8 << 20]:
            for engine in ["auto", "io_uring"]:
                result = place.run(place.train("--io", engine, "--discard", slots=2),
                                   limited(MEMLOCK=limit), without if os.geteuid() == 0 else [])
                right = right_or_named(result, reference, "ulimit -l")
                expect(right or engine == "io_uring" and limit == 0, "it can do without", result)
                registered = right and result.json["io"]["registered_buffers"]
                say(f"  {limit} bytes, {engine}: registered {registered}; "
                    f"{notes(result) or result.error.strip() or 'no note'}")
                if right and not registered:
                    expect("ulimit -l" in notes(result), "the note names the limit", result)
                expect(limit > 0 or not registered, "nothing can be registered", result)
        place.clean_outside()


def open_files():
    """From the fewest descriptors with which the program starts at all."""
    with Place() as place:
        reference = place.reference()
        right = {}
        for engine in ["io_uring", "threads"]:
            for limit in [*range(3, 16), 24, 32]:
                command = place.train("--io", engine, "--discard", slots=2)
                result = place.run(command, limited(NOFILE=limit))
                if result.returncode == 127 or "shared libraries" in result.error:
                    continue  # the system could not load the program
                if right_or_named(result, reference, r"ulimit -n|[Oo]pen files"):
                    right.setdefault(engine, limit)
                else:
                    only_store_left(place.drive, result)
        say(f"  the run is right from {right} descriptors on")
        expect(len(right) == 2 and max(right.values()) <= 32, f"32 must be enough: {right}")
        place.clean_outside()


def processes():
    """As a user who may start few threads."""
    with Place() as place:
        user = place.shared()
        reference = place.reference()
        for engine in ["io_uring", "threads"]:
            for limit in [1, 3, 5, 6, 7, 8, 9, 10, 16]:
                command = place.train("--io", engine, "--discard", slots=2)
                result = place.run(command, limited(NPROC=limit), user)
                right = right_or_named(result, reference,
                                       r"ulimit -u|thread|processes")
                only_store_left(place.drive, result)
                say(f"  {engine}, {limit}: "
                    f"{'right' if right else result.error.strip()} {notes(result)}")
        place.clean_outside()


# ------------------------------------------------------------------------------------ system calls

def ring_refused():
    """As container runtimes do it: EPERM (Docker), ENOSYS (an older kernel or gVisor)."""
    with Place() as place:
        reference = place.reference()
        for error, word in [(errno.EPERM, "seccomp"), (errno.ENOSYS, "kernel|seccomp"),
                            (errno.ENOMEM, "ulimit -l"), (errno.EMFILE, "ulimit -n")]:
            result = place.run(place.train("--discard", slots=2), refusing([NR_SETUP], error))
            must_equal(result, reference)
            expect(result.json["io"]["engine"] == "threads", "threads take over", result)
            expect(re.search(word, notes(result)), f"a note says '{word}'", result)
            expect(len(re.findall("threads take over", result.out)) == 1, "it says so once", result)
            result = place.run(place.train("--io", "io_uring", "--discard", slots=2),
                               refusing([NR_SETUP], error))
            must_be_named(result, "io_uring", word)
        place.clean_outside()


def ring_half_refused():
    """Set-up is allowed and a later call is not."""
    with Place() as place:
        reference = place.reference()
        for calls, error in [([NR_REGISTER], errno.EPERM), ([NR_REGISTER], errno.ENOSYS),
                             ([NR_ENTER], errno.EPERM), ([NR_ENTER], errno.ENOSYS)]:
            for engine in ["auto", "io_uring"]:
                result = place.run(place.train("--io", engine, "--discard", slots=2),
                                   refusing(calls, error))
                right = right_or_named(result, reference, "io_uring", "threads|allow")
                say(f"  {calls} {errno.errorcode[error]} {engine}: "
                    f"{'right' if right else result.error.strip()}")
                expect(right or engine == "io_uring" or calls == [NR_ENTER],
                       "without registering it goes on", result)


def cannot_reserve():
    with Place() as place:
        reference = place.reference()
        for error in [errno.EOPNOTSUPP, errno.ENOSYS]:
            result = place.run(place.train("--discard", slots=2), refusing([NR_FALLOCATE], error))
            must_equal(result, reference)
            expect("reserve" in notes(result), "it says that space is not reserved", result)
        result = place.run(place.train("--discard", slots=2), refusing([NR_FALLOCATE], errno.EPERM))
        right_or_named(result, reference, "reserv")


def ring_disabled():
    """kernel.io_uring_disabled=1 refuses users without privileges only: no other test notices."""
    try:
        with open(SYSCTL) as file:
            before = file.read().strip()
        if before != "0" or os.geteuid() != 0:
            raise Skip(f"{SYSCTL} is {before}; changing it needs root")
        with Place() as place:
            user = place.shared()
            reference = place.reference()
            command = place.train("--discard", slots=2)
            try:
                set_sysctl("1")
                result = place.run(command, wrapper=user)
                forced = place.run([*command, "--io", "io_uring"], wrapper=user)
            finally:
                set_sysctl(before)
            must_equal(result, reference)
            expect(result.json["io"]["engine"] == "threads", "threads take over", result)
            for text in [notes(result), forced.error]:
                expect("kernel.io_uring_disabled=0" in text, f"the remedy is named: {text}")
            must_be_named(forced)
    except OSError as error:
        raise Skip(f"{SYSCTL}: {error}") from None


def set_sysctl(value):
    with open(SYSCTL, "w") as file:
        file.write(value)


main({"resources": [file_size, file_size_at_resume, locked_memory, open_files, processes],
      "calls": [ring_refused, ring_half_refused, cannot_reserve, ring_disabled]})
