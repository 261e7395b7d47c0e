"""A device log reads back as it was, or not at all: no damage passes, and none costs memory."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
import tracemalloc
import zlib

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.crashes import blocklog
from ckptlib.crashes.blocklog import (
    BLOCK,
    FLUSH,
    MAGIC,
    MARK,
    MAX_DEVICE,
    MAX_ENTRY,
    WRITE,
    CorruptLog,
    DeviceLog,
    Record,
    extents,
    filled,
)
from ckptlib.errors import CkptError, InvalidInput

SIZE = 2**16
HEADER = struct.Struct("<4sIIQI")

# -- logs ---------------------------------------------------------------------------------------

texts = st.text(max_size=8)
labels = st.dictionaries(texts.filter(lambda key: key != "size"), st.integers() | texts, max_size=3)
contents = st.one_of(
    st.binary(max_size=64),
    st.tuples(st.integers(0, 255), st.integers(0, 3000)).map(lambda run: bytes(run[:1]) * run[1]),
)


@st.composite
def pieces(draw) -> tuple[int, bytes]:
    """An offset and bytes that lie within the device."""
    data = draw(contents)
    return draw(st.integers(0, SIZE - len(data))), data


records = st.one_of(
    pieces().map(lambda piece: Record(WRITE, *piece)),
    st.just(Record(FLUSH)),
    labels.map(lambda label: Record(MARK, mark=label)),
)
logs = st.builds(
    DeviceLog,
    st.just(SIZE),
    about=labels,
    base=st.lists(pieces(), max_size=3),
    records=st.lists(records, max_size=8),
)


def sample() -> DeviceLog:
    """A log with every kind of entry, kept as they are and as zlib streams."""
    return DeviceLog(
        SIZE,
        {"filesystem": "ext4", "seed": 3},
        [(0, b"\1" * 5000), (8192, os.urandom(300))],
        [
            Record(FLUSH),
            Record(WRITE, 4096, b"A" * 4096),
            Record(MARK, mark={"begin": 1}),
            Record(WRITE, 12288, bytes(range(256)) * 2),
            Record(FLUSH),
            Record(MARK, mark={"acknowledged": 1}),
        ],
    )


def pack(kind: bytes, raw: bytes, offset: int = 0, **other) -> bytes:
    """An entry as the format says; ``other`` replaces what its header would hold."""
    stored = other.pop("stored", raw)
    crc = zlib.crc32(raw, zlib.crc32(kind + offset.to_bytes(8, "little")))
    sizes = other.get("raw_size", len(raw)), other.get("stored_size", len(stored))
    return HEADER.pack(kind, *sizes, offset, other.get("crc", crc)) + stored


HEAD = MAGIC + pack(b"HEAD", b'{"size":65536}')


def done(before: bytes) -> bytes:
    """The file with its last entry."""
    return before + pack(b"DONE", hashlib.sha256(before).digest())


def borders(data: bytes) -> list[int]:
    """Where the entries begin, and where the last one ends."""
    found = [len(MAGIC)]
    while found[-1] < len(data):
        _, _, stored, _, _ = HEADER.unpack_from(data, found[-1])
        found.append(found[-1] + HEADER.size + stored)
    return found


def refused(data: bytes) -> CorruptLog:
    """The error that reading gives; it says where, what was expected and what was found."""
    with pytest.raises(CorruptLog) as caught:
        DeviceLog.from_bytes(data, "some.plog")
    text = str(caught.value)
    assert "wrong at byte " in text and "expected " in text and "found " in text
    assert "some.plog" in text and caught.value.path == "some.plog"
    assert isinstance(caught.value, CkptError)
    return caught.value


# -- round trip ---------------------------------------------------------------------------------


@given(log=logs)
def test_any_log_reads_back_equal_and_gives_the_same_bytes_again(log):
    data = log.to_bytes()
    back = DeviceLog.from_bytes(data)
    assert back == log
    assert back.to_bytes() == data == log.to_bytes()


def test_a_file_is_replaced_whole_its_digest_returned_and_nothing_else_left(tmp_path):
    path = tmp_path / "new" / "a.plog"
    for log in (DeviceLog(512), sample()):
        assert log.save(path) == hashlib.sha256(path.read_bytes()).hexdigest()
        assert DeviceLog.load(path) == log
    assert [entry.name for entry in path.parent.iterdir()] == ["a.plog"]


def test_marks_are_found_by_their_names_with_their_places():
    assert list(sample().marks("begin")) == [(2, {"begin": 1})]
    assert list(sample().marks("nothing")) == []


def test_what_repeats_itself_is_kept_small_and_what_does_not_as_it_is():
    noise = os.urandom(4096)
    small, whole = (
        len(DeviceLog(SIZE, {}, [(0, data)]).to_bytes()) for data in (b"x" * 4096, noise)
    )
    assert small < 200
    assert whole > 4096
    assert noise in DeviceLog(SIZE, {}, [(0, noise)]).to_bytes()


@pytest.mark.parametrize(
    "log",
    [
        DeviceLog(0),
        DeviceLog(MAX_DEVICE + 1),
        DeviceLog(512, {"size": 3}),
        DeviceLog(512, {}, [(510, b"abc")]),
        DeviceLog(512, {}, [], [Record(WRITE, 512, b"a")]),
        DeviceLog(MAX_DEVICE, {}, [(0, bytes(MAX_ENTRY + 1))]),
    ],
    ids=["no device", "too large", "size said twice", "base outside", "write outside", "one piece"],
)
def test_what_could_not_be_read_back_is_not_written(log, tmp_path):
    with pytest.raises(InvalidInput, match="could not be read back"):
        log.save(tmp_path / "a.plog")
    assert not list(tmp_path.iterdir())


# -- damage -------------------------------------------------------------------------------------


def test_a_log_that_is_cut_short_anywhere_is_refused_and_the_entry_is_named():
    data = sample().to_bytes()
    starts = borders(data)
    assert starts[-1] == len(data)
    for length in sorted({*starts[:-1], *range(0, len(data), 7)}):
        begin = max((start for start in starts if start <= length), default=0)
        assert f"byte {begin if length >= len(MAGIC) else 0}" in str(refused(data[:length])), length


@given(log=logs, bit=st.integers(0, 2**20))
def test_no_flipped_bit_passes(log, bit):
    damaged = bytearray(log.to_bytes())
    damaged[bit // 8 % len(damaged)] ^= 1 << bit % 8
    refused(bytes(damaged))


def test_no_flipped_bit_passes_of_one_log_tried_through():
    data = sample().to_bytes()
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            with pytest.raises(CorruptLog):
                DeviceLog.from_bytes(bytes(damaged))


def test_entries_that_changed_places_are_refused():
    data = sample().to_bytes()
    starts = borders(data)
    entries = [data[a:b] for a, b in itertools.pairwise(starts)]
    for first in range(len(entries) - 1):
        swapped = entries.copy()
        swapped[first], swapped[first + 1] = swapped[first + 1], swapped[first]
        refused(MAGIC + b"".join(swapped))


def test_an_entry_that_is_missing_or_there_twice_is_refused():
    data = sample().to_bytes()
    starts = borders(data)
    for begin, end in itertools.pairwise(starts):
        refused(data[:begin] + data[end:])
        refused(data[:end] + data[begin:])


@pytest.mark.parametrize("more", [b"\0", b"CKPTBLK1", sample().to_bytes()])
def test_bytes_after_the_end_are_refused_where_they_begin(more):
    data = sample().to_bytes()
    text = str(refused(data + more))
    assert f"byte {len(data)};" in text.replace(": some.plog", "") and f"{len(more)} bytes" in text


def test_another_kind_of_file_is_refused():
    assert "CKPTBLK1" in str(refused(b"#!/bin/sh\necho\n"))
    refused(b"CKPTBLK2" + sample().to_bytes()[8:])
    refused(b"")


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    for path, why in ((tmp_path / "absent", "No such file"), (tmp_path, "directory")):
        with pytest.raises(CorruptLog, match=why) as caught:
            DeviceLog.load(path)
        assert caught.value.path == str(path)
    assert isinstance(caught.value.__cause__, OSError)


# -- lies ---------------------------------------------------------------------------------------


def peak(action) -> int:
    """The most memory that an action had at one time."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_helpers_of_these_tests_write_the_format_as_it_is():
    log = DeviceLog.from_bytes(done(HEAD + pack(b"WRIT", b"abc", 5) + pack(b"FLSH", b"")))
    assert log == DeviceLog(SIZE, {}, [], [Record(WRITE, 5, b"abc"), Record(FLUSH)])


@pytest.mark.parametrize(
    "sizes",
    [
        {"raw_size": 2**32 - 1, "stored_size": 2**32 - 1},
        {"raw_size": MAX_ENTRY, "stored_size": MAX_ENTRY},
        {"raw_size": MAX_ENTRY, "stored_size": 4},
        {"raw_size": 3, "stored_size": 4},
    ],
)
def test_a_length_that_lies_costs_no_memory(sizes):
    data = HEAD + pack(b"WRIT", b"abcd", **sizes) + bytes(64)
    assert peak(lambda: refused(data)) < 2**17


def test_a_stream_is_not_unpacked_beyond_the_length_that_it_claims():
    bomb = zlib.compress(bytes(2**26), 9)
    data = HEAD + pack(b"WRIT", bytes(len(bomb) + 1), stored=bomb)
    assert peak(lambda: refused(data)) < 2**20


def test_many_entries_are_not_unpacked_to_more_than_a_log_may_hold(monkeypatch):
    monkeypatch.setattr(blocklog, "MAX_CONTENT", 5000)
    entry = pack(b"WRIT", bytes(2000), stored=zlib.compress(bytes(2000)))
    assert len(DeviceLog.from_bytes(done(HEAD + 2 * entry)).records) == 2
    assert "at most 5000 bytes in all" in str(refused(done(HEAD + 3 * entry)))
    with pytest.raises(InvalidInput, match="at most 5000 bytes"):
        DeviceLog(SIZE, {}, [(0, bytes(2001))] * 3).to_bytes()


def test_a_stream_shorter_or_longer_than_said_or_with_something_behind_is_refused():
    raw = b"a" * 500
    for stored in (zlib.compress(raw[1:]), zlib.compress(raw + b"a"), zlib.compress(raw) + b"x",
                   zlib.compress(raw)[:-1], b"nothing of the kind"):  # fmt: skip
        refused(done(HEAD + pack(b"WRIT", raw, stored=stored)))
    DeviceLog.from_bytes(done(HEAD + pack(b"WRIT", raw, stored=zlib.compress(raw))))


@pytest.mark.parametrize("kind", [b"BASE", b"WRIT"])
@pytest.mark.parametrize("offset", [SIZE - 3, SIZE, 2**63, 2**64 - 1])
def test_nothing_lies_beyond_the_device(kind, offset):
    assert f"within {SIZE} bytes" in str(refused(done(HEAD + pack(kind, b"abcd", offset))))


@pytest.mark.parametrize(
    "entry",
    [
        pack(b"WRIT", b"a") + pack(b"BASE", b"a"),  # the device had it before anything happened
        pack(b"HEAD", b'{"size":65536}'),
        pack(b"JUNK", b""),
        pack(b"FLSH", b"a"),
        pack(b"FLSH", b"", 1),
        pack(b"MARK", b"{}", 1),
    ],
)
def test_an_entry_where_none_of_its_kind_belongs_is_refused(entry):
    refused(done(HEAD + entry))


@pytest.mark.parametrize(
    "body",
    [b"[]", b"3", b"null", b'"size"', b"", b"{", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 200_000,
     b"9" * 100_000],
    ids=lambda body: repr(body[:8]),
)  # fmt: skip
def test_json_that_is_no_object_or_bottomless_is_refused(body):
    refused(done(HEAD + pack(b"MARK", body)))
    refused(done(MAGIC + pack(b"HEAD", body)))


@pytest.mark.parametrize("size", [None, 0, -1, True, 4096.0, "4096", [1], MAX_DEVICE + 1])
def test_a_device_of_no_size_is_refused(size):
    refused(done(MAGIC + pack(b"HEAD", json.dumps({"size": size}).encode())))
    refused(done(MAGIC + pack(b"HEAD", b"{}")))


# -- extents ------------------------------------------------------------------------------------


def plain(data: bytes) -> list[tuple[int, bytes]]:
    """The runs of blocks that hold anything, found with numpy in one go."""
    whole = numpy.frombuffer(data + bytes(-len(data) % BLOCK), numpy.uint8).reshape(-1, BLOCK)
    held = numpy.concatenate([[0], whole.any(axis=1), [0]]).astype(int)
    starts, ends = (numpy.flatnonzero(numpy.diff(held) == sign) * BLOCK for sign in (1, -1))
    return [(int(a), data[a:b]) for a, b in zip(starts, ends, strict=True)]


@given(
    size=st.integers(1, 20 * BLOCK),
    places=st.lists(st.tuples(st.integers(0, 20 * BLOCK - 1), st.integers(1, 9000)), max_size=8),
    chunk=st.sampled_from([BLOCK, 3 * BLOCK, 2**20]),
)
def test_extents_are_what_is_not_zero_wherever_it_was_said_to_be(size, places, chunk):
    data = bytearray(size)
    for offset, length in places:
        end = min(size, offset + length)
        data[offset:end] = b"\7" * max(0, end - offset)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocklog, "CHUNK", chunk)
        expected = plain(bytes(data))
        read = lambda offset, length: bytes(data[offset : offset + length])  # noqa: E731
        assert extents(read, size) == expected
        assert extents(read, size, places) == expected  # in any order, overlapping, or outside


def test_extents_are_never_longer_than_an_entry_may_be(monkeypatch):
    monkeypatch.setattr(blocklog, "MAX_ENTRY", 4 * BLOCK)
    data = b"\1" * (10 * BLOCK)
    found = extents(lambda offset, length: data[offset : offset + length], len(data))
    assert [(offset, len(part)) for offset, part in found] == [
        (0, 4 * BLOCK), (4 * BLOCK, 4 * BLOCK), (8 * BLOCK, 2 * BLOCK)
    ]  # fmt: skip


@pytest.mark.parametrize("start, end", [(0, 2**24), (2**20 + 5, 2**23 + 7), (2**24 - 9, 2**24)])
def test_what_a_sparse_file_holds_is_found_within_the_limits_asked_for(tmp_path, start, end):
    with open(tmp_path / "sparse", "w+b", buffering=0) as file:
        file.truncate(2**24)
        for offset in (0, 2**20, 2**23, 2**24 - 10):
            os.pwrite(file.fileno(), b"here", offset)
        found = filled(file.fileno(), start, end)
        rest = bytearray(os.pread(file.fileno(), 2**24, 0))
    assert all(start <= offset and offset + length <= end for offset, length in found)
    for offset, length in found:
        rest[offset : offset + length] = bytes(length)
    assert not any(rest[start:end])
