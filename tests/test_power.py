"""Crash states of a recorded device: which there are, and that none is left out or made twice."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.crashes import power
from ckptlib.crashes.blocklog import FLUSH, MARK, WRITE, DeviceLog, Record
from ckptlib.errors import InvalidInput

SIZES = st.sampled_from([512, 1024, 4096, 3 * 4096, 1536, 16384])
WRITES = st.builds(lambda block, size: Record(WRITE, block * 512, bytes(size)),
                   st.integers(0, 100), SIZES)  # fmt: skip
RECORDS = st.one_of(
    WRITES,
    WRITES,
    st.just(Record(FLUSH)),
    st.just(Record(MARK, mark={"acknowledged": 1})),
    st.just(Record(MARK, mark={"operation": "write"})),
)
BEGIN = Record(MARK, mark={"begin": 1, "parts": {}})


def device_log(*records: Record) -> DeviceLog:
    return DeviceLog(2**20, {}, [], list(records))


def write(block: int, size: int = 4096) -> Record:
    return Record(WRITE, block * 4096, bytes(size))


logs = st.lists(RECORDS, max_size=25).map(lambda records: device_log(BEGIN, *records))


def whole(states, window):
    """What is kept in the states of a window in which no write is torn."""
    return [s.kept for s in states if s.window == window.number and s.torn is None]


@given(logs)
def test_windows_part_a_log_at_its_flushes_and_hold_every_write_once(log):
    found = power.windows(log)
    assert len(found) == 1 + sum(record.kind == FLUSH for record in log.records)
    writes = [index for index, record in enumerate(log.records) if record.kind == WRITE]
    assert [index for window in found for index in window.writes] == writes
    for before, after in itertools.pairwise(found):
        assert after.start == before.end + 1 and log.records[before.end].kind == FLUSH


@given(logs, st.integers(0, 5))
def test_a_state_keeps_what_was_flushed_and_only_part_of_what_was_not(log, seed):
    windows = power.windows(log)
    for state in power.plan(log, seed=seed):
        window = windows[state.window]
        assert state.applied == window.start
        assert window.start <= state.cut <= window.end
        tail = [index for index in window.writes if index < state.cut]
        assert state.tail == len(tail)
        assert set(state.kept) <= set(tail)
        assert list(state.kept) == sorted(state.kept)


@given(logs, st.integers(0, 5))
def test_in_a_small_window_every_subset_is_planned_once(log, seed):
    states = power.plan(log, seed=seed)
    for window in power.windows(log):
        if len(window.writes) > power.EXHAUSTIVE:
            continue
        kept = {s.kept for s in states if s.window == window.number and s.torn is None}
        subsets = {
            subset
            for length in range(len(window.writes) + 1)
            for subset in itertools.combinations(window.writes, length)
        }
        assert kept == subsets
        assert all(s.exhaustive for s in states if s.window == window.number)


@given(logs, st.integers(0, 5))
def test_no_state_is_planned_twice(log, seed):
    states = power.plan(log, seed=seed)
    acknowledged = [sum("acknowledged" in r.mark for r in log.records[: s.cut]) for s in states]
    keys = [
        (s.applied, s.kept, s.torn, s.pieces, told)
        for s, told in zip(states, acknowledged, strict=True)
    ]
    assert len(set(keys)) == len(keys)


@given(logs, st.integers(0, 5))
def test_a_policy_means_what_its_name_says(log, seed):
    windows = power.windows(log)
    for state in power.plan(log, seed=seed):
        tail = tuple(index for index in windows[state.window].writes if index < state.cut)
        if state.policy == "none":
            assert state.kept == ()
        elif state.policy == "all":
            assert state.kept == tail
        elif state.policy == "prefix":
            assert state.kept == tail[: len(state.kept)] and 0 < len(state.kept) < len(tail)
        elif state.policy == "missing":
            assert len(state.kept) == len(tail) - 1
        elif state.policy == "alone":
            assert len(state.kept) == 1
        elif state.policy == "subset":
            assert 0 < len(state.kept) < len(tail)
        else:
            assert state.kept == tail[: len(state.kept)] and state.torn == state.kept[-1]
        assert (state.torn is not None) == state.policy.startswith("torn")


@given(logs, st.integers(0, 5))
def test_a_torn_write_lands_in_whole_sectors_some_and_not_all_of_them(log, seed):
    for state in power.plan(log, seed=seed):
        if state.torn is None:
            continue
        sector = int(state.policy.removeprefix("torn_"))
        length = len(log.records[state.torn].data)
        landed = 0
        for start, size in state.pieces:
            assert start % sector == 0 and size > 0 and start + size <= length
            assert size % sector == 0 or start + size == length
            landed += size
        assert 0 < landed < length


@given(logs, st.integers(0, 5), st.integers(1, 60))
def test_a_sample_is_part_of_the_plan_within_its_limit_and_the_same_each_time(log, seed, limit):
    everything = power.plan(log, seed=seed)
    sample = power.plan(log, seed=seed, limit=limit)
    assert len(sample) == min(limit, len(everything))
    assert sample == power.plan(log, seed=seed, limit=limit)

    def key(s):
        return s.cut, s.kept, s.torn, s.pieces

    assert {key(s) for s in sample} <= {key(s) for s in everything}


@given(logs, st.integers(0, 5), st.integers(1, 60))
def test_a_window_is_called_exhaustive_only_if_all_its_subsets_are_in_the_sample(log, seed, limit):
    windows = power.windows(log)
    sample = power.plan(log, seed=seed, limit=limit)
    for number in {s.window for s in sample if s.exhaustive}:
        assert len(set(whole(sample, windows[number]))) == 2 ** len(windows[number].writes)


def test_every_policy_has_states_in_a_large_window():
    log = device_log(BEGIN, *(write(block, 8192) for block in range(8)), Record(FLUSH))
    assert {s.policy for s in power.plan(log, seed=1)} == set(power.POLICIES)


def test_nothing_is_cut_before_the_first_save_has_begun():
    log = device_log(write(1), Record(FLUSH), write(2), BEGIN, write(3), Record(FLUSH), write(4))
    assert {s.window for s in power.plan(log, seed=1)} == {1, 2}


def test_the_moment_after_an_acknowledgement_is_cut_too():
    told = Record(MARK, mark={"acknowledged": 1})
    log = device_log(BEGIN, write(1), told, write(2), Record(FLUSH))
    states = power.plan(log, seed=1)
    assert {(s.policy, s.cut, s.kept) for s in states} >= {("none", 3, ()), ("all", 3, (1,))}


def test_for_a_device_that_lies_about_flushes_the_whole_log_is_one_window():
    log = device_log(BEGIN, write(1), Record(FLUSH), write(2), Record(FLUSH))
    (window,) = power.windows(log, honest=False)
    assert window.writes == (1, 3)
    kept = {s.kept for s in power.plan(log, seed=1, honest=False)}
    assert (3,) in kept  # the first write, which was flushed, is missing


def test_where_the_power_never_goes_everything_is_there():
    log = device_log(BEGIN, write(1), Record(FLUSH), write(2))
    state = power.complete(log)
    assert state.kept == (1, 3) and state.cut == 4


def test_the_number_of_possible_states_is_counted_without_making_them():
    log = device_log(BEGIN, *(write(block) for block in range(100)), Record(FLUSH), write(1))
    assert power.possible(log) == 2**100 + 2


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "10"])
def test_an_unusable_limit_is_refused(limit):
    with pytest.raises(InvalidInput, match="whole number"):
        power.plan(device_log(BEGIN), seed=1, limit=limit)
