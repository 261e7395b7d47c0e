"""A real SIGKILL at a chosen file operation; it never strikes any process but a child of its own.

A flow is run once on a :class:`ckptlib.vfs.RecordingVFS`; from its trace a :class:`Point` is looked
up by what happens there (:func:`before`, :func:`halfway`, :func:`installed`) or taken one after the
other (:func:`every_point`). :func:`run_killed` then runs the same flow in a child process that is
killed at that point, and says what the child had acknowledged until then.

The page cache outlives a killed process, so nothing here says anything about flushes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ckptlib import temps
from ckptlib.errors import CkptError, InvalidInput, explain
from ckptlib.vfs import REAL, VFS, LayeredVFS, Operation

BEFORE, DURING, AFTER = "before", "during", "after"
PAGE, PAGES = 4096, 4  # bytes; page boundaries of a write that are tried, at most
TIMEOUT_S = 60.0  # after which a child is taken to hang
_ENDED, _FAILED = 0, 1
Action = Callable[[VFS, Callable[[int], None]], None]


class KillFailed(CkptError):
    """The child did not die as planned: it hung, failed, outlived its point, or fell to another."""


@dataclass(frozen=True)
class Point:
    """Where in a flow to strike.

    ``index`` counts the operations of the flow from 0; ``position`` is ``before``, ``during`` (a
    write of which only the first ``prefix`` bytes are done) or ``after``. ``call`` and ``name`` say
    what the trace had there, so that a flow which takes another course is noticed.
    """

    index: int
    position: str
    call: str
    name: str
    prefix: int = 0

    @classmethod
    def at(cls, op: Operation, position: str, prefix: int = 0) -> Point:
        """The point at an operation of a trace."""
        return cls(op.index, position, op.call, name_of(op), prefix)


def name_of(op: Operation) -> str:
    """The file an operation is about, the same in every process: temporary names are left out."""
    name = os.path.basename(op.target or op.path)
    return "(temporary)" if temps.is_temp(name) else name


# -- looking points up in a trace -------------------------------------------------------------


def every_point(operations: Sequence[Operation]) -> Iterator[Point]:
    """Before and after every operation of a trace, and in the middle of every write.

    A write is cut after its first byte, after half of it, before its last byte, and at some of the
    boundaries of pages.
    """
    for op in operations:
        yield Point.at(op, BEFORE)
        if op.call == "write":
            for prefix in _prefixes(op.size):
                yield Point.at(op, DURING, prefix)
        yield Point.at(op, AFTER)


def _prefixes(size: int) -> list[int]:
    """How many bytes of a write are done when it is cut; never none and never all."""
    pages = range(PAGE, size, PAGE)
    chosen = {1, size // 2, size - 1, *pages[:: -(-len(pages) // PAGES) or 1]}
    return sorted(prefix for prefix in chosen if 0 < prefix < size)


def before(operations: Sequence[Operation], name: str) -> Point:
    """Before the file that ends up as ``name`` is begun, under whatever name it is written."""
    return Point.at(_creation(operations, name), BEFORE)


def halfway(operations: Sequence[Operation], name: str) -> Point:
    """When half the bytes of the file that ends up as ``name`` have been written."""
    created = _creation(operations, name)
    writes = [
        op
        for op in operations
        if op.call == "write" and op.path == created.path and op.index > created.index
    ]
    half = sum(op.size for op in writes) // 2
    for op in writes:
        if op.offset <= half < op.offset + op.size:
            return Point.at(op, DURING, max(1, half - op.offset))
    raise _not_found(name, "two bytes of it are written")


def installed(operations: Sequence[Operation], name: str) -> Point:
    """After the operation by which the file gets its final name: its own rename, its directory's,
    or, where it is written in place, its close."""
    created = _creation(operations, name)
    later = [op for op in operations if op.index > created.index]
    naming = {("replace", created.path), ("rename", os.path.dirname(created.path))}
    for calls in (naming, {("close", created.path)}):
        for op in later:
            if (op.call, op.path) in calls:
                return Point.at(op, AFTER)
    raise _not_found(name, "it gets its final name")


def _creation(operations: Sequence[Operation], name: str) -> Operation:
    """The last creation of the file that ends up as ``name``."""
    finals = {op.path: op.target for op in operations if op.call == "replace"}
    for op in reversed(operations):
        final = finals.get(op.path, op.path)
        if op.call == "create" and os.path.basename(final) == name:
            return op
    raise _not_found(name, "it is created")


def _not_found(name: str, what: str) -> InvalidInput:
    return InvalidInput(
        explain(
            "the trace has no such crash point",
            expected=f"an operation by which {what}",
            found=f"none for {name!r}",
            do="record a complete run of the flow, and name a file that it writes",
        )
    )


# -- striking ---------------------------------------------------------------------------------


class StrikingVFS(LayeredVFS):
    """Calls :meth:`strike` at a point, and passes everything else on."""

    def __init__(self, point: Point, inner: VFS | None = None):
        super().__init__(inner)
        self.point = point

    def strike(self) -> None:
        """What happens at the point."""
        raise NotImplementedError

    def around(self, op: Operation, call: Callable):
        if op.index != self.point.index:
            return call()
        self._recognise(op)
        if self.point.position == BEFORE:
            self.strike()
        elif self.point.position == DURING:
            done = 0
            while done < self.point.prefix:  # the system may write less than it is given
                done += call(op.data[done : self.point.prefix])
            self.strike()
        try:
            return call()
        finally:  # also after a call that fails, since a flow may expect that
            self.strike()

    def _recognise(self, op: Operation) -> None:
        there = (op.call, name_of(op))
        if there != (self.point.call, self.point.name) or self.point.prefix > op.size:
            raise KillFailed(
                explain(
                    f"operation {op.index} is not the one in the trace",
                    path=op.path,
                    expected=f"{self.point.call} {self.point.name}, {self.point.prefix}+ bytes",
                    found=f"{op.call} {name_of(op)}, {op.size} bytes",
                    do="record the trace on a store of the same name in the same state",
                ),
                op.path,
            )


class KillingVFS(StrikingVFS):
    """Kills its own process at the point; only in a child that :func:`run_killed` started."""

    def strike(self) -> None:
        die()


_announce: Callable[[tuple], None] | None = None  # set in a child of run_killed, nowhere else


def die() -> None:
    """SIGKILL this process, which must be a child of :func:`run_killed`.

    Raises
    ------
    KillFailed
        It is not: a notebook's kernel or a worker must not kill itself.
    """
    if _announce is None:
        raise KillFailed(
            explain("this process may not be killed", do="strike inside run_killed only")
        )
    _announce(("struck", None))
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # the signal is delivered before kill() returns (POSIX), so this is never reached
        time.sleep(1)


# -- the child --------------------------------------------------------------------------------


def run_killed(
    action: Action,
    point: Point | None = None,
    *,
    survives: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> list[int]:
    """Run a flow in a child process that dies of a real SIGKILL on the way.

    Parameters
    ----------
    action : callable
        ``action(vfs, acknowledge)``: works on ``vfs`` and calls ``acknowledge(step)`` as soon as a
        save has returned. On macOS, where a process with threads cannot be forked safely, the child
        comes from Python's fork server, and ``action`` must be picklable (a module-level function,
        a method of something picklable, or a partial of one).
    point : Point, optional
        Where to strike. Without one the action calls :func:`die` itself, or survives.
    survives : bool
        The child is meant to end by itself: the control without a crash.
    timeout_s : float
        Seconds after which the child is killed from outside and KillFailed is raised.

    Returns
    -------
    list of int
        The acknowledged steps, in order.

    Raises
    ------
    KillFailed
        The child hung, raised an error (its traceback is in the message), ended although it should
        have died, or died of something else than its own SIGKILL.
    """
    reader, writer = multiprocessing.Pipe(duplex=False)
    start = _from_server if sys.platform == "darwin" else _fork
    pid, wait = start(action, point, reader, writer)
    writer.close()
    try:
        acknowledged, struck, error = _listen(reader, time.monotonic() + timeout_s)
    except BaseException:  # a timeout, or Ctrl-C: the child must not stay behind
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        status = wait()
        reader.close()
    if error:
        raise KillFailed(f"the child failed where it should have gone on:\n{error}")
    if survives and status == _ENDED and not struck:
        return acknowledged
    if not survives and struck and status == -signal.SIGKILL:
        return acknowledged
    raise KillFailed(
        explain(
            "the child did not die as planned",
            expected="to end by itself" if survives else "a SIGKILL from its own hand",
            found=f"exit status {status}, {'' if struck else 'not '}struck",
            do="record the trace again; if the system killed it, free memory",
        )
    )


def _listen(reader, deadline: float) -> tuple[list[int], bool, str]:
    """Collect what the child says until it is gone: acknowledged steps, struck, traceback."""
    acknowledged: list[int] = []
    struck, error = False, ""
    while True:
        if not reader.poll(max(0.0, deadline - time.monotonic())):
            raise KillFailed("the child did not end in time and was killed from outside")
        try:
            kind, value = reader.recv()
        except EOFError:  # the last writer's end is closed: the child is dead or about to be
            return acknowledged, struck, error
        if kind == "acknowledged":
            acknowledged.append(value)
        elif kind == "error":
            error = value
        else:
            struck = True


def _fork(action: Action, point: Point | None, reader, writer):
    with warnings.catch_warnings():
        # Python 3.12 warns of threads in the parent; the child uses none of their locks, and one
        # that should hang after all is killed and reported.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = _FAILED
        try:
            reader.close()
            status = _victim(action, point, writer)
        finally:  # nothing of the parent's (buffers, exit handlers) may run in the child
            os._exit(status)
    return pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _from_server(action: Action, point: Point | None, reader, writer):
    """Fork the child from a server process without threads that has imported what a save needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ckptlib.store", "ckptlib.formats.torch_format", "torch"])
    process = context.Process(target=_served, args=(action, point, writer))
    process.start()

    def wait() -> int:
        process.join()
        return process.exitcode

    return process.pid, wait


def _served(action: Action, point: Point | None, writer) -> None:
    os._exit(_victim(action, point, writer))


def _victim(action: Action, point: Point | None, writer) -> int:
    global _announce
    gc.disable()  # a collection would touch, and so copy, every page shared with the parent
    _announce = writer.send
    try:
        vfs = REAL if point is None else KillingVFS(point)
        action(vfs, lambda step: writer.send(("acknowledged", step)))
    except BaseException:
        writer.send(("error", traceback.format_exc()))
        return _FAILED
    return _ENDED
