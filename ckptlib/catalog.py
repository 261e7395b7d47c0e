"""What stands in a store's directory and in which order; it looks at records, never at parts.

Order is by run and commit sequence, from committed manifests; directory names and file times are
never trusted for it.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass

from ckptlib import guard, manifests, sidecars
from ckptlib.errors import CkptError, CorruptCheckpoint, ReadFailed
from ckptlib.guard import Verdict
from ckptlib.manifests import COMMIT, MANIFEST, Manifest
from ckptlib.streams import operation
from ckptlib.vfs import VFS

STORE = "STORE.json"
STORE_SCHEMA = "ckptlib.store/1"
LATEST = "latest_ok"
QUARANTINE = "quarantine"
MAX_STORE = 1 << 16
_STEP = re.compile(r"step-(\d{12,18})\Z")


def step_name(step: int) -> str:
    """The directory name of a step."""
    return f"step-{step:012d}"


@dataclass(frozen=True)
class Candidate:
    """A step directory and what its committed manifest says of it, if it has one."""

    step: int
    path: str
    manifest: Manifest | None
    digest: str
    verdict: Verdict

    @property
    def sequence(self) -> int:
        return self.manifest.sequence if self.manifest else -1

    def uncommitted(self) -> bool:
        """Whether it never had a commit record: an unfinished save."""
        return self.verdict.absent and self.verdict.file == COMMIT


class Catalog:
    """Lists a store. ``peeked`` caches manifests by the step directory's inode and mtime."""

    def __init__(self, vfs: VFS, root: str):
        self._vfs, self.root = vfs, root
        self._peeked: dict[str, tuple[tuple, Candidate]] = {}
        self._verified: dict[str, tuple] = {}

    def names(self) -> list[str]:
        with operation("list", self.root, ReadFailed):
            try:
                return self._vfs.list(self.root)
            except FileNotFoundError:
                return []

    def candidates(self, *, cached: bool = False) -> list[Candidate]:
        """Every step directory, newest commit first; those without a manifest last."""
        found = []
        for name in self.names():
            match = _STEP.match(name)
            if match and step_name(int(match[1])) == name:
                found.append(self._peek(name, int(match[1]), cached))
        return sorted(found, key=lambda c: (-c.sequence, -c.step))

    def _peek(self, name: str, step: int, cached: bool) -> Candidate:
        path = os.path.join(self.root, name)
        key = None
        if cached:
            try:
                status = self._vfs.stat(path)
                key = (status.st_ino, status.st_mtime_ns)
            except OSError:
                key = None
            if key is not None and name in self._peeked and self._peeked[name][0] == key:
                return self._peeked[name][1]
        manifest, digest, verdict = guard.peek(self._vfs, path)
        candidate = Candidate(step, path, manifest, digest, verdict)
        if key is not None and manifest is not None:  # a refusal may pass
            self._peeked[name] = (key, candidate)
        return candidate

    def remembered_run(self) -> str | None:
        """The run that STORE.json names, or None if it is missing or damaged.

        Raises
        ------
        ReadFailed
            It cannot be read just now: to take another run for this one would be worse.
        """
        path = os.path.join(self.root, STORE)
        try:
            document = sidecars.parse(sidecars.read_small(self._vfs, path, MAX_STORE), path)
            manifests.check_schema(document, STORE_SCHEMA, path)
        except manifests.NewerSchema:
            raise
        except CorruptCheckpoint:
            return None
        except OSError as error:
            if error.errno in guard.COMPLETED:
                return None
            with operation("read", path, ReadFailed):
                raise
        run = document.get("run")
        return run if isinstance(run, str) and 0 < len(run) <= 200 else None

    def store_bytes(self, run: str) -> bytes:
        return sidecars.canonical({"schema": STORE_SCHEMA, "run": run})

    def committed_before(self, run: str, others: set[str]) -> bool:
        """Whether a pointer or a quarantined directory shows that this run once committed.

        ``others`` are paths of other runs' checkpoints; a pointer to one of them shows nothing.
        """
        try:
            target = os.path.join(self.root, self._vfs.readlink(os.path.join(self.root, LATEST)))
            if target not in others:
                return True
        except OSError:  # no pointer: it is never needed
            pass
        return any(m is None or m.run == run for m in self.quarantined())

    def quarantined(self) -> list[Manifest | None]:
        """The manifest of each quarantined directory that was once committed; None: unreadable."""
        folder = os.path.join(self.root, QUARANTINE)
        try:
            names = self._vfs.list(folder)
        except OSError:  # what was moved aside never stands in the way of a save
            return []
        found = []
        for path in (os.path.join(folder, name) for name in names):
            with contextlib.suppress(OSError):
                if not self._vfs.exists(os.path.join(path, COMMIT)):
                    continue
                record = os.path.join(path, MANIFEST)
                try:
                    text = sidecars.read_small(self._vfs, record, manifests.MAX_MANIFEST)
                    found.append(manifests.from_bytes(text, record))
                except (OSError, CkptError):
                    found.append(None)
        return found

    # -- what has been verified in this process -------------------------------------------------

    def fingerprint(self, candidate: Candidate) -> tuple | None:
        """Inode, size and mtime of every file of a checkpoint, or None if one is gone."""
        if candidate.manifest is None:
            return None
        names = [MANIFEST, COMMIT, *(entry.file for entry in candidate.manifest.entries)]
        try:
            stats = [self._vfs.stat(os.path.join(candidate.path, name)) for name in names]
        except OSError:
            return None
        return tuple((s.st_ino, s.st_size, s.st_mtime_ns) for s in stats)

    def remember(self, candidate: Candidate) -> None:
        """Note that this checkpoint's bytes have been hashed, as they are now."""
        fingerprint = self.fingerprint(candidate)
        if fingerprint is not None:
            self._verified[candidate.path] = fingerprint

    def is_valid(self, candidate: Candidate) -> bool:
        """Verify, at most once per process as long as inodes, sizes and times stay."""
        known = self._verified.get(candidate.path)
        if known is not None and known == self.fingerprint(candidate):
            return True
        if not guard.check_group(candidate.path, step=candidate.step, vfs=self._vfs).verdict:
            return False
        self.remember(candidate)
        return True
