"""The guard: damage is found, by file and layer; what cannot be judged is not condemned."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from faulty import FailingVFS, WatchingVFS, contents, flips, parts, record

from ckptlib import CheckpointStore, guard, install, manifests, sidecars
from ckptlib.errors import CorruptCheckpoint
from ckptlib.guard import INDETERMINATE, INVALID, UNVERIFIED, VALID, check_group, verify
from ckptlib.manifests import COMMIT, MANIFEST
from ckptlib.vfs import RecordingVFS

FILES = ("model.pt", "optimizer.pt", "extra.pt", MANIFEST, COMMIT)


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("guard") / "store"
    CheckpointStore(root, run_id="run", content_digests=True).save(7, parts(7))
    return root / "step-000000000007"


@pytest.fixture
def group(template, tmp_path) -> Path:
    return Path(shutil.copytree(template, tmp_path / template.name))


def rewrite(group: Path, change) -> None:
    """Change the manifest and commit it again, as a later or careless version would."""
    document = json.loads((group / MANIFEST).read_text())
    change(document)
    data = sidecars.canonical(document)
    (group / MANIFEST).write_bytes(data)
    (group / COMMIT).write_bytes(manifests.commit_bytes(data))


# -- groups ---------------------------------------------------------------------------------------


def test_an_intact_group_is_valid_whatever_lies_beside_it(group):
    assert verify(group) == verify(str(group)) and verify(group).status == VALID
    (group / "model.pt.tmp").write_bytes(b"x")
    (group / ".ckpt-tmp.a.1.0").write_bytes(b"x")
    (group / "notes").mkdir()
    assert verify(group)
    assert bool(verify(group)) and str(verify(group)) == VALID


@pytest.mark.parametrize("file", FILES)
def test_one_flipped_bit_anywhere_is_found_and_the_report_names_the_file(group, file):
    data = (group / file).read_bytes()
    layers = set()
    for offset, changed in flips(data, 80):
        (group / file).write_bytes(changed)
        verdict = verify(group)
        assert not verdict and verdict.status in (INVALID, INDETERMINATE), offset
        named = {COMMIT, MANIFEST} if file in (COMMIT, MANIFEST) else {file}
        assert verdict.file in named and verdict.reason, offset
        assert verdict.path == str(group)
        layers.add(verdict.layer)
    expected = {"commit", "manifest"} if file in (COMMIT, MANIFEST) else {"sha256"}
    assert layers <= expected
    (group / file).write_bytes(data)
    assert verify(group), "and the undamaged bytes are valid again"


@pytest.mark.parametrize("file", FILES)
def test_a_short_empty_longer_or_missing_file_makes_the_whole_group_invalid(group, file):
    data = (group / file).read_bytes()
    for changed in (data[:-1], data[: len(data) // 2], b"", data + b"\0", bytes(len(data)), None):
        (group / file).unlink()
        if changed is not None:
            (group / file).write_bytes(changed)
        verdict = verify(group)
        assert verdict.status == INVALID and verdict.file in {file, COMMIT}
        if changed is None:
            assert verdict.file == file and verdict.absent and "missing" in verdict.reason
            (group / file).write_bytes(b"")
        elif file.endswith(".pt"):
            assert verdict.layer == ("sha256" if len(changed) == len(data) else "size")


def test_sizes_are_compared_before_anything_is_hashed(group):
    """A sparse file of many gigabytes is refused without being read."""
    os.truncate(group / "model.pt", 5 << 30)
    vfs = RecordingVFS()
    assert check_group(str(group), vfs=vfs).verdict.layer == "size"
    assert not any(op.call == "read" and op.path.endswith("model.pt") for op in vfs.operations)


def test_the_first_failed_layer_ends_the_check_and_nothing_more_is_read(group):
    (group / COMMIT).write_bytes(b"{}")
    operations = record(lambda vfs: check_group(str(group), vfs=vfs))
    assert {os.path.basename(op.path) for op in operations if op.call == "read"} <= {
        COMMIT,
        MANIFEST,
    }


def test_a_part_that_is_exchanged_for_another_checkpoints_is_found(group, tmp_path):
    other = CheckpointStore(tmp_path / "other").save(7, parts(8))
    shutil.copy(Path(other.path) / "model.pt", group / "model.pt")
    verdict = verify(group)
    assert verdict.status == INVALID and verdict.file == "model.pt"


def test_manifest_and_commit_of_another_checkpoint_do_not_fit(group, tmp_path):
    other = Path(CheckpointStore(tmp_path / "other").save(7, parts(8)).path)
    shutil.copy(other / COMMIT, group / COMMIT)
    assert verify(group).layer == "commit"
    shutil.copy(other / MANIFEST, group / MANIFEST)
    assert verify(group).layer in ("size", "sha256")


def test_a_commit_record_that_says_the_same_in_other_bytes_is_refused(group):
    """Its exact bytes follow from the manifest, so that any change shows."""
    document = json.loads((group / COMMIT).read_text())
    for text in (json.dumps(document, indent=1), json.dumps(document) + " ", json.dumps(document)):
        if text.encode() != (group / COMMIT).read_bytes():
            (group / COMMIT).write_text(text)
            assert verify(group).status == INVALID


def test_a_directory_that_stands_for_another_step_is_refused(group):
    verdict = check_group(str(group), step=8).verdict
    assert (verdict.status, verdict.layer) == (INVALID, "identity")
    assert "8" in verdict.reason and "7" in verdict.reason
    assert check_group(str(group), step=7).verdict


@pytest.mark.parametrize("digest", [None, "absent"])
def test_a_missing_digest_is_unverified_never_valid(group, digest):
    def change(document):
        if digest is None:
            document["parts"]["model"]["sha256"] = None
        else:
            del document["parts"]["model"]["sha256"]

    rewrite(group, change)
    verdict = verify(group)
    assert (verdict.status, verdict.file) == (UNVERIFIED, "model.pt")
    assert not verdict, "not even when used as a truth value"


def test_a_digest_that_is_no_digest_is_invalid(group):
    for wrong in ("", "0" * 63, "G" * 64, 5, ["0" * 64], True):
        rewrite(group, lambda d, wrong=wrong: d["parts"]["model"].update(sha256=wrong))
        assert verify(group).status == INVALID


def test_a_later_schema_is_indeterminate_not_invalid(group):
    rewrite(group, lambda document: document.update(schema="ckptlib.manifest/2", new={"x": 1}))
    verdict = verify(group)
    assert verdict.status == INDETERMINATE and "version" in verdict.reason
    data = (group / MANIFEST).read_bytes()
    document = json.loads(manifests.commit_bytes(data)) | {"schema": "ckptlib.commit/2", "x": 1}
    (group / COMMIT).write_bytes(sidecars.canonical(document))
    assert verify(group).status == INDETERMINATE


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE])
def test_what_can_not_be_read_now_is_indeterminate(group, code):
    operations = record(lambda vfs: check_group(str(group), vfs=vfs))
    outcomes = set()
    for n, op in enumerate(operations):
        if op.call == "close":
            continue
        before = contents(group)
        verdict = check_group(str(group), vfs=FailingVFS(n, code)).verdict
        outcomes.add((op.call, verdict.status, verdict.layer))
        assert contents(group) == before
    assert outcomes == {(c, INDETERMINATE, "read") for c in ("stat", "open", "read")}


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, ImportError])
def test_errors_that_say_nothing_about_the_checkpoint_propagate(group, error):
    operations = record(lambda vfs: check_group(str(group), vfs=vfs))
    for n in range(len(operations)):
        with pytest.raises(error):
            check_group(str(group), vfs=FailingVFS(n, error()))


def test_no_descriptor_stays_open_whatever_the_verdict(group):
    gc.collect()  # what other tests left
    before = len(os.listdir("/dev/fd"))
    operations = record(lambda vfs: check_group(str(group), vfs=vfs))
    for n in range(len(operations)):
        check_group(str(group), vfs=FailingVFS(n, errno.EIO))
    checked = check_group(str(group), keep_open=True)
    assert len(os.listdir("/dev/fd")) == before + len(checked.files) == before + 3
    checked.close()
    assert len(os.listdir("/dev/fd")) == before


def test_parts_that_are_not_regular_files_are_refused(group, tmp_path):
    outside = tmp_path / "outside"
    shutil.copy(group / "model.pt", outside)
    for plant in (
        lambda path: path.symlink_to(outside),
        lambda path: path.symlink_to(path.name),
        lambda path: os.mkfifo(path),
        lambda path: path.mkdir(),
    ):
        part = group / "model.pt"
        shutil.rmtree(part) if part.is_dir() else part.unlink()
        plant(part)
        verdict = verify(group)
        assert verdict.status == INVALID and verdict.file == "model.pt"


def test_a_group_directory_that_is_a_link_or_a_file_is_no_group(group, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(group)
    assert check_group(str(link)).verdict.status == INVALID
    file = tmp_path / "file"
    file.write_text("x")
    assert check_group(str(file)).verdict.status == INVALID
    assert check_group(str(tmp_path / "absent")).verdict.status == INVALID


def test_verify_follows_the_pointer_to_the_newest_but_not_in_circles(group):
    pointer, loop = group.parent / "latest_ok", group.parent / "loop"
    pointer.symlink_to(group.name)
    assert verify(pointer)
    loop.symlink_to("loop")
    (group.parent / "dangling").symlink_to("nowhere")
    assert verify(loop).status == INVALID
    assert verify(group.parent / "dangling").status == INVALID
    assert verify(group.parent / "absent").status == INVALID


def test_checking_writes_nothing(group):
    before = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in group.rglob("*")}
    operations = record(lambda vfs: check_group(str(group), vfs=vfs))
    assert {op.call for op in operations} <= {"open", "read", "close", "stat"}
    assert {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in group.rglob("*")} == before


def test_what_is_loaded_comes_from_the_very_files_that_were_hashed(group):
    """The part is exchanged right after it was hashed: the exchange must have no effect."""
    evil = group.parent / "evil"
    torch.save({"weight": torch.zeros(8, 4)}, evil)
    checked = check_group(str(group), keep_open=True)
    os.replace(evil, group / "model.pt")
    loaded = guard.load_parts(checked)
    checked.close()
    assert torch.equal(loaded["model"]["weight"], parts(7)["model"]["weight"])


def test_each_part_is_opened_exactly_once_for_hashing_and_loading(template):
    vfs = RecordingVFS()
    CheckpointStore(template.parent, vfs=vfs).load()
    opened = [os.path.basename(op.path) for op in vfs.operations if op.call == "open"]
    assert sorted(n for n in opened if n.endswith(".pt")) == sorted(FILES[:3])


# -- single files ---------------------------------------------------------------------------------


@pytest.fixture
def single(tmp_path) -> Path:
    path = tmp_path / "model.pt"
    install(path, lambda sink: torch.save({"w": torch.arange(50.0)}, sink))
    return path


def side(path: Path) -> Path:
    return path.with_name(path.name + sidecars.SUFFIX)


def test_a_bit_flipped_in_the_file_or_its_sidecar_is_found(single):
    for path in (single, side(single)):
        data = path.read_bytes()
        for offset, changed in flips(data, 150):
            path.write_bytes(changed)
            verdict = verify(single)
            # a flip in the sidecar may turn the digest's letter case or a separator: never VALID
            assert not verdict, (path.name, offset)
        path.write_bytes(data)
    assert verify(single)


def test_every_bit_of_a_sidecar_that_changes_its_meaning_is_found(single):
    data = side(single).read_bytes()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        side(single).write_bytes(changed)
        assert not verify(single), f"bit {bit}: {bytes(changed)!r}"


def test_without_a_sidecar_a_file_is_unverified(single):
    side(single).unlink()
    verdict = verify(single)
    assert verdict.status == UNVERIFIED
    with pytest.raises(CorruptCheckpoint) as caught:
        guard.load_file(single)
    assert caught.value.verdict.status == UNVERIFIED


def test_a_digest_that_was_only_observed_never_makes_a_file_valid(single, tmp_path):
    """An older file without a record is overwritten, and the overwrite is cut off."""
    side(single).unlink()
    vfs = FailingVFS(0, errno.EIO, lambda op: op.call == "replace" and op.target == str(single))
    with pytest.raises(OSError):
        install(single, b"new", vfs=vfs)
    assert verify(single).status == UNVERIFIED
    install(single, b"new")
    assert verify(single)


def test_a_damaged_file_does_not_become_valid_by_a_failed_overwrite(single):
    data = bytearray(single.read_bytes())
    data[100] ^= 1
    single.write_bytes(data)
    for n in range(2):  # the sidecar's rename, then the file's own
        vfs = FailingVFS(n, errno.EIO, lambda op: op.call == "replace", last=10**9)
        with pytest.raises(OSError):
            install(single, b"new", vfs=vfs)
        assert not verify(single)


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"\xff\xfe", b"{", b"[" * 60_000, b"x" * 70_000, b"9" * 5000,
     b'{"schema":"is missing"}', b'{"schema":"ckptlib.sidecar/1","file":"other","digests":[]}',
     b'{"schema":"ckptlib.sidecar/1","file":"model.pt","digests":[]}',
     b'{"schema":"ckptlib.sidecar/1","file":"model.pt","digests":5}',
     b'{"schema":"ckptlib.sidecar/1","file":"model.pt","digests":["is missing"]}',
     b'{"schema":"ckptlib.sidecar/1","file":"model.pt","digests":[{"sha256":1e999}]}'],
    ids=lambda data: data[:40].decode(errors="replace"),
)  # fmt: skip
def test_a_malformed_sidecar_is_invalid_with_a_reason(single, data):
    side(single).write_bytes(data)
    verdict = verify(single)
    assert verdict.status == INVALID and verdict.reason
    assert verdict.file == side(single).name


def test_a_file_whose_name_says_is_missing_is_judged_like_any_other(tmp_path):
    path = tmp_path / "what is missing.pt"
    install(path, b"x")
    assert verify(path)
    side(path).write_bytes(b"{}")
    assert verify(path).status == INVALID


def test_a_sidecar_that_is_a_link_or_a_pipe_is_refused(single, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.move(side(single), elsewhere)
    side(single).symlink_to(elsewhere)
    assert verify(single).status == INVALID
    side(single).unlink()
    os.mkfifo(side(single))
    assert verify(single).status == INVALID


def test_a_wrong_size_is_refused_before_a_large_file_is_hashed(tmp_path):
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 5 << 30)  # sparse
    side(path).write_bytes(sidecars.to_bytes(str(path), sidecars.Digest("0" * 64, (5 << 30) + 1)))
    vfs = RecordingVFS()
    assert verify(path, vfs=vfs).layer == "size"
    assert sum(op.size for op in vfs.operations if op.call == "read") < 1 << 20


def test_an_unreadable_file_is_indeterminate(single):
    operations = record(lambda vfs: verify(single, vfs=vfs))
    for n, op in enumerate(operations):
        if op.call != "close":
            assert verify(single, vfs=FailingVFS(n, errno.EIO)).status == INDETERMINATE


def test_a_file_is_loaded_only_after_its_hash_has_matched(single, monkeypatch):
    loaded = guard.load_file(single)
    assert torch.equal(loaded["w"], torch.arange(50.0))
    assert guard.load_file(single, map_location="meta")["w"].is_meta
    single.write_bytes(single.read_bytes()[:-1] + b"!")

    def never(*arguments, **options):
        raise AssertionError("parsed before it was verified")

    monkeypatch.setattr(torch, "load", never)
    with pytest.raises(CorruptCheckpoint) as caught:
        guard.load_file(single)
    assert caught.value.verdict.layer == "sha256" and str(single) in str(caught.value)


# -- the checks bite ------------------------------------------------------------------------------


def mutant_finds_damage(group) -> bool:
    """What the tests above rely on, in one line: damage in a part makes the group not valid."""
    data = (group / "model.pt").read_bytes()
    for changed in (data[:-1], data[:50] + bytes([data[50] ^ 1]) + data[51:]):
        (group / "model.pt").write_bytes(changed)
        if verify(group):
            return False
    return True


def test_a_mutant_guard_that_ignores_size_and_hash_is_caught(group, monkeypatch):
    assert mutant_finds_damage(group)
    monkeypatch.setattr(guard, "_check_size_and_hash", lambda file, name, size, sha256: None)
    assert not mutant_finds_damage(group)


def test_a_mutant_guard_that_ignores_the_commit_record_is_caught(group, monkeypatch):
    def careless(vfs, directory):
        data = Path(directory, MANIFEST).read_bytes()
        return manifests.from_bytes(data, directory), manifests.digest(data)

    monkeypatch.setattr(guard, "read_manifest", careless)
    (group / COMMIT).unlink()
    assert verify(group), "so a missing COMMIT must be tested for, and is, above"


def test_the_watcher_of_operations_really_sees_them(group):
    seen = []
    check_group(str(group), vfs=WatchingVFS(lambda op: seen.append(op.call)))
    assert seen.count("open") == len(FILES)
