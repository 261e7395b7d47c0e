"""Damage to the bytes of one file, as a table of faults; never touches anything but that file.

The first four are those of J. Jeon, arXiv:2511.18323, Table 4. A fault is an entry of
:data:`FAULTS`: a function from the bytes of a file to other bytes, and whether a checker is obliged
to notice, which is declared here and thus before anything runs. Damage comes after a save: a
manifest written over damaged parts would certify them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptlib.errors import CkptError, InvalidInput, explain
from ckptlib.manifests import COMMIT, MANIFEST, from_bytes
from ckptlib.sidecars import SUFFIX

if TYPE_CHECKING:
    from numpy.random import Generator

ZERORANGE_SHARE = 0.01  # of the file, at most; the paper's


@dataclass(frozen=True)
class Fault:
    """One kind of damage.

    Attributes
    ----------
    name : as it stands in results
    says : what it does, for captions
    alter : from the bytes of a file and a generator to the damaged bytes and a description
    meaningful : whether a change that it makes is one that a checker must notice
    """

    name: str
    says: str
    alter: Callable[[bytes, Generator], tuple[bytes, str]]
    meaningful: bool = True


@dataclass(frozen=True)
class Applied:
    """What a fault did to a file.

    ``bytes_changed`` counts bytes that differ from before, bytes cut off or added included.
    ``effective`` says that a checker must notice: something changed, and it has a meaning.
    """

    path: str
    bytes_changed: int
    effective: bool
    description: str


def _none(data: bytes, rng: Generator) -> tuple[bytes, str]:
    return data, "left as it is"


def _bitflip(data: bytes, rng: Generator) -> tuple[bytes, str]:
    if not data:
        return data, "an empty file has no bit to flip"
    byte, bit = divmod(int(rng.integers(8 * len(data))), 8)
    damaged = bytearray(data)
    damaged[byte] ^= 1 << bit
    return bytes(damaged), f"bit {bit} of byte {byte} flipped"


def _longest_range(data: bytes) -> int:
    return max(1, int(len(data) * ZERORANGE_SHARE))


def _zerorange(data: bytes, rng: Generator) -> tuple[bytes, str]:
    if not data:
        return data, "an empty file has no range to zero"
    start = int(rng.integers(len(data)))
    length = int(rng.integers(1, _longest_range(data), endpoint=True))
    end = min(start + length, len(data))
    return data[:start] + bytes(end - start) + data[end:], f"bytes {start} to {end - 1} zeroed"


def _truncate(data: bytes, rng: Generator) -> tuple[bytes, str]:
    kept = len(data) // 2
    return data[:kept], f"cut to {kept} of {len(data)} bytes"


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("none", "control", _none, meaningful=False),
        Fault("bitflip", "one random bit flipped", _bitflip),
        Fault("zerorange", "a random range of up to 1% of the file set to zero", _zerorange),
        Fault("truncate", "the second half cut off", _truncate),
    )
}


def _parts(directory: str) -> list[str]:
    """Part files of a step directory, in the order of its manifest."""
    path = os.path.join(directory, MANIFEST)
    with open(path, "rb") as file:
        manifest = from_bytes(file.read(), path)
    return [os.path.join(directory, entry.file) for entry in manifest.entries]


#: What of a checkpoint may be damaged: name -> function from its path to the files concerned.
TARGETS: dict[str, Callable[[str], list[str]]] = {
    "file": lambda path: [path],
    "sidecar": lambda path: [path + SUFFIX],
    "part": _parts,
    "manifest": lambda directory: [os.path.join(directory, MANIFEST)],
    "commit": lambda directory: [os.path.join(directory, COMMIT)],
}


def _entry(table: dict, name: str, what: str):
    if name not in table:
        raise InvalidInput(
            explain(f"unknown {what}", expected=", ".join(table), found=repr(name), do="choose one")
        )
    return table[name]


def choose(checkpoint, target: str, rng: Generator) -> str:
    """Draw one of the files that a target of :data:`TARGETS` stands for.

    Parameters
    ----------
    checkpoint : path-like
        A file written by ``install``, or a step directory.

    Raises
    ------
    InvalidInput
        There is no such target.
    """
    files = _entry(TARGETS, target, "target")(os.fspath(checkpoint))
    return files[int(rng.integers(len(files)))]


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """Open a file for damage; a name that leads to another file as well is refused."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise InvalidInput(
                explain(
                    "only a regular file with one name is damaged",
                    path=path,
                    found=f"{stat.filemode(status.st_mode)} with {status.st_nlink} names",
                    do="damage a copy",
                ),
                path,
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def _overwrite(descriptor: int, data: bytes) -> None:
    # not emptied first: ext4 flushes a file that was cut to nothing and written anew
    with open(descriptor, "r+b", closefd=False) as file:
        file.seek(0)
        file.write(data)
        file.truncate()


def _differing(before: bytes, after: bytes) -> int:
    import numpy

    common = min(len(before), len(after))
    arrays = (numpy.frombuffer(data, numpy.uint8, common) for data in (before, after))
    changed = int(numpy.count_nonzero(numpy.not_equal(*arrays))) if common else 0
    return changed + abs(len(before) - len(after))


def apply(path, fault: str, rng: Generator) -> Applied:
    """Damage one file in place.

    Parameters
    ----------
    path : path-like
        A regular file with one name; links are refused, since the damage would show elsewhere.
    fault : str
        Name in :data:`FAULTS`.
    rng : numpy.random.Generator
        Where in the file; equal states give equal damage.

    Raises
    ------
    InvalidInput
        There is no such fault, or the file is not one that may be damaged.
    OSError
        The file cannot be read or written.
    """
    path = os.fspath(path)
    entry = _entry(FAULTS, fault, "fault")
    with _opened(path) as descriptor:
        before = _read(descriptor)
        after, description = entry.alter(before, rng)
        if after != before:
            _overwrite(descriptor, after)
    changed = _differing(before, after)
    return Applied(path, changed, entry.meaningful and changed > 0, description)


def chance_of_no_op(data: bytes) -> float:
    """Probability that the fault ``zerorange`` changes nothing, because all it hits is zero.

    Every start in the file and every length up to the longest are equally likely, so this is exact:
    no sampling.
    """
    import numpy

    if not data:
        return 1.0
    places = numpy.arange(len(data))
    nonzero = numpy.flatnonzero(numpy.frombuffer(data, numpy.uint8))
    longest = _longest_range(data)
    # a range that reaches the end of the file is cut there, so zeros at the end suffice for any
    ends = numpy.append(nonzero, len(data) + longest)[numpy.searchsorted(nonzero, places)]
    return float(numpy.minimum(ends - places, longest).mean() / longest)


@contextlib.contextmanager
def damaged(path, fault: str, rng: Generator) -> Iterator[Applied]:
    """Damage a file for the length of a block and put its bytes back; see :func:`apply`.

    Raises
    ------
    CkptError
        After the block the file's SHA-256 is not what it was before.
    """
    path = os.fspath(path)
    with _opened(path) as descriptor:
        original = _read(descriptor)
    try:
        yield apply(path, fault, rng)
    finally:
        with _opened(path) as descriptor:
            _overwrite(descriptor, original)
            expected, found = (
                hashlib.sha256(data).hexdigest() for data in (original, _read(descriptor))
            )
        if found != expected:
            raise CkptError(
                explain("the damage could not be undone", path=path, expected=expected,
                        found=found, do="remove this file"),
                path,
            )  # fmt: skip
