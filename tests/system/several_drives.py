"""A store over several drives: any of them may fail, be full, be missing or be another's."""

import os
import random
import shutil

from drives import Loop, Ram
from harness import (expect, limited, main, must_be_named, must_equal,
                     nothing_left, only_store_left, Place, resume_exact, right_or_named, say, sound,
                     TERRACE, verify_store, WHERE)

SLOW = ["--throttle", "nvme_write=0.02"]


def folders(place, count):
    return [place.make(f"drive{index}") for index in range(count)]


def every_number():
    """One to eight drives: the same result, and each of them is used."""
    with Place() as place:
        reference = place.reference()
        for count in [1, 2, 3, 8]:
            drives = folders(place, count)
            for engine in ["io_uring", "threads"]:
                result = place.run(place.train("--io", engine, "--discard", drives=drives, slots=2))
                must_equal(result, reference)
                sound(*drives)
                for drive in drives:
                    only_store_left(drive, result)
                    blocks = os.stat(os.path.join(drive, "terrace.store")).st_blocks
                    expect(blocks > 8, f"{drive} is used", result)


def options_of_the_command():
    """--nvme more than once is the same as a list in the configuration."""
    with Place() as place:
        reference = place.reference()
        drives = folders(place, 3)
        command = [TERRACE, "train", "--layers", "2", "--width", "32", "--heads", "2", "--context",
                   "8", "--batch", "2", "--segment", "4KiB", "--data", place.data, "--steps", "40",
                   "--json", place.json, "--dram", "400KiB"]
        for drive in drives:
            command += ["--nvme", drive]
        running = place.start([*command, "--throttle", "compute=20"])
        running.until_step(4)
        running.kill()
        running.finish()
        must_equal(place.run([*command, "--resume"]), reference)
        for drive in drives:
            only_store_left(drive)


def one_fails():
    """One of three drives loses its power; after a restart nothing is lost."""
    with Place() as place:
        reference = place.reference()
        for engine in ["io_uring", "threads"]:
            with Loop(place, "ext4") as failing:
                drives = [place.make(f"{engine}0"), place.make(f"{engine}1"), failing.path]
                random.shuffle(drives)
                command = place.train("--io", engine, drives=drives, slots=2)
                running = place.start([*command, *SLOW, "--discard"])
                step = running.until_step(random.randint(2, 10))
                failing.shut_down()
                result = running.finish()
                right_or_named(result, reference, failing.path, *WHERE)
                failing.again()
                sound(*drives)
                resume_exact(place, reference, command, at_least=step - 1)


def one_is_full():
    """The second of two has no space: refused by name, and nothing is left on the first."""
    with Place() as place, Ram(place, "1m") as small:
        first = place.make("first")
        small.fill(leave=100 << 10)
        result = place.run(place.train(drives=[first, small.path], slots=2))
        must_be_named(result, small.path, r"\d{5,} bytes")
        nothing_left(first, result)
        os.unlink(os.path.join(small.path, "filler"))
        nothing_left(small.path, result)


def another_order_or_number():
    with Place() as place:
        reference = place.reference()
        drives = folders(place, 3)
        half = place.run(place.train(drives=drives, steps=20, slots=2))
        expect(half.returncode == 0, "half of the steps", half)
        for wrong in [drives[::-1], drives[:2], drives[1:], [*drives, place.make("more")],
                      [drives[0], drives[1], drives[1]], [drives[0]] * 3]:
            for mode in ["--resume", None]:
                command = place.train(*([mode] if mode else []), drives=wrong, slots=2)
                result = place.run(command)
                if result.returncode == 0:  # another order may be understood
                    expect(sorted(wrong) == sorted(drives), "other drives", result)
                    must_equal(result, reference)
                else:
                    must_be_named(result, "drive")
        nothing_left(os.path.join(place.path, "more"))
        sound(*drives)
        if place.run(place.train("--resume", drives=drives, slots=2)).returncode == 0:
            must_equal(place.run(place.train("--resume", drives=drives, slots=2)),
                       dict(reference, loss=reference["loss"]))


def part_of_a_store():
    """--discard of some of a store's drives is refused, whatever else is named, and touches none."""
    with Place() as place:
        reference = place.reference()
        drives = folders(place, 3)
        half = place.run(place.train(drives=drives, steps=20, slots=2))
        expect(half.returncode == 0, "half of the steps", half)
        for part in [drives[:2], drives[1:], [drives[2], place.make("more")], drives[:1]]:
            result = place.run(place.train("--discard", drives=part, slots=2))
            must_be_named(result, r"of a store", r"\(--discard\)|discard it", *part[:1])
            sound(*drives)
        nothing_left(os.path.join(place.path, "more"))
        must_equal(place.run(place.train("--resume", drives=drives, slots=2)), reference)
        must_equal(place.run(place.train("--discard", drives=drives, slots=2)), reference)


def stores_of_different_times():
    """One drive's file is of an earlier commit, or of a twin that trained the same: never mixed."""
    with Place() as place:
        reference = place.reference()
        drives = folders(place, 2)
        paths = [os.path.join(drive, "terrace.store") for drive in drives]
        command = place.train(drives=drives, slots=2)
        kept = {}
        for step in [8, 9, 12, 20]:
            done = place.run([*place.train(drives=drives, steps=step, slots=2), "--resume"])
            expect(done.returncode == 0, f"step {step}", done)
            for index, path in enumerate(paths):
                shutil.copy(path, kept.setdefault((step, index), f"{place.path}/{step}-{index}"))
        twins = folders(place, 4)[2:]
        twin = place.run(place.train(drives=twins, steps=20, slots=2))
        expect(twin.returncode == 0, "a twin", twin)
        for first, second in [((20, 0), (12, 1)), ((8, 0), (20, 1)), ((8, 0), (9, 1)),
                              ((9, 0), (8, 1)), ((20, 0), "twin"), ((20, 0), (20, 0))]:
            shutil.copy(kept[first], paths[0])
            source = os.path.join(twins[1], "terrace.store") if second == "twin" else kept[second]
            shutil.copy(source, paths[1])
            checked = verify_store(*drives)
            result = place.run([*command, "--resume"])
            say(f"  {first} with {second}: {result.error.strip() or 'right'}")
            if result.returncode == 0:
                must_equal(result, reference)
            else:
                must_be_named(result)
                # 2: drives of two stores are no damage, and are not checked.
                expect(checked.returncode in (1, 2), "verify must have seen it", checked)


def few_descriptors():
    with Place() as place:
        reference = place.reference()
        drives = folders(place, 8)
        for limit in [12, 16, 20, 24, 32]:
            result = place.run(place.train("--discard", drives=drives, slots=2),
                               limited(NOFILE=limit))
            right_or_named(result, reference, r"ulimit -n|open files")


main({"several": [every_number, options_of_the_command, one_fails, one_is_full,
                  another_order_or_number, part_of_a_store,
                  stores_of_different_times, few_descriptors]})
