"""Operations that fail: what can go wrong with one, and what is right to do about it.

:func:`right` is written down before anything is tried. A fault strikes once, at a chosen operation
of a flow, and everything after it works again: a writer that goes on as if nothing had happened has
every opportunity to do so.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from ckptlib.vfs import VFS, LayeredVFS, Operation

ERRNOS = (
    *("EIO", "ENOSPC", "EDQUOT", "EINTR", "EACCES", "EROFS", "EMFILE", "ENAMETOOLONG"),
)  # fmt: skip
SHORT, NOTHING, LIE = "short write", "zero-byte write", "lying flush"
FAULTS = (*ERRNOS, SHORT, NOTHING, LIE)
SAYS = {
    "EINTR": "a signal interrupts the system call, once",
    SHORT: "the file takes one byte of many, and says so",
    NOTHING: "the file takes nothing, and says so",
    LIE: "the flush fails with EIO, the bytes are lost, and the next flush says that all is well",
}

#: What can come of a flow in which an operation failed.
ABSORBED = "absorbed"  # done as if nothing had been
RETRIED = "retried"  # done, with the bytes in a fresh file
REMARKED = "remarked"  # done, and the receipt says what was left undone after the commit
REFUSED = "refused"  # a typed error: path, operation, errno; nothing was committed
COMMITTED = "committed, not durable"  # an error that carries the receipt of what is in place
RESULTS = (ABSORBED, RETRIED, REMARKED, REFUSED, COMMITTED)

#: When, in a flow, an operation happens: before its commit, as the commit's own directory flush,
#: or after it.
EARLY, FINISHING, LATE = "before the commit", "flush of the commit", "after the commit"

LOOKING = ("stat", "list", "open", "read", "readlink")
CLEARING = ("unlink", "rmdir")


def applies(op: Operation, fault: str) -> bool:
    """Whether a fault can befall an operation."""
    if fault in (SHORT, NOTHING):
        return op.call == "write" and op.size > 1
    if fault == LIE:
        return op.call in ("flush", "flush_dir")
    return True


def right(call: str, fault: str, when: str) -> tuple[str, ...]:
    """What may come of it, for each kind of operation and fault; anything else is a defect.

    Where several results stand, it depends on what the operation is for. Looking around: a flow
    that would have to guess refuses, and one that only tidies up passes over. Clearing away: a
    leftover stands in nobody's way, unless it is where the save has to go.
    """
    if fault in ("EINTR", SHORT, NOTHING):
        return (ABSORBED,)
    if call == "flush":
        return (RETRIED,)  # never on the same file
    if call in LOOKING or call in CLEARING or call == "close":
        return (ABSORBED, REFUSED) if when == EARLY else (ABSORBED, REMARKED)
    if call in ("replace", "rename") and fault == "EACCES":
        return (ABSORBED,)  # as from a virus scanner's or a network share's lock, which passes
    if call == "flush_dir" and when == FINISHING:
        return (COMMITTED,)
    return (REFUSED,) if when == EARLY else (REMARKED,)


class InterruptedVFS(VFS):
    """The real file system, with a signal that arrives in the middle of a system call."""

    armed = False

    def once(self, call: Callable, *arguments):
        if self.armed:
            self.armed = False
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        return super().once(call, *arguments)


class FailingVFS(LayeredVFS):
    """Has a fault befall the operation of one number, counted from 0."""

    def __init__(self, index: int, fault: str):
        super().__init__(InterruptedVFS())
        self.index, self.fault = index, fault
        self.struck: Operation | None = None
        self._lost: set[str] = set()

    def around(self, op: Operation, call: Callable):
        if op.index == self.index:
            self.struck = op
            return self._strike(op, call)
        if op.call == "create":
            self._lost.discard(op.path)  # a fresh file
        if op.call in ("flush", "flush_dir") and op.path in self._lost:
            return "fsync"  # the kernel reports a lost page once (fsyncgate), then no more
        return call()

    def _strike(self, op: Operation, call: Callable):
        if self.fault == "EINTR":
            self.inner.armed = True
            try:
                return call()
            finally:
                self.inner.armed = False
        if self.fault == SHORT:
            return call(op.data[:1])
        if self.fault == NOTHING:
            return 0
        if self.fault == LIE:
            self._lost.add(op.path)
            if op.call == "flush":
                _lose(op.path, op.size)
            raise OSError(errno.EIO, os.strerror(errno.EIO), op.path)
        if op.call == "close":  # the descriptor is gone, whatever close() says
            call()
        number = getattr(errno, self.fault)
        raise OSError(number, os.strerror(number), op.path)


def _lose(path: str, size: int) -> None:
    """What the kernel may do to dirty pages that it could not write: the bytes are gone."""
    with open(path, "r+b") as file:
        file.write(bytes(size))
