"""All benchmarks. To add one, add an entry; its peer, if it has one, is another entry."""

from __future__ import annotations

from functools import partial

from ckptlib.bench import calibration, kills, power
from ckptlib.bench.frame import CALIBRATION, Benchmark
from ckptlib.crashes.filesystems import MAIN


def table(jobs: int) -> list[Benchmark]:
    """The benchmarks, for a number of workers: what runs on several is run on one as well."""
    return [
        Benchmark(f"{CALIBRATION}/sha256", "SHA-256 of memory, one core", "MiB/s",
                  calibration.sha256),
        Benchmark(f"{CALIBRATION}/fork", "processes forked and waited for", "processes/s",
                  calibration.forks),
        *(
            Benchmark(
                f"power/{name}/{workers}",
                f"crash states of {name} judged, {workers} worker{'s'[: workers > 1]}",
                "states/s",
                partial(power.judging, name, workers),
                partial(power.needs, name),
                peer=f"power/{name}/1" if workers > 1 else "",
            )
            for name in MAIN
            for workers in dict.fromkeys((1, jobs))
        ),
        *(
            Benchmark(
                f"kill/{workers}",
                f"saves killed and judged, {workers} worker{'s'[: workers > 1]}",
                "trials/s",
                partial(kills.killing, workers),
                peer="kill/1" if workers > 1 else "",
            )
            for workers in dict.fromkeys((1, jobs))
        ),
    ]  # fmt: skip
