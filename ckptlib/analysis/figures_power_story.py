"""One lost checkpoint from beginning to end: what was done, and what the device had been told."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ckptlib.analysis.figures_power import Skipped, figure_not_run
from ckptlib.analysis.style import GREY, MODES, OUTCOMES, PAGE, PaperFigure, canvas, style

BEFORE, AFTER = 36, 6  # rows shown before the cut and after it
_LEFT, _MIDDLE, _RIGHT = 0.005, 0.52, 0.56
FLUSHED, THROUGH, GONE, NEVER = "flushed", "got through", "lost", "after the cut"


def figure_power_story(
    events: pd.DataFrame | None,
    cut: int = 0,
    kept: Collection[int] = (),
    *,
    tried: int = 0,
    skipped: Skipped = None,
) -> PaperFigure:
    """Operations of the application beside writes and flushes of the device, in their one order.

    Parameters
    ----------
    events : DataFrame or None
        Columns ``index`` (of the record), ``lane`` (application or device), ``kind``, ``label``,
        ``size`` in bytes. None where there is no lost checkpoint to tell of.
    cut : int
        The record before which the power goes.
    kept : collection of int
        Writes that no flush covers and that reached the medium all the same.
    tried : int
        Crash states among which one to tell of was sought.
    """
    if events is None or events.empty:
        why = f"No such checkpoint was lost in the {tried:,} states that were tried."
        return figure_not_run("a lost checkpoint, step by step", skipped, why * bool(tried))
    told = events.assign(fate=_fates(events, cut, kept))
    rows = _rows(told)
    first = next((n for n, row in enumerate(rows) if row["index"] >= cut), len(rows))
    rows = rows[max(0, first - BEFORE) : first + AFTER]
    at = min(first, BEFORE)
    with style():
        fig, axes = canvas(PAGE, 0.55 + 0.158 * (len(rows) + 1.2))
        ax = axes[0][0]
        ax.set(xlim=(0, 1), ylim=(len(rows) + 0.7, -1.2))
        ax.set_axis_off()
        for x, name in ((_LEFT, "application"), (_RIGHT, "device")):
            ax.text(x, -0.9, name, fontsize=8, fontweight="bold", va="center")
        ax.text(_MIDDLE, -0.9, "record", fontsize=7, color=GREY, ha="right", va="center")
        ax.axvline(_MIDDLE + 0.015, color="#BBBBBB", lw=0.7)
        for place, row in enumerate(rows):
            _row(ax, place + (place >= at), row)
        _cut(ax, at)
    gone = int((told["fate"] == GONE).sum())
    mine = told[(told["lane"] == "application") & (told["index"] < cut)]
    last = mine["label"].iloc[-1] if len(mine) else "nothing"
    shown = told[told["index"] >= rows[0]["index"]]
    return fig.tell(
        f"""One lost checkpoint, step by step; time runs downwards. Left, the operations of the
        application; right, what the device was told meanwhile, the numbers being those of the
        records in the log. Filled marks are on the medium for certain, since a flush followed;
        when the power goes, {gone} later writes are lost and {len(kept)} get through. What stands
        below the line never happened. n = 1 crash state, so without an interval.""",
        f"Two columns of events in one order, with a line where the power goes, after: {last}.",
        shown,
    )


def _fates(events: pd.DataFrame, cut: int, kept: Collection[int]) -> np.ndarray:
    """What became of each event: of a write, whether it is on the medium."""
    index, write = events["index"], events["kind"].eq("write") & events["lane"].eq("device")
    flushes = index[events["kind"].eq("flush") & events["lane"].eq("device") & (index < cut)]
    late = write & (index > flushes.max()) if len(flushes) else write
    fates = [index >= cut, late & index.isin(list(kept)), late, write]
    return np.select(fates, [NEVER, THROUGH, GONE, FLUSHED], "")


def _rows(told: pd.DataFrame) -> list[dict]:
    """Events by line: an operation stands beside what the device had to do for it.

    What was flushed is summed up; late writes have a line each.
    """
    rows: list[dict] = []
    for event in told.itertuples(index=False):
        single = event.fate in (THROUGH, GONE) and event.kind != "flush"
        if event.lane == "application":
            rows.append({"index": event.index, "left": event, "right": [], "alone": False})
        elif single or not rows or rows[-1]["alone"] or _apart(rows[-1], event):
            rows.append({"index": event.index, "left": None, "right": [event], "alone": single})
        else:
            rows[-1]["right"].append(event)
    return rows


def _apart(row: dict, event) -> bool:
    """Whether an event lies on the other side of the cut than the row."""
    own = row["left"] or row["right"][0]
    return (own.fate == NEVER) != (event.fate == NEVER)


def _row(ax: Axes, y: float, row: dict) -> None:
    never = (row["left"] or row["right"][0]).fate == NEVER
    color = "#8A8A8A" if never else "black"
    ax.text(_MIDDLE, y, str(row["index"]), fontsize=7, color=GREY, ha="right", va="center")
    if row["left"] is not None:
        label = row["left"].label.replace("runs/job/", "")
        size = f" ({_size(row['left'].size)})" if row["left"].size else ""
        told = "acknowledged" in label
        box = {"facecolor": "#DCEBF7", "edgecolor": MODES["atomic_dirsync"].color, "pad": 1.2}
        ax.text(_LEFT, y, label + size, fontsize=7, va="center", color=color,
                fontweight="bold" if told and not never else "normal",
                bbox=box if told and not never else None)  # fmt: skip
    if row["right"]:
        fate = row["right"][0].fate
        sure = OUTCOMES["kept"].color
        filled = {FLUSHED: sure, THROUGH: OUTCOMES["lost_unacknowledged"].color}.get(fate, "white")
        if any(event.kind == "write" for event in row["right"]):
            marker = "X" if fate == GONE else "s"
            ax.plot(_RIGHT - 0.02, y, marker, ms=4.5, mew=0.6, mec=color,
                    color=OUTCOMES["unrecoverable"].color if fate == GONE else filled)  # fmt: skip
        ax.text(_RIGHT, y, _summed(row["right"]), fontsize=7, va="center", color=color)


def _summed(events: list) -> str:
    """Events of the device in words: runs of writes summed up, flushes between them."""
    words, run = [], []
    for event in [*events, None]:
        if event is not None and event.kind == "write":
            run.append(event)
            continue
        if run:
            count = f"{len(run)} writes" if len(run) > 1 else "1 write"
            words.append(f"{count}, {_size(sum(e.size for e in run))}")
            if run[0].fate in (THROUGH, GONE):
                words[-1] = f"{words[-1]}: {run[0].fate}"
            run = []
        if event is not None:
            words.append("flush")
    return "; ".join(words)


def _size(count: int) -> str:
    return f"{count / 1024:.0f} KiB" if count >= 1024 else f"{count} bytes"


def _cut(ax: Axes, at: float) -> None:
    color = OUTCOMES["unrecoverable"].color
    ax.axhline(at, color=color, lw=1.4, ls="--")
    box = {"facecolor": "white", "edgecolor": color, "pad": 1.5}
    ax.text(0.99, at, "the power goes here", ha="right", va="center", fontsize=8,
            fontweight="bold", bbox=box)  # fmt: skip
