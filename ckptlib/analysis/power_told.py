"""What notebook 06 says in words, each sentence computed; an empty text where nothing was run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from ckptlib.analysis import power as losses
from ckptlib.analysis import stats, tables_power
from ckptlib.crashes import power
from ckptlib.crashes.blocklog import MARK, WRITE, DeviceLog
from ckptlib.crashes.filesystems import FILESYSTEMS, support


def of_states(k: int, n: int, logs: int) -> str:
    """A count of states as it may be said: without an interval, with its logs."""
    return f"{k:,} of {n:,} states in {logs} log{'s' if logs != 1 else ''}"


# -- what can run, and what was tried --------------------------------------------------------------


def supported() -> pd.DataFrame:
    """Whether each file system can run here; if not, why, and how to enable it."""
    can = support()
    rows = [
        (name, entry.options, "skipped" if can[name] else "runs", can[name])
        for name, entry in FILESYSTEMS.items()
    ]
    return pd.DataFrame(rows, columns=["file system", "mounted with", "here", "what to do"])


def skipped(left_out: Mapping[str, str]) -> str:
    """What was not run here and how to enable it, as a box in markdown; empty if all was run."""
    lines = [f"> - {', '.join(names)}: {why}" for why, names in losses.reasons(left_out).items()]
    if not lines:
        return ""
    return (
        "> **Not run here.** What this notebook shows says nothing about these file systems, "
        "neither good nor bad:\n>\n" + "\n".join(lines) + "\n\n"
    )


def planned(trials: Sequence[dict]) -> pd.DataFrame:
    """Numbers of logs by file system and mode: of the comparison, the variants, the ablation."""
    frame = pd.DataFrame(trials)
    parts = {"compared": losses.compared, "beside": losses.beside}
    parts["one flush left out"] = lambda rows: rows[rows["omitted"] != ""]
    key = ["filesystem", "mode"]
    table = pd.DataFrame({name: part(frame).groupby(key).size() for name, part in parts.items()})
    return table.reindex(frame[key].drop_duplicates()).fillna(0).astype(int).reset_index()


def recorded(logs: pd.DataFrame) -> str:
    """How much was recorded."""
    if logs.empty:
        return ""
    sizes = logs["largest_window"]
    return (
        f"{len(logs):,} logs: {logs['writes'].sum():,} writes, {logs['flushes'].sum():,} flushes, "
        f"and {logs['operations'].sum():,} operations of the library. The fullest window of a log "
        f"holds {sizes.median():.0f} writes in the median, {sizes.max()} at most."
    )


def example_log(logs: pd.DataFrame, folder: Path) -> DeviceLog:
    """A log that is easy to read, in which every file and directory is flushed; or an empty one."""
    rows = losses.compared(logs)
    rows = rows[(rows["mode"] == "atomic_dirsync") & (rows["workload"] == "saves")]
    for name in losses.ranked(rows["filesystem"], losses.FILESYSTEMS)[:1]:
        own = rows[rows["filesystem"] == name].sort_values(["protocol", "seed"])
        return DeviceLog.load(folder / f"{own['log'].iloc[0]}.plog")
    return DeviceLog(0)


def one_save(log: DeviceLog) -> pd.DataFrame:
    """The records of the second save of a log, or of its only one, in order and in words."""
    begun = [number for number, _ in log.marks(power.BEGIN)][:2]
    done = [number + 1 for number, _ in log.marks(power.ACKNOWLEDGED)][: len(begun)]
    rows = []
    for number in range(begun[-1], done[-1]) if begun and done else ():
        record = log.records[number]
        if record.kind != MARK:
            place = record.offset if record.kind == WRITE else pd.NA
            rows.append((number, "", record.kind, place, len(record) or pd.NA))
        elif "done" not in record.mark:
            rows.append((number, _says(record.mark), "", pd.NA, record.mark.get("size", pd.NA)))
    columns = ["record", "the application says", "the disk is told", "at byte", "bytes"]
    return pd.DataFrame(rows, columns=columns).astype({"at byte": "Int64", "bytes": "Int64"})


def _says(mark: Mapping) -> str:
    if "operation" not in mark:
        return ", ".join(f"{name} {value}" for name, value in mark.items() if name != "parts")
    words = [mark["operation"], mark["path"], *(["to", mark["target"]] if "target" in mark else [])]
    return " ".join(words)


def policies(log: DeviceLog, seed: int) -> pd.DataFrame:
    """The policies, with the number of states that a log has for each."""
    found = Counter(state.policy for state in power.plan(log, seed=seed))
    number = (lambda name: found[name]) if log.records else (lambda name: tables_power.NOT_RUN)
    rows = [(name, says, number(name)) for name, says in power.POLICIES.items()]
    return pd.DataFrame(rows, columns=["policy", "what of the tail is kept", "states of this log"])


def tried(loss: pd.DataFrame) -> str:
    """How many states were tried, and how many had something to lose."""
    if loss.empty:
        return ""
    cut = loss.drop_duplicates(["log", "window"])
    return (
        f"{len(loss):,} crash states from {loss['log'].nunique()} logs. In "
        f"{int(loss['acknowledged_step'].notna().sum()):,} of them a save had been acknowledged, "
        f"so that there was something to lose. {len(cut):,} windows were cut; of "
        f"{int(cut['exhaustive'].sum()):,}, every part of the tail was tried."
    )


# -- what was found -------------------------------------------------------------------------------


def lost(table: pd.DataFrame) -> str:
    """How often the newest acknowledged checkpoint was lost, by mode, as a list in markdown."""
    if table.empty:
        return ""
    lines = []
    for mode in stats.in_order(table["mode"]):
        own = table[table["mode"] == mode]
        numbers = zip(own["acknowledged"] - own["kept_newest"], own["acknowledged"], own["logs"],
                      strict=True)  # fmt: skip
        said = [
            f"{name} **{of_states(*of)}**"
            for name, of in zip(own["filesystem"], numbers, strict=True)
        ]
        lines.append(f"- `{mode}`: {'; '.join(said)}")
    return "Lost, of the states that had something to lose:\n\n" + "\n".join(lines)


def bounds(table: pd.DataFrame, mode: str) -> str:
    """Of one mode: logs in which anything was lost, with the interval, as a list in markdown."""
    lines = []
    for row in table[table["mode"] == mode].itertuples():
        found = stats.proportion(row.logs_with_loss, row.logs, safety=True).scaled(100)
        lines.append(f"- {row.filesystem}: {found.told()}")
    if not lines:
        return ""
    return f"\n\nLogs of `{mode}` in which any state that was tried lost it:\n\n" + "\n".join(lines)


def found(row, story, states: int) -> str:
    """What one crash state, of so many, left: the step that is found, the damage, the folder."""
    if story is None:
        return f"Nothing was lost in the {states:,} states that were tried." if states else ""
    step = row["recovered_step"]
    loads = "nothing loads" if pd.isna(step) else f"step {step} loads"
    return (
        f"`{row['log']}`: step {row['acknowledged_step']} had been acknowledged, and after the "
        f"kernel's recovery {loads} ({row['damage']}). This is the folder then:\n\n"
        f"```\n{story.listing}\n```"
    )


def rules(loss: pd.DataFrame) -> str:
    """What no mode may ever do, and what atomic_dirsync promises, over all states."""
    if loss.empty:
        return ""
    guarded = loss[loss["protocol"] != "bare_file"]
    wrong = int(guarded["outcome"].isin(["false_accept", "mixed"]).sum())
    strict = losses.mounted(losses.compared(loss))
    strict = strict[strict["mode"] == "atomic_dirsync"]
    broken, saved = int((~strict["expected"].astype(bool)).sum()), strict["next_save_ok"].dropna()
    return (
        "- Handed out, although nobody had saved it so: "
        f"**{of_states(wrong, len(guarded), guarded['log'].nunique())}** (all modes; without the "
        "bare file, which has no guard).\n- Promises broken by `atomic_dirsync`: "
        f"**{of_states(broken, len(strict), strict['log'].nunique())}**; the next save worked in "
        f"{int(saved.sum()):,} of the {len(saved):,} states in which it was tried.\n\n"
    )


def refused(loss: pd.DataFrame) -> str:
    """What is to be said of the states that the kernel refused to mount, in one paragraph."""
    rows = loss[loss["mount_error"] != ""]
    if loss.empty:
        return ""
    if rows.empty:
        return f"The kernel mounted all {len(loss):,} states by itself."
    lines = []
    for name in losses.ranked(rows["filesystem"], losses.FILESYSTEMS):
        own = rows[rows["filesystem"] == name]
        why = ", ".join(f"{error} {k}" for error, k in own["mount_error"].value_counts().items())
        policies = ", ".join(
            f"`{policy}`" for policy in losses.ranked(own["policy"], losses.POLICIES)
        )
        gone = own[losses.lost(own)]
        modes = ", ".join(f"`{mode}` {k}" for mode, k in gone["mode"].value_counts().items())
        lines.append(
            f"- {name}: {len(own)} ({why}; policy {policies}), {int(own['repaired'].sum())} "
            f"mounted after the repair, {len(gone)} had lost an acknowledged checkpoint"
            + (f" ({modes})" if modes else "")
        )
    return (
        f"Of {len(loss):,} states, the kernel refused to mount {len(rows)}. They stand beside the "
        "counts of what survives, not in them:\n\n" + "\n".join(lines)
    )
