"""Checkpoints of a training run in one directory; no failure may cost the last valid one.

store = CheckpointStore("runs/digits")
receipt = store.save(step, {"model": model.state_dict(), "optimizer": opt.state_dict()})
found = store.load()
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from ckptlib import formats, groups, guard, housekeeping, recovery, temps
from ckptlib.catalog import LATEST, STORE, Candidate, Catalog, step_name
from ckptlib.errors import (
    AlreadyExists,
    CkptError,
    CommittedNotDurable,
    InvalidInput,
    ReadFailed,
    UnsupportedState,
    explain,
)
from ckptlib.guard import INDETERMINATE, INVALID, VALID, Verdict
from ckptlib.manifests import check_name
from ckptlib.recovery import Found
from ckptlib.streams import as_source, operation
from ckptlib.vfs import REAL, VFS
from ckptlib.write_modes import Flushes, WriteMode, check_path, put


@dataclass(frozen=True)
class Receipt:
    """What a save did.

    ``bytes`` counts all files of the checkpoint, ``seconds`` the whole call, ``flush_calls`` the
    file and directory flushes, ``primitive`` the ones that ran. ``durable`` is True only if every
    flush that the mode needs completed with a full-flush primitive on a file system that is not
    memory; ``reason`` says why, or why not. A device that lies is beyond anybody's knowledge.
    """

    step: int
    path: str
    sequence: int
    manifest_digest: str
    bytes: int
    seconds: float
    flush_calls: int
    primitive: str
    durable: bool
    reason: str


@dataclass(frozen=True)
class Scrubbed:
    """One checkpoint as :meth:`CheckpointStore.scrub` found it; ``moved_to`` if quarantined."""

    step: int
    path: str
    verdict: Verdict
    moved_to: str = ""


def _check_count(name: str, value, least: int, most: int = 10**18 - 1) -> int:
    if type(value) is not int or not least <= value <= most:
        raise InvalidInput(
            explain(f"unusable {name}", expected=f"a whole number, {least} or more",
                    found=repr(value))
        )  # fmt: skip
    return value


class CheckpointStore:
    """Save, load the newest valid checkpoint, roll back, prune, scrub.

    Parameters
    ----------
    path : path-like
        The store's directory; made by the first save.
    mode : WriteMode or str
        ``unsafe``, ``atomic_nodirsync`` or ``atomic_dirsync``.
    run_id : str, optional
        Which run this is. Without it the run that the store remembers is continued.
    new_run : bool
        Start a new run in this folder; older runs' checkpoints stay and are never loaded by it.
    keep : int, optional
        After each save keep only so many valid checkpoints of this run (1 or more).
    protocol : str, optional
        ``batched`` (the default where it exists), ``per_file``, or ``artifact``.
    format : str
        Container of the parts: ``torch``, ``safetensors`` or ``numpy``.
    content_digests : bool
        Record each part's content digest and schema too, for diagnosis.
    vfs : VFS
        The file system to act on.
    """

    def __init__(
        self,
        path,
        *,
        mode="atomic_dirsync",
        run_id: str | None = None,
        new_run: bool = False,
        keep: int | None = None,
        protocol: str | None = None,
        format: str = "torch",
        content_digests: bool = False,
        vfs: VFS = REAL,
    ):
        self.path = check_path(path)
        self.mode = WriteMode.of(mode)
        protocol = groups.default_protocol(self.mode) if protocol is None else protocol
        self.protocol = groups.check_protocol(protocol, self.mode)
        self.keep = None if keep is None else _check_count("keep", keep, 1)
        self.format, self._format = format, formats.get
        if format not in formats.FORMATS:
            formats.get(format)  # raises the right error
        self.content_digests = content_digests
        self._vfs, self._catalog = vfs, Catalog(vfs, self.path)
        self._rooted = False  # whether this object has seen to the store's own directory
        self._remembered = self._catalog.remembered_run()
        self.run_id = self._choose_run(run_id, new_run)

    def _choose_run(self, run_id: str | None, new_run: bool) -> str:
        if run_id is not None:
            if not (isinstance(run_id, str) and 0 < len(run_id) <= 200):
                raise InvalidInput(explain("unusable run_id", expected="1 to 200 characters",
                                           found=repr(run_id)[:200]))  # fmt: skip
            return run_id
        if new_run:
            return uuid.uuid4().hex
        if self._remembered is not None:
            return self._remembered
        # STORE.json is missing or damaged: what is committed says which run this is
        committed = [c for c in self._catalog.candidates() if c.manifest]
        return committed[0].manifest.run if committed else uuid.uuid4().hex

    # -- saving ---------------------------------------------------------------------------------

    def save(self, step: int, parts: Mapping[str, object]) -> Receipt:
        """Save the parts of a state as the checkpoint of ``step`` and commit them together.

        Parameters
        ----------
        step : int
            0 or more; a committed, valid step is write-once.
        parts : mapping of str to state
            For example ``{"model": model.state_dict(), "optimizer": opt.state_dict()}``.

        Returns
        -------
        Receipt

        Raises
        ------
        UnsupportedState
            A part holds something that could not be loaded back; nothing was written.
        AlreadyExists, StoreBusy
        ReadFailed
            An earlier checkpoint's record cannot be read just now, so that this one could not be
            ordered after it; nothing was written.
        WriteFailed
            A step failed before the commit; earlier checkpoints are untouched.
        CommittedNotDurable
            The checkpoint is complete and in place, but a flush after the commit failed.
        """
        started = time.perf_counter()
        _check_count("step", step, 0)
        prepared = self._prepare(parts)
        flushes = Flushes(os.path.join(self.path, STORE), self.mode)
        if not self._rooted:
            housekeeping.make_directories(self._vfs, self.path, flushes)
            self._rooted = True
        with housekeeping.writer(self._vfs, self.path):
            self._remember_run(flushes)
            directory = os.path.join(self.path, step_name(step))
            self._clear_the_way(step, directory, flushes)
            identity = self._next_identity(step)

            def receipt(manifest_digest: str, size: int, durable: bool, reason: str) -> Receipt:
                seconds = time.perf_counter() - started
                return Receipt(step, directory, identity.sequence, manifest_digest, size, seconds,
                               flushes.calls, flushes.primitive, durable, reason)  # fmt: skip

            try:
                written = groups.write_group(
                    self._vfs, directory, prepared, identity, self.mode, self.protocol, flushes
                )
            except CommittedNotDurable as error:
                written = error.receipt
                digest, size = written.manifest_digest, written.bytes
                error.receipt = receipt(digest, size, False, str(error))
                raise
            durable, reason = flushes.durable()
            if durable and self.protocol == "artifact":
                durable, reason = False, "the directory of step directories was not flushed"
            self._catalog.remember(
                Candidate(
                    step, directory, written.manifest, written.manifest_digest, Verdict(VALID)
                )
            )
            reason += self._after_commit(step)
            return receipt(written.manifest_digest, written.bytes, durable, reason)

    def _prepare(self, parts: Mapping[str, object]) -> list[groups.Part]:
        """Everything that can be refused is refused here, before anything is written."""
        if not isinstance(parts, Mapping) or not parts:
            raise InvalidInput(explain("nothing to save", expected="a mapping of part to state",
                                       found=type(parts).__name__))  # fmt: skip
        if len({str(name).casefold() for name in parts}) < len(parts):
            raise InvalidInput(
                explain("part names differ in case only", found=", ".join(map(str, parts)),
                        do="rename one: on many disks they would be one file")
            )  # fmt: skip
        container = formats.get(self.format)
        prepared = []
        for name, state in parts.items():
            check_name(name)
            try:
                container.check(state)
                content = schema = None
                if self.content_digests:
                    from ckptlib.digests import content_digest
                    from ckptlib.formats.schema import schema_of

                    content, schema = content_digest(state), schema_of(state)
            except UnsupportedState as error:
                key = f"{name}/{error.key}".rstrip("/")
                raise UnsupportedState(f"part {name!r}: {error}", key) from None
            prepared.append(
                groups.Part(name, name + container.SUFFIX, self.format,
                            lambda sink, state=state: container.save(state, sink),
                            content, schema)
            )  # fmt: skip
        return prepared

    def _remember_run(self, flushes: Flushes) -> None:
        if self._remembered != self.run_id:
            text = self._catalog.store_bytes(self.run_id)
            put(self._vfs, os.path.join(self.path, STORE), as_source(text), self.mode, flushes)
            self._remembered = self.run_id

    def _clear_the_way(self, step: int, directory: str, flushes: Flushes) -> None:
        with operation("stat", directory):
            if not self._vfs.exists(directory):
                return
        checked = guard.check_group(directory, step=step, vfs=self._vfs)
        verdict = checked.verdict
        if verdict.status != INVALID:
            what = "is committed" if verdict else f"may not be touched ({verdict})"
            if checked.manifest and checked.manifest.run != self.run_id:
                what += f" by another run, {checked.manifest.run!r}"
            raise AlreadyExists(
                explain(f"step {step} {what}", path=directory,
                        do="save at another step or in another folder; committed steps are "
                        "write-once"),
                directory,
            )  # fmt: skip
        housekeeping.quarantine(self._vfs, self.path, directory, flushes)

    def _next_identity(self, step: int) -> groups.Identity:
        candidates = self._catalog.candidates(cached=True)
        committed = [c for c in candidates if c.manifest]
        mine = [c for c in committed if c.manifest.run == self.run_id]
        aside = [m.sequence for m in self._catalog.quarantined() if m]
        for candidate in candidates:
            if candidate.uncommitted():  # its writer is dead, since this process has the lock
                temps.sweep(self._vfs, candidate.path, own_all=True)
            if candidate.verdict.status == INDETERMINATE:
                raise ReadFailed(
                    explain("this save cannot be put in order", path=candidate.path,
                            found=str(candidate.verdict),
                            do="try again; if it stays so, move that directory elsewhere"),
                    candidate.path, candidate.verdict.errno, "read",
                )  # fmt: skip
        # a record that is damaged may have held the number that follows: leave it out
        hidden = sum(not c.manifest and not c.uncommitted() for c in candidates)
        sequence = max([c.sequence for c in committed] + aside, default=0) + hidden + 1
        return groups.Identity(self.run_id, step, sequence, mine[0].digest if mine else None)

    def _after_commit(self, step: int) -> str:
        """Pointer and retention. The checkpoint is safe by now, so failures become remarks."""
        remarks = ""
        try:
            housekeeping.point_latest(self._vfs, self.path, step)
        except OSError as error:
            remarks += f"; {LATEST} was not updated ({error})"
        if self.keep is not None:
            try:
                self._prune(self.keep)
            except (OSError, CkptError) as error:
                remarks += f"; older checkpoints were not pruned ({error})"
        return remarks

    # -- loading --------------------------------------------------------------------------------

    def load(
        self,
        map_location=None,
        *,
        finite: bool = False,
        allow_empty: bool = False,
        expect: str | None = None,
    ) -> Found | None:
        """Load the newest valid checkpoint of this run, passing over every other one.

        Parameters
        ----------
        map_location
            Where tensors go, as for ``torch.load``.
        finite : bool
            Refuse checkpoints that hold NaN or infinity as well.
        allow_empty : bool
            Return None where nothing was ever committed, so that training may start afresh.
        expect : str, optional
            What :meth:`head` returned and was kept elsewhere: the checkpoint found must be that one
            or a later one of its lineage, so that a store rolled back as a whole shows.

        Returns
        -------
        Found or None

        Raises
        ------
        StoreEmpty
            Nothing was ever committed here.
        NoValidCheckpoint
            Checkpoints exist, none is valid; ``skipped`` on the exception says why for each.
        CorruptCheckpoint
            ``expect`` is not in the lineage of what was found.
        """
        begun = self._remembered in (None, self.run_id)
        wanted = recovery.Wanted(self.run_id, begun, map_location, finite, allow_empty, expect)
        return recovery.newest(self._vfs, self._catalog, wanted)

    # -- looking after the store ------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Committed steps of this run by their records, newest commit first; not verified."""
        return [c.step for c in self._mine()]

    def _mine(self) -> list[Candidate]:
        candidates = self._catalog.candidates()
        return [c for c in candidates if c.manifest and c.manifest.run == self.run_id]

    def verify(self, step: int) -> Verdict:
        """Judge one step without loading it; see :func:`ckptlib.verify`."""
        directory = os.path.join(self.path, step_name(_check_count("step", step, 0)))
        return guard.check_group(directory, step=step, vfs=self._vfs).verdict

    def latest(self) -> int | None:
        """The newest step that verifies, or None."""
        for candidate in self._mine():
            if guard.check_group(candidate.path, step=candidate.step, vfs=self._vfs).verdict:
                return candidate.step
        return None

    def head(self) -> str | None:
        """``sequence:digest`` of the newest commit, to be kept elsewhere for ``expect``."""
        mine = self._mine()
        return f"{mine[0].sequence}:{mine[0].digest}" if mine else None

    def prune(self, keep: int) -> list[int]:
        """Remove valid checkpoints of this run beyond the newest ``keep``; return their steps.

        Damaged ones do not count and are not touched; the last valid one always stays. Once there
        are ``keep`` valid ones, quarantined directories that never had a commit record are deleted.
        """
        _check_count("keep", keep, 1)
        if not self._exists():
            return []
        with housekeeping.writer(self._vfs, self.path):
            return self._prune(keep)

    def _exists(self) -> bool:
        with operation("stat", self.path, ReadFailed):
            return self._vfs.exists(self.path)

    def _prune(self, keep: int) -> list[int]:
        flushes = Flushes(os.path.join(self.path, STORE), self.mode)
        valid = [c for c in self._mine() if self._catalog.is_valid(c)]
        if len(valid) >= keep:  # with that many to go back to, leftovers of dead writers can go
            with operation("list", self.path):
                housekeeping.drop_uncommitted(self._vfs, self.path, flushes)
        for candidate in valid[keep:]:
            housekeeping.remove(self._vfs, self.path, candidate.path, flushes)
        return [candidate.step for candidate in valid[keep:]]

    def scrub(self) -> list[Scrubbed]:
        """Verify every checkpoint, quarantine those that fail a completed check, report all.

        What could not be judged (an I/O error, a later version's record) stays where it is. The
        pointer ``latest_ok`` is set to the newest valid checkpoint of this run.
        """
        if not self._exists():
            return []
        flushes = Flushes(os.path.join(self.path, STORE), self.mode)
        report, newest = [], None
        with housekeeping.writer(self._vfs, self.path):
            for candidate in self._catalog.candidates():
                checked = guard.check_group(candidate.path, step=candidate.step, vfs=self._vfs)
                moved = ""
                if checked.verdict.status == INVALID:
                    moved = housekeeping.quarantine(self._vfs, self.path, candidate.path, flushes)
                elif checked.verdict and checked.manifest.run == self.run_id and newest is None:
                    newest = candidate.step
                report.append(Scrubbed(candidate.step, candidate.path, checked.verdict, moved))
            if newest is not None:
                housekeeping.point_latest(self._vfs, self.path, newest)
        return report
