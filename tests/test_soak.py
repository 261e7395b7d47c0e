"""Contention: one writer at a time, no half checkpoint for readers, and a broken lock shows."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from ckptlib import housekeeping, store
from ckptlib.errors import InvalidInput
from ckptlib.experiments import soak


@pytest.mark.parametrize(("mode", "protocol"), [("atomic_dirsync", "batched"),
                                                ("atomic_dirsync", "per_file")])  # fmt: skip
def test_eight_writers_and_four_readers_violate_nothing(tmp_path, mode, protocol):
    found = soak.soak(tmp_path / "place", seconds=5, mode=mode, protocol=protocol)
    assert found["violations"] == []
    assert found["saves"] > 8 and found["busy"] > 0 and found["loads"] > 8


def test_a_lock_that_does_not_lock_is_found_out(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def unlocked(vfs, root):
        housekeeping.temps.sweep(vfs, root, own_all=True)
        yield

    monkeypatch.setattr(store.housekeeping, "writer", unlocked)
    found = soak.soak(
        tmp_path / "place", seconds=3, mode="atomic_dirsync", protocol="batched", start="fork"
    )
    assert found["violations"]


@pytest.mark.parametrize("wrong", [{"seconds": 0}, {"writers": 0}, {"readers": -1}])
def test_a_soak_of_nothing_is_refused(tmp_path, wrong):
    with pytest.raises(InvalidInput, match="unusable soak"):
        soak.soak(tmp_path, **{"seconds": 1, "mode": "unsafe", "protocol": "per_file", **wrong})


def test_the_command_says_what_came_of_it(tmp_path):
    command = [sys.executable, "-m", "ckptlib.soak", "--seconds", "2", "--writers", "2",
               "--readers", "1", "--scratch", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("0 violations") == 4
    command[-3] = "0"
    command[4] = "-1"
    wrong = subprocess.run(command, capture_output=True, text=True)
    assert wrong.returncode == 2 and "unusable soak" in wrong.stderr
