"""What is said of kills at every operation and of operations that fail, each sentence computed.

An empty text where nothing was run.
"""

from __future__ import annotations

import errno
import os

import pandas as pd

from ckptlib.analysis import operations, stats
from ckptlib.crashes.kill import AFTER, BEFORE, DURING
from ckptlib.crashes.oracle import LOST, REASONS
from ckptlib.experiments.flows import FLOWS, SINGLE_FILE, arms
from ckptlib.faults import errors


def flows() -> pd.DataFrame:
    """What the flows are, and in how many arms each exists: for reading."""
    rows = [(name, flow.says, len(arms(name))) for name, flow in FLOWS.items()]
    return pd.DataFrame(rows, columns=["flow", "what is cut short", "arms"])


def faults() -> pd.DataFrame:
    """What can befall an operation: for reading."""
    rows = [
        (fault, errors.SAYS.get(fault) or os.strerror(getattr(errno, fault)).lower())
        for fault in errors.FAULTS
    ]
    return pd.DataFrame(rows, columns=["fault", "what befalls the operation"])


def of_places(tried: int, places: int) -> str:
    """A count of places or faults as it may be said: without an interval."""
    return f"{tried:,} of {places:,}"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())


def counted(names: pd.Series, order) -> str:
    """Counts of what occurs, in words and in a given order."""
    found = names.value_counts()
    return _listed({name: int(found[name]) for name in operations.ranked(names, order)})


# -- kills ----------------------------------------------------------------------------------------


def places(kills: pd.DataFrame) -> str:
    """How many places there are, how many were tried, and where in the operation."""
    if kills.empty:
        return ""
    tried, there = operations.tried(kills)
    share = "all tried" if tried == there else f"{of_places(tried, there)} tried, a sample"
    where = kills["position"].value_counts()
    counts = {name: int(where.get(name, 0)) for name in (BEFORE, DURING, AFTER)}
    seeds, rows = kills["seed"].nunique(), kills[operations.ROW].drop_duplicates()
    return (
        f"**{there:,} operation boundaries, {share}**{f', with {seeds} seeds' * (seeds > 1)}: "
        f"{len(kills):,} processes killed ({_listed(counts)} an operation), in {len(rows)} arms of "
        f"{rows['flow'].nunique()} flows."
    )


def lost(kills: pd.DataFrame) -> str:
    """What was lost, by mode and kind of checkpoint, and promises broken, as a list in markdown."""
    if kills.empty:
        return ""
    lines = []
    for kind, single in (("groups", False), ("single file", True)):
        part = kills[(kills["protocol"] == SINGLE_FILE) == single]
        for mode in stats.in_order(part["mode"]):
            outcomes = part.loc[part["mode"] == mode, "outcome"]
            found = of_places(int(outcomes.isin(LOST).sum()), len(outcomes))
            lines.append(f"- {kind}, `{mode}`: lost after **{found}** kills")
    broken_ones = of_places(int((~kills["expected"]).sum()), len(kills))
    lines.append(f"- promises broken, all modes: **{broken_ones}**")
    return "\n".join(lines)


def broken(kills: pd.DataFrame) -> str:
    """Promises broken: a count, since places are listed and not drawn."""
    if kills.empty:
        return ""
    count = int((~kills["expected"]).sum())
    tried, there = operations.tried(kills)
    rest = (
        "none was left out"
        if tried == there
        else f"of the {there - tried:,} that were left out nothing is known"
    )
    return f"Broken promises: **{count}** in {len(kills):,} kills at these places; {rest}."


def torn(kills: pd.DataFrame, mode: str = "unsafe") -> str:
    """Where nothing loads of a single file that is overwritten, as a list in markdown."""
    lines = []
    for row in operations.torn(kills, mode).itertuples():
        if not row.lost:
            lines.append(f"- {row.flow}: nothing lost in {row.kills:,} kills")
            continue
        own = stats.arm(kills[kills["flow"] == row.flow], mode, SINGLE_FILE)
        gone = own[own["outcome"].isin(LOST)].sort_values("place")
        ends = [
            f"*{gone['crash_point'].iloc[end]}* (place {gone['place'].iloc[end]} of {row.places:,})"
            for end in (0, -1)
        ]
        lines.append(
            f"- {row.flow}: lost in **{of_places(row.lost, row.kills)}** kills, "
            f"{'from' if row.lost > 1 else 'at'} {' to '.join(ends[: min(row.lost, 2)])}; refused "
            f"for: {counted(gone['reason'], REASONS)}"
        )
    head = f"A single file over an earlier one, in `{mode}`:\n\n"
    return head + "\n".join(lines) if lines else ""


# -- errors ---------------------------------------------------------------------------------------


def failures(failed: pd.DataFrame) -> str:
    """What came of the faults, in sentences."""
    if failed.empty:
        return ""
    strict = operations.atomic(failed)
    weak = failed.drop(strict.index)
    gone = [of_places(int(rows["predecessor_lost"].sum()), len(rows)) for rows in (strict, weak)]
    return (
        f"{len(failed):,} faults: {counted(failed['result'], errors.RESULTS)}. Otherwise than "
        f"declared: **{int((~failed['as_declared']).sum())}**. Told to be done and not done: "
        f"**{int(failed['silent'].sum())}**. Predecessor lost: **{gone[0]}** in the atomic modes, "
        f"{gone[1]} in `unsafe`. After the next save **{int(failed['leftovers'].sum())}** "
        "leftovers."
    )


def lies(failed: pd.DataFrame) -> str:
    """What came of flushes that fail and say on the next call that all is well."""
    own = failed[failed["fault"] == errors.LIE]
    if own.empty:
        return ""
    kinds = {"files": "flush", "directories": "flush_dir"}
    parts = [
        f"of {kind} {counted(rows['result'], errors.RESULTS)}"
        for kind, rows in ((kind, own[own["operation"] == call]) for kind, call in kinds.items())
        if len(rows)
    ]
    return (
        f"Lying flushes, {len(own):,}: {'; '.join(parts)}. Believed: "
        f"**{int(own['silent'].sum())}**."
    )
