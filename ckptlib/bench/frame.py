"""Benchmarks in interleaved rounds: every one is run once in each, in an order drawn for it.

What changes on the machine meanwhile changes for all of them, so that the ratio of two rates of one
round holds where the rates themselves do not. There is no interval: rounds of one run are not
independent. The median of the rounds stands between their lowest and their highest.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptlib.errors import InvalidInput, explain

CALIBRATION = "calibration"
SEED = 2025  # of the orders


@dataclass(frozen=True)
class Setting:
    """What a benchmark is given: a folder of its own on the disk under test, and the workers."""

    scratch: Path
    jobs: int = 2


@dataclass(frozen=True)
class Sample:
    """What one measurement did, in which time, and which parts of the work took how long.

    ``parts`` are seconds summed over all workers, so that they may be more than ``seconds``.
    """

    amount: float
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Amount a second."""
        return self.amount / self.seconds


Measure = Callable[[], Sample]


def _nothing(setting: Setting) -> str:
    return ""


@dataclass(frozen=True)
class Benchmark:
    """One entry of the table.

    Parameters
    ----------
    name : str
        Group, slash, and what tells it from the others of its group.
    measures : str
        What is counted, under which circumstances.
    unit : str
        Of the rate, such as states/s.
    prepare : callable
        Makes ready what is not measured; gives a function that measures once.
    needs : callable, optional
        Says why it can't run here and how to enable it; an empty text if it can.
    peer : str, optional
        Name of the benchmark to which its rate is compared.
    """

    name: str
    measures: str
    unit: str
    prepare: Callable[[Setting], Measure]
    needs: Callable[[Setting], str] = _nothing
    peer: str = ""


@dataclass
class Run:
    """What came of the benchmarks: samples by name, one for each round, or why there are none."""

    entries: list[Benchmark]
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    orders: list[list[str]] = field(default_factory=list)

    def measured(self) -> list[Benchmark]:
        """Benchmarks that have a sample of every round."""
        return [entry for entry in self.entries if entry.name in self.samples]


def choose(table: Sequence[Benchmark], only: str = "") -> list[Benchmark]:
    """Those benchmarks that ``only`` names, with their peers and the calibration; all by default.

    Parameters
    ----------
    only : str
        Names or groups, with commas or spaces between.

    Raises
    ------
    InvalidInput
        Nothing has such a name.
    """
    wanted = only.replace(",", " ").split()
    chosen = set()
    for word in wanted:
        found = {b.name for b in table if b.name == word or b.name.startswith(f"{word}/")}
        if not found:
            raise InvalidInput(
                explain("there is no such benchmark", found=repr(word), do="correct ONLY",
                        expected=", ".join(dict.fromkeys(b.name.split("/")[0] for b in table)))
            )  # fmt: skip
        chosen |= found
    chosen |= {b.peer for b in table if b.name in chosen}
    return [b for b in table if not wanted or b.name in chosen or _calibrates(b)]


def _calibrates(benchmark: Benchmark) -> bool:
    return benchmark.name.startswith(f"{CALIBRATION}/")


def run(
    entries: Iterable[Benchmark],
    setting: Setting,
    rounds: int,
    done: Callable[[str], None] = lambda name: None,
) -> Run:
    """Prepare all benchmarks that can run here, then measure them in rounds.

    One that raises an error is left out from then on; the others go on.

    Parameters
    ----------
    done : callable
        Is told the name of what was prepared or measured.
    """
    import numpy

    result = Run(list(entries))
    ready: dict[str, Measure] = {}
    for entry in result.entries:
        if reason := entry.needs(setting):
            result.skipped[entry.name] = reason
            continue
        place = setting.scratch / entry.name.replace("/", "-")
        place.mkdir(parents=True)
        try:
            ready[entry.name] = entry.prepare(Setting(place, setting.jobs))
        except Exception:
            result.failed[entry.name] = traceback.format_exc()
        done(entry.name)
    result.samples = {name: [] for name in ready}
    for number in range(rounds):
        draw = numpy.random.default_rng(numpy.random.SeedSequence([SEED, number]))
        order = [list(ready)[index] for index in draw.permutation(len(ready))]
        result.orders.append(order)
        for name in order:
            try:
                result.samples[name].append(ready[name]())
            except Exception:
                result.failed[name] = traceback.format_exc()
                del ready[name], result.samples[name]
            done(name)
    return result


def summary(result: Run) -> list[dict]:
    """One row for each benchmark that was measured: its rates, their median, and its parts.

    ``ratio`` is to the peer, of the same round; the median of these, the lowest and the highest.
    """
    rows = []
    for entry in result.measured():
        samples, peers = result.samples[entry.name], result.samples.get(entry.peer, [])
        rates = [sample.rate for sample in samples]
        row = {
            "name": entry.name,
            "measures": entry.measures,
            "unit": entry.unit,
            **_spread(rates),
            "rates": rates,
            "parts_ms": _parts(samples),
        }
        if peers:
            ratios = [rate / peer.rate for rate, peer in zip(rates, peers, strict=True)]
            row |= {"peer": entry.peer, "ratio": _spread(ratios)}
        rows.append(row)
    return rows


def _spread(values: Sequence[float]) -> dict[str, float]:
    import numpy

    low, middle, high = numpy.quantile(values, [0, 0.5, 1])
    return {"median": float(middle), "lowest": float(low), "highest": float(high)}


def _parts(samples: Sequence[Sample]) -> dict[str, float]:
    """Milliseconds that each part took for one unit of the amount, over all rounds."""
    amount = sum(sample.amount for sample in samples)
    names = dict.fromkeys(name for sample in samples for name in sample.parts)
    return {
        name: 1e3 * sum(sample.parts.get(name, 0.0) for sample in samples) / amount
        for name in names
    }
