"""What this machine does in the same minutes: two speeds that owe nothing to the suite's code."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time

from ckptlib.bench.frame import Measure, Sample, Setting

BUFFER = 2**20
BUFFERS = 256
FORKS = 300


def sha256(setting: Setting) -> Measure:
    """SHA-256 of memory that stays in the cache: what one core computes."""
    buffer = bytes(BUFFER)

    def measure() -> Sample:
        begun = time.perf_counter()
        digest = hashlib.sha256()
        for _ in range(BUFFERS):
            digest.update(buffer)
        return Sample(BUFFERS * BUFFER / 2**20, time.perf_counter() - begun)

    return measure


def forks(setting: Setting) -> Measure:
    """Processes forked, ended and waited for: what the kernel's own work costs.

    They are forked by a small process, since forking takes longer the more a process has loaded.
    """

    def measure() -> Sample:
        command = [sys.executable, "-m", "ckptlib.bench.calibration"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return Sample(FORKS, float(done.stdout))

    return measure


def _fork(count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return time.perf_counter() - begun


if __name__ == "__main__":
    print(_fork(FORKS))
