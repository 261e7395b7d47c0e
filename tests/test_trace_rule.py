"""The trace rule: each thing that may go wrong in a save's order of operations has its sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptlib.crashes.trace_rule import broken
from ckptlib.experiments import flows
from ckptlib.vfs import Operation


@pytest.fixture(scope="module")
def saves(tmp_path_factory) -> dict[str, list[Operation]]:
    """A save of a group by each protocol, and an overwritten file, in atomic_dirsync."""
    found = {}
    for name, protocol in (("later save", "per_file"), ("later save", "batched"),
                           ("overwrite", "single_file")):  # fmt: skip
        place = flows.place(tmp_path_factory.mktemp("place"), name, "atomic_dirsync", protocol, 1)
        place.prepare()
        found[protocol], _ = place.recorded()
    return found


def without(trace, *chosen) -> list[Operation]:
    return [op for op in trace if not any(op is other for other in chosen)]


def moved(trace, op, after) -> list[Operation]:
    """The same operations with one of them later, numbered anew."""
    rest = without(trace, op)
    place = next(number for number, other in enumerate(rest) if other is after) + 1
    rest.insert(place, op)
    return [replace(other, index=number) for number, other in enumerate(rest)]


@pytest.mark.parametrize("protocol", ["per_file", "batched", "single_file"])
def test_a_real_save_breaks_nothing(saves, protocol):
    assert broken(saves[protocol], "atomic_dirsync") == []
    assert broken(saves[protocol], "atomic_nodirsync") == []


@pytest.mark.parametrize("protocol", ["per_file", "batched", "single_file"])
def test_every_flush_of_a_file_that_is_left_out_is_noticed(saves, protocol):
    flushes = [op for op in saves[protocol] if op.call == "flush"]
    assert len(flushes) >= 2
    for flush in flushes:
        assert any(
            "before it was flushed" in what
            for what in broken(without(saves[protocol], flush), "atomic_nodirsync")
        )


@pytest.mark.parametrize("protocol", ["per_file", "batched", "single_file"])
def test_a_flush_after_the_rename_or_of_too_few_bytes_is_noticed(saves, protocol):
    trace = saves[protocol]
    flush = next(op for op in trace if op.call == "flush")
    naming = next(
        op for op in trace
        if op.call in ("replace", "rename") and flush.path.startswith(op.path) and op.target
    )  # fmt: skip
    assert any(
        "before it was flushed" in w for w in broken(moved(trace, flush, naming), "atomic_dirsync")
    )
    short = [replace(op, size=op.size - 1) if op is flush else op for op in trace]
    assert any(" of " in what for what in broken(short, "atomic_dirsync"))


@pytest.mark.parametrize("protocol", ["per_file", "batched", "single_file"])
def test_every_flush_of_a_directory_after_the_first_that_is_left_out_is_noticed(saves, protocol):
    """The first one belongs to opening the store: its folder may be an earlier writer's."""
    trace = saves[protocol]
    named = next(op.index for op in trace if op.call in ("mkdir", "create"))
    last = max(op.index for op in trace if op.call == "flush_dir")
    once = [op for op in trace if op.call == "flush_dir" and op.index > named]
    assert once[-1].index == last
    assert broken(without(trace, *once), "atomic_dirsync")
    assert broken(without(trace, once[-1]), "atomic_dirsync")
    assert broken(without(trace, *once), "atomic_nodirsync") == []


def test_a_commit_record_that_is_begun_too_early_is_noticed(saves):
    trace = saves["per_file"]
    begun = [op for op in trace if op.call == "create"]
    part, commit = begun[0], begun[-1]
    own = [op for op in trace if op.path == commit.path]
    rest = [op for op in trace if op.path != commit.path]
    place = rest.index(part)
    early = rest[:place] + own + rest[place:]
    early = [replace(op, index=number) for number, op in enumerate(early)]
    assert any("COMMIT.json was begun before" in what for what in broken(early, "atomic_dirsync"))


def test_a_file_that_is_flushed_again_after_a_failure_is_noticed(saves):
    trace = saves["batched"]
    flush = next(op for op in trace if op.call == "flush")
    failed = replace(flush, result="EIO")
    twice = []
    for op in trace:
        twice += [failed, op] if op is flush else [op]
    twice = [replace(op, index=number) for number, op in enumerate(twice)]
    assert any("flushed again" in what for what in broken(twice, "atomic_dirsync"))
