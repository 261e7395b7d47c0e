"""What checkpoints cost here and how often that is affordable; never a typed-in number."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ckptlib.analysis import stats
from ckptlib.analysis.intervals import DEFAULT, Resampling
from ckptlib.errors import InvalidInput

INTERVALS_S = (10, 60, 300, 1800)
PROMISE = {
    "unsafe": "promises nothing after a crash",
    "atomic_nodirsync": "never tears a file, but may lose the newest name in a power loss",
    "atomic_dirsync": "keeps what was acknowledged through a power loss, as far as the disk "
    "flushes when told to",
}


def guidance(
    latency: pd.DataFrame,
    target_share: float = 0.01,
    intervals_s: Sequence[float] = INTERVALS_S,
    how: Resampling = DEFAULT,
) -> pd.DataFrame:
    """Cost of a save by arm, its share of the time at some intervals, and the least interval.

    Parameters
    ----------
    latency : the output `latency`; single files are left out, since their payload is another
    target_share : share of the time that saves may take, in (0, 1)
    intervals_s : times between checkpoints, in seconds

    Returns
    -------
    DataFrame, one row an arm: mode, protocol, n_runs, n_saves, save_p50_ms and save_p99_ms with
    `_low` and `_high`, share_<interval>s_percent (of p99), smallest_interval_s (at which p99 meets
    the target) with `_low` and `_high`

    Raises
    ------
    InvalidInput : the target is no share between 0 and 1, or an interval is not positive
    """
    if not 0 < target_share < 1:
        raise InvalidInput(f"target_share must lie between 0 and 1; found {target_share!r}")
    if any(not t > 0 for t in intervals_s):
        raise InvalidInput(f"every interval must be positive; found {list(intervals_s)!r}")
    summary = stats.latency_summary(stats.groups(latency), (50, 99), how)
    rows = []
    for (mode, protocol), part in summary.groupby(["mode", "protocol"], sort=False):
        median, slow = (part[part["q"] == q].iloc[0] for q in (50, 99))
        row = {"mode": mode, "protocol": protocol}
        row |= {"n_runs": median.n_runs, "n_saves": median.n_saves}
        for name, found in (("save_p50_ms", median), ("save_p99_ms", slow)):
            row |= {name: found.estimate * 1e3, f"{name}_low": found.low * 1e3}
            row |= {f"{name}_high": found.high * 1e3}
        for t in intervals_s:
            row[f"share_{t:g}s_percent"] = slow.estimate / t * 100
        for end in ("", "_low", "_high"):
            bound = slow[end.removeprefix("_") or "estimate"]
            row[f"smallest_interval_s{end}"] = bound / target_share
        rows.append(row)
    return pd.DataFrame(rows)


def advice(found: pd.DataFrame, target_share: float, training: pd.DataFrame) -> str:
    """The guidance in sentences (markdown), every number computed.

    Parameters
    ----------
    found : as `guidance` gives it
    target_share : the same as there
    training : the output `training`, for the share that saves really took
    """
    lines = []
    for row in found.itertuples():
        bounds = "its interval is not estimable from so few runs"
        if pd.notna(row.smallest_interval_s_low):
            low, high = row.smallest_interval_s_low, row.smallest_interval_s_high
            bounds = f"95% interval {_time(low)} to {_time(high)}"
        lines.append(
            f"- **{row.mode}, {row.protocol}** {PROMISE.get(row.mode, '')}. A save takes "
            f"{row.save_p50_ms:.3g} ms in the median and {row.save_p99_ms:.3g} ms at p99; the "
            f"latter stays below {target_share:.2%} of the time from one checkpoint every "
            f"{_time(row.smallest_interval_s)} on ({bounds})."
        )
    safe = found[found["mode"] == "atomic_dirsync"]
    if not safe.empty:
        best = safe.loc[safe["smallest_interval_s"].idxmin()]
        rare = max(INTERVALS_S)
        lines.append(
            f"\nAdvice for this disk: **atomic_dirsync** with the protocol **{best.protocol}**, "
            f"whose promise is the strongest, for a training that saves no more often than every "
            f"{_time(best.smallest_interval_s)}. At one save every {_time(rare)} its p99 takes "
            f"{best.save_p99_ms / 1e3 / rare * 100:.2g}% of the time. {_gain(found, best)}"
        )
    measured = training[training["arm"] == "uninterrupted"]
    if not measured.empty:
        shares = measured.groupby("mode")["share"].median()
        told = ", ".join(f"{mode} {shares[mode]:.2%}" for mode in stats.in_order(shares.index))
        lines.append(
            f"\nIn the training of notebook 01, which is tiny and saves a larger state, saves took "
            f"a median share of {told} (runs that were not killed)."
        )
    return "\n".join(lines)


def _gain(found: pd.DataFrame, best: pd.Series) -> str:
    """What giving up the flushes would gain, as a sentence; empty if `unsafe` was not timed."""
    weak = found[found["mode"] == stats.BASELINE]
    if weak.empty:
        return ""
    gain = best.save_p50_ms - weak["save_p50_ms"].min()
    return f"Going down to {stats.BASELINE} would gain {gain:.3g} ms a save in the median."


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
