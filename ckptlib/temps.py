"""Names of unfinished files: they say who is writing, and a live writer's are never swept.

A name is ``.ckpt-tmp.<boot>.<pid>.<start>-<n>``: short, so that it fits wherever its target's name
fits, and in the target's own directory, so that the rename never crosses a file system. ``start``
tells apart two processes that had the same number under one boot, as in a restarted container.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import sys
import time

from ckptlib.vfs import VFS

PREFIX = ".ckpt-tmp."
FOREIGN_AGE_S = 24 * 3600  # after which an unfinished file of another boot or host is abandoned
_numbers = itertools.count()
_START = format(time.time_ns() & 0xFFFFFFFFFF, "010x")


@functools.cache
def boot_id() -> str:
    """Eight characters for the set of processes among which a process number is unique.

    They change when the machine is booted again, and differ between containers that number their
    processes apart.
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):
            with open("/proc/sys/kernel/random/boot_id") as file:
                names = file.read() + os.readlink("/proc/self/ns/pid")
            return hashlib.sha256(names.encode()).hexdigest()[:8]
    import psutil

    return format(int(psutil.boot_time()) & 0xFFFFFFFF, "08x")


def temp_name() -> str:
    """A fresh name for this process."""
    return f"{PREFIX}{boot_id()}.{os.getpid()}.{_START}-{next(_numbers)}"


def is_temp(name: str) -> bool:
    return name.startswith(PREFIX)


def abandoned(name: str, modified: float, now: float) -> bool:
    """Whether the writer named in a temporary name is gone (times in seconds since the epoch)."""
    parts = name.removeprefix(PREFIX).split(".")
    if len(parts) != 3 or not parts[1].isdigit():
        return False  # not a name of ours: leave it alone
    if parts[0] != boot_id():
        # another boot of this machine, or another host on a shared file system: only age can tell
        return now - modified > FOREIGN_AGE_S
    pid = int(parts[1])
    if pid == os.getpid():
        return parts[2].partition("-")[0] != _START
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def remove_tree(vfs: VFS, path: str) -> None:
    """Remove a file, a link, or a directory with all that is in it; links are not followed."""
    import stat

    if not stat.S_ISDIR(vfs.stat(path).st_mode):
        vfs.unlink(path)
        return
    for name in vfs.list(path):
        remove_tree(vfs, os.path.join(path, name))
    vfs.rmdir(path)


def sweep(vfs: VFS, directory: str, *, own_all: bool = False) -> list[str]:
    """Remove abandoned temporary files and directories; return their names.

    Parameters
    ----------
    own_all : bool
        The caller holds the directory's writer lock, so that every temporary name in it belongs to
        a dead writer, whatever process it names.

    What cannot be listed or removed stays: a leftover must never stand in the way of a save.
    """
    removed: list[str] = []
    try:
        names = vfs.list(directory)
    except OSError:
        return removed
    for name in filter(is_temp, names):
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError):
            if own_all or abandoned(name, vfs.stat(path).st_mtime, time.time()):
                remove_tree(vfs, path)
                removed.append(name)
    return removed
