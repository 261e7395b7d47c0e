"""The three ways of writing one file; no mode claims more than the steps it takes.

=================== ==========================================================================
``unsafe``           open the final path, write, close
``atomic_nodirsync`` write a temporary file beside it, flush it, rename it onto the final path
``atomic_dirsync``   the same, then flush the directory that holds the name
=================== ==========================================================================

(J. Jeon, arXiv:2511.18323.) Whoever calls :func:`install` gets a receipt that says which flush
primitives really ran and whether they amount to durability.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from ckptlib import provenance, sidecars, temps
from ckptlib.errors import (
    CommittedNotDurable,
    InvalidInput,
    SymlinkRefused,
    WriteFailed,
    explain,
)
from ckptlib.streams import Source, Written, as_source, operation, write_file
from ckptlib.vfs import FULL_FLUSH, REAL, VFS

FLUSH_ATTEMPTS = 3  # fresh files tried when a flush fails
REPLACE_ATTEMPTS = 5  # for sharing errors, which pass
_NO_BARRIERS = {"nobarrier", "barrier=0"}


class WriteMode(StrEnum):
    """How one file reaches its name; the values are the names used in every record."""

    unsafe = "unsafe"
    atomic_nodirsync = "atomic_nodirsync"
    atomic_dirsync = "atomic_dirsync"

    @property
    def atomic(self) -> bool:
        return self is not WriteMode.unsafe

    @property
    def flushes_directories(self) -> bool:
        return self is WriteMode.atomic_dirsync

    @classmethod
    def of(cls, mode: str | WriteMode) -> WriteMode:
        """Accept a mode or its name; InvalidInput lists the three names otherwise."""
        try:
            return cls(mode)
        except ValueError:
            names = ", ".join(m.value for m in cls)
            raise InvalidInput(
                explain("unknown write mode", expected=names, found=repr(mode), do="choose one")
            ) from None


@functools.lru_cache(maxsize=64)
def _volatile(device: int, directory: str) -> str:
    mount = provenance.filesystem(directory)
    if mount["memory_backed"]:
        return f"{mount['type']} lives in memory"
    if _NO_BARRIERS & set(mount["options"].split(",")):
        return "the file system is mounted without barriers"
    return ""


def volatile_reason(path: str) -> str:
    """Why flushes at this path do not reach a medium, or an empty string if nothing is known."""
    directory = os.path.dirname(path)
    try:
        return _volatile(os.stat(directory).st_dev, directory)
    except OSError:
        return ""


@dataclass
class Flushes:
    """Counts the flushes of one save and decides whether they make it durable."""

    path: str
    mode: WriteMode
    calls: int = 0
    primitives: list[str] = field(default_factory=list)
    problem: str = ""

    def add(self, primitive: str, path: str) -> None:
        self.calls += 1
        if primitive not in self.primitives:
            self.primitives.append(primitive)
        if primitive not in FULL_FLUSH:
            self.problem = self.problem or f"{primitive} of {os.path.basename(path)}"

    @property
    def primitive(self) -> str:
        return "+".join(self.primitives) or "none"

    def durable(self) -> tuple[bool, str]:
        """Whether every flush that durability needs was completed, and why (not)."""
        if self.mode is WriteMode.unsafe:
            return False, "unsafe flushes nothing"
        if not self.mode.flushes_directories:
            return False, "the directory entry was not flushed"
        if self.problem:
            return False, self.problem
        volatile = volatile_reason(self.path)
        if volatile:
            return False, volatile
        return True, "every flush completed"


def stage(
    vfs: VFS, path: str, source: Source, flushes: Flushes, permissions: int | None = None
) -> Written:
    """Write and flush a temporary file beside ``path``.

    A flush that fails is not tried again on the same file, whose dirty pages may be gone; the
    source is written out anew into a fresh one, a bounded number of times.
    """
    directory = os.path.dirname(path)
    for attempt in range(1, FLUSH_ATTEMPTS + 1):
        temp = os.path.join(directory, temps.temp_name())
        try:
            return write_file(
                vfs,
                temp,
                source,
                permissions=permissions,
                flush=lambda file: flushes.add(file.flush_durable(), path),
            )
        except WriteFailed as error:
            if error.operation != "flush" or attempt == FLUSH_ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def replace(vfs: VFS, source: str, target: str) -> None:
    """Rename a file onto its final name, see :func:`patiently`."""
    patiently(lambda: vfs.replace(source, target))


def patiently(rename: Callable[[], None]) -> None:
    """Try a rename again, a few times, after sharing errors (SMB, some FUSE mounts)."""
    for attempt in range(1, REPLACE_ATTEMPTS + 1):
        try:
            rename()
            return
        except PermissionError:
            if attempt == REPLACE_ATTEMPTS:
                raise
            time.sleep(0.01 * 2**attempt)


def move_into_place(vfs: VFS, staged: Written, path: str) -> None:
    """Rename a staged file onto its final name; if that fails, the staged file goes."""
    try:
        with operation("replace", path):
            replace(vfs, staged.path, path)
    except BaseException:
        discard(vfs, staged)
        raise


def discard(vfs: VFS, staged: Written) -> None:
    with contextlib.suppress(OSError):
        vfs.unlink(staged.path)


def put(
    vfs: VFS,
    path: str,
    source: Source,
    mode: WriteMode,
    flushes: Flushes,
    permissions: int | None = None,
) -> Written:
    """Write one file under a mode: the protocol itself, one step a line."""
    if mode is WriteMode.unsafe:
        return write_file(vfs, path, source, exclusive=False, permissions=permissions)
    staged = stage(vfs, path, source, flushes, permissions)
    move_into_place(vfs, staged, path)
    if mode.flushes_directories:
        flush_directory(vfs, os.path.dirname(path), flushes)
    return Written(path, staged.size, staged.sha256)


def flush_directory(vfs: VFS, directory: str, flushes: Flushes) -> None:
    """Flush a directory and put the primitive, or its refusal, on record."""
    with operation("flush_dir", directory):
        flushes.add(vfs.flush_dir(directory), directory)


@dataclass(frozen=True)
class InstallReceipt:
    """What :func:`install` did.

    ``bytes`` is the payload's size, ``seconds`` the time of the whole call, ``flush_calls`` the
    number of file and directory flushes, ``primitive`` the ones that ran (joined by ``+``).
    ``durable`` means that every flush completed on a file system that is not memory; a device that
    lies about its flushes is beyond anybody's knowledge.
    """

    path: str
    bytes: int
    sha256: str
    seconds: float
    flush_calls: int
    primitive: str
    durable: bool
    reason: str


def check_path(path) -> str:
    """The absolute form of a path, or InvalidInput for what no file system could hold."""
    name = os.fspath(path)
    if not isinstance(name, str) or not name or "\0" in name:
        raise InvalidInput(
            explain("unusable path", expected="text without a null character", found=repr(name))
        )
    return os.path.abspath(name)


def _target(vfs: VFS, path, follow_symlinks: bool) -> tuple[str, int | None]:
    """The absolute path to install, and the mode bits of what it replaces."""
    target = check_path(path)
    if follow_symlinks:
        target = os.path.realpath(target)
    try:
        status = vfs.stat(target)
    except FileNotFoundError:
        return target, None
    if stat.S_ISLNK(status.st_mode):
        raise SymlinkRefused(
            explain(
                "the target is a symbolic link",
                path=target,
                do="pass follow_symlinks=True to write to where it points",
            ),
            target,
        )
    if not stat.S_ISREG(status.st_mode):
        raise InvalidInput(
            explain("the target is not a regular file", path=target, do="choose another name"),
            target,
        )
    return target, stat.S_IMODE(status.st_mode)


def _drop(vfs: VFS, side: str) -> None:
    with operation("unlink", side), contextlib.suppress(FileNotFoundError):
        vfs.unlink(side)


def install(
    path,
    data_or_stream,
    mode="atomic_dirsync",
    *,
    sidecar: bool = True,
    follow_symlinks: bool = False,
    vfs: VFS = REAL,
) -> InstallReceipt:
    """Write one file under a write mode, with a sidecar that vouches for its bytes.

    The sidecar ``NAME.sha256.json`` is installed first and lists the digest to come beside the one
    being replaced; then the payload; then the sidecar with the new digest alone. A crash anywhere
    between leaves a file that matches its sidecar. (``unsafe`` promises nothing: it writes the
    payload, then the sidecar.) There is no lock for single files: two processes that install the
    same name at once may leave one's sidecar beside the other's bytes, which is then refused.

    Parameters
    ----------
    path : path-like
        The final name; its directory must exist. An existing file's permission bits are kept,
        otherwise the umask decides.
    data_or_stream : bytes-like or callable
        The payload, or ``f(sink)`` which calls ``sink.write(bytes)``. A callable may be called
        again, from its beginning, if a flush fails.
    mode : WriteMode or str
    sidecar : bool
        Whether to write the sidecar; without it an older one is removed first.
    follow_symlinks : bool
        Without it a target that is a symbolic link is refused.
    vfs : VFS
        The file system to act on.

    Returns
    -------
    InstallReceipt

    Raises
    ------
    WriteFailed
        A step failed before the rename: the old file is untouched, no temporary file is left.
    CommittedNotDurable
        The new file is in place but a flush after the rename failed.
    SymlinkRefused, InvalidInput
        The target cannot be written this way.
    """
    mode, source = WriteMode.of(mode), as_source(data_or_stream)
    started = time.perf_counter()
    with operation("stat", os.fspath(path)):
        target, permissions = _target(vfs, path, follow_symlinks)
    flushes, side = Flushes(target, mode), target + sidecars.SUFFIX

    def listing(written: Written, *replaced: sidecars.Digest) -> Source:
        new = sidecars.Digest(written.sha256, written.size)
        return as_source(sidecars.to_bytes(target, new, *replaced))

    def receipt(written: Written, durable: bool, reason: str) -> InstallReceipt:
        return InstallReceipt(
            target,
            written.size,
            written.sha256,
            time.perf_counter() - started,
            flushes.calls,
            flushes.primitive,
            durable,
            reason,
        )

    if mode is WriteMode.unsafe:
        written = put(vfs, target, source, mode, flushes, permissions)
        if sidecar:
            put(vfs, side, listing(written), mode, flushes)
        else:
            _drop(vfs, side)
        return receipt(written, *flushes.durable())

    temps.sweep(vfs, os.path.dirname(target))
    staged = stage(vfs, target, source, flushes, permissions)
    try:
        if sidecar:
            with operation("read", target):
                replaced = sidecars.vouched(vfs, target) if permissions is not None else []
            put(vfs, side, listing(staged, *replaced), mode, flushes)
        else:
            _drop(vfs, side)  # before the file: it must never condemn what comes
    except BaseException:
        discard(vfs, staged)
        raise
    move_into_place(vfs, staged, target)
    try:
        if mode.flushes_directories:
            flush_directory(vfs, os.path.dirname(target), flushes)
    except WriteFailed as error:
        raise CommittedNotDurable(
            explain(
                "the file is in place but not known to be durable",
                path=target,
                found=str(error),
                do="install it again when the cause is gone",
            ),
            target,
            error.errno,
            receipt(staged, False, str(error)),
        ) from error
    durable, reason = flushes.durable()
    if sidecar:
        try:  # either sidecar vouches for the payload, so this rename needs no directory flush
            put(vfs, side, listing(staged), WriteMode.atomic_nodirsync, flushes)
        except WriteFailed as error:
            reason += f"; the sidecar still lists the replaced digest too ({error})"
    return receipt(staged, durable, reason)
