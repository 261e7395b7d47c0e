"""What the tests of power loss share: real file systems, and what may be left of them."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from ckptlib.crashes import mounts
from ckptlib.crashes.blocklog import DeviceLog
from ckptlib.crashes.filesystems import filesystem

PATIENCE_S = 15.0  # for what the kernel does in its own time


@functools.cache
def fresh(name: str = "ext4") -> DeviceLog:
    """A new file system as a log without records; made once."""
    with tempfile.TemporaryDirectory() as folder:
        return filesystem(name).log(Path(folder) / "image", seed=1)


def image(folder: Path, log: DeviceLog | None = None) -> str:
    """The device of a log as a plain file, so that a loop device shows by its name whose it is."""
    log = log or fresh()
    path = folder / "image"
    with path.open("wb") as file:
        file.truncate(log.size)
        for offset, data in log.base:
            file.seek(offset)
            file.write(data)
    return str(path)


def disk_name(folder: Path) -> str:
    """A name for a recorded disk by which its loop device is known, also after the unmount."""
    return f"disk-{os.getpid()}-{folder.name}"


def left_behind(folder: Path, pids=()) -> list[str]:
    """Mounts that this process sees, loop devices and processes that belong to a folder's test."""
    found = [line for line in Path("/proc/self/mounts").read_text().splitlines()
             if str(folder) in line]  # fmt: skip
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            backing = entry.read_text().strip()
        except OSError:  # let go of in the meantime
            continue
        if str(folder) in backing or disk_name(folder) in backing:
            found.append(f"{entry.parts[3]} over {backing}")
    return found + [f"process {pid}" for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:  # an orphan that has ended waits for the init process to notice
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(condition: Callable[[], object], what: str = "it") -> None:
    """Wait until something is so, however long the kernel takes, within reason."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about in {PATIENCE_S} s"
        time.sleep(0.01)


def nothing_left(folder: Path, pids=()) -> None:
    """Hold a test to leaving nothing, but let the kernel finish."""
    deadline = time.monotonic() + PATIENCE_S
    while left_behind(folder, pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left_behind(folder, pids) == []


def in_namespace(test):
    """Run a whole test in a process with mounts of its own."""

    @functools.wraps(test)
    def run(*arguments, **keywords):
        mounts.isolated(_silent, test, arguments, keywords)

    return run


def _silent(test, arguments, keywords) -> None:
    test(*arguments, **keywords)  # what it returns, if anything, need not travel
