"""What came of kills at every operation, and of every operation failing: counts and sentences.

The places to die follow from the code and are listed, not drawn, so nothing here has an interval:
"N of N places tried" is all there is to say of them.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from ckptlib.analysis import stats, tables
from ckptlib.crashes.oracle import LOST, OUTCOMES
from ckptlib.experiments.flows import FLOWS
from ckptlib.faults import errors

ARM = ["mode", "protocol"]
PROTOCOLS = ("per_file", "batched", "single_file")
#: Outcomes from the best to the worst, as they are shown.
SHOWN = tuple(reversed(OUTCOMES))
#: File operations in the order in which a save has them, for showing.
CALLS = (
    *("lock", "mkdir", "create", "chmod", "write", "flush", "close", "replace", "rename"),
    *("flush_dir", "symlink", "unlink", "rmdir", "stat", "list", "open", "read", "readlink"),
)


def ranked(found, order) -> list[str]:
    """Distinct values in a given order; others follow."""
    names = list(dict.fromkeys(found))
    return [n for n in order if n in names] + [n for n in names if n not in order]


def arms(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """Modes and protocols that occur, in the order in which they are shown."""
    there = set(rows[ARM].itertuples(index=False, name=None))
    wanted = [(m, p) for m in stats.in_order(rows["mode"]) for p in PROTOCOLS]
    return [arm for arm in wanted if arm in there]


def flow_table() -> pd.DataFrame:
    """What the flows are, for reading."""
    return pd.DataFrame([(name, flow.says) for name, flow in FLOWS.items()],
                        columns=["flow", "what is cut short"])  # fmt: skip


# -- kills ----------------------------------------------------------------------------------------


def by_flow(kills: pd.DataFrame) -> pd.DataFrame:
    """Counts by flow and arm: places, places tried, kills, each outcome, and what came after."""
    rows = []
    for flow in ranked(kills["flow"], FLOWS):
        part = kills[kills["flow"] == flow]
        for mode, protocol in arms(part):
            own = part[(part["mode"] == mode) & (part["protocol"] == protocol)]
            counts = own["outcome"].value_counts()
            rows.append(
                {"flow": flow, "mode": mode, "protocol": protocol, "places": own["places"].max(),
                 "tried": own["place"].nunique(), "kills": len(own)}
                | {name: int(counts.get(name, 0)) for name in SHOWN}
                | {"unexpected": int((~own["expected"]).sum()),
                   "next_save_failed": int((~own["next_save_ok"]).sum()),
                   "leftovers": int(own["leftovers"].sum())}
            )  # fmt: skip
    return pd.DataFrame(rows)


def by_call(kills: pd.DataFrame) -> pd.DataFrame:
    """Counts of kills and of losses by operation and arm, and the worst outcome that occurred."""
    rows = []
    for call in ranked(kills["operation"], CALLS):
        for mode, protocol in arms(kills):
            own = kills[(kills["operation"] == call) & (kills["mode"] == mode)]
            own = own[own["protocol"] == protocol]
            if len(own):
                worst = min(own["outcome"], key=OUTCOMES.index)
                lost = int(own["outcome"].isin(LOST).sum())
                rows.append((call, mode, protocol, len(own), lost, worst))
    return pd.DataFrame(rows, columns=["operation", *ARM, "kills", "lost", "worst"])


def by_reason(kills: pd.DataFrame) -> pd.DataFrame:
    """Why the checkpoint in flight was refused, in kills at saves of a group; a column a reason."""
    own = kills[(kills["protocol"] != "single_file") & ~kills["group_valid"]]
    own = own[own["in_flight_step"].notna()]
    wide = own.groupby([*ARM, "reason"], sort=False).size().unstack(fill_value=0)
    order = pd.MultiIndex.from_tuples(arms(own), names=ARM)
    return wide.reindex(order).reset_index()


def told(kills: pd.DataFrame) -> str:
    """How many places there are, how many were tried, and where in the operation."""
    seeds, table = kills["seed"].nunique(), by_flow(kills)
    places, tried = int(table["places"].sum()), int(table["tried"].sum())
    share = "all tried" if tried == places else f"{tried:,} of them tried, a sample"
    how = kills["position"].value_counts()
    parts = ", ".join(f"{int(how.get(p, 0)):,} {p}" for p in ("before", "during", "after"))
    times = "" if seeds == 1 else f", with {seeds} seeds"
    return (
        f"**{places:,} operation boundaries, {share}**{times}: {len(kills):,} processes killed "
        f"({parts} an operation), in {len(table)} arms of {table['flow'].nunique()} flows."
    )


def promises(kills: pd.DataFrame) -> str:
    """What was lost, by mode and kind of checkpoint, and promises broken, as a list in markdown."""
    lines = []
    for single in (False, True):
        part = kills[(kills["protocol"] == "single_file") == single]
        for mode in stats.in_order(part["mode"]):
            own = part[part["mode"] == mode]
            lost = int(own["outcome"].isin(LOST).sum())
            kind = "single file" if single else "groups"
            lines.append(f"- {kind}, `{mode}`: lost after **{lost:,} of {len(own):,}** kills")
    broken = int((~kills["expected"]).sum())
    lines.append(f"- promises broken, all modes: **{broken} of {len(kills):,}**")
    return "\n".join(lines)


# -- errors ---------------------------------------------------------------------------------------


def by_result(failed: pd.DataFrame) -> pd.DataFrame:
    """Counts by arm: what came of the faults, and whether it was as declared."""
    rows = []
    for mode, protocol in arms(failed):
        own = failed[(failed["mode"] == mode) & (failed["protocol"] == protocol)]
        counts = own["result"].value_counts()
        rows.append(
            {"mode": mode, "protocol": protocol, "faults": len(own)}
            | {name: int(counts.get(name, 0)) for name in ranked(counts.index, errors.RESULTS)}
            | {"otherwise_than_declared": int((~own["as_declared"]).sum()),
               "predecessor_lost": int(own["predecessor_lost"].sum()),
               "silent": int(own["silent"].sum()),
               "next_save_failed": int((~own["next_save_ok"]).sum()),
               "leftovers": int(own["leftovers"].sum())}
        )  # fmt: skip
    return pd.DataFrame(rows).fillna(0)


def by_fault(failed: pd.DataFrame) -> pd.DataFrame:
    """Counts by operation and fault: each result, and how many were not as declared."""
    rows = []
    for call in ranked(failed["operation"], CALLS):
        for fault in errors.FAULTS:
            own = failed[(failed["operation"] == call) & (failed["fault"] == fault)]
            if len(own):
                results = ", ".join(ranked(own["result"], errors.RESULTS))
                otherwise = int((~own["as_declared"]).sum())
                rows.append((call, fault, len(own), results, otherwise))
    columns = ["operation", "fault", "faults", "results", "otherwise_than_declared"]
    return pd.DataFrame(rows, columns=columns)


def told_errors(failed: pd.DataFrame) -> str:
    """What came of the faults, in sentences."""
    counts = failed["result"].value_counts()
    kinds = ", ".join(
        f"{int(counts[name]):,} {name}" for name in ranked(counts.index, errors.RESULTS)
    )
    atomic = failed[failed["mode"] != "unsafe"]
    weak = failed[failed["mode"] == "unsafe"]
    return (
        f"{len(failed):,} faults: {kinds}. Otherwise than declared: "
        f"**{int((~failed['as_declared']).sum())}**. Told to be done and not done: "
        f"**{int(failed['silent'].sum())}**. Predecessor lost: "
        f"**{int(atomic['predecessor_lost'].sum())} of {len(atomic):,}** in the atomic modes, "
        f"{int(weak['predecessor_lost'].sum())} of {len(weak):,} in `unsafe`. After the next save "
        f"**{int(failed['leftovers'].sum())}** leftovers."
    )


# -- printed --------------------------------------------------------------------------------------

TABLES = {
    "table_operations": (
        by_flow,
        "A real SIGKILL at every operation: before it, after it, and amid every write. 'places' "
        "are the boundaries that a flow has, 'tried' those at which a process was killed. Counts "
        "of kills; places are listed and not drawn, so there is no interval.",
    ),
    "table_operation_reasons": (
        by_reason,
        "Why the group in flight was refused after a kill, by write mode. Counts of kills.",
    ),
    "table_errors": (
        by_result,
        "Every operation fails in every way, once. Counts of faults by what came of them; "
        "'silent': the caller was told success and it was none.",
    ),
}


def save(name: str, rows: pd.DataFrame, folder: Path) -> tables.SavedTable:
    """Make one of :data:`TABLES` and write it."""
    make, caption = TABLES[name]
    return tables.save(make(rows), name, folder, caption)
