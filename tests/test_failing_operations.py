"""Every operation fails: what was declared right comes of it, and the predecessor is never lost."""

from __future__ import annotations

import errno
import os

import pandas as pd
import pytest

from ckptlib import CheckpointStore
from ckptlib.crashes import mounts, oracle
from ckptlib.errors import InvalidInput, WriteFailed
from ckptlib.experiments import crash_operations, failing_operations, flows, payloads, registry
from ckptlib.faults import errors
from ckptlib.faults.errors import EARLY, FAULTS, FINISHING, LATE, FailingVFS
from ckptlib.vfs import RecordingVFS


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    return crash_operations.traces(tmp_path_factory.mktemp("scratch"), 1)


def run(trials, folder) -> pd.DataFrame:
    rows, batches = [], {}
    for trial in trials:
        key = tuple(trial[name] for name in failing_operations.BATCH)
        batches.setdefault(key, []).append(trial)
    for number, batch in enumerate(batches.values()):
        rows += failing_operations.run_batch(batch, folder / str(number))
    return registry.validate(pd.DataFrame(rows), "errors")


def test_every_operation_meets_every_fault_that_can_befall_it(traced):
    trials = pd.DataFrame(failing_operations.plan(traced, seed=1, every=1))
    assert trials["trial_id"].is_unique
    for arm, trace in traced.items():
        if arm[0] == failing_operations.MORE_OF_THE_SAME:
            continue
        own = trials[(trials[["flow", "mode", "protocol"]] == list(arm)).all(axis=1)]
        met = own.groupby("operation_index")["fault"].agg(set)
        assert met.index.to_list() == [op.index for op in trace]
        for op in trace:
            assert met[op.index] >= set(errors.ERRNOS)
            assert (errors.SHORT in met[op.index]) == (op.call == "write" and op.size > 1)
            assert (errors.LIE in met[op.index]) == (op.call in ("flush", "flush_dir"))


@pytest.mark.parametrize("every", [7, 101, 499])
def test_a_sample_has_some_of_every_fault(traced, every):
    everything = failing_operations.plan(traced, seed=1, every=1)
    sample = failing_operations.plan(traced, seed=1, every=every)
    assert {trial["trial_id"] for trial in sample} < {trial["trial_id"] for trial in everything}
    assert {trial["fault"] for trial in sample} == set(FAULTS)
    assert abs(len(sample) - len(everything) / every) <= len(FAULTS)


def test_what_is_right_is_declared_for_every_operation_fault_and_moment(traced):
    calls = {op.call for trace in traced.values() for op in trace}
    for call in calls:
        for fault in FAULTS:
            for when in (EARLY, FINISHING, LATE):
                declared = errors.right(call, fault, when)
                assert declared and set(declared) <= set(errors.RESULTS)
    assert errors.right("flush", "EIO", EARLY) == (errors.RETRIED,)
    assert errors.right("flush_dir", "EIO", FINISHING) == (errors.COMMITTED,)
    assert errors.right("rename", "EIO", EARLY) == (errors.REFUSED,)


def test_a_count_that_is_none_is_refused():
    with pytest.raises(InvalidInput, match="whole number"):
        failing_operations.plan({}, seed=1, every=0)


@pytest.mark.parametrize(("mode", "protocol"), [a for a in flows.GROUP_ARMS if a[0] != "unsafe"])
def test_a_save_whose_any_write_flush_or_rename_fails_is_never_a_silent_success(
    mode, protocol, traced, tmp_path
):
    key = ("later save", mode, protocol)
    trials = failing_operations.plan({key: traced[key]}, seed=1, every=1)
    changing = ("create", "write", "flush", "replace", "rename", "flush_dir", "mkdir")
    rows = run([t for t in trials if t["operation"] in changing], tmp_path)
    assert rows["as_declared"].all(), rows[~rows["as_declared"]]
    assert not rows["silent"].any() and not rows["predecessor_lost"].any()
    assert rows["next_save_ok"].all() and not rows["leftovers"].any()
    wanted = {errors.ABSORBED, errors.RETRIED, errors.REFUSED, errors.REMARKED}
    wanted |= {errors.COMMITTED} if mode == "atomic_dirsync" else set()
    assert set(rows["result"]) == wanted


def test_a_sample_of_all_flows_comes_out_as_declared(traced, tmp_path):
    rows = run(failing_operations.plan(traced, seed=1, every=101), tmp_path)
    assert rows["as_declared"].all(), rows[~rows["as_declared"]]
    atomic = rows[rows["mode"] != "unsafe"]
    assert not rows["silent"].any() and not atomic["predecessor_lost"].any()
    assert rows["next_save_ok"].all() and not rows["leftovers"].any()


def test_a_lying_flush_really_loses_the_bytes_and_says_so_once(tmp_path):
    """Else a writer that flushes the same file again would not be found out."""
    vfs = FailingVFS(2, errors.LIE)
    file = vfs.create(str(tmp_path / "f"))
    file.write(b"bytes")
    with pytest.raises(OSError) as caught:
        file.flush_durable()
    assert caught.value.errno == errno.EIO
    assert file.flush_durable() == "fsync"
    file.close()
    assert (tmp_path / "f").read_bytes() == bytes(5)


@pytest.mark.parametrize("name", ["create", "write", "flush_dir", "rename", "symlink", "lock"])
def test_an_interrupted_system_call_is_made_again(name, traced, tmp_path):
    key = ("later save", "atomic_dirsync", "batched")
    place = flows.place(tmp_path, *key, 1)
    place.prepare()
    index = next(op.index for op in traced[key] if op.call == name)
    vfs = FailingVFS(index, "EINTR")
    recorder = RecordingVFS(vfs)
    place.act(recorder, lambda step: None)
    assert vfs.struck.call == name and vfs.inner.armed is False
    assert len(recorder.operations) == len(traced[key])


@pytest.mark.needs_power("ext4")
@pytest.mark.parametrize(("mode", "protocol"), flows.GROUP_ARMS)
def test_a_disk_that_is_really_full_costs_the_save_and_nothing_else(mode, protocol, tmp_path):
    found = mounts.isolated(fill, tmp_path, mode, protocol)
    assert found["errno"] == errno.ENOSPC and found["path"]
    assert found["newest"] == found["recovered"]
    assert found["leftovers"] == [] and found["next"]


def fill(folder, mode: str, protocol: str) -> dict:
    """Save on a small file system in memory until it is full; then make room and save on."""
    place = folder / "small"
    place.mkdir()
    mounts.mount("none", str(place), "tmpfs", "size=512k")
    try:
        ballast = place / "ballast"
        ballast.write_bytes(bytes(96 * 1024))
        store = CheckpointStore(place / "job", mode=mode, protocol=protocol)
        newest = 0
        with pytest.raises(WriteFailed) as caught:
            for step in range(1, 40):
                store.save(step, payloads.small_group(1, step))
                newest = step
        found = {"errno": caught.value.errno, "path": caught.value.path, "newest": newest}
        found["recovered"] = store.load().step
        ballast.unlink()
        store.save(newest + 1, payloads.small_group(1, newest + 1))
        left = [name for name in oracle.leftovers(place / "job")]
        found |= {"next": store.load().step == newest + 1, "leftovers": left}
        assert os.path.isdir(place / "job")
        return found
    finally:
        mounts.unmount(str(place))
