"""The search for the newest valid checkpoint; nothing is loaded before its hash has matched.

Newest commit first, every candidate is checked in full, and whatever is passed over is reported.
That there is nothing to load is told apart from that nothing was ever saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptlib import guard
from ckptlib.catalog import Candidate, Catalog
from ckptlib.errors import (
    CorruptCheckpoint,
    InvalidInput,
    NoValidCheckpoint,
    StoreEmpty,
    explain,
)
from ckptlib.guard import INVALID, Verdict
from ckptlib.manifests import COMMIT, MANIFEST
from ckptlib.vfs import VFS

ATTEMPTS = 100  # at a listing that a writer changes while it is being read


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over, and why."""

    step: int
    path: str
    verdict: Verdict

    def __str__(self) -> str:
        return f"step {self.step}: {self.verdict}"


@dataclass(frozen=True)
class Found:
    """A loaded checkpoint: ``parts`` by name, and what was passed over on the way to it."""

    step: int
    sequence: int
    path: str
    manifest_digest: str
    parts: dict[str, object]
    skipped: list[Skipped] = field(default_factory=list)


@dataclass(frozen=True)
class Wanted:
    """What a caller of ``load`` asks for; see :meth:`ckptlib.CheckpointStore.load`.

    ``begun`` is False if the store's own memory says that this run has not saved anything yet.
    """

    run: str
    begun: bool = True
    map_location: object = None
    finite: bool = False
    allow_empty: bool = False
    expect: str | None = None


def newest(vfs: VFS, catalog: Catalog, wanted: Wanted) -> Found | None:
    """Load the newest valid checkpoint of a run, or say why there is none.

    Raises
    ------
    StoreEmpty, NoValidCheckpoint, CorruptCheckpoint, InvalidInput
        As :meth:`ckptlib.CheckpointStore.load`.
    """
    expected = None if wanted.expect is None else _parse_head(wanted.expect)
    skipped: list[Skipped] = []
    for _ in range(ATTEMPTS):
        before = catalog.names()
        candidates = catalog.candidates()
        # without a manifest there is no order: these are passed over first, and reported only if
        # they stand at a later step than what is found
        skipped = [Skipped(c.step, c.path, c.verdict) for c in candidates if not c.manifest]
        for candidate in filter(lambda c: c.manifest, candidates):
            found = _load(vfs, candidate, skipped, wanted)
            if found is not None:
                catalog.remember(candidate)
                if expected is not None:
                    _check_lineage(found, candidates, *expected)
                return found
        if catalog.names() == before:
            break  # else a writer pruned what was listed: look again
    return _nothing(catalog, skipped, wanted)


def _load(vfs: VFS, candidate: Candidate, skipped: list[Skipped], wanted: Wanted) -> Found | None:
    def skip(verdict: Verdict) -> None:
        skipped.append(Skipped(candidate.step, candidate.path, verdict))

    if candidate.manifest.run != wanted.run:
        reason = f"it belongs to run {candidate.manifest.run!r}, not {wanted.run!r}"
        return skip(Verdict(INVALID, "run", reason, candidate.path))
    checked = guard.check_group(candidate.path, step=candidate.step, vfs=vfs, keep_open=True)
    try:
        if not checked.verdict:
            return skip(checked.verdict)
        manifest = checked.manifest
        if manifest.run != wanted.run:
            return skip(Verdict(INVALID, "identity", "it changed meanwhile", candidate.path))
        parts = guard.load_parts(checked, wanted.map_location, finite=wanted.finite)
    except CorruptCheckpoint as error:
        return skip(error.verdict)
    finally:
        checked.close()
    unordered = COMMIT, MANIFEST
    passed = [s for s in skipped if s.step > manifest.step or s.verdict.file not in unordered]
    return Found(
        manifest.step, manifest.sequence, candidate.path, checked.manifest_digest, parts, passed
    )


def _parse_head(expect: str) -> tuple[int, str]:
    sequence, _, digest = expect.partition(":") if isinstance(expect, str) else ("", "", "")
    if not (sequence.isdigit() and digest):
        raise InvalidInput(
            explain("unusable expect", expected="what head() returned", found=repr(expect)[:100])
        )
    return int(sequence), digest


def _check_lineage(found: Found, candidates: list[Candidate], sequence: int, digest: str) -> None:
    """Follow the predecessors down to the expected commit, or to where pruning cut them off."""
    records = {c.digest: c.manifest for c in candidates if c.manifest}
    reached = found.manifest_digest
    while reached in records and records[reached].sequence > sequence:
        reached = records[reached].previous
    if reached == digest or (found.sequence > sequence and reached not in records):
        return
    raise CorruptCheckpoint(
        explain(
            "the newest checkpoint does not descend from the expected one",
            path=found.path,
            expected=f"commit {sequence}:{digest[:12]}... in its lineage",
            found=f"commit {found.sequence}:{found.manifest_digest[:12]}...",
            do="check whether this store was rolled back to an earlier state",
        ),
        found.path,
    )


def _nothing(catalog: Catalog, skipped: list[Skipped], wanted: Wanted) -> None:
    if _was_committed(catalog, skipped, wanted):
        raise NoValidCheckpoint(
            explain(
                "no checkpoint here may be loaded",
                path=catalog.root,
                found="; ".join(map(str, skipped[:5])) or None,
                do="look into the quarantine folder or restore a copy; a fresh start needs "
                "new_run=True",
            ),
            catalog.root,
            skipped,
        )
    if not wanted.allow_empty:
        raise StoreEmpty(
            explain(
                "no checkpoint was ever committed here",
                path=catalog.root,
                do="pass allow_empty=True to start from scratch",
            ),
            catalog.root,
        )


def _was_committed(catalog: Catalog, skipped: list[Skipped], wanted: Wanted) -> bool:
    """Whether anything shows that this run once had a checkpoint: then none is an alarm."""
    others = {s.path for s in skipped if s.verdict.layer == "run"}
    mine = [s for s in skipped if s.path not in others]
    if any(not (s.verdict.absent and s.verdict.file == COMMIT) for s in mine):
        return True
    return wanted.begun and catalog.committed_before(wanted.run, others)
