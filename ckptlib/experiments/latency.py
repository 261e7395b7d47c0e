"""Times single saves, mode against mode; never lets anything but the save itself into the time.

A *block* holds one run of every arm (write mode and protocol), run after run, in an order drawn
anew for each block. Whatever drifts more slowly than a block, which takes a second or two, meets
all arms alike, and no arm always follows the same other. Runs are not mixed save by save, since the
flush of one arm would then pay for what another left unwritten; the first saves of each run absorb
that and are not counted. Nothing is deleted until all blocks are done: ext4 does not reuse a fresh
inode for minutes after a mass deletion and searches past it in every ``create``.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import torch

from ckptlib import CheckpointStore, formats, install, provenance
from ckptlib.errors import CkptError, InvalidInput, explain
from ckptlib.experiments import payloads
from ckptlib.vfs import REAL, VFS
from ckptlib.write_modes import WriteMode

#: Saves at the start of every run that are made and not counted; their steps are 1 to WARM_UP.
WARM_UP = 3
SINGLE_FILE = "single_file"
MODES = tuple(mode.value for mode in WriteMode)
#: The paper's comparison, the same payload committed in one batch, and one file by ``install``.
ARMS = (
    *((mode, "per_file") for mode in MODES),
    *((mode, "batched") for mode in MODES if WriteMode(mode).atomic),
    *((mode, SINGLE_FILE) for mode in MODES),
)
_ROUNDING = 1 << 16  # bytes a save may take beyond its payload: records, containers, whole blocks


def payload(protocol: str, seed: int) -> dict[str, dict]:
    """Make the state to save, by part.

    Parameters
    ----------
    protocol : str
        ``single_file``: the paper's small network, 128 x 128 and 128 x 10, as one part of 70 KiB.
        Else the paper's group: a model of 128 KiB, an optimizer of 64 KiB, a generator's state.
    seed : int
        Decides the values.
    """
    if protocol == SINGLE_FILE:
        return {"model": payloads.network(seed, 0)}
    return payloads.group(seed, 0)


def payload_bytes(protocol: str) -> int:
    """Size of the payload's tensors, in bytes."""
    return payloads.tensor_bytes(payload(protocol, 0))


def plan(*, seed: int, runs: int, saves: int, process_runs: int) -> list[dict]:
    """List the trials, one a counted save, in the order in which they will be run.

    Parameters
    ----------
    seed : int
        Seed of the study; the runs' own are ``seed``, ``seed + 1``, ..., one a block.
    runs : int
        Blocks, and so runs per arm.
    saves : int
        Counted saves in a run.
    process_runs : int
        Blocks, spread evenly over all, that also measure each per_file arm the paper's way: as the
        whole life of a fresh process; see :func:`whole_process`.

    Returns
    -------
    list of dict
        ``process_run`` is the number of the whole-process run that belongs to this trial, or None.

    Raises
    ------
    InvalidInput
        Numbers below 1, or more whole-process runs than blocks.
    """
    if min(runs, saves) < 1 or not 1 <= process_runs <= runs:
        raise InvalidInput(
            explain(
                "these are no numbers of runs to time",
                expected="runs and saves of 1 or more, process_runs of 1 to runs",
                found=f"runs={runs}, saves={saves}, process_runs={process_runs}",
                do="correct the parameters of the latency notebook",
            )
        )
    sizes = {protocol: payload_bytes(protocol) for _, protocol in ARMS}
    number, trials = itertools.count(), []
    for block in range(runs):
        process_run = block * process_runs // runs
        starts = block == 0 or process_run != (block - 1) * process_runs // runs
        order = numpy.random.default_rng(numpy.random.SeedSequence([seed, block]))
        for arm in order.permutation(len(ARMS)):
            mode, protocol = ARMS[arm]
            for step in range(WARM_UP + 1, WARM_UP + saves + 1):
                first = starts and protocol == "per_file" and step == WARM_UP + 1
                trials.append(
                    {
                        "trial_id": f"{next(number):07d}",
                        "block": block,
                        "seed": seed + block,
                        "mode": mode,
                        "protocol": protocol,
                        "step": step,
                        "payload_bytes": sizes[protocol],
                        "process_run": process_run if first else None,
                    }
                )
    return trials


def space_needed(trials: list[dict]) -> int:
    """Bytes of disk that a plan fills before anything is deleted."""
    warm_up = WARM_UP * len(set(map(_run_of, trials)))
    largest = max(trial["payload_bytes"] for trial in trials) + _ROUNDING
    processes = sum(trial["process_run"] is not None for trial in trials)
    saves_each = len({trial["step"] for trial in trials})
    return (len(trials) + warm_up + processes * saves_each) * largest


def run_batch(trials: list[dict], scratch: Path) -> list[dict]:
    """Run the trials of a block in order; see :mod:`.engine` for what is expected of it.

    Writes beside ``scratch`` and not in it, because that folder is deleted between blocks. Must
    not run beside another batch: one worker, since parallel saves would measure one another.
    """
    filesystem = provenance.filesystem(scratch)["type"]
    rows = []
    with undisturbed():
        for (block, *arm), members in itertools.groupby(trials, _run_of):
            run = list(members)
            folder = scratch.parent / f"block-{block:04d}" / "-".join(arm)
            whole = [
                whole_process(trial, folder.with_name(f"{folder.name}-process"), len(run))
                for trial in run
                if trial["process_run"] is not None
            ]
            timed = timed_saves(folder, *arm, run[0]["seed"], [trial["step"] for trial in run])
            rows += [_row(*pair, filesystem) for pair in zip(run, timed, strict=True)]
            if whole:
                rows[-1]["latency_process"] = whole
    return rows


def _row(trial: dict, timed: tuple[float, object], filesystem: str) -> dict:
    seconds, receipt = timed
    planned = {name: value for name, value in trial.items() if name != "process_run"}
    return planned | {
        "latency_s": seconds,
        "flush_calls": receipt.flush_calls,
        "flush_primitive": receipt.primitive,
        "filesystem": filesystem,
    }


def _run_of(trial: dict) -> tuple[int, str, str]:
    return trial["block"], trial["mode"], trial["protocol"]


def timed_saves(
    folder: Path, mode: str, protocol: str, seed: int, steps: list[int], *, vfs: VFS = REAL
) -> list[tuple[float, object]]:
    """Warm up, then save at each step; give the time of each call in seconds, and its receipt.

    To be called within :func:`undisturbed`, once for many runs: a collection before each would
    take longer than the run.
    """
    save = saver(folder, mode, protocol, payload(protocol, seed), vfs=vfs)
    for step in range(1, WARM_UP + 1):
        save(step)
    timed = []
    for step in steps:
        started = time.perf_counter()
        receipt = save(step)
        timed.append((time.perf_counter() - started, receipt))
    return timed


def saver(
    folder: Path, mode: str, protocol: str, parts: dict[str, dict], *, vfs: VFS = REAL
) -> Callable[[int], object]:
    """Give the call to be timed: it saves the parts at a step and returns the receipt."""
    if protocol != SINGLE_FILE:
        store = CheckpointStore(folder, mode=mode, protocol=protocol, run_id="latency", vfs=vfs)
        return lambda step: store.save(step, parts)
    folder.mkdir(parents=True)
    container = formats.get("torch")

    def source(sink) -> None:
        container.save(parts["model"], sink)

    return lambda step: install(folder / f"model-{step:06d}.pt", source, mode, vfs=vfs)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """One torch thread and no garbage collection for a block; both are put back after it."""
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


# -- the paper's method ----------------------------------------------------------------------------


def whole_process(trial: dict, folder: Path, saves: int) -> dict:
    """Time the whole life of a fresh Python process that makes all saves of a run.

    Divided by the number of saves this is the paper's latency per checkpoint. The payload is that
    of the trial's own run; there is no warm-up, since the method has none.

    Returns
    -------
    dict
        A row of the output ``latency_process``; ``import_s`` lasts until the first save begins.

    Raises
    ------
    CkptError
        The process failed; with what it said.
    """
    job = {"mode": trial["mode"], "seed": trial["seed"], "saves": saves, "folder": str(folder)}
    started = time.perf_counter()
    child = subprocess.run(
        [sys.executable, "-m", "ckptlib.experiments.latency", json.dumps(job)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    total = time.perf_counter() - started
    if child.returncode != 0:
        raise CkptError(
            explain(
                "the process whose saves were to be timed failed",
                path=folder,
                found=f"exit status {child.returncode}: {child.stderr.strip()[-500:]}",
            ),
            folder,
        )
    return {
        "trial_id": trial["trial_id"],
        "mode": trial["mode"],
        "seed": trial["seed"],
        "run": trial["process_run"],
        "saves": saves,
        "total_s": total,
        "per_checkpoint_s": total / saves,
        "import_s": float(child.stdout) - started,  # perf_counter is one clock for all processes
    }


def _process(job: dict) -> None:
    torch.set_num_threads(1)
    save = saver(Path(job["folder"]), job["mode"], "per_file", payload("per_file", job["seed"]))
    print(time.perf_counter())
    for step in range(1, job["saves"] + 1):
        save(step)


if __name__ == "__main__":
    _process(json.loads(sys.argv[1]))
