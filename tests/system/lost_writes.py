"""The power fails with a drive that has a cache: of the writes since the last flush, any may be
there, any may be missing, and any may be torn between two sectors.

strace records every write and flush of a run; many instants of it are rebuilt as such a drive
could have left them. Each must be continued exactly, from the newest commit that was flushed or a
later one.
"""

import collections
import os
import random
import re

from harness import expect, main, must_equal, need_strace, Place, say, verify_store

TINY = ["--layers", "1", "--width", "2", "--heads", "1", "--context", "1", "--batch", "1",
        "--segment", "4KiB"]
STEPS = 4
SECTOR = 512
INSTANTS = 12
CALL = re.compile(rb'^(\d+)\s+(pwrite64|fdatasync|fsync|ftruncate|fallocate)\(\d+<([^>]*)>(?:, )?'
                  rb'(.*)\)\s+= (-?\d+)', re.MULTILINE)

WRITTEN = re.compile(rb'"((?:\\x[0-9a-f]{2})*)", (\d+), (\d+)$')

Event = collections.namedtuple("Event", "kind path offset data")


def unhex(text):
    return bytes.fromhex(text.replace(b"\\x", b"").decode())


def joined(log):
    """The log with each call that another thread interrupted put together again."""
    open_calls, lines = {}, []
    for line in log.splitlines():
        thread = line.split(b" ", 1)[0]
        if line.endswith(b"<unfinished ...>"):
            open_calls[thread] = line[:-len(b"<unfinished ...>")].rstrip()
            continue
        resumed = re.match(rb"^\d+\s+<\.\.\. \w+ resumed>(.*)$", line)
        lines.append(open_calls.pop(thread) + resumed.group(1) if resumed else line)
    return b"\n".join(lines)


def events_of(log):
    """Writes, flushes and sizes of the stores' files, in order."""
    events = []
    for _, call, path, rest, result in CALL.findall(joined(log)):
        path = unhex(path) if path.startswith(b"\\x") else path
        path = path.decode()
        if not path.endswith("terrace.store") or int(result) < 0:
            continue
        if call == b"pwrite64":
            data, count, offset = WRITTEN.match(rest).groups()
            data = unhex(data)
            expect(len(data) == int(count), "strace shows all of a write")
            events.append(Event("write", path, int(offset), data[:int(result)]))
        elif call in (b"fdatasync", b"fsync"):
            events.append(Event("flush", path, 0, b""))
        else:
            size = int(re.findall(rb"\d+", rest)[-1])
            events.append(Event("size", path, size, b""))
    return events


class Disk:
    """Files as a drive with a cache holds them."""

    def __init__(self):
        self.durable, self.pending = {}, {}

    def apply(self, event):
        file = self.durable.setdefault(event.path, bytearray())
        pending = self.pending.setdefault(event.path, [])
        if event.kind == "size":  # at creation, before anything is written
            file.extend(bytes(max(0, event.offset - len(file))))
        elif event.kind == "write":
            pending.append(event)
        else:
            for write in pending:
                put(file, write.offset, write.data)
            pending.clear()

    def image(self, path, keep):
        """The file after the power has failed; keep(write) gives the parts that made it."""
        file = bytearray(self.durable[path])
        for write in self.pending[path]:
            for first, last in keep(write):
                put(file, write.offset + first, write.data[first:last])
        return file


def put(file, offset, data):
    if offset + len(data) > len(file):
        file.extend(bytes(offset + len(data) - len(file)))
    file[offset:offset + len(data)] = data


def lose_all(_write):
    return []


def keep_all(write):
    return [(0, len(write.data))]


def lose_some(write):
    """All of it, none of it, or some of its sectors."""
    choice = random.random()
    if choice < 0.4:
        return []
    if choice < 0.7:
        return [(0, len(write.data))]
    return [(first, first + SECTOR) for first in range(0, len(write.data), SECTOR)
            if random.random() < 0.5]


def recorded(place, command):
    log = os.path.join(place.path, "strace.log")
    result = place.run(command, wrapper=["strace", "-f", "-qq", "-y", "-xx", "-s", str(1 << 24),
                                         "-e", "trace=pwrite64,fdatasync,fsync,ftruncate,fallocate",
                                         "-o", log])
    with open(log, "rb") as file:
        return result, events_of(file.read())


def instants_of(events):
    """Before and after every flush up to the second commit and of the last one, where it matters
    most, and some more."""
    flushes = [index for index, event in enumerate(events) if event.kind == "flush"]
    drives = len({event.path for event in events})
    made = 4 * drives  # flushes that make the files; a commit has two on each drive
    chosen = flushes[:made + 4 * drives] + flushes[-2 * drives:]
    near = {index + shift for index in chosen for shift in (0, 1)}
    others = sorted(set(range(1, len(events))) - near)
    return sorted(near | set(random.sample(others, min(INSTANTS, len(others)))) | {len(events)})


def rebuild(drives, disk, keep):
    for drive in drives:
        path = os.path.join(drive, "terrace.store")
        if path in disk.durable:
            with open(path, "wb") as file:
                file.write(disk.image(path, keep))
        elif os.path.exists(path):
            os.unlink(path)


def survives(drives_of):
    need_strace()
    with Place(memory=True) as place:
        drives = drives_of(place)
        reference = place.reference(model=TINY, steps=STEPS)
        command = place.train("--io", "threads", drives=drives, model=TINY, steps=STEPS,
                              io_threads=1, slots=2)
        result, events = recorded(place, command)
        must_equal(result, reference)
        expect(any(event.kind == "flush" for event in events), "commits flush")
        say(f"  {len(events)} events, {sum(len(e.data) for e in events)} bytes written")
        disk, done, committed, trials = Disk(), 0, 0, 0
        for instant in instants_of(events):
            while done < instant:
                disk.apply(events[done])
                done += 1
            for keep in [lose_all, keep_all, lose_some]:
                rebuild(drives, disk, keep)
                trials += 1
                result = place.run([*command, "--resume"])
                try:
                    must_equal(result, reference)
                except BaseException:
                    say(f"  after event {instant} of {len(events)}, {keep.__name__}")
                    raise
                step = result.json["resumed_from"] or 0
                if keep is lose_all:
                    expect(step >= committed, f"step {committed} was durable before", result)
                    committed = step
                expect(step >= committed, f"step {committed} was flushed, not {step}", result)
        expect(committed == STEPS, f"the end is committed, not step {committed}")
        say(f"  {trials} failures survived")


def no_false_alarm():
    """A run that was killed between any two calls leaves a sound store, and verify says so."""
    need_strace()
    with Place(memory=True) as place:
        command = place.train("--io", "threads", model=TINY, steps=STEPS, io_threads=1, slots=2)
        _, events = recorded(place, command)
        disk, alarms = Disk(), []
        first = [event.kind for event in events].index("flush", len(events) // 2)
        for instant, event in enumerate(events, 1):
            disk.apply(event)
            if instant < first:
                continue
            rebuild([place.drive], disk, keep_all)
            result = verify_store(place.drive)
            if result.returncode != 0:
                alarms.append((instant, result))
        expect(not alarms, f"verify sees damage after {len(alarms)} of {len(events) - first + 1} "
               f"instants, as after event {alarms[0][0] if alarms else ''}",
               alarms[0][1] if alarms else None)


def one_drive():
    survives(lambda place: [place.drive])


def two_drives():
    survives(lambda place: [place.drive, place.make("second")])


main({"lost_writes": [one_drive, two_drives, no_false_alarm]})
