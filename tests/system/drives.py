"""Real file systems for the tests, on loop devices, in RAM and in layers; root only."""

import contextlib
import fcntl
import glob
import os
import re
import struct
import time

from harness import Failed, private, run, Skip, system

MAKE = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"],
        "btrfs": ["mkfs.btrfs", "-q", "-f"]}
REPAIR = {"ext4": ["e2fsck", "-f", "-y"], "xfs": [], "btrfs": []}  # XFS and btrfs replay at mount
LEAST = {"ext4": 16, "xfs": 320, "btrfs": 128}  # MiB that mkfs wants
SHUTDOWN = 0x8004587D  # _IOR('X', 125, u32): ext4 and XFS
SHUTDOWN_LOSE_LOG = 2


def need_mounts():
    if os.geteuid() != 0:
        raise Skip("mounting needs root")
    if not private():
        raise Skip("a mount namespace is not permitted here")


class Mount:
    """A mounted file system; `path` is where."""

    def __init__(self, place, name):
        need_mounts()
        self.path = place.make(name)
        self.mounted = False

    def mount(self, *arguments):
        system("mount", *arguments, self.path)
        self.mounted = True

    def unmount(self):
        if self.mounted:
            self.mounted = False
            done = run(["umount", self.path])
            if done.returncode != 0:
                run(["umount", "--lazy", self.path])
                raise Failed(f"the drive is busy after the run: {done.error}")

    def __enter__(self):
        return self

    def __exit__(self, kind, *unused):
        try:
            self.unmount()
        except Failed:
            if kind is None:
                raise

    def free_bytes(self):
        space = os.statvfs(self.path)
        return space.f_bavail * space.f_frsize

    def settle(self, wanted):
        """Waits until what was removed is free: btrfs takes a moment."""
        deadline = time.monotonic() + 20
        while self.free_bytes() < wanted and time.monotonic() < deadline:
            run(["sync", "--file-system", self.path])
            time.sleep(0.1)

    def fill(self, leave=0, name="filler"):
        """Another writer takes the space down to `leave` bytes, or to the last block; its path."""
        path = os.path.join(self.path, name)
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        size = 0
        try:
            for piece in [1 << 26, 1 << 23, 1 << 20, 1 << 16, 1 << 12]:
                with contextlib.suppress(OSError):
                    while leave == 0 or self.free_bytes() >= leave + piece:
                        os.posix_fallocate(descriptor, size, piece)
                        size += piece
        finally:
            os.close(descriptor)
        return path


class Loop(Mount):
    """ext4, XFS or btrfs on a loop device over a file in the place (or in `folder`)."""

    def __init__(self, place, kind, sector=512, mebibytes=None, options=(), folder=None, make=()):
        super().__init__(place, f"{kind}-{sector}")
        self.kind, self.options = kind, options
        self.image = os.path.join(folder or place.path, f"{kind}-{sector}.img")
        with open(self.image, "wb") as file:
            file.truncate(max(mebibytes or 0, LEAST[kind]) << 20)
        self.device = self.attach(sector)
        self.sector = sector
        try:
            system(*MAKE[kind], *make, self.device)
            self.mount()
        except BaseException:
            self.detach()
            raise

    def attach(self, sector):
        return system("losetup", "--find", "--show", "--sector-size", str(sector), self.image)

    def mount(self, *unused):
        super().mount("-t", self.kind, *(["-o", ",".join(self.options)] if self.options else []),
                      self.device)

    def detach(self):
        run(["losetup", "--detach", self.device])

    def __exit__(self, *error):
        try:
            super().__exit__(*error)
        finally:
            self.detach()
            with contextlib.suppress(OSError):
                os.unlink(self.image)

    def shut_down(self):
        """The power fails: nothing more reaches the drive, what only the log had is lost."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", SHUTDOWN_LOSE_LOG))
        except OSError as error:
            raise Skip(f"{self.kind} cannot be shut down here: {error}") from None
        finally:
            os.close(descriptor)

    def again(self):
        """Unmounted, repaired and mounted, as after a restart."""
        self.unmount()
        if REPAIR[self.kind]:
            run([*REPAIR[self.kind], self.device])
        self.mount()

    def dirtied_bytes(self):
        """What has gone through the page cache of this file system so far, as the kernel counts."""
        if self.kind == "btrfs":
            device = os.path.basename(self.device)
            (link,) = [os.path.join(os.path.dirname(os.path.dirname(name)), "bdi")
                       for name in glob.glob(f"/sys/fs/btrfs/*/devices/{device}")]
            name = os.path.basename(os.readlink(link))
        else:
            number = os.stat(self.path).st_dev
            name = f"{os.major(number)}:{os.minor(number)}"
        if not os.path.isdir("/sys/kernel/debug/bdi"):
            system("mount", "-t", "debugfs", "debugfs", "/sys/kernel/debug")
        with open(f"/sys/kernel/debug/bdi/{name}/stats") as file:
            return int(re.search(r"BdiDirtied:\s*(\d+) kB", file.read()).group(1)) << 10


class Ram(Mount):
    """A tmpfs with a limit."""

    def __init__(self, place, size, name="ram"):
        super().__init__(place, name)
        self.mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs")

    def resize(self, size):
        return run(["mount", "-o", f"remount,size={size}", self.path]).returncode == 0


class Overlay(Mount):
    """An overlay whose upper layer is in the folder `upper`."""

    def __init__(self, place, upper):
        super().__init__(place, "overlay")
        folders = {name: os.path.join(upper, name) for name in ["lower", "upper", "work"]}
        for folder in folders.values():
            os.makedirs(folder)
        self.mount("-t", "overlay", "-o", f"lowerdir={folders['lower']},upperdir="
                   f"{folders['upper']},workdir={folders['work']}", "overlay")


def is_direct(pid):
    """Whether the files that a process has open on its drive bypass the page cache: a set, empty
    when there is none or the process has ended."""
    found = set()
    names = []
    with contextlib.suppress(OSError):
        names = os.listdir(f"/proc/{pid}/fd")
    for name in names:
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if not re.search(r"terrace\S*store|/#\d+ \(deleted\)", target):
                continue
            with open(f"/proc/{pid}/fdinfo/{name}") as file:
                flags = int(re.search(r"flags:\s*(\d+)", file.read()).group(1), 8)
            found.add(bool(flags & os.O_DIRECT))
    return found
