"""Ten thousand steps: memory, descriptors, threads and files stay as they are, and so does the
result."""

import os
import re
import time

from harness import expect, main, must_equal, Place, say, sound

STEPS = 10000
TINY = ["--layers", "1", "--width", "16", "--heads", "1", "--context", "4", "--batch", "1",
        "--segment", "4KiB"]
WARM = 0.2  # of the samples that are not judged
# Losses and durations that the command keeps for its summary are 16 bytes a step.
MEMORY_GROWTH = 1 << 20


def sample(pid, drive):
    """Resident bytes, descriptors, threads, and the drive's bytes by size and by blocks."""
    with open(f"/proc/{pid}/status") as file:
        status = file.read()
    files = [os.stat(os.path.join(drive, name)) for name in os.listdir(drive)]
    return {"memory": int(re.search(r"VmRSS:\s*(\d+) kB", status).group(1)) << 10,
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": int(re.search(r"Threads:\s*(\d+)", status).group(1)),
            "maps": sum(1 for _ in open(f"/proc/{pid}/maps")),
            "file bytes": sum(file.st_size for file in files),
            "file blocks": sum(file.st_blocks for file in files)}


def watched(place, command):
    running = place.start(command)
    samples = []
    while running.process.poll() is None:
        try:
            samples.append(sample(running.pid, place.drive))
        except (OSError, AttributeError):
            break  # it has just ended
        time.sleep(0.25)
    return running.finish(), samples


def flat(engine, steps):
    with Place() as place:
        reference = place.reference(model=TINY, steps=steps)
        result, samples = watched(place, place.train("--io", engine, model=TINY, steps=steps,
                                                     slots=2))
        must_equal(result, reference)
        samples = samples[:-1]  # the last ones may see the summary being made
        judged = samples[int(len(samples) * WARM):]
        expect(len(judged) >= 5, f"enough samples: {len(samples)}", result)
        for name, first in judged[0].items():
            values = [one[name] for one in judged]
            growth = MEMORY_GROWTH if name == "memory" else 0
            say(f"  {name}: {first} at first, {min(values)} to {max(values)}")
            expect(max(values) <= first + growth, f"{name} must stay: {values}")
        say(f"  {steps} steps in {result.seconds:.0f} s")
        sound(place.drive)
        place.clean_outside()


def uring():
    flat("io_uring", STEPS)


def threads():
    flat("threads", STEPS // 4)


main({"steps": [uring, threads]})
