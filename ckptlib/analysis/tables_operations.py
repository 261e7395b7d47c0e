"""The tables of kills at every operation and of operations that fail: counts, without intervals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from ckptlib.analysis import operations, tables
from ckptlib.analysis.operations_told import of_places


def _of_kills(kills: pd.DataFrame) -> str:
    tried, there = operations.tried(kills)
    sample = "" if tried == there else " (a sample)"
    seeds = kills["seed"].nunique()
    more = f", with {seeds} seeds" if seeds > 1 else ""
    return f"{of_places(tried, there)} places tried{sample}, {len(kills):,} kills{more}."


def _of_faults(failed: pd.DataFrame) -> str:
    declared = int(failed["as_declared"].sum())
    return f"{of_places(declared, len(failed))} faults came out as declared."


#: The printed tables: how each is made, and its caption, in two parts with the counts between.
TABLES: dict[str, tuple[Callable, str, Callable, str]] = {
    "table_operations": (
        operations.by_flow,
        "A real SIGKILL at every operation: before it, after it, and amid every write.",
        _of_kills,
        "'places': those that the flow has. Counts of kills; places are listed and not drawn, so "
        "there is no interval.",
    ),
    "table_operation_reasons": (
        operations.by_reason,
        "Why the group in flight was refused after a kill.",
        _of_kills,
        "Counts of the kills amid the save of a group; without an interval.",
    ),
    "table_errors": (
        operations.by_result,
        "What comes of an operation that fails once.",
        _of_faults,
        "Counts of faults by what came of them, without an interval. 'silent': the caller was told "
        "success, and it was none; 'leftovers': names left after the next save.",
    ),
}


def save(name: str, rows: pd.DataFrame, folder: Path) -> tables.SavedTable:
    """Make one of :data:`TABLES` from its trials and write it."""
    make, head, counts, tail = TABLES[name]
    return tables.save(make(rows), name, folder, f"{head} {counts(rows)} {tail}")
