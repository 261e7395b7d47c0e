"""Crash states judged per second: the work of notebook 06, done as that does it."""

from __future__ import annotations

import time
from collections import Counter
from functools import cache
from pathlib import Path

from ckptlib.bench.frame import Measure, Sample, Setting
from ckptlib.crashes import filesystems, mounts
from ckptlib.experiments import power_judging, power_loss

ARM = ("mode", "protocol", "workload")
#: The logs that every worker goes through: what most trials are.
ARMS = (
    ("unsafe", "per_file", "saves"),
    ("atomic_nodirsync", "batched", "saves"),
    ("atomic_dirsync", "per_file", "saves"),
    ("atomic_dirsync", "batched", "saves"),
)
STATES = 60  # of each log
REST = "rest"
_support = cache(filesystems.support)


def needs(filesystem: str, setting: Setting) -> str:
    """Why no power can be cut on this file system here; an empty text if it can."""
    return _support()[filesystem].replace("make reproduce", "make bench")


def judging(filesystem: str, workers: int, setting: Setting, states: int = STATES) -> Measure:
    """Record logs; measure how long the workers take to judge crash states of them.

    Every worker judges the same states, so that two have twice the work of one. What a log costs
    before its first state is part of it.
    """
    logs = _recorded(filesystem, states, setting.scratch)
    places = [setting.scratch / f"worker-{number}" for number in range(workers)]
    for place in places:
        place.mkdir()

    def measure() -> Sample:
        begun = time.perf_counter()
        found = _side_by_side(logs, places)
        seconds = time.perf_counter() - begun
        parts = Counter()
        for _, timings in found:
            parts.update(timings)
        return Sample(sum(count for count, _ in found), seconds, dict(parts))

    _side_by_side(logs[:1], places)  # the first time, workers start and import
    return measure


def _recorded(filesystem: str, states: int, folder: Path) -> list[Path]:
    trials = [
        {"trial_id": "-".join(arm), "filesystem": filesystem, **dict(zip(ARM, arm, strict=True)),
         "omitted": "", "seed": 1, "log": "-".join(arm), "states": states, "folder": str(folder)}
        for arm in ARMS
    ]  # fmt: skip
    power_loss.record_batch(trials, folder)
    return [folder / f"{trial['log']}.plog" for trial in trials]


def _side_by_side(logs: list[Path], places: list[Path]) -> list[tuple[int, dict[str, float]]]:
    import joblib

    with joblib.parallel_config("loky", inner_max_num_threads=1):
        return joblib.Parallel(n_jobs=len(places), batch_size=1)(
            joblib.delayed(_judge)(logs, place) for place in places
        )


def _judge(logs: list[Path], place: Path) -> tuple[int, dict[str, float]]:
    """In a worker: states judged, and the seconds of their parts."""
    import torch

    torch.set_num_threads(1)  # before the fork: a child has no other threads to wait for
    judged, total = 0, Counter()
    for log in logs:
        count, timings = mounts.isolated(_judge_log, log, place)
        judged += count
        total.update(timings)
    return judged, dict(total)


def _judge_log(log: Path, place: Path) -> tuple[int, dict[str, float]]:
    timings: dict[str, float] = {}
    begun = time.perf_counter()
    rows = power_judging.judge_log(log, place, timings=timings)
    spent = time.perf_counter() - begun
    return len(rows), {**timings, REST: spent - sum(timings.values())}
