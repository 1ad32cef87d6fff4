"""A drive that breaks under a running training: power, read-only, out of blocks, cut short, and
bytes that change. The run is right or ends with a message; --resume is exact where the committed
bytes are still there, and names the damage where they are not."""

import os
import random
import re

from drives import Loop, Ram
from harness import (expect, main, must_be_named, must_equal, only_store_left,
                     Place, resume_exact, right_or_named, run, say, sound, system, verify_store)

ENGINES = ["io_uring", "threads"]
SLOW = ["--throttle", "nvme_write=0.03"]  # about 25 ms for a step
FAILURE = (r"Input/output error|Read-only file system|No space left|No data available|damaged|"
           r"is not what step|checksum|cut short|Structure needs cleaning",
           r"terrace\.store|/proc/")


def start(place, drive, engine):
    command = place.train("--io", engine, drive=drive, slots=2)
    running = place.start(command + SLOW + ["--discard"])
    return command, running, running.until_step(random.randint(2, 8))


def on_loop(kinds, breaks, repair, options=()):
    """`breaks(drive)` under a run; after `repair(drive)` nothing that was committed is lost."""
    for kind in kinds:
        with Place() as place:
            reference = place.reference()
            for engine in ENGINES:
                with Loop(place, kind, options=options) as drive:
                    command, running, step = start(place, drive.path, engine)
                    breaks(drive)
                    result = running.finish()
                    right = right_or_named(result, reference, *FAILURE)
                    say(f"  {kind}, {engine}: {'right' if right else result.error.strip()}")
                    repair(drive)
                    only_store_left(drive.path, result)
                    if not right:
                        sound(drive.path)
                        resume_exact(place, reference, command, at_least=step - 1)
            place.clean_outside()


def power_fails():
    on_loop(["ext4", "xfs"], lambda drive: drive.shut_down(), lambda drive: drive.again())


def turns_read_only():
    """ext4 finds an error in itself and goes read-only, as it does after a bad block."""
    def breaks(drive):
        name = os.path.basename(drive.device)
        with open(f"/sys/fs/ext4/{name}/trigger_fs_error", "w") as file:
            file.write("1")

    on_loop(["ext4"], breaks, lambda drive: drive.again(), options=["errors=remount-ro"])


def device_set_read_only():
    on_loop(["ext4", "xfs", "btrfs"],
            lambda drive: system("blockdev", "--setro", drive.device),
            lambda drive: system("blockdev", "--setrw", drive.device))


def thin_device_full():
    """The blocks behind the drive run out: it has promised more than there is."""
    for kind in ["ext4", "btrfs"]:
        with Place() as place:
            reference = place.reference()
            for engine in ENGINES:
                with Ram(place, "64m", f"behind-{kind}-{engine}") as behind, \
                        Loop(place, kind, folder=behind.path) as drive:
                    command, running, step = start(place, drive.path, engine)
                    if kind == "btrfs":  # new blocks for every write; ext4 has its own by now
                        system("btrfs", "subvolume", "snapshot", drive.path, drive.path + "/old")
                    filler = behind.fill()
                    result = running.finish()
                    right = right_or_named(result, reference, *FAILURE)
                    say(f"  {kind}, {engine}: {'right' if right else result.error.strip()}")
                    os.unlink(filler)
                    drive.again()
                    if not right:
                        sound(drive.path)
                        resume_exact(place, reference, command, at_least=step - 1)


def never_wrong(place, reference, command, result, drive):
    """Committed bytes are gone: the run and --resume are right or say so; then --discard helps."""
    right = right_or_named(result, reference, *FAILURE)
    say(f"  the run: {'right' if right else result.error.strip()}")
    checked = verify_store(drive)
    resumed = place.run([*command, "--resume"])
    if resumed.returncode == 0:
        must_equal(resumed, reference)
    else:
        must_be_named(resumed, r"damaged|cut short|checksum|is not what|failed|no commit",
                      r"--discard|verify")
        expect(checked.returncode != 0, "verify must have seen it", checked)
    say(f"  --resume: {'right' if resumed.returncode == 0 else resumed.error.strip()}")
    must_equal(place.run(command + ["--discard"]), reference)


def backing_file_cut():
    """What the loop device lies on is truncated, without and with its size being noticed."""
    for kind in ["ext4", "xfs", "btrfs"]:
        for noticed in [False, True]:
            with Place() as place, Loop(place, kind) as drive:
                reference = place.reference()
                command, running, _ = start(place, drive.path, ENGINES[noticed])
                os.truncate(drive.image, 1 << 16)
                if noticed:
                    system("losetup", "--set-capacity", drive.device)
                result = running.finish()
                right = right_or_named(result, reference, *FAILURE)
                say(f"  {kind}, size noticed: {noticed}: "
                    f"{'right' if right else result.error.strip()}")


def store_of(drive):
    return os.path.join(drive, "terrace.store")


def on_store(spoils):
    """`spoils(path)` changes the store behind the back of a running training."""
    for engine in ENGINES:
        with Place() as place:
            reference = place.reference()
            command, running, _ = start(place, place.drive, engine)
            spoils(store_of(place.drive))
            result = running.finish()
            never_wrong(place, reference, command, result, place.drive)


def store_cut_in_half():
    on_store(lambda path: os.truncate(path, os.path.getsize(path) // 2 & ~4095))


def store_cut_to_nothing():
    on_store(lambda path: os.truncate(path, 0))


def store_overwritten():
    """The first and the second half of what is written, with noise."""
    def spoil(path):
        size = os.path.getsize(path)
        with open(path, "r+b") as file:
            for part in range(8):
                file.seek(size * part // 8 & ~4095)
                file.write(os.urandom(8192))
            file.flush()
            os.fsync(file.fileno())

    on_store(spoil)


def store_zeroed():
    """Punched out, as a file system's repair or a trim too many would do."""
    on_store(lambda path: system("fallocate", "--punch-hole", "--offset", "0", "--length",
                                 str(os.path.getsize(path)), path))


def store_through_device():
    """Noise on the device below the file system, where the store's blocks lie."""
    for kind in ["ext4", "xfs"]:
        with Place() as place, Loop(place, kind) as drive:
            reference = place.reference()
            command, running, _ = start(place, drive.path, "io_uring")
            path = store_of(drive.path)
            text = system("filefrag", "-v", "-b4096", path)
            extents = re.findall(r"^\s*\d+:\s*\d+\.\.\s*\d+:\s*(\d+)\.\.\s*(\d+):", text,
                                 re.MULTILINE)
            expect(extents, f"blocks of the store: {text}")
            with open(drive.device, "r+b") as device:
                for first, last in extents:
                    blocks = int(last) - int(first) + 1
                    for part in range(0, blocks, max(1, blocks // 8)):
                        device.seek((int(first) + part) * 4096)
                        device.write(os.urandom(4096))
                os.fsync(device.fileno())
            result = running.finish()
            never_wrong(place, reference, command, result, drive.path)


def store_removed():
    """rm, and rm with another run in its place: the first run must not spoil the second's store."""
    for name in ["terrace.store", "terrace.lock"]:
        with Place() as place:
            reference = place.reference()
            command, running, _ = start(place, place.drive, "threads")
            os.unlink(os.path.join(place.drive, name))
            second = place.train("--seed", "7", "--discard", slots=2)
            other = run([*second[:second.index("--json")], *second[second.index("--json") + 2:]],
                        cwd=place.empty)
            expect(other.returncode in (0, 2), "the other run ends well or is refused", other)
            result = running.finish()
            if result.returncode == 1:  # it trained to the end, and says that nobody can resume it
                expect("was removed while this run uses it" in result.error, "what is lost", result)
                expect(f"state hash: {reference['state_hash']}" in result.out, "exact", result)
                right = True
            else:
                right = right_or_named(result, reference)
            say(f"  {name} removed: the first {'right' if right else 'refused'}, "
                f"the other ended with {other.returncode}")
            if other.returncode == 0:
                sound(place.drive)


main({"fails": [power_fails, turns_read_only, device_set_read_only, thin_device_full],
      "loses": [backing_file_cut, store_cut_in_half, store_cut_to_nothing, store_overwritten,
                store_zeroed, store_through_device, store_removed]})
