"""Writers that contend for one store while readers read from it, for as long as one likes.

What must hold is checked all the while: what a reader loads is one whole checkpoint, it is never
older than what had been acknowledged when it began to look, and a writer's save is never undone.
Beside the store, every writer installs a file of its own in one shared folder.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ckptlib import formats
from ckptlib.crashes.oracle import digests_of
from ckptlib.errors import AlreadyExists, CkptError, InvalidInput, StoreBusy, explain
from ckptlib.experiments import payloads
from ckptlib.guard import load_file, verify
from ckptlib.store import CheckpointStore
from ckptlib.write_modes import install

KEEP = 3
STATES = 8  # different states that are saved in turn


def soak(
    folder: Path,
    *,
    seconds: float,
    mode: str,
    protocol: str,
    writers: int = 8,
    readers: int = 4,
    start: str = "spawn",
) -> dict:
    """Run writers and readers on one store; give counts and violations.

    Parameters
    ----------
    folder : Path
        On the disk under test; it must not hold a store yet.
    seconds : float
        How long each process goes on.
    start : {"spawn", "fork"}
        How processes are begun: as jobs are, with nothing in common, or as copies of this one.

    Returns
    -------
    dict
        Counts by name (``saves``, ``busy``, ``loads``, ``installs`` ...) and ``violations``, a list
        of sentences.
    """
    if seconds <= 0 or writers < 1 or readers < 0:
        raise InvalidInput(
            explain("unusable soak", expected="seconds above 0, a writer or more",
                    found=f"{seconds} s, {writers} writers, {readers} readers")
        )  # fmt: skip
    context = multiprocessing.get_context(start)
    acknowledged = context.Value("q", 0)  # the highest commit number that a save has returned
    answers = context.SimpleQueue()
    arguments = (str(folder), mode, protocol, acknowledged, answers, seconds)
    jobs = [(_writer, number) for number in range(writers)]
    jobs += [(_reader, number) for number in range(readers)]
    processes = [
        context.Process(target=_guarded, args=(job, number, *arguments), daemon=True)
        for job, number in jobs
    ]
    for process in processes:
        process.start()
    counts, violations = Counter(), []
    try:
        for _ in processes:
            found, wrong = answers.get()
            counts.update(found)
            violations += wrong
    finally:
        for process in processes:
            process.join(timeout=60)
            process.kill()
    violations += [f"a process ended with {p.exitcode}" for p in processes if p.exitcode != 0]
    return {**dict(sorted(counts.items())), "violations": violations}


def state_of(step: int) -> dict:
    """What is saved at a step; from it alone a reader knows what it must find."""
    return payloads.small_group(1, step % STATES)


def _guarded(job: Callable, number: int, *arguments) -> None:
    answers = arguments[-2]
    counts, wrong = Counter(), []
    try:
        import torch

        torch.set_num_threads(1)
        job(number, *arguments, counts, wrong)
    except BaseException:
        wrong.append(traceback.format_exc())
    answers.put((counts, wrong))


def _writer(number, folder, mode, protocol, acknowledged, answers, seconds, counts, wrong):
    store = CheckpointStore(
        os.path.join(folder, "store"), mode=mode, protocol=protocol, keep=KEEP, run_id="soak"
    )
    shared = Path(folder) / "files"
    shared.mkdir(parents=True, exist_ok=True)
    own = shared / f"writer-{number}.pt"
    states = [state_of(step) for step in range(STATES)]
    digests = [digests_of({"file": state["model"]}) for state in states]
    turn, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        step = turn * 1000 + number  # of its own, so that only the lock is contended for
        try:
            receipt = store.save(step, states[step % STATES])
        except StoreBusy:
            counts["busy"] += 1
            time.sleep(0.002 * (1 + number % 3))
            continue
        except AlreadyExists as error:
            wrong.append(f"writer {number}: {error}")
            return
        turn += 1
        counts["saves"] += 1
        with acknowledged.get_lock():
            acknowledged.value = max(acknowledged.value, receipt.sequence)
        if "not pruned" in receipt.reason or "not updated" in receipt.reason:
            wrong.append(f"writer {number}: {receipt.reason}")
        chosen = turn % STATES
        source = partial(formats.get("torch").save, states[chosen]["model"])
        try:
            install(own, source, mode)
            if digests_of({"file": load_file(own)}) != digests[chosen] or not verify(own):
                wrong.append(f"writer {number}: its file is not what it installed")
        except (CkptError, OSError) as error:
            wrong.append(f"writer {number}: {type(error).__name__}: {error}")
        counts["installs"] += 1


def _reader(number, folder, mode, protocol, acknowledged, answers, seconds, counts, wrong):
    store = CheckpointStore(
        os.path.join(folder, "store"), mode=mode, protocol=protocol, run_id="soak"
    )
    expected = [digests_of(state_of(step)) for step in range(STATES)]
    before, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        promised = acknowledged.value
        try:
            found = store.load(allow_empty=True)
        except CkptError as error:
            wrong.append(f"reader {number}: {type(error).__name__}: {error}")
            continue
        counts["loads"] += 1
        if found is None:
            if promised:
                wrong.append(f"reader {number}: nothing, where commit {promised} was acknowledged")
            counts["empty"] += 1
            time.sleep(0.001)
            continue
        if digests_of(found.parts) != expected[found.step % STATES]:
            wrong.append(f"reader {number}: step {found.step} is not what was saved")
        if found.sequence < max(promised, before):
            wrong.append(
                f"reader {number}: commit {found.sequence}, where {max(promised, before)} was known"
            )
        before = found.sequence
        counts["passed over"] += len(found.skipped)
