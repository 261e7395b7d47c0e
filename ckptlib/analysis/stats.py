"""Summaries of whole trial tables, and tests between arms; never of arms that differ in seeds.

The intervals themselves are in :mod:`ckptlib.analysis.intervals`; the names most used are offered
here too, so that a notebook needs one import.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar as _mcnemar
from statsmodels.stats.multitest import multipletests

from ckptlib.analysis.intervals import (
    DEFAULT,
    NOT_ESTIMABLE,
    Interval,
    Resampling,
    difference,
    percentile,
    proportion,
    quantile_interval,
    ratio,
    run_matrix,
    tail_growth,
)
from ckptlib.errors import InvalidInput

__all__ = [
    "DEFAULT",
    "NOT_ESTIMABLE",
    "Interval",
    "Resampling",
    "arm",
    "arms",
    "baseline_protocol",
    "compare_modes",
    "difference",
    "ecdf",
    "groups",
    "holm",
    "in_order",
    "latency_summary",
    "mcnemar",
    "overhead_summary",
    "percentile",
    "process_ratio",
    "proportion",
    "quantile_interval",
    "ratio",
    "refused",
    "run_matrix",
    "tail_growth",
]

QUANTILES = (50, 90, 99)
BASELINE = "unsafe"

# The order in which arms, crash points and faults are shown everywhere; others follow by name.
_ORDER = {
    name: place
    for place, name in enumerate(
        (
            *("unsafe", "atomic", "atomic_nodirsync", "atomic_dirsync"),
            *("artifact", "per_file", "batched"),
            "single_file",
            *("none", "mid_write", "after_model", "before_manifest", "manifest_partial"),
            *("before_commit", "before_acknowledge"),
            *("bitflip", "zerorange", "truncate"),
        )
    )
}


def in_order(names: Iterable[str]) -> list[str]:
    """Distinct names in the order in which tables and figures show them."""
    return sorted({str(name) for name in names}, key=lambda name: (_ORDER.get(name, 99), name))


def arms(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """The (mode, protocol) pairs of a table, in showing order."""
    return [
        (mode, protocol)
        for mode in in_order(frame["mode"])
        for protocol in in_order(frame.loc[frame["mode"] == mode, "protocol"])
    ]


def arm(frame: pd.DataFrame, mode: str, protocol: str | None = None) -> pd.DataFrame:
    """The rows of one write mode and, if one is named, of one commit protocol."""
    chosen = frame["mode"] == mode
    return frame[chosen if protocol is None else chosen & (frame["protocol"] == protocol)]


def baseline_protocol(frame: pd.DataFrame, protocol: str, baseline: str = BASELINE) -> str:
    """The protocol under which `baseline` is compared with an arm under `protocol`.

    The same one if the baseline has it, else per_file: `unsafe` has no batched commit.

    Raises
    ------
    InvalidInput : the table has no row of the baseline mode
    """
    offered = in_order(frame.loc[frame["mode"] == baseline, "protocol"])
    if not offered:
        raise InvalidInput(f"there is no row of the mode {baseline!r} to compare with")
    return next(p for p in (protocol, "per_file", *offered) if p in offered)


def latency_summary(
    frame: pd.DataFrame, quantiles: Sequence[float] = QUANTILES, how: Resampling = DEFAULT
) -> pd.DataFrame:
    """Percentiles of save latency for every arm of the latency table.

    Returns
    -------
    DataFrame with columns mode, protocol, q, estimate, low, high (seconds), n_runs, n_saves, note
    """
    rows = []
    for mode, protocol in arms(frame):
        runs = run_matrix(arm(frame, mode, protocol))
        for q in quantiles:
            found = percentile(runs, q, how)
            row = {"mode": mode, "protocol": protocol, "q": q}
            rows.append(row | _bounds(found) | {"n_saves": int(runs.size), "note": found.method})
    return pd.DataFrame(rows)


def overhead_summary(
    frame: pd.DataFrame,
    quantiles: Sequence[float] = QUANTILES,
    how: Resampling = DEFAULT,
    baseline: str = BASELINE,
) -> pd.DataFrame:
    """(mode - baseline) / baseline x 100 for every other arm, by a bootstrap paired over runs.

    Returns
    -------
    DataFrame with columns mode, protocol, baseline, q, estimate, low, high (percent), n_runs, note
    """
    rows = []
    for mode, protocol in arms(frame):
        if mode == baseline:
            continue
        against = baseline_protocol(frame, protocol, baseline)
        runs = run_matrix(arm(frame, mode, protocol))
        base = run_matrix(arm(frame, baseline, against))
        for q in quantiles:
            found = ratio(runs, base, q, how).scaled(100, -100)
            row = {"mode": mode, "protocol": protocol, "baseline": f"{baseline} {against}", "q": q}
            rows.append(row | _bounds(found) | {"note": found.method})
    return pd.DataFrame(rows)


def _bounds(found: Interval) -> dict:
    return {"estimate": found.rate, "low": found.low, "high": found.high, "n_runs": found.n}


def process_ratio(process: pd.DataFrame, mode: str, baseline: str, q: float = 50) -> Interval:
    """Whole-process time per checkpoint, mode over baseline, run by run, with its interval.

    Each value stands for one process, so order statistics of the paired ratios apply.

    Raises
    ------
    InvalidInput : the two modes do not hold the same runs
    """
    key = [name for name in ("run", "seed") if name in process.columns]
    first, second = (
        arm(process, name).set_index(key)["per_checkpoint_s"].sort_index()
        for name in (mode, baseline)
    )
    if not first.index.equals(second.index):
        raise InvalidInput(
            f"{mode} and {baseline} need the same process runs; "
            f"found {len(first)} and {len(second)}"
        )
    return quantile_interval((first / second).to_numpy(), q)


def ecdf(values: Sequence[float]) -> pd.DataFrame:
    """The empirical distribution function: columns `value` (sorted) and `probability`."""
    found = stats.ecdf(np.asarray(values, dtype=float)).cdf
    return pd.DataFrame({"value": found.quantiles, "probability": found.probabilities})


@dataclass(frozen=True)
class TestResult:
    """A p-value, how it was computed, and over how many pairs."""

    __test__ = False  # no test class, whatever pytest makes of the name

    pvalue: float
    method: str
    n: int


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> TestResult:
    """Exact McNemar test of two binary outcomes of the same trials, given in the same order.

    Raises
    ------
    InvalidInput : the two have different lengths
    """
    a, b = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    if a.shape != b.shape:
        raise InvalidInput(f"paired outcomes need one length; found {a.size} and {b.size}")
    table = [[(a & b).sum(), (a & ~b).sum()], [(~a & b).sum(), (~a & ~b).sum()]]
    return TestResult(float(_mcnemar(table, exact=True).pvalue), "McNemar, exact", int(a.size))


def holm(pvalues: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given; an empty list stays empty."""
    values = list(pvalues)
    return [float(p) for p in multipletests(values, method="holm")[1]] if values else []


def groups(trials: pd.DataFrame) -> pd.DataFrame:
    """The trials of checkpoints that are groups of files; single files are left out."""
    return trials[trials["protocol"] != "single_file"]


def refused(crash: pd.DataFrame) -> pd.DataFrame:
    """The trials of groups whose group in flight was refused; `reason` says why."""
    found = groups(crash)
    return found[~found["group_valid"].fillna(False).astype(bool)]


_COMPARISON = [
    *("protocol", "first", "second", "pairs", "only_first", "only_second", "pvalue", "adjusted")
]


def compare_modes(crash: pd.DataFrame, bad: Sequence[str]) -> pd.DataFrame:
    """Do two modes lose differently in the *same* crashes? Exact McNemar per pair, Holm over all.

    Parameters
    ----------
    crash : crash trials of one method; arms are paired by protocol, crash point, seed and step
    bad : the outcomes that count as a loss

    Returns
    -------
    DataFrame with columns protocol, first, second, pairs, only_first, only_second (losses that
    only one of the two had), pvalue, adjusted

    Raises
    ------
    InvalidInput : two modes of one protocol were not crashed at the same points, seeds and steps
    """
    key = ["crash_point", "seed", "step"]
    rows = []
    for protocol in in_order(crash["protocol"]):
        part = crash[crash["protocol"] == protocol]
        wide = part.pivot(index=key, columns="mode", values="outcome")
        if wide.isna().any(axis=None):
            raise InvalidInput(
                f"the modes of protocol {protocol!r} did not meet the same crashes; "
                f"found {wide.count().to_dict()}"
            )
        lost = wide.isin(list(bad))
        modes = in_order(wide.columns)
        for i, first in enumerate(modes):
            for second in modes[i + 1 :]:
                a, b = lost[first], lost[second]
                counts = [len(lost), int((a & ~b).sum()), int((~a & b).sum())]
                rows.append([protocol, first, second, *counts, mcnemar(a, b).pvalue])
    found = pd.DataFrame(rows, columns=_COMPARISON[:-1])
    return found.assign(adjusted=holm(found["pvalue"]))
