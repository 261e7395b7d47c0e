"""The sidecar of a single file: which digests its bytes may have; it is parsed as untrusted input.

``NAME.sha256.json`` lists one digest at rest and two while a replacement is under way, the one to
come first. An entry that was only observed (an older file without a record of its own) is marked,
so that nothing is ever called valid on the strength of having been found lying there.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass

from ckptlib.digests import sha256_file
from ckptlib.errors import CorruptCheckpoint, explain
from ckptlib.vfs import VFS

SUFFIX = ".sha256.json"
SCHEMA = "ckptlib.sidecar/1"
MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class Digest:
    """SHA-256 (hexadecimal) and size in bytes that a file may have; ``observed``: not recorded."""

    sha256: str
    size: int
    observed: bool = False


def canonical(document: dict) -> bytes:
    """JSON bytes that follow from the content alone: sorted keys, no spaces, one newline."""
    return (
        json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True) + "\n"
    ).encode()


def parse(data: bytes, path: str) -> dict:
    """Decode untrusted JSON bytes to a dictionary or raise CorruptCheckpoint."""
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(
            explain(
                "not readable as JSON",
                path=path,
                found=str(error)[:200],
                do="restore it or use an older checkpoint",
            ),
            path,
        ) from None
    if not isinstance(document, dict):
        raise CorruptCheckpoint(
            explain("not a JSON object", path=path, found=type(document).__name__), path
        )
    return document


def read_small(vfs: VFS, path: str, limit: int) -> bytes:
    """Read a whole small file, or raise CorruptCheckpoint if it is larger than ``limit`` bytes."""
    file = vfs.open(path)
    try:
        size = file.stat().st_size
        if size > limit:
            raise CorruptCheckpoint(
                explain(
                    "too large", path=path, expected=f"at most {limit} bytes", found=f"{size} bytes"
                ),
                path,
            )
        data, buffer = bytearray(), bytearray(size + 1)  # one more, to see that it ends there
        while len(data) <= size and (n := file.readinto(buffer)):
            data += buffer[:n]
        return bytes(data)
    finally:
        with contextlib.suppress(OSError):  # after reading, it says nothing
            file.close()


def is_sha256(text) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")


def is_size(value) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def to_bytes(target: str, *digests: Digest) -> bytes:
    """The sidecar's bytes for a target and the digests that it may have, newest first."""
    listed = [
        {"observed": d.observed, "sha256": d.sha256, "size": d.size} for d in dict.fromkeys(digests)
    ]
    return canonical({"schema": SCHEMA, "file": os.path.basename(target), "digests": listed})


def read(vfs: VFS, target: str) -> list[Digest]:
    """The digests on record for ``target``.

    Raises
    ------
    FileNotFoundError
        There is no sidecar.
    CorruptCheckpoint
        It is not one of ours, or is about another file.
    """
    path = target + SUFFIX
    data = read_small(vfs, path, MAX_BYTES)
    document = parse(data, path)
    name, entries = os.path.basename(target), document.get("digests")
    if document.get("schema") != SCHEMA or document.get("file") != name:
        raise CorruptCheckpoint(
            explain(
                "this sidecar is not about this file",
                path=path,
                expected=f"{SCHEMA}, {name}",
                found=f"{document.get('schema')!r}, {document.get('file')!r}"[:200],
            ),
            path,
        )
    try:
        digests = [Digest(e["sha256"], e["size"], e["observed"]) for e in entries]
    except (TypeError, KeyError):
        digests = []
    if not digests or not all(
        is_sha256(d.sha256) and is_size(d.size) and type(d.observed) is bool for d in digests
    ):
        raise CorruptCheckpoint(explain("the sidecar's digests are malformed", path=path), path)
    if data != to_bytes(target, *digests):  # nothing else watches over a sidecar's own bytes
        raise CorruptCheckpoint(explain("the sidecar is not in canonical form", path=path), path)
    return digests


def vouched(vfs: VFS, target: str) -> list[Digest]:
    """What to list for the file about to be replaced.

    Its recorded digest as it stands; where an earlier crash left two on record, the one that the
    bytes have; where there is no usable record, the observed digest, marked as such.
    """
    try:
        recorded = read(vfs, target)
    except (FileNotFoundError, CorruptCheckpoint):
        recorded = []
    if len(recorded) == 1:
        return recorded
    file = vfs.open(target)
    try:
        sha256, size = sha256_file(file)
    finally:
        file.close()
    matching = [d for d in recorded if (d.sha256, d.size) == (sha256, size)]
    return matching[:1] or recorded[:1] or [Digest(sha256, size, observed=True)]
