"""What a checkpointing job does to its files, as flows that can be cut short at any operation.

A flow starts from a store (or a file) in a known state, does one thing, and says which saves were
acknowledged. It runs on any :class:`ckptlib.vfs.VFS`: on a recorder for its trace, on a killer or
on one whose operations fail. One list of flows serves every experiment that goes through all
operations, so that none of them is chosen by hand.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from ckptlib import formats, sidecars
from ckptlib.catalog import step_name
from ckptlib.crashes import kill, oracle
from ckptlib.crashes.oracle import FILE, Aftermath, Judgement, Ledger
from ckptlib.errors import CkptError
from ckptlib.experiments import payloads
from ckptlib.guard import verify
from ckptlib.manifests import COMMIT
from ckptlib.store import CheckpointStore
from ckptlib.vfs import REAL, VFS, Operation, RecordingVFS
from ckptlib.write_modes import WriteMode, install

SINGLE_FILE = "single_file"  # the protocol that is no group: install() over one name
GROUP_ARMS = (
    ("unsafe", "per_file"),
    ("atomic_nodirsync", "per_file"),
    ("atomic_dirsync", "per_file"),
    ("atomic_nodirsync", "batched"),
    ("atomic_dirsync", "batched"),
)
FILE_ARMS = tuple((mode, SINGLE_FILE) for mode, protocol in GROUP_ARMS if protocol == "per_file")
MODEL = "model.pt"
NAME = "checkpoint.pt"  # of the single file
JOB = Path("runs") / "job"  # of every place, since traces of one flow must agree in all names
Acknowledge = Callable[[int], None]


@dataclass(frozen=True)
class Flow:
    """One thing that a job does.

    ``steps`` checkpoints are acknowledged before it; ``damaged`` is a step whose bytes are damaged
    then, and ``unfinished`` one that a writer was killed at. ``step`` is the one that it saves.
    """

    says: str
    act: Callable[[Place, VFS, Acknowledge], object]  # gives the receipt, if there is one
    steps: int = 2
    step: int | None = 3
    damaged: int | None = None
    unfinished: int | None = None
    scrubs: bool = False  # the job looks after its store whenever it starts


def _save(place: Place, vfs: VFS, acknowledge: Acknowledge, *, keep: int | None = None):
    step = place.flow.step
    receipt = place.store(vfs, keep).save(step, place.state(step))
    acknowledge(step)
    return receipt


def _scrub(place: Place, vfs: VFS, acknowledge: Acknowledge) -> None:
    place.store(vfs).scrub()


def _prune(place: Place, vfs: VFS, acknowledge: Acknowledge) -> None:
    place.store(vfs).prune(1)


def _recover(place: Place, vfs: VFS, acknowledge: Acknowledge):
    store = place.store(vfs)
    store.scrub()
    step = store.load().step + 1
    receipt = store.save(step, place.state(step))
    acknowledge(step)
    return receipt


def _install(place: Place, vfs: VFS, acknowledge: Acknowledge):
    receipt = place.install(place.flow.step, vfs)
    acknowledge(place.flow.step)
    return receipt


GROUP_FLOWS: dict[str, Flow] = {
    "first save": Flow("the first save makes the store", _save, steps=0, step=1),
    "later save": Flow("a save beside two earlier ones, latest_ok included", _save),
    "save again": Flow("a save at a step that a dead writer left unfinished", _save, unfinished=3),
    "prune, keep=1": Flow("a save, after which only one checkpoint is kept",
                          partial(_save, keep=1)),
    "prune, keep=3": Flow("a save, after which three checkpoints are kept",
                          partial(_save, keep=3), steps=3, step=4),
    "prune, damaged": Flow("the newest checkpoint is damaged, and one that is valid is kept",
                           _prune, step=None, damaged=3),
    "scrub": Flow("the newest checkpoint is damaged, and is moved to the quarantine", _scrub,
                  steps=2, step=None, damaged=3),
    "recovery": Flow("a restart: the newest is damaged, a dead writer left another; scrub, load, "
                     "and save on", _recover, damaged=3, unfinished=4, scrubs=True),
}  # fmt: skip
FILE_FLOWS: dict[str, Flow] = {
    "first install": Flow("a file where none was", _install, steps=0, step=1),
    "overwrite": Flow("a file over an earlier one", _install, steps=1, step=2),
    "overwrite again": Flow("a file over one that a dead writer left between two", _install,
                            steps=1, step=3, unfinished=2),
}  # fmt: skip
FLOWS = GROUP_FLOWS | FILE_FLOWS


def arms(flow: str) -> tuple[tuple[str, str], ...]:
    """The modes and protocols in which a flow exists."""
    return FILE_ARMS if flow in FILE_FLOWS else GROUP_ARMS


@cache
def _state(seed: int, step: int, single: bool) -> tuple[dict, dict]:
    state = payloads.small_group(seed, step)
    state = {FILE: state["model"]} if single else state
    return state, oracle.digests_of(state)


@dataclass(frozen=True)
class Place:
    """Where a flow runs, and how it saves there."""

    root: Path
    flow: Flow
    mode: str
    protocol: str
    seed: int

    @property
    def single(self) -> bool:
        return self.protocol == SINGLE_FILE

    def state(self, step: int) -> dict:
        return _state(self.seed, step, self.single)[0]

    def digests(self, step: int) -> dict[str, str]:
        return _state(self.seed, step, self.single)[1]

    def store(self, vfs: VFS = REAL, keep: int | None = None) -> CheckpointStore:
        return CheckpointStore(
            self.root, mode=self.mode, protocol=self.protocol, keep=keep,
            run_id=f"seed-{self.seed}", vfs=vfs,
        )  # fmt: skip

    def install(self, step: int, vfs: VFS = REAL):
        source = partial(formats.get("torch").save, self.state(step)[FILE])
        return install(self.root / NAME, source, self.mode, vfs=vfs)

    def save(self, step: int, vfs: VFS = REAL) -> None:
        if self.single:
            self.install(step, vfs)
        else:
            self.store(vfs).save(step, self.state(step))

    def act(self, vfs: VFS, acknowledge: Acknowledge):
        """The flow itself; gives the receipt of its save, if it has one."""
        return self.flow.act(self, vfs, acknowledge)

    def commits_at(self, operations: list[Operation]) -> int:
        """Number of the operation by which the flow's save counts; the last one if it has none."""
        if self.flow.step is None:
            return operations[-1].index
        name = COMMIT
        if self.single:  # unsafe writes the sidecar last, and without it nothing vouches for a file
            name = NAME if WriteMode.of(self.mode).atomic else NAME + sidecars.SUFFIX
        return kill.installed(operations, name).index

    # -- before the flow --------------------------------------------------------------------------

    def prepare(self) -> Ledger:
        """Make what the flow starts from; the ledger holds the save in flight as well."""
        flow, ledger = self.flow, Ledger()
        (self.root if self.single else self.root.parent).mkdir(parents=True)
        for step in range(1, flow.steps + 1):
            ledger.begin(step, self.digests(step))
            self.save(step)
            ledger.acknowledge(step)
        if flow.damaged is not None:
            ledger.begin(flow.damaged, self.digests(flow.damaged))
            self.save(flow.damaged)
            damage(self.root / step_name(flow.damaged) / MODEL)
        if flow.unfinished is not None:
            ledger.begin(flow.unfinished, self.digests(flow.unfinished))
            self._leave_unfinished(flow.unfinished)
        ledger.in_flight = None
        if flow.step is not None:
            ledger.begin(flow.step, self.digests(flow.step))
        return ledger

    def _leave_unfinished(self, step: int) -> None:
        """A real process dies in that save, shortly before it would count."""
        elsewhere = self.root.parents[1] / "unfinished"
        copy = self.copy(elsewhere)
        recorder = RecordingVFS()
        copy.save(step, recorder)
        shutil.rmtree(elsewhere)
        if self.single:
            point = kill.installed(recorder.operations, NAME)
        else:
            point = kill.before(recorder.operations, COMMIT)
        kill.run_killed(lambda vfs, acknowledge: self.save(step, vfs), point)

    def copy(self, folder: Path) -> Place:
        """The same in another folder."""
        root = folder / JOB
        shutil.copytree(self.root.parent, root.parent, symlinks=True)
        return replace(self, root=root)

    def recorded(self) -> tuple[list[Operation], str]:
        """The operations of the flow undisturbed, and the reason on its receipt."""
        recorder = RecordingVFS()
        receipt = self.act(recorder, lambda step: None)
        return recorder.operations, receipt.reason if receipt else ""

    # -- after it ---------------------------------------------------------------------------------

    def judge(self, ledger: Ledger) -> Judgement:
        """Recover, and hold what is found to the rules; twice where the flow is no mere save."""
        if self.single:
            return oracle.judge_file(self.root / NAME, ledger, self.mode, struck=self.flow.step)
        loads = 2 if self.flow.scrubs or self.flow.step is None else 1
        return oracle.judge(self.root, ledger, self.mode, struck=self.flow.step, loads=loads)

    def next_save(self, ledger: Ledger, found: Judgement) -> Aftermath:
        """Save as the resumed job would: at the same step, if it is not done, or the next one."""
        step = self.flow.step
        if step is None:
            step = (found.recovered_step or 0) + 1
        elif ledger.in_flight is None or found.recovered_step == step:
            step += 1
        if self.flow.scrubs:
            self.store().scrub()
        if not self.single:
            return oracle.next_save(self.root, step, self.state(step), self.mode, self.protocol)
        try:
            self.install(step)
            works = bool(verify(os.fspath(self.root / NAME)))
        except (CkptError, OSError):
            works = False
        return Aftermath(works, len(oracle.temporary_files(self.root)))


def place(folder: Path, flow: str, mode: str, protocol: str, seed: int) -> Place:
    """A place for a flow in a folder of its own."""
    return Place(Path(folder) / JOB, FLOWS[flow], mode, protocol, seed)


def damage(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
