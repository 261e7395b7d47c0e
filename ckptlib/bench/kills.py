"""SIGKILL trials per second: the work of notebook 03, done as that does it."""

from __future__ import annotations

import time
from pathlib import Path

from ckptlib.bench.frame import Measure, Sample, Setting
from ckptlib.experiments import crash_operations

TRIALS = 240  # of each worker, about
EACH = 40  # of a batch
SEED = 1


def killing(workers: int, setting: Setting, trials: int = TRIALS) -> Measure:
    """Measure how long the workers take to kill saves, recover, judge and save on.

    Every worker has the same trials, drawn evenly from all places of all flows, so that two have
    twice the work of one. What a flow costs before its first trial is part of it.
    """
    traced = crash_operations.traces(setting.scratch, SEED)
    whole = crash_operations.plan(traced, seed=SEED, seeds=1, every=1)
    batches: dict[tuple, list[dict]] = {}
    for trial in whole:
        key = tuple(trial[name] for name in crash_operations.BATCH)
        batches.setdefault(key, []).append(trial)
    # the experiment's own batches, some of each kind of flow
    wanted = list(batches.values())
    chosen = [batch[:EACH] for batch in wanted[:: -(-len(wanted) * EACH // trials)]]
    places = [setting.scratch / f"worker-{number}" for number in range(workers)]
    for place in places:
        place.mkdir(parents=True)

    def measure() -> Sample:
        begun = time.perf_counter()
        done = _side_by_side(chosen, places)
        return Sample(sum(done), time.perf_counter() - begun)

    _side_by_side([chosen[0][:1]], places)  # the first time, workers start and import
    return measure


def _side_by_side(batches: list[list[dict]], places: list[Path]) -> list[int]:
    import joblib

    with joblib.parallel_config("loky", inner_max_num_threads=1):
        return joblib.Parallel(n_jobs=len(places), batch_size=1)(
            joblib.delayed(_kill)(batches, place) for place in places
        )


def _kill(batches: list[list[dict]], place: Path) -> int:
    return sum(len(crash_operations.run_batch(batch, place)) for batch in batches)
