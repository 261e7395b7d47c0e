"""What changes a store besides a save: lock, pointer, quarantine, removal; each may be interrupted.

Nothing here decides what is valid. A directory is taken out of sight by one rename before anything
in it is touched, so that a crash leaves either the checkpoint or a leftover with a temporary name.
"""

from __future__ import annotations

import contextlib
import os
import stat

from ckptlib import temps
from ckptlib.catalog import LATEST, QUARANTINE, step_name
from ckptlib.errors import StoreBusy, explain
from ckptlib.manifests import COMMIT
from ckptlib.streams import operation
from ckptlib.vfs import VFS, locked
from ckptlib.write_modes import Flushes, flush_directory, patiently, replace

LOCK = "LOCK"
UNCOMMITTED = ".uncommitted"


def make_directories(vfs: VFS, path: str, flushes: Flushes) -> None:
    """Make a directory and its missing parents; where the mode asks for it, flush each holder.

    The holder of ``path`` itself is flushed even if ``path`` is there: whoever made it may have
    died before the flush. If a flush fails, what was made is taken away, so that nobody later
    relies on a directory whose name never reached the disk.
    """
    missing, place = [], path
    with operation("stat", path):
        while not vfs.exists(place):
            missing.append(place)
            place = os.path.dirname(place)
    made = []
    try:
        for directory in reversed(missing):
            with operation("mkdir", directory), contextlib.suppress(FileExistsError):
                vfs.mkdir(directory)
                made.append(directory)
            if flushes.mode.flushes_directories:
                flush_directory(vfs, os.path.dirname(directory), flushes)
        if not missing and flushes.mode.flushes_directories:
            flush_directory(vfs, os.path.dirname(path), flushes)
    except BaseException:
        for directory in reversed(made):
            with contextlib.suppress(OSError):
                vfs.rmdir(directory)
        raise


@contextlib.contextmanager
def writer(vfs: VFS, root: str):
    """Be the store's one writer; whatever temporary name is found now is a dead writer's.

    Raises
    ------
    StoreBusy
        Another process is saving, pruning or scrubbing.
    """
    path = os.path.join(root, LOCK)
    with contextlib.ExitStack() as stack:
        with operation("lock", path):
            try:
                stack.enter_context(locked(vfs, path))
            except BlockingIOError:
                raise StoreBusy(
                    explain("another process is writing to this store", path=root,
                            do="wait for it, or give each job a store of its own"),
                    root,
                ) from None  # fmt: skip
        temps.sweep(vfs, root, own_all=True)
        yield


def quarantine(vfs: VFS, root: str, directory: str, flushes: Flushes) -> str:
    """Move a step directory aside; undone by renaming it back. Returns where it went."""
    folder = os.path.join(root, QUARANTINE)
    with operation("stat", folder):
        there = vfs.exists(folder)
    if not there:
        with operation("mkdir", folder):
            vfs.mkdir(folder)
    base = os.path.join(folder, os.path.basename(directory))
    with operation("stat", directory):
        committed, target = vfs.exists(os.path.join(directory, COMMIT)), base + UNCOMMITTED
        # never committed, so never acknowledged: one such leftover per step is enough
        taken, number = not committed and vfs.exists(target), 0
        while committed and vfs.exists(target := f"{base}.{number}"):
            number += 1
    if taken:
        remove(vfs, root, target, flushes)
    with operation("rename", directory):
        patiently(lambda: vfs.rename(directory, target))
    if flushes.mode.flushes_directories:
        flush_directory(vfs, folder, flushes)
        flush_directory(vfs, root, flushes)
    return target


def remove(vfs: VFS, root: str, directory: str, flushes: Flushes) -> None:
    """Take a directory out of sight first, durably, and delete it then; COMMIT goes first."""
    trash = os.path.join(root, temps.temp_name())
    with operation("rename", directory):
        patiently(lambda: vfs.rename(directory, trash))
    if flushes.mode.flushes_directories:
        flush_directory(vfs, os.path.dirname(directory), flushes)
    with operation("unlink", trash):
        if stat.S_ISDIR(vfs.stat(trash).st_mode):  # through a link, nothing may be removed
            with contextlib.suppress(FileNotFoundError):
                vfs.unlink(os.path.join(trash, COMMIT))
        temps.remove_tree(vfs, trash)


def drop_uncommitted(vfs: VFS, root: str, flushes: Flushes) -> None:
    """Delete what was moved aside without ever having been committed: nobody was promised it."""
    folder = os.path.join(root, QUARANTINE)
    if vfs.exists(folder):
        for name in vfs.list(folder):
            if name.endswith(UNCOMMITTED):
                remove(vfs, root, os.path.join(folder, name), flushes)


def point_latest(vfs: VFS, root: str, step: int) -> None:
    """Replace the relative link ``latest_ok``; it is a convenience that nothing depends on."""
    temp = os.path.join(root, temps.temp_name())
    with operation("symlink", temp):
        vfs.symlink(step_name(step), temp)
    try:
        with operation("replace", os.path.join(root, LATEST)):
            replace(vfs, temp, os.path.join(root, LATEST))
    except BaseException:
        with contextlib.suppress(OSError):
            vfs.unlink(temp)
        raise
