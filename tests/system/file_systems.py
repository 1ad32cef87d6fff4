"""Every file system that a drive may have: the run is right, says truly how it accesses the drive,
survives a kill and a power failure, and leaves nothing but its store."""

import random
import re

from drives import is_direct, Loop, Overlay, Ram
from harness import (expect, main, must_equal, nothing_left, only_store_left, Place, resume_exact,
                     right_or_named, run, say, sound, WHERE)

ENGINES = ["io_uring", "threads"]
SLOW = ["--throttle", "nvme_write=0.02"]  # about 40 ms for a step
PAGE_CACHE_SHARE = 0.25  # of the bytes written that a direct run may send through the cache


def says_direct(result):
    """What the run claims; line and JSON must agree."""
    line = re.search(r"^I/O: (\S+), (direct|not direct)", result.out, re.MULTILINE)
    expect(line is not None, "the I/O line says direct or not direct", result)
    claim = line.group(2) == "direct"
    expect(result.json["io"]["direct"] is claim, "line and JSON agree", result)
    expect(result.json["io"]["engine"] == line.group(1), "engine in line and JSON", result)
    return claim


def trains(place, drive, engine, reference):
    result = place.run(place.train("--io", engine, drive=drive.path, slots=2))
    must_equal(result, reference)
    expect(result.json["io"]["engine"] == engine, f"{engine} is used", result)
    only_store_left(drive.path, result)


def tells_truth(place, drive, engine):
    """A run asked from outside how it accesses the drive; slower when it ends before the answer."""
    for speed in ["0.1", "0.02", "0.005"]:
        before = drive.dirtied_bytes() if isinstance(drive, Loop) else 0
        running = place.start(place.train("--io", engine, "--discard", "--throttle",
                                          f"nvme_write={speed}", drive=drive.path, slots=2))
        running.until_step(1)
        flags = is_direct(running.pid)
        result = running.finish()
        if flags:
            break
    claim = says_direct(result)
    expect(flags == {claim}, f"it says direct: {claim}; its descriptors: {flags}",
           result)
    if isinstance(drive, Loop) and claim:
        through = drive.dirtied_bytes() - before
        written = result.json["lanes"]["nvme_write"]["bytes"]
        expect(through < PAGE_CACHE_SHARE * written,
               f"it says direct, but {through} of {written} bytes went through the page cache",
               result)
    if isinstance(drive, Ram) and claim:
        expect(re.search(r"RAM|memory|tmpfs", result.out.split("plan\n")[0]),
               "it says direct, but it is RAM", result)


def survives_kill(place, drive, engine, reference):
    command = place.train("--io", engine, *SLOW, drive=drive.path, slots=2)
    running = place.start(command + ["--discard"])
    step = running.until_step(random.randint(2, 12))
    running.kill()
    running.finish()
    again(place, drive, engine, reference, step)


def survives_power_failure(place, drive, engine, reference):
    command = place.train("--io", engine, *SLOW, drive=drive.path, slots=2)
    running = place.start(command + ["--discard"])
    step = running.until_step(random.randint(2, 12))
    drive.shut_down()
    result = running.finish()
    right_or_named(result, reference, *WHERE)
    drive.again()
    again(place, drive, engine, reference, step)


def again(place, drive, engine, reference, step):
    """The steps that were reported are not lost; the last one's commit may still be on its way."""
    sound(drive.path)
    resume_exact(place, reference, place.train("--io", engine, drive=drive.path, slots=2),
                 at_least=step - 1)
    only_store_left(drive.path)


def on(drive_of, failing=False):
    """All that a drive must do, by each engine."""
    with Place() as place:
        reference = place.reference()
        with drive_of(place) as drive:
            for engine in ENGINES:
                say(f"  {engine}")
                trains(place, drive, engine, reference)
                survives_kill(place, drive, engine, reference)
                if failing:
                    survives_power_failure(place, drive, engine, reference)
                leaves_nothing(place, drive, engine, reference)
            for engine in ENGINES:
                tells_truth(place, drive, engine)
        place.clean_outside()


def leaves_nothing(place, drive, engine, reference):
    for name in ["terrace.store", "terrace.lock"]:
        run(["rm", "-f", f"{drive.path}/{name}"])
    result = place.run(place.train("--io", engine, drive=drive.path, slots=1))
    must_equal(result, reference)
    nothing_left(drive.path, result)


def ext4_512():
    on(lambda place: Loop(place, "ext4", 512, 64), failing=True)


def ext4_4096():
    on(lambda place: Loop(place, "ext4", 4096, 64), failing=True)


def xfs_512():
    on(lambda place: Loop(place, "xfs", 512), failing=True)


def xfs_4096():
    on(lambda place: Loop(place, "xfs", 4096), failing=True)


def btrfs_512():
    on(lambda place: Loop(place, "btrfs", 512))


def btrfs_4096():
    on(lambda place: Loop(place, "btrfs", 4096))


def btrfs_compressed():
    on(lambda place: Loop(place, "btrfs", 512, options=["compress-force=zstd"]))


def tmpfs():
    on(lambda place: Ram(place, "16m"))


def overlay_on_ext4():
    with Place() as place, Loop(place, "ext4", 512, 64) as below:
        on_overlay(place, below.path)


def overlay_on_tmpfs():
    with Place() as place, Ram(place, "32m") as below:
        on_overlay(place, below.path)


def on_overlay(_place, below):
    on(lambda place: Overlay(place, below))


main({"ext4": [ext4_512, ext4_4096], "xfs": [xfs_512, xfs_4096],
      "btrfs": [btrfs_512, btrfs_4096, btrfs_compressed],
      "layers": [tmpfs, overlay_on_ext4, overlay_on_tmpfs]})
