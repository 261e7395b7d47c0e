"""What a device records is what was done to it, and a crash state holds exactly what it should."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import signal
from pathlib import Path

import psutil
import pytest
from devices import disk_name, eventually, fresh, in_namespace, nothing_left
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptlib.crashes import blockdev, mounts
from ckptlib.crashes.blockdev import DeviceFailed, Image, serving
from ckptlib.crashes.blocklog import FLUSH, MARK, WRITE, CorruptLog, DeviceLog, Record
from ckptlib.crashes.filesystems import filesystem

pytestmark = pytest.mark.needs_power
SIZE = 10 * 4096 + 512  # sectors, but no whole number of pages
# a machine under load is slow to give a loop device, and no example can be skipped for that
some = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def writes(draw) -> Record:
    """A write anywhere on the device, of whole sectors or not."""
    length = draw(st.integers(1, 9000) | st.sampled_from([512, 4096, 8192]))
    offset = draw(st.integers(0, SIZE - length))
    if draw(st.booleans()):
        offset = offset // 512 * 512
    return Record(WRITE, offset, bytes([draw(st.integers(0, 255))]) * length)


@st.composite
def logs(draw) -> DeviceLog:
    base = [(r.offset, r.data) for r in draw(st.lists(writes(), max_size=2))]
    others = st.sampled_from([Record(FLUSH), Record(MARK, mark={"a": 1})])
    return DeviceLog(SIZE, {}, base, draw(st.lists(writes() | others, max_size=10)))


@st.composite
def states(draw, log: DeviceLog) -> dict:
    """What :meth:`serve` is asked for: any cut, any later writes in any order, some torn."""
    applied = draw(st.integers(0, len(log.records)))
    later = [i for i in range(applied, len(log.records)) if log.records[i].kind == WRITE]
    kept = draw(st.lists(st.sampled_from(later), unique=True)) if later else []
    torn = {}
    for index in kept:
        length = len(log.records[index])
        if draw(st.booleans()):
            starts = draw(st.lists(st.integers(0, length - 1), max_size=3))
            torn[index] = [(at, draw(st.integers(1, length - at))) for at in starts]
    return {"applied": applied, "writes": kept, "torn": torn}


def model(log: DeviceLog, applied: int, writes=(), torn=None) -> bytes:
    """The same, in a bytearray."""
    device = bytearray(log.size)
    for offset, data in log.base:
        device[offset : offset + len(data)] = data
    for record in log.records[:applied]:
        if record.kind == WRITE:
            device[record.offset : record.offset + len(record)] = record.data
    for index in writes:
        record = log.records[index]
        for start, length in (torn or {}).get(index, [(0, len(record))]):
            at = record.offset + start
            device[at : at + length] = record.data[start : start + length]
    return bytes(device)


def sample() -> DeviceLog:
    """Three windows; the second one overwrites parts of the first."""
    return DeviceLog(
        SIZE,
        {"name": "sample"},
        [(0, b"B" * 4096)],
        [
            Record(WRITE, 4096, b"1" * 4096),
            Record(FLUSH),
            Record(WRITE, 4100, b"2" * 5000),
            Record(MARK, mark={"acknowledged": 1}),
            Record(WRITE, 512, b"3" * 1024),
            Record(FLUSH),
            Record(WRITE, SIZE - 512, b"4" * 512),
        ],
    )


def through_loop(path: str) -> bytes:
    with mounts.loop_device(path) as device:
        return Path(device).read_bytes()


def kinds(log: DeviceLog) -> list:
    """A log as short as it can be told: where writes go, and what marks say."""
    return [(r.offset, len(r)) if r.kind == WRITE else r.mark or FLUSH for r in log.records]


# -- the image ----------------------------------------------------------------------------------


@given(records=st.lists(writes(), max_size=12), copied=st.integers(0, 12))
def test_an_image_holds_what_was_written_and_its_copies_are_its_own(records, copied):
    image, plain, copy = Image(SIZE), bytearray(SIZE), None
    for number, record in enumerate([*records, None]):
        if number == copied:
            copy, then = image.copy(), bytes(plain)
        if record is not None:
            image.write(record.offset, record.data)
            plain[record.offset : record.offset + len(record)] = record.data
    assert image.read(0, SIZE) == bytes(plain) == Path(image.path).read_bytes()
    for start, length in [(0, 1), (511, 513), (4095, 2), (SIZE - 1, 1), (SIZE - 1, 9), (7, 0)]:
        assert image.read(start, length) == plain[start : start + length]
    held = bytearray(plain)
    for offset, length in image.filled():
        held[offset : offset + length] = bytes(length)
    assert not any(held)
    if copy is not None:
        assert copy.read(0, SIZE) == then
        copy.write(0, b"other")
        assert image.read(0, SIZE) == bytes(plain)
        copy.close()
    image.close()


def test_an_image_is_as_large_as_it_is_said_to_be_and_takes_no_more_room_than_it_holds():
    image = Image(2**32, [(2**31, b"x" * 5000)])
    held = os.stat(image.path)
    assert held.st_size == 2**32 and held.st_blocks * 512 == 8192
    copy = image.copy()
    assert os.stat(copy.path).st_blocks == held.st_blocks
    for one in (image, copy):
        one.close()


def test_a_write_that_the_kernel_cuts_short_is_continued(monkeypatch):
    image, pwrite = Image(SIZE), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:1000], at))
    image.write(100, bytes(range(256)) * 20)
    assert image.read(100, 256 * 20) == bytes(range(256)) * 20
    image.close()


# -- crash states -------------------------------------------------------------------------------


@in_namespace
def test_a_state_is_what_a_plain_model_says_whatever_came_before_it(tmp_path):
    with serving(tmp_path / "device") as server:

        @some
        @given(data=st.data(), log=logs())
        def check(data, log):
            server.load(log)
            for _ in range(3):  # forwards and back
                state = data.draw(states(log))
                path = server.serve(**state)
                assert Path(path).read_bytes() == through_loop(path) == model(log, **state)

        check()


@in_namespace
def test_a_state_can_be_asked_for_in_the_words_of_json(tmp_path):
    log = sample()
    with serving(tmp_path / "device") as server:
        server.load(log)
        asked = {"applied": 2, "writes": [4, 2], "torn": {"2": [[0, 512], [1024, 10]]}}
        path = server.serve(**json.loads(json.dumps(asked)))
        assert Path(path).read_bytes() == model(log, 2, [4, 2], {2: [(0, 512), (1024, 10)]})


@in_namespace
def test_what_a_recovery_writes_stays_in_its_own_state(tmp_path):
    log = sample()
    with serving(tmp_path / "device") as server:
        server.load(log)
        with mounts.loop_device(server.serve(2, [2])) as first:
            overwrite(first, b"R" * SIZE)
            # while the first one is still there, as after a recovery that hangs
            for asked in ((2, [2]), (2, []), (0, []), (6, [6])):
                path = server.serve(*asked)
                assert Path(path).read_bytes() == model(log, *asked)
            overwrite(first, b"S" * SIZE)  # late writes of the old state
            assert through_loop(path) == model(log, *asked)
            overwrite(first, b"T" * SIZE)
        assert Path(server.serve(2, [2])).read_bytes() == model(log, 2, [2])


def overwrite(device: str, data: bytes) -> None:
    with open(device, "rb+", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


@pytest.mark.needs_power("ext4", "xfs", "btrfs")
@pytest.mark.parametrize("name", ["ext4", "xfs", "btrfs"])
@in_namespace
def test_a_file_system_is_the_same_each_time_its_state_is_mounted(tmp_path, name):
    entry, place = filesystem(name), tmp_path / "mnt"
    place.mkdir()
    with serving(tmp_path / "device") as server:
        server.load(fresh(name))
        for _ in range(3):
            with entry.mounted(server.serve(0), place):
                assert not (place / "file").exists()
                (place / "file").write_bytes(b"x" * 100_000)


@in_namespace
def test_the_state_that_is_kept_is_the_one_being_shown_with_what_was_written_to_it(tmp_path):
    log = sample()
    with serving(tmp_path / "device") as server:
        server.load(log)
        path = server.serve(2, [4], {4: [(0, 512)]})
        server.keep(tmp_path / "plain.plog", {"after": "cut"})
        with mounts.loop_device(path) as device, open(device, "rb+") as file:
            file.seek(8192)
            file.write(b"recovered".ljust(512))
        server.keep(tmp_path / "recovered.plog", {})
        kept = DeviceLog.load(tmp_path / "plain.plog")
        assert (kept.size, kept.about, kept.records) == (SIZE, {"after": "cut"}, [])
        assert model(kept, 0) == model(log, 2, [4], {4: [(0, 512)]})
        expected = bytearray(model(kept, 0))
        expected[8192:8704] = b"recovered".ljust(512)
        assert model(DeviceLog.load(tmp_path / "recovered.plog"), 0) == bytes(expected)
        server.load(tmp_path / "recovered.plog")
        assert Path(server.serve(0)).read_bytes() == bytes(expected)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"applied": -1}, "record -1"),
        ({"applied": 8}, "record 8"),
        ({"applied": 2, "writes": [0]}, "record 0"),  # it is on the medium, beneath later ones
        ({"applied": 0, "writes": [1]}, "record 1"),  # a flush
        ({"applied": 0, "writes": [3]}, "record 3"),  # a mark
        ({"applied": 0, "writes": [7]}, "record 7"),
        ({"applied": 0, "writes": [-1]}, "record -1"),
        ({"applied": 0, "writes": [0], "torn": {2: [(0, 1)]}}, "not among the writes"),
        ({"applied": 0, "writes": [0], "torn": {0: [(0, 4097)]}}, "torn into"),
        ({"applied": 0, "writes": [0], "torn": {0: [(-1, 1)]}}, "torn into"),
        ({"applied": 0, "writes": [0], "torn": {0: [(1, 0)]}}, "torn into"),
    ],
)
def test_a_state_that_no_cut_of_this_log_leaves_is_refused_and_changes_nothing(
    tmp_path, asked, found
):
    log = sample()
    with serving(tmp_path / "device") as server:
        server.load(log)
        path = server.serve(4, [4])
        with pytest.raises(DeviceFailed, match=found):
            server.serve(**asked)
        assert Path(path).read_bytes() == model(log, 4, [4])
        assert Path(server.serve(5)).read_bytes() == model(log, 5)


def test_what_is_asked_for_too_early_says_what_comes_first(tmp_path):
    with serving(tmp_path / "device") as server:
        for early in (server.record, lambda: server.serve(0)):
            with pytest.raises(DeviceFailed, match=r"Call load\(\) first"):
                early()
        server.load(sample())
        with pytest.raises(DeviceFailed, match=r"Call serve\(\) first"):
            server.keep(tmp_path / "a.plog", {})
        for early in (lambda: server.mark(a=1), lambda: server.stop(tmp_path / "a.plog")):
            with pytest.raises(DeviceFailed, match=r"Call record\(\) first"):
                early()


def test_a_damaged_log_is_refused_and_what_was_loaded_stays(tmp_path):
    (tmp_path / "bad.plog").write_bytes(sample().to_bytes()[:-1])
    with serving(tmp_path / "device") as server:
        server.load(sample())
        with pytest.raises(CorruptLog):
            server.load(tmp_path / "bad.plog")
        assert Path(server.serve(2)).read_bytes() == model(sample(), 2)


def test_crash_states_need_no_server_and_leave_no_descriptor(tmp_path):
    children = set(psutil.Process().children())  # of other tests in this worker, if any
    with serving(tmp_path / "device") as server:
        server.load(sample())
        server.serve(2)
        before = len(os.listdir("/proc/self/fd"))
        for applied in (4, 6, 2, 0):
            server.serve(applied)
        server.load(sample())
        server.serve(0)
        assert len(os.listdir("/proc/self/fd")) == before
        assert set(psutil.Process().children()) <= children
    assert len(os.listdir("/proc/self/fd")) < before


# -- recording ----------------------------------------------------------------------------------


@in_namespace
def test_what_is_written_to_the_device_arrives_in_order_with_its_bytes(tmp_path):
    with serving(tmp_path / "device") as server:
        server.load(DeviceLog(2**20, {"about": "this"}, [(0, b"B" * 4096)]))
        with mounts.loop_device(server.record()) as device:
            assert Path(device).read_bytes() == b"B" * 4096 + bytes(2**20 - 4096)
            direct = os.open(device, os.O_RDWR | os.O_DIRECT)
            aligned = memoryview(mmap.mmap(-1, 4096))  # direct I/O wants a page's border
            for offset, length, letter in ((512, 512, b"a"), (8192, 4096, b"b"), (0, 1024, b"c")):
                aligned[:length] = letter * length
                os.pwrite(direct, aligned[:length], offset)
                server.mark(wrote=letter.decode())
            os.fsync(direct)
            server.mark(done=True)
            os.close(direct)
            server.stop(tmp_path / "a.plog")
    log = DeviceLog.load(tmp_path / "a.plog")
    assert (log.size, log.about, log.base) == (2**20, {"about": "this"}, [(0, b"B" * 4096)])
    assert kinds(log)[-8:] == [
        (512, 512), {"wrote": "a"}, (8192, 4096), {"wrote": "b"}, (0, 1024), {"wrote": "c"},
        FLUSH, {"done": True},
    ]  # fmt: skip
    assert [r.data for r in log.records if r.kind == WRITE] == [
        b"a" * 512,
        b"b" * 4096,
        b"c" * 1024,
    ]


@in_namespace
def test_writes_larger_than_a_request_of_the_kernel_arrive_whole(tmp_path):
    data = os.urandom(5 * 2**20 + 512)
    with serving(tmp_path / "device") as server:
        server.load(DeviceLog(2**23))
        with mounts.loop_device(server.record()) as device:
            with open(device, "rb+", buffering=0) as file:
                file.seek(4096)
                file.write(data)
                os.fsync(file.fileno())
            assert Path(device).read_bytes()[4096:][: len(data)] == data
            server.stop(tmp_path / "a.plog")
    log = DeviceLog.load(tmp_path / "a.plog")
    last = max(i for i, record in enumerate(log.records) if record.kind == WRITE)
    assert FLUSH in [record.kind for record in log.records[last:]]
    assert model(log, len(log.records))[4096:][: len(data)] == data


@in_namespace
def test_a_label_larger_than_a_request_of_the_kernel_arrives_whole_and_in_its_place(tmp_path):
    with serving(tmp_path / "device") as server:
        server.load(sample())
        server.record()
        labels = [{"n": 1}, {"text": "é\n" * 800_000}, {"n": 3}]
        for label in labels:
            server.mark(**label)
        server.stop(tmp_path / "a.plog")
    assert [r.mark for r in DeviceLog.load(tmp_path / "a.plog").records] == labels


@pytest.mark.needs_power("ext4", "xfs", "btrfs")
@pytest.mark.parametrize("name", ["ext4", "xfs", "btrfs"])
@in_namespace
def test_fsync_on_a_file_system_leaves_a_flush_behind_the_bytes_and_before_that_nothing(
    tmp_path, name
):
    entry, place, payload = filesystem(name), tmp_path / "mnt", b"synced-payload-" * 3000
    place.mkdir()
    with serving(tmp_path / "device") as server:
        server.load(fresh(name))
        with entry.mounted(server.record(), place):
            with (place / "file").open("wb") as file:
                file.write(payload)
                file.flush()
                server.mark(event="written")
                os.fsync(file.fileno())
                server.mark(event="synced")
            server.stop(tmp_path / "a.plog")
    log = DeviceLog.load(tmp_path / "a.plog")
    (written, _), (synced, _) = log.marks("event")

    def held(upto: int) -> bool:
        return payload in model(log, upto)

    last_flush = max(i for i in range(synced) if log.records[i].kind == FLUSH)
    assert not held(written)
    assert held(last_flush) and written < last_flush
    assert not any(record.kind == WRITE for record in log.records[last_flush:synced])
    # and what a crash right after the acknowledgement leaves, the kernel finds the file in
    with serving(tmp_path / "device") as server:
        server.load(log)
        with entry.mounted(server.serve(last_flush), place):
            assert (place / "file").read_bytes() == payload
        with entry.mounted(server.serve(written), place):
            assert not (place / "file").exists() or (place / "file").read_bytes() != payload


@in_namespace
def test_after_the_stop_the_device_works_on_and_nothing_more_is_recorded(tmp_path):
    place = tmp_path / "mnt"
    place.mkdir()
    with serving(tmp_path / "device") as server:
        server.load(fresh())
        with filesystem("ext4").mounted(server.record(), place):
            digest = server.stop(tmp_path / "a.plog")
            (place / "file").write_bytes(b"late" * 1000)
            with pytest.raises(DeviceFailed, match="nothing is being recorded"):
                server.mark(late=True)
        log = DeviceLog.load(tmp_path / "a.plog")
        assert b"latelate" not in model(log, len(log.records))
        # a state of what was loaded, not of what the disk has come to hold
        assert Path(server.serve(0)).read_bytes() == model(fresh(), 0)
    assert digest == hashlib.sha256((tmp_path / "a.plog").read_bytes()).hexdigest()


@in_namespace
def test_one_server_can_record_again_on_a_device_of_another_size(tmp_path):
    with serving(tmp_path / "device") as server:
        for number, size in enumerate((2**16, 2**20, 2**12)):
            server.load(DeviceLog(size, {}, [(0, bytes([number + 1]) * 512)]))
            with mounts.loop_device(server.record()) as device:
                assert Path(device).read_bytes() == bytes([number + 1]) * 512 + bytes(size - 512)
                overwrite(device, bytes([number + 7]) * 4096)
                server.stop(tmp_path / "a.plog")
            log = DeviceLog.load(tmp_path / "a.plog")
            assert (log.size, [len(r) for r in log.records if r.kind == WRITE]) == (size, [4096])
        assert len(psutil.Process().children()) == 1


@in_namespace
def test_a_recording_that_cannot_be_saved_says_why(tmp_path):
    (tmp_path / "file").touch()
    with serving(tmp_path / "device") as server:
        server.load(sample())
        server.record()
        with pytest.raises(DeviceFailed, match=r"Error.*file"):
            server.stop(tmp_path / "file" / "a.plog")


@in_namespace
def test_the_server_keeps_nothing_of_its_parents_open_and_is_gone_with_the_block(tmp_path):
    with serving(tmp_path / "device") as server, (tmp_path / "mine").open("w"):
        server.load(sample())
        with mounts.loop_device(server.serve(0)):
            server.record()
            [child] = psutil.Process().children()
            opened = [os.readlink(entry) for entry in Path(f"/proc/{child.pid}/fd").iterdir()]
            assert not [name for name in opened if "loop" in name or "mine" in name]
            assert sum("memfd" in name for name in opened) == 1
        assert str(tmp_path) in Path("/proc/self/mounts").read_text()
    assert not child.is_running()
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


def test_a_server_that_dies_is_an_error_that_says_so_and_not_a_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(blockdev, "DISK", disk_name(tmp_path))
    place = tmp_path / "mnt"
    place.mkdir()

    def scenario():
        with serving(tmp_path / "device") as server:
            server.load(fresh())
            with filesystem("ext4").mounted(server.record(), place):
                (place / "file").write_bytes(b"x" * 100_000)
                [child] = psutil.Process().children()
                child.send_signal(signal.SIGKILL)
                eventually(lambda: child.status() == psutil.STATUS_ZOMBIE)
                for ask in (lambda: server.mark(a=1), lambda: server.stop(tmp_path / "a.plog")):
                    with pytest.raises(DeviceFailed, match="does not answer"):
                        ask()
                with pytest.raises(OSError) as caught, (place / "file").open("rb+") as file:
                    os.fsync(file.fileno())
                assert caught.value.errno in (errno.EIO, errno.EROFS)
            server.record()  # and a new one can be started
            server.mark(a=1)

    mounts.isolated(scenario)
    nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("serve", "found"),
    [
        (lambda *arguments, **options: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda *arguments, **options: None, "that it died"),
        (lambda *arguments, **options: signal.pause(), "no answer in time"),
    ],
    ids=["raises", "ends", "hangs"],
)
def test_a_server_that_does_not_start_is_an_error_that_says_why(
    tmp_path, monkeypatch, serve, found
):
    monkeypatch.setattr(blockdev.library(), "FUSE", serve)
    monkeypatch.setattr(blockdev, "START_S", 0.3)
    before = len(os.listdir("/proc/self/fd"))
    children = set(psutil.Process().children())
    with serving(tmp_path / "device") as server:
        server.load(sample())
        with pytest.raises(DeviceFailed, match=found):
            server.record()
        assert set(psutil.Process().children()) <= children
    assert len(os.listdir("/proc/self/fd")) == before
