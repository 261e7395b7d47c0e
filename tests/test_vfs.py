"""The file-system seam: what each operation promises, and that nothing reaches files past it."""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import stat
import subprocess
import sys
import textwrap

import pytest
from faulty import WatchingVFS, in_child

from ckptlib import vfs as vfs_module
from ckptlib.vfs import (
    F_BARRIERFSYNC,
    F_FULLFSYNC,
    REAL,
    LayeredVFS,
    RecordingVFS,
    durable_flush,
    locked,
)


def mac(full=None, barrier=None, plain=None):
    """A durable flush on a pretended macOS; each argument is the errno that a primitive meets."""
    calls = []

    def step(name, code):
        calls.append(name)
        if code:
            raise OSError(code, os.strerror(code))

    def fcntl_call(fd, command):
        name, code = {F_FULLFSYNC: ("full", full), F_BARRIERFSYNC: ("barrier", barrier)}[command]
        step(name, code)

    def fsync(fd):
        step("plain", plain)

    try:
        used = durable_flush(3, platform="darwin", fcntl_call=fcntl_call, fsync=fsync)
    except OSError as error:
        used = error.errno
    return used, calls


def test_linux_flushes_with_fsync_and_says_so(tmp_path):
    file = REAL.create(str(tmp_path / "a"))
    file.write(b"x")
    assert durable_flush(file.fileno(), platform="linux") == "fsync"
    file.close()


def test_macos_flushes_the_drive_cache_first():
    assert mac() == ("F_FULLFSYNC", ["full"])


@pytest.mark.parametrize("refusal", [errno.ENOTSUP, errno.EINVAL, errno.ENOTTY])
def test_macos_falls_back_to_the_barrier_and_then_to_plain_fsync(refusal):
    assert mac(full=refusal) == ("F_BARRIERFSYNC", ["full", "barrier"])
    assert mac(full=refusal, barrier=refusal) == ("plain-fsync", ["full", "barrier", "plain"])


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_flush_that_failed_is_never_followed_by_a_weaker_one(code):
    assert mac(full=code) == (code, ["full"])
    assert mac(full=errno.ENOTSUP, barrier=code) == (code, ["full", "barrier"])
    assert mac(full=errno.ENOTSUP, barrier=errno.ENOTSUP, plain=code)[0] == code


def test_only_full_flushes_count_as_durable():
    assert {"fsync", "F_FULLFSYNC"} == vfs_module.FULL_FLUSH


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_directory_flush_that_is_not_supported_is_reported_not_raised(
    tmp_path, monkeypatch, code
):
    def refuse(fd):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    result = REAL.flush_dir(str(tmp_path))
    # ENOTSUP and EOPNOTSUPP are one number on Linux, with two names
    assert re.fullmatch(r"unsupported:(EINVAL|ENOTSUP|EOPNOTSUPP)", result)


def test_a_directory_flush_that_fails_is_raised(tmp_path, monkeypatch):
    def fail(fd):
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError) as caught:
        REAL.flush_dir(str(tmp_path))
    assert caught.value.errno == errno.EIO


def test_a_flushed_directory_is_closed_again(tmp_path):
    gc.collect()  # what other tests left
    before = len(os.listdir("/dev/fd"))
    for _ in range(5):
        REAL.flush_dir(str(tmp_path))
    assert len(os.listdir("/dev/fd")) == before


def test_opening_refuses_links_pipes_directories_and_devices(tmp_path):
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: opening must not wait
    for name in ("link", "dangling", "folder", "pipe"):
        with pytest.raises(OSError):
            REAL.open(str(tmp_path / name))
    with pytest.raises(OSError):
        REAL.open("/dev/null")
    assert REAL.open(str(tmp_path / "real")).read() == b"x"


def test_creating_is_exclusive_by_default_and_truncates_otherwise(tmp_path):
    path = str(tmp_path / "a")
    for data in (b"longer", b"x"):
        file = REAL.create(path, exclusive=False)
        file.write(data)
        file.close()
    assert (tmp_path / "a").read_bytes() == b"x"
    with pytest.raises(FileExistsError):
        REAL.create(path)


@pytest.mark.parametrize("exclusive", [True, False])
def test_creating_never_writes_through_a_symbolic_link(tmp_path, exclusive):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "link").symlink_to(victim)
    with pytest.raises(OSError):
        REAL.create(str(tmp_path / "link"), exclusive=exclusive)
    assert victim.read_text() == "precious"


def test_a_directory_is_never_renamed_onto_one_that_holds_something(tmp_path):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(OSError):
        REAL.rename(str(tmp_path / "new"), str(tmp_path / "old"))
    assert (tmp_path / "old/file").read_text() == "old"


def test_existence_is_told_of_dangling_links_and_below_files(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").write_text("")
    assert REAL.exists(str(tmp_path / "link"))
    assert not REAL.exists(str(tmp_path / "file/below"))
    assert not REAL.exists(str(tmp_path / "absent"))


def test_the_lock_is_refused_at_once_while_somebody_holds_it(tmp_path):
    path = str(tmp_path / "LOCK")
    with locked(REAL, path), pytest.raises(BlockingIOError):
        REAL.lock(path)
    with locked(REAL, path):
        pass


def test_the_lock_of_a_killed_process_is_free_again(tmp_path):
    path = str(tmp_path / "LOCK")

    def hold():
        REAL.lock(path)
        os.kill(os.getpid(), 9)

    assert in_child(hold) == -9
    REAL.lock(path).release()


def test_a_released_lock_is_free_even_if_a_child_was_forked_while_it_was_held(tmp_path):
    """A data loader's workers are forked at any time and inherit the descriptor."""
    path = str(tmp_path / "LOCK")
    reader, writer = os.pipe()
    lock = REAL.lock(path)
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.read(reader, 1)  # until the parent is done
        os._exit(0)
    try:
        lock.release()
        REAL.lock(path).release()
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(pid, 0)


def test_the_lock_is_never_taken_through_a_symbolic_link(tmp_path):
    (tmp_path / "LOCK").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        REAL.lock(str(tmp_path / "LOCK"))
    assert not (tmp_path / "elsewhere").exists()


def test_large_offsets_are_not_cut_to_32_bits(tmp_path):
    path, far = str(tmp_path / "sparse"), (5 << 30) + 7
    file = REAL.create(path)
    assert file.seek(far) == far
    file.write(b"end")
    assert file.stat().st_size == file.tell() == far + 3
    file.close()
    again = REAL.open(path)
    again.seek(far)
    assert again.read() == b"end"
    again.close()


def test_closing_twice_closes_only_once(tmp_path):
    file = REAL.create(str(tmp_path / "a"))
    fd = file.fileno()
    file.close()
    other = os.open(os.devnull, os.O_RDONLY)  # takes the number that has become free
    assert other == fd
    file.close()
    os.fstat(other)
    os.close(other)


# -- layers ---------------------------------------------------------------------------------------


def test_the_recorder_sees_every_operation_in_order_with_sizes_and_primitives(tmp_path):
    vfs = RecordingVFS()
    path, target = str(tmp_path / "a"), str(tmp_path / "b")
    file = vfs.create(path)
    file.write(b"12345")
    file.flush_durable()
    file.close()
    vfs.replace(path, target)
    vfs.flush_dir(str(tmp_path))
    seen = [(op.call, op.size, op.result) for op in vfs.operations]
    assert seen == [
        ("create", 0, ""),
        ("write", 5, ""),
        ("flush", 5, "fsync"),
        ("close", 0, ""),
        ("replace", 0, ""),
        ("flush_dir", 0, "fsync"),
    ]
    assert vfs.operations[4].target == target
    assert [op.index for op in vfs.operations] == list(range(6))
    assert all(op.data is None for op in vfs.operations), "payloads must not be kept alive"
    starts = [op.started for op in vfs.operations]
    assert starts == sorted(starts)


def test_the_recorder_names_the_error_of_an_operation_that_failed(tmp_path):
    vfs = RecordingVFS()
    with pytest.raises(FileNotFoundError):
        vfs.open(str(tmp_path / "absent"))
    assert vfs.operations[-1].result == "ENOENT"


def test_a_layer_can_write_other_bytes_than_were_given(tmp_path):
    class Upper(LayeredVFS):
        def around(self, op, call):
            return call(bytes(op.data).upper()) if op.call == "write" else call()

    file = Upper().create(str(tmp_path / "a"))
    file.write(b"abc")
    file.close()
    assert (tmp_path / "a").read_bytes() == b"ABC"


def test_layers_stack_and_each_sees_the_operation_once(tmp_path):
    seen = []
    vfs = RecordingVFS(WatchingVFS(lambda op: seen.append(op.call)))
    file = vfs.create(str(tmp_path / "a"))
    file.write(b"x")
    file.close()
    vfs.stat(str(tmp_path / "a"))
    assert seen == [op.call for op in vfs.operations] == ["create", "write", "close", "stat"]


def test_a_layered_file_behaves_like_the_real_one(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(100)))
    real, layered = REAL.open(str(tmp_path / "a")), LayeredVFS().open(str(tmp_path / "a"))
    for file in (real, layered):
        file.seek(10)
    assert real.read(5) == layered.read(5) == bytes(range(10, 15))
    assert real.tell() == layered.tell() == 15
    assert real.stat().st_size == layered.stat().st_size == 100
    assert layered.readable() and not layered.writable()
    for file in (real, layered):
        file.close()


# -- the system calls themselves ------------------------------------------------------------------

STRACE = shutil.which("strace")


def traced(tmp_path, code: str) -> list[str]:
    """System calls of a child, one a line, with descriptors resolved to paths."""
    if STRACE is None:
        pytest.skip("strace is not installed (apt-get install strace), so system calls stay unseen")
    log = tmp_path / "strace.log"
    calls = "trace=openat,open,creat,write,pwrite64,writev,fsync,fdatasync,rename,renameat,"
    calls += (
        "renameat2,unlink,unlinkat,mkdir,rmdir,symlink,symlinkat,sync_file_range,ftruncate,fchmod"
    )
    # -s 0: payloads are of no interest
    command = [STRACE, "-f", "-y", "-s", "0", "-o", str(log), "-e", calls, sys.executable, "-c"]
    ran = subprocess.run(
        [*command, textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    if "PTRACE" in ran.stderr.upper() or "Operation not permitted" in ran.stderr:
        pytest.skip(f"strace may not trace here: {ran.stderr.strip()[:200]}")
    assert ran.returncode == 0, ran.stderr
    return log.read_text().splitlines()


_CALL = re.compile(r"^\d+\s+(\w+)\((.*)\)\s+=\s+(-?\d+)")


def events(lines: list[str], root: str) -> list[tuple[str, str, str]]:
    """``(system call, file name, written bytes or target)`` of what happened below ``root``."""
    found = []
    for line in lines:
        match = _CALL.match(line)
        if not match or root not in line or int(match[3]) < 0:
            continue
        call, arguments, result = match.groups()
        # strace prints an open descriptor as 3</path>, a path argument in quotes
        paths = re.findall(r'<(/[^>]*)>|"(/[^"]*)"', arguments)
        names = [a or b for a, b in paths if (a or b).startswith(root)]
        if call.startswith("open") and not re.search(r"O_WRONLY|O_RDWR", arguments):
            continue
        if names:
            last = names[1] if len(names) > 1 else result
            found.append((call, os.path.relpath(names[0], root), last))
    return found


EXPECTED = {
    "unsafe": ["openat payload", "write payload"],
    "atomic_nodirsync": [
        "openat temp", "write temp", "fsync temp", "rename temp payload",
    ],
    "atomic_dirsync": [
        "openat temp", "write temp", "fsync temp", "rename temp payload", "fsync .",
    ],
}  # fmt: skip


@pytest.mark.parametrize("mode", EXPECTED)
def test_the_kernel_sees_write_flush_rename_and_directory_flush_in_that_order(tmp_path, mode):
    root = tmp_path / "store"
    root.mkdir()
    size = 3_000_000
    lines = traced(
        tmp_path,
        f"""
        from ckptlib import install
        install({str(root / "payload")!r}, bytes({size}), {mode!r}, sidecar=False)
        """,
    )
    happened, written = [], 0
    for call, name, last in events(lines, str(root)):
        name = "temp" if name.startswith(".ckpt-tmp.") else name
        if call == "write":
            written += int(last)
        if call == "fsync" and name == "temp":
            assert written == size, "the file must have its full size when it is flushed"
        entry = f"{call} {name}" + (f" {os.path.basename(last)}" if "rename" in call else "")
        if entry not in happened[-1:]:
            happened.append(entry)
    assert written == size
    assert happened == EXPECTED[mode]


def test_no_system_call_on_a_stores_files_bypasses_the_recorder(tmp_path):
    root, report = tmp_path / "store", tmp_path / "operations"
    lines = traced(
        tmp_path,
        f"""
        from ckptlib import CheckpointStore
        from ckptlib.vfs import RecordingVFS
        vfs = RecordingVFS()
        with open({str(report)!r}, "w") as out:
            for protocol in ("batched", "per_file"):
                store = CheckpointStore({str(root)!r} + protocol, protocol=protocol, keep=1,
                                        format="numpy", vfs=vfs)
                for step in (1, 2):
                    store.save(step, {{"model": [step, "x" * 3_000_000], "rng": [step]}})
                store.load()
                store.scrub()
            for op in vfs.operations:
                print(op.call, op.path, file=out)
        """,
    )
    names = {
        "create": "openat", "write": "write", "flush": "fsync", "flush_dir": "fsync",
        "replace": "rename", "rename": "rename", "unlink": "unlink", "rmdir": "rmdir",
        "mkdir": "mkdir", "symlink": "symlink", "lock": "openat",
    }  # fmt: skip
    recorded = []
    for line in report.read_text().splitlines():
        call, path = line.split(" ", 1)
        if call in names and str(root) in path:
            recorded.append((names[call], path.removeprefix(str(root))))
    seen = []
    for line in lines:
        match = _CALL.match(line)
        if not match or str(root) not in line or int(match[3]) < 0:
            continue
        call, arguments, _ = match.groups()
        if call == "openat" and not re.search(r"O_WRONLY|O_RDWR", arguments):
            continue
        paths = [a or b for a, b in re.findall(r'<(/[^>]*)>|"(/[^"]*)"', arguments)]
        paths = [path for path in paths if path.startswith(str(root))]
        seen.append((call, paths[0].removeprefix(str(root))))
    # flush_dir opens the directory read-only; that open is not in either list
    assert sorted(seen) == sorted(recorded)
    flushes = [i for i, (call, _) in enumerate(seen) if call == "fsync"]
    assert flushes, "a durable mode that flushes nothing"


def test_files_are_private_to_the_process_that_opened_them(tmp_path):
    """No descriptor leaks into programs that are started meanwhile."""
    file = REAL.create(str(tmp_path / "a"))
    lock = REAL.lock(str(tmp_path / "LOCK"))
    again = REAL.open(str(tmp_path / "a"))
    for fd in (file.fileno(), again.fileno(), lock._fd):
        assert not os.get_inheritable(fd)
    for thing in (file, again):
        thing.close()
    lock.release()


def test_new_files_and_directories_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        REAL.create(str(tmp_path / "file")).close()
        REAL.mkdir(str(tmp_path / "folder"))
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(tmp_path / "file").st_mode) == 0o640
    assert stat.S_IMODE(os.stat(tmp_path / "folder").st_mode) == 0o750
