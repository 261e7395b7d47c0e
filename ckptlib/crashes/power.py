"""Crash states of a recorded device: where the power goes, and which late writes got through.

Between two completed flushes lies a *window*. When the power goes within one, everything before it
is on the medium, and of the writes in it up to the cut, the *tail*, any part may be: the device is
free to reorder them, and to tear one between two sectors. A :class:`State` is one such choice;
:func:`plan` enumerates them by policy, completely where a window holds few writes, by a seeded
sample otherwise.

Besides the end of every window, the moments right after an acknowledgement are cut points: the
latest cut of a window has all its writes to choose from and the most to answer for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ckptlib.crashes.blocklog import FLUSH, MARK, WRITE, DeviceLog
from ckptlib.crashes.mounts import SECTOR
from ckptlib.errors import InvalidInput, explain

#: What of the tail reaches the medium.
POLICIES = {
    "none": "nothing of the tail",
    "all": "the whole tail",
    "prefix": "the tail up to one write",
    "missing": "all of the tail but one write",
    "alone": "one write of the tail and nothing else",
    "subset": "another part of the tail, in any order",
    "torn_4096": "the tail up to one write, of which only some 4 KiB sectors",
    "torn_512": "the tail up to one write, of which only some 512-byte sectors",
}
EXHAUSTIVE = 5  # writes in a window up to which every subset is planned: 2**5 of them
RANDOM_PER_WRITE = 4  # random subsets planned in larger windows, for each write
TORN_SHARE = 0.3  # of a sample
TORN_PER_WRITE = 2  # tears planned for each write and sector size: one clean, one scattered
#: Names of marks: a save begins, a save has returned, a crashed device is about to be mounted.
BEGIN, ACKNOWLEDGED, RECOVERY = "begin", "acknowledged", "recovery"


@dataclass(frozen=True)
class Window:
    """The records ``start`` to ``end - 1`` between two flushes, and the indices of its writes.

    ``end`` is the index of the flush that closes it, or the length of the log.
    """

    number: int
    start: int
    end: int
    writes: tuple[int, ...]


@dataclass(frozen=True)
class State:
    """One crash state of a log.

    All writes before record ``applied`` are on the medium, and ``kept`` of the later ones, in this
    order; of write ``torn`` only the byte ranges ``pieces``, as offset within the write and length.
    The power goes before record ``cut``, when ``tail`` writes of the window were not flushed.
    ``exhaustive``: every subset of this window's writes is among the states that are tried.
    """

    policy: str
    cut: int
    window: int
    applied: int
    kept: tuple[int, ...]
    tail: int
    torn: int | None = None
    pieces: tuple[tuple[int, int], ...] = ()
    exhaustive: bool = False

    @property
    def request(self) -> dict:
        """What the device server is asked for, see :meth:`.blockdev.Server.serve`."""
        torn = {} if self.torn is None else {str(self.torn): self.pieces}
        return {"applied": self.applied, "writes": self.kept, "torn": torn}


def windows(log: DeviceLog, *, honest: bool = True) -> list[Window]:
    """The windows of a log, in order.

    Parameters
    ----------
    honest : bool
        Whether the device keeps its word about flushes. For one that does not, the whole log is
        one window: nothing is ever known to be on the medium.
    """
    found: list[Window] = []
    start, writes = 0, []
    for index, record in enumerate(log.records):
        if record.kind == WRITE:
            writes.append(index)
        elif record.kind == FLUSH and honest:
            found.append(Window(len(found), start, index, tuple(writes)))
            start, writes = index + 1, []
    found.append(Window(len(found), start, len(log.records), tuple(writes)))
    return found


def possible(log: DeviceLog) -> int:
    """How many states whole writes alone can make of a log: the sum of 2**n over its windows."""
    return sum(2 ** len(window.writes) for window in _judged(log, windows(log)))


def plan(log: DeviceLog, *, seed: int, limit: int | None = None, honest: bool = True):
    """Crash states of a log, each once, in the order of their cuts.

    Parameters
    ----------
    seed : int
        Of the random subsets and tears, and of the choice among the states if there are more than
        ``limit``.
    limit : int, optional
        How many states at most.
    honest : bool
        See :func:`windows`.

    Returns
    -------
    list of State
    """
    import numpy

    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidInput(
            explain("unusable limit of states", expected="a whole number, 1 or more",
                    found=repr(limit))
        )  # fmt: skip
    draw = numpy.random.default_rng(numpy.random.SeedSequence([seed, len(log.records)]))
    told = list(itertools.accumulate(log.records, lambda n, r: n + _counts(r), initial=0))
    found: dict[tuple, State] = {}
    found_windows = _judged(log, windows(log, honest=honest))
    for window in found_windows:
        for state in _states(log, window, draw):
            # the same medium, and the same said to the application: the same state
            key = (state.applied, state.kept, state.torn, state.pieces, told[state.cut])
            found.setdefault(key, state)
    states = list(found.values())
    if limit is not None and len(states) > limit:
        states = _chosen(states, limit, draw)
    full = _exhausted(states, found_windows)
    states = [replace(state, exhaustive=state.window in full) for state in states]
    return sorted(states, key=lambda s: (s.applied, s.cut, s.kept, s.pieces))


def complete(log: DeviceLog) -> State:
    """The state in which the power never goes: everything that was written is there."""
    writes = [index for index, record in enumerate(log.records) if record.kind == WRITE]
    return State("all", len(log.records), 0, 0, tuple(writes), len(writes))


def _counts(record) -> int:
    return record.kind == MARK and not record.mark.keys().isdisjoint({BEGIN, ACKNOWLEDGED})


def _judged(log: DeviceLog, found: list[Window]) -> list[Window]:
    """The windows from the first save or recovery on: before that, nothing is at stake."""
    starts = [next((i for i, _ in log.marks(name)), len(log.records)) for name in (BEGIN, RECOVERY)]
    first = min(starts)
    return [window for window in found if window.end >= first]


def _states(log: DeviceLog, window: Window, draw) -> Iterator[State]:
    for cut in [*_acknowledgements(log, window), window.end]:
        tail = tuple(index for index in window.writes if index < cut)
        yield State("none", cut, window.number, window.start, (), len(tail))
        if tail:
            yield State("all", cut, window.number, window.start, tail, len(tail))
    tail = window.writes
    base = State("all", window.end, window.number, window.start, tail, len(tail))
    small = len(tail) <= EXHAUSTIVE
    for policy, kept in _subsets(tail, small, draw):
        yield replace(base, policy=policy, kept=kept)
    for policy, size in (("torn_4096", 4096), ("torn_512", SECTOR)):
        for position, index in enumerate(tail):
            for pieces in _tears(len(log.records[index].data), size, draw):
                kept = tail[: position + 1]
                yield replace(base, policy=policy, kept=kept, torn=index, pieces=pieces)


def _acknowledgements(log: DeviceLog, window: Window) -> list[int]:
    """The cuts right after each acknowledgement within a window."""
    return [
        index + 1
        for index in range(window.start, window.end)
        if log.records[index].kind == MARK and ACKNOWLEDGED in log.records[index].mark
    ]


def _subsets(tail: tuple[int, ...], small: bool, draw) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Proper, non-empty parts of a tail, by policy; each writes what it keeps in the tail's order.

    Writes of one window may overlap; then the later one wins, as on the device.
    """
    for length in range(1, len(tail)):
        yield "prefix", tail[:length]
    for index in tail:
        yield "missing", tuple(other for other in tail if other != index)
    for index in tail:
        yield "alone", (index,)
    if small:
        for length in range(2, len(tail) - 1):
            for kept in itertools.combinations(tail, length):
                yield "subset", kept
        return
    for _ in range(RANDOM_PER_WRITE * len(tail)):
        chance = draw.uniform(0.1, 0.9)  # few or many, rather than always about half
        kept = tuple(index for index in tail if draw.random() < chance)
        if 0 < len(kept) < len(tail):
            yield "subset", kept


def _tears(length: int, size: int, draw) -> Iterator[tuple[tuple[int, int], ...]]:
    """Ways in which a write of ``length`` bytes is torn between sectors of ``size`` bytes."""
    sectors = -(-length // size)
    if sectors < 2:
        return
    for number in range(TORN_PER_WRITE):
        if number == 0:
            landed = range(int(draw.integers(1, sectors)))
        else:
            landed = [sector for sector in range(sectors) if draw.random() < 0.5]
        if 0 < len(landed) < sectors:
            yield tuple(_runs(landed, size, length))


def _runs(sectors: Iterable[int], size: int, length: int) -> Iterator[tuple[int, int]]:
    """Neighbouring sectors as one range of bytes."""
    runs: list[list[int]] = []
    for sector in sectors:
        start, end = sector * size, min((sector + 1) * size, length)
        if runs and runs[-1][1] == start:
            runs[-1][1] = end
        else:
            runs.append([start, end])
    yield from ((start, end - start) for start, end in runs)


def _chosen(states: list[State], limit: int, draw) -> list[State]:
    """A sample that takes small windows whole, since "all of them" says more than a share.

    Windows come in a random order. A large one gives as many states as a small one can have at
    most, spread over the policies; what is left of the limit goes to their other states. A share
    of the limit is kept for tears.
    """
    torn = [state for state in states if state.torn is not None]
    share = max(limit - len(states) + len(torn), min(len(torn), int(limit * TORN_SHARE)))
    picked = _spread(torn, share, draw)
    room, rest = limit - len(picked), []
    by_window: dict[int, list[State]] = {}
    for state in states:
        if state.torn is None:
            by_window.setdefault(state.window, []).append(state)
    for number in draw.permutation(list(by_window)):
        members = by_window[number]
        taken = _spread(members, min(len(members), 2**EXHAUSTIVE, room), draw)
        if len(taken) < len(members):
            left_out = set(members) - set(taken)
            rest += [state for state in members if state in left_out]
        room -= len(taken)
        picked += taken
    return picked + _spread(rest, room, draw)


def _exhausted(states: list[State], found: list[Window]) -> set[int]:
    """Numbers of the windows of whose writes every subset is among the states."""
    kept: dict[int, set] = {}
    for state in states:
        if state.torn is None:
            kept.setdefault(state.window, set()).add(state.kept)
    return {w.number for w in found if len(kept.get(w.number, ())) == 2 ** len(w.writes)}


def _spread(states: list[State], count: int, draw) -> list[State]:
    """``count`` of the states, at random, the policies in shares as equal as they allow."""
    waiting: dict[str, list[State]] = {}
    for index in draw.permutation(len(states)):
        waiting.setdefault(states[index].policy, []).append(states[index])
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*waiting.values()))
    return list(itertools.islice(filter(None, rounds), max(0, count)))
