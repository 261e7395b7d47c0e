"""What a claim is measured by: functions from trial tables to an interval; never a verdict.

`data/published/claims.yml` names one of these functions and its parameters for every claim. A share
is in percent, a latency in seconds, a ratio has no unit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import pandas as pd

from ckptlib.analysis import power, stats
from ckptlib.analysis.intervals import NOT_ESTIMABLE, Interval
from ckptlib.errors import InvalidInput, explain
from ckptlib.experiments import registry

Frames = Mapping[str, pd.DataFrame]
MEASURES: dict[str, Callable[..., Interval]] = {}
TABLES: dict[str, str] = {}


def measure(table: str = "") -> Callable:
    """Register a measure by its name; `table` is what it reads ("" if a parameter says)."""

    def register(function: Callable[..., Interval]) -> Callable[..., Interval]:
        MEASURES[function.__name__] = function
        TABLES[function.__name__] = table
        return function

    return register


def check(name: str, parameters: Mapping[str, object]) -> None:
    """Hold a claim's measure to the functions here and to the columns of the registry.

    Raises
    ------
    InvalidInput : unknown measure, parameter, table or column, or a missing parameter
    """
    if name not in MEASURES:
        raise InvalidInput(
            explain("unknown measure", found=repr(name), expected=", ".join(sorted(MEASURES)))
        )
    try:
        inspect.signature(MEASURES[name]).bind({}, **parameters)
    except TypeError as error:
        raise InvalidInput(explain(f"measure {name!r} cannot take these", found=error)) from error
    table = TABLES[name] or str(parameters["table"])
    columns = registry.output(table).columns
    for key in ("where", "hit"):
        conditions = parameters.get(key, {})
        if not isinstance(conditions, Mapping):
            raise InvalidInput(
                explain(f"{key!r} of {name!r} is no mapping of column to value", found=conditions)
            )
        for column in conditions:
            if column not in columns:
                raise InvalidInput(
                    explain(
                        f"{key!r} of measure {name!r} names no column of {table}",
                        found=column,
                        expected=", ".join(columns),
                    )
                )


def take(name: str, frames: Frames, parameters: Mapping[str, object]) -> Interval:
    """Compute a measure that `check` has passed."""
    return MEASURES[name](frames, **parameters)


def matching(frame: pd.DataFrame, conditions: Mapping[str, object]) -> pd.Series:
    """True for the rows that meet every condition; a missing value meets none."""
    met = pd.Series(True, index=frame.index)
    for column, wanted in conditions.items():
        values = wanted if isinstance(wanted, list) else [wanted]
        met &= frame[column].isin(values).fillna(False).astype(bool)
    return met


def _table(frames: Frames, name: str) -> pd.DataFrame:
    if name not in frames:
        raise InvalidInput(
            explain(
                "a table that a claim needs was not given",
                found=", ".join(frames) or "none",
                expected=name,
                do=f"read it with run.read({name!r})",
            )
        )
    return frames[name]


@measure()
def share(frames: Frames, table: str, where: Mapping, hit: Mapping) -> Interval:
    """Of the rows that meet `where`, the percentage that meets `hit`."""
    rows = _table(frames, table)
    rows = rows[matching(rows, where)]
    return stats.proportion(int(matching(rows, hit).sum()), len(rows)).scaled(100)


@measure()
def agreement(frames: Frames, table: str, where: Mapping, left: str, right: str) -> Interval:
    """Of the rows that meet `where`, the percentage in which two columns hold the same value."""
    rows = _table(frames, table)
    rows = rows[matching(rows, where)]
    same = (rows[left] == rows[right]).fillna(False).astype(bool)
    return stats.proportion(int(same.sum()), len(rows)).scaled(100)


@measure("crash")
def reason_share(frames: Frames, where: Mapping, reason: str) -> Interval:
    """Of the refused groups that meet `where`, the percentage refused for this kind of reason."""
    rows = _table(frames, "crash")
    found = stats.refused(rows[matching(rows, where)])["reason"]
    return stats.proportion(int((found == reason).sum()), len(found)).scaled(100)


@measure("crash")
def reasons_seen(frames: Frames, where: Mapping, reasons: list) -> Interval:
    """The percentage of these kinds of reason that occurred at least once."""
    rows = _table(frames, "crash")
    found = set(stats.refused(rows[matching(rows, where)])["reason"])
    if not found:
        return stats.proportion(0, 0)
    return stats.proportion(len(found.intersection(reasons)), len(reasons)).scaled(100)


@measure("power_loss")
def logs_with_loss(frames: Frames, mode: str) -> Interval:
    """Of the recorded logs of a mode, the percentage in which a crash state lost what it had.

    Logs are independent, their states are not. States that the kernel refused to mount don't count.
    """
    loss = power.compared(_table(frames, "power_loss"))
    logs = power.per_log(loss[loss["mode"] == mode])
    return stats.proportion(int((logs["lost"] > 0).sum()), len(logs)).scaled(100)


def _runs(frames: Frames, mode: str, protocol: str) -> pd.DataFrame:
    return stats.run_matrix(stats.arm(_table(frames, "latency"), mode, protocol))


@measure("latency")
def latency_quantile(frames: Frames, mode: str, q: float, protocol: str) -> Interval:
    """A percentile of save latency, in seconds."""
    return stats.percentile(_runs(frames, mode, protocol), q)


@measure("latency")
def latency_ratio(frames: Frames, mode: str, baseline: str, q: float, protocol: str) -> Interval:
    """The percentile of one mode over that of another, paired over runs."""
    return stats.ratio(_runs(frames, mode, protocol), _runs(frames, baseline, protocol), q)


@measure("latency")
def latency_overhead(
    frames: Frames, mode: str, q: float, protocol: str, baseline: str = stats.BASELINE
) -> Interval:
    """(mode - baseline) / baseline x 100 at a percentile, paired over runs."""
    return latency_ratio(frames, mode, baseline, q, protocol).scaled(100, -100)


@measure("latency")
def latency_tail(
    frames: Frames, mode: str, baseline: str, q: float, base_q: float, protocol: str
) -> Interval:
    """The ratio of two modes at one percentile over their ratio at another."""
    runs, base = _runs(frames, mode, protocol), _runs(frames, baseline, protocol)
    return stats.tail_growth(runs, base, q, base_q)


@measure("latency")
def interval_share(
    frames: Frames, mode: str, q: float, interval_s: float, protocol: str
) -> Interval:
    """A percentile of save latency as a percentage of the time between two saves."""
    return latency_quantile(frames, mode, q, protocol).scaled(100 / interval_s)


@measure("latency_process")
def process_quantile(frames: Frames, mode: str, q: float) -> Interval:
    """A percentile of whole-process time per checkpoint, in seconds; one value a process."""
    rows = stats.arm(_table(frames, "latency_process"), mode)
    return stats.quantile_interval(rows["per_checkpoint_s"], q)


@measure("latency_process")
def process_ratio(frames: Frames, mode: str, baseline: str, q: float) -> Interval:
    """A percentile of the paired ratios of whole-process times per checkpoint."""
    return stats.process_ratio(_table(frames, "latency_process"), mode, baseline, q)


@measure("latency_process")
def process_over_save(frames: Frames, mode: str, protocol: str) -> Interval:
    """Median whole-process time per checkpoint over the median time of the save itself.

    The interval is the quotient of the two 95% intervals' far ends, so it covers at least 90%.
    """
    whole = process_quantile(frames, mode, 50)
    save = latency_quantile(frames, mode, 50, protocol)
    n = min(whole.n, save.n)
    method = f"{whole.method} over {save.method}"
    for part in (whole, save):
        if part.method.startswith(NOT_ESTIMABLE):
            method = part.method
    return Interval(whole.rate / save.rate, whole.low / save.high, whole.high / save.low, method, n)
