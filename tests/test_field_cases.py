"""What people really met with checkpoint libraries, and what is right; each case with its threads.

The numbers of the threads are in the names of public repositories; nothing of theirs is copied.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import shutil
import stat
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
from faulty import (
    ATOMIC,
    FailingVFS,
    KillingVFS,
    at,
    contents,
    filled,
    flips,
    in_child,
    leftovers,
    parts,
    record,
    same,
    skip_the_medium,
    tear,
)

from ckptlib import CheckpointStore, guard, install, manifests, rng_state, sidecars, temps
from ckptlib import vfs as vfs_module
from ckptlib.catalog import step_name
from ckptlib.digests import content_digest
from ckptlib.errors import (
    AlreadyExists,
    CkptError,
    CommittedNotDurable,
    InvalidInput,
    NoValidCheckpoint,
    StoreEmpty,
    UnsupportedState,
    WriteFailed,
)
from ckptlib.guard import INDETERMINATE, INVALID, UNVERIFIED, VALID, verify
from ckptlib.manifests import COMMIT, MANIFEST
from ckptlib.vfs import RecordingVFS

OLD, NEW = b"old " * 9000, b"new!" * 12000


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "store"


# -- saving ---------------------------------------------------------------------------------------


def outcomes_of_a_cut_write(tmp_path, mode: str) -> set[bytes]:
    """What the final name holds after a save that was killed, or failed, at many offsets."""
    seen = set()
    pieces = [NEW[i : i + 6000] for i in range(0, len(NEW), 6000)]
    for offset in range(0, len(NEW) + 1, 4800):
        for way in ("killed", "failed"):
            path = tmp_path / f"{offset}-{way}"
            install(path, OLD, mode, sidecar=False)

            def source(sink, offset=offset, way=way):
                done = 0
                for piece in pieces:
                    take = piece[: max(0, offset - done)]
                    sink.write(take)
                    sink.flush()
                    done += len(take)
                    if len(take) < len(piece):
                        if way == "killed":
                            os.kill(os.getpid(), 9)
                        raise OSError(errno.EIO, "injected")

            def save(path=path, source=source):
                install(path, source, mode, sidecar=False)

            in_child(save)
            seen.add(path.read_bytes())
    return seen


@pytest.mark.parametrize("mode", ["atomic_nodirsync", "atomic_dirsync"])
def test_01_a_save_cut_at_any_offset_leaves_exactly_the_old_or_the_new_bytes(
    tmp_path, monkeypatch, mode
):
    """pytorch 2883, Lightning 688."""
    skip_the_medium(monkeypatch)
    assert outcomes_of_a_cut_write(tmp_path, mode) == {OLD, NEW}


def test_01_unsafe_does_not_pass_the_same_test(tmp_path):
    assert not outcomes_of_a_cut_write(tmp_path, "unsafe") <= {OLD, NEW}


@pytest.mark.parametrize(("mode", "protocol"), ATOMIC)
def test_02_the_staging_place_is_beside_its_target_and_exdev_is_raised_never_copied_around(
    root, mode, protocol
):
    """Lightning 20270, fsspec 1827."""
    store = filled(root, 1, mode=mode, protocol=protocol)
    operations = record(
        lambda vfs: CheckpointStore(root, mode=mode, protocol=protocol, vfs=vfs).save(2, parts(2))
    )
    for op in operations:
        if op.call in ("replace", "rename"):
            assert os.path.dirname(op.path) == os.path.dirname(op.target)
    vfs = FailingVFS(0, errno.EXDEV, lambda op: op.call in ("replace", "rename"), last=10**9)
    with pytest.raises(WriteFailed) as caught:
        CheckpointStore(root, mode=mode, protocol=protocol, vfs=vfs).save(3, parts(3))
    assert caught.value.errno == errno.EXDEV
    assert store.load().step == 2


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize("call", ["create", "write", "flush", "replace"])
def test_03_a_refused_step_is_a_typed_error_with_errno_never_a_quiet_success(
    tmp_path, monkeypatch, call, code
):
    """Lightning 21800."""
    monkeypatch.setattr("ckptlib.write_modes.time.sleep", lambda seconds: None)
    vfs = FailingVFS(0, code, lambda op: op.call == call, last=10**9)
    with pytest.raises(WriteFailed) as caught:
        install(tmp_path / "a", NEW, vfs=vfs)
    assert caught.value.errno == code and isinstance(caught.value, OSError)
    assert str(tmp_path) in str(caught.value) and errno.errorcode[code] in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into a read-only folder")
def test_03_a_really_read_only_folder_is_a_typed_error(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(WriteFailed) as caught:
        install(tmp_path / "a", NEW)
    assert caught.value.errno == errno.EACCES


@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_04_modes_follow_the_umask_and_overwriting_keeps_them(tmp_path, mask, expected):
    """safetensors 782, ipython 7317."""
    old = os.umask(mask)
    try:
        install(tmp_path / "a", OLD)
        filled(tmp_path / "store", 1)
    finally:
        os.umask(old)
    files = [p for p in tmp_path.rglob("*") if p.is_file() and not p.is_symlink()]
    assert {stat.S_IMODE(p.stat().st_mode) for p in files} == {expected}
    (tmp_path / "a").chmod(0o604)
    install(tmp_path / "a", NEW)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o604


def test_04_a_set_gid_folder_hands_its_group_down(tmp_path):
    groups = [g for g in (os.getgroups() if os.getuid() else [12345]) if g != os.getgid()]
    if not groups:
        pytest.skip("this user belongs to one group only, so that no other can be given")
    os.chown(tmp_path, -1, groups[0])
    tmp_path.chmod(0o2775)
    filled(tmp_path / "store", 1)
    assert {p.lstat().st_gid for p in (tmp_path / "store").rglob("*")} == {groups[0]}


def test_05_overwriting_a_file_that_the_state_has_mapped_harms_neither(tmp_path):
    """safetensors 762, torchtune 1018."""
    path = tmp_path / "weights"
    install(path, torch.arange(50_000, dtype=torch.int32).numpy())
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    import numpy

    view = numpy.frombuffer(mapped, dtype="<i4")
    install(path, lambda sink: sink.write(view) and None)
    install(path, lambda sink: sink.write((view * 2).astype("<i4")) and None)
    assert view[-1] == 49_999
    assert numpy.fromfile(path, dtype="<i4")[-1] == 99_998


def test_06_a_commit_record_is_never_flushed_while_it_is_empty(root):
    """pytorch 183878. (The order of the system calls themselves is shown with strace.)"""
    for protocol in ("per_file", "batched"):
        operations = record(
            lambda vfs, p=protocol: CheckpointStore(root / p, protocol=p, vfs=vfs).save(1, parts())
        )
        sizes: dict[str, int] = {}
        for op in operations:
            if op.call == "write":
                sizes[op.path] = sizes.get(op.path, 0) + op.size
            elif op.call == "flush":
                assert op.size == sizes[op.path] > 0


def test_07_savers_of_one_step_at_once_leave_exactly_one_checkpoint(root):
    """apex 629, 886. (Eight real processes are in the tests of the store.)"""
    store = CheckpointStore(root)
    store.save(1, parts(1))
    others = [in_child(lambda n=n: CheckpointStore(root).save(1, parts(n))) for n in range(2, 6)]
    assert others == [1] * 4, "each ended with an error"
    assert store.load().parts["extra"]["epoch"] == 1 and leftovers(root) == []


def test_08_a_committed_step_says_already_exists_and_stays_whole(root):
    """transformers 27925, 36076."""
    store = filled(root, 1)
    before = contents(at(root, 1))
    with pytest.raises(AlreadyExists):
        store.save(1, parts(2))
    assert contents(at(root, 1)) == before and verify(at(root, 1))


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_09_a_directory_flush_that_is_not_supported_makes_the_receipt_say_so(
    root, monkeypatch, code
):
    """atomicwrites 27: some FUSE, SMB and shared-folder mounts."""
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    for protocol in ("per_file", "batched"):
        receipt = CheckpointStore(root / protocol, protocol=protocol).save(1, parts())
        assert receipt.durable is False and "unsupported" in receipt.reason
        assert CheckpointStore(root / protocol).load().step == 1


@pytest.mark.parametrize("protocol", ["per_file", "batched"])
def test_09_an_io_error_of_the_last_directory_flush_is_committed_not_durable(root, protocol):
    filled(root, 1, protocol=protocol)
    operations = record(
        lambda vfs: CheckpointStore(root, protocol=protocol, vfs=vfs).save(2, parts(2))
    )
    last = sum(op.call == "flush_dir" for op in operations) - 1
    vfs = FailingVFS(last, errno.EIO, lambda op: op.call == "flush_dir")
    store = CheckpointStore(root, protocol=protocol)
    with pytest.raises(CommittedNotDurable) as caught:
        CheckpointStore(root, protocol=protocol, vfs=vfs).save(3, parts(3))
    assert caught.value.errno == errno.EIO and caught.value.receipt.durable is False
    assert store.load().step == 3 and caught.value.receipt.path == str(at(root, 3))


@pytest.mark.parametrize(("mode", "protocol"), ATOMIC)
def test_10_after_one_failed_flush_the_bytes_go_to_a_fresh_file(root, mode, protocol):
    """wiredtiger 4072."""
    vfs = RecordingVFS(FailingVFS(0, errno.EIO, lambda op: op.call == "flush"))
    CheckpointStore(root, mode=mode, protocol=protocol, vfs=vfs).save(1, parts(1))
    failed = next(i for i, op in enumerate(vfs.operations) if op.result == "EIO")
    path = vfs.operations[failed].path
    for op in vfs.operations[failed + 1 :]:
        if op.path == path and op.call == "create":
            break  # the name may come back, the file is a new one
        assert not (op.path == path and op.call in ("flush", "replace", "write"))
    assert CheckpointStore(root).load().step == 1 and leftovers(root) == []


def test_10_a_flush_that_always_fails_is_tried_a_bounded_number_of_times(root):
    vfs = FailingVFS(0, errno.EIO, lambda op: op.call == "flush", last=10**9)
    with pytest.raises(WriteFailed) as caught:
        CheckpointStore(root, vfs=vfs).save(1, parts(1))
    assert caught.value.errno == errno.EIO and len(vfs.failed) <= 5
    with pytest.raises(StoreEmpty):
        CheckpointStore(root).load()


@pytest.mark.parametrize(
    ("refused", "primitive", "durable"),
    [
        ((), "F_FULLFSYNC", True),
        ((vfs_module.F_FULLFSYNC,), "F_BARRIERFSYNC", False),
        ((vfs_module.F_FULLFSYNC, vfs_module.F_BARRIERFSYNC), "plain-fsync", False),
    ],
)
def test_11_on_macos_the_receipt_says_which_primitive_really_ran(
    root, monkeypatch, refused, primitive, durable
):
    """atomicwrites 6, borg 9383."""
    commands = []

    def fcntl_call(fd, command):
        commands.append(command)
        if command in refused:
            raise OSError(errno.ENOTSUP, "not here")

    real = vfs_module.durable_flush
    monkeypatch.setattr(
        vfs_module,
        "durable_flush",
        lambda fd: real(fd, platform="darwin", fcntl_call=fcntl_call),
    )
    receipt = CheckpointStore(root).save(1, parts(1))
    assert (receipt.primitive, receipt.durable) == (primitive, durable)
    assert commands[0] == vfs_module.F_FULLFSYNC
    assert durable or primitive in receipt.reason


@pytest.mark.parametrize("protocol", ["per_file", "batched"])
def test_12_a_sharing_error_on_the_rename_is_retried_and_then_typed(root, monkeypatch, protocol):
    """CellBender 250."""
    monkeypatch.setattr("ckptlib.write_modes.time.sleep", lambda seconds: None)
    filled(root, 1, protocol=protocol)

    def renames(op):
        return op.call in ("replace", "rename") and "latest" not in op.target

    vfs = FailingVFS(0, errno.EACCES, renames, last=1)
    CheckpointStore(root, protocol=protocol, vfs=vfs).save(2, parts(2))
    vfs = FailingVFS(0, errno.EACCES, renames, last=10**9)
    with pytest.raises(WriteFailed) as caught:
        CheckpointStore(root, protocol=protocol, vfs=vfs).save(3, parts(3))
    assert caught.value.errno == errno.EACCES and len(vfs.failed) < 20
    assert CheckpointStore(root).load().step == 2


@pytest.mark.parametrize("format", ["torch", "safetensors", "numpy"])
def test_13_meta_and_fake_tensors_are_refused_by_key(root, format):
    """safetensors 300: torch.save takes them and the data is gone."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    for leaf in (torch.empty(3, device="meta"), fake):
        with pytest.raises(UnsupportedState) as caught:
            CheckpointStore(root, format=format).save(1, {"model": {"layer": [leaf]}})
        assert caught.value.key == "model/layer/0"
    assert not root.exists()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, "partial"])
@pytest.mark.parametrize(("mode", "protocol"), ATOMIC)
def test_14_a_disk_that_is_full_at_any_write_costs_nothing_but_this_save(
    root, monkeypatch, mode, protocol, error
):
    """pytorch 10577, h2o-llmstudio 214."""
    skip_the_medium(monkeypatch)
    options = {"mode": mode, "protocol": protocol}
    filled(root, 1, **options)
    operations = record(lambda vfs: filled(root.parent / "x", 1, vfs=vfs, **options))
    writes = sum(op.call == "write" for op in operations)
    for n in range(writes - 1):  # STORE.json has been written before
        vfs = FailingVFS(n, error, lambda op: op.call == "write")
        with pytest.raises(WriteFailed) as caught:
            CheckpointStore(root, vfs=vfs, **options).save(2, parts(2))
        assert caught.value.errno == (errno.ENOSPC if error == "partial" else error)
        assert verify(at(root, 1)) and leftovers(root) == []
        assert CheckpointStore(root).load().step == 1
    CheckpointStore(root, **options).save(2, parts(2))
    assert CheckpointStore(root).load().step == 2


def test_14_a_really_full_disk_keeps_the_old_checkpoint(tmp_path):
    """A file system of 1 MiB in memory, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting needs root (or a container that allows it)")
    try:
        store = CheckpointStore(disk / "store", keep=1)
        assert not store.save(1, {"model": {"w": torch.zeros(100_000)}}).durable
        with pytest.raises(WriteFailed) as caught:
            store.save(2, {"model": {"w": torch.zeros(200_000)}})
        assert caught.value.errno == errno.ENOSPC
        assert store.load().step == 1 and leftovers(disk) == []
        store.save(3, {"model": {"w": torch.zeros(100)}})
        assert store.load().step == 3
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_15_unnamed_files_are_never_flushed_and_linked_into_place():
    """rust-atomic-write-file 6: on btrfs that flush promises nothing."""
    sources = Path(vfs_module.__file__).parent.rglob("*.py")
    used = [p.name for p in sources if re.search(r"O_TMPFILE|os\.link\(", p.read_text())]
    assert used == []


# -- loading and rolling back ---------------------------------------------------------------------


@pytest.mark.parametrize("file", ["model.pt", MANIFEST, COMMIT])
def test_16_a_torn_newest_gives_the_one_before_with_a_report(root, file):
    """transformers 35525, 35782."""
    store = filled(root, 1, 2)
    tear(root, 2, file)
    found = store.load()
    assert found.step == 1 and [s.step for s in found.skipped] == [2]
    assert file in str(found.skipped[0])


def test_17_no_valid_checkpoint_is_not_an_empty_store(root):
    """NeMo Speech 10228: days of training began anew in silence."""
    store = filled(root, 1, 2)
    tear(root, 1), tear(root, 2)
    for options in ({}, {"allow_empty": True}):
        with pytest.raises(NoValidCheckpoint) as caught:
            store.load(**options)
        assert sorted(s.step for s in caught.value.skipped) == [1, 2]
    with pytest.raises(StoreEmpty):
        CheckpointStore(root / "other").load()
    assert CheckpointStore(root / "other").load(allow_empty=True) is None


@pytest.mark.parametrize("damage", ["short", "empty", "missing"])
def test_18_one_bad_shard_of_three_makes_the_group_invalid_and_the_manifest_decides(root, damage):
    """metaseq 53, 501."""
    store = CheckpointStore(root)
    for step in (1, 2):
        shards = {f"shard{n}": {"w": torch.full((4,), float(step))} for n in range(3)}
        store.save(step, shards)
    (at(root, 2) / "shard1.pt.tmp").write_bytes(b"x" * 10**5)
    (at(root, 2) / "shard3.pt").write_bytes(b"x")
    assert store.load().step == 2, "what the manifest does not list does not count"
    path = at(root, 2) / "shard1.pt"
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(data[:-1] if damage == "short" else b"")
    found = store.load()
    assert found.step == 1 and found.skipped[0].verdict.file == "shard1.pt"


def test_19_another_runs_higher_step_is_passed_over_with_the_reason(root):
    """lm-resiliency 77."""
    filled(root, 5, run_id="mine")
    filled(root, 900, run_id="other")
    found = CheckpointStore(root, run_id="mine").load()
    assert found.step == 5
    assert [(s.step, s.verdict.status) for s in found.skipped] == [(900, INVALID)]
    assert "other" in found.skipped[0].verdict.reason


@pytest.mark.parametrize("digest", ["null", "absent"])
def test_20_a_missing_digest_is_unverified_and_rolled_back_over(root, digest):
    """lm-resiliency 78."""
    store = filled(root, 1, 2)
    document = json.loads((at(root, 2) / MANIFEST).read_text())
    if digest == "null":
        document["parts"]["model"]["sha256"] = None
    else:
        del document["parts"]["model"]["sha256"]
    data = sidecars.canonical(document)
    (at(root, 2) / MANIFEST).write_bytes(data)
    (at(root, 2) / COMMIT).write_bytes(manifests.commit_bytes(data))
    assert store.verify(2).status == UNVERIFIED
    assert store.load().step == 1
    install(root / "file", b"x")
    (root / "file.sha256.json").unlink()
    assert verify(root / "file").status == UNVERIFIED


def test_22_an_io_error_is_indeterminate_and_moves_nothing(root):
    """Fooocus 821."""
    filled(root, 1, 2)
    before = contents(root)
    vfs = FailingVFS(
        0, errno.EIO, lambda op: op.call == "read" and op.path.startswith(str(at(root, 2))), last=99
    )
    store = CheckpointStore(root, vfs=vfs)
    found = store.load()
    assert found.step == 1 and found.skipped[0].verdict.status == INDETERMINATE
    assert not any(r.moved_to for r in store.scrub())
    after = contents(root)
    assert after.pop("latest_ok") and before.pop("latest_ok")
    assert after == before
    for error in (MemoryError(), KeyboardInterrupt(), ModuleNotFoundError("x")):
        vfs = FailingVFS(5, error, lambda op: op.call == "read")
        with pytest.raises(type(error)):
            CheckpointStore(root, vfs=vfs).load()
    assert CheckpointStore(root).steps() == [2, 1]


def test_22_only_a_completed_mismatch_is_quarantined_and_it_can_be_undone(root):
    store = filled(root, 1, 2)
    data = (at(root, 2) / "model.pt").read_bytes()
    tear(root, 2)
    moved = next(r.moved_to for r in store.scrub() if r.moved_to)
    os.rename(moved, at(root, 2))
    (at(root, 2) / "model.pt").write_bytes(data)
    assert store.load().step == 2


def test_23_nan_infinity_negative_zero_and_denormals_are_valid_unless_asked_about(root):
    """ultralytics 24731."""
    store = filled(root, 1)
    for step, value in enumerate((float("nan"), float("inf"), -0.0, 5e-324), start=2):
        store.save(step, {"model": {"w": torch.tensor([value], dtype=torch.float64)}})
        assert store.verify(step).status == VALID and store.load().step == step
    assert store.load(finite=True).step == 5
    shutil.rmtree(at(root, 5)), shutil.rmtree(at(root, 4))
    before = contents(root)
    assert store.load(finite=True).step == 1
    assert contents(root) == before, "and it never deletes"


def regions(path: Path) -> dict[str, tuple[int, int]]:
    """Byte ranges of a torch container: ``name -> (start, end)``."""
    found = {}
    with zipfile.ZipFile(path) as container:
        entries = container.infolist()
        data = path.read_bytes()
        for info in entries:
            start = info.header_offset
            name = int.from_bytes(data[start + 26 : start + 28], "little")
            extra = int.from_bytes(data[start + 28 : start + 30], "little")
            body = start + 30 + name + extra
            short = info.filename.split("/", 1)[1]
            found[f"header of {short}"] = (start, start + 30 + name)
            if extra:
                found[f"padding of {short}"] = (start + 30 + name, body)
            found[f"payload of {short}"] = (body, body + info.file_size)
        found["central directory"] = (container.start_dir, len(data) - 22)
        found["end of central directory"] = (len(data) - 22, len(data))
    return found


def test_24_a_flipped_bit_in_each_region_of_the_container_is_found_with_file_and_layer(root):
    """pytorch 28858, 126952: the zip checksum is written and not checked on loading."""
    store = filled(root, 1, 2)
    path = at(root, 2) / "model.pt"
    data = path.read_bytes()
    areas = regions(path)
    assert {"payload of data.pkl", "payload of data/0", "central directory"} <= set(areas)
    assert any(name.startswith("padding") for name in areas)
    undetected_by_torch = 0
    for start, end in areas.values():
        for offset in {start, (start + end) // 2, end - 1}:
            changed = bytearray(data)
            changed[offset] ^= 0x10
            path.write_bytes(changed)
            verdict = store.verify(2)
            assert (verdict.status, verdict.file, verdict.layer) == (INVALID, "model.pt", "sha256")
            try:
                torch.load(path, weights_only=True)
                undetected_by_torch += 1
            except Exception:
                pass
    assert undetected_by_torch > 0, "or the hash would not be needed"
    path.write_bytes(data)
    for name in (MANIFEST, COMMIT):
        record_path = at(root, 2) / name
        whole = record_path.read_bytes()
        for offset, changed in flips(whole, len(whole)):
            record_path.write_bytes(changed)
            verdict = store.verify(2)
            assert not verdict and verdict.file in (MANIFEST, COMMIT), offset
        record_path.write_bytes(whole)
    assert store.load().step == 2


@pytest.mark.parametrize("state", ["missing", "dangling", "latest_ok", "step-000000000009"])
def test_25_the_pointer_is_relative_atomically_replaced_and_never_needed(root, state):
    """Lightning 21110, 19294."""
    store = filled(root, 1, 2)
    (root / "latest_ok").unlink()
    if state != "missing":
        (root / "latest_ok").symlink_to(state)
    assert CheckpointStore(root).load().step == 2
    operations = record(lambda vfs: CheckpointStore(root, vfs=vfs).save(3, parts(3)))
    [link] = [op for op in operations if op.call == "symlink"]
    [move] = [op for op in operations if op.call == "replace" and op.target.endswith("latest_ok")]
    assert link.path == move.path and link.target == step_name(3)
    assert os.readlink(root / "latest_ok") == step_name(3) and store.load().step == 3


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe{}", b"[]", b"5", b'"text"', b"null", b'{"schema":[]}', b"[" * 100_000,
     b'{"a":' * 5000 + b"1" + b"}" * 5000, b"1" * 10_000, b'{"schema":1e400}', b"NaN", b"\0" * 500],
    ids=lambda data: repr(data[:12]),
)  # fmt: skip
def test_26_any_bytes_in_a_record_are_invalid_with_a_reason_and_nothing_else(root, data):
    """keras 20463."""
    store = filled(root, 1, 2)
    for name in (MANIFEST, COMMIT):
        whole = (at(root, 2) / name).read_bytes()
        (at(root, 2) / name).write_bytes(data)
        if name == MANIFEST:  # even if somebody made the commit record fit
            (at(root, 2) / COMMIT).write_bytes(manifests.commit_bytes(data))
        verdict = store.verify(2)
        assert verdict.status == INVALID and 0 < len(verdict.reason) < 1000
        assert store.load().step == 1
        (at(root, 2) / name).write_bytes(whole)


def test_26_huge_records_are_refused_without_being_read(root):
    store = filled(root, 1, 2)
    for name in (MANIFEST, COMMIT):
        whole = (at(root, 2) / name).read_bytes()
        os.truncate(at(root, 2) / name, 3 << 30)  # sparse
        vfs = RecordingVFS()
        assert CheckpointStore(root, vfs=vfs).verify(2).status == INVALID
        assert sum(op.size for op in vfs.operations if op.call == "read") < 1 << 20
        (at(root, 2) / name).write_bytes(whole)
    assert store.load().step == 2


@pytest.mark.parametrize("format", ["torch", "safetensors", "numpy"])
def test_27_everything_that_is_written_loads_with_weights_only_generators_included(
    root, monkeypatch, format
):
    """transformers 40500, 34631."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    store = CheckpointStore(root, format=format)
    state = {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "rng": rng_state(),
        "generator": {"data": torch.Generator().get_state()},
    }
    store.save(1, state)
    calls = []
    real = torch.load

    def load(*arguments, **options):
        calls.append(options.get("weights_only"))
        return real(*arguments, **options)

    monkeypatch.setattr(torch, "load", load)
    found = store.load()
    assert content_digest(found.parts["rng"]) == content_digest(state["rng"])
    assert set(calls) <= {True}


# -- keeping and deleting -------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "protocol"), ATOMIC)
def test_28_with_keep_1_a_new_save_that_fails_anywhere_leaves_the_old_one(
    root, tmp_path, monkeypatch, mode, protocol
):
    """accelerate, verl 4873."""
    skip_the_medium(monkeypatch)
    options = {"mode": mode, "protocol": protocol, "keep": 1}
    template = tmp_path / "template"
    filled(template, 1, **options)
    shutil.copytree(template, root, symlinks=True)
    operations = record(lambda vfs: CheckpointStore(root, vfs=vfs, **options).save(2, parts(2)))
    changing = ("write", "flush", "replace", "rename", "flush_dir", "create", "mkdir", "close")
    for n, op in enumerate(operations):
        if op.call not in changing:
            continue
        shutil.rmtree(root)
        shutil.copytree(template, root, symlinks=True)
        with_error = CheckpointStore(root, vfs=FailingVFS(n, errno.EIO, lambda op: True), **options)
        try:
            with_error.save(2, parts(2))
        except CommittedNotDurable:
            assert verify(at(root, 1)) and verify(at(root, 2))
        except CkptError:
            assert verify(at(root, 1))
        assert CheckpointStore(root).load().step in (1, 2)


@pytest.mark.parametrize("keep", [0, -1, False])
def test_29_keep_0_is_refused_and_never_means_delete_all(root, keep):
    """SimpleTuner 2989."""
    store = filled(root, 1, 2)
    with pytest.raises(InvalidInput):
        store.prune(keep)
    with pytest.raises(InvalidInput):
        CheckpointStore(root, keep=keep)
    assert store.steps() == [2, 1]


@pytest.mark.parametrize("times", ["equal", "reversed", "future"])
def test_30_file_times_decide_nothing(root, times):
    """transformers 26961, 37260."""
    filled(root, 30, 10, 20)
    for index, step in enumerate((30, 10, 20)):
        stamp = {"equal": 10**9, "reversed": 10**9 - index, "future": 4 * 10**9 - index}[times]
        for path in (at(root, step), *at(root, step).iterdir()):
            os.utime(path, (stamp, stamp))
    store = CheckpointStore(root, keep=2)
    assert store.load().step == 20
    store.save(5, parts(5))
    assert store.steps() == [5, 20], "the one just written is never the victim"


def test_31_torn_checkpoints_do_not_count_among_those_to_keep(root):
    """torchtitan, the HF Trainer."""
    store = filled(root, 1, 2, 3, 4)
    tear(root, 3), tear(root, 4)
    assert store.prune(2) == []
    assert verify(at(root, 1)) and verify(at(root, 2))


def test_33_killed_writers_files_are_swept_and_never_taken_for_checkpoints(root):
    """cortex 2726, labelme 2487."""
    filled(root, 1)
    operations = record(lambda vfs: CheckpointStore(root, vfs=vfs).save(2, parts(2)))
    shutil.rmtree(at(root, 2))
    middle = [i for i, op in enumerate(operations) if op.call == "write"][2]
    assert in_child(lambda: CheckpointStore(root, vfs=KillingVFS(middle)).save(2, parts(2))) == -9
    assert leftovers(root) != []
    store = CheckpointStore(root)
    assert store.load().step == 1 and store.steps() == [1] and store.load().skipped == []
    store.save(3, parts(3))
    assert leftovers(root) == []


def test_33_a_live_writers_file_is_not_swept(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c",
         "import sys; from ckptlib import temps; open(sys.argv[1] + '/' + temps.temp_name(), 'w');"
         "print(flush=True); input()", str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    child.stdout.readline()
    install(tmp_path / "a", NEW)
    assert len(leftovers(tmp_path)) == 1
    child.communicate(b"\n")
    install(tmp_path / "a", NEW)
    assert leftovers(tmp_path) == []


def test_33_files_of_another_boot_are_swept_only_when_they_are_old(tmp_path):
    name = temps.temp_name().split(".")
    name[2] = "deadbeef"
    young, old = (tmp_path / ".".join([*name[:3], str(pid), *name[4:]]) for pid in (11, 12))
    young.touch(), old.touch()
    os.utime(old, (0, 0))
    install(tmp_path / "a", NEW)
    assert young.exists() and not old.exists()


# -- state and digests ----------------------------------------------------------------------------


def test_35_equal_states_with_different_strides_have_equal_digests(root):
    """OpenDelta 80. (Every dtype is in the tests of the digests.)"""
    matrix = torch.arange(12.0).reshape(3, 4)
    assert content_digest({"w": matrix.T}) == content_digest({"w": matrix.T.contiguous()})
    assert content_digest(torch.zeros(0, 3)) != content_digest(torch.zeros(3, 0))
    floats, integers = torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    assert content_digest(floats) != content_digest(integers)


@pytest.mark.parametrize("format", ["torch", "safetensors", "numpy"])
def test_36_tied_weights_stay_tied_and_are_stored_once(root, format):
    """safetensors 98."""
    weight = torch.nn.Parameter(torch.ones(5000))
    store = CheckpointStore(root, format=format)
    receipt = store.save(1, {"model": {"in": weight.detach(), "out": weight.detach()}})
    assert receipt.bytes < 1.5 * weight.nbytes
    found = store.load().parts["model"]
    found["in"][0] = 3
    assert found["out"][0] == 3


@pytest.mark.parametrize("name", ["plain", "with space", "zwei\nzeilen", "ключ-鍵-🔑", "'\"$(x)"])
def test_37_any_path_that_the_disk_takes_works(tmp_path, name):
    """pytorch 185098."""
    root = tmp_path / name
    store = filled(root, 1, 2)
    assert same(store.load().parts, dict(sorted(parts(2).items())))
    install(tmp_path / f"{name}.bin", NEW)
    assert verify(tmp_path / f"{name}.bin") and verify(root / "latest_ok")
    tear(root, 2)
    assert store.load().step == 1 and store.scrub()


def test_37_the_size_on_disk_is_the_number_of_bytes_written_beyond_4_gib(tmp_path):
    """Sparse: the file seeks over what it does not write."""
    vfs = vfs_module.VFS()
    file = vfs.create(str(tmp_path / "large"))
    file.seek((4 << 30) - 2)
    assert file.write(b"1234") == 4
    assert file.tell() == file.stat().st_size == (4 << 30) + 2
    file.close()
    digest = sidecars.Digest("0" * 64, (4 << 30) + 1)
    (tmp_path / "large.sha256.json").write_bytes(sidecars.to_bytes(str(tmp_path / "large"), digest))
    verdict = guard.verify(tmp_path / "large")
    assert verdict.layer == "size" and str((4 << 30) + 2) in verdict.reason


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_saving_500_mb_needs_less_than_100_mib_beyond_the_state(tmp_path):
    code = textwrap.dedent(
        f"""
        import resource, torch
        from ckptlib import CheckpointStore
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        CheckpointStore({str(tmp_path / "warm")!r}).save(1, {{"m": {{"w": torch.ones(10)}}}})
        state = {{f"layer{{n}}": torch.ones(12_500_000) for n in range(10)}}
        before = peak()
        receipt = CheckpointStore({str(tmp_path / "store")!r}).save(1, {{"model": state}})
        assert receipt.bytes > 500_000_000
        print(peak() - before)
        """
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 100 << 20
    shutil.rmtree(tmp_path / "store")
