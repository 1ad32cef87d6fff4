"""What a user does to a store between two runs, and what the next run makes of it:
check_store_use.py TERRACE AREA."""

import os
import sys

from training import SMALL, TERRACE, Place, expect, run, said, store, store_json


def made(place):
    place.trained("--steps", "2")


def names():
    """One directory under two names; a lock that is none; a directory that nobody may write."""
    with Place(1) as place:
        made(place)
        lock = os.path.join(place.drives[0], "terrace.lock")
        for make, remove in [(os.mkdir, os.rmdir), (os.mkfifo, os.unlink),
                             (lambda name: os.symlink("elsewhere", name), os.unlink)]:
            make(lock)
            for result in [run(place.train("--steps", "4", "--resume")),
                           store("verify", *place.drives)]:
                expect(result.returncode == 2, "a lock that is no file", result)
                said(result, "terrace.lock is no file; move it away")
            expect(store("show", *place.drives).returncode == 0, "show takes no lock")
            remove(lock)
        other = os.path.join(place.path, "other")
        os.mkdir(other)
        if run(["mount", "--bind", place.drives[0], other]).returncode == 0:
            try:
                for slots in ["1", "2"]:
                    result = run(place.train("--steps", "4", "--nvme", place.drives[0], "--nvme",
                                             other, "--slots", slots))
                    expect(result.returncode == 2, "one directory under two names", result)
                    said(result, "are one directory; name each drive once")
            finally:
                run(["umount", other])
        for path, mode in [(place.drives[0], 0o555), (place.file(), 0o444)]:
            os.chmod(path, mode)
        nobody = run(["setpriv", "--reuid=65534", "--clear-groups", TERRACE, "store", "verify",
                      place.drives[0]])
        if "store" in nobody.stdout:  # otherwise the program itself is out of reach
            expect(nobody.returncode == 0, "reading is enough", nobody)
            said(nobody, "no lock is held", "sound: --resume continues")
        os.chmod(place.drives[0], 0o755)


def other_settings():
    """What may change at a resume is told, and --verify repeats it or says beforehand why not."""
    with Place(1) as place:
        train = place.train
        for steps, rate, mode in [("2", "1e-3", "--discard"), ("5", "3e-3", "--resume"),
                                  ("7", "1e-3", "--resume")]:
            result = run(train("--steps", steps, "--learning-rate", rate, "--verify", mode))
            expect(result.returncode == 0, "another rate", result)
            said(result, "identical to in-memory training: yes")
            if steps == "5":
                said(result, "the learning rate is 0.003; it was 0.001")
        result = run(train("--steps", "9", "--resume", "--verify", "--clip", "0.5"))
        expect(result.returncode == 2, "other steps cannot be repeated", result)
        said(result, "--verify repeats all steps with one optimizer", "clipped to norm 0.5")
        result = run(train("--steps", "9", "--resume", "--clip", "0.5"))
        expect(result.returncode == 0, "without --verify it goes on", result)
        said(result, "from here on the optimizer is .* clipped to norm 0.5; it was")


def mended():
    """A resume writes a damaged copy of the superblock again."""
    with Place(2) as place:
        made(place)
        layout = store_json("show", *place.drives)[0]["drives"][1]["layout"]
        for offset in [*layout["header"], *layout["text"]]:
            with open(place.file(1), "r+b") as file:
                file.seek(offset)
                file.write(os.urandom(64))
            expect(store("verify", *place.drives).returncode == 1, "damaged")
            result = run(place.train("--steps", "2", "--resume"))
            expect(result.returncode == 0, "the other copy is enough", result)
            said(result, "copy [01] of its superblock is damaged; it is written again")
            result = store("verify", *place.drives)
            expect(result.returncode == 0, f"mended at {offset}", result)


def discards():
    """What is discarded goes only when the new store has room."""
    with Place(1) as place:
        if run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", place.drives[0]]).returncode:
            print("no file system can be mounted here")
            sys.exit(77)
        try:
            result = run(place.train("--steps", "2"))
            expect(result.returncode == 0, "a store", result)
            for budget in [[], ["--nvme-budget", "1GiB"]]:
                result = run(place.train("--steps", "2", "--discard", "--layers", "16", *budget,
                                         model=SMALL[2:]))
                expect(result.returncode == 2, "no room for a larger one", result)
                said(result, "missing [0-9]+ bytes")
                expect(store("verify", *place.drives).returncode == 0, "the old one is kept")
            result = run(place.train("--steps", "3", "--discard"))
            expect(result.returncode == 0, "one of the same size", result)
            said(result, "discarded .*terrace.store")
        finally:
            run(["umount", place.drives[0]])


{"names": names, "other_settings": other_settings, "mended": mended,
 "discards": discards}[sys.argv[2]]()
print("ok")
