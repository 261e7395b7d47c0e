"""Table 3, Figures 2 and 3: saves that are cut short, and what can be recovered afterwards.

Two methods stand side by side and are never added up. ``artifact`` is the paper's injection, in
which no process dies; ``sigkill`` runs the save in a child process that is really killed. Every
trial has a store of its own with two acknowledged checkpoints in it, is judged by the oracle
in a process that was not killed, and goes on with one more save.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ckptlib import formats
from ckptlib.crashes import kill, oracle
from ckptlib.crashes.kill import Point, StrikingVFS
from ckptlib.crashes.oracle import FILE, Aftermath, Judgement, Ledger
from ckptlib.errors import CkptError, InvalidInput, explain
from ckptlib.experiments import payloads, registry
from ckptlib.experiments.flows import FILE_ARMS, GROUP_ARMS, MODEL, NAME, SINGLE_FILE
from ckptlib.guard import verify
from ckptlib.manifests import COMMIT, MANIFEST
from ckptlib.store import CheckpointStore
from ckptlib.vfs import REAL, VFS, Operation, RecordingVFS
from ckptlib.write_modes import install

Locate = Callable[[list[Operation]], Point]

#: What each crash point means, and how it is found in a recorded trace of the same save.
POINTS: dict[str, tuple[str, Locate | None]] = {
    "none": ("nothing strikes: the control", None),
    "after_model": (
        "half of the model file is written (the name is the paper's)",
        partial(kill.halfway, name=MODEL),
    ),
    "before_manifest": (
        "all parts are written, MANIFEST.json is not begun",
        partial(kill.before, name=MANIFEST),
    ),
    "manifest_partial": (
        "half of MANIFEST.json is written",
        partial(kill.halfway, name=MANIFEST),
    ),
    "before_commit": (
        "MANIFEST.json is written, COMMIT.json is not begun",
        partial(kill.before, name=COMMIT),
    ),
    "before_acknowledge": (
        "COMMIT.json has just got its final name, save() has not returned",
        partial(kill.installed, name=COMMIT),
    ),
}
#: The same for a single file that is being overwritten.
FILE_POINTS: dict[str, tuple[str, Locate | None]] = {
    "none": ("nothing strikes: the control", None),
    "mid_write": ("half of the new file is written", partial(kill.halfway, name=NAME)),
    "before_acknowledge": (
        "the new file has just got its final name, install() has not returned",
        partial(kill.installed, name=NAME),
    ),
}
#: The paper's conditions: where its unsafe writer is disturbed, once a save or once a seed.
ARTIFACT_POINTS = ("before_manifest", "manifest_partial", "before_commit")
EARLIER = 2  # acknowledged checkpoints in every store before the save that is struck


def plan(
    *, seed: int, seeds: int, saves: int, sigkill_seeds: int, sigkill_saves: int
) -> list[dict]:
    """The trials of both methods.

    Parameters
    ----------
    seed : int
        The first seed; the others follow it.
    seeds, saves : int
        Of the method ``artifact``: ``after_model`` and the control are tried at every save of every
        seed, the other points once a seed, at its last save.
    sigkill_seeds, sigkill_saves : int
        Of the method ``sigkill``: every crash point is tried at every save of every seed in every
        arm.

    Raises
    ------
    InvalidInput
        A count is not a whole number, 1 or more.
    """
    counts = dict(
        seeds=seeds, saves=saves, sigkill_seeds=sigkill_seeds, sigkill_saves=sigkill_saves
    )
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise InvalidInput(
                explain(f"unusable {name}", expected="a whole number, 1 or more", found=repr(value))
            )
    steps = [EARLIER + save for save in range(1, saves + 1)]
    cells = [
        *_cells("artifact", [("unsafe", "artifact")], seed, seeds, steps, ["after_model"]),
        *_cells("artifact", [("unsafe", "artifact")], seed, seeds, steps[-1:], ARTIFACT_POINTS),
        *_cells("artifact", [("atomic_dirsync", "artifact")], seed, seeds, steps, ["none"]),
    ]
    steps = [EARLIER + save for save in range(1, sigkill_saves + 1)]
    cells += _cells("sigkill", GROUP_ARMS, seed, sigkill_seeds, steps, POINTS)
    cells += _cells("sigkill", FILE_ARMS, seed, sigkill_seeds, steps, FILE_POINTS)
    return [{"trial_id": f"{number:06d}", **cell} for number, cell in enumerate(cells)]


def _cells(method, arms, seed: int, seeds: int, steps, points) -> Iterator[dict]:
    # steps outside points: the points of one step share the checkpoints that precede it
    grid = itertools.product(arms, range(seed, seed + seeds), steps, points)
    for (mode, protocol), own, step, point in grid:
        yield {
            "method": method, "mode": mode, "protocol": protocol, "crash_point": point,
            "seed": own, "step": step,
        }  # fmt: skip


#: Fields of a trial that make a batch for the engine.
BATCH = ("method", "mode", "protocol", "seed")


def crash_points() -> list[dict[str, str]]:
    """What each crash point means, for showing: one row a point and kind of checkpoint."""
    return [
        {"checkpoint": kind, "crash_point": name, "strikes when": meaning}
        for kind, points in (("group", POINTS), ("single file", FILE_POINTS))
        for name, (meaning, _) in points.items()
    ]


def run_batch(trials: list[dict], scratch: Path) -> list[dict]:
    """Run trials one after the other; every trial's store is removed once it is judged."""
    import torch

    torch.set_num_threads(1)  # a forked child has no other threads to wait for
    benches: dict[tuple, Bench] = {}
    rows = []
    for trial in trials:
        arm = tuple(trial[name] for name in BATCH)
        if arm not in benches:
            kind = FileBench if trial["protocol"] == SINGLE_FILE else Bench
            place = Path(scratch) / f"arm-{len(benches)}"
            benches[arm] = kind(place, trial["mode"], trial["protocol"], trial["seed"])
        rows.append(_run(trial, benches[arm]))
    for bench in benches.values():
        bench.close()
    return rows


def _run(trial: dict, bench: Bench) -> dict:
    step, point, method = trial["step"], trial["crash_point"], trial["method"]
    place, ledger = bench.prepare(step)
    ledger.begin(step, bench.digests(step))
    strike = (_inject if method == "artifact" else _kill)(bench, place, step, point)
    for acknowledged in strike:
        ledger.acknowledge(acknowledged)
    found = bench.judge(place, ledger, step)
    # a job that was told of this save, or finds it, goes on; any other comes by here again
    done = ledger.in_flight is None or found.recovered_step == step
    after = bench.next_save(place, step + 1 if done else step)
    found = found.also(*after.broken)
    shutil.rmtree(place)
    row = {
        **trial,
        "in_flight_step": None if point == "none" else step,
        "acknowledged_step": ledger.newest,
        "recovered_step": found.recovered_step,
        "group_valid": found.group_valid,
        "killed": method == "sigkill" and point != "none",
        "outcome": found.outcome,
        "rule": found.rule,
        "expected": found.expected,
        "reason": found.reason,
        "next_save_ok": after.next_save_ok,
        "leftovers": after.leftovers,
    }
    return {name: row[name] for name in registry.output("crash").columns}


def _kill(bench: Bench, place: Path, step: int, point: str) -> list[int]:
    """The save in a child process that is killed at the point; what it acknowledged."""
    locate = bench.points[point][1]
    where = None if locate is None else locate(bench.trace(step))
    return kill.run_killed(partial(bench.save, place, step), where, survives=locate is None)


# -- the paper's injection, in which nothing dies -----------------------------------------------


class Stopped(Exception):
    """The writer was made to stop."""


class StoppingVFS(StrikingVFS):
    """Raises at the point: the writer stops, its process lives on."""

    def strike(self) -> None:
        raise Stopped


class TearingVFS(StrikingVFS):
    """Drops what is written to one file from a point on, and says that all of it was written."""

    torn: str | None = None

    def around(self, op: Operation, call: Callable):
        if op.index == self.point.index:
            self.torn = op.path
            call(op.data[: self.point.prefix])
            return op.size
        return op.size if op.call == "write" and op.path == self.torn else call()


def _inject(bench: Bench, place: Path, step: int, point: str) -> list[int]:
    """The save under the paper's condition; what was acknowledged.

    ``after_model`` does not stop the save: half a model file is left, the writer does not notice,
    and the group is committed with the manifest of the bytes that were meant.
    """
    acknowledged: list[int] = []
    vfs: VFS = REAL
    if point != "none":
        layer = TearingVFS if point == "after_model" else StoppingVFS
        vfs = layer(bench.points[point][1](bench.trace(step)))
    try:
        bench.save(place, step, vfs, acknowledged.append)
    except Stopped:
        return []
    return acknowledged


# -- where trials run ---------------------------------------------------------------------------


@dataclass
class Bench:
    """The stores of one arm and seed: made ready, saved into, judged.

    The checkpoints before the struck one are saved once a step and copied for each crash point, and
    the trace of the save is recorded once a step, on a copy of the same store.
    """

    root: Path
    mode: str
    protocol: str
    seed: int
    points = POINTS
    _template: tuple[int, Ledger] | None = None
    _trace: list[Operation] = field(default_factory=list)
    _states: dict[int, tuple[dict, dict]] = field(default_factory=dict)

    def state(self, step: int) -> dict:
        return self._state(step)[0]

    def digests(self, step: int) -> dict[str, str]:
        return self._state(step)[1]

    def _state(self, step: int) -> tuple[dict, dict]:
        if step not in self._states:
            state = self.parts(step)
            self._states = {s: kept for s, kept in self._states.items() if s >= step - 1}
            self._states[step] = state, oracle.digests_of(state)
        return self._states[step]

    def prepare(self, step: int) -> tuple[Path, Ledger]:
        """A fresh store whose newest acknowledged checkpoint is the one before ``step``."""
        template = self.root / "template"
        if self._template is None or self._template[0] != step:
            shutil.rmtree(template, ignore_errors=True)
            template.mkdir(parents=True)
            ledger = Ledger()
            for earlier in range(step - EARLIER, step):
                ledger.begin(earlier, self.digests(earlier))
                self.save(template, earlier, REAL, ledger.acknowledge)
            self._template, self._trace = (step, ledger), []
        place = self.root / "trial"
        shutil.copytree(template, place, symlinks=True)
        return place, self._template[1].copy()

    def trace(self, step: int) -> list[Operation]:
        """The operations of an undisturbed save."""
        if not self._trace:
            recorder = RecordingVFS()
            place = self.root / "recorded" / self.root.name / "trial"  # the same names
            shutil.copytree(self.root / "template", place, symlinks=True)
            self.save(place, step, recorder, lambda step: None)
            shutil.rmtree(place.parent)
            self._trace = recorder.operations
        return self._trace

    def close(self) -> None:
        """Remove whatever this bench has made."""
        shutil.rmtree(self.root, ignore_errors=True)

    # what differs between a group and a single file

    def parts(self, step: int) -> dict:
        return payloads.group(self.seed, step)

    def save(self, place: Path, step: int, vfs: VFS, acknowledge: Callable[[int], None]) -> None:
        store = CheckpointStore(
            place, mode=self.mode, protocol=self.protocol, run_id=f"seed-{self.seed}", vfs=vfs
        )
        store.save(step, self.state(step))
        acknowledge(step)

    def judge(self, place: Path, ledger: Ledger, step: int) -> Judgement:
        return oracle.judge(place, ledger, self.mode, struck=step, loads=1)

    def next_save(self, place: Path, step: int) -> Aftermath:
        return oracle.next_save(place, step, self.state(step), self.mode, self.protocol)


class FileBench(Bench):
    """The same for a single file that every save overwrites."""

    points: Mapping = FILE_POINTS

    def parts(self, step: int) -> dict:
        return {FILE: payloads.group(self.seed, step)["model"]}

    def save(self, place: Path, step: int, vfs: VFS, acknowledge: Callable[[int], None]) -> None:
        source = partial(formats.get("torch").save, self.state(step)[FILE])
        install(place / NAME, source, self.mode, vfs=vfs)
        acknowledge(step)

    def judge(self, place: Path, ledger: Ledger, step: int) -> Judgement:
        return oracle.judge_file(place / NAME, ledger, self.mode, struck=step)

    def next_save(self, place: Path, step: int) -> Aftermath:
        try:
            self.save(place, step, REAL, lambda step: None)
            works = bool(verify(os.fspath(place / NAME)))
        except (CkptError, OSError):
            works = False
        return Aftermath(works, len(oracle.temporary_files(place)))
