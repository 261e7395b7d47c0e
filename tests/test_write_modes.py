"""One file under each write mode: old or new, never between; and an honest receipt."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import re
import stat
import subprocess
import sys
import textwrap

import pytest
import torch
from faulty import (
    ERRNOS,
    FailingVFS,
    KillingVFS,
    contents,
    in_child,
    is_typed,
    leftovers,
    record,
    skip_the_medium,
)

from ckptlib import guard, sidecars, temps, write_modes
from ckptlib.errors import (
    CommittedNotDurable,
    InvalidInput,
    SymlinkRefused,
    WriteFailed,
)
from ckptlib.streams import COALESCE, PIECE, Sink, write_file
from ckptlib.vfs import REAL, VFS, RecordingVFS
from ckptlib.write_modes import FLUSH_ATTEMPTS, REPLACE_ATTEMPTS, WriteMode, install

MODES = [mode.value for mode in WriteMode]
ATOMIC = ["atomic_nodirsync", "atomic_dirsync"]
EACH = pytest.mark.parametrize("mode", MODES)
EACH_ATOMIC = pytest.mark.parametrize("mode", ATOMIC)
OLD, NEW = b"old " * 1000, b"new!" * 1500


def steps(operations) -> list[str]:
    """What changed something, or made it durable."""
    return [
        op.call for op in operations if op.call not in ("stat", "list") and op.result != "ENOENT"
    ]


# -- what each mode does --------------------------------------------------------------------------

STEPS = {
    "unsafe": ["create", "write", "close"],
    "atomic_nodirsync": ["create", "write", "flush", "close", "replace"],
    "atomic_dirsync": ["create", "write", "flush", "close", "replace", "flush_dir"],
}


@EACH
def test_a_mode_takes_exactly_the_steps_of_its_row(tmp_path, mode):
    operations = record(lambda vfs: install(tmp_path / "a", NEW, mode, sidecar=False, vfs=vfs))
    assert steps(operations) == STEPS[mode]
    assert (tmp_path / "a").read_bytes() == NEW


@EACH_ATOMIC
def test_a_file_has_its_full_size_when_it_is_flushed_and_its_name_only_afterwards(tmp_path, mode):
    operations = record(lambda vfs: install(tmp_path / "a", NEW, mode, vfs=vfs))
    flushed = {op.path: op.size for op in operations if op.call == "flush"}
    for op in operations:
        if op.call == "replace":
            assert flushed[op.path] == os.path.getsize(op.target) or op.target.endswith(".json")
            assert os.path.dirname(op.path) == os.path.dirname(op.target), "never across folders"
    order = [op.path for op in operations if op.call == "write"]
    assert order[0] in flushed and flushed[order[0]] == len(NEW)


def test_no_mode_copies_links_or_uses_unnamed_files(tmp_path):
    """A flush of an inode without a name promises nothing on some file systems."""
    for mode in MODES:
        operations = record(lambda vfs, mode=mode: install(tmp_path / mode, NEW, mode, vfs=vfs))
        assert set(steps(operations)) <= {
            "create", "write", "flush", "close", "replace", "flush_dir", "chmod",
            "open", "read",
        }  # fmt: skip


@EACH
def test_the_sidecar_vouches_for_the_bytes(tmp_path, mode):
    for data in (OLD, NEW):
        receipt = install(tmp_path / "a", data, mode)
        assert receipt.bytes == len(data)
        assert guard.verify(tmp_path / "a")
        [digest] = sidecars.read(REAL, str(tmp_path / "a"))
        assert (digest.sha256, digest.size, digest.observed) == (receipt.sha256, len(data), False)
    assert sorted(os.listdir(tmp_path)) == ["a", "a.sha256.json"]


@EACH
def test_installing_without_a_sidecar_never_leaves_one_that_condemns_the_file(tmp_path, mode):
    install(tmp_path / "a", OLD, mode)
    install(tmp_path / "a", NEW, mode, sidecar=False)
    assert guard.verify(tmp_path / "a").status == guard.UNVERIFIED


@EACH_ATOMIC
def test_dropping_a_sidecar_never_condemns_a_good_file(tmp_path, monkeypatch, mode):
    """Killed or failed at any operation: what stands there is old or new, at worst unverified."""
    skip_the_medium(monkeypatch)
    monkeypatch.setattr(write_modes.time, "sleep", lambda seconds: None)

    def drop(path, vfs):
        install(path, NEW, mode, sidecar=False, vfs=vfs)

    install(tmp_path / "x", OLD, mode)
    for n, op in enumerate(record(lambda vfs: drop(tmp_path / "x", vfs))):
        for way in ("killed", "failed"):
            path = tmp_path / f"{n}-{way}"
            install(path, OLD, mode)
            if way == "killed":
                killing = KillingVFS(n)
                assert in_child(lambda p=path, v=killing: drop(p, v)) == -9
            else:
                try:
                    drop(path, FailingVFS(n, errno.EIO))
                except CommittedNotDurable:
                    assert path.read_bytes() == NEW
                except WriteFailed:
                    assert path.read_bytes() == OLD, f"{way} {n}: {op.call}"
            assert path.read_bytes() in (OLD, NEW)
            assert guard.verify(path).status != guard.INVALID, f"{way} {n}: {op.call}"


@EACH
def test_bytes_a_buffer_and_a_stream_are_all_written(tmp_path, mode):
    def stream(sink):
        for start in range(0, len(NEW), 7):
            sink.write(NEW[start : start + 7])

    array = torch.frombuffer(bytearray(NEW), dtype=torch.int32).numpy()
    for source in (NEW, bytearray(NEW), memoryview(NEW), array, stream):
        install(tmp_path / "a", source, mode)
        assert (tmp_path / "a").read_bytes() == NEW
    install(tmp_path / "empty", b"", mode)
    assert (tmp_path / "empty").read_bytes() == b"" and guard.verify(tmp_path / "empty")


@pytest.mark.parametrize("name", ["with space", "ünï\nline", "a" * 240, "-rf", "öä.pt"])
@EACH_ATOMIC
def test_any_file_name_that_the_disk_takes_will_do(tmp_path, mode, name):
    install(tmp_path / name, NEW, mode)
    assert guard.verify(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == sorted([name, name + ".sha256.json"])


def test_a_relative_path_means_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert install("a", NEW).path == str(tmp_path / "a")
    assert guard.verify("a")


# -- the receipt ----------------------------------------------------------------------------------


def test_the_receipt_says_which_flushes_ran_and_whether_they_make_it_durable(tmp_path):
    unsafe, nodirsync, dirsync = (install(tmp_path / m, NEW, m, sidecar=False) for m in MODES)
    assert (unsafe.flush_calls, unsafe.primitive, unsafe.durable) == (0, "none", False)
    assert (nodirsync.flush_calls, nodirsync.durable) == (1, False)
    assert "directory" in nodirsync.reason
    assert (dirsync.flush_calls, dirsync.durable) == (2, True)
    assert unsafe.reason and dirsync.reason and dirsync.seconds > 0
    if sys.platform == "linux":
        assert nodirsync.primitive == dirsync.primitive == "fsync"


class OtherPrimitive(VFS):
    """A file system whose flushes report another primitive."""

    def __init__(self, file: str, directory: str):
        self.file, self.directory = file, directory

    def create(self, *arguments, **options):
        file = super().create(*arguments, **options)
        file.flush_durable = lambda: self.file
        return file

    def flush_dir(self, path):
        return self.directory


@pytest.mark.parametrize(
    ("file", "directory", "durable"),
    [
        ("F_FULLFSYNC", "F_FULLFSYNC", True),
        ("fsync", "fsync", True),
        ("F_BARRIERFSYNC", "F_FULLFSYNC", False),
        ("plain-fsync", "plain-fsync", False),
        ("F_FULLFSYNC", "F_BARRIERFSYNC", False),
        ("fsync", "unsupported:EINVAL", False),
        ("fsync", "unsupported:ENOTSUP", False),
    ],
)
def test_only_full_flushes_of_file_and_directory_are_called_durable(
    tmp_path, file, directory, durable
):
    receipt = install(tmp_path / "a", NEW, vfs=OtherPrimitive(file, directory))
    assert receipt.durable is durable
    assert set(receipt.primitive.split("+")) == {file, directory}
    if not durable:
        assert re.search(r"BARRIER|plain|unsupported", receipt.reason)
    assert guard.verify(tmp_path / "a"), "the save itself succeeds"


def test_a_file_in_memory_is_never_durable(tmp_path):
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("no memory-backed file system is mounted at /dev/shm")
    path = f"/dev/shm/ckptlib-test-{os.getpid()}"
    try:
        receipt = install(path, NEW, sidecar=False)
    finally:
        os.unlink(path)
    assert not receipt.durable and "memory" in receipt.reason


def test_a_mount_without_barriers_is_never_durable(tmp_path, monkeypatch):
    described = {"type": "ext4", "options": "rw,nobarrier", "memory_backed": False}
    monkeypatch.setattr(write_modes.provenance, "filesystem", lambda path: described)
    write_modes._volatile.cache_clear()
    try:
        receipt = install(tmp_path / "a", NEW)
    finally:
        write_modes._volatile.cache_clear()
    assert not receipt.durable and "barrier" in receipt.reason


# -- permissions and links ------------------------------------------------------------------------


@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o007, 0o660)])
@EACH
def test_a_new_files_mode_follows_the_umask(tmp_path, mode, mask, expected):
    old = os.umask(mask)
    try:
        install(tmp_path / "a", NEW, mode)
    finally:
        os.umask(old)
    for name in ("a", "a.sha256.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == expected


@pytest.mark.parametrize("bits", [0o600, 0o640, 0o666, 0o400])
@EACH
def test_overwriting_keeps_the_old_files_mode(tmp_path, mode, bits):
    install(tmp_path / "a", OLD, mode)
    (tmp_path / "a").chmod(bits)
    install(tmp_path / "a", NEW, mode)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == bits
    assert (tmp_path / "a").read_bytes() == NEW


@EACH
def test_a_set_gid_directory_gives_its_group(tmp_path, mode):
    folder = tmp_path / "shared"
    folder.mkdir()
    groups = [g for g in (os.getgroups() if os.getuid() else [12345]) if g != os.getgid()]
    if not groups:
        pytest.skip("this user belongs to one group only, so that no other can be given")
    os.chown(folder, -1, groups[0])
    folder.chmod(0o2775)
    install(folder / "a", NEW, mode)
    assert {(folder / n).stat().st_gid for n in ("a", "a.sha256.json")} == {groups[0]}


@EACH
def test_a_symbolic_link_is_refused_unless_following_is_asked_for(tmp_path, mode):
    (tmp_path / "elsewhere").mkdir()
    real, link = tmp_path / "elsewhere/real", tmp_path / "link"
    real.write_bytes(OLD)
    link.symlink_to("elsewhere/real")
    with pytest.raises(SymlinkRefused, match="follow_symlinks"):
        install(link, NEW, mode)
    assert real.read_bytes() == OLD
    receipt = install(link, NEW, mode, follow_symlinks=True)
    assert link.is_symlink() and real.read_bytes() == NEW
    assert receipt.path == str(real), "the receipt says where it went"
    assert guard.verify(real)
    assert leftovers(tmp_path) == []


@EACH
def test_a_dangling_link_is_refused_or_its_target_is_made(tmp_path, mode):
    link = tmp_path / "link"
    link.symlink_to("target")
    with pytest.raises(SymlinkRefused):
        install(link, NEW, mode)
    assert not (tmp_path / "target").exists()
    install(link, NEW, mode, follow_symlinks=True)
    assert (tmp_path / "target").read_bytes() == NEW


@pytest.mark.parametrize("planted", ["a.sha256.json", "a"])
@EACH
def test_nothing_is_written_through_a_planted_link(tmp_path, mode, planted):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / planted).symlink_to(victim)
    with contextlib.suppress(SymlinkRefused, WriteFailed):
        install(folder / "a", NEW, mode)
    assert victim.read_text() == "precious"


@EACH
def test_directories_pipes_and_devices_are_no_targets(tmp_path, mode):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "folder", tmp_path / "pipe", "/dev/null"):
        with pytest.raises(InvalidInput):
            install(target, NEW, mode)
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_bad_arguments_are_typed_errors(tmp_path):
    with pytest.raises(InvalidInput, match="atomic_dirsync"):
        install(tmp_path / "a", NEW, "fast")
    with pytest.raises(WriteFailed) as caught:
        install(tmp_path / "absent/a", NEW)
    assert caught.value.errno == errno.ENOENT and "absent" in str(caught.value)
    with pytest.raises(InvalidInput):
        install(tmp_path / "nul\0byte", NEW)
    with pytest.raises((InvalidInput, TypeError)):
        install(tmp_path / "a", 5)
    assert os.listdir(tmp_path) == []


# -- failures -------------------------------------------------------------------------------------


def each_operation(tmp_path, mode):
    """Every operation of an overwrite, with a folder in which it has not happened yet."""
    reference = tmp_path / "reference"
    reference.mkdir()
    install(reference / "a", OLD, mode)
    operations = record(lambda vfs: install(reference / "a", NEW, mode, vfs=vfs))
    for n, op in enumerate(operations):
        folder = tmp_path / f"{n}"
        folder.mkdir()
        install(folder / "a", OLD, mode)
        yield n, op, folder


@pytest.mark.parametrize("error", [*ERRNOS, "partial"], ids=lambda e: errno.errorcode.get(e, e))
@EACH_ATOMIC
def test_an_error_at_any_operation_leaves_old_or_new_and_is_typed_with_its_errno(
    tmp_path, monkeypatch, mode, error
):
    skip_the_medium(monkeypatch)
    monkeypatch.setattr(write_modes.time, "sleep", lambda seconds: None)
    code = errno.ENOSPC if error == "partial" else error
    failed = 0
    for n, op, folder in each_operation(tmp_path, mode):
        vfs = FailingVFS(n, error)
        try:
            receipt = install(folder / "a", NEW, mode, vfs=vfs)
            expected = NEW
            assert receipt.bytes == len(NEW)
        except CommittedNotDurable as caught:
            assert op.call == "flush_dir"
            assert caught.errno == code and caught.receipt.durable is False
            expected = NEW
        except WriteFailed as caught:
            failed += 1
            assert caught.errno == code and is_typed(caught)
            expected = OLD
        assert (folder / "a").read_bytes() == expected, f"operation {n}: {op.call}"
        assert guard.verify(folder / "a"), f"operation {n}: {op.call}"
        assert leftovers(folder) == [], f"operation {n}: {op.call}"
        install(folder / "a", OLD, mode)
        assert guard.verify(folder / "a") and (folder / "a").read_bytes() == OLD
    assert failed >= (1 if error == "partial" else 6)


@pytest.mark.parametrize("kind", ["short", "zero"])
@EACH
def test_a_write_that_takes_less_than_it_was_given_is_carried_on(tmp_path, monkeypatch, mode, kind):
    skip_the_medium(monkeypatch)
    for n, op, folder in each_operation(tmp_path, mode):
        if op.call == "write":
            vfs = FailingVFS(n, kind)
            install(folder / "a", NEW, mode, vfs=vfs)
            assert vfs.failed and guard.verify(folder / "a")
            assert (folder / "a").read_bytes() == NEW


@EACH_ATOMIC
def test_a_device_that_takes_nothing_ever_is_an_error_not_a_hang(tmp_path, mode):
    install(tmp_path / "a", OLD, mode)
    vfs = FailingVFS(0, "zero", lambda op: op.call == "write", last=10**9)
    with pytest.raises(WriteFailed) as caught:
        install(tmp_path / "a", NEW, mode, vfs=vfs)
    assert caught.value.errno == errno.EIO
    assert (tmp_path / "a").read_bytes() == OLD and leftovers(tmp_path) == []


@EACH_ATOMIC
def test_writes_that_are_always_short_still_write_everything(tmp_path, mode):
    vfs = FailingVFS(0, "short", lambda op: op.call == "write", last=10**9)
    install(tmp_path / "a", NEW, mode, vfs=vfs)
    assert guard.verify(tmp_path / "a") and (tmp_path / "a").read_bytes() == NEW


@pytest.mark.parametrize("times", [1, FLUSH_ATTEMPTS - 1])
@EACH_ATOMIC
def test_after_a_failed_flush_the_bytes_go_to_a_fresh_file(tmp_path, mode, times):
    install(tmp_path / "a", OLD, mode, sidecar=False)
    inner = FailingVFS(0, errno.EIO, lambda op: op.call == "flush", last=times - 1)
    vfs = RecordingVFS(inner)
    receipt = install(tmp_path / "a", NEW, mode, sidecar=False, vfs=vfs)
    flushed = [op.path for op in vfs.operations if op.call == "flush"]
    assert len(flushed) == times + 1 == len(set(flushed)), "no file is flushed twice"
    [renamed] = [op.path for op in vfs.operations if op.call == "replace"]
    assert renamed == flushed[-1], "only the file whose flush succeeded gets the name"
    written = {
        path: sum(op.size for op in vfs.operations if op.call == "write" and op.path == path)
        for path in flushed
    }
    assert set(written.values()) == {len(NEW)}
    assert receipt.durable is (mode == "atomic_dirsync")
    assert leftovers(tmp_path) == [] and (tmp_path / "a").read_bytes() == NEW


@EACH_ATOMIC
def test_a_flush_that_never_succeeds_is_given_up_and_the_old_file_stays(tmp_path, mode):
    install(tmp_path / "a", OLD, mode)
    vfs = FailingVFS(0, errno.EIO, lambda op: op.call == "flush", last=10**9)
    with pytest.raises(WriteFailed) as caught:
        install(tmp_path / "a", NEW, mode, vfs=vfs)
    assert (caught.value.errno, caught.value.operation) == (errno.EIO, "flush")
    assert len(vfs.failed) == FLUSH_ATTEMPTS
    assert (tmp_path / "a").read_bytes() == OLD and leftovers(tmp_path) == []


def test_a_directory_flush_that_fails_after_the_rename_is_committed_not_durable(tmp_path):
    vfs = FailingVFS(0, errno.EIO, lambda op: op.call == "flush_dir")
    with pytest.raises(CommittedNotDurable) as caught:
        install(tmp_path / "a", NEW, sidecar=False, vfs=vfs)
    error = caught.value
    assert error.errno == errno.EIO and isinstance(error, OSError)
    assert error.receipt.bytes == len(NEW) and error.receipt.durable is False
    assert "EIO" in error.receipt.reason
    assert (tmp_path / "a").read_bytes() == NEW


@EACH_ATOMIC
def test_a_sharing_error_on_the_rename_is_tried_again_a_bounded_number_of_times(
    tmp_path, monkeypatch, mode
):
    waits: list[float] = []
    monkeypatch.setattr(write_modes.time, "sleep", waits.append)
    install(tmp_path / "a", OLD, mode, sidecar=False)
    for last, succeeds in ((REPLACE_ATTEMPTS - 2, True), (10**9, False)):
        vfs = FailingVFS(0, errno.EACCES, lambda op: op.call == "replace", last=last)
        if succeeds:
            install(tmp_path / "a", NEW, mode, sidecar=False, vfs=vfs)
            assert (tmp_path / "a").read_bytes() == NEW
        else:
            with pytest.raises(WriteFailed) as caught:
                install(tmp_path / "a", OLD, mode, sidecar=False, vfs=vfs)
            assert caught.value.errno == errno.EACCES
            assert len(vfs.failed) == REPLACE_ATTEMPTS
            assert (tmp_path / "a").read_bytes() == NEW, "never copied, never unlinked"
    assert waits and leftovers(tmp_path) == []


def test_another_file_system_is_an_error_never_a_copy(tmp_path):
    install(tmp_path / "a", OLD)
    vfs = FailingVFS(0, errno.EXDEV, lambda op: op.call == "replace", last=10**9)
    with pytest.raises(WriteFailed) as caught:
        install(tmp_path / "a", NEW, sidecar=False, vfs=vfs)
    assert caught.value.errno == errno.EXDEV
    assert (tmp_path / "a").read_bytes() == OLD and leftovers(tmp_path) == []


@EACH_ATOMIC
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), MemoryError()])
def test_an_exception_of_the_source_passes_and_leaves_nothing(tmp_path, mode, error):
    install(tmp_path / "a", OLD, mode)

    def source(sink):
        sink.write(b"begun")
        raise error

    with pytest.raises(type(error)) as caught:
        install(tmp_path / "a", source, mode)
    assert caught.value is error
    assert contents(tmp_path)["a"] == OLD and leftovers(tmp_path) == []
    assert guard.verify(tmp_path / "a")


@EACH_ATOMIC
def test_an_interrupt_at_any_operation_leaves_no_temporary_file(tmp_path, monkeypatch, mode):
    skip_the_medium(monkeypatch)
    for n, op, folder in each_operation(tmp_path, mode):
        with pytest.raises(KeyboardInterrupt):
            install(folder / "a", NEW, mode, vfs=FailingVFS(n, KeyboardInterrupt()))
        assert leftovers(folder) == [], f"operation {n}: {op.call}"
        assert guard.verify(folder / "a")


@EACH_ATOMIC
def test_leftovers_that_can_not_be_swept_do_not_stop_a_save(tmp_path, mode):
    """They may belong to another user, in a folder where only owners may remove."""
    (tmp_path / f"{temps.PREFIX}{temps.boot_id()}.99999999.0").write_bytes(b"x")
    vfs = FailingVFS(0, errno.EPERM, lambda op: op.call == "unlink", last=10**9)
    install(tmp_path / "a", NEW, mode, vfs=vfs)
    assert guard.verify(tmp_path / "a")


# -- kills ----------------------------------------------------------------------------------------


def killed_states(tmp_path, mode):
    """What is on disk after SIGKILL at every operation, and within every write."""
    reference = tmp_path / "reference"
    reference.mkdir()
    install(reference / "a", OLD, mode)
    operations = record(lambda vfs: install(reference / "a", NEW, mode, vfs=vfs))
    cuts = {"nothing": lambda size: 0, "half": lambda size: size // 2, "all": lambda size: size}
    for n, op in enumerate(operations):
        for name, kept in cuts.items() if op.call == "write" else [("nothing", cuts["nothing"])]:
            folder = tmp_path / f"{n}-{name}"
            folder.mkdir()
            install(folder / "a", OLD, mode)

            def save(folder=folder, n=n, kept=kept):
                install(folder / "a", NEW, mode, vfs=KillingVFS(n, kept))

            assert in_child(save) == -9
            yield f"{op.call} {n} {name}", folder


@EACH_ATOMIC
def test_a_save_killed_at_any_point_leaves_exactly_the_old_or_exactly_the_new(
    tmp_path, monkeypatch, mode
):
    skip_the_medium(monkeypatch)
    seen = set()
    for where, folder in killed_states(tmp_path, mode):
        data = (folder / "a").read_bytes()
        assert data in (OLD, NEW), where
        assert guard.verify(folder / "a"), f"{where}: the sidecar must vouch for either"
        seen.add(data)
        install(folder / "a", NEW, mode)
        assert leftovers(folder) == [], f"{where}: a dead writer's file must be swept"
        assert guard.verify(folder / "a") and (folder / "a").read_bytes() == NEW
    assert seen == {OLD, NEW}


def test_the_same_check_catches_the_unsafe_mode(tmp_path, monkeypatch):
    skip_the_medium(monkeypatch)
    torn = [
        where
        for where, folder in killed_states(tmp_path, "unsafe")
        if (folder / "a").read_bytes() not in (OLD, NEW)
    ]
    assert torn, "a check that unsafe passes would prove nothing"


# -- temporary names ------------------------------------------------------------------------------


def test_leftovers_of_dead_writers_are_swept_and_those_of_live_ones_are_not(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    suffix = temps.temp_name().removeprefix(f"{temps.PREFIX}{temps.boot_id()}.{os.getpid()}")

    def name(pid, boot=None):
        return f"{temps.PREFIX}{boot or temps.boot_id()}.{pid}{suffix}"

    live, dead = tmp_path / name(child.pid), tmp_path / name(2**22 - 3)
    other, ancient = tmp_path / name(1, "00000000"), tmp_path / name(2, "00000000")
    mine, alien = tmp_path / temps.temp_name(), tmp_path / ".ckpt-tmp.notes"
    for path in (live, dead, other, ancient, mine, alien):
        path.write_bytes(b"x")
    os.utime(ancient, (0, 0))
    install(tmp_path / "a", NEW, sidecar=False)
    kept = {p.name for p in tmp_path.iterdir()}
    assert kept == {live.name, other.name, mine.name, alien.name, "a"}
    child.communicate(b"\n")
    install(tmp_path / "a", NEW, sidecar=False)
    assert not live.exists()


def test_a_name_left_by_a_dead_process_with_our_number_does_not_stop_a_save(tmp_path):
    """In a container the restarted job often has the number of the one that was killed."""
    code = f"""
        import os
        from ckptlib import install
        from ckptlib.vfs import LayeredVFS
        class Kill(LayeredVFS):
            def around(self, op, call):
                if op.call == "replace":
                    os.kill(os.getpid(), 9)
                return call()
        install({str(tmp_path / "a")!r}, b"x", sidecar=False, vfs=Kill())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)])
    [left] = leftovers(tmp_path)
    ours = temps.temp_name().split(".")
    theirs = os.path.basename(left).split(".")
    theirs[3] = ours[3]  # the same process number, and the earliest of its names
    os.rename(left, tmp_path / ".".join(theirs))
    install(tmp_path / "a", NEW)
    assert guard.verify(tmp_path / "a")


def test_names_are_never_used_twice_not_even_by_a_forked_child():
    names = [temps.temp_name() for _ in range(100)]
    reader, writer = os.pipe()
    assert in_child(lambda: os.write(writer, temps.temp_name().encode())) == 0
    names.append(os.read(reader, 1000).decode())
    os.close(reader), os.close(writer)
    names.append(temps.temp_name())
    assert len(set(names)) == len(names)
    assert all(temps.is_temp(name) and len(name) < 64 for name in names)


def test_sweeping_never_follows_a_link_out_of_the_directory(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    folder = tmp_path / "folder"
    folder.mkdir()
    suffix = temps.temp_name().removeprefix(f"{temps.PREFIX}{temps.boot_id()}.{os.getpid()}")
    dead = folder / f"{temps.PREFIX}{temps.boot_id()}.{2**22 - 3}{suffix}"
    dead.mkdir()
    (dead / "link").symlink_to(outside)
    (dead / "sub").mkdir()
    assert temps.sweep(REAL, str(folder)) == [dead.name]
    assert os.listdir(folder) == [] and (outside / "precious").exists()


# -- the sink -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [[0], [1], [COALESCE - 1, 1, 1], [PIECE + 1], [3, PIECE * 2 + 5, 0, 7], [1000] * 600]
)
def test_the_sink_writes_and_hashes_everything_in_order(tmp_path, sizes):
    import hashlib

    numbers = itertools.cycle(range(251))
    chunks = [bytes(itertools.islice(numbers, size)) for size in sizes]

    def source(sink):
        for chunk in chunks:
            assert sink.write(chunk) == len(chunk)

    written = write_file(REAL, str(tmp_path / "a"), source)
    data = (tmp_path / "a").read_bytes()
    assert data == b"".join(chunks)
    assert (written.size, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_small_writes_are_gathered_and_large_ones_cut(tmp_path):
    vfs = RecordingVFS()

    def small(sink):
        for _ in range(1000):
            sink.write(b"x" * 10)

    write_file(vfs, str(tmp_path / "a"), small)
    assert [op.size for op in vfs.operations if op.call == "write"] == [10_000]
    vfs = RecordingVFS()
    write_file(vfs, str(tmp_path / "b"), lambda s: s.write(bytes(PIECE * 3 + 1)) and None)
    assert [op.size for op in vfs.operations if op.call == "write"] == [PIECE] * 3 + [1]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_torch_save_to_a_full_disk_keeps_the_errno(tmp_path, code):
    """By itself it raises a RuntimeError that has none."""
    state = {"w": torch.zeros(300_000)}
    for n in range(2):
        vfs = FailingVFS(n, code, lambda op: op.call == "write", last=10**9)
        with pytest.raises(WriteFailed) as caught:
            install(tmp_path / "a", lambda sink: torch.save(state, sink), vfs=vfs)
        assert caught.value.errno == code
        assert os.listdir(tmp_path) == []


def test_a_sink_that_failed_keeps_its_first_error_and_takes_no_more(tmp_path):
    vfs = FailingVFS(0, errno.ENOSPC, lambda op: op.call == "write")
    file = vfs.create(str(tmp_path / "a"))
    sink = Sink(file)
    with pytest.raises(OSError) as first:
        sink.write(bytes(PIECE))
    with pytest.raises(OSError) as second:
        sink.write(b"more")
    assert first.value is second.value is sink.error
    file.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is a device of Linux")
def test_a_really_full_device_is_reported_with_its_errno():
    with open("/dev/full", "wb", buffering=0) as full:
        sink = Sink(full)
        with pytest.raises(OSError) as caught:
            sink.write(bytes(COALESCE + 1))
        assert caught.value.errno == errno.ENOSPC


def test_a_size_limit_of_the_process_is_a_typed_error_and_the_old_file_stays(tmp_path):
    """A real EFBIG from the kernel, after a real short write."""
    install(tmp_path / "a", OLD)

    def save():
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (PIECE + 1000, PIECE + 1000))
        with pytest.raises(WriteFailed) as caught:
            install(tmp_path / "a", bytes(2 * PIECE))
        assert caught.value.errno == errno.EFBIG

    assert in_child(save) == 0
    assert (tmp_path / "a").read_bytes() == OLD
    assert guard.verify(tmp_path / "a") and leftovers(tmp_path) == []


@EACH_ATOMIC
def test_a_target_that_the_state_has_mapped_stays_right_on_disk_and_in_memory(tmp_path, mode):
    data = torch.arange(5000, dtype=torch.int32).numpy().tobytes()
    install(tmp_path / "a", data, mode)
    with open(tmp_path / "a", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    state = torch.frombuffer(mapped, dtype=torch.int32)
    install(tmp_path / "a", lambda sink: sink.write((state + 1).numpy()) and None, mode)
    install(tmp_path / "a", lambda sink: sink.write(state.numpy()) and None, mode)
    assert (tmp_path / "a").read_bytes() == data
    assert state.tolist() == list(range(5000))


# -- the checks bite ------------------------------------------------------------------------------


def test_a_mutant_that_copies_instead_of_renaming_is_caught(tmp_path, monkeypatch):
    install(tmp_path / "a", OLD)
    rename = write_modes.move_into_place

    def copy(vfs, staged, path):
        if not path.endswith("/a"):
            return rename(vfs, staged, path)
        with open(path, "wb", buffering=0) as target, open(staged.path, "rb") as source:
            target.write(source.read(len(NEW) // 2))
            os.kill(os.getpid(), 9)  # half way

    monkeypatch.setattr(write_modes, "move_into_place", copy)
    assert in_child(lambda: install(tmp_path / "a", NEW)) == -9
    assert (tmp_path / "a").read_bytes() not in (OLD, NEW)
    assert not guard.verify(tmp_path / "a")


def test_a_mutant_that_skips_the_flush_is_caught_by_the_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(write_modes, "stage", mutant_stage)
    operations = record(lambda vfs: install(tmp_path / "a", NEW, sidecar=False, vfs=vfs))
    assert steps(operations) != STEPS["atomic_dirsync"]


def mutant_stage(vfs, path, source, flushes, permissions=None):
    temp = os.path.join(os.path.dirname(path), temps.temp_name())
    return write_file(vfs, temp, source, permissions=permissions)


def test_a_mutant_that_flushes_the_same_file_again_is_caught(tmp_path, monkeypatch):
    def stubborn(vfs, path, source, flushes, permissions=None):
        def flush(file):
            try:
                flushes.add(file.flush_durable(), path)
            except OSError:
                flushes.add(file.flush_durable(), path)

        temp = os.path.join(os.path.dirname(path), temps.temp_name())
        return write_file(vfs, temp, source, permissions=permissions, flush=flush)

    monkeypatch.setattr(write_modes, "stage", stubborn)
    vfs = RecordingVFS(FailingVFS(0, errno.EIO, lambda op: op.call == "flush"))
    install(tmp_path / "a", NEW, sidecar=False, vfs=vfs)
    flushed = [op.path for op in vfs.operations if op.call == "flush"]
    assert len(flushed) != len(set(flushed))
