"""Several files as one: the order of steps, every failure, every kill, and exact records."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from faulty import (
    ATOMIC,
    ERRNOS,
    PROTOCOLS,
    FailingVFS,
    KillingVFS,
    contents,
    in_child,
    is_typed,
    leftovers,
    record,
    skip_the_medium,
)
from hypothesis import given
from hypothesis import strategies as st

from ckptlib import groups, guard, manifests, temps, write_modes
from ckptlib.errors import (
    AlreadyExists,
    CkptError,
    CommittedNotDurable,
    CorruptCheckpoint,
    InvalidInput,
    UntrustedPath,
    WriteFailed,
)
from ckptlib.groups import Identity, Part, write_group
from ckptlib.manifests import COMMIT, MANIFEST, Entry, Manifest
from ckptlib.streams import as_source
from ckptlib.vfs import REAL, Operation, RecordingVFS
from ckptlib.write_modes import Flushes, WriteMode

EACH = pytest.mark.parametrize(("mode", "protocol"), PROTOCOLS)
EACH_ATOMIC = pytest.mark.parametrize(("mode", "protocol"), ATOMIC)
PARTS = {"model": b"model " * 500, "optimizer": b"optimizer " * 200, "rng": b"rng"}


def write(root: Path, mode: str, protocol: str, vfs=REAL, step: int = 7):
    parts = [Part(n, f"{n}.pt", "torch", as_source(data)) for n, data in PARTS.items()]
    flushes = Flushes(str(root / "STORE.json"), WriteMode(mode))
    identity = Identity("run", step, step, None)
    directory = str(root / "group")
    written = write_group(vfs, directory, parts, identity, WriteMode(mode), protocol, flushes)
    return written, flushes


def broken_rules(operations: list[Operation], mode: str) -> set[str]:
    """The trace rule: bytes, flush, rename, directory flush, in that order; COMMIT last."""
    broken, written, flushed = set(), {}, {}
    unflushed_folders: set[str] = set()
    committed = False
    for op in operations:
        folder = os.path.dirname(op.path)
        if op.call == "create":
            written[op.path] = 0
            if not temps.is_temp(os.path.basename(op.path)):
                unflushed_folders.add(folder)
        elif op.call == "write":
            written[op.path] += op.size
            flushed.pop(op.path, None)
            if committed:
                broken.add("bytes after the commit")
        elif op.call == "flush":
            flushed[op.path] = op.size
        elif op.call == "mkdir":
            unflushed_folders.add(folder)
        elif op.call == "flush_dir":
            unflushed_folders.discard(op.path)
        elif op.call == "replace":
            if flushed.get(op.path) != written[op.path]:
                broken.add("renamed before it was flushed at full size")
            place, name = os.path.split(op.target)
            if name == COMMIT:
                committed = True
                if mode == "atomic_dirsync" and place in unflushed_folders:
                    broken.add("committed before the names of its parts were flushed")
            unflushed_folders.add(place)
        elif op.call == "rename":
            inside = [path for path in written if os.path.dirname(path) == op.path]
            if os.path.join(op.path, COMMIT) not in inside:
                broken.add("renamed without a commit record")
            if any(flushed.get(path) != written[path] for path in inside):
                broken.add("renamed before it was flushed at full size")
            if mode == "atomic_dirsync" and op.path in unflushed_folders:
                broken.add("renamed before the staged names were flushed")
            unflushed_folders.discard(op.path)
            unflushed_folders.add(os.path.dirname(op.target))
            committed = True
    if not committed:
        broken.add("no commit")
    if mode == "atomic_dirsync" and unflushed_folders:
        broken.add("a directory was left unflushed")
    return broken


# -- the protocols --------------------------------------------------------------------------------


@EACH
def test_a_group_is_valid_and_holds_what_was_given(tmp_path, mode, protocol):
    written, _ = write(tmp_path, mode, protocol)
    directory = tmp_path / "group"
    assert guard.verify(directory)
    files = contents(directory)
    assert {n.removesuffix(".pt"): d for n, d in files.items() if n.endswith(".pt")} == PARTS
    assert sorted(files) == sorted([*(f"{n}.pt" for n in PARTS), MANIFEST, COMMIT])
    assert written.bytes == sum(map(len, files.values()))
    assert written.manifest_digest == manifests.digest(files[MANIFEST])
    assert leftovers(tmp_path) == []


@EACH_ATOMIC
def test_the_trace_keeps_the_rule_of_its_mode(tmp_path, mode, protocol):
    operations = record(lambda vfs: write(tmp_path, mode, protocol, vfs))
    # the paper's code never flushes the directory that holds the step directories
    expected = {"a directory was left unflushed"} if protocol == "artifact" else set()
    assert broken_rules(operations, mode) == expected


def test_per_file_writes_parts_then_manifest_then_commit_each_by_the_mode(tmp_path):
    operations = record(lambda vfs: write(tmp_path, "atomic_dirsync", "per_file", vfs))
    targets = [os.path.basename(op.target) for op in operations if op.call == "replace"]
    assert targets == ["model.pt", "optimizer.pt", "rng.pt", MANIFEST, COMMIT]
    flushed = [os.path.relpath(op.path, tmp_path) for op in operations if op.call == "flush_dir"]
    assert flushed == [".", *["group"] * 5]


def test_batched_hands_over_every_byte_before_the_first_flush_and_renames_once(tmp_path):
    operations = record(lambda vfs: write(tmp_path, "atomic_dirsync", "batched", vfs))
    operations = [op for op in operations if op.call != "stat"]
    order = [op.call for op in operations]
    assert order.index("flush") > max(i for i, call in enumerate(order) if call == "write")
    assert order.count("rename") == 1 and "replace" not in order
    rename = order.index("rename")
    assert order[rename - 1] == order[-1] == "flush_dir"
    assert operations[rename - 1].path == operations[rename].path
    assert operations[-1].path == str(tmp_path)
    assert order.count("flush") == len(PARTS) + 2


def test_batched_without_directory_flushes_leaves_only_those_out(tmp_path):
    orders = {}
    for mode in ("atomic_nodirsync", "atomic_dirsync"):
        (tmp_path / mode).mkdir()
        operations = record(lambda vfs, m=mode: write(tmp_path / m, m, "batched", vfs))
        orders[mode] = [op.call for op in operations]
    dirsync = [call for call in orders["atomic_dirsync"] if call != "flush_dir"]
    assert orders["atomic_nodirsync"] == dirsync


def test_artifact_is_per_file_without_the_flush_of_the_outer_directory(tmp_path):
    orders = {}
    for protocol in ("per_file", "artifact"):
        root = tmp_path / protocol
        root.mkdir()
        operations = record(lambda vfs, r=root, p=protocol: write(r, "atomic_dirsync", p, vfs))
        orders[protocol] = [
            (op.call, os.path.relpath(op.path, root)) for op in operations if op.call == "flush_dir"
        ]
    assert orders["per_file"] == [("flush_dir", "."), *orders["artifact"]]


def test_unsafe_flushes_nothing_and_writes_straight_to_the_final_names(tmp_path):
    operations = record(lambda vfs: write(tmp_path, "unsafe", "per_file", vfs))
    assert {op.call for op in operations} == {"mkdir", "create", "write", "close"}
    assert not any(temps.is_temp(os.path.basename(op.path)) for op in operations)


@EACH
def test_equal_parts_make_equal_bytes_in_every_protocol(tmp_path, mode, protocol):
    (tmp_path / "reference").mkdir()
    write(tmp_path, mode, protocol)
    write(tmp_path / "reference", "atomic_dirsync", "batched")
    assert contents(tmp_path / "group") == contents(tmp_path / "reference/group")


def test_unknown_protocols_and_unsafe_batched_are_bad_input():
    with pytest.raises(InvalidInput, match="per_file, batched, artifact"):
        groups.check_protocol("fast", WriteMode.atomic_dirsync)
    with pytest.raises(InvalidInput, match="per_file"):
        groups.check_protocol("batched", WriteMode.unsafe)


@pytest.mark.parametrize("occupied", ["empty", "full", "file", "link"])
@EACH_ATOMIC
def test_a_name_that_is_taken_is_never_replaced(tmp_path, mode, protocol, occupied):
    place = tmp_path / "group"
    if occupied == "file":
        place.write_text("precious")
    elif occupied == "link":
        place.symlink_to("nowhere")
    else:
        place.mkdir()
        if occupied == "full":
            (place / "file").write_text("precious")
    before = contents(tmp_path)
    with pytest.raises((AlreadyExists, WriteFailed)):
        write(tmp_path, mode, protocol)
    assert contents(tmp_path) == before and leftovers(tmp_path) == []


def test_a_state_that_changes_between_two_attempts_is_noticed(tmp_path):
    """The first attempt's hash is in the manifest already."""
    tries = iter([b"first", b"second"])
    part = Part("model", "model.pt", "torch", lambda sink: sink.write(next(tries)) and None)
    vfs = FailingVFS(0, errno.EIO, lambda op: op.call == "flush")
    mode = WriteMode.atomic_dirsync
    flushes = Flushes(str(tmp_path / "x"), mode)
    directory = str(tmp_path / "group")
    with pytest.raises(CkptError, match="changed"):
        write_group(vfs, directory, [part], Identity("r", 1, 1, None), mode, "batched", flushes)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("bits", [0o022, 0o077, 0o007])
@EACH
def test_files_and_directories_of_a_group_follow_the_umask(tmp_path, mode, protocol, bits):
    old = os.umask(bits)
    try:
        write(tmp_path, mode, protocol)
    finally:
        os.umask(old)
    assert (tmp_path / "group").stat().st_mode & 0o777 == 0o777 & ~bits
    for path in (tmp_path / "group").iterdir():
        assert path.stat().st_mode & 0o777 == 0o666 & ~bits


# -- failures and kills ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [*ERRNOS, "partial"], ids=lambda e: errno.errorcode.get(e, e))
@EACH
def test_an_error_at_any_operation_is_typed_and_never_a_commit_without_a_word(
    tmp_path, monkeypatch, mode, protocol, error
):
    skip_the_medium(monkeypatch)
    monkeypatch.setattr(write_modes.time, "sleep", lambda seconds: None)
    code = errno.ENOSPC if error == "partial" else error
    (tmp_path / "reference").mkdir()
    operations = record(lambda vfs: write(tmp_path / "reference", mode, protocol, vfs))
    for n, op in enumerate(operations):
        root = tmp_path / f"{n}"
        root.mkdir()
        where = f"operation {n}: {op.call}"
        vfs = FailingVFS(n, error)
        try:
            write(root, mode, protocol, vfs)
            assert op.call in ("flush", "replace", "rename") or error == "partial", where
            assert guard.verify(root / "group"), where
        except CommittedNotDurable as caught:
            assert caught.errno == code and op.call == "flush_dir", where
            assert guard.verify(root / "group"), where
        except WriteFailed as caught:
            assert caught.errno == code and is_typed(caught), where
            if mode != "unsafe":  # a failing close of COMMIT comes after its last byte
                assert not guard.verify(root / "group"), where
        assert leftovers(root) == [], where


@pytest.mark.parametrize("kind", ["short", "zero"])
@EACH
def test_short_writes_anywhere_are_absorbed(tmp_path, monkeypatch, mode, protocol, kind):
    skip_the_medium(monkeypatch)
    vfs = FailingVFS(0, kind, lambda op: op.call == "write" and op.index % 2, last=10**9)
    write(tmp_path, mode, protocol, vfs)
    assert guard.verify(tmp_path / "group")


@pytest.mark.parametrize("n", range(len(PARTS) + 2))
@EACH_ATOMIC
def test_after_a_failed_flush_that_files_bytes_are_written_anew(tmp_path, mode, protocol, n):
    inner = FailingVFS(n, errno.EIO, lambda op: op.call == "flush")
    vfs = RecordingVFS(inner)
    write(tmp_path, mode, protocol, vfs)
    assert guard.verify(tmp_path / "group")
    expected = {"a directory was left unflushed"} if protocol == "artifact" else set()
    assert broken_rules(vfs.operations, mode) == expected
    failed = next(i for i, op in enumerate(vfs.operations) if op.result == "EIO")
    path = vfs.operations[failed].path
    later = [op.call for op in vfs.operations[failed + 1 :] if op.path == path]
    # either never touched again but to be removed, or removed and made anew
    assert later[:2] == ["close", "unlink"]
    assert later[2:] in ([], ["create", "write", "flush", "close"])
    assert leftovers(tmp_path) == []


@EACH
def test_an_interrupt_at_any_operation_leaves_no_temporary_file(
    tmp_path, monkeypatch, mode, protocol
):
    skip_the_medium(monkeypatch)
    (tmp_path / "reference").mkdir()
    operations = record(lambda vfs: write(tmp_path / "reference", mode, protocol, vfs))
    for n, op in enumerate(operations):
        root = tmp_path / f"{n}"
        root.mkdir()
        with pytest.raises(KeyboardInterrupt):
            write(root, mode, protocol, FailingVFS(n, KeyboardInterrupt()))
        assert leftovers(root) == [], f"operation {n}: {op.call}"


@EACH
def test_a_kill_at_any_operation_leaves_a_group_that_is_whole_or_does_not_count(
    tmp_path, monkeypatch, mode, protocol
):
    skip_the_medium(monkeypatch)
    (tmp_path / "reference").mkdir()
    operations = record(lambda vfs: write(tmp_path / "reference", mode, protocol, vfs))
    reference = contents(tmp_path / "reference/group")
    valid = 0
    for n, op in enumerate(operations):
        for kept in (0, op.size // 2, op.size) if op.call == "write" else (0,):
            root = tmp_path / f"{n}-{kept}"
            root.mkdir()
            killing = KillingVFS(n, lambda size, kept=kept: kept)
            assert in_child(lambda r=root, v=killing: write(r, mode, protocol, v)) == -9
            if guard.verify(root / "group"):
                valid += 1
                assert contents(root / "group") == reference, f"operation {n}: {op.call}"
    # nothing counts before its commit record is whole
    assert valid <= 3


# -- the records ----------------------------------------------------------------------------------

sha = st.text("0123456789abcdef", min_size=64, max_size=64)
names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,20}", fullmatch=True).filter(
    lambda name: name not in (MANIFEST, COMMIT)
)
entries = st.builds(
    Entry, names, names, st.sampled_from(("torch", "numpy")), st.integers(0, 2**61),
    st.none() | sha, st.none() | sha,
    st.none() | st.dictionaries(st.text(max_size=5), st.just(["torch.int8", [1]]), max_size=2),
)  # fmt: skip
unique = st.lists(
    entries, min_size=1, max_size=4, unique_by=(lambda e: e.name, lambda e: e.file)
).map(lambda found: tuple(sorted(found, key=lambda entry: entry.name)))
manifest = st.builds(
    Manifest, st.text(min_size=1, max_size=9), st.integers(0, 2**61), st.integers(0, 2**61),
    st.none() | sha, unique,
)  # fmt: skip


@given(manifest)
def test_a_manifest_comes_back_from_its_bytes_which_follow_from_it_alone(record):
    data = record.to_bytes()
    again = manifests.from_bytes(data, "here")
    assert again == record and again.to_bytes() == data
    assert json.loads(data)["schema"] == "ckptlib.manifest/1"


@given(manifest, manifest)
def test_different_manifests_have_different_bytes_and_commits(left, right):
    same = left == right
    assert (left.to_bytes() == right.to_bytes()) == same
    commits = manifests.commit_bytes(left.to_bytes()), manifests.commit_bytes(right.to_bytes())
    assert (commits[0] == commits[1]) == same


def test_sizes_beyond_32_bits_are_kept_exactly():
    entry = Entry("m", "m.pt", "torch", (5 << 30) + 1, "0" * 64)
    record = Manifest("run", 1, 1, None, (entry,))
    assert manifests.from_bytes(record.to_bytes(), "").entries[0].size == (5 << 30) + 1


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\0b", "a\n", ".hidden", "ü", "a" * 200, COMMIT,
     MANIFEST, None, 5, ["a"], "a b", "-x", "C:\\x", "a/../../b"],
)  # fmt: skip
def test_names_that_could_lead_elsewhere_are_refused(name):
    with pytest.raises(InvalidInput):
        manifests.check_name(name)
    good = Manifest("run", 1, 1, None, (Entry("m", "m.pt", "torch", 1, "0" * 64),))
    document = json.loads(good.to_bytes())
    document["parts"]["m"]["file"] = name
    with pytest.raises((UntrustedPath, CorruptCheckpoint)):
        manifests.from_bytes(json.dumps(document).encode(), "here")


def changed(**changes) -> bytes:
    good = Manifest("run", 1, 1, None, (Entry("m", "m.pt", "torch", 1, "0" * 64),))
    document = json.loads(good.to_bytes()) | changes
    return json.dumps({k: v for k, v in document.items() if v != "absent"}).encode()


def part(**changes) -> dict:
    fields = {"file": "m.pt", "format": "torch", "size": 1, "sha256": "0" * 64} | changes
    return {"parts": {"m": {k: v for k, v in fields.items() if v != "absent"}}}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"null", b"\xff", b"{", b"[" * 100_000, b'{"schema": 1e999}', b"9" * 5000,
        changed(schema="other/1"), changed(schema=5), changed(schema="absent"),
        changed(run=""), changed(run=5), changed(run="x" * 201), changed(run="absent"),
        changed(step=-1), changed(step=True), changed(step=1.0), changed(step="1"),
        changed(step=2**62), changed(sequence=-1), changed(sequence=None), changed(step="absent"),
        changed(previous=5), changed(previous="0" * 63), changed(previous="G" * 64),
        changed(parts={}), changed(parts=[]), changed(parts="absent"), changed(parts={"m": 5}),
        changed(parts={"m": {}}), changed(**part(size=-1)), changed(**part(size=True)),
        changed(**part(size="1")), changed(**part(size="absent")), changed(**part(sha256=5)),
        changed(**part(sha256="0" * 65)), changed(**part(format=5)), changed(**part(file=None)),
        changed(**part(content="x")), changed(**part(schema=[])), changed(**part(file="absent")),
        changed(parts={"a": part()["parts"]["m"], "b": part()["parts"]["m"]}),
    ],
    ids=lambda data: data[:60].decode(errors="replace"),
)  # fmt: skip
def test_a_malformed_manifest_is_a_typed_error(data):
    with pytest.raises((CorruptCheckpoint, UntrustedPath)) as caught:
        manifests.from_bytes(data, "/some/MANIFEST.json")
    assert not isinstance(caught.value, manifests.NewerSchema)
    assert "/some/MANIFEST.json" in str(caught.value) and len(str(caught.value)) < 2000


def test_a_later_schema_is_told_apart_from_a_foreign_one():
    with pytest.raises(manifests.NewerSchema, match="version"):
        manifests.from_bytes(changed(schema="ckptlib.manifest/2"), "here")
    for foreign in ("ckptlib.manifest/0", "ckptlib.manifest/x", "ckptlib.manifest/9999999"):
        with pytest.raises(CorruptCheckpoint) as caught:
            manifests.from_bytes(changed(schema=foreign), "here")
        assert not isinstance(caught.value, manifests.NewerSchema)


# -- the checks bite ------------------------------------------------------------------------------


def test_a_mutant_that_commits_before_its_parts_is_caught(tmp_path, monkeypatch):
    real = groups.put

    def commit_first(vfs, path, source, *arguments):
        if path.endswith("model.pt"):
            real(vfs, os.path.join(os.path.dirname(path), COMMIT), as_source(b"{}"), *arguments)
        return real(vfs, path, source, *arguments)

    monkeypatch.setattr(groups, "put", commit_first)
    operations = record(lambda vfs: write(tmp_path, "atomic_dirsync", "per_file", vfs))
    assert "bytes after the commit" in broken_rules(operations, "atomic_dirsync")


def test_a_mutant_that_skips_file_flushes_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "_flush", lambda vfs, file, written, source, flushes: file.close())
    operations = record(lambda vfs: write(tmp_path, "atomic_dirsync", "batched", vfs))
    broken = broken_rules(operations, "atomic_dirsync")
    assert "renamed before it was flushed at full size" in broken


@pytest.mark.parametrize("protocol", ["per_file", "batched"])
def test_a_mutant_that_skips_directory_flushes_is_caught(tmp_path, monkeypatch, protocol):
    monkeypatch.setattr(groups, "flush_directory", lambda vfs, directory, flushes: None)
    monkeypatch.setattr(write_modes, "flush_directory", lambda vfs, directory, flushes: None)
    operations = record(lambda vfs: write(tmp_path, "atomic_dirsync", protocol, vfs))
    assert "a directory was left unflushed" in broken_rules(operations, "atomic_dirsync")


def test_a_mutant_that_flushes_a_file_before_its_last_bytes_is_caught(tmp_path):
    class Early(RecordingVFS):
        """Reports what a program would do that flushes when the file is half written."""

        def around(self, op, call):
            if op.call == "flush":
                op.size //= 2
            return super().around(op, call)

    vfs = Early()
    write(tmp_path, "atomic_dirsync", "batched", vfs)
    assert broken_rules(vfs.operations, "atomic_dirsync")
