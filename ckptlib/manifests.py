"""What is on record about a group: MANIFEST.json and COMMIT.json; both are untrusted when read.

The manifest binds run, step and sequence to the size and SHA-256 of each part. The commit record
binds the manifest; its bytes follow from the manifest alone, so that any change to either shows.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from ckptlib.errors import CorruptCheckpoint, InvalidInput, UntrustedPath, explain
from ckptlib.sidecars import canonical, is_sha256, is_size, parse

MANIFEST = "MANIFEST.json"
COMMIT = "COMMIT.json"
SCHEMA = "ckptlib.manifest/1"
COMMIT_SCHEMA = "ckptlib.commit/1"
MAX_MANIFEST = 16 << 20  # bytes: room for about 10,000 parts with their schemas
MAX_COMMIT = 4096
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\Z")
MAX_NAME = 100  # characters of a part's name; its file name has a suffix of at most 20 more


class NewerSchema(CorruptCheckpoint):
    """The record was written by a later version; whether it is sound cannot be judged by this."""


def check_name(name, what: str = "part name", most: int = MAX_NAME) -> str:
    """Accept a name that stays inside its directory, or raise InvalidInput."""
    usable = isinstance(name, str) and len(name) <= most and _NAME.match(name)
    if not usable or name in (MANIFEST, COMMIT):
        raise InvalidInput(
            explain(
                f"unusable {what}",
                expected=f"letters, digits, '_', '.', '+', '-', at most {most}, no leading '.'",
                found=repr(name)[:200],
                do="rename it",
            )
        )
    return name


@dataclass(frozen=True)
class Entry:
    """One part as recorded: file name, format, size in bytes, SHA-256; optionally its content.

    ``sha256`` is None where no digest was recorded, ``content`` is a content digest and ``schema``
    maps tensor keys to ``[dtype, shape]``; both are None unless the store was asked for them.
    """

    name: str
    file: str
    format: str
    size: int
    sha256: str | None
    content: str | None = None
    schema: dict | None = None


@dataclass(frozen=True)
class Manifest:
    """A group's identity and its parts.

    ``sequence`` is the commit's number in its store, ``previous`` the manifest digest of the
    checkpoint it followed (lineage only: that one may have been pruned since).
    """

    run: str
    step: int
    sequence: int
    previous: str | None
    entries: tuple[Entry, ...]

    def to_bytes(self) -> bytes:
        parts = {}
        for entry in self.entries:
            fields = {k: v for k, v in vars(entry).items() if k != "name"}
            parts[entry.name] = {k: v for k, v in fields.items() if v is not None}
        return canonical(
            {
                "schema": SCHEMA,
                "run": self.run,
                "step": self.step,
                "sequence": self.sequence,
                "previous": self.previous,
                "parts": parts,
            }
        )


def digest(data: bytes) -> str:
    """SHA-256 of a record's bytes."""
    return hashlib.sha256(data).hexdigest()


def commit_bytes(manifest: bytes) -> bytes:
    """The only commit record that fits a manifest."""
    return canonical(
        {
            "schema": COMMIT_SCHEMA,
            "manifest_sha256": digest(manifest),
            "manifest_size": len(manifest),
        }
    )


def check_schema(document: dict, known: str, path: str) -> None:
    """Tell a record of a later version (NewerSchema) from one that is not ours at all."""
    found = document.get("schema")
    if found == known:
        return
    family, _, version = known.rpartition("/")
    match = isinstance(found, str) and re.fullmatch(re.escape(family) + r"/(\d{1,6})", found)
    kind = NewerSchema if match and int(match[1]) > int(version) else CorruptCheckpoint
    raise kind(
        explain(
            "unknown schema",
            path=path,
            expected=known,
            found=repr(found)[:100],
            do="read it with the version that wrote it" if kind is NewerSchema else None,
        ),
        path,
    )


def from_bytes(data: bytes, path: str) -> Manifest:
    """Parse a manifest that may hold anything.

    Raises
    ------
    NewerSchema, CorruptCheckpoint, UntrustedPath
    """
    document = parse(data, path)
    check_schema(document, SCHEMA, path)

    def demand(holds: bool, what: str) -> None:
        if not holds:
            raise CorruptCheckpoint(explain(f"malformed manifest: {what}", path=path), path)

    run, step, sequence = (document.get(k) for k in ("run", "step", "sequence"))
    previous, parts = document.get("previous"), document.get("parts")
    demand(isinstance(run, str) and 0 < len(run) <= 200, "run")
    demand(is_size(step) and is_size(sequence), "step or sequence")
    demand(previous is None or is_sha256(previous), "previous")
    demand(isinstance(parts, dict) and bool(parts), "parts")
    entries, files = [], set()
    for name, fields in parts.items():
        demand(isinstance(fields, dict), f"part {name[:80]!r}")
        file = fields.get("file")
        try:
            check_name(name)
            check_name(file, "file name", MAX_NAME + 20)
        except InvalidInput as error:
            raise UntrustedPath(explain(str(error), path=path), path) from None
        demand(file not in files, f"file {file!r} named twice")
        files.add(file)
        sha256, content, schema = (fields.get(k) for k in ("sha256", "content", "schema"))
        demand(is_size(fields.get("size")), f"size of {name}")
        demand(sha256 is None or is_sha256(sha256), f"sha256 of {name}")
        demand(content is None or is_sha256(content), f"content of {name}")
        demand(schema is None or isinstance(schema, dict), f"schema of {name}")
        demand(isinstance(fields.get("format"), str), f"format of {name}")
        entries.append(Entry(name, file, fields["format"], fields["size"], sha256, content, schema))
    return Manifest(run, step, sequence, previous, tuple(entries))
