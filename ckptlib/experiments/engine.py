"""Runs a grid of trials and writes its table; never runs a finished trial twice, nor half-writes.

Trials are grouped into batches, batches go to workers, each finished batch is journaled, and the
complete result is sorted and written at once. The same rows come out for any number of workers,
and after any number of interruptions.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptlib import provenance
from ckptlib.errors import CkptError, InvalidInput, StoreBusy, explain
from ckptlib.experiments import outputs, registry
from ckptlib.experiments.journal import Journal, canonical
from ckptlib.experiments.workers import ENGINES, Batch, Done, RunBatch, TrialFailed, finished
from ckptlib.provenance import code_hash
from ckptlib.vfs import REAL, locked

__all__ = ["ENGINES", "RunBatch", "TrialFailed", "code_hash", "run_grid"]


def run_grid(
    name: str,
    trials: Sequence[dict],
    run_batch: RunBatch,
    *,
    results: Path,
    scratch: Path,
    batch: str | Sequence[str] | None = "seed",
    jobs: int = 2,
    engine: str = "loky",
    scheduler: str = "",
    facts: dict | None = None,
):
    """Run every trial that has not been run, and write the output ``name``.

    A batch is finished for good once its rows are journaled, for as long as the trials in it, the
    code behind ``run_batch``, the machine and the file system of ``scratch`` stay what they are.

    Parameters
    ----------
    name : str
        Output in the registry. A row may also carry, under the name of another output, a list of
        that output's rows; they are written as a csv of their own.
    trials : sequence of dict
        The plan. Each has a ``trial_id`` and otherwise plain values.
    run_batch : callable
        Module-level function ``(trials, scratch) -> rows``; runs the trials of one batch in order,
        in a folder of its own, and gives at least one row for each.
    batch : str, sequence of str or None
        Fields of a trial whose equal values make a batch; None: every trial is its own.
    jobs : int
        Workers on this machine; a remote scheduler brings its own.
    facts : dict
        For the provenance record.

    Returns
    -------
    pandas.DataFrame
        The rows in canonical form.

    Raises
    ------
    TrialFailed
        With the trial's name and its traceback.
    InvalidInput
        Trials without an id or with one id twice, rows that are not the registry's, or a
        scheduler that does not answer.
    StoreBusy
        Another process is making the same output.
    """
    identity = [
        code_hash(run_batch.__module__),
        run_batch.__qualname__,
        provenance.machine(),
        {key: value for key, value in provenance.filesystem(scratch).items() if key != "options"},
    ]
    batches = _batches(trials, batch, identity)
    whole = hashlib.sha256("".join(item.key for item in batches).encode()).hexdigest()
    if (frame := _already(results, name, whole)) is not None:
        print(f"{name}: all {len(trials)} trials were run before by this code; nothing to do")
        return frame

    partial = results / ".partial"
    with _alone(partial, name), _swept(scratch, name) as place:
        journal = Journal(partial / f"{name}.jsonl", {item.key for item in batches})
        waiting = [item for item in batches if item.key not in journal.finished]
        before = len(trials) - sum(len(item.trials) for item in waiting)
        if before:
            print(f"{name}: {before} of {len(trials)} trials were finished before; going on")
        stream = finished(run_batch, waiting, place, jobs=jobs, engine=engine, scheduler=scheduler)
        with _progress(name, len(trials), before) as bar, contextlib.closing(stream):
            for done in stream:
                _check(name, done, journal.path)
                journal.append(done.batch.key, done.rows)
                bar.update(len(done.batch.trials))
        rows = [row for item in batches for row in journal.finished[item.key]]
        frame = _write(results, name, rows, whole, {**(facts or {}), "trials": len(trials)})
        journal.remove()
    return frame


def _batches(trials: Sequence[dict], by: str | Sequence[str] | None, identity) -> list[Batch]:
    ids = [trial.get("trial_id") for trial in trials]
    if not ids or not all(isinstance(i, str) and i for i in ids) or len(set(ids)) < len(ids):
        raise InvalidInput(
            explain(
                "the plan is not usable",
                expected="trials, each with its own trial_id (text)",
                found=f"{len(ids)} trials with {len(set(ids))} different ids",
                do="correct plan()",
            )
        )
    fields = ("trial_id",) if by is None else (by,) if isinstance(by, str) else tuple(by)
    grouped: dict[str, list[dict]] = {}
    for trial in sorted(trials, key=lambda trial: trial["trial_id"]):
        grouped.setdefault(canonical([trial.get(name) for name in fields]), []).append(trial)
    return [
        Batch(hashlib.sha256(canonical([identity, members]).encode()).hexdigest(), members)
        for members in grouped.values()
    ]


def _already(results: Path, name: str, key: str):
    """Give the complete output if it answers to this plan, code and machine, else None."""
    record = outputs.record_of(results, name)
    beside = record.get("beside", [])
    if any(outputs.record_of(results, other).get("key") != key for other in [name, *beside]):
        return None
    try:
        for other in beside:
            outputs.read(results, other)
        return outputs.read(results, name)
    except CkptError:  # removed or altered since: it is made again
        return None


@contextlib.contextmanager
def _alone(partial: Path, name: str) -> Iterator[None]:
    """Hold an output for this process; the lock goes with the process, however that ends."""
    partial.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(REAL, str(partial / f"{name}.lock")))
        except BlockingIOError as error:
            raise StoreBusy(
                explain(
                    f"another process is making {name} at this moment",
                    path=partial,
                    do="wait for it, or choose another results folder",
                ),
                partial,
            ) from error
        yield


def sweep(scratch: Path, name: str) -> None:
    """Remove the scratch folders of an experiment whose processes have died."""
    import psutil

    for left in scratch.glob(f"{name}.*"):
        pid = left.suffix[1:]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _swept(scratch: Path, name: str) -> Iterator[Path]:
    """Give a scratch folder to this process, after removing those of processes that died."""
    sweep(scratch, name)
    place = scratch / f"{name}.{os.getpid()}"
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _progress(name: str, total: int, before: int):
    """A bar that shows after two seconds, and not at all where nobody is looking."""
    from tqdm.auto import tqdm

    # tqdm's own variable; its notebook bar does not heed it by itself.
    batch = os.environ.get("TQDM_DISABLE", "") not in ("", "0")
    quiet = batch or not (sys.stderr.isatty() or "ipykernel" in sys.modules)
    return tqdm(total=total, initial=before, desc=name, unit="trial", disable=quiet, delay=2)


def _check(name: str, done: Done, journal: Path) -> None:
    """Refuse a failed batch, and rows that are not what the registry and the plan say."""
    where = f"trial {done.trial}" if done.trial else done.batch.label
    if done.failure:
        raise TrialFailed(
            f"{name}: {where} failed: {done.failure.strip().splitlines()[-1]}\n"
            f"Finished trials are kept in {journal}; correct the cause and run again to go on."
            f"\n\n{done.failure}",
            journal,
        )
    wanted = {trial["trial_id"] for trial in done.batch.trials}
    answered = {row.get("trial_id") for row in done.rows}
    if answered != wanted:
        raise InvalidInput(
            explain(
                f"{name}: {where} gave rows for other trials than it was given",
                expected=sorted(wanted - answered)[:3] or "no more",
                found=sorted(map(str, answered - wanted))[:3],
                do="correct the experiment's run_batch",
            ),
            journal,
        )
    for row in done.rows:
        registry.check_columns([column for column in row if column not in _beside(name)], name)


def _beside(name: str) -> set[str]:
    """Names of other outputs, under which a row may carry rows of theirs."""
    return set(registry.OUTPUTS) - {name} - set(registry.output(name).columns)


def _write(results: Path, name: str, rows: list[dict], key: str, facts: dict):
    import pandas

    tables = {other: [row.pop(other) for row in rows if other in row] for other in _beside(name)}
    tables = {other: list(itertools.chain.from_iterable(parts)) for other, parts in tables.items()}
    beside = sorted(other for other, parts in tables.items() if parts)
    for other in beside:
        outputs.write(results, other, pandas.DataFrame(tables[other]), facts=facts, key=key)
    # Last, because its key is what says that everything is there.
    facts = {**facts, "beside": beside}
    return outputs.write(results, name, pandas.DataFrame(rows), facts=facts, key=key)
