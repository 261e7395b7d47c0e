"""A child really dies of SIGKILL, where the trace says, and nothing else ever does."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import psutil
import pytest

from ckptlib import install, verify
from ckptlib.crashes import kill
from ckptlib.crashes.kill import AFTER, BEFORE, DURING, KillFailed, Point, run_killed
from ckptlib.errors import InvalidInput
from ckptlib.manifests import COMMIT, MANIFEST
from ckptlib.store import CheckpointStore
from ckptlib.vfs import RecordingVFS

OLD, NEW = b"old" * 100, b"newer" * 1000
ARMS = [
    ("unsafe", "per_file"),
    *((mode, protocol) for mode in ("atomic_nodirsync", "atomic_dirsync")
      for protocol in ("per_file", "batched")),
]  # fmt: skip


def write(path, data, vfs, acknowledge):
    """A flow of four operations: stat, create, write, close."""
    vfs.exists(str(path))
    with vfs.create(str(path)) as file:
        acknowledge(1)
        file.write(data)
    acknowledge(2)


def overwrite(path, mode, vfs, acknowledge):
    install(path, NEW, mode, vfs=vfs)
    acknowledge(1)


def save(path, mode, protocol, vfs, acknowledge):
    store = CheckpointStore(path, mode=mode, protocol=protocol, run_id="r", format="numpy", vfs=vfs)
    store.save(3, {"model": {"step": 3, "note": "x" * 5000}, "optimizer": {"step": 3}})
    acknowledge(3)


def recorded(action, path) -> list:
    recorder = RecordingVFS()
    action(path, vfs=recorder, acknowledge=lambda step: None)
    return recorder.operations


# -- the kill itself ----------------------------------------------------------------------------


def test_a_write_is_cut_after_exactly_the_prefix(tmp_path):
    point = Point(2, DURING, "write", "torn", prefix=7)
    assert run_killed(partial(write, tmp_path / "torn", NEW), point) == [1]
    assert (tmp_path / "torn").read_bytes() == NEW[:7]


@pytest.mark.parametrize(("position", "size"), [(BEFORE, 0), (AFTER, len(NEW))])
def test_before_and_after_a_write_leave_nothing_of_it_or_all(tmp_path, position, size):
    run_killed(partial(write, tmp_path / "f", NEW), Point(2, position, "write", "f"))
    assert (tmp_path / "f").stat().st_size == size


def test_a_point_after_an_operation_that_fails_strikes_as_well(tmp_path):
    """The stat of a file that is not there yet raises, and the flow expects that."""
    run_killed(partial(write, tmp_path / "f", NEW), Point(0, AFTER, "stat", "f"))
    assert not (tmp_path / "f").exists()


def test_what_was_acknowledged_before_death_is_reported_in_order(tmp_path):
    point = Point(3, AFTER, "close", "f")
    assert run_killed(partial(write, tmp_path / "f", NEW), point) == [1]
    assert run_killed(partial(write, tmp_path / "g", NEW), survives=True) == [1, 2]


def test_the_child_dies_of_sigkill_so_that_nothing_of_it_runs_any_more(tmp_path):
    def action(vfs, acknowledge):
        try:
            write(tmp_path / "f", NEW, vfs, acknowledge)
        finally:  # neither handlers nor clean-up run in a killed process
            (tmp_path / "cleaned up").touch()

    run_killed(action, Point(2, BEFORE, "write", "f"))
    assert not (tmp_path / "cleaned up").exists()


def test_a_flow_may_kill_itself_without_a_point(tmp_path):
    def action(vfs, acknowledge):
        acknowledge(5)
        kill.die()

    assert run_killed(action) == [5]


def test_the_same_works_in_a_child_of_the_fork_server(tmp_path, monkeypatch):
    """What macOS does, where a process with threads cannot be forked safely."""
    monkeypatch.setattr(kill.sys, "platform", "darwin")
    point = Point(2, DURING, "write", "torn", prefix=9)
    assert run_killed(partial(write, tmp_path / "torn", NEW), point) == [1]
    assert (tmp_path / "torn").read_bytes() == NEW[:9]


# -- what must not pass for a kill --------------------------------------------------------------


def test_a_process_that_is_no_child_of_ours_is_never_killed(tmp_path):
    with pytest.raises(KillFailed, match="may not be killed"):
        kill.die()
    layered = kill.KillingVFS(Point(0, BEFORE, "mkdir", "d"))
    with pytest.raises(KillFailed, match="may not be killed"):
        layered.mkdir(str(tmp_path / "d"))


def test_a_child_that_outlives_its_point_is_an_error(tmp_path):
    with pytest.raises(KillFailed, match="not struck"):
        run_killed(partial(write, tmp_path / "f", NEW), Point(99, BEFORE, "write", "f"))


def test_a_child_that_was_meant_to_survive_and_died_is_an_error():
    with pytest.raises(KillFailed, match="to end by itself"):
        run_killed(lambda vfs, acknowledge: kill.die(), survives=True)


def test_a_sigkill_from_somebody_else_is_told_apart():
    """Such as the one that Linux sends when memory runs out."""
    with pytest.raises(KillFailed, match="not struck"):
        run_killed(lambda vfs, acknowledge: os.kill(os.getpid(), signal.SIGKILL))


def test_a_child_that_fails_hands_over_its_traceback():
    def action(vfs, acknowledge):
        raise LookupError("no such tensor")

    with pytest.raises(KillFailed, match="LookupError: no such tensor"):
        run_killed(action)


def test_a_child_that_hangs_is_killed_from_outside_and_reaped():
    before = set(psutil.Process().children())
    with pytest.raises(KillFailed, match="in time"):
        run_killed(lambda vfs, acknowledge: time.sleep(600), timeout_s=0.2)
    assert set(psutil.Process().children()) <= before


def test_a_flow_that_takes_another_course_than_the_trace_is_noticed(tmp_path):
    with pytest.raises(KillFailed, match="not the one in the trace"):
        run_killed(partial(write, tmp_path / "f", NEW), Point(2, BEFORE, "write", "another"))
    with pytest.raises(KillFailed, match="not the one in the trace"):
        run_killed(partial(write, tmp_path / "g", NEW), Point(3, BEFORE, "flush", "g"))


# -- points in a trace --------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "protocol"), ARMS)
def test_named_points_strike_where_their_names_say(tmp_path, mode, protocol):
    trace = recorded(partial(save, mode=mode, protocol=protocol), tmp_path / "trace")
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("trace/step-*/*")}

    def struck(name: str, point: Point) -> list[int]:
        """Sizes of what the killed save left behind, whatever the names are."""
        killed = partial(save, tmp_path / name, mode, protocol)
        assert run_killed(killed, point) == []
        found = [p for p in (tmp_path / name).rglob("*") if p.is_file()]
        return sorted(p.stat().st_size for p in found if p.name not in ("LOCK", "STORE.json"))

    parts = [sizes["model.npz"], sizes["optimizer.npz"]]
    assert struck("a", kill.halfway(trace, "model.npz")) == [sizes["model.npz"] // 2]
    assert struck("b", kill.before(trace, MANIFEST)) == sorted(parts)
    half = sizes[MANIFEST] // 2
    assert struck("c", kill.halfway(trace, MANIFEST)) == sorted([*parts, half])
    assert struck("d", kill.before(trace, COMMIT)) == sorted([*parts, sizes[MANIFEST]])
    assert struck("e", kill.installed(trace, COMMIT)) == sorted(sizes.values())
    assert all(not verify(path) for name in "abcd" for path in tmp_path.glob(f"{name}/step-*"))
    assert [bool(verify(path)) for path in tmp_path.glob("e/step-*")] == [True]


def test_a_name_that_the_trace_does_not_hold_is_refused(tmp_path):
    trace = recorded(partial(save, mode="unsafe", protocol="per_file"), tmp_path / "s")
    for locate in (kill.before, kill.halfway, kill.installed):
        with pytest.raises(InvalidInput, match="no such crash point"):
            locate(trace, "model.pt")


def test_every_point_is_before_and_after_each_operation_and_amid_each_write(tmp_path):
    trace = recorded(partial(overwrite, mode="atomic_dirsync"), tmp_path / "f")
    points = list(kill.every_point(trace))
    amid = [p for p in points if p.position == DURING]
    assert [p.index for p in points if p.position == BEFORE] == [op.index for op in trace]
    assert [p.index for p in points if p.position == AFTER] == [op.index for op in trace]
    assert {p.index for p in amid} == {op.index for op in trace if op.call == "write"}
    assert all(0 < p.prefix < trace[p.index].size for p in amid)


@pytest.mark.parametrize("mode", ["unsafe", "atomic_nodirsync", "atomic_dirsync"])
def test_killed_anywhere_the_name_holds_the_old_bytes_or_the_new_unless_unsafe(tmp_path, mode):
    def fresh(name: str):
        path = tmp_path / name / "store" / "f"  # the same folder name as where the trace was made
        path.parent.mkdir(parents=True)
        install(path, OLD, mode)
        return path

    whole = []
    for number, point in enumerate(
        kill.every_point(recorded(partial(overwrite, mode=mode), fresh("trace")))
    ):
        path = fresh(str(number))
        run_killed(partial(overwrite, path, mode), point)
        whole.append(path.read_bytes() in (OLD, NEW) and bool(verify(path)))
    assert len(whole) > 10
    assert all(whole) if mode != "unsafe" else not all(whole)
