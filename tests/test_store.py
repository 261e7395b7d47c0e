"""The store: save, roll back, prune, scrub; whatever happens, the last valid checkpoint stays."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch
from faulty import (
    ATOMIC,
    ERRNOS,
    PROTOCOLS,
    FailingVFS,
    KillingVFS,
    WatchingVFS,
    at,
    contents,
    filled,
    in_child,
    is_typed,
    leftovers,
    parts,
    record,
    same,
    skip_the_medium,
    tear,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ckptlib import CheckpointStore, guard, manifests, sidecars, temps, write_modes
from ckptlib.catalog import STORE, Catalog, step_name
from ckptlib.digests import content_digest
from ckptlib.errors import (
    AlreadyExists,
    CkptError,
    CommittedNotDurable,
    CorruptCheckpoint,
    InvalidInput,
    NoValidCheckpoint,
    StoreBusy,
    StoreEmpty,
    UnsupportedState,
    WriteFailed,
)
from ckptlib.guard import INDETERMINATE, INVALID, UNVERIFIED
from ckptlib.manifests import COMMIT, MANIFEST
from ckptlib.vfs import REAL, RecordingVFS

EACH = pytest.mark.parametrize(("mode", "protocol"), PROTOCOLS)
EACH_ATOMIC = pytest.mark.parametrize(("mode", "protocol"), ATOMIC)


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "store"


def recommit(root, step: int, **changes) -> None:
    """Change a manifest and commit it again."""
    document = json.loads((at(root, step) / MANIFEST).read_text()) | changes
    data = sidecars.canonical(document)
    (at(root, step) / MANIFEST).write_bytes(data)
    (at(root, step) / COMMIT).write_bytes(manifests.commit_bytes(data))


# -- saving and loading ---------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["torch", "safetensors", "numpy"])
@EACH
def test_what_was_saved_is_what_is_loaded(root, mode, protocol, format):
    store = CheckpointStore(root, mode=mode, protocol=protocol, format=format)
    receipt = store.save(3, parts(3))
    for reader in (store, CheckpointStore(root)):
        found = reader.load()
        assert (found.step, found.sequence, found.path) == (3, 1, receipt.path)
        assert same(found.parts, dict(sorted(parts(3).items()))) and found.skipped == []
        assert found.manifest_digest == receipt.manifest_digest
    files = contents(receipt.path)
    assert receipt.bytes == sum(map(len, files.values()))
    assert receipt.manifest_digest == manifests.digest(files[MANIFEST])
    assert sorted(os.listdir(root)) == ["LOCK", STORE, "latest_ok", step_name(3)]


def test_the_receipt_of_each_mode_says_what_was_flushed(root):
    receipts = {
        (mode, protocol): filled(root / f"{mode}-{protocol}", mode=mode, protocol=protocol).save(
            1, parts(1)
        )
        for mode, protocol in PROTOCOLS
    }
    durable = {key for key, receipt in receipts.items() if receipt.durable}
    assert durable == {("atomic_dirsync", "per_file"), ("atomic_dirsync", "batched")}
    assert all(receipt.reason for receipt in receipts.values())
    assert receipts["unsafe", "per_file"].flush_calls == 0
    assert receipts["unsafe", "per_file"].primitive == "none"
    assert "director" in receipts["atomic_dirsync", "artifact"].reason
    assert (
        receipts["atomic_dirsync", "batched"].flush_calls
        < receipts["atomic_dirsync", "per_file"].flush_calls
    )


def test_every_directory_that_the_first_save_creates_and_its_holder_is_flushed(tmp_path):
    root = tmp_path / "a/b/store"
    operations = record(lambda vfs: CheckpointStore(root, vfs=vfs).save(1, parts(1)))
    made = [op.path for op in operations if op.call == "mkdir"]
    for index, op in enumerate(operations):
        if op.call == "mkdir":
            later = [o.path for o in operations[index:] if o.call == "flush_dir"]
            assert os.path.dirname(op.path) in later
    assert [str(tmp_path / p) for p in ("a", "a/b", "a/b/store")] == made[:3]


def test_a_directory_whose_flush_failed_is_flushed_before_anything_is_called_durable(tmp_path):
    root = tmp_path / "a/store"
    with pytest.raises(WriteFailed):
        CheckpointStore(root, vfs=FailingVFS(0, errno.EIO, lambda op: op.call == "flush_dir")).save(
            1, parts(1)
        )
    vfs = RecordingVFS()
    assert CheckpointStore(root, vfs=vfs).save(1, parts(1)).durable
    flushed = [op.path for op in vfs.operations if op.call == "flush_dir"]
    assert str(tmp_path) in flushed and str(tmp_path / "a") in flushed


def test_a_process_that_died_between_making_the_store_and_flushing_its_name_is_made_good(tmp_path):
    root = tmp_path / "store"
    operations = record(lambda vfs: CheckpointStore(tmp_path / "x", vfs=vfs).save(1, parts(1)))
    first_flush = next(op.index for op in operations if op.call == "flush_dir")
    killed = in_child(lambda: CheckpointStore(root, vfs=KillingVFS(first_flush)).save(1, parts(1)))
    assert killed == -9 and root.is_dir()
    vfs = RecordingVFS()
    assert CheckpointStore(root, vfs=vfs).save(1, parts(1)).durable
    assert str(tmp_path) in [op.path for op in vfs.operations if op.call == "flush_dir"]


def test_a_save_holds_every_byte_of_an_expanded_conjugate_and_empty_tensor(root):
    state = {
        "expanded": torch.ones(1).expand(3, 4),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "empty": torch.zeros(0, 3),
    }
    found = filled(root, content_digests=True)
    found.save(1, {"model": state})
    assert content_digest(found.load().parts["model"]) == content_digest(state)


def test_content_digests_and_schemas_are_recorded_where_asked_for(root):
    filled(root, 1, content_digests=True)
    document = json.loads((at(root, 1) / MANIFEST).read_text())
    entry = document["parts"]["model"]
    assert entry["content"] == content_digest(parts(1)["model"])
    assert entry["schema"]["weight"] == ["torch.float32", [8, 4]]


def test_map_location_reaches_every_tensor(root):
    found = filled(root, 1).load(map_location="meta")
    assert found.parts["model"]["weight"].is_meta


@pytest.mark.parametrize("name", ["p" * 100, "p" * 117, "p" * 120, "a+b.c_d-e"])
@pytest.mark.parametrize("format", ["torch", "safetensors", "numpy"])
def test_a_part_name_that_is_accepted_can_be_loaded(root, name, format):
    store = CheckpointStore(root, format=format)
    try:
        store.save(1, {name: {"a": 1}})
    except InvalidInput:
        assert len(name) > 100
        return
    assert store.load().parts == {name: {"a": 1}}


@pytest.mark.parametrize(
    "step", [0, 1, 10**12 - 1, 10**12, 10**17, 10**18 - 1, 10**18, 2**62, 10**30]
)
def test_a_step_that_is_accepted_can_be_loaded(root, step):
    store = CheckpointStore(root)
    try:
        store.save(step, {"p": {}})
    except InvalidInput:
        assert step > 10**15
        return
    assert store.load().step == step == CheckpointStore(root).latest()


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "2", numpy.int64(3)])
def test_a_count_to_keep_that_could_mean_anything_else_is_refused(root, keep):
    store = filled(root, 1, 2)
    with pytest.raises(InvalidInput, match="keep"):
        CheckpointStore(root, keep=keep)
    with pytest.raises(InvalidInput, match="keep"):
        store.prune(keep)
    assert store.steps() == [2, 1]


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None, numpy.int64(1), float("nan")])
def test_a_step_that_is_no_whole_number_is_refused(root, step):
    with pytest.raises(InvalidInput, match="step"):
        CheckpointStore(root).save(step, parts())
    with pytest.raises(InvalidInput, match="step"):
        CheckpointStore(root).verify(step)
    assert not root.exists()


@pytest.mark.parametrize(
    "wrong",
    [None, {}, [], "model", {"": {}}, {"../x": {}}, {"a/b": {}}, {5: {}}, {"MANIFEST.json": {}},
     {".x": {}}, {"a\0": {}}, {None: {}}],
)  # fmt: skip
def test_unusable_parts_are_refused_before_anything_is_written(root, wrong):
    with pytest.raises(InvalidInput):
        CheckpointStore(root).save(1, wrong)
    assert not root.exists()


@pytest.mark.parametrize(
    "options",
    [{"mode": "fast"}, {"format": "pickle"}, {"protocol": "x"}, {"run_id": ""}, {"run_id": 5},
     {"mode": "unsafe", "protocol": "batched"}, {"run_id": "x" * 201}],
)  # fmt: skip
def test_unusable_options_are_refused(root, options):
    with pytest.raises(InvalidInput):
        CheckpointStore(root, **options)
    assert not root.exists()


def test_a_state_that_could_not_be_loaded_is_refused_by_part_and_key_before_writing(root):
    with pytest.raises(UnsupportedState) as caught:
        CheckpointStore(root).save(1, {"model": {"ok": 1}, "extra": {"a": [object()]}})
    assert caught.value.key == "extra/a/0" and "extra" in str(caught.value)
    assert not root.exists()


def test_a_store_below_a_file_is_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("x")
    for place in ("file", "file/below"):
        with pytest.raises(CkptError) as caught:
            CheckpointStore(tmp_path / place).save(1, parts())
        assert "file" in str(caught.value)
    assert (tmp_path / "file").read_text() == "x"


# -- rolling back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["model.pt", "optimizer.pt", "extra.pt", MANIFEST, COMMIT])
@pytest.mark.parametrize("damage", ["torn", "flipped", "missing", "empty"])
def test_a_damaged_newest_is_passed_over_and_reported(root, file, damage):
    store = filled(root, 1, 2, 3)
    path = at(root, 3) / file
    data = path.read_bytes()
    changed = {"torn": data[:-5], "flipped": bytes([data[0] ^ 1]) + data[1:], "empty": b""}
    path.unlink() if damage == "missing" else path.write_bytes(changed[damage])
    for reader in (store, CheckpointStore(root)):
        found = reader.load()
        assert found.step == 2 and same(found.parts, dict(sorted(parts(2).items())))
        [skipped] = found.skipped
        assert skipped.step == 3 and skipped.path == str(at(root, 3))
        assert skipped.verdict.status == INVALID and skipped.verdict.reason
        assert "step 3" in str(skipped)
    assert store.latest() == 2
    assert contents(at(root, 3)), "loading moves nothing"


def test_several_damaged_ones_are_all_reported(root):
    store = filled(root, 1, 2, 3, 4)
    tear(root, 4), (at(root, 3) / COMMIT).unlink()
    found = store.load()
    assert found.step == 2 and sorted(s.step for s in found.skipped) == [3, 4]


def test_older_damage_is_not_looked_at_when_the_newest_is_good(root):
    store = filled(root, 1, 2)
    tear(root, 1)
    assert store.load().skipped == []


def test_an_unverified_checkpoint_is_not_loaded(root):
    store = filled(root, 1, 2)
    document = json.loads((at(root, 2) / MANIFEST).read_text())
    document["parts"]["model"]["sha256"] = None
    recommit(root, 2, parts=document["parts"])
    found = store.load()
    assert found.step == 1
    assert [s.verdict.status for s in found.skipped] == [UNVERIFIED]


def test_an_io_error_while_verifying_leads_on_and_moves_nothing(root):
    filled(root, 1, 2)

    def reads(op):
        return op.call == "read" and step_name(2) in op.path

    vfs = FailingVFS(0, errno.EIO, reads, last=99)
    store = CheckpointStore(root, vfs=vfs)
    found = store.load()
    assert found.step == 1 and found.skipped[0].verdict.status == INDETERMINATE
    assert [r.moved_to for r in store.scrub()] == ["", ""]
    assert CheckpointStore(root).load().step == 2


def test_a_later_schema_is_passed_over_and_never_touched(root):
    store = filled(root, 1, 2)
    recommit(root, 2, schema="ckptlib.manifest/9")
    before = contents(at(root, 2))
    found = store.load()
    assert found.step == 1 and found.skipped[0].verdict.status == INDETERMINATE
    assert {r.step: r.moved_to for r in store.scrub()} == {1: "", 2: ""}
    with pytest.raises(AlreadyExists):
        store.save(2, parts(5))
    store.prune(1)
    assert contents(at(root, 2)) == before


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, ImportError])
def test_errors_that_say_nothing_about_checkpoints_propagate_and_move_nothing(root, error):
    filled(root, 1, 2)
    before = contents(root)
    operations = record(lambda vfs: CheckpointStore(root, vfs=vfs).load())
    for n in range(0, len(operations), 3):
        with pytest.raises(error):
            CheckpointStore(root, vfs=FailingVFS(n, error())).load()
    assert contents(root) == before


@pytest.mark.parametrize("error", [MemoryError, ImportError, KeyboardInterrupt, RuntimeError])
def test_an_error_of_the_loader_on_bytes_that_matched_is_no_verdict(root, monkeypatch, error):
    """No memory, no such device, a mistake of the caller: nothing about the checkpoint."""
    store = filled(root, 1, 2)

    def broken(storage, location):
        raise error("the caller's own")

    with pytest.raises(error):
        store.load(map_location=broken)
    assert store.load().step == 2


def test_a_device_that_does_not_exist_is_not_taken_for_damage(root):
    store = filled(root, 1, 2)
    with pytest.raises(Exception) as caught:
        store.load(map_location="cuda:99")
    assert not isinstance(caught.value, NoValidCheckpoint)


def test_non_finite_values_are_refused_only_where_asked_for(root):
    store = filled(root, 1)
    bad = {"w": torch.tensor([1.0, float("nan")]), "z": torch.tensor([-0.0, 1e-45])}
    store.save(2, {"model": bad})
    assert store.load().step == 2 and store.verify(2)
    found = store.load(finite=True)
    assert found.step == 1 and found.skipped[0].verdict.layer == "finite"
    assert "w" in found.skipped[0].verdict.reason
    store.scrub()
    assert store.load().step == 2, "and nothing is moved because of it"


def test_finiteness_is_asked_of_sparse_tensors_without_trouble(root):
    store = CheckpointStore(root)
    store.save(1, {"model": {"s": torch.tensor([0.0, 1.0]).to_sparse()}})
    store.save(2, {"model": {"s": torch.tensor([0.0, float("inf")]).to_sparse()}})
    assert store.load(finite=True).step == 1


# -- nothing to load ------------------------------------------------------------------------------


def test_an_empty_store_is_told_apart_from_one_without_a_valid_checkpoint(root):
    store = CheckpointStore(root)
    with pytest.raises(StoreEmpty):
        store.load()
    assert store.load(allow_empty=True) is None
    assert (store.steps(), store.latest(), store.head()) == ([], None, None)
    assert store.prune(1) == [] and store.scrub() == [] and not root.exists()
    store.save(1, parts(1))
    tear(root, 1)
    for reader in (store, CheckpointStore(root)):
        for options in ({}, {"allow_empty": True}):
            with pytest.raises(NoValidCheckpoint) as caught:
                reader.load(**options)
            assert [s.step for s in caught.value.skipped] == [1]
            assert "model.pt" in str(caught.value)


@pytest.mark.parametrize("damage", ["torn part", "no commit", "torn commit", "no manifest"])
def test_a_store_whose_checkpoints_were_all_quarantined_is_not_empty(root, damage):
    store = filled(root, 1, 2)
    for step in (1, 2):
        if damage == "torn part":
            tear(root, step)
        else:
            path = at(root, step) / (MANIFEST if "manifest" in damage else COMMIT)
            path.unlink() if damage.startswith("no") else path.write_bytes(b"{")
    assert all(r.moved_to for r in store.scrub())
    for reader in (store, CheckpointStore(root)):
        with pytest.raises(NoValidCheckpoint):
            reader.load(allow_empty=True)


@pytest.mark.parametrize(("mode", "protocol"), PROTOCOLS)
def test_a_store_whose_first_save_was_torn_before_the_commit_is_empty(root, mode, protocol):
    root.mkdir()
    operations = record(
        lambda vfs: CheckpointStore(root / "x", mode=mode, protocol=protocol, vfs=vfs).save(
            1, parts(1)
        )
    )
    last_write = max(i for i, op in enumerate(operations) if op.call == "write")
    vfs = KillingVFS(last_write)  # the commit record's
    options = {"mode": mode, "protocol": protocol}
    torn = root / "y"
    assert in_child(lambda: CheckpointStore(torn, vfs=vfs, **options).save(1, parts(1))) == -9
    store = CheckpointStore(torn, **options)
    if mode == "unsafe":  # an empty COMMIT.json stands there: an alarm is the safe answer
        with pytest.raises((StoreEmpty, NoValidCheckpoint)):
            store.load()
    else:
        assert store.load(allow_empty=True) is None
        with pytest.raises(StoreEmpty):
            store.load()
    store.save(1, parts(1))
    assert store.load().step == 1


@pytest.mark.parametrize(
    "text", ["missing", "is missing", '{"schema":"missing"}', '{"schema":"is missing"}', ""]
)
def test_a_damaged_commit_record_is_never_taken_for_an_empty_store(root, text):
    filled(root, 1)
    (root / "latest_ok").unlink()
    (at(root, 1) / COMMIT).write_text(text)
    with pytest.raises(NoValidCheckpoint):
        CheckpointStore(root).load(allow_empty=True)


def test_nothing_in_the_stores_path_can_hide_an_alarm(tmp_path):
    root = tmp_path / "is missing" / "it belongs to run"
    store = filled(root, 1)
    (root / "latest_ok").unlink()
    (at(root, 1) / COMMIT).write_bytes(b"x" * 5000)
    with pytest.raises(NoValidCheckpoint):
        store.load(allow_empty=True)


# -- runs -----------------------------------------------------------------------------------------


def test_the_store_remembers_its_run(root):
    first = filled(root, 1)
    assert CheckpointStore(root).run_id == first.run_id
    assert CheckpointStore(root, new_run=True).run_id != first.run_id
    assert CheckpointStore(root, run_id="mine").run_id == "mine"


def test_another_runs_higher_step_is_passed_over_with_the_reason(root):
    filled(root, 100, run_id="other")
    store = filled(root, 5, run_id="mine")
    found = store.load()
    assert found.step == 5
    filled(root, 200, run_id="other")
    found = CheckpointStore(root, run_id="mine").load()
    assert found.step == 5 and found.parts["extra"]["epoch"] == 5
    assert 200 in [s.step for s in found.skipped]
    assert all("other" in s.verdict.reason for s in found.skipped)
    assert CheckpointStore(root, run_id="other").load().step == 200


def test_a_new_run_beside_others_is_empty_until_it_has_saved(root):
    filled(root, 1, 2, run_id="old")
    store = CheckpointStore(root, new_run=True)
    assert store.load(allow_empty=True) is None
    store.save(10, parts(10))
    again = CheckpointStore(root)
    assert again.run_id == store.run_id and again.load().step == 10
    assert again.steps() == [10]


def test_a_new_run_that_was_killed_in_its_first_save_can_start_again(root):
    filled(root, 1, run_id="old")
    new = CheckpointStore(root, run_id="new")
    operations = record(lambda vfs: filled(root.parent / "x", vfs=vfs).save(2, parts(2)))
    vfs = KillingVFS(max(i for i, op in enumerate(operations) if op.call == "write"))
    assert in_child(lambda: CheckpointStore(root, run_id="new", vfs=vfs).save(2, parts(2))) == -9
    assert new.load(allow_empty=True) is None
    assert CheckpointStore(root).load(allow_empty=True) is None
    assert CheckpointStore(root).run_id == "new"


def test_pruning_leaves_other_runs_alone(root):
    filled(root, 1, 2, run_id="old")
    store = filled(root, 3, 4, 5, run_id="new")
    assert sorted(store.prune(1)) == [3, 4]
    assert CheckpointStore(root, run_id="old").steps() == [2, 1]


@pytest.mark.parametrize(
    "data", [None, b"", b"{", b"\xff", b"[]", b'{"schema":"ckptlib.store/1"}', b"[" * 60_000,
             b'{"schema":"ckptlib.store/1","run":5}', b"x" * 100_000]
)  # fmt: skip
def test_a_missing_or_damaged_store_record_is_made_good_from_the_checkpoints(root, data):
    run = filled(root, 1, 2).run_id
    (root / STORE).unlink() if data is None else (root / STORE).write_bytes(data)
    store = CheckpointStore(root)
    assert store.run_id == run and store.load().step == 2
    store.save(3, parts(3))
    assert json.loads((root / STORE).read_text())["run"] == run
    assert CheckpointStore(root).load().step == 3


def test_a_store_record_that_can_not_be_read_now_is_not_replaced(root):
    filled(root, 1, run_id="A")
    filled(root, 2, run_id="B")
    vfs = FailingVFS(0, errno.EIO, lambda op: op.path.endswith(STORE), last=99)
    with pytest.raises(CkptError) as caught:
        CheckpointStore(root, vfs=vfs).save(3, parts(3))
    assert caught.value.errno == errno.EIO
    assert json.loads((root / STORE).read_text())["run"] == "B"


def test_a_store_of_a_later_version_is_not_opened(root):
    filled(root, 1)
    (root / STORE).write_bytes(sidecars.canonical({"schema": "ckptlib.store/2", "run": "x"}))
    before = contents(root)
    with pytest.raises(CkptError, match="version"):
        CheckpointStore(root)
    assert contents(root) == before


# -- order ----------------------------------------------------------------------------------------


def test_the_commits_number_decides_the_order_not_the_step_or_any_file_time(root):
    store = filled(root, 10, 5, 7)
    assert store.steps() == [7, 5, 10] and store.load().step == 7
    for index, step in enumerate((7, 5, 10)):
        for path in (at(root, step), *at(root, step).iterdir()):
            os.utime(path, (10**9 * index, 10**9 * index))  # reversed, and equal within
    assert CheckpointStore(root).steps() == [7, 5, 10]
    future = time.time() + 10**8
    os.utime(at(root, 10), (future, future))
    assert CheckpointStore(root).load().step == 7
    assert CheckpointStore(root).prune(1) == [5, 10]


def test_the_checkpoint_just_written_is_never_the_one_that_goes(root):
    store = CheckpointStore(root, keep=1)
    for step in (10, 3, 7, 1, 0):
        store.save(step, parts(step))
        assert store.steps() == [step] and store.load().step == step


def test_sequences_go_on_after_pruning_quarantine_and_restart(root):
    filled(root, 1, 2, 3, keep=1)
    assert filled(root, 4, keep=1).load().sequence == 4
    tear(root, 4)
    store = CheckpointStore(root)
    store.scrub()
    receipt = store.save(5, parts(5))
    assert receipt.sequence == 5, "the quarantined one might be put back"


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_checkpoint_whose_predecessor_can_not_be_read_now_is_never_ordered_before_it(root, code):
    for step in range(1, 6):
        filled(root, step, keep=1)
    vfs = FailingVFS(0, code, lambda op: step_name(5) in op.path and op.call == "open", last=99)
    try:
        CheckpointStore(root, vfs=vfs).save(2, parts(2))
    except CkptError as error:
        assert error.errno == code
        assert CheckpointStore(root).load().step == 5
        CheckpointStore(root).save(2, parts(2))
    assert CheckpointStore(root).load().step == 2
    assert CheckpointStore(root).steps()[0] == 2


def test_a_save_that_met_a_passing_read_error_can_be_repeated_on_the_same_object(root):
    filled(root, 1)
    for call in ("stat", "open", "read"):
        vfs = FailingVFS(0, errno.EIO, lambda op, c=call: op.call == c and "step-" in op.path)
        store = CheckpointStore(root, vfs=vfs)
        step = max(CheckpointStore(root).steps()) + 1
        with contextlib.suppress(CkptError):
            store.save(step, parts(step))
        with contextlib.suppress(AlreadyExists):
            store.save(step, parts(step))
        assert vfs.failed and CheckpointStore(root).load().step == step, call


# -- write-once and moving aside ------------------------------------------------------------------


@EACH
def test_a_committed_step_is_write_once(root, mode, protocol):
    store = filled(root, 1, mode=mode, protocol=protocol)
    before = contents(at(root, 1))
    with pytest.raises(AlreadyExists, match="write-once"):
        store.save(1, parts(9))
    assert contents(at(root, 1)) == before and leftovers(root) == []
    assert store.load().step == 1


@pytest.mark.parametrize("damage", ["torn", "no commit"])
@EACH
def test_an_invalid_step_is_moved_aside_and_can_be_saved_again(root, mode, protocol, damage):
    store = filled(root, 1, 2, mode=mode, protocol=protocol)
    tear(root, 2) if damage == "torn" else (at(root, 2) / COMMIT).unlink()
    before = contents(at(root, 2))
    store.save(2, parts(22))
    assert store.load().parts["extra"]["epoch"] == 22
    [aside] = (root / "quarantine").iterdir()
    assert aside.name.startswith(step_name(2)) and contents(aside) == before


def test_a_step_whose_name_is_taken_by_a_file_or_a_link_is_not_written_through(root, tmp_path):
    store = filled(root, 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    at(root, 2).symlink_to(outside)
    at(root, 3).write_text("a file")
    for step in (2, 3):
        try:
            store.save(step, parts(step))
        except CkptError:
            continue
        assert store.load().step == step and at(root, step).is_dir()
        assert not at(root, step).is_symlink()
    assert os.listdir(outside) == []


def test_quarantine_is_a_rename_and_can_be_undone(root):
    store = filled(root, 1, 2)
    data = (at(root, 2) / "model.pt").read_bytes()
    tear(root, 2)
    before = contents(at(root, 2))
    report = {r.step: r for r in store.scrub()}
    assert report[1].verdict and report[1].moved_to == ""
    aside = Path(report[2].moved_to)
    assert not at(root, 2).exists() and contents(aside) == before
    assert os.readlink(root / "latest_ok") == step_name(1)
    (aside / "model.pt").write_bytes(data)
    os.rename(aside, at(root, 2))
    assert store.load().step == 2


def test_quarantining_the_same_step_again_keeps_both(root):
    store = filled(root, 1)
    for _ in range(3):
        store.save(2, parts(2))
        tear(root, 2)
        store.scrub()
    assert len(list((root / "quarantine").iterdir())) == 3


def test_scrubbing_writes_nothing_where_all_is_well(root):
    store = filled(root, 1, 2)
    before = contents(root)
    report = store.scrub()
    assert [(r.step, bool(r.verdict), r.moved_to) for r in report] == [(2, True, ""), (1, True, "")]
    assert contents(root) == before


# -- latest_ok ------------------------------------------------------------------------------------


def test_the_pointer_is_relative_and_follows_every_save(root, tmp_path):
    store = filled(root, 1, 2)
    assert os.readlink(root / "latest_ok") == step_name(2)
    moved = tmp_path / "moved"
    os.rename(root, moved)
    assert guard.verify(moved / "latest_ok") and CheckpointStore(moved).load().step == 2
    assert store.run_id == CheckpointStore(moved).run_id


@pytest.mark.parametrize("state", ["missing", "dangling", "loop", "removed", "file", "folder"])
def test_the_pointer_is_never_needed(root, tmp_path, state):
    store = filled(root, 1, 2)
    pointer = root / "latest_ok"
    pointer.unlink()
    if state == "file":
        pointer.write_text(step_name(1))
    elif state == "folder":
        pointer.mkdir()
    elif state != "missing":
        pointer.symlink_to({"dangling": "x", "loop": "latest_ok", "removed": step_name(9)}[state])
    assert store.load().step == CheckpointStore(root).load().step == 2
    receipt = store.save(3, parts(3))
    assert store.load().step == 3
    if state == "folder":
        assert "latest_ok" in receipt.reason
    else:
        assert os.readlink(pointer) == step_name(3)
    assert leftovers(root) == []


def test_a_pointer_that_fails_is_a_remark_since_the_checkpoint_is_safe(root):
    filled(root, 1)
    for call in ("symlink", "replace"):
        vfs = FailingVFS(
            0, errno.EIO, lambda op, c=call: op.call == c and not op.path.endswith(".json"), last=9
        )
        store = CheckpointStore(root, vfs=vfs)
        step = len(store.steps()) + 1
        receipt = store.save(step, parts(step))
        assert receipt.durable and "latest_ok" in receipt.reason
        assert CheckpointStore(root).load().step == step and leftovers(root) == []


def test_scrubbing_with_a_pointer_that_fails_is_a_typed_error_or_a_remark(root):
    filled(root, 1)
    for call in ("symlink", "replace"):
        vfs = FailingVFS(0, errno.EIO, lambda op, c=call: op.call == c, last=9)
        try:
            assert CheckpointStore(root, vfs=vfs).scrub()
        except CkptError as error:
            assert error.errno == errno.EIO
        assert leftovers(root) == []


# -- pruning --------------------------------------------------------------------------------------


def test_pruning_keeps_the_newest_valid_ones_and_torn_ones_do_not_count(root):
    store = filled(root, 1, 2, 3, 4)
    tear(root, 4), (at(root, 3) / COMMIT).unlink()
    assert store.prune(2) == []
    assert store.steps() == [4, 2, 1] and store.verify(1) and store.verify(2)
    assert at(root, 3).exists(), "damaged ones are not touched"
    assert store.prune(1) == [1]
    assert store.load().step == 2


def test_the_last_valid_checkpoint_is_never_pruned(root):
    store = filled(root, 1, 2, 3)
    tear(root, 3), tear(root, 2)
    assert store.prune(1) == [] and CheckpointStore(root).prune(1) == []
    assert store.load().step == 1


def test_a_checkpoint_damaged_after_it_was_verified_no_longer_counts(root):
    """Verified once per process and remembered, but by inode, size and time of change."""
    store = filled(root, 1, 2, 3)
    assert store.prune(3) == []
    for step in (3, 2):
        path = at(root, step) / "model.pt"
        data = bytearray(path.read_bytes())
        data[60] ^= 1
        path.write_bytes(data)
    assert store.prune(1) == [] and store.load().step == 1


def test_a_kept_checkpoint_is_hashed_once_in_a_process(root):
    filled(root, 1, 2, 3)
    vfs = RecordingVFS()
    store = CheckpointStore(root, keep=3, vfs=vfs)
    store.prune(3)
    first = sum(op.size for op in vfs.operations if op.call == "read" and op.path.endswith(".pt"))
    vfs.operations.clear()
    store.prune(3)
    again = sum(op.size for op in vfs.operations if op.call == "read" and op.path.endswith(".pt"))
    assert first > 0 and again == 0


def test_pruning_comes_after_the_commit_is_durable(root):
    filled(root, 1)
    vfs = RecordingVFS()
    CheckpointStore(root, keep=1, vfs=vfs).save(2, parts(2))
    order = [(op.call, op.path, op.target) for op in vfs.operations]
    new, old = str(at(root, 2)), str(at(root, 1))
    committed = next(i for i, o in enumerate(order) if o[0] == "rename" and o[2] == new)
    flushed = next(
        i for i, o in enumerate(order) if i > committed and o[:2] == ("flush_dir", str(root))
    )
    removed = next(i for i, o in enumerate(order) if o[0] == "rename" and o[1] == old)
    assert committed < flushed < removed
    gone = next(i for i, o in enumerate(order) if o[0] == "unlink" and i > removed)
    hidden = next(i for i, o in enumerate(order) if i > removed and o[0] == "flush_dir")
    assert removed < hidden < gone, "out of sight durably before anything is deleted"
    assert order[gone][1].endswith(COMMIT), "and the commit record goes first"


def test_a_save_that_is_committed_but_not_durable_prunes_nothing(root):
    filled(root, 1)
    operations = record(lambda vfs: filled(root.parent / "x", vfs=vfs).save(2, parts(2)))
    flushes = [op for op in operations if op.call == "flush_dir"]
    for n in range(len(flushes)):
        copy = root.parent / f"copy{n}"
        shutil.copytree(root, copy, symlinks=True)
        vfs = FailingVFS(n, errno.EIO, lambda op: op.call == "flush_dir")
        store = CheckpointStore(copy, keep=1, vfs=vfs)
        try:
            store.save(2, parts(2))
        except CommittedNotDurable as error:
            assert error.errno == errno.EIO
            assert error.receipt.manifest_digest == CheckpointStore(copy).head().split(":")[-1]
            assert error.receipt.bytes > 0 and error.receipt.durable is False
            assert CheckpointStore(copy).load().step == 2
            assert CheckpointStore(copy).verify(1), "the predecessor must be there still"
        except WriteFailed:
            assert CheckpointStore(copy).load().step == 1


def test_pruning_a_step_that_is_a_link_deletes_nothing_elsewhere(root, tmp_path):
    """People move old checkpoints to another disk and leave a link."""
    store = filled(root, 1, 2, 3)
    archive = tmp_path / "archive"
    shutil.move(at(root, 1), archive)
    at(root, 1).symlink_to(archive)
    before = contents(archive)
    store.prune(1)
    CheckpointStore(root).prune(1)
    CheckpointStore(root).scrub()
    CheckpointStore(root, keep=1).save(4, parts(4))
    assert contents(archive) == before


# -- lineage --------------------------------------------------------------------------------------


def test_the_predecessor_is_recorded_and_may_be_gone(root):
    store = filled(root, 1, 2, 3)
    first, second = (json.loads((at(root, s) / MANIFEST).read_text()) for s in (1, 2))
    assert first["previous"] is None
    assert second["previous"] == manifests.digest((at(root, 1) / MANIFEST).read_bytes())
    shutil.rmtree(at(root, 2))
    assert store.load().step == 3


def test_an_expected_head_is_found_in_the_lineage(root):
    store = filled(root, 1)
    first = store.head()
    store.save(2, parts(2))
    assert store.load(expect=first).step == 2 and store.load(expect=store.head()).step == 2


def test_a_store_that_was_rolled_back_as_a_whole_shows(root, tmp_path):
    store = filled(root, 1, 2)
    old = tmp_path / "old"
    shutil.copytree(root, old, symlinks=True)
    store.save(3, parts(3))
    head = store.head()
    shutil.rmtree(root)
    shutil.copytree(old, root, symlinks=True)
    assert CheckpointStore(root).load().step == 2
    with pytest.raises(CorruptCheckpoint, match="rolled back"):
        CheckpointStore(root).load(expect=head)


def test_pruning_the_predecessors_is_no_failure_of_the_lineage(root):
    store = filled(root, 1, keep=1)
    head = store.head()
    for step in (2, 3, 4):
        store.save(step, parts(step))
    assert store.load(expect=head).step == 4


# -- failures -------------------------------------------------------------------------------------


def small(step: int) -> dict:
    return {"model": {"w": torch.full((4,), float(step))}, "rng": {"step": step}}


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> dict:
    """A store with one checkpoint for each way of saving."""
    made = {}
    for mode, protocol in PROTOCOLS:
        folder = tmp_path_factory.mktemp("template") / "store"
        CheckpointStore(folder, mode=mode, protocol=protocol).save(2, small(2))
        made[mode, protocol] = folder
    return made


@EACH
def test_an_error_at_any_operation_of_a_save_is_typed_and_costs_nothing(
    tmp_path, monkeypatch, templates, mode, protocol
):
    """The errno changes from operation to operation, so that each kind meets several."""
    skip_the_medium(monkeypatch)
    monkeypatch.setattr(write_modes.time, "sleep", lambda seconds: None)
    options = {"mode": mode, "protocol": protocol, "keep": 1}
    root = tmp_path / "store"

    def save(vfs):
        return CheckpointStore(root, vfs=vfs, **options).save(3, small(3))

    shutil.copytree(templates[mode, protocol], root, symlinks=True)
    for n, op in enumerate(record(save)):
        shutil.rmtree(root)
        shutil.copytree(templates[mode, protocol], root, symlinks=True)
        code = ERRNOS[n % len(ERRNOS)]
        where = f"operation {n}: {op.call} {op.path} {errno.errorcode[code]}"
        newest = 3
        try:
            receipt = save(FailingVFS(n, code))
        except CommittedNotDurable as error:
            assert error.errno == code, where
            assert error.receipt.step == 3 and not error.receipt.durable, where
            assert guard.verify(at(root, 2)), f"pruned before it was durable: {where}"
        except CkptError as error:
            newest = None
            assert error.errno == code and is_typed(error), where
            # the close of unsafe's commit record comes after its last byte
            assert mode == "unsafe" or not guard.verify(at(root, 3)), where
            assert guard.verify(at(root, 2)) and leftovers(root) == [], where
        else:
            assert leftovers(root) == [] or "not pruned" in receipt.reason, where
        reader = CheckpointStore(root)
        found = reader.load()
        assert newest in (None, found.step) and found.step in (2, 3), where
        assert same(found.parts, small(found.step)), where
        sequences = [c.sequence for c in Catalog(REAL, str(root)).candidates() if c.manifest]
        assert len(set(sequences)) == len(sequences), where
        CheckpointStore(root, **options).save(4, small(4))
        assert reader.load().step == 4 and leftovers(root) == [], where


@pytest.mark.parametrize("call", ["load", "scrub", "steps", "latest", "head", "prune", "verify"])
def test_an_error_at_any_operation_of_a_reader_is_typed_and_moves_nothing_valid(
    tmp_path, monkeypatch, call
):
    skip_the_medium(monkeypatch)
    monkeypatch.setattr(write_modes.time, "sleep", lambda seconds: None)
    arguments = {"prune": (2,), "verify": (2,)}.get(call, ())
    root = filled(tmp_path / "store", 1, 2).path

    def run(vfs):
        return getattr(CheckpointStore(root, vfs=vfs), call)(*arguments)

    operations = record(run)
    for n, op in enumerate(operations):
        for code in (errno.EIO, errno.EACCES):
            try:
                run(FailingVFS(n, code))
            except CkptError as error:
                assert is_typed(error), f"operation {n}: {op.call}"
            assert CheckpointStore(root).steps() == [2, 1], f"operation {n}: {op.call} {op.path}"
            assert leftovers(root) == []


@EACH_ATOMIC
def test_a_kill_at_any_operation_of_a_save_that_prunes_leaves_a_valid_checkpoint(
    tmp_path, monkeypatch, templates, mode, protocol
):
    """keep=1: the most dangerous setting."""
    skip_the_medium(monkeypatch)
    options = {"mode": mode, "protocol": protocol, "keep": 1}
    root = tmp_path / "store"

    def save(vfs):
        return CheckpointStore(root, vfs=vfs, **options).save(3, small(3))

    shutil.copytree(templates[mode, protocol], root, symlinks=True)
    steps = set()
    for n, op in enumerate(record(save)):
        if op.call not in ("create", "write", "replace", "rename", "mkdir", "unlink", "rmdir"):
            continue  # nothing on disk differs from the operation before
        shutil.rmtree(root)
        shutil.copytree(templates[mode, protocol], root, symlinks=True)
        killing = KillingVFS(n, lambda size: size // 2)
        assert in_child(lambda v=killing: save(v)) == -9
        where = f"operation {n}: {op.call} {op.path}"
        found = CheckpointStore(root).load()
        assert found.step in (2, 3) and same(found.parts, small(found.step)), where
        steps.add(found.step)
        writer = CheckpointStore(root, **options)
        writer.save(4, small(4))
        assert CheckpointStore(root).load().step == 4, where
        writer.scrub(), writer.prune(1)  # what per_file began in place is moved aside first
        assert leftovers(root) == [] and writer.steps() == [4], where
    assert steps == {2, 3}


@pytest.mark.parametrize("call", ["prune", "scrub"])
def test_a_kill_during_pruning_or_scrubbing_is_repaired_by_doing_it_again(
    tmp_path, monkeypatch, call
):
    skip_the_medium(monkeypatch)
    template, root = tmp_path / "template", tmp_path / "store"
    filled(template, 1, 2, 3, 4)
    tear(template, 3)

    def run(vfs):
        store = CheckpointStore(root, vfs=vfs)
        store.prune(1) if call == "prune" else store.scrub()

    shutil.copytree(template, root, symlinks=True)
    operations = record(run)
    expected = CheckpointStore(root).steps()
    for n, op in enumerate(operations):
        if op.call in ("stat", "read", "list", "open", "close"):
            continue
        shutil.rmtree(root)
        shutil.copytree(template, root, symlinks=True)
        killing = KillingVFS(n)
        assert in_child(lambda v=killing: run(v)) == -9
        assert CheckpointStore(root).load().step == 4, f"operation {n}: {op.call}"
        run(REAL)
        assert CheckpointStore(root).steps() == expected and leftovers(root) == []
        assert CheckpointStore(root).load().step == 4


def test_a_failed_save_at_the_same_step_can_simply_be_repeated(root):
    for mode, protocol in PROTOCOLS:
        place = root / f"{mode}-{protocol}"
        filled(place, 1, mode=mode, protocol=protocol)
        vfs = FailingVFS(2, errno.ENOSPC, lambda op: op.call == "write", last=10**9)
        with pytest.raises(WriteFailed) as caught:
            CheckpointStore(place, mode=mode, protocol=protocol, vfs=vfs).save(2, parts(2))
        assert caught.value.errno == errno.ENOSPC
        assert CheckpointStore(place).load().step == 1
        filled(place, 2, mode=mode, protocol=protocol)
        assert CheckpointStore(place).load().step == 2 and leftovers(place) == []


# -- several processes ----------------------------------------------------------------------------

WRITER = """
    import sys, os, time
    from ckptlib import CheckpointStore
    from ckptlib.errors import CkptError
    root, number = sys.argv[1], int(sys.argv[2])
    store = CheckpointStore(root, format="numpy", run_id="run")
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        receipt = store.save(1, {"model": [number] * 20000, "who": number})
        print("saved", flush=True)
    except CkptError as error:
        print(type(error).__name__, flush=True)
"""


def test_of_eight_processes_saving_one_step_exactly_one_wins(root):
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(root)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen([*command, str(n)], **pipes) for n in range(8)]
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        words = [child.communicate(timeout=60)[0].strip() for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert words.count("saved") == 1
    assert set(words) <= {"saved", "StoreBusy", "AlreadyExists"}
    found = CheckpointStore(root).load()
    assert found.parts["who"] == words.index("saved")
    assert found.parts["model"] == [words.index("saved")] * 20000
    assert leftovers(root) == [] and CheckpointStore(root).steps() == [1]


def test_a_second_writer_is_told_that_the_store_is_busy(root):
    store = filled(root, 1)
    for change in (
        lambda: store.save(2, parts(2)),
        lambda: store.prune(1),
        lambda: store.scrub(),
    ):
        lock = REAL.lock(str(root / "LOCK"))
        before = contents(root)
        with pytest.raises(StoreBusy, match="another process"):
            change()
        assert store.load().step == 1, "readers need no lock"
        assert contents(root) == before
        lock.release()
    store.save(2, parts(2))


def test_the_lock_is_released_after_every_failure(root):
    store = filled(root, 1)
    for n in range(0, 60, 4):
        try:
            CheckpointStore(root, vfs=FailingVFS(n, errno.EIO)).save(9, parts(9))
            shutil.rmtree(at(root, 9))
        except CkptError:
            pass
        REAL.lock(str(root / "LOCK")).release()
    store.save(10, parts(10))


def test_a_live_writers_unfinished_files_are_not_swept_by_a_reader_or_a_refused_writer(root):
    store = filled(root, 1)
    lock = REAL.lock(str(root / "LOCK"))
    unfinished = root / temps.temp_name()
    unfinished.mkdir()
    with pytest.raises(StoreBusy):
        CheckpointStore(root).save(2, parts(2))
    store.load(), store.steps(), store.latest(), guard.verify(at(root, 1))
    assert unfinished.exists()
    lock.release()
    store.save(2, parts(2))
    assert not unfinished.exists(), "whoever holds the lock knows that its maker is dead"


def test_a_scan_never_takes_leftovers_for_checkpoints(root):
    store = filled(root, 1)
    for name in (".ckpt-tmp.x.1.0", "step-1", "step-0000000000002", "step-00000000000x", "step-",
                 "step-000000000003.tmp", "xstep-000000000004", "step-٠٠٠٠٠٠٠٠٠٠٠٥"):  # fmt: skip
        shutil.copytree(at(root, 1), root / name)
    assert store.steps() == CheckpointStore(root).steps() == [1]
    assert store.load().skipped == []


def test_a_forked_child_can_save_after_its_parent(root):
    store = filled(root, 1)
    assert in_child(lambda: store.save(2, small(2))) == 0
    store.save(3, small(3))
    assert store.steps() == [3, 2, 1] and [c for c in leftovers(root)] == []


def test_readers_beside_a_writer_that_saves_and_prunes_always_find_a_whole_checkpoint(root):
    """keep=1: what a reader has just listed is often gone before it is read."""
    state = {"w": torch.arange(20_000.0)}
    CheckpointStore(root, keep=1).save(1, {"a": state, "b": {"step": 1}})
    stop, problems, reads = threading.Event(), [], []

    def read():
        reader = CheckpointStore(root)
        newest = 0
        while not stop.is_set():
            try:
                found = reader.load()
            except BaseException as error:
                problems.append(error)
                return
            if found.parts["b"]["step"] != found.step or found.step < newest:
                problems.append(AssertionError(f"{found.step} after {newest}"))
            newest = found.step
            reads.append(newest)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    store, end, step = CheckpointStore(root, keep=1), time.monotonic() + 1.2, 1
    while time.monotonic() < end and not problems:
        step += 1
        store.save(step, {"a": state, "b": {"step": step}})
    stop.set()
    for thread in readers:
        thread.join()
    assert problems == [] and len(set(reads)) > 1


def test_a_reader_slower_than_the_writer_still_finds_a_checkpoint(root):
    """Each time that it begins to hash, the writer has saved the next and pruned this one."""
    writer, busy = CheckpointStore(root, keep=1), []
    writer.save(1, small(1))

    def before(op):
        if op.call == "read" and op.path.endswith("model.pt") and not busy:
            busy.append(True)
            step = writer.steps()[0] + 1
            writer.save(step, small(step))
            busy.clear()

    found = CheckpointStore(root, vfs=WatchingVFS(before)).load()
    assert same(found.parts, small(found.step))


def test_a_writer_killed_by_a_signal_leaves_a_store_that_works(root):
    code = textwrap.dedent(
        f"""
        from ckptlib import CheckpointStore
        store = CheckpointStore({str(root)!r}, keep=2, format="numpy")
        step = 0
        while True:
            step += 1
            store.save(step, {{"model": [step] * 50000}})
            print(step, flush=True)
        """
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    acknowledged = [int(child.stdout.readline()) for _ in range(3)][-1]
    child.send_signal(signal.SIGKILL)
    acknowledged = max([acknowledged, *map(int, child.communicate()[0].split())])
    found = CheckpointStore(root).load()
    assert found.step in (acknowledged, acknowledged + 1)
    assert found.parts["model"] == [found.step] * 50000
    CheckpointStore(root, format="numpy").save(found.step + 1, {"model": []})
    assert leftovers(root) == []


# -- a model of the store -------------------------------------------------------------------------


class StoreModel(RuleBasedStateMachine):
    """Random saves, damage, prunes and scrubs against a list of what was committed."""

    def __init__(self):
        super().__init__()
        import tempfile

        self.folder = tempfile.mkdtemp()
        self.root = Path(self.folder) / "store"
        self.good: list[int] = []  # intact committed steps, oldest first
        self.ever = False

    @initialize(mode=st.sampled_from(PROTOCOLS))
    def choose(self, mode):
        self.mode, self.protocol = mode

    def store(self, **options):
        return CheckpointStore(
            self.root, mode=self.mode, protocol=self.protocol, format="numpy", **options
        )

    @rule(step=st.integers(0, 6), keep=st.none() | st.integers(1, 3))
    def save(self, step, keep):
        if step in self.good:
            with pytest.raises(AlreadyExists):
                self.store(keep=keep).save(step, {"p": step})
            return
        self.store(keep=keep).save(step, {"p": step})
        self.good.append(step)
        self.ever = True
        if keep:
            self.good = self.good[-keep:]

    @rule(data=st.data(), file=st.sampled_from(("p.npz", MANIFEST, COMMIT)))
    def damage(self, data, file):
        if self.good:
            step = data.draw(st.sampled_from(self.good))
            tear(self.root, step, file)
            self.good.remove(step)

    @rule(keep=st.integers(1, 3))
    def prune(self, keep):
        self.store().prune(keep)
        self.good = self.good[-keep:]

    @rule()
    def scrub(self):
        report = self.store().scrub()
        assert sorted(r.step for r in report if r.verdict) == sorted(self.good)

    @rule(n=st.integers(0, 120), step=st.integers(7, 9))
    def fail(self, n, step):
        """A save that fails somewhere, at a step that may have been tried before."""
        if step in self.good:
            return
        try:
            self.store(vfs=FailingVFS(n, errno.ENOSPC)).save(step, {"p": step})
        except CkptError:
            # unsafe may have written everything when its last close fails
            if self.root.exists() and self.store().verify(step):
                assert self.mode == "unsafe"
                self.good.append(step)
                self.ever = True
            return
        self.good.append(step)
        self.ever = True

    @invariant()
    def loading_finds_the_newest_intact_one(self):
        store = self.store()
        if self.good:
            found = store.load()
            assert found.step == self.good[-1] and found.parts == {"p": found.step}
        elif self.ever:
            with pytest.raises(NoValidCheckpoint):
                store.load(allow_empty=True)
        else:
            assert store.load(allow_empty=True) is None
        assert leftovers(self.root) == []

    def teardown(self):
        shutil.rmtree(self.folder, ignore_errors=True)


StoreModel.TestCase.settings = settings(max_examples=25, stateful_step_count=12)


class TestTheStoreAgainstItsModel(StoreModel.TestCase):
    @pytest.fixture(autouse=True)
    def _fast(self, monkeypatch):
        skip_the_medium(monkeypatch)


# -- the checks bite ------------------------------------------------------------------------------


def test_a_mutant_that_prunes_without_looking_at_validity_is_caught(root, monkeypatch):
    monkeypatch.setattr(Catalog, "is_valid", lambda self, candidate: True)
    store = filled(root, 1, 2)
    tear(root, 2)
    store.prune(1)
    with pytest.raises(NoValidCheckpoint):
        store.load()


def test_a_mutant_that_orders_by_step_is_caught(root, monkeypatch):
    store = filled(root, 9, 3)
    real = Catalog.candidates
    monkeypatch.setattr(
        Catalog,
        "candidates",
        lambda self, **options: sorted(real(self, **options), key=lambda c: -c.step),
    )
    assert store.load().step != 3


def test_part_names_that_differ_in_case_only_are_refused(root):
    with pytest.raises(InvalidInput, match="case only"):
        CheckpointStore(root).save(1, {"model": {}, "Model": {}})
    assert not root.exists()
