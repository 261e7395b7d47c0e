"""What a power loss left of acknowledged saves: states are counted, intervals are over logs only.

The states of one log share a file system, a run and its timing, so they are no sample of anything:
of them it is said "0 of N states in K logs". A log is one recorded run on a file system of its own;
what is said of logs has an interval. States that the kernel refused to mount are kept apart, with
what was found after the file system's own repair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from ckptlib.analysis import stats
from ckptlib.crashes import filesystems, oracle, power

#: The protocols by which modes are compared; others are shown beside, under their own names.
COMPARED = ("per_file", "batched", "single_file")
WORKLOADS = ("saves", "prune", "recovery", "overwrite", "numbered")
POLICIES = tuple(power.POLICIES)
#: What can become of the newest acknowledged checkpoint, from its directory to its bytes.
DAMAGE = (
    *("absent directory", "missing name", "zero length", "torn content", "stale content"),
    "not mounted",
)
FILESYSTEMS = tuple(filesystems.FILESYSTEMS)
MAIN = filesystems.MAIN
SAYS_FILESYSTEM = {
    "ext4": "ext4 (data=ordered, the default)",
    "ext4_writeback": "ext4, data=writeback",
    "ext4_journal": "ext4, data=journal",
    "ext4_noauto_da_alloc": "ext4, noauto_da_alloc",
}
#: Directory flushes that are left out on purpose, outermost directory first; first: none is.
OMITTED = ("", "parents", "store", "step", "staging")
SAYS_OMITTED = {
    "": "every directory flushed",
    "parents": "not the folders above the store",
    "store": "not the store",
    "step": "not the step's directory",
    "staging": "not the staged directory",
}
#: Outcomes in which something is lost or wrong, the worst last.
BAD = ("lost_acknowledged", "unrecoverable", "mixed", "false_accept")


def ranked(names: Iterable[str], order: Iterable[str]) -> list[str]:
    """Distinct names in a given order; others follow by name."""
    places = {name: place for place, name in enumerate(order)}
    return sorted(set(names), key=lambda name: (places.get(name, len(places)), name))


# -- which rows ---------------------------------------------------------------------------------


def compared(loss: pd.DataFrame) -> pd.DataFrame:
    """The rows by which modes are compared: the three protocols, with no flush left out."""
    return loss[(loss["omitted"] == "") & loss["protocol"].isin(COMPARED)]


def beside(loss: pd.DataFrame) -> pd.DataFrame:
    """The labelled variants: the paper's artifact, and one file as most jobs write it."""
    return loss[(loss["omitted"] == "") & ~loss["protocol"].isin(COMPARED)]


def ablation(loss: pd.DataFrame) -> pd.DataFrame:
    """Runs with a directory flush left out, and the same runs of the same seeds with none."""
    without = loss[loss["omitted"] != ""]
    arm = ["filesystem", "mode", "protocol", "workload", "seed"]
    return loss[same(loss[arm], without[arm])]


def same(rows: pd.DataFrame, wanted: pd.DataFrame) -> np.ndarray:
    """Which rows have values that are also a row of another frame with the same columns."""
    return pd.MultiIndex.from_frame(rows).isin(pd.MultiIndex.from_frame(wanted))


def mounted(loss: pd.DataFrame) -> pd.DataFrame:
    """The states that the kernel mounted by itself."""
    return loss[loss["mount_error"] == ""]


def asked(loss: pd.DataFrame) -> pd.DataFrame:
    """The states that have something to lose: mounted, and a save was acknowledged at the cut."""
    return mounted(loss)[mounted(loss)["acknowledged_step"].notna()]


def lost(loss: pd.DataFrame) -> pd.Series:
    """Whether the newest acknowledged checkpoint, or a newer one, is not what was found."""
    return loss["acknowledged_step"].notna() & loss["outcome"].isin(oracle.LOST)


# -- counts and shares ----------------------------------------------------------------------------


def per_log(loss: pd.DataFrame) -> pd.DataFrame:
    """One row a log: states with something to lose, how many lost it, and the share that kept it.

    Logs without such a state are left out.
    """
    key = ["filesystem", "mode", "protocol", "workload", "omitted", "seed", "log"]
    rows = asked(loss)
    found = rows.assign(lost=lost(rows)).groupby(key, sort=False)["lost"].agg(["size", "sum"])
    found = found.reset_index().rename(columns={"size": "states", "sum": "lost"})
    return found.assign(kept_percent=100 * (1 - found["lost"] / found["states"]))


def count(loss: pd.DataFrame) -> dict[str, int]:
    """Counts over some states.

    ``acknowledged`` are those with something to lose, ``kept_newest`` of them have it still.
    ``mixed`` and ``false_accept`` are counted whether or not something was acknowledged.
    ``refused`` by the kernel, and ``refused_lost`` after the repair, are in no other count but
    that of all ``states``.
    """
    own, refused = mounted(loss), loss[loss["mount_error"] != ""]
    told = asked(loss)
    return {
        "logs": loss["log"].nunique(),
        "states": len(loss),
        "acknowledged": len(told),
        "kept_newest": int((~lost(told)).sum()),
        "lost_acknowledged": int((told["outcome"] == "lost_acknowledged").sum()),
        "unrecoverable": int((told["outcome"] == "unrecoverable").sum()),
        "mixed": int((own["outcome"] == "mixed").sum()),
        "false_accept": int((own["outcome"] == "false_accept").sum()),
        "unexpected": int((~own["expected"].astype(bool)).sum()),
        "refused": len(refused),
        "refused_lost": int(lost(refused).sum()),
    }


def counts(loss: pd.DataFrame, by: Mapping[str, Iterable[str]]) -> pd.DataFrame:
    """:func:`count` for every group of rows.

    Parameters
    ----------
    by : mapping of str to iterable of str
        Columns that make the groups, each with the order in which its values are shown.
    """
    rows = []
    names = list(by)
    groups = dict(list(loss.groupby(names, sort=False)))
    ranks = {name: ranked(loss[name], order) for name, order in by.items()}
    places = [{value: place for place, value in enumerate(ranks[name])} for name in names]
    for key in sorted(groups, key=lambda k: [p[v] for p, v in zip(places, k, strict=True)]):
        rows.append(dict(zip(names, key, strict=True)) | count(groups[key]))
    return pd.DataFrame(rows, columns=[*names, *count(loss.iloc[:0])])


def by_arm(loss: pd.DataFrame, **more: Iterable[str]) -> dict[str, Iterable[str]]:
    """The order of file systems and modes, and of further columns, for :func:`counts`."""
    return {"filesystem": FILESYSTEMS, "mode": stats.in_order(loss["mode"]), **more}


def survival(loss: pd.DataFrame) -> pd.DataFrame:
    """Survival of the newest acknowledged save by file system and mode: the headline.

    Two estimates over logs stand beside the counts of states: ``logs_with_loss_percent``, of logs
    in which any of the states tried had lost it (exact, one-sided where none or all had), and
    ``kept_percent``, the share of states that kept it in the median log (order statistics).
    """
    rows = compared(loss)
    table = counts(rows, by_arm(rows))
    logs = per_log(rows)
    more = []
    for row in table.itertuples():
        own = logs[(logs["filesystem"] == row.filesystem) & (logs["mode"] == row.mode)]
        any_loss = stats.proportion(int((own["lost"] > 0).sum()), len(own), safety=True)
        share = stats.quantile_interval(own["kept_percent"].to_numpy(), 50)
        more.append(
            {"logs_with_loss": any_loss.k}
            | _estimate("logs_with_loss_percent", any_loss.scaled(100))
            | _estimate("kept_percent", share)
        )
    columns = list(more[0]) if more else []
    return table.assign(**{name: [row[name] for row in more] for name in columns})


def _estimate(name: str, found: stats.Interval) -> dict[str, float]:
    return {name: found.rate, f"{name}_low": found.low, f"{name}_high": found.high}


def by_policy(loss: pd.DataFrame) -> pd.DataFrame:
    """Counts by file system, mode and policy."""
    rows = compared(loss)
    return counts(rows, by_arm(rows, policy=POLICIES))


def by_workload(loss: pd.DataFrame) -> pd.DataFrame:
    """Counts by file system, mode, protocol and workload."""
    rows = compared(loss)
    return counts(rows, by_arm(rows, protocol=COMPARED, workload=WORKLOADS))


def by_damage(loss: pd.DataFrame) -> pd.DataFrame:
    """What became of the newest acknowledged checkpoint where it was lost: one column a kind.

    Groups of files and single files are told apart, since a file has no directory to lose.
    """
    told = asked(compared(loss))
    kinds = {True: "single file", False: "group"}
    told = told.assign(checkpoint=(told["protocol"] == "single_file").map(kinds))
    key = ["filesystem", "mode", "checkpoint"]
    damaged = told[lost(told)].replace({"damage": {"": "other"}})
    table = counts(told, by_arm(told, checkpoint=("group", "single file")))
    table = table.assign(lost=table["acknowledged"] - table["kept_newest"])
    table = table[[*key, "logs", "acknowledged", "lost"]]
    for kind in ranked([*DAMAGE, *damaged["damage"]], DAMAGE):
        own = damaged[damaged["damage"] == kind].groupby(key).size()
        table[kind] = [int(own.get(tuple(row), 0)) for row in table[key].to_numpy()]
    return table


def by_directory(loss: pd.DataFrame) -> pd.DataFrame:
    """Counts of the ablation by file system, protocol and the flush that was left out."""
    rows = ablation(loss)
    order = {"filesystem": FILESYSTEMS, "protocol": COMPARED, "omitted": OMITTED}
    return counts(rows, order)


def example(loss: pd.DataFrame) -> pd.Series | None:
    """A lost checkpoint that is quickly told, or None if none was lost.

    If there is one, of an ordinary run in `atomic_nodirsync`, where all bytes were flushed and
    only names were at stake; with the fewest late writes.
    """
    rows = asked(compared(loss))
    rows = rows[lost(rows)]
    rows = rows.assign(weak=rows["mode"] != "atomic_nodirsync", odd=rows["workload"] != "saves")
    rows = rows.sort_values(["weak", "odd", "kept_writes", "tail", "trial_id"])
    return rows.iloc[0] if len(rows) else None


def reasons(skipped: Mapping[str, str]) -> dict[str, list[str]]:
    """What was left out, by reason."""
    found: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        found.setdefault(reason, []).append(name)
    return found
