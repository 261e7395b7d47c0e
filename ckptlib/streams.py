"""Writing one file's bytes: all of them, hashed as they pass, with the first error kept.

Never leaves a file behind that it created exclusively and could not finish.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from ckptlib.errors import CkptError, WriteFailed, explain
from ckptlib.vfs import VFS, File

Source = Callable[["Sink"], None]
COALESCE = 1 << 18  # bytes of small writes gathered before they go out as one
PIECE = 1 << 20  # bytes hashed and written at a time: what is hashed is still in the cache
_ZERO_WRITES = 3  # consecutive writes of nothing before a device is called stuck


@contextlib.contextmanager
def operation(name: str, path: str, kind: type[CkptError] = WriteFailed):
    """Turn an operating-system error of one step into a typed one, its errno kept."""
    try:
        yield
    except CkptError:
        raise
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, type(error).__name__)
        raise kind(
            explain(
                f"{name} failed with {code} ({os.strerror(error.errno or 0)})",
                path=path,
                do=_ADVICE.get(error.errno, "see the system's log and try again"),
            ),
            path,
            error.errno,
            name,
        ) from error


_ADVICE = {
    errno.ENOSPC: "free space on this volume; the previous file is untouched",
    errno.EDQUOT: "raise the quota or free space; the previous file is untouched",
    errno.EROFS: "the file system is mounted read-only; choose another folder",
    errno.EACCES: "check the folder's permissions",
    errno.ENOENT: "create the folder first",
    errno.EIO: "the device reported an error; check its health before relying on it",
}


class Sink:
    """What a format writes into: everything is written and hashed, the first error is kept.

    ``torch.save`` ignores the return value of ``write`` and turns an exception into a RuntimeError
    without errno; here a short write is carried on, and :attr:`error` holds the original.
    """

    def __init__(self, file: File):
        self._file, self._pending = file, bytearray()
        self._digest = hashlib.sha256()
        self.size = 0
        self.error: BaseException | None = None

    def write(self, data) -> int:
        if self.error is not None:
            raise self.error
        view = memoryview(data).cast("B")
        try:
            if len(self._pending) + len(view) <= COALESCE:
                self._pending += view
            else:
                self.flush()
                self._write_out(view)
        except BaseException as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        """Hand the gathered small writes to the file; no durability is implied."""
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._write_out(memoryview(pending))

    def _write_out(self, view: memoryview) -> None:
        for start in range(0, len(view), PIECE):
            piece = view[start : start + PIECE]
            self._digest.update(piece)
            self.size += len(piece)
            stuck = 0
            while len(piece):
                written = self._file.write(piece)
                stuck = stuck + 1 if not written else 0
                if stuck == _ZERO_WRITES:
                    raise OSError(errno.EIO, "the file takes no more bytes", self._file.path)
                piece = piece[written or 0 :]

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


@dataclass(frozen=True)
class Written:
    """One file as it was written: name, bytes, SHA-256 of the bytes handed over."""

    path: str
    size: int
    sha256: str


def as_source(data) -> Source:
    """Bytes become a source that can be replayed; a callable is taken as it is."""
    if callable(data):
        return data
    view = memoryview(data).cast("B")
    return lambda sink: sink.write(view) and None


def write_open(
    vfs: VFS,
    path: str,
    source: Source,
    *,
    exclusive: bool = True,
    permissions: int | None = None,
) -> tuple[File, Written]:
    """Create ``path`` and write everything ``source`` gives; the file is returned still open.

    A file that this call created exclusively is removed again if anything fails.
    """
    with operation("create", path):
        file = vfs.create(path, exclusive=exclusive)
    try:
        if permissions is not None:
            with operation("chmod", path):
                file.chmod(permissions)
        sink = Sink(file)
        with operation("write", path):
            try:
                source(sink)
                sink.flush()
            except Exception:
                if sink.error is not None:
                    raise sink.error from None
                raise
    except BaseException:
        abandon(vfs, file, remove=exclusive)
        raise
    return file, Written(path, sink.size, sink.hexdigest())


def finish(vfs: VFS, file: File, *, exclusive: bool = True, flush=None) -> None:
    """Flush, if asked to by a callable that takes the open file, and close.

    The descriptor that wrote is the one that is flushed: a write-back error is certain to be
    reported only to descriptors that were open when it happened (man 2 fsync).
    """
    try:
        if flush is not None:
            with operation("flush", file.path):
                flush(file)
        with operation("close", file.path):
            file.close()  # NFS and FUSE report a failed write-back here
    except BaseException:
        abandon(vfs, file, remove=exclusive)
        raise


def abandon(vfs: VFS, file: File, *, remove: bool) -> None:
    """Close a file after a failure and take it away, whatever else goes wrong."""
    with contextlib.suppress(OSError):
        file.close()
    if remove:
        with contextlib.suppress(OSError):
            vfs.unlink(file.path)


def write_file(
    vfs: VFS,
    path: str,
    source: Source,
    *,
    exclusive: bool = True,
    permissions: int | None = None,
    flush=None,
) -> Written:
    """:func:`write_open` and :func:`finish` in one."""
    file, written = write_open(vfs, path, source, exclusive=exclusive, permissions=permissions)
    finish(vfs, file, exclusive=exclusive, flush=flush)
    return written
