"""Table 4: damage to saved checkpoints, what objects to it, and what recovery then finds.

A trial damages the newest checkpoint of a run after its save() has returned, judges it by the guard
in use and by the paper's five layers, recovers, and puts the bytes back. No trial leaves damage
behind: the SHA-256 of the file is compared after each. Two kinds of checkpoint: ``file``, one file
written by ``install`` with its sidecar, and ``group``, several files in a store.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from ckptlib import guard
from ckptlib.catalog import step_name
from ckptlib.diagnosis import LAYERS, Expectation, diagnose
from ckptlib.digests import content_digest
from ckptlib.errors import CorruptCheckpoint, NoValidCheckpoint
from ckptlib.experiments import payloads
from ckptlib.faults import corruption as faults
from ckptlib.formats import torch_format
from ckptlib.formats.schema import schema_of
from ckptlib.store import CheckpointStore
from ckptlib.write_modes import WriteMode, install

if TYPE_CHECKING:  # the notebook that plans the trials needs no tensor library
    import numpy

KINDS = ("file", "group")
#: The paper's faults, the control first.
FAULTS = ("none", "bitflip", "zerorange", "truncate")
EPOCHS_BETWEEN_SAVES = 3  # the paper's; only labels here, since nothing is trained
MODE = WriteMode.atomic_dirsync
#: Fields of a trial that make a batch: the trials of one run of saves.
BATCH = ("kind", "seed")


def plan(
    *,
    seed: int,
    seeds: int,
    saves: int,
    kinds: Sequence[str] = KINDS,
    faults: Sequence[str] = FAULTS,
) -> list[dict]:
    """List the trials: every fault on every checkpoint of every run.

    Parameters
    ----------
    seed : int
        The first seed; runs have the seeds from here on.
    seeds, saves : int
        Runs, and checkpoints in each.
    kinds, faults : sequence of str

    Returns
    -------
    list of dict
        ``seeds * saves * len(kinds) * len(faults)`` trials.
    """
    cells = [
        {"kind": kind, "seed": seed + run, "step": save * EPOCHS_BETWEEN_SAVES, "fault": fault}
        for kind in kinds
        for run in range(seeds)
        for save in range(1, saves + 1)
        for fault in faults
    ]
    return [{"trial_id": f"{number:06d}", **cell} for number, cell in enumerate(cells)]


def generator(seed: int, *words: int | str) -> numpy.random.Generator:
    """A generator for one purpose; names enter by checksum, so a longer list shifts nothing."""
    import numpy

    entropy = [zlib.crc32(word.encode()) if isinstance(word, str) else word for word in words]
    return numpy.random.default_rng(numpy.random.SeedSequence([seed, *entropy]))


class _Files:
    """A run that keeps each checkpoint in a file of its own, with a sidecar."""

    target = "file"

    def __init__(self, folder: Path, seed: int):
        self._folder, self._seed = folder, seed
        self._expected: dict[str, Expectation] = {}

    def path(self, step: int) -> str:
        return str(self._folder / f"{step_name(step)}{torch_format.SUFFIX}")

    def save(self, step: int) -> str:
        """Save the checkpoint of a step; return its content digest."""
        state, path = payloads.network(self._seed, step), self.path(step)
        receipt = install(path, lambda sink: torch_format.save(state, sink), MODE)
        digest = content_digest(state)
        self._expected[path] = Expectation(receipt.sha256, receipt.bytes, digest, schema_of(state))
        return digest

    def expectation(self, path: str) -> Expectation:
        """What was recorded of a file when it was saved."""
        return self._expected[path]

    def label(self, path: str) -> str:
        return "checkpoint.pt"  # its name holds the step, which has a column already

    def recover(self) -> tuple[int, str] | None:
        """The newest step whose file is intact, and the digest of what was loaded from it."""
        for path in sorted(self._expected, reverse=True):
            try:
                state = guard.load_file(path)
            except CorruptCheckpoint:
                continue
            step = Path(path).stem.removeprefix("step-")
            return int(step), content_digest(state)
        return None


class _Groups:
    """A run that keeps each checkpoint as a committed group in a store."""

    target = "part"

    def __init__(self, folder: Path, seed: int):
        self._folder, self._seed = str(folder), seed
        self._store = CheckpointStore(
            folder, mode=MODE, run_id=f"seed-{seed}", content_digests=True
        )
        self._expected: dict[str, Expectation] = {}

    def path(self, step: int) -> str:
        return os.path.join(self._folder, step_name(step))

    def save(self, step: int) -> str:
        """Save the checkpoint of a step; return the content digest of all its parts."""
        parts = payloads.group(self._seed, step)
        path = self._store.save(step, parts).path
        for entry in guard.check_group(path, step=step).manifest.entries:
            self._expected[os.path.join(path, entry.file)] = Expectation.of(entry)
        return content_digest(parts)

    def expectation(self, path: str) -> Expectation:
        """What the store recorded of a part."""
        return self._expected[path]

    def label(self, path: str) -> str:
        return os.path.basename(path)

    def recover(self) -> tuple[int, str] | None:
        """What a process that opens the store anew would go on from."""
        try:
            found = CheckpointStore(self._folder).load()
        except NoValidCheckpoint:
            return None
        return found.step, content_digest(found.parts)


_SERIES = {"file": _Files, "group": _Groups}


def run_batch(trials: list[dict], scratch: Path) -> list[dict]:
    """Run trials, those of one kind and seed on one run of saves.

    The run starts with a checkpoint that is never damaged, so that there is always one to roll back
    to. Each later one is damaged while it is the newest, once for each of its trials.

    Returns
    -------
    list of dict
        Rows of the output ``corruption``.
    """
    ordered = sorted(trials, key=lambda trial: (*(trial[name] for name in BATCH), trial["step"]))
    rows = []
    for (kind, seed), members in groupby(ordered, lambda t: tuple(t[name] for name in BATCH)):
        folder = Path(scratch) / f"{kind}-{seed}"
        folder.mkdir(parents=True)
        rows += _run(_SERIES[kind](folder, seed), list(members))
    return rows


def _run(series: _Files | _Groups, trials: list[dict]) -> Iterator[dict]:
    digests = {0: series.save(0)}
    for step, members in groupby(trials, lambda trial: trial["step"]):
        before = max(digests)
        digests[step] = series.save(step)
        for trial in members:
            yield _trial(series, trial, before, digests)


def _trial(series: _Files | _Groups, trial: dict, before: int, digests: dict[int, str]) -> dict:
    step, path = trial["step"], series.path(trial["step"])
    rng = generator(trial["seed"], step, trial["kind"], trial["fault"])
    file = faults.choose(path, series.target, rng)
    wanted = series.expectation(file)
    with faults.damaged(file, trial["fault"], rng) as damage:
        verdict = guard.verify(path)
        diagnosis = diagnose(file, wanted)
        recovered = series.recover()
    intact = before if damage.effective else step
    return {
        **trial,
        "target": series.label(file),
        "bytes_changed": damage.bytes_changed,
        "effective": damage.effective,
        "detected": verdict.status != guard.VALID,
        "layer": diagnosis.layer,
        **{name: getattr(diagnosis, name) for name in LAYERS},
        "acknowledged_step": step,
        "recovered_step": recovered[0] if recovered else None,
        "rollback_ok": recovered == (intact, digests[intact]),
    }
