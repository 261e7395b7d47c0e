"""Mounts are nobody else's, and are gone afterwards, however the process ends that made them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from devices import (
    disk_name,
    eventually,
    fresh,
    image,
    in_namespace,
    left_behind,
    nothing_left,
)

from ckptlib.crashes import blockdev, mounts
from ckptlib.crashes.mounts import ChildDied, isolated, loop_device, mounted
from ckptlib.errors import CkptError, WriteFailed

pytestmark = pytest.mark.needs_power
FORK = multiprocessing.get_context("fork")


class Unpicklable(Exception):
    """Holds what no process can hand to another."""

    def __init__(self):
        super().__init__(threading.Lock())


class NotRebuilt(Exception):
    """Pickles, and cannot be built again from what was pickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def use(backing: str, place: Path, then=lambda: None) -> None:
    """Mount a file system, write to it, and see that the parent does not see it."""
    place.mkdir(exist_ok=True)
    with loop_device(backing) as device, mounted(device, str(place), "ext4", ""):
        (place / "file").write_bytes(b"x" * 10_000)
        assert os.path.ismount(place)
        assert str(place) not in Path(f"/proc/{os.getppid()}/mounts").read_text()
        then()


def record(backing: str, place: Path, then=lambda: None) -> None:
    """The same on a device that a FUSE server shows, so that a mount lies on a mount."""
    with blockdev.serving(place.parent / "device") as server:
        server.load(fresh())
        use(server.record(), place, then)


def hold(note: Path) -> None:
    """Note who is involved, and then stay in the midst of it."""
    involved = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    note.with_suffix(".new").write_text(" ".join(map(str, involved)))
    os.replace(note.with_suffix(".new"), note)
    time.sleep(600)


def raise_(error: BaseException) -> None:
    raise error


def give(value):
    return value


@pytest.fixture(params=[use, record], ids=["file", "recorder"])
def scene(request, tmp_path, monkeypatch):
    """A mount over a plain file, and one over a recording server."""
    monkeypatch.setattr(blockdev, "DISK", disk_name(tmp_path))
    return functools.partial(request.param, image(tmp_path), tmp_path / "mnt")


@pytest.fixture(autouse=True)
def no_process_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left, "also a zombie counts"


# -- nothing is left ----------------------------------------------------------------------------


def test_after_success_nothing_is_left(tmp_path, scene):
    isolated(scene)
    nothing_left(tmp_path)


def test_what_is_mounted_is_not_seen_by_the_parent_and_its_loop_device_is_there(tmp_path, held):
    parent, _ = held
    assert [line.split()[1] for line in left_behind(tmp_path)] == ["over"]  # a loop device
    parent.kill()


@in_namespace
def test_what_is_mounted_below_a_shared_mount_is_not_seen_by_the_parent_either(tmp_path):
    """On most machines / is shared: new namespaces get its mounts, and give theirs back."""
    shared = tmp_path / "shared"
    shared.mkdir()
    mounts.mount("none", str(shared), "tmpfs", "")
    mounts.mount("none", str(shared), None, "", flags=1 << 20)  # MS_SHARED
    isolated(use, image(tmp_path), shared / "mnt")
    isolated(record, image(tmp_path), shared / "mnt")


def test_after_an_exception_inside_nothing_is_left(tmp_path, scene):
    with pytest.raises(LookupError, match="inside"):
        isolated(scene, lambda: raise_(LookupError("inside")))
    nothing_left(tmp_path)


def test_after_an_interrupt_inside_nothing_is_left(tmp_path, scene):
    with pytest.raises(ChildDied):
        isolated(scene, lambda: raise_(KeyboardInterrupt()))
    nothing_left(tmp_path)


def test_the_mounts_of_a_process_that_is_not_isolated_are_undone_at_once(tmp_path):
    backing = image(tmp_path)
    for error in (KeyboardInterrupt(), OSError(errno.EIO, "gone")):
        with pytest.raises(type(error)), loop_device(backing) as device:
            assert device in left_behind(tmp_path)[0].replace("loop", "/dev/loop", 1)
            raise error
        assert left_behind(tmp_path) == []


def test_a_function_that_mounts_and_does_not_unmount_leaves_nothing(tmp_path):
    def forget(place):
        place.mkdir()
        with loop_device(image(tmp_path)) as device:
            mounts.mount(device, str(place), "ext4", "")

    isolated(forget, tmp_path / "mnt")
    nothing_left(tmp_path)


def test_a_child_killed_amid_a_mount_is_reported_and_leaves_nothing(tmp_path, scene):
    note = tmp_path / "note"

    def strike():
        with contextlib.suppress(TimeoutError):
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            hold(note)

    with pytest.raises(ChildDied, match="signal 9"):
        isolated(scene, strike)
    nothing_left(tmp_path, map(int, note.read_text().split()))


@pytest.fixture
def held(tmp_path, scene):
    """A process with a mount in its isolated child, and everybody involved, the child first."""
    note = tmp_path / "note"
    parent = FORK.Process(target=isolated, args=(scene, lambda: hold(note)))
    parent.start()
    eventually(note.exists, "the mount")
    involved = list(map(int, note.read_text().split()))
    yield parent, involved
    parent.join()
    nothing_left(tmp_path, involved)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_when_the_parent_is_killed_its_child_server_and_mounts_go_with_it(held, name):
    parent, _ = held
    os.kill(parent.pid, getattr(signal, name))
    parent.join()
    assert parent.exitcode == -getattr(signal, name)


@pytest.mark.parametrize("order", ["child first", "server first"])
def test_when_all_are_killed_at_once_none_waits_for_another_for_ever(held, order):
    """The server, as the last one with the mount, would wait for its own device to answer."""
    _, involved = held
    for pid in involved if order == "child first" else reversed(involved):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["Ctrl-C", "the parent alone"])
def test_an_interrupt_ends_the_call_and_nothing_is_left(tmp_path, scene, send):
    """A terminal sends it to the whole group, Jupyter to the process that it knows."""
    note = tmp_path / "note"

    def job():
        os.setsid()  # a process group of its own, like that of a command in a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            isolated(scene, lambda: hold(note))
        except KeyboardInterrupt:
            assert psutil.Process().children() == []
            sys.exit(42)

    parent = FORK.Process(target=job)
    parent.start()
    eventually(note.exists, "the mount")
    send(parent.pid, signal.SIGINT)
    parent.join()
    assert parent.exitcode == 42
    nothing_left(tmp_path, map(int, note.read_text().split()))


def test_ctrl_c_leaves_the_server_to_those_who_still_have_to_unmount(tmp_path):
    def sessions():
        with blockdev.serving(tmp_path / "device") as server:
            server.load(fresh())
            server.record()
            return [os.getsid(child.pid) for child in psutil.Process().children()]

    [session] = isolated(sessions)
    assert session != os.getsid(0)


@in_namespace
def test_a_file_that_was_left_open_is_an_error_and_still_unmounted(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "PATIENCE_S", 0.05)
    place = tmp_path / "mnt"
    place.mkdir()
    with (
        pytest.raises(OSError, match=os.strerror(errno.EBUSY)),
        loop_device(image(tmp_path)) as device,
        mounted(device, str(place), "ext4", ""),
    ):
        left_open = (place / "file").open("wb")
    assert not os.path.ismount(place)
    left_open.close()
    nothing_left(tmp_path)


def test_a_refused_mount_raises_its_errno_and_leaves_nothing(tmp_path):
    zeros = tmp_path / "zeros"
    zeros.write_bytes(bytes(2**20))
    for kind, number in (("ext4", errno.EINVAL), ("nothing", errno.ENODEV)):
        with pytest.raises(OSError) as caught:
            isolated(_mount, str(zeros), tmp_path / "mnt", kind)
        assert caught.value.errno == number
        nothing_left(tmp_path)
    with pytest.raises(FileNotFoundError):
        isolated(_mount, str(tmp_path / "absent"), tmp_path / "mnt", "ext4")


def _mount(backing: str, place: Path, kind: str) -> None:
    place.mkdir(exist_ok=True)
    with loop_device(backing) as device, mounted(device, str(place), kind, ""):
        raise AssertionError("nothing could be mounted here")


# -- an isolated call ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 3, {"a": [1]}, "x" * 3_000_000, Path("p")], ids=type)
def test_what_the_function_returns_comes_back(value):
    assert isolated(give, value) == value
    assert isolated(give, value=value) == value


def test_the_call_runs_in_another_process_and_other_mounts():
    here = os.getpid(), os.readlink("/proc/self/ns/mnt")
    there = isolated(lambda: (os.getpid(), os.readlink("/proc/self/ns/mnt")))
    assert here[0] != there[0] and here[1] != there[1]
    assert here == (os.getpid(), os.readlink("/proc/self/ns/mnt"))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a", 3),
        OSError(errno.ENOSPC, "full", "file"),
        WriteFailed("refused", "file", errno.EIO, "flush"),
        AssertionError("not so"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_comes_back_as_itself_with_the_traceback_of_the_child(error):
    with pytest.raises(type(error)) as caught:
        isolated(raise_, error)
    assert str(caught.value) == str(error)
    assert getattr(caught.value, "errno", None) == getattr(error, "errno", None)
    assert any("in raise_" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("error", [Unpicklable(), NotRebuilt(1, 2)], ids=["pickle", "unpickle"])
def test_an_exception_that_cannot_travel_is_told_with_its_traceback(error):
    with pytest.raises(ChildDied, match="cannot be handed over") as caught:
        isolated(raise_, error)
    assert type(error).__name__ in str(caught.value) and "in raise_" in str(caught.value)


def test_a_result_that_cannot_travel_is_an_error():
    with pytest.raises(Exception, match="pickle"):
        isolated(threading.Lock)


@pytest.mark.parametrize(
    ("end", "found"),
    [
        (lambda: os._exit(3), "exit status 3"),
        (lambda: os._exit(0), "exit status 0"),
        (lambda: sys.exit(0), "exit status 1"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal 9"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "signal 15"),
    ],
    ids=["_exit 3", "_exit 0", "exit", "kill", "term"],
)
def test_a_child_that_ends_without_an_answer_is_reported_as_dead(end, found):
    with pytest.raises(ChildDied, match=found) as caught:
        isolated(end)
    assert isinstance(caught.value, CkptError)


def test_files_that_the_parent_has_not_flushed_are_not_written_twice(tmp_path):
    with (tmp_path / "f").open("w") as file:
        file.write("once")
        isolated(give, 1)
    assert (tmp_path / "f").read_text() == "once"


def test_no_descriptor_is_left_open(tmp_path, scene):
    def numbers():
        return sorted(os.listdir("/proc/self/fd"))

    isolated(scene)
    before = numbers()
    isolated(scene)
    with pytest.raises(LookupError):
        isolated(scene, lambda: raise_(LookupError()))
    with loop_device(image(tmp_path)):
        pass
    assert numbers() == before
    assert isolated(_twice, scene) == []


def _twice(scene) -> list[str]:
    scene()
    before = set(os.listdir("/proc/self/fd"))
    scene()
    return sorted(set(os.listdir("/proc/self/fd")) - before)


# -- loop devices -------------------------------------------------------------------------------


def queue(device: str, name: str) -> str:
    return Path("/sys/block", Path(device).name, "queue", name).read_text().strip()


def test_a_loop_device_is_what_a_crash_is_reasoned_about(tmp_path):
    """Sectors of 512 bytes, a cache that needs flushes, no FUA; and undone with its last user."""
    with loop_device(image(tmp_path)) as device:
        assert queue(device, "logical_block_size") == str(mounts.SECTOR) == "512"
        assert (queue(device, "write_cache"), queue(device, "fua")) == ("write back", "0")
        loop = Path("/sys/block", Path(device).name, "loop")
        assert (loop / "autoclear").read_text().strip() == "1"
        assert (loop / "offset").read_text().strip() == "0"
        assert (loop / "sizelimit").read_text().strip() == "0"
        with open(device, "rb") as file:
            assert file.seek(0, os.SEEK_END) == fresh().size


def test_what_was_written_to_a_loop_device_is_in_its_file_when_the_block_ends(tmp_path):
    with loop_device(image(tmp_path)) as device, open(device, "rb+") as file:
        file.write(b"not flushed by anybody")
    assert (tmp_path / "image").read_bytes().startswith(b"not flushed by anybody")


def test_processes_that_want_a_loop_device_at_the_same_time_get_one_each(tmp_path):
    def take_many(number: int) -> None:
        path = tmp_path / str(number)
        path.write_bytes(bytes([number]) * 4096)
        for _ in range(25):
            with loop_device(str(path)) as device, open(device, "rb") as file:
                assert file.read() == bytes([number]) * 4096

    takers = [FORK.Process(target=take_many, args=(number,)) for number in range(4)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    assert [taker.exitcode for taker in takers] == [0, 0, 0, 0]
    nothing_left(tmp_path)


@in_namespace
def test_a_device_node_that_a_container_lacks_is_made(tmp_path):
    control = os.stat("/dev/loop-control")
    backing = image(tmp_path)
    mounts.mount("none", "/dev", "tmpfs", "")
    os.mknod("/dev/loop-control", control.st_mode, control.st_rdev)
    with loop_device(backing) as device, open(device, "rb") as file:
        assert {"loop-control", Path(device).name} <= set(os.listdir("/dev"))
        assert file.read(4096) == Path(backing).read_bytes()[:4096]
    with loop_device(backing):  # the node is there now
        pass


@pytest.mark.needs_power("btrfs")
def test_btrfs_is_told_to_forget_a_device_that_goes_and_understands_that(tmp_path, monkeypatch):
    """Older kernels would refuse an earlier state of it, on another device, as a stale copy."""
    accepted = []

    def call(descriptor, number, argument=0):
        result = ioctl(descriptor, number, argument)
        accepted.append((number, bytes(argument[8:]).rstrip(b"\0") if argument else b""))
        return result

    ioctl = fcntl.ioctl
    open("/dev/btrfs-control", "rb").close()  # the module is there, if it was not
    with loop_device(image(tmp_path)) as device:
        monkeypatch.setattr(mounts.fcntl, "ioctl", call)
    assert accepted == [(mounts.BTRFS_FORGET_DEV, device.encode())]


@pytest.mark.needs_power("ext4", "xfs", "btrfs")
@pytest.mark.parametrize("name", ["ext4", "xfs", "btrfs"])
@in_namespace
def test_two_states_of_one_file_system_can_be_mounted_at_once_and_in_any_order(tmp_path, name):
    """They have one UUID, and the one that is mounted later can be the older one."""
    from ckptlib.crashes.filesystems import filesystem

    entry, log = filesystem(name), fresh(name)
    places = [tmp_path / "older", tmp_path / "newer"]
    for place in places:
        place.mkdir()
    older, newer = blockdev.Image(log.size, log.base), blockdev.Image(log.size, log.base)
    for number in range(3):
        with entry.mounted(newer.path, places[1]):
            (places[1] / str(number)).write_text("x")
    with entry.mounted(newer.path, places[1]), entry.mounted(older.path, places[0]):
        assert len(list(places[1].glob("[0-9]"))) == 3
        assert len(list(places[0].glob("[0-9]"))) == 0
    for state in (older, newer):
        state.close()
