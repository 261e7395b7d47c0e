"""A recorded block device as a file: its first content, then writes, flushes and marks in order.

The file is for keeping and for handing on, so it is read as untrusted input: each entry has a
CRC-32, the whole a SHA-256, and nothing is allocated on the word of a length field.

Layout (little-endian)::

    CKPTBLK1 magic
    entry*   <4s kind> <I raw> <I stored> <Q offset> <I crc32> body
    kinds   HEAD  JSON: the device's size in bytes, and whatever the recorder says of the run
            BASE  bytes that the device held at ``offset`` at first; zeros elsewhere
            WRIT  a write of these bytes at ``offset`` that the device has completed
            FLSH  a completed flush: whatever stands before it is on the medium
            MARK  JSON: a label that the application put into the same order
            DONE  SHA-256 of everything before it

``raw`` is the length of the bytes, ``stored`` that of the zlib stream they are kept as; equal
lengths mean that they are kept as they are. The CRC covers the entry's kind, offset and raw bytes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckptlib.errors import CkptError, InvalidInput, explain

MAGIC = b"CKPTBLK1"
WRITE, FLUSH, MARK = "write", "flush", "mark"
BLOCK = 4096  # bytes; the grain of base extents
CHUNK = 2**20
MAX_DEVICE = 2**32  # bytes of device
MAX_ENTRY = 2**26  # bytes in one entry; the kernel's requests are far smaller
MAX_CONTENT = 2**30  # bytes in all entries of a log together, unpacked
_ENTRY = struct.Struct("<4sIIQI")
_KINDS = {b"WRIT": WRITE, b"FLSH": FLUSH, b"MARK": MARK}
_NAMES = {name: kind for kind, name in _KINDS.items()}


class CorruptLog(CkptError):
    """The file is not a complete, undamaged device log."""


@dataclass(frozen=True)
class Record:
    """One thing that happened: a write of ``data`` at byte ``offset``, a flush, or a mark."""

    kind: str
    offset: int = 0
    data: bytes = field(default=b"", repr=False)
    mark: dict = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.data)


@dataclass
class DeviceLog:
    """A device of ``size`` bytes: its first content as extents, and the records that followed.

    ``about`` says what was run: file system, workload, seed, kernel.
    """

    size: int
    about: dict = field(default_factory=dict)
    base: list[tuple[int, bytes]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def marks(self, name: str) -> Iterator[tuple[int, dict]]:
        """Index and content of each mark that has the key ``name``."""
        for index, record in enumerate(self.records):
            if record.kind == MARK and name in record.mark:
                yield index, record.mark

    def to_bytes(self) -> bytes:
        """The file; the same log gives the same bytes.

        Raises
        ------
        InvalidInput
            It could not be read back: too large, or something lies outside of the device.
        """
        self._check()
        out = bytearray(MAGIC)
        head = {**self.about, "size": self.size}
        out += _pack(b"HEAD", 0, _json(head))
        for offset, data in self.base:
            out += _pack(b"BASE", offset, data)
        for record in self.records:
            body = _json(record.mark) if record.kind == MARK else record.data
            out += _pack(_NAMES[record.kind], record.offset, body)
        out += _pack(b"DONE", 0, hashlib.sha256(out).digest())
        return bytes(out)

    def _check(self) -> None:
        pieces = [*self.base, *((r.offset, r.data) for r in self.records)]
        largest = max((len(data) for _, data in pieces), default=0)
        end = max((offset + len(data) for offset, data in pieces), default=0)
        content = sum(len(data) for _, data in pieces)
        if not (0 < self.size <= MAX_DEVICE and end <= self.size) or (
            largest > MAX_ENTRY or content > MAX_CONTENT or "size" in self.about
        ):
            raise InvalidInput(
                explain("this device log could not be read back",
                        expected=f"at most {MAX_CONTENT} bytes, in pieces of at most {MAX_ENTRY}, "
                        f"within a device of at most {MAX_DEVICE}, and no other `size` about it",
                        found=f"{content} bytes, in pieces of at most {largest}, up to byte {end} "
                        f"of {self.size}", do="record less in one log")
            )  # fmt: skip

    def save(self, path: str | Path) -> str:
        """Write the file whole or not at all; return its SHA-256."""
        data, target = self.to_bytes(), Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            temporary.write_bytes(data)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        return hashlib.sha256(data).hexdigest()

    @classmethod
    def load(cls, path: str | Path) -> DeviceLog:
        """Read a file back.

        Raises
        ------
        CorruptLog
            It is cut short, altered, or not such a file; what was expected and found is named.
        """
        source = Path(path)
        try:
            data = source.read_bytes()
        except OSError as error:
            raise CorruptLog(
                explain("this device log cannot be read", path=source, found=error.strerror), source
            ) from error
        return cls.from_bytes(data, source)

    @classmethod
    def from_bytes(cls, data: bytes, path=None) -> DeviceLog:
        """:meth:`load` from memory; ``path`` is for messages."""
        return _Reader(data, path).log()


def filled(descriptor: int, start: int, end: int) -> list[tuple[int, int]]:
    """Where a sparse file holds data between two offsets, as offset and length."""
    found, offset = [], start
    while offset < end:
        try:
            offset = os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # only a hole is left
        hole = min(end, os.lseek(descriptor, offset, os.SEEK_HOLE))
        if offset < hole:
            found.append((offset, hole - offset))
        offset = hole
    return found


def extents(
    read, size: int, ranges: Iterable[tuple[int, int]] | None = None
) -> list[tuple[int, bytes]]:
    """What is not zero on a device, in runs of whole blocks, none longer than an entry may be.

    Parameters
    ----------
    read : callable
        ``read(offset, length) -> bytes``.
    size : int
        Of the device, in bytes.
    ranges : iterable of (int, int), optional
        Where anything else than zeros can be, as offset and length, in any order; everywhere by
        default.
    """
    found: list[tuple[int, bytearray]] = []
    done = 0  # everything before this offset was read
    for start, length in sorted([(0, size)] if ranges is None else ranges):
        first = max(done, start // BLOCK * BLOCK)
        last = min(size, -(-(start + length) // BLOCK) * BLOCK)
        for offset in range(first, last, CHUNK):
            chunk = read(offset, min(CHUNK, last - offset))
            for inner in range(0, len(chunk), BLOCK) if chunk.strip(b"\0") else ():
                block = chunk[inner : inner + BLOCK]
                if not block.strip(b"\0"):
                    continue
                place, data = found[-1] if found else (0, b"")
                if found and place + len(data) == offset + inner and len(data) < MAX_ENTRY:
                    data.extend(block)
                else:
                    found.append((offset + inner, bytearray(block)))
        done = max(done, last)
    return [(offset, bytes(data)) for offset, data in found]


def _json(value: dict) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _crc(kind: bytes, offset: int, raw: bytes) -> int:
    return zlib.crc32(raw, zlib.crc32(kind + offset.to_bytes(8, "little")))


def _pack(kind: bytes, offset: int, raw: bytes) -> bytes:
    small = zlib.compress(raw, 6)
    stored = small if len(small) < len(raw) else raw
    return _ENTRY.pack(kind, len(raw), len(stored), offset, _crc(kind, offset, raw)) + stored


class _Reader:
    """One pass over the bytes of a file; every length is checked before it is believed."""

    def __init__(self, data: bytes, path=None):
        self._data, self._path = data, path
        self._at = self._start = 0  # where it reads, and where this entry began
        self._content = 0

    def _wrong(self, expected: str, found: str) -> CorruptLog:
        return CorruptLog(
            explain(f"this device log is wrong at byte {self._start}", path=self._path,
                    expected=expected, found=found,
                    do="record it again, or fetch an undamaged copy"),
            self._path,
        )  # fmt: skip

    def _take(self, length: int, what: str) -> bytes:
        piece = self._data[self._at : self._at + length]
        if len(piece) < length:
            raise self._wrong(f"{length} bytes of {what}", f"the end after {len(piece)}")
        self._at += length
        return piece

    def _entry(self) -> tuple[bytes, int, bytes]:
        self._start = self._at
        kind, raw, stored, offset, crc = _ENTRY.unpack(self._take(_ENTRY.size, "an entry"))
        if raw > MAX_ENTRY or stored > raw:
            raise self._wrong(f"an entry of at most {MAX_ENTRY} bytes", f"{raw}, kept as {stored}")
        self._content += raw
        if self._content > MAX_CONTENT:
            raise self._wrong(f"at most {MAX_CONTENT} bytes in all", f"{self._content} so far")
        body = self._take(stored, "an entry's content")
        if stored < raw:
            body = self._unpacked(body, raw)
        if _crc(kind, offset, body) != crc:
            raise self._wrong("an entry that matches its CRC-32", f"a damaged {kind!r} entry")
        return kind, offset, body

    def _unpacked(self, stored: bytes, raw: int) -> bytes:
        unpacker = zlib.decompressobj()
        try:
            body = unpacker.decompress(stored, raw + 1)  # no more, whatever the stream holds
        except zlib.error as error:
            raise self._wrong("a zlib stream", str(error)) from error
        if len(body) != raw or not unpacker.eof or unpacker.unused_data:
            raise self._wrong(f"a zlib stream of {raw} bytes", "a longer or shorter one")
        return body

    def _dictionary(self, body: bytes) -> dict:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise self._wrong("JSON", str(error)) from error
        if not isinstance(value, dict):
            raise self._wrong("a JSON object", type(value).__name__)
        return value

    def log(self) -> DeviceLog:
        if self._take(len(MAGIC), "the magic") != MAGIC:
            raise self._wrong(repr(MAGIC), repr(self._data[: len(MAGIC)]))
        kind, offset, body = self._entry()
        about = self._dictionary(body) if kind == b"HEAD" and not offset else {}
        size = about.pop("size", None)
        if type(size) is not int or not 0 < size <= MAX_DEVICE:
            raise self._wrong(f"a HEAD with a size of 1 to {MAX_DEVICE}", repr(size))
        log = DeviceLog(size, about)
        while True:
            kind, offset, body = self._entry()
            if kind not in (b"BASE", b"WRIT") and (offset or (kind == b"FLSH" and body)):
                raise self._wrong("bytes and an offset in BASE and WRIT only", repr(kind))
            if kind == b"DONE":
                break
            if kind in (b"BASE", b"WRIT") and offset + len(body) > size:
                raise self._wrong(f"writes within {size} bytes", f"{len(body)} at {offset}")
            if kind == b"BASE" and not log.records:
                log.base.append((offset, body))
            elif kind == b"MARK":
                log.records.append(Record(MARK, mark=self._dictionary(body)))
            elif kind in _KINDS:
                log.records.append(Record(_KINDS[kind], offset, body))
            else:
                raise self._wrong("one of BASE (first), WRIT, FLSH, MARK, DONE", repr(kind))
        if body != hashlib.sha256(memoryview(self._data)[: self._start]).digest():
            raise self._wrong("the SHA-256 of everything before", "another")
        self._start = self._at
        if self._at != len(self._data):
            raise self._wrong("the end", f"{len(self._data) - self._at} bytes more")
        return log
