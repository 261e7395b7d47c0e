"""Every file operation of the library, and nothing else; nobody may reach a store's files past it.

:class:`VFS` is the real file system. :class:`LayeredVFS` wraps another one with a single hook,
``around``, through which each operation passes as data (:class:`Operation`) and as a call; a
recorder, a fault injector and a killer are each one short override of that hook. The protocol code
above runs unchanged on all of them, so what is shown on one is shown for the code that ships.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import stat as stat_module
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

# <fcntl.h> on macOS. F_BARRIERFSYNC orders writes but does not wait for the medium (man 2 fcntl).
F_FULLFSYNC = getattr(fcntl, "F_FULLFSYNC", 51)
F_BARRIERFSYNC = 85
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY}
#: Primitives that ask the device itself to empty its cache.
FULL_FLUSH = frozenset({"fsync", "F_FULLFSYNC"})


def durable_flush(fd: int, *, platform: str = sys.platform, fcntl_call=None, fsync=None) -> str:
    """Flush an open file or directory to the medium and say which primitive did it.

    On Linux ``fsync`` includes a device cache flush. On macOS it does not (man 2 fsync), so
    ``F_FULLFSYNC`` is tried first, then ``F_BARRIERFSYNC``, then plain ``fsync``.

    Parameters
    ----------
    fd : int
        An open descriptor whose user-space buffer, if any, has been written out.
    platform, fcntl_call, fsync
        Replaceable so that the macOS order can be tested anywhere.

    Returns
    -------
    str
        ``fsync``, ``F_FULLFSYNC``, ``F_BARRIERFSYNC``, or ``plain-fsync`` (macOS only: the file is
        with the drive, not necessarily on it).

    Raises
    ------
    OSError
        The flush failed. It must not be repeated on this file: after a failed write-back Linux
        may drop the dirty pages and let the next call succeed (man 2 fsync, "fsyncgate").
    """
    fcntl_call = fcntl.fcntl if fcntl_call is None else fcntl_call
    fsync = os.fsync if fsync is None else fsync
    if platform != "darwin":
        fsync(fd)
        return "fsync"
    for command, name in ((F_FULLFSYNC, "F_FULLFSYNC"), (F_BARRIERFSYNC, "F_BARRIERFSYNC")):
        try:
            fcntl_call(fd, command)
            return name
        except OSError as error:  # only "this file system has no such thing" leads on
            if error.errno not in _UNSUPPORTED:
                raise
    fsync(fd)
    return "plain-fsync"


@dataclass
class Operation:
    """One file operation as it passed the seam.

    ``size`` is in bytes, ``offset`` the position of a read or write, ``started`` in seconds of
    ``time.perf_counter``, ``result`` the flush primitive or the error's name. ``data`` is the
    payload of a write while the operation is under way.
    """

    index: int
    call: str
    path: str
    target: str = ""
    size: int = 0
    offset: int = 0
    data: memoryview | None = None
    started: float = 0.0
    seconds: float = 0.0
    result: str = ""


class File(io.RawIOBase):
    """An open file of a :class:`VFS`: unbuffered; ``write`` may be short, as the system call."""

    def __init__(self, fd: int, path: str, writable: bool, vfs: VFS | None = None):
        super().__init__()
        self._fd, self.path, self._writable = fd, path, writable
        self._system = (REAL if vfs is None else vfs).system

    def readable(self) -> bool:
        return not self._writable

    def writable(self) -> bool:
        return self._writable

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def readinto(self, buffer) -> int:
        return self._system(os.readv, self._fd, [buffer])

    def write(self, data) -> int:
        return self._system(os.write, self._fd, data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET and offset < 0:  # as any Python file does; parsers rely on it
            raise ValueError(f"negative seek position {offset}")
        return os.lseek(self._fd, offset, whence)

    def tell(self) -> int:
        return os.lseek(self._fd, 0, os.SEEK_CUR)

    def stat(self) -> os.stat_result:
        return os.fstat(self._fd)

    def chmod(self, mode: int) -> None:
        self._system(os.fchmod, self._fd, mode)

    def flush_durable(self) -> str:
        """Put this file's bytes and size on the medium; return the primitive used."""
        return self._system(durable_flush, self._fd)

    def close(self) -> None:
        if not self.closed:
            super().close()
            with contextlib.suppress(InterruptedError):  # the descriptor is gone: never try again
                self._system(os.close, self._fd, repeat=False)


class Lock:
    """An advisory ``flock``, held until :meth:`release` or the end of the process."""

    def __init__(self, fd: int):
        self._fd: int | None = fd

    def release(self) -> None:
        if self._fd is not None:
            # closing alone would leave the lock with a child that was forked meanwhile
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None


class VFS:
    """The real file system. Paths are ``str``; every method may raise ``OSError``."""

    def system(self, call: Callable, *arguments, repeat: bool = True):
        """Make a system call, and make it again if a signal interrupted it.

        Python repeats reads, writes and flushes by itself (PEP 475), but not what concerns names,
        which NFS and FUSE may interrupt as well.
        """
        while True:
            try:
                return self.once(call, *arguments)
            except InterruptedError:
                if not repeat:
                    raise

    def once(self, call: Callable, *arguments):
        """Make a system call; here a fault injector comes in below all that handles faults."""
        return call(*arguments)

    def create(self, path: str, *, exclusive: bool = True, permissions: int = 0o666) -> File:
        """Open for writing from zero; ``exclusive`` fails if the name exists; umask applies.

        A symbolic link is never written through: ELOOP.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= os.O_EXCL if exclusive else os.O_TRUNC
        return File(self.system(os.open, path, flags, permissions), path, True, self)

    def open(self, path: str) -> File:
        """Open a regular file for reading; refuses symbolic links, devices and pipes."""
        # O_NONBLOCK: opening a FIFO somebody planted must not hang the guard.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = self.system(os.open, path, flags)
        if not stat_module.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", path)
        return File(fd, path, False, self)

    def replace(self, source: str, target: str) -> None:
        """Rename a file onto a name, replacing what stood there, atomically."""
        self.system(os.replace, source, target)

    def rename(self, source: str, target: str) -> None:
        """Rename a directory onto a free name; a non-empty directory is never replaced."""
        self.system(os.rename, source, target)

    def mkdir(self, path: str) -> None:
        self.system(os.mkdir, path)

    def rmdir(self, path: str) -> None:
        self.system(os.rmdir, path)

    def unlink(self, path: str) -> None:
        self.system(os.unlink, path)

    def symlink(self, target: str, path: str) -> None:
        self.system(os.symlink, target, path)

    def readlink(self, path: str) -> str:
        return self.system(os.readlink, path)

    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted, so that every caller sees one order."""
        return sorted(self.system(os.listdir, path))

    def stat(self, path: str) -> os.stat_result:
        """``lstat``: a link is reported as a link."""
        return self.system(os.lstat, path)

    def flush_dir(self, path: str) -> str:
        """Put a directory's entries on the medium.

        Returns
        -------
        str
            The primitive, or ``unsupported:NAME`` where the file system has no such flush
            (EINVAL, ENOTSUP: some FUSE, SMB and shared-folder mounts).
        """
        fd = self.system(os.open, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return self.system(durable_flush, fd)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return f"unsupported:{errno.errorcode[error.errno]}"
            raise
        finally:
            os.close(fd)

    def lock(self, path: str) -> Lock:
        """Take the writer's lock or raise ``BlockingIOError`` at once."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = self.system(os.open, path, flags, 0o666)
        try:
            self.system(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return Lock(fd)

    def exists(self, path: str) -> bool:
        """Whether the name exists, a dangling link included."""
        try:
            self.stat(path)
            return True
        except (FileNotFoundError, NotADirectoryError):
            return False


class _LayeredFile(File):
    def __init__(self, layer: LayeredVFS, inner: File):
        super().__init__(inner.fileno(), inner.path, inner.writable(), layer.inner)
        self._layer, self._inner, self._offset = layer, inner, 0

    def readinto(self, buffer) -> int:
        done = self._layer._pass(
            "read", self.path, self._inner.readinto, buffer, size=len(buffer), offset=self._offset
        )
        self._offset += done
        return done

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        done = self._layer._pass(
            "write",
            self.path,
            self._inner.write,
            view,
            size=len(view),
            offset=self._offset,
            data=view,
        )
        self._offset += done
        return done

    def chmod(self, mode: int) -> None:
        self._layer._pass("chmod", self.path, self._inner.chmod, mode)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._offset = self._inner.seek(offset, whence)
        return self._offset

    def tell(self) -> int:
        return self._inner.tell()

    def stat(self) -> os.stat_result:
        return self._inner.stat()

    def flush_durable(self) -> str:
        size = self._inner.stat().st_size
        return self._layer._pass("flush", self.path, self._inner.flush_durable, size=size)

    def close(self) -> None:
        if not self.closed:
            io.RawIOBase.close(self)
            self._layer._pass("close", self.path, self._inner.close)


class LayeredVFS(VFS):
    """A file system on top of another; ``around`` sees every operation before and after it."""

    def __init__(self, inner: VFS | None = None):
        self.inner = VFS() if inner is None else inner
        self._count = 0

    def around(self, op: Operation, call: Callable):
        """Perform ``op`` by ``call()``; for a write, ``call(other_bytes)`` writes those instead."""
        return call()

    def _pass(self, name: str, path: str, function: Callable, *arguments, **fields):
        op = Operation(self._count, name, path, **fields)
        self._count += 1

        def call(*replacement):
            return function(*(replacement or arguments))

        return self.around(op, call)

    def create(self, path: str, *, exclusive: bool = True, permissions: int = 0o666) -> File:
        def create() -> File:
            return self.inner.create(path, exclusive=exclusive, permissions=permissions)

        return _LayeredFile(self, self._pass("create", path, create))

    def open(self, path: str) -> File:
        return _LayeredFile(self, self._pass("open", path, self.inner.open, path))

    def replace(self, source: str, target: str) -> None:
        self._pass("replace", source, self.inner.replace, source, target, target=target)

    def rename(self, source: str, target: str) -> None:
        self._pass("rename", source, self.inner.rename, source, target, target=target)

    def mkdir(self, path: str) -> None:
        self._pass("mkdir", path, self.inner.mkdir, path)

    def rmdir(self, path: str) -> None:
        self._pass("rmdir", path, self.inner.rmdir, path)

    def unlink(self, path: str) -> None:
        self._pass("unlink", path, self.inner.unlink, path)

    def symlink(self, target: str, path: str) -> None:
        self._pass("symlink", path, self.inner.symlink, target, path, target=target)

    def readlink(self, path: str) -> str:
        return self._pass("readlink", path, self.inner.readlink, path)

    def list(self, path: str) -> list[str]:
        return self._pass("list", path, self.inner.list, path)

    def stat(self, path: str) -> os.stat_result:
        return self._pass("stat", path, self.inner.stat, path)

    def flush_dir(self, path: str) -> str:
        return self._pass("flush_dir", path, self.inner.flush_dir, path)

    def lock(self, path: str) -> Lock:
        return self._pass("lock", path, self.inner.lock, path)


class RecordingVFS(LayeredVFS):
    """Keeps every operation, in order, with its time, size and result; payloads are not kept."""

    def __init__(self, inner: VFS | None = None):
        super().__init__(inner)
        self.operations: list[Operation] = []

    def around(self, op: Operation, call: Callable):
        self.operations.append(op)
        op.started = time.perf_counter()
        try:
            outcome = call()
            if isinstance(outcome, str) and op.call in {"flush", "flush_dir"}:
                op.result = outcome
            return outcome
        except OSError as error:
            op.result = errno.errorcode.get(error.errno or 0, type(error).__name__)
            raise
        finally:
            op.seconds = time.perf_counter() - op.started
            op.data = None


REAL = VFS()


@contextlib.contextmanager
def locked(vfs: VFS, path: str):
    """Hold the writer's lock for the length of a block."""
    lock = vfs.lock(path)
    try:
        yield
    finally:
        lock.release()
