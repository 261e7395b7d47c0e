"""What must hold after any crash, as small functions over a store and a record of what was saved.

It never takes a store's word for anything that the record can tell: what was loaded is compared by
content with what had been handed to ``save``. The rules are those of :data:`RULES`; which of them a
write mode promises is :data:`PROMISED` for a process kill and :data:`PROMISED_POWER` for a power
loss.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ckptlib import formats, guard, temps
from ckptlib.catalog import LATEST, QUARANTINE, STORE, step_name
from ckptlib.digests import content_digest
from ckptlib.errors import (
    CkptError,
    CorruptCheckpoint,
    InvalidInput,
    ReadFailed,
    StoreError,
    explain,
)
from ckptlib.guard import Verdict
from ckptlib.housekeeping import LOCK
from ckptlib.manifests import COMMIT, MANIFEST
from ckptlib.store import CheckpointStore
from ckptlib.vfs import REAL
from ckptlib.write_modes import WriteMode

#: Rules 7 (a failed flush is never acknowledged) and 8 (a resumed run continues bit for bit) need
#: failing flushes and a training run: they are judged where those are.
RULES = {
    1: "whole or absent",
    2: "acknowledged means durable",
    3: "no false accept",
    4: "the predecessor is safe",
    5: "recovery is repeatable",
    6: "leftovers are bounded and the next save works",
}

#: The rules that each mode promises when a process is killed and the machine lives on.
#:
#: ``unsafe`` takes no step that could promise anything about a write that is cut short, so it
#: promises neither what was acknowledged (2), nor the predecessor (4), nor what comes after (5, 6).
#: That a mix (1) or bytes that nobody saved (3) are never handed out is the promise of the guard,
#: which stands in front of every mode. The atomic modes promise all: a SIGKILL leaves the page
#: cache whole, so that even a rename which was never flushed is there afterwards. (A power loss is
#: another matter: there ``atomic_nodirsync`` does not promise rule 2.)
PROMISED = {
    WriteMode.unsafe: frozenset({1, 3}),
    WriteMode.atomic_nodirsync: frozenset(RULES),
    WriteMode.atomic_dirsync: frozenset(RULES),
}

#: The rules that each mode promises when the power goes.
#:
#: ``atomic_dirsync`` takes every step, so it promises everything. ``atomic_nodirsync`` flushes the
#: bytes but no name: any number of acknowledged checkpoints may be gone with their names, and
#: what is left is whole. ``unsafe`` flushes nothing; the guard keeps its promises all the same.
PROMISED_POWER = {
    WriteMode.unsafe: frozenset({1, 3}),
    WriteMode.atomic_nodirsync: frozenset({1, 3, 5}),
    WriteMode.atomic_dirsync: frozenset(RULES),
}

OUTCOMES = (
    "false_accept",
    "mixed",
    "unrecoverable",
    "lost_acknowledged",
    "lost_unacknowledged",
    "kept",
)
#: Outcomes in which the newest acknowledged checkpoint, or a newer one, is not what was found.
LOST = OUTCOMES[:4]
_BROKEN = {
    "false_accept": {3},
    "mixed": {1},
    "unrecoverable": {2, 4},
    "lost_acknowledged": {2},
    "lost_unacknowledged": set(),
    "kept": set(),
}
#: Why something was refused, in the words of the paper's Figure 3 where it has one.
REASONS = (
    *("size mismatch", "missing COMMIT", "manifest error", "missing part", "digest mismatch"),
    *("load error", "not finite", "not readable", "not installed"),
)
FILE = "file"  # the only part of a checkpoint that is a single file


# -- the record of what was saved ---------------------------------------------------------------


@dataclass
class Ledger:
    """What was handed to ``save``, what was acknowledged, and what was under way at the crash.

    ``saves`` maps each step to its parts and each part to its content digest, in the order of the
    saves; ``in_flight`` is the step whose save had begun and not returned.
    """

    saves: dict[int, dict[str, str]] = field(default_factory=dict)
    acknowledged: list[int] = field(default_factory=list)
    in_flight: int | None = None

    def begin(self, step: int, parts: Mapping[str, str]) -> None:
        """Note, before the save, what it is about to save: part to content digest.

        Raises
        ------
        InvalidInput
            The step was saved before with other contents, so that neither could be told apart.
        """
        known = self.saves.setdefault(step, dict(parts))
        if known != dict(parts):
            raise InvalidInput(
                explain(f"step {step} is in the ledger with other contents",
                        do="give every save that differs a step of its own")
            )  # fmt: skip
        self.in_flight = step

    def acknowledge(self, step: int) -> None:
        """Note that the save of this step has returned."""
        if step not in self.saves:
            raise InvalidInput(explain(f"step {step} was never begun", do="call begin() first"))
        self.acknowledged.append(step)
        if self.in_flight == step:
            self.in_flight = None

    @property
    def newest(self) -> int | None:
        """The acknowledged step that was saved last."""
        order = list(self.saves)
        return max(self.acknowledged, key=order.index, default=None)

    def copy(self) -> Ledger:
        return Ledger.from_json(self.to_json())

    def to_json(self) -> str:
        """Text that :meth:`from_json` reads back, the order of the saves included."""
        saves = list(self.saves.items())
        return json.dumps([saves, self.acknowledged, self.in_flight])

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        saves, acknowledged, in_flight = json.loads(text)
        return cls({step: dict(parts) for step, parts in saves}, acknowledged, in_flight)


def digests_of(parts: Mapping[str, object]) -> dict[str, str]:
    """Content digest of each part of a state, for :meth:`Ledger.begin`."""
    return {name: content_digest(state) for name, state in parts.items()}


# -- judging ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    """What a recovery found.

    ``outcome`` is one of :data:`OUTCOMES`; ``broken`` holds the numbers of the rules that did not
    hold; ``group_valid`` and ``reason`` are about the checkpoint in flight; ``skipped`` lists each
    step that was passed over with its reason.
    """

    mode: WriteMode
    outcome: str
    broken: frozenset[int]
    recovered_step: int | None
    group_valid: bool
    reason: str
    skipped: tuple[tuple[int, str], ...] = ()
    promised: frozenset[int] | None = None  # of the mode when a process is killed

    @property
    def rule(self) -> str:
        """The first rule broken, with its number, or an empty string."""
        return f"{min(self.broken)} {RULES[min(self.broken)]}" if self.broken else ""

    @property
    def expected(self) -> bool:
        """Whether the mode's promise allows this: no rule is broken that it promises."""
        promised = PROMISED[self.mode] if self.promised is None else self.promised
        return not self.broken & promised

    def also(self, *rules: int) -> Judgement:
        """The same with further rules found broken."""
        return replace(self, broken=self.broken | set(rules))


def classify(ledger: Ledger, step: int | None, parts: Mapping[str, str]) -> str:
    """The outcome of a recovery, the first of :data:`OUTCOMES` that fits.

    Parameters
    ----------
    step : int or None
        The step that was recovered; None if nothing was.
    parts : mapping of str to str
        Content digest of each part that was handed out.
    """
    order = list(ledger.saves)
    if step is None:
        return "unrecoverable" if ledger.acknowledged else "lost_unacknowledged"
    for part, digest in parts.items():
        if not any(saved.get(part) == digest for saved in ledger.saves.values()):
            return "false_accept"
    if ledger.saves.get(step) != dict(parts):  # all of it was saved, but not together as this step
        return "mixed"
    if ledger.newest is not None and order.index(step) < order.index(ledger.newest):
        return "lost_acknowledged"
    if ledger.in_flight is not None and step != ledger.in_flight:
        return "lost_unacknowledged"
    return "kept"


def why(verdict: Verdict) -> str:
    """A verdict in the words of :data:`REASONS`; empty if it is VALID."""
    if verdict:
        return ""
    if verdict.layer == "commit":
        missing = verdict.file == COMMIT and "is missing" in verdict.reason
        return "missing COMMIT" if missing else "manifest error"
    if verdict.layer == "size" and "expected" not in verdict.reason:
        return "missing part"  # not there, or something else than a file
    return {
        "manifest": "manifest error",
        "identity": "manifest error",
        "size": "size mismatch",
        "sha256": "digest mismatch",
        "load": "load error",
        "finite": "not finite",
    }.get(verdict.layer, "not readable")


def judge(
    store,
    ledger: Ledger,
    mode,
    *,
    struck: int | None = None,
    loads: int = 2,
    promised: Mapping[WriteMode, frozenset[int]] = PROMISED,
) -> Judgement:
    """Recover a store as a restarted job would, and hold the result to the rules.

    Parameters
    ----------
    store : path-like
        The store's directory; it is opened afresh and only read.
    ledger : Ledger
        What was saved until the crash.
    mode : WriteMode or str
        The mode that wrote it.
    struck : int, optional
        The step that ``group_valid`` and ``reason`` speak about: the one in flight, unless the save
        that was disturbed returned all the same.
    loads : int
        How often to recover: twice or more tests rule 5.
    promised : mapping of WriteMode to set of int
        The rules that a mode promises under this kind of crash.
    """
    mode = WriteMode.of(mode)
    recovered = [_recover(store, mode) for _ in range(loads)]
    step, parts, skipped = recovered[0]
    outcome = classify(ledger, step, parts)
    broken = set(_BROKEN[outcome])
    if any(other != recovered[0] for other in recovered[1:]):
        broken.add(5)
    struck = ledger.in_flight if struck is None else struck
    struck = ledger.newest if struck is None else struck
    verdict = Verdict(guard.INVALID, "commit", f"{COMMIT} is missing", file=COMMIT)
    if struck is not None:
        verdict = guard.check_group(os.path.join(store, step_name(struck)), step=struck).verdict
    return Judgement(
        mode, outcome, frozenset(broken), step, bool(verdict), why(verdict), skipped,
        promised[mode],
    )  # fmt: skip


def _recover(store, mode: WriteMode):
    """Step, content digests and skipped steps of one recovery by a fresh store."""
    try:
        found = CheckpointStore(store, mode=mode).load(allow_empty=True)
    except (StoreError, ReadFailed) as error:  # what cannot be read is not recovered either
        return None, {}, _reasons(getattr(error, "skipped", []))
    if found is None:
        return None, {}, ()
    return found.step, digests_of(found.parts), _reasons(found.skipped)


def _reasons(skipped) -> tuple[tuple[int, str], ...]:
    return tuple((entry.step, why(entry.verdict)) for entry in skipped)


def judge_file(
    path,
    ledger: Ledger,
    mode,
    *,
    struck: int | None = None,
    promised: Mapping[WriteMode, frozenset[int]] = PROMISED,
    guarded: bool = True,
) -> Judgement:
    """:func:`judge` for a file that is overwritten by :func:`ckptlib.install`.

    The ledger's checkpoints have one part, :data:`FILE`; the step is told by the content.

    Parameters
    ----------
    guarded : bool
        False: whatever loads is taken, as by a job that records no digest. Only for a process that
        may come to harm.
    """
    paths = [os.fspath(path)]
    return _judge_files(paths, ledger, WriteMode.of(mode), struck, promised, guarded)


def judge_numbered(
    directory,
    ledger: Ledger,
    mode,
    *,
    promised: Mapping[WriteMode, frozenset[int]] = PROMISED,
    guarded: bool = True,
) -> Judgement:
    """:func:`judge_file` where every step has a file of its own: the last name that loads counts.

    Whatever ends in ``.pt`` is taken for a checkpoint; names sort as their steps do.
    """
    try:
        names = [name for name in REAL.list(os.fspath(directory)) if name.endswith(".pt")]
    except OSError:
        names = []
    paths = [os.path.join(directory, name) for name in reversed(names) if not temps.is_temp(name)]
    return _judge_files(paths, ledger, WriteMode.of(mode), None, promised, guarded)


def _judge_files(paths, ledger: Ledger, mode: WriteMode, struck, promised, guarded) -> Judgement:
    struck = ledger.in_flight if struck is None else struck
    struck = ledger.newest if struck is None else struck
    step, parts = None, {}
    verdict = Verdict(guard.INVALID, "size", "no file is there")
    for path in paths:
        verdict = guard.verify(path)
        try:
            state = guard.load_file(path) if guarded else _load_anyway(path)
            parts = {FILE: content_digest(state)}
            holders = [s for s, saved in ledger.saves.items() if saved == parts]
            step = holders[-1] if holders else -1  # -1: loaded, and no step stands for it
            break
        except CorruptCheckpoint as error:
            verdict = error.verdict or verdict
        except (MemoryError, ImportError):
            raise
        except Exception as error:  # whatever a container does with bytes that it cannot read
            verdict = Verdict(guard.INVALID, "load", f"{type(error).__name__}: {error}", path)
    outcome = classify(ledger, step, parts)
    there = step == struck and (bool(verdict) or not guarded)
    reason = "" if there else why(verdict) or "not installed"
    broken = frozenset(_BROKEN[outcome])
    return Judgement(mode, outcome, broken, step, there, reason, (), promised[mode])


def _load_anyway(path: str):
    with REAL.open(path) as file:
        return formats.get("torch").load(file, None)


# -- what comes after ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Aftermath:
    """Whether the next save worked, and how many things lay about that belong to nothing."""

    next_save_ok: bool
    leftovers: int

    @property
    def broken(self) -> set[int]:
        return set() if self.next_save_ok and not self.leftovers else {6}


def next_save(store, step: int, parts: Mapping[str, object], mode, protocol: str) -> Aftermath:
    """Save once more into a recovered store, as the resumed job would, and look what lies about."""
    try:
        fresh = CheckpointStore(store, mode=mode, protocol=protocol)
        fresh.save(step, parts)
        works = bool(fresh.verify(step)) and fresh.steps()[:1] == [step]
    except (CkptError, OSError):
        works = False
    try:
        return Aftermath(works, len(leftovers(store)))
    except OSError:  # a device that lies can damage the directories themselves
        return Aftermath(False, 0)


def leftovers(store) -> list[str]:
    """Names in a store that belong to no committed checkpoint, relative to it.

    What was moved to the quarantine folder was recognised, and is not counted.
    """
    store, found = os.fspath(store), []
    for name in REAL.list(store) if os.path.isdir(store) else ():
        path = os.path.join(store, name)
        if name.startswith("step-") and os.path.isdir(path):
            manifest, _, _ = guard.peek(REAL, path)
            if manifest is None:
                found.append(name)
                continue
            known = {MANIFEST, COMMIT, *(entry.file for entry in manifest.entries)}
            found += [f"{name}/{inner}" for inner in REAL.list(path) if inner not in known]
        elif name not in {LOCK, STORE, LATEST, QUARANTINE}:
            found.append(name)
    return found


def temporary_files(directory) -> list[str]:
    """Names of unfinished files in a directory of single-file checkpoints."""
    return [name for name in REAL.list(os.fspath(directory)) if temps.is_temp(name)]
