"""What notebook 03 says in words of its named crash points, each sentence computed."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from ckptlib.analysis import stats
from ckptlib.crashes import kill
from ckptlib.crashes.oracle import LOST
from ckptlib.experiments import crash

_WRITING = ("mkdir", "create", "write", "flush", "replace", "symlink", "flush_dir")


def one_save(scratch: Path, seed: int) -> pd.DataFrame:
    """The operations of a save in atomic_dirsync, file by file, with the named crash points."""
    bench = crash.Bench(scratch / "crash-trace", "atomic_dirsync", "per_file", seed)
    try:
        bench.prepare(step := crash.EARLIER + 1)
        trace = bench.trace(step)
    finally:
        bench.close()
    points = {name: locate(trace) for name, (_, locate) in crash.POINTS.items() if locate}
    struck = {point.index: f"{name} ({point.position})" for name, point in points.items()}
    rows = [
        (op.index, op.call, kill.name_of(op), op.size, struck.get(op.index, ""))
        for op in trace
        if op.call in _WRITING or op.index in struck
    ]
    return pd.DataFrame(rows, columns=["operation", "call", "name", "bytes", "crash point"])


def trials(done: pd.DataFrame) -> str:
    """How many trials there were, and what died in them."""
    real = done[done["method"] == "sigkill"]
    return (
        f"{len(done):,} trials: in {int(real['killed'].sum()):,} a process was really killed, "
        f"{int((real['crash_point'] == 'none').sum()):,} are their controls, in which nothing "
        f"strikes, and {int((done['method'] == 'artifact').sum()):,} are the paper's, in which no "
        "process dies."
    )


def valid(early: pd.DataFrame, late: pd.DataFrame) -> str:
    """Valid groups after kills before and after COMMIT."""
    per_mode = early.groupby("mode", sort=False)["group_valid"].agg(["sum", "size"])
    return (
        "Valid groups after a kill before COMMIT: "
        + ", ".join(f"`{mode}` {k} of {n}" for mode, (k, n) in per_mode.iterrows())
        + ". After a kill between COMMIT and the return of `save()`: "
        f"{int(late['group_valid'].sum())} of {len(late)}, in all modes together."
    )


def refused(single: pd.DataFrame) -> str:
    """Why the single file of `unsafe` was refused, by crash point."""
    own = single[single["mode"] == "unsafe"]
    reasons = own.groupby("crash_point")["reason"].value_counts()
    told = ", ".join(f"`{point}` {why} ({n})" for (point, why), n in reasons.items())
    return f"Why the single file of `unsafe` was refused: {told}."


def lost(struck: pd.DataFrame, single: pd.DataFrame) -> str:
    """How often something acknowledged was lost, with bounds, as a list in markdown."""
    lines = []
    for kind, part in (("groups", struck), ("single file", single)):
        for mode in stats.in_order(part["mode"]):
            outcomes = part.loc[part["mode"] == mode, "outcome"]
            found = stats.proportion(int(outcomes.isin(LOST).sum()), len(outcomes), safety=True)
            bounds = f"95% interval {found.low:.1%} to {found.high:.1%}, {found.method}"
            lines.append(f"- {kind}, `{mode}`: **{found.k} of {found.n}** ({bounds})")
    return "Lost what had been acknowledged:\n\n" + "\n".join(lines)


def torn(done: pd.DataFrame) -> str:
    """What came of the paper's after_model."""
    own = done[(done["method"] == "artifact") & (done["crash_point"] == "after_model")]
    counts = own["outcome"].value_counts()
    back = int((own["recovered_step"] == own["step"] - 1).sum())
    return (
        f"`after_model`: {len(own)} trials, refused {int((~own['group_valid']).sum())}; outcomes: "
        + ", ".join(f"{name} {n}" for name, n in counts.items())
        + f". Rolled back to the checkpoint before: {back}."
    )


def broken(done: pd.DataFrame) -> str:
    """Promises broken in kills at the named points, with the bound."""
    found = stats.proportion(int((~done["expected"]).sum()), int(done["killed"].sum()), safety=True)
    return (
        f"Broken promises: **{found.k}** in {found.n:,} kills at these points, so at most "
        f"{found.high:.2%} ({found.method}). "
        "The table lists rules that were broken without having been promised."
    )
