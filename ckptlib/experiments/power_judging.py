"""Crash states of recorded logs, each mounted by the real kernel and judged by what is found there.

A judge lives as long as its log has states, so that no state pays for the start of an interpreter.
It knows of the saves only what the marks of the log say.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptlib import temps
from ckptlib.catalog import step_name
from ckptlib.crashes import blockdev, mounts, oracle, power
from ckptlib.crashes.blocklog import MARK, CorruptLog, DeviceLog
from ckptlib.crashes.filesystems import FILESYSTEMS, filesystem
from ckptlib.crashes.oracle import PROMISED_POWER, Judgement, Ledger
from ckptlib.crashes.power import State
from ckptlib.errors import explain
from ckptlib.experiments import payloads
from ckptlib.experiments.power_recording import (
    BARE_FILE,
    FILES,
    FOLDER,
    NAME,
    STORE,
    WORKLOADS,
    numbered,
)
from ckptlib.guard import check_group, verify
from ckptlib.write_modes import WriteMode

NEXT_SAVE_EVERY = 8  # states of a log; saving costs more than judging
#: What a log must say of its run, and what of it becomes columns.
ABOUT = {"filesystem": str, "mode": str, "protocol": str, "workload": str, "omitted": str,
         "seed": int, "log": str}  # fmt: skip


def read(path) -> DeviceLog:
    """Read a log and see that it says of its run what a judge must know.

    Raises
    ------
    CorruptLog
        It is damaged, or it is the log of something else.
    """
    log = DeviceLog.load(path)
    wanted = {**ABOUT, "states": int, "ledger": str}
    wrong = [name for name, kind in wanted.items() if type(log.about.get(name)) is not kind]
    about = log.about
    if not wrong:
        known = {"filesystem": FILESYSTEMS, "mode": list(WriteMode), "workload": WORKLOADS}
        wrong = [name for name, values in known.items() if about[name] not in values]
    try:
        if not wrong:
            ledger_at(log, len(log.records))
    except (ValueError, TypeError, KeyError, AttributeError):
        wrong = ["the marks of its saves"]
    if wrong:
        raise CorruptLog(
            explain("this is not the log of a checkpointing job", path=path,
                    expected=", ".join(wanted), found=f"no usable {', '.join(wrong)}",
                    do="record one with ckptlib.experiments.power_loss"),
            path,
        )  # fmt: skip
    return log


def states_of(log: DeviceLog) -> list[State]:
    """The crash states that are tried of a log: they follow from the log alone."""
    return power.plan(log, seed=log.about["seed"], limit=log.about["states"])


def ledger_at(log: DeviceLog, cut: int) -> Ledger:
    """What had been saved and acknowledged before record ``cut``, by the marks of the log."""
    ledger = Ledger.from_json(log.about["ledger"])
    for record in log.records[:cut]:
        if record.kind == MARK and power.BEGIN in record.mark:
            ledger.begin(record.mark[power.BEGIN], record.mark["parts"])
        elif record.kind == MARK and power.ACKNOWLEDGED in record.mark:
            ledger.acknowledge(record.mark[power.ACKNOWLEDGED])
    return ledger


def judge_log(path, folder: Path, numbers: Sequence[int] | None = None, *, timings=None):
    """Rows of ``power_loss``, without ``trial_id``, of the states of one log.

    Call it in a process with a mount namespace of its own, see :func:`.mounts.isolated`.

    Parameters
    ----------
    path : path-like
        The log.
    folder : Path
        For the device and the mount point.
    numbers : sequence of int, optional
        Which of :func:`states_of`; all by default.
    timings : dict, optional
        Seconds by stage are added to it.
    """
    with judge(path, folder, timings) as judging:
        states = states_of(judging.log)
        return list(judging.rows(states if numbers is None else [states[n] for n in numbers]))


@contextlib.contextmanager
def judge(path, folder: Path, timings: dict | None = None) -> Iterator[Judge]:
    """A device server for one log, and a judge of its states, for the length of a block."""
    log = read(path)
    with blockdev.serving(folder / "device") as device:
        device.load(path)
        yield Judge(device, log, folder, {} if timings is None else timings)


@dataclass(frozen=True)
class Found:
    """What was found in one crash state; the fields are columns of ``power_loss``."""

    judged: Judgement
    damage: str
    mount_error: str = ""
    repaired: bool = False
    next_save_ok: bool | None = None


class Judge:
    """Mounts one crash state after the other and says what is found there."""

    def __init__(self, device: blockdev.Server, log: DeviceLog, folder: Path, timings: dict):
        self.device, self.log, self._timings = device, log, timings
        self._about = log.about
        self._entry = filesystem(log.about["filesystem"])
        self._mode = WriteMode.of(log.about["mode"])
        self._mountpoint = folder / "mnt"
        self._mountpoint.mkdir(exist_ok=True)

    def rows(self, states: Iterable[State]) -> Iterator[dict]:
        """A row of ``power_loss`` for each state."""
        for state in states:
            # some of them, told by the state alone, so that any choice of states gives its rows
            saves = (state.cut + sum(state.kept)) % NEXT_SAVE_EVERY == 0
            yield self._row(state, self.judge(state, saves=saves))

    def judge(self, state: State, *, saves: bool) -> Found:
        """Mount one crash state, look, and save on if asked to."""
        ledger = ledger_at(self.log, state.cut)
        with self._stage("serve"):
            backing = self.device.serve(**state.request)
        with contextlib.ExitStack() as attached:
            with self._stage("attach"):
                loop = attached.enter_context(mounts.loop_device(backing))
            refused = self._mount(loop)
            if refused:
                self._entry.repaired(loop)
                if self._mount(loop):
                    return self._nothing(ledger, refused)
            try:
                with self._stage("judge"):
                    judged, damage = self._look(ledger)
                works = None
                if saves and self._about["protocol"] not in FILES:
                    with self._stage("next save"):
                        judged, works = self._next(ledger, judged)
                return Found(judged, damage, refused, bool(refused), works)
            finally:
                with self._stage("unmount"):
                    mounts.unmount(str(self._mountpoint))

    def listing(self, state: State) -> str:
        """The files that are there after recovery, one a line with their sizes."""
        with mounts.loop_device(self.device.serve(**state.request)) as loop:
            if refused := self._mount(loop):
                return f"(the kernel refuses to mount it: {refused})"
            try:
                root = self._mountpoint / FOLDER
                paths = sorted(root.rglob("*")) if root.exists() else []
                lines = [self._line(path) for path in paths]
                return "\n".join(lines) or "(nothing)"
            except OSError as error:  # the directories themselves can be damaged
                return f"(it cannot be read: {errno.errorcode.get(error.errno or 0, error)})"
            finally:
                mounts.unmount(str(self._mountpoint))

    def _line(self, path: Path) -> str:
        parts = path.relative_to(self._mountpoint).parts
        name = "(temporary)" if temps.is_temp(path.name) else path.name
        size = "/" if path.is_dir() else f"  {path.lstat().st_size} bytes"
        return "    " * (len(parts) - 1) + name + size

    def _mount(self, loop: str) -> str:
        """The errno's name if the kernel refuses."""
        try:
            with self._stage("mount"):
                mounts.mount(loop, str(self._mountpoint), self._entry.kind, self._entry.options)
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, "unknown")
        return ""

    def _nothing(self, ledger: Ledger, refused: str) -> Found:
        judged = oracle.judge(
            self._mountpoint / "nothing", ledger, self._mode, loads=1, promised=PROMISED_POWER
        )
        return Found(judged, "not mounted" if ledger.acknowledged else "", refused)

    def _stage(self, name: str):
        return _Stage(self._timings, name)

    def _look(self, ledger: Ledger) -> tuple[Judgement, str]:
        root, workload = self._mountpoint, self._about["workload"]
        guarded = self._about["protocol"] != BARE_FILE
        if self._about["protocol"] not in FILES:
            found = oracle.judge(root / STORE, ledger, self._mode, loads=1, promised=PROMISED_POWER)
        elif workload == "overwrite":
            path = root / FOLDER / NAME
            found = oracle.judge_file(
                path, ledger, self._mode, promised=PROMISED_POWER, guarded=guarded
            )
        else:
            found = oracle.judge_numbered(
                root / FOLDER, ledger, self._mode,
                promised=PROMISED_POWER, guarded=guarded,
            )  # fmt: skip
        lost = bool(found.broken) and ledger.newest is not None
        return found, self._damage(ledger, found) if lost else ""

    def _damage(self, ledger: Ledger, found: Judgement) -> str:
        """What became of the newest acknowledged checkpoint."""
        root, newest = self._mountpoint, ledger.newest
        if self._about["protocol"] not in FILES:
            place = root / STORE / step_name(newest)
            verdict = check_group(str(place), step=newest).verdict
            target = place / verdict.file
            if not os.path.isdir(place):
                return "absent directory"
        else:
            name = NAME if self._about["workload"] == "overwrite" else numbered(newest)
            target = root / FOLDER / name
            verdict = verify(str(target))
            if self._about["protocol"] != BARE_FILE:  # which has no sidecar to miss
                target = target.parent / (verdict.file or name)
        if not os.path.lexists(target):
            return "missing name"
        if os.path.getsize(target) == 0:
            return "zero length"
        older = self._about["workload"] == "overwrite" and found.recovered_step in ledger.saves
        return "stale content" if verdict or older else "torn content"

    def _next(self, ledger: Ledger, found: Judgement) -> tuple[Judgement, bool]:
        """Recover once more, and save as the resumed job would: rules 5 and 6."""
        store, about = self._mountpoint / STORE, self._about
        again = oracle.judge(store, ledger, self._mode, loads=1, promised=PROMISED_POWER)
        if again != found:
            found = found.also(5)
        step = (found.recovered_step or 0) + 1
        state = payloads.small_group(about["seed"], step)
        after = oracle.next_save(store, step, state, self._mode, about["protocol"])
        return found.also(*after.broken), after.next_save_ok

    def _row(self, state: State, found: Found) -> dict:
        ledger = ledger_at(self.log, state.cut)
        about = self._about
        row = {
            **{name: about[name] for name in ABOUT},
            "policy": state.policy,
            "cut": state.cut,
            "window": state.window,
            "tail": state.tail,
            "kept_writes": len(state.kept),
            "exhaustive": state.exhaustive,
            "acknowledged_step": ledger.newest,
            "in_flight_step": ledger.in_flight,
            "recovered_step": found.judged.recovered_step,
            "outcome": found.judged.outcome,
            "rule": found.judged.rule,
            "expected": found.judged.expected,
            "damage": found.damage,
            "mount_error": found.mount_error,
            "repaired": found.repaired,
            "next_save_ok": found.next_save_ok,
        }  # fmt: skip
        return row


class _Stage:
    """Adds the seconds of a block to a dictionary."""

    def __init__(self, timings: dict, name: str):
        self._timings, self._name = timings, name

    def __enter__(self):
        self._started = time.perf_counter()

    def __exit__(self, *error) -> None:
        spent = time.perf_counter() - self._started
        self._timings[self._name] = self._timings.get(self._name, 0.0) + spent
