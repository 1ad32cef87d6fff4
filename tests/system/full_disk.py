"""A full disk: refused at the start with the bytes and nothing left behind; in the middle of a run
a message that names the place, after which --resume is exact once there is space again."""

import os

from drives import is_direct, Loop, Ram
from harness import (expect, main, must_be_named, must_equal, nothing_left, NR_FALLOCATE,
                     only_store_left, Place, refusing, resume_exact, right_or_named, run, say, Skip,
                     sound, system, WHERE)

SLOW = ["--throttle", "nvme_write=0.01"]  # about 70 ms for a step
SLOWER = ["--throttle", "nvme_write=0.001"]  # 0.7 s before the first step
FULL = r"No space left|[Qq]uota exceeded|disk is full|free|missing \d+ bytes"


def needed_bytes(place):
    """What a run reserves on the drive, from its own plan of another drive."""
    result = place.run(place.train(steps=1, slots=2))
    expect(result.returncode == 0, "it trains where there is space", result)
    place.empty_drive()
    return result.json["tiers"]["nvme"]["planned_peak_bytes"]


def at_start(drive_of):
    """Less space than a run needs, or none: refused with the numbers; with the space it runs."""
    with Place() as place:
        reference = place.reference()
        needed = needed_bytes(place)
        with drive_of(place) as drive:
            for leave in [needed // 2, 0]:
                filler = drive.fill(leave)
                say(f"  {drive.free_bytes()} bytes free, {needed} needed")
                for engine in ["io_uring", "threads"]:
                    result = place.run(place.train("--io", engine, drive=drive.path, slots=2))
                    must_be_named(result, FULL, r"\d{6,} bytes", r"\b(free|missing|left)\b")
                    expect("is no nvme directory" not in result.error, "there is one", result)
                os.unlink(filler)
                nothing_left(drive.path, result)
                drive.settle(2 * needed)
            must_equal(place.run(place.train(drive=drive.path, slots=2)), reference)
        place.clean_outside()


def ext4_at_start():
    at_start(lambda place: Loop(place, "ext4", 512, 32))


def xfs_at_start():
    at_start(lambda place: Loop(place, "xfs", 4096))


def btrfs_at_start():
    at_start(lambda place: Loop(place, "btrfs", 512))


def tmpfs_at_start():
    at_start(lambda place: Ram(place, "4m"))


def in_the_middle(drive_of, take, give_back, before=None, early=False):
    """`take(drive)` leaves no space under a running training, `give_back(drive)` returns it.

    `early`: as soon as the file is there, before all of it has been written once.
    """
    with Place() as place:
        reference = place.reference()
        with drive_of(place) as drive:
            for engine in ["io_uring", "threads"]:
                command = place.train("--io", engine, drive=drive.path, slots=2)
                running = place.start(command + (SLOWER if early else SLOW) + ["--discard"], before)
                step = 0
                if early:
                    running.until(lambda _: is_direct(running.pid), "its file on the drive")
                else:
                    step = running.until_step(3)
                take(drive)
                result = running.finish()
                right = right_or_named(result, reference, FULL, *WHERE)
                say(f"  {engine}: {'it had its space' if right else result.error.strip()}")
                give_back(drive)
                only_store_left(drive.path, result)
                if right:
                    continue
                if os.path.exists(os.path.join(drive.path, "terrace.store")):
                    sound(drive.path)
                else:  # it failed while the store was made, and gave everything back
                    expect(early, "a store that was there must stay", result)
                resume_exact(place, reference, command, at_least=step - 1)
        place.clean_outside()


def remove(name):
    return lambda drive: os.unlink(os.path.join(drive.path, name))


def xfs_shared_blocks():
    """A clone of the store makes each overwrite need new space, reserved or not."""
    def take(drive):
        files = [name for name in os.listdir(drive.path) if name.startswith("terrace.store")]
        if not files:
            raise Skip("the store has no name to be cloned by")
        system("cp", "--reflink=always", os.path.join(drive.path, files[0]),
               os.path.join(drive.path, "clone"))
        drive.fill()

    def give_back(drive):
        for name in ["filler", "clone"]:
            remove(name)(drive)

    in_the_middle(lambda place: Loop(place, "xfs"), take, give_back)


def btrfs_snapshot():
    """A snapshot does the same to every file of the drive."""
    def take(drive):
        system("btrfs", "subvolume", "snapshot", "-r", drive.path, drive.path + "/snapshot")
        drive.fill()

    def give_back(drive):
        remove("filler")(drive)
        system("btrfs", "subvolume", "delete", "--commit-each", drive.path + "/snapshot")
        run(["btrfs", "subvolume", "sync", drive.path])

    in_the_middle(lambda place: Loop(place, "btrfs"), take, give_back)


def without_reservation():
    """A file system that cannot reserve: another writer takes the space first."""
    in_the_middle(lambda place: Loop(place, "ext4", 4096, 32), lambda drive: drive.fill(),
                  remove("filler"), before=refusing([NR_FALLOCATE], 95), early=True)


def limit(drive, size):
    """A quota for the whole drive, whoever writes."""
    system("btrfs", "quota", "enable", drive.path)
    system("btrfs", "qgroup", "limit", size, drive.path)


def quota_at_start():
    with Place() as place, Loop(place, "btrfs") as drive:
        limit(drive, "400k")
        for engine in ["io_uring", "threads"]:
            command = place.train("--io", engine, drive=drive.path, slots=2)
            result = place.run(command)
            must_be_named(result, r"[Qq]uota exceeded", r"\d{6,} bytes", r"raise the quota")
            nothing_left(drive.path, result)
        limit(drive, "none")
        must_equal(place.run(command), place.reference())


def quota_in_the_middle():
    in_the_middle(lambda place: Loop(place, "btrfs"), lambda drive: limit(drive, "64k"),
                  lambda drive: system("btrfs", "quota", "disable", drive.path))


def tmpfs_shrinks():
    def take(drive):
        for kibibytes in range(256, 16 << 10, 64):
            if drive.resize(f"{kibibytes}k"):
                return

    in_the_middle(lambda place: Ram(place, "16m"), take, lambda drive: drive.resize("16m"))


def tmpfs_shrinks_without_reservation():
    def take(drive):
        for kibibytes in range(64, 16 << 10, 16):
            if drive.resize(f"{kibibytes}k"):
                return

    in_the_middle(lambda place: Ram(place, "16m"), take, lambda drive: drive.resize("16m"),
                  before=refusing([NR_FALLOCATE], 95), early=True)


main({"at_start": [ext4_at_start, xfs_at_start, btrfs_at_start, tmpfs_at_start, quota_at_start],
      "in_the_middle": [xfs_shared_blocks, btrfs_snapshot, without_reservation,
                        quota_in_the_middle, tmpfs_shrinks,
                        tmpfs_shrinks_without_reservation]})
