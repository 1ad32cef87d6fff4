"""Every byte of a committed store changed: named by `store verify`, and by --resume or of no
consequence to it; or provably unused. Never a wrong state."""

import json
import os
import random
import re
import shutil

from harness import (expect, main, must_be_named, must_equal, Place, run, say, TERRACE,
                     verify_store)

TINY = ["--layers", "1", "--width", "2", "--heads", "1", "--context", "1", "--batch", "1",
        "--segment", "4KiB"]
STEPS = 6
COMMITTED = 4  # so that the run goes on
PAGE = 4096
LEAST = 32  # bytes of metadata that are looked at one by one
DATA_SAMPLES = 100
RESUMES = 25
EVERY_BYTE = os.environ.get("TERRACE_EVERY_BYTE")  # takes minutes
DAMAGE = r"damage|checksum|is not what|cut short|no commit|of another run|no store"


class Store:
    """A committed store, its pristine bytes, and who judges it: here the command."""

    def __init__(self, place):
        self.place = place
        self.path = os.path.join(place.drive, "terrace.store")
        self.command = place.train(model=TINY, steps=STEPS, slots=2)
        self.reference = place.reference(model=TINY, steps=STEPS)
        first = place.run(place.train(model=TINY, steps=COMMITTED, slots=2))
        expect(first.returncode == 0, "a committed store", first)
        with open(self.path, "rb") as file:
            self.pristine = file.read()
        shown = json.loads(run([TERRACE, "store", "show", "--json", place.drive]).out)
        # Superblock, records and tables come first, then the slots.
        self.metadata = min(shown["drives"][0]["layout"]["slot"])

    def write(self, changes):
        """The pristine bytes with `changes`: {offset: bytes}."""
        with open(self.path, "r+b") as file:
            for offset, data in changes.items():
                file.seek(offset)
                file.write(data)

    def restore(self, changes):
        self.write({offset: self.pristine[offset:offset + len(data)]
                    for offset, data in changes.items()})

    def is_sound(self, changes):
        """What `store verify` says about the store with changes."""
        self.write(changes)
        result = verify_store(self.place.drive)
        self.restore(changes)
        expect(result.returncode in (0, 1), f"verify must judge {list(changes)[:3]}", result)
        if result.returncode == 1:
            expect(re.search(DAMAGE, result.out + result.error), "verify names it", result)
        return result.returncode == 0

    def resume(self, changes):
        """--resume of the store with changes is right or names the damage; whether it was right."""
        self.write(changes)
        result = self.place.run([*self.command, "--resume"])
        with open(self.path, "wb") as file:
            file.write(self.pristine)
        if result.returncode == 0:
            must_equal(result, self.reference)
            return True
        must_be_named(result, DAMAGE)
        return False


def flipped(store, offset, count=1):
    """Every bit of `count` bytes turned over."""
    return {offset: bytes(byte ^ 0xFF for byte in store.pristine[offset:offset + count])}


def one_bit(store, offset):
    return {offset: bytes([store.pristine[offset] ^ 1 << random.randrange(8)])}


def used_ranges(store, first, last):
    """Halves [first, last) until each part is unused as a whole or LEAST bytes long."""
    if store.is_sound(flipped(store, first, last - first)):
        return [], [(first, last)]
    if last - first <= LEAST:
        return [(first, last)], []
    middle = (first + last) // 2
    used, unused = used_ranges(store, first, middle)
    more_used, more_unused = used_ranges(store, middle, last)
    return used + more_used, unused + more_unused


def bytes_to_try(used):
    """One of each used part, and all of those where a checked range begins or ends."""
    if EVERY_BYTE:
        return [offset for first, last in used for offset in range(first, last)]
    firsts, lasts = {first for first, _ in used}, {last for _, last in used}
    offsets = []
    for first, last in used:
        edge = first not in lasts or last not in firsts
        offsets += range(first, last) if edge else [random.randrange(first, last)]
    return offsets


def every_byte_of_metadata():
    with Place(memory=True) as place:
        store = Store(place)
        expect(store.is_sound({}), "it is sound as it is")
        used, unused = [], []
        for page in range(store.metadata // PAGE):
            more_used, more_unused = used_ranges(store, page * PAGE, (page + 1) * PAGE)
            used += more_used
            unused += more_unused
        tried = bytes_to_try(used)
        missed = [offset for offset in tried if store.is_sound(one_bit(store, offset))]
        say(f"  {store.metadata} bytes, {sum(b - a for a, b in used)} in use, "
            f"{len(tried)} of these tried one by one")
        # A part at the end of a range may be in use by half; what is not must not matter at all.
        changes = {}
        for first, last in unused:
            changes.update(flipped(store, first, last - first))
        for offset in missed:
            changes.update(flipped(store, offset))
        expect(all(any(first <= offset < last for first, last in edges(used))
                   for offset in missed), f"changes that nobody sees: {missed}")
        expect(store.is_sound(changes), "together they are unused as well")
        expect(store.resume(changes), "a store with all unused bytes changed is continued")
        for offset in random.sample(tried, min(RESUMES, len(tried))):
            store.resume(one_bit(store, offset))


def edges(used):
    """The last part of each run of used parts."""
    firsts = {first for first, _ in used}
    return [(first, last) for first, last in used if last not in firsts]


def sampled_data():
    with Place(memory=True) as place:
        store = Store(place)
        offsets = random.sample(range(store.metadata, len(store.pristine)), DATA_SAMPLES)
        unseen = [offset for offset in offsets if store.is_sound(one_bit(store, offset))]
        seen = sorted(set(offsets) - set(unseen))
        say(f"  {len(seen)} changes seen, {len(unseen)} in unused places")
        expect(seen, "data is checked")
        together = {}
        for offset in unseen:
            together.update(one_bit(store, offset))
        expect(store.resume(together), "the unseen ones together do not matter")
        for offset in random.sample(seen, min(RESUMES, len(seen))):
            store.resume(one_bit(store, offset))


def pages_that_went_astray():
    """Whole pages zeroed, from another place, or from an older commit: lost and misdirected
    writes."""
    with Place(memory=True) as place:
        store = Store(place)
        pages = range(len(store.pristine) // PAGE)
        older = store.pristine
        result = place.run([*place.train(model=TINY, steps=COMMITTED + 1, slots=2), "--resume"])
        expect(result.returncode == 0, "one step more", result)
        with open(store.path, "rb") as file:
            store.pristine = file.read()
        counts = {True: 0, False: 0}
        for page in pages:
            other = random.choice(pages)
            for source in [bytes(PAGE), store.pristine[other * PAGE:(other + 1) * PAGE],
                           older[page * PAGE:(page + 1) * PAGE]]:
                changes = {page * PAGE: source}
                if source == store.pristine[page * PAGE:(page + 1) * PAGE]:
                    continue
                counts[store.is_sound(changes)] += 1
                if random.random() < 0.15:
                    store.resume(changes)
        say(f"  {counts[False]} pages seen, {counts[True]} in unused places")
        # All data from the commit before, and all metadata from it: nothing mixes.
        for cut in random.sample(range(1, len(store.pristine) // PAGE), 12):
            store.resume({0: older[:cut * PAGE]})
            store.resume({cut * PAGE: older[cut * PAGE:]})


def cut_and_grown():
    """Cut to lengths on a page and not on one, and with more behind the end."""
    with Place(memory=True) as place:
        store = Store(place)
        size = len(store.pristine)
        lengths = [0, 1, 511, 4095, size - 1, size - PAGE, *random.sample(range(size), 20)]
        for length in lengths:
            os.truncate(store.path, length)
            checked = verify_store(place.drive)
            expect(checked.returncode in (1, 2), f"cut to {length} of {size}", checked)
            result = place.run([*store.command, "--resume"])
            if result.returncode == 0:
                must_equal(result, store.reference)
            else:
                must_be_named(result, DAMAGE)
            with open(store.path, "wb") as file:
                file.write(store.pristine)
        with open(store.path, "ab") as file:
            file.write(os.urandom(10000))
        must_equal(place.run([*store.command, "--resume"]), store.reference)


def both_headers_lost():
    """The first pages gone and all else there is no creation cut short: nothing may be replaced."""
    with Place(memory=True) as place:
        store = Store(place)
        for gone in [2 * PAGE, 4 * PAGE]:
            store.write({0: bytes(gone)})
            with open(store.path, "rb") as file:
                before = file.read()
            for mode in ["--resume", None]:
                result = place.run([*store.command, *([mode] if mode else [])])
                must_be_named(result, DAMAGE, "--discard")
                with open(store.path, "rb") as file:
                    expect(file.read() == before, "it is left as it was", result)
            expect(verify_store(place.drive).returncode == 1, "verify names it")
            with open(store.path, "wb") as file:
                file.write(store.pristine)


def another_stores_file():
    """Two stores' files mixed: a file from another run, and a copy of the same drive twice."""
    with Place(memory=True) as place:
        store = Store(place)
        other = place.run([*place.train("--seed", "9", model=TINY, steps=COMMITTED, slots=2),
                           "--discard"])
        expect(other.returncode == 0, "another run", other)
        must_be_named(place.run([*store.command, "--resume"]), "seed")
        shutil.copy(store.path, os.path.join(place.path, "kept"))
        for garbage in [b"", b"\0" * 65536, os.urandom(65536)]:
            with open(store.path, "wb") as file:
                file.write(garbage)
            result = place.run([*store.command, "--resume"])
            if result.returncode == 0:
                must_equal(result, store.reference)
                expect(result.json["resumed_from"] is None, "it starts anew", result)
            else:
                must_be_named(result, DAMAGE, "--discard")
            os.path.exists(store.path) and os.unlink(store.path)


main({"metadata": [every_byte_of_metadata, cut_and_grown, both_headers_lost],
      "data": [sampled_data, pages_that_went_astray, another_stores_file]})
