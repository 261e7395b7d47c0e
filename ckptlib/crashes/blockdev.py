"""A block device that keeps every write and flush it gets, and devices that hold a crash state.

Recording: a server process shows a folder with one FUSE file, ``disk``. What the loop driver does
to it is appended to a :class:`.DeviceLog`. A second file, ``mark``, takes labels into the same log;
since one thread serves both, application and device share one order. A third one, ``control``, ends
the recording.

A crash state needs no server. It is an anonymous file in memory, made for this state alone: the
device as it was at a flush, with chosen later writes on top. Only what was ever written is copied,
which takes less time than serving the reads and writes of one mount through FUSE would; and neither
a cache of the kernel nor the writes of a recovery can get from one state into another.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import importlib
import json
import os
import select
import signal
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ckptlib.crashes import mounts
from ckptlib.crashes.blocklog import CHUNK, FLUSH, MARK, WRITE, DeviceLog, Record, extents, filled
from ckptlib.errors import CkptError, explain

DISK, MARKS, CONTROL = "disk", "mark", "control"
START_S = 10.0


class DeviceFailed(CkptError):
    """The device server did not start or has died, or what it was asked for makes no sense."""


class Image:
    """The bytes of a device in memory: an anonymous file, in which what is a hole takes no room.

    ``path`` is what a loop device can be put over, by any process of root's as long as this one has
    not closed it; a loop device keeps the file alive after that.
    """

    def __init__(self, size: int, base: Sequence[tuple[int, bytes]] = ()):
        self.size = size
        self._file = os.memfd_create("ckptlib-device", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        os.ftruncate(self._file, size)
        for offset, data in base:
            self.write(offset, data)

    def close(self) -> None:
        os.close(self._file)

    def write(self, offset: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._file, view, offset)
            offset, view = offset + done, view[done:]

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._file, length, offset)

    def filled(self) -> list[tuple[int, int]]:
        """Where anything else than zeros can be, as offset and length."""
        return filled(self._file, 0, self.size)

    def copy(self) -> Image:
        other = Image(self.size)
        for start, length in self.filled():
            for offset in range(start, start + length, CHUNK):
                other.write(offset, self.read(offset, min(CHUNK, start + length - offset)))
        return other


class _Recorder:
    """The folder's files, as mfusepy's operations; one thread calls them all."""

    use_ns = True

    def __init__(self, log: DeviceLog, started: Callable[[], None]):
        self._log, self._started = log, started
        self._image = Image(log.size, log.base)
        self._recording = True
        self._sizes = {f"/{DISK}": log.size, f"/{MARKS}": 0, f"/{CONTROL}": 0}
        self._request = self._answer = b""

    def init(self, path: str) -> None:
        self._started()

    def getattr(self, path: str, fh=None) -> dict:
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o700, "st_nlink": 2}
        if path in self._sizes:
            return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": self._sizes[path]}
        raise OSError(errno.ENOENT, path)

    def readdir(self, path: str, fh):
        return [".", "..", DISK, MARKS, CONTROL]

    def open(self, path: str, fi) -> int:
        fi.direct_io = True  # the driver's requests come as they are, through no cache
        return 0

    def read(self, path: str, size: int, offset: int, fh) -> bytes:
        if path[1:] == DISK:
            return self._image.read(offset, size)
        return self._answer[offset : offset + size]

    def write(self, path: str, data: bytes, offset: int, fh) -> int:
        if path[1:] != DISK:
            return self._told(path[1:], data, offset)
        self._image.write(offset, data)
        if self._recording:
            self._log.records.append(Record(WRITE, offset, data))
        return len(data)

    def fsync(self, path: str, datasync: int, fh) -> int:
        if path[1:] == DISK and self._recording:
            self._log.records.append(Record(FLUSH))
        return 0

    def _told(self, name: str, piece: bytes, offset: int) -> int:
        # what is larger than the kernel's largest request comes in pieces, up to a newline
        self._request = piece if offset == 0 else self._request + piece
        if self._request.endswith(b"\n"):
            content = json.loads(self._request)
            if name == CONTROL:
                self._stop(content["stop"])
            elif self._recording:
                self._log.records.append(Record(MARK, mark=content))
        return len(piece)

    def _stop(self, path: str) -> None:
        """End the recording and save it. The disk goes on working, for the unmount."""
        self._recording = False
        try:
            answer = {"sha256": self._log.save(path)}
        except Exception as error:  # told to the parent, which raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        self._answer = json.dumps(answer).encode()


class Server:
    """What can be done with a log: record another one on its base, and make its crash states.

    :func:`serving` gives one.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._log: DeviceLog | None = None
        self._image: Image | None = None  # with the writes before record _applied
        self._applied = 0
        self._state: Image | None = None  # the crash state being served
        self._recording = contextlib.ExitStack()
        self._files: dict[str, int] = {}  # of the recording, until it is stopped

    def load(self, log: DeviceLog | str | os.PathLike) -> None:
        """Take a log, or read it from a file: its base becomes the device.

        Raises
        ------
        CorruptLog
            The file is damaged; what was loaded before stays.
        """
        self._log = log if isinstance(log, DeviceLog) else DeviceLog.load(log)
        self._forget_states()

    def record(self) -> str:
        """Begin a recording on the loaded base; give the path of the file to attach.

        It ends what was recorded before, and dies with this process. What is mounted now stays in
        use by its server as long.
        """
        log = self._loaded()
        self._end_recording()
        fresh = DeviceLog(log.size, log.about, log.base)
        self._recording.enter_context(_server(fresh, self._folder))
        for name in (MARKS, CONTROL):
            self._files[name] = os.open(self._folder / name, os.O_RDWR | os.O_CLOEXEC)
        return str(self._folder / DISK)

    def mark(self, **label) -> None:
        """Put a label into the order of the device's records."""
        self._tell(MARKS, label)

    def stop(self, path) -> str:
        """End the recording and save it; give its SHA-256. The device can still be unmounted."""
        self._tell(CONTROL, {"stop": os.fspath(path)})
        answer = json.loads(os.pread(self._files[CONTROL], 2**20, 0))
        self._close_files()
        if "error" in answer:
            raise DeviceFailed(
                explain("the recording could not be saved", path=path, found=answer["error"]), path
            )
        return answer["sha256"]

    def serve(self, applied: int, writes: Sequence[int] = (), torn: Mapping | None = None) -> str:
        """Make a crash state; give the path of the file to attach, until the next one is made.

        Parameters
        ----------
        applied : int
            All writes before this record are on the medium.
        writes : sequence of int
            Records, from ``applied`` on, that are written on top of that, in this order.
        torn : mapping, optional
            By record in ``writes``: the ``(start, length)`` within its bytes that are written,
            instead of all.
        """
        log = self._loaded()
        pieces = {int(index): parts for index, parts in (torn or {}).items()}
        _check(log, applied, writes, pieces)
        if self._image is None or applied < self._applied:
            self._forget_states()
            self._image = Image(log.size, log.base)
        for record in log.records[self._applied : applied]:
            if record.kind == WRITE:
                self._image.write(record.offset, record.data)
        self._applied = applied
        if self._state is not None:
            self._state.close()
        self._state = self._image.copy()
        for index in writes:
            offset, data = log.records[index].offset, log.records[index].data
            for start, length in pieces.get(index, [(0, len(data))]):
                self._state.write(offset + start, data[start : start + length])
        return self._state.path

    def keep(self, path, about: dict) -> None:
        """Save the state being served, with what was written to it, as the base of a new log."""
        if self._state is None:
            raise DeviceFailed(explain("no crash state is being served", do="call serve() first"))
        base = extents(self._state.read, self._state.size, self._state.filled())
        DeviceLog(self._state.size, about, base).save(path)

    def close(self) -> None:
        self._end_recording()
        self._forget_states()

    def _loaded(self) -> DeviceLog:
        if self._log is None:
            raise DeviceFailed(explain("there is no device yet", do="call load() first"))
        return self._log

    def _tell(self, name: str, content: dict) -> None:
        if name not in self._files:
            raise DeviceFailed(explain("nothing is being recorded", do="call record() first"))
        line = json.dumps(content, sort_keys=True).encode() + b"\n"
        try:
            done = os.pwrite(self._files[name], line, 0)
        except OSError as error:
            raise DeviceFailed(
                explain("the device server does not answer", path=self._folder,
                        found=error.strerror, do="record again"),
                self._folder,
            ) from error  # fmt: skip
        assert done == len(line)  # the kernel splits it, and the server takes every piece

    def _close_files(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _end_recording(self) -> None:
        self._close_files()
        self._recording.close()

    def _forget_states(self) -> None:
        for image in (self._image, self._state):
            if image is not None:
                image.close()
        self._image = self._state = None
        self._applied = 0


def _check(log: DeviceLog, applied: int, writes: Sequence[int], torn: dict) -> None:
    """Refuse a state that is none of this log's; a wrong index would else show another one."""
    count = len(log.records)
    wrong = None if 0 <= applied <= count else f"all before record {applied}"
    for index in writes:
        if not (applied <= index < count and log.records[index].kind == WRITE):
            wrong = f"record {index} on top of all before record {applied}"
    for index, pieces in torn.items():
        if index not in writes:
            wrong = f"record {index} torn, which is not among the writes"
        elif any(start < 0 or length < 1 or start + length > len(log.records[index])
                 for start, length in pieces):  # fmt: skip
            wrong = f"record {index} of {len(log.records[index])} bytes torn into {pieces}"
    if wrong:
        raise DeviceFailed(
            explain("no crash state of this log", expected=f"writes among its {count} records",
                    found=wrong)
        )  # fmt: skip


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Offer a :class:`Server` for the length of a block; ``folder`` is where a recording is shown.

    Call :func:`.mounts.private_namespace` before, so that the mount is nobody else's.
    """
    server = Server(Path(folder))
    try:
        yield server
    finally:
        server.close()


@functools.cache
def library():
    """The module mfusepy, on libfuse 3: on 2 it would cut all writes into single pages.

    Raises
    ------
    ImportError, OSError, AttributeError
        It, or the library, is not there.
    """
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")  # it would else look for 2 first
    return importlib.import_module("mfusepy")


@contextlib.contextmanager
def _server(log: DeviceLog, folder: Path) -> Iterator[None]:
    """A process that shows a recording device in a folder, for the length of a block."""
    library()  # here, once, rather than in each child
    folder.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        child = mounts.fork()
        if child == 0:
            _serve(log, folder, writer)
        os.close(writer)
        try:
            _wait_until_mounted(pipe, folder)
            yield
        finally:
            with contextlib.suppress(OSError):  # it was never mounted
                mounts.unmount(str(folder), lazily=True)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _serve(log: DeviceLog, folder: Path, writer: int) -> None:
    """What the server process does; it never returns.

    Once it shows the device, it leaves the mounts of its parent. If both are killed, the last one
    to hold a mount takes it down while it ends; this process would write out the file system on a
    device that it does not serve any more, and wait for itself for ever.
    """

    def started() -> None:
        mounts.private_namespace()
        mounts.unmount(str(folder), lazily=True)  # here only
        os.write(3, b"+")

    try:
        os.setsid()  # Ctrl-C is for those who use the device, and then still need it to unmount
        os.dup2(writer, 3)  # and nothing else of the parent's: it may have loop devices open
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 3:
                with contextlib.suppress(OSError):  # the one of the list itself
                    os.close(descriptor)
        gc.disable()  # a file object of the parent's must not close its number, now another file's
        library().FUSE(_Recorder(log, started), str(folder), raw_fi=True, foreground=True,
                       nothreads=True, attr_timeout=3600, entry_timeout=3600,
                       fsname="ckptlib")  # fmt: skip
    except BaseException as error:
        os.write(3, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(1)


def _wait_until_mounted(pipe, folder: Path) -> None:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    found = pipe.read(2**16) if poll.poll(START_S * 1000) else b"no answer in time"
    if found != b"+":
        raise DeviceFailed(
            explain("the FUSE server did not start", path=folder,
                    found=found.decode(errors="replace") or "that it died",
                    do="see that fuse3 is installed and /dev/fuse may be opened"),
            folder,
        )  # fmt: skip
