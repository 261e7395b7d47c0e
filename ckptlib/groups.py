"""Several files installed as one; a group never counts before its commit record stands.

``per_file``  each part, MANIFEST, COMMIT, each by the write mode, straight into the step directory
              (J. Jeon, arXiv:2511.18323)
``batched``   everything into a temporary sibling directory, all files flushed, one rename
``artifact``  ``per_file`` as the paper's published code does it: the directory that holds the step
              directories is never flushed. For experiments only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from ckptlib import temps
from ckptlib.errors import AlreadyExists, CommittedNotDurable, InvalidInput, WriteFailed, explain
from ckptlib.manifests import COMMIT, MANIFEST, Entry, Manifest, commit_bytes, digest
from ckptlib.streams import (
    Source,
    Written,
    abandon,
    as_source,
    finish,
    operation,
    write_open,
)
from ckptlib.vfs import VFS, File
from ckptlib.write_modes import (
    FLUSH_ATTEMPTS,
    Flushes,
    WriteMode,
    flush_directory,
    patiently,
    put,
)

PROTOCOLS = ("per_file", "batched", "artifact")


@dataclass(frozen=True)
class Part:
    """One part to be written: its name, file name, format and a source that can be replayed."""

    name: str
    file: str
    format: str
    source: Source
    content: str | None = None
    schema: dict | None = None

    def entry(self, written: Written) -> Entry:
        return Entry(
            self.name, self.file, self.format, written.size, written.sha256,
            self.content, self.schema,
        )  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """Which checkpoint a group is: see :class:`ckptlib.manifests.Manifest`."""

    run: str
    step: int
    sequence: int
    previous: str | None


@dataclass(frozen=True)
class GroupWritten:
    """A committed group: its manifest, that manifest's digest, and the bytes of all files."""

    manifest: Manifest
    manifest_digest: str
    bytes: int


def default_protocol(mode: WriteMode) -> str:
    """``batched`` wherever it exists."""
    return "batched" if mode.atomic else "per_file"


def check_protocol(protocol: str, mode: WriteMode) -> str:
    """Accept a protocol for a mode, or raise InvalidInput."""
    if protocol not in PROTOCOLS:
        raise InvalidInput(
            explain("unknown protocol", expected=", ".join(PROTOCOLS), found=repr(protocol),
                    do="choose one")
        )  # fmt: skip
    if protocol == "batched" and not mode.atomic:
        raise InvalidInput(
            explain("unsafe has no batched form, since that is a rename", do="use per_file")
        )
    return protocol


def write_group(
    vfs: VFS,
    directory: str,
    parts: Sequence[Part],
    identity: Identity,
    mode: WriteMode,
    protocol: str,
    flushes: Flushes,
) -> GroupWritten:
    """Write and commit a group as ``directory``, which must not exist.

    Raises
    ------
    WriteFailed
        A step failed before the commit; what was begun is not a checkpoint.
    CommittedNotDurable
        The group is committed, a flush after that failed; ``receipt`` is the GroupWritten.
    AlreadyExists
        Something took the name meanwhile.
    """
    write = _batched if protocol == "batched" else _per_file
    return write(vfs, directory, parts, identity, mode, flushes, outer=protocol != "artifact")


def _records(identity: Identity, entries: list[Entry]) -> tuple[Manifest, bytes, bytes]:
    manifest = Manifest(
        identity.run, identity.step, identity.sequence, identity.previous, tuple(entries)
    )
    text = manifest.to_bytes()
    return manifest, text, commit_bytes(text)


def _result(manifest: Manifest, text: bytes, commit: bytes) -> GroupWritten:
    total = sum(entry.size for entry in manifest.entries) + len(text) + len(commit)
    return GroupWritten(manifest, digest(text), total)


def _per_file(vfs, directory, parts, identity, mode, flushes, *, outer) -> GroupWritten:
    def inside(name: str) -> str:
        return os.path.join(directory, name)

    with operation("mkdir", directory):
        vfs.mkdir(directory)
    if outer and mode.flushes_directories:
        flush_directory(vfs, os.path.dirname(directory), flushes)
    entries = [
        part.entry(put(vfs, inside(part.file), part.source, mode, flushes)) for part in parts
    ]
    manifest, text, commit = _records(identity, entries)
    put(vfs, inside(MANIFEST), as_source(text), mode, flushes)
    try:
        put(vfs, inside(COMMIT), as_source(commit), mode, flushes)
    except WriteFailed as error:
        if error.operation == "flush_dir":  # COMMIT has its name already
            raise _not_durable(directory, error, _result(manifest, text, commit)) from error
        raise
    return _result(manifest, text, commit)


def _batched(vfs, directory, parts, identity, mode, flushes, *, outer) -> GroupWritten:
    parent = os.path.dirname(directory)
    staging = os.path.join(parent, temps.temp_name())
    with operation("mkdir", staging):
        vfs.mkdir(staging)
    opened: dict[str, File] = {}

    def begin(name: str, source: Source) -> Written:
        opened[name], written = write_open(vfs, os.path.join(staging, name), source)
        return written

    try:
        written = {part.file: begin(part.file, part.source) for part in parts}
        manifest, text, commit = _records(identity, [p.entry(written[p.file]) for p in parts])
        records = {MANIFEST: as_source(text), COMMIT: as_source(commit)}
        written |= {name: begin(name, source) for name, source in records.items()}
        # every byte has been handed over before the first flush, so that one journal commit can
        # carry them all
        for name, source in ({part.file: part.source for part in parts} | records).items():
            _flush(vfs, opened[name], written[name], source, flushes)
        if mode.flushes_directories:
            flush_directory(vfs, staging, flushes)
        with operation("rename", directory):
            _rename_free(vfs, staging, directory)
    except BaseException:
        for file in opened.values():
            abandon(vfs, file, remove=False)
        with contextlib.suppress(OSError):
            temps.remove_tree(vfs, staging)
        raise
    if mode.flushes_directories:
        try:
            flush_directory(vfs, parent, flushes)
        except WriteFailed as error:
            raise _not_durable(directory, error, _result(manifest, text, commit)) from error
    return _result(manifest, text, commit)


def _flush(vfs: VFS, file: File, written: Written, source: Source, flushes: Flushes) -> None:
    """Flush one staged file; after a failure its bytes go to a fresh file under the same name."""

    def flush(file: File) -> None:
        flushes.add(file.flush_durable(), written.path)

    for attempt in range(1, FLUSH_ATTEMPTS + 1):
        try:
            finish(vfs, file, flush=flush)
            return
        except WriteFailed as error:
            if error.operation != "flush" or attempt == FLUSH_ATTEMPTS:
                raise
        file, again = write_open(vfs, written.path, source)
        if (again.size, again.sha256) != (written.size, written.sha256):
            abandon(vfs, file, remove=True)
            raise InvalidInput(
                explain("the state changed while it was being saved", path=written.path,
                        do="save a copy, or save when training stands still"),
                written.path,
            )  # fmt: skip


def _rename_free(vfs: VFS, source: str, target: str) -> None:
    # POSIX lets a directory be renamed onto an empty one; a name that is taken is taken
    if vfs.exists(target):
        raise AlreadyExists(
            explain("the name is taken", path=target, do="choose another step"), target
        )
    patiently(lambda: vfs.rename(source, target))


def _not_durable(directory: str, error: WriteFailed, written: GroupWritten) -> CommittedNotDurable:
    return CommittedNotDurable(
        explain("the checkpoint is committed but not known to be durable", path=directory,
                found=str(error), do="save again at a later step when the cause is gone"),
        directory, error.errno, written,
    )  # fmt: skip
