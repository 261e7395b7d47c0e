"""Records a training's checkpoints over the machine's I/O counters; never on two different clocks.

A process of its own samples the counters, so that neither the training nor its locks hold a sample
up; the file operations are those that a :class:`~ckptlib.vfs.RecordingVFS` saw. All times are of
``time.perf_counter``, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from ckptlib import provenance
from ckptlib.errors import CkptError, InvalidInput, explain
from ckptlib.vfs import REAL, Operation, RecordingVFS
from ckptlib.write_modes import WriteMode

#: Operations that change what is on the disk; looking things up is left out.
CALLS = frozenset({"mkdir", "create", "write", "flush", "replace", "rename", "flush_dir"})
#: The slowest sampling that still tells one checkpoint from the next.
SLOWEST_HZ = 10
#: Seconds of doing nothing around each mode, in which counters show what is not ours.
REST_S = 0.25
MODES = tuple(mode.value for mode in WriteMode)

#: Gives running totals in bytes by name, for a process id and the name of a disk (None: all disks).
Counters = Callable[[int, str | None], dict[str, int]]


def read_counters(pid: int, disk: str | None, psutil=None) -> dict[str, int]:
    """Read the I/O counters that this system has.

    Returns
    -------
    dict of str to int
        Bytes since an arbitrary moment. ``disk_*`` is what reached the device, from all processes.
        ``process_*`` is what this one handed to the kernel, and is missing on macOS, where no such
        counters exist.
    """
    if psutil is None:
        import psutil
    totals = {}
    disks = psutil.disk_io_counters(perdisk=disk is not None)
    if counters := disks.get(disk) if disk is not None and disks else disks:
        totals |= {"disk_read_bytes": counters.read_bytes, "disk_write_bytes": counters.write_bytes}
    with contextlib.suppress(AttributeError, psutil.AccessDenied):
        own = psutil.Process(pid).io_counters()
        totals |= {"process_read_bytes": own.read_bytes, "process_write_bytes": own.write_bytes}
    return totals


def disk_of(folder: str | os.PathLike) -> str | None:
    """Name the disk below a folder as the counters name it, or None if they know none such."""
    import psutil

    device = os.path.basename(os.path.realpath(provenance.filesystem(folder)["device"]))
    return device if device in (psutil.disk_io_counters(perdisk=True) or {}) else None


# -- sampling ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Totals of all counters, in bytes, at a time of ``perf_counter`` in seconds."""

    time: float
    totals: dict[str, int]


def sample(pipe: Connection, hz: int, pid: int, disk: str | None, source: Counters) -> None:
    """Sample at fixed times until anything comes through the pipe, then send all samples back.

    Times that passed while the machine was busy are left out, not made up for.
    """
    begun, samples = time.perf_counter(), []
    try:
        while True:
            now = time.perf_counter()
            samples.append(Sample(now, source(pid, disk)))
            if len(samples) == 1:
                pipe.send(samples[0])
            tick = int((now - begun) * hz) + 1
            if pipe.poll(max(0.0, begun + tick / hz - time.perf_counter())):
                break
        pipe.recv()
        samples.append(Sample(time.perf_counter(), source(pid, disk)))
        pipe.send(samples)
    except (EOFError, BrokenPipeError):
        pass  # the process that asked is gone, and nobody wants the samples


@contextlib.contextmanager
def sampled(hz: int, disk: str | None = None, source: Counters = read_counters) -> Iterator[list]:
    """Sample the counters of this process and a disk while a block runs.

    Yields
    ------
    list of Sample
        Filled in at the end of the block; the first sample is from before it, the last from after.

    Raises
    ------
    InvalidInput
        Slower than :data:`SLOWEST_HZ`.
    CkptError
        This system counts nothing, or the sampling process died.
    """
    if hz < SLOWEST_HZ:
        raise InvalidInput(
            explain(
                "this is too slow to tell checkpoints apart",
                expected=f"sample_hz of {SLOWEST_HZ} or more",
                found=hz,
                do="raise sample_hz",
            )
        )
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    ours, theirs = spawn.Pipe()
    process = spawn.Process(
        target=sample, args=(theirs, hz, os.getpid(), disk, source), daemon=True
    )
    process.start()
    theirs.close()
    samples: list[Sample] = []
    try:
        first = _received(ours)
        if not first.totals:
            raise CkptError(
                explain("this system has no I/O counters", do="see psutil.disk_io_counters")
            )
        yield samples
        ours.send("stop")
        samples += _received(ours)
    finally:
        ours.close()
        process.join(timeout=1)
        process.kill()


def _received(pipe: Connection):
    try:
        return pipe.recv()
    except EOFError:
        raise CkptError("the process that samples the I/O counters died; see its error") from None


# -- the training ------------------------------------------------------------------------------


@dataclass
class Phase:
    """The part of the recording in which one mode was in force; times of ``perf_counter``."""

    mode: str
    started: float
    ended: float = 0.0
    saves: list[tuple[int, float, float]] = field(default_factory=list)
    operations: list[tuple[int, Operation]] = field(default_factory=list)
    written_back: tuple[float, float] = (0.0, 0.0)


def record(
    *,
    seed: int,
    epochs: int,
    save_every: int,
    sample_hz: int,
    scratch: Path,
    source: Counters = read_counters,
):
    """Train under each mode, one after another, and record what happens on one clock.

    The group is written file by file in all modes (``per_file``), as in the paper. After each mode
    the system is asked to write back what it still holds (``sync``), so that what a mode left
    unwritten is seen to arrive, and does not burden the mode that comes next.

    Parameters
    ----------
    seed : int
        Of the training; the same in all modes.
    epochs, save_every : int
        Passes over the training images per mode, and passes between two checkpoints.
    sample_hz : int
        Samples a second, :data:`SLOWEST_HZ` or more.
    scratch : Path
        Folder on the disk under test; what is written there is removed at the end.
    source : callable
        What is sampled, see :data:`Counters`.

    Returns
    -------
    pandas.DataFrame
        As the registry describes ``timeline``, by time. Samples: bytes since the start (unit B)
        and the rate since the sample before (B/s). Operations: seconds that each took. Events:
        ``checkpoint``, a save from begin to end, and ``write_back`` of a mode; in seconds, too.

    Raises
    ------
    InvalidInput, CkptError
        No checkpoint at all, or see :func:`sampled`.
    """
    if not 1 <= save_every <= epochs:
        raise InvalidInput(
            explain(
                "this training saves no checkpoint",
                expected="save_every from 1 to epochs",
                found=f"epochs={epochs}, save_every={save_every}",
            )
        )
    from ckptlib.experiments.network import Trainer, deterministic
    from ckptlib.experiments.training_process import train

    phases = []
    with tempfile.TemporaryDirectory(prefix="timeline.", dir=scratch) as folder, deterministic():
        train(Trainer(0), 2, None, ())  # a process's first steps are slow
        with sampled(sample_hz, disk_of(scratch), source) as samples:
            for mode in MODES:
                time.sleep(REST_S)
                phases.append(_trained(Trainer(seed), mode, epochs, save_every, Path(folder, mode)))
            time.sleep(REST_S)
    return _frame(samples, phases)


def _trained(trainer, mode: str, epochs: int, save_every: int, folder: Path) -> Phase:
    from ckptlib import CheckpointStore
    from ckptlib.experiments.training_process import save_steps, train

    recorder = RecordingVFS()
    store = CheckpointStore(folder, mode=mode, protocol="per_file", vfs=recorder)
    begun = (0, 0.0)

    def say(what: str, step: int, *_) -> None:
        nonlocal begun
        if what == "begin":
            begun = len(recorder.operations), time.perf_counter()
        elif what == "ack":
            phase.saves.append((step, begun[1], time.perf_counter()))
            phase.operations += [(step, op) for op in recorder.operations[begun[0] :]]

    steps = trainer.steps_per_epoch
    phase = Phase(mode, time.perf_counter())
    train(trainer, epochs * steps, store, save_steps(epochs, save_every, steps), say)
    phase.ended = time.perf_counter()
    time.sleep(REST_S)
    phase.written_back = _write_back(folder)
    return phase


def _write_back(folder: Path) -> tuple[float, float]:
    """Flush every file below a folder; give begin and end. (``sync`` would flush everybody's.)"""
    begun = time.perf_counter()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with REAL.open(str(path)) as file:
                file.flush_durable()
    return begun, time.perf_counter()


# -- the table ---------------------------------------------------------------------------------


def _frame(samples: list[Sample], phases: list[Phase]):
    import pandas

    start = samples[0].time

    def row(at: float, kind: str, name: str, value: float, unit: str, step, mode: str) -> tuple:
        return at - start, kind, name, value, unit, step, mode

    rows = []
    for before, now in zip([samples[0], *samples], samples, strict=False):
        mode = next((p.mode for p in phases if p.started <= now.time <= p.ended), "")
        for name, total in now.totals.items():
            since = total - samples[0].totals.get(name, total)
            rows.append(row(now.time, "sample", name, since, "B", None, mode))
            if now is not before:
                rate = (total - before.totals.get(name, total)) / (now.time - before.time)
                rows.append(row(now.time, "sample", name, rate, "B/s", None, mode))
    for phase in phases:
        for step, op in phase.operations:
            if op.call in CALLS:
                rows.append(
                    row(op.started, "operation", op.call, op.seconds, "s", step, phase.mode)
                )
        for step, begun, ended in phase.saves:
            rows.append(row(begun, "event", "checkpoint", ended - begun, "s", step, phase.mode))
        begun, ended = phase.written_back
        rows.append(row(begun, "event", "write_back", ended - begun, "s", None, ""))
    columns = ["t_s", "kind", "name", "value", "unit", "step", "mode"]
    return pandas.DataFrame(rows, columns=columns).sort_values("t_s", kind="stable")


def arrivals(recorded):
    """Say for each mode how much was written while it saved, and how much in its write-back.

    Parameters
    ----------
    recorded : pandas.DataFrame
        As :func:`record` gives it.

    Returns
    -------
    pandas.DataFrame
        Indexed by mode; for each counter of written bytes two columns, in bytes: the difference
        of the last sample before and the first sample after. Journals count, and so does what
        other processes wrote meanwhile.
    """
    import pandas

    samples = recorded[(recorded["kind"] == "sample") & (recorded["unit"] == "B")]
    totals = samples.pivot(index="t_s", columns="name", values="value")
    totals = totals[[name for name in totals if name.endswith("write_bytes")]]
    events = recorded[recorded["kind"] == "event"]
    events = events.assign(end=events["t_s"] + events["value"])
    rows = {}
    for mode, saves in events[events["name"] == "checkpoint"].groupby("mode", sort=False):
        after = events[(events["name"] == "write_back") & (events["t_s"] >= saves["end"].max())]
        spans = {
            "while saving": (saves["t_s"].min(), saves["end"].max()),
            "in the write-back": tuple(after.iloc[0][["t_s", "end"]]),
        }
        rows[mode] = {
            f"{name.removesuffix('_write_bytes')} {when}": column.loc[end:].iloc[0]
            - column.loc[:begin].iloc[-1]
            for name, column in totals.items()
            for when, (begin, end) in spans.items()
        }
    return pandas.DataFrame.from_dict(rows, orient="index")
