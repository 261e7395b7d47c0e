"""Kills at every operation, and every operation failing: what is selected, and what is counted.

The places to die follow from the code and are listed, not drawn, and so are the faults. They are
counted as "n of N tried", without an interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from ckptlib.analysis import stats
from ckptlib.crashes.kill import AFTER, BEFORE
from ckptlib.crashes.oracle import LOST, OUTCOMES, REASONS
from ckptlib.experiments.flows import FLOWS, SINGLE_FILE
from ckptlib.faults import errors
from ckptlib.write_modes import WriteMode

ROW = ["flow", "mode", "protocol"]  # what has places of its own
#: Outcomes from the best to the worst, as they are shown.
SHOWN = tuple(reversed(OUTCOMES))
#: File operations in the order in which a save has them, for showing.
CALLS = (
    *("lock", "mkdir", "create", "chmod", "write", "flush", "close", "replace", "rename"),
    *("flush_dir", "symlink", "unlink", "rmdir", "stat", "list", "open", "read", "readlink"),
)


def ranked(found: Iterable[str], order: Iterable[str]) -> list[str]:
    """Distinct values in a given order; others follow."""
    names, known = list(dict.fromkeys(found)), list(order)
    return [n for n in known if n in names] + [n for n in names if n not in known]


def atomic(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the modes that promise something about what was acknowledged."""
    return rows[[WriteMode.of(mode).atomic for mode in rows["mode"]]]


def _count(flags: pd.Series) -> int:
    return int(flags.astype(bool).sum())


def _counts(names: pd.Series, order: Sequence[str]) -> dict[str, int]:
    """A count for each name of an order, none of them left out, and for whatever else occurs."""
    found = names.value_counts()
    order = [*order, *(name for name in ranked(names, order) if name not in order)]
    return {name: int(found.get(name, 0)) for name in order}


# -- kills ----------------------------------------------------------------------------------------


def tried(kills: pd.DataFrame) -> tuple[int, int]:
    """Places at which a process was killed, and places that there are, over all flows and arms."""
    there = kills.groupby(ROW)["places"].max()
    return len(kills[[*ROW, "place"]].drop_duplicates()), int(there.sum())


def positions(places: Iterable[dict], traced: Mapping[tuple, Sequence]) -> pd.DataFrame:
    """By flow and arm, the operations of its trace, and how many have a place on either side."""
    struck = pd.DataFrame(places).groupby([*ROW, "position"])["operation_index"].nunique()
    rows = [
        (*of, len(trace), *(int(struck.get((*of, side), 0)) for side in (BEFORE, AFTER)))
        for of, trace in traced.items()
    ]
    return pd.DataFrame(rows, columns=[*ROW, "operations", BEFORE, AFTER])


def by_flow(kills: pd.DataFrame) -> pd.DataFrame:
    """Counts by flow and arm: places, places tried, kills, each outcome, and what came after."""
    rows = []
    for flow in ranked(kills["flow"], FLOWS):
        part = kills[kills["flow"] == flow]
        for mode, protocol in stats.arms(part):
            own = stats.arm(part, mode, protocol)
            rows.append(
                {"flow": flow, "mode": mode, "protocol": protocol,
                 "places": int(own["places"].max()), "tried": own["place"].nunique(),
                 "kills": len(own)}
                | _counts(own["outcome"], SHOWN)
                | {"unexpected": _count(~own["expected"]),
                   "next_save_failed": _count(~own["next_save_ok"]),
                   "leftovers": int(own["leftovers"].sum())}
            )  # fmt: skip
    return pd.DataFrame(rows)


def by_call(kills: pd.DataFrame) -> pd.DataFrame:
    """Counts by operation and arm: kills, each outcome, losses, and the worst that occurred."""
    rows = []
    for call in ranked(kills["operation"], CALLS):
        part = kills[kills["operation"] == call]
        for mode, protocol in stats.arms(part):
            own = stats.arm(part, mode, protocol)
            rows.append(
                {"operation": call, "mode": mode, "protocol": protocol, "kills": len(own)}
                | _counts(own["outcome"], SHOWN)
                | {"lost": _count(own["outcome"].isin(LOST)),
                   "unexpected": _count(~own["expected"]),
                   "worst": min(own["outcome"], key=OUTCOMES.index)}
            )  # fmt: skip
    return pd.DataFrame(rows)


def by_reason(kills: pd.DataFrame) -> pd.DataFrame:
    """By arm, of the kills amid the save of a group: how many are valid, and why the others not."""
    own = kills[(kills["protocol"] != SINGLE_FILE) & kills["in_flight_step"].notna()]
    refused = own[~own["group_valid"].astype(bool)]
    reasons = ranked(refused["reason"], REASONS)
    rows = []
    for mode, protocol in stats.arms(own):
        part, why = stats.arm(own, mode, protocol), stats.arm(refused, mode, protocol)["reason"]
        rows.append(
            {"mode": mode, "protocol": protocol, "kills": len(part), "valid": len(part) - len(why)}
            | _counts(why, reasons)
        )
    return pd.DataFrame(rows)


def torn(kills: pd.DataFrame, mode: str) -> pd.DataFrame:
    """By flow of a single file, the kills after which nothing loads of what was acknowledged."""
    single = stats.arm(kills, mode, SINGLE_FILE)
    single = single[single["acknowledged_step"].notna()]
    rows = []
    for flow in ranked(single["flow"], FLOWS):
        own = single[single["flow"] == flow]
        lost = _count(own["outcome"].isin(LOST))
        rows.append((flow, int(own["places"].max()), len(own), lost))
    return pd.DataFrame(rows, columns=["flow", "places", "kills", "lost"])


# -- errors ---------------------------------------------------------------------------------------


def wrong(failed: pd.DataFrame) -> pd.Series:
    """Faults of which something came that must not: undeclared, silent, or against a promise."""
    fine = failed["as_declared"] & ~failed["silent"] & failed["expected"] & failed["next_save_ok"]
    return ~fine | (failed["leftovers"] > 0)


def _after(own: pd.DataFrame) -> dict[str, int]:
    return {
        "predecessor_lost": _count(own["predecessor_lost"]),
        "silent": _count(own["silent"]),
        "next_save_failed": _count(~own["next_save_ok"]),
        "leftovers": int(own["leftovers"].sum()),
    }


def by_result(failed: pd.DataFrame) -> pd.DataFrame:
    """Counts by arm: faults, how many as declared, each result, and what must not be."""
    results = ranked([*errors.RESULTS, *failed["result"]], errors.RESULTS)
    rows = []
    for mode, protocol in stats.arms(failed):
        own = stats.arm(failed, mode, protocol)
        rows.append(
            {"mode": mode, "protocol": protocol, "faults": len(own),
             "as_declared": _count(own["as_declared"])}
            | _counts(own["result"], results) | _after(own)
        )  # fmt: skip
    return pd.DataFrame(rows)


def by_fault(failed: pd.DataFrame) -> pd.DataFrame:
    """Counts by operation and fault: faults, as declared, each result, and what must not be."""
    results = ranked([*errors.RESULTS, *failed["result"]], errors.RESULTS)
    rows = []
    for call in ranked(failed["operation"], CALLS):
        part = failed[failed["operation"] == call]
        for fault in ranked(part["fault"], errors.FAULTS):
            own = part[part["fault"] == fault]
            rows.append(
                {"operation": call, "fault": fault, "faults": len(own),
                 "as_declared": _count(own["as_declared"]), "wrong": _count(wrong(own))}
                | _counts(own["result"], results) | _after(own)
            )  # fmt: skip
    return pd.DataFrame(rows)


# -- by these names, notebook 09 says it ----------------------------------------------------------


def told(kills: pd.DataFrame) -> str:
    """See :func:`.operations_told.places`."""
    from ckptlib.analysis import operations_told  # it imports this module

    return operations_told.places(kills)


def promises(kills: pd.DataFrame) -> str:
    """See :func:`.operations_told.lost`."""
    from ckptlib.analysis import operations_told

    return operations_told.lost(kills)


def told_errors(failed: pd.DataFrame) -> str:
    """See :func:`.operations_told.failures`."""
    from ckptlib.analysis import operations_told

    return operations_told.failures(failed)
