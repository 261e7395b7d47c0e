"""The tables of power loss: counts of crash states, and what is said of logs with its interval.

Where nothing was run, a table says so and why: it must not read as if nothing had been lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from ckptlib.analysis import power, stats, tables

NOT_RUN = "not run here"


def _unless_skipped(table: pd.DataFrame, skipped: Mapping[str, str] | None) -> pd.DataFrame:
    """The table if it has rows; else what was not run, and why."""
    return table if len(table) else not_run(skipped or {})


def not_run(skipped: Mapping[str, str]) -> pd.DataFrame:
    """The file systems that were left out, a row a reason, which says how to enable them."""
    rows = [(", ".join(names), reason) for reason, names in power.reasons(skipped).items()]
    rows = rows or [("all", "nothing that this is about was planned")]
    table = pd.DataFrame(rows, columns=["filesystem", "reason"])
    return table.assign(result=NOT_RUN)[["filesystem", "result", "reason"]]


_OVER_LOGS = [
    *("logs_with_loss", "logs_with_loss_percent", "logs_with_loss_percent_low"),
    *("logs_with_loss_percent_high", "kept_percent", "kept_percent_low", "kept_percent_high"),
]


def table_power(loss: pd.DataFrame, skipped: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Counts of states by file system and mode, see :func:`.power.count`."""
    table = power.survival(loss)
    return _unless_skipped(table.drop(columns=_OVER_LOGS, errors="ignore"), skipped)


def table_logs(loss: pd.DataFrame, skipped: Mapping[str, str] | None = None) -> pd.DataFrame:
    """What can be said of logs with an interval, by file system and mode."""
    table = power.survival(loss)
    names = ["filesystem", "mode", "logs", *_OVER_LOGS] if len(table) else table.columns
    return _unless_skipped(table[names], skipped)


def table_policies(loss: pd.DataFrame, skipped: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Newest acknowledged checkpoint lost, of states, by file system, mode and policy."""
    return _unless_skipped(_losses(power.by_policy(loss), ["policy"]), skipped)


def table_workloads(loss: pd.DataFrame, skipped: Mapping[str, str] | None = None) -> pd.DataFrame:
    """The same by file system, mode, protocol and workload."""
    return _unless_skipped(_losses(power.by_workload(loss), ["protocol", "workload"]), skipped)


def _losses(counts: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    lost = counts["acknowledged"] - counts["kept_newest"]
    return counts.assign(lost=lost)[["filesystem", "mode", *by, "logs", "lost", "acknowledged"]]


def table_damage(loss: pd.DataFrame, skipped: Mapping[str, str] | None = None) -> pd.DataFrame:
    """What became of the newest acknowledged checkpoint where it was lost."""
    return _unless_skipped(power.by_damage(loss), skipped)


def table_directories(loss: pd.DataFrame, skipped: Mapping[str, str] | None = None) -> pd.DataFrame:
    """What atomic_dirsync loses if one directory flush is left out."""
    table = power.by_directory(loss)
    lost = table["acknowledged"] - table["kept_newest"]
    table = table.assign(lost=lost, flushed=table["omitted"].map(power.SAYS_OMITTED))
    names = ["filesystem", "protocol", "flushed", "logs", "states", "acknowledged", "lost"]
    return _unless_skipped(table[[*names, *power.BAD, "refused", "refused_lost"]], skipped)


def table_beside(loss: pd.DataFrame, skipped: Mapping[str, str] | None = None) -> pd.DataFrame:
    """The labelled variants beside the arms that they are a variant of, on the same file systems.

    The artifact stands beside the same commit with every directory flushed, the bare file beside
    the file with the sidecar.
    """
    own, ordinary = power.beside(loss), power.compared(loss)
    arm = ["filesystem", "mode", "workload", "protocol"]
    of = {"artifact": "per_file", "bare_file": "single_file"}
    chosen = power.same(ordinary[arm], own[arm].assign(protocol=own["protocol"].map(of)))
    rows = pd.concat([ordinary[chosen], own])
    order = {
        "filesystem": power.FILESYSTEMS,
        "workload": power.WORKLOADS,
        "mode": stats.in_order(rows["mode"]),
        "protocol": ("per_file", "artifact", "single_file", "bare_file"),
    }
    table = power.counts(rows, order)
    table = table.assign(lost=table["acknowledged"] - table["kept_newest"])
    names = [*order, "logs", "states", "acknowledged", "lost", *power.BAD]
    return _unless_skipped(table[names], skipped)


def lost_by_workload(loss: pd.DataFrame, skipped: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Lost of states by mode, protocol and workload, a column a file system: for reading."""
    table = power.by_workload(loss)
    return _unless_skipped(_side_by_side(table, ["mode", "protocol", "workload"]), skipped)


def lost_by_directory(loss: pd.DataFrame, skipped: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Lost of states by protocol and flush left out, a column a file system: for reading."""
    table = power.by_directory(loss)
    table = table.assign(flushed=table["omitted"].map(power.SAYS_OMITTED))
    return _unless_skipped(_side_by_side(table, ["protocol", "flushed"]), skipped)


def _side_by_side(counts: pd.DataFrame, rows: list[str]) -> pd.DataFrame:
    if counts.empty:
        return counts
    lost = (counts["acknowledged"] - counts["kept_newest"]).astype(str)
    cells = counts.assign(lost=lost + " of " + counts["acknowledged"].astype(str))
    wide = cells.pivot(index=rows, columns="filesystem", values="lost").fillna("")
    columns = power.ranked(wide.columns, power.FILESYSTEMS)
    order = pd.MultiIndex.from_frame(counts[rows].drop_duplicates())
    return wide.loc[order, columns].reset_index()


_SOMETHING = "'acknowledged': states with something to lose."
#: The printed tables: how each is made, and its caption.
TABLES = {
    "table_power": (
        table_power,
        "What a power loss leaves of the newest acknowledged save. Counts of states. "
        + _SOMETHING
        + " 'refused': states that the kernel would not mount, counted apart, and what was lost "
        "in them after the repair.",
    ),
    "table_power_logs": (
        table_logs,
        "The same, said of independent logs, with 95% intervals: logs in which any state that was "
        "tried had lost the newest acknowledged save (exact, one-sided where none or all had), and "
        "the share of states that kept it, in the median log (order statistics).",
    ),
    "table_power_policies": (
        table_policies,
        "Newest acknowledged save lost, by what of the late writes reached the medium. Counts of "
        "states. " + _SOMETHING,
    ),
    "table_power_workloads": (
        table_workloads,
        "Newest acknowledged save lost, by commit protocol and workload. Counts of states. "
        + _SOMETHING,
    ),
    "table_power_damage": (
        table_damage,
        "What had become of the newest acknowledged checkpoint where it was lost, of groups of "
        "files and of single files. Counts of states. " + _SOMETHING,
    ),
    "table_power_directories": (
        table_directories,
        "atomic_dirsync with the flush of one directory left out, on the same seeds. Counts of "
        "states. " + _SOMETHING,
    ),
    "table_power_beside": (
        table_beside,
        "The paper's artifact, and one file without a sidecar, beside the arms of which they are a "
        "variant. Counts of states. " + _SOMETHING,
    ),
}


def save(
    name: str, loss: pd.DataFrame, skipped: Mapping[str, str], folder: Path
) -> tables.SavedTable:
    """Make one of :data:`TABLES` and write it."""
    make, caption = TABLES[name]
    table = make(loss, skipped)
    if "result" in table:
        caption = f"Not run here, so this is no result. {caption}"
    return tables.save(table, name, folder, caption)
