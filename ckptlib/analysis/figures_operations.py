"""Figures of kills at every operation and of every operation failing: counts, without intervals."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from ckptlib.analysis import operations, stats
from ckptlib.analysis.operations_told import counted, of_places
from ckptlib.analysis.style import OUTCOMES, PAGE, Look, PaperFigure, canvas, style
from ckptlib.crashes.oracle import LOST
from ckptlib.errors import InvalidInput
from ckptlib.experiments.flows import FLOWS, SINGLE_FILE
from ckptlib.faults import errors

RESULTS = {
    errors.ABSORBED: Look("#0072B2"),
    errors.RETRIED: Look("#56B4E9", hatch="...."),
    errors.REMARKED: Look("#F0E442"),
    errors.REFUSED: Look("#E69F00", hatch="////"),
    errors.COMMITTED: Look("#CC79A7", hatch="xxxx"),
}
UNKNOWN = Look("#FFFFFF", hatch="OO")  # what nobody declared
#: A stretch is at least this part of its panel wide, so that it is seen; a loss before all.
NARROWEST, NARROWEST_LOSS = 1 / 200, 1 / 80
PER_LINE = 4  # entries of a legend side by side
_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.7}
_ALARM = {"facecolor": "black", "edgecolor": "white", "pad": 1.0}


def _some(rows: pd.DataFrame, what: str) -> None:
    if rows.empty:
        raise InvalidInput(f"there is no {what} to draw")


def _arm(mode: str, protocol: str, between: str = ", ") -> str:
    return f"{mode}{between}{protocol.replace('_', ' ')}"


def _patch(shape: Look, label: str, hatch: bool = True) -> Patch:
    return Patch(facecolor=shape.color, hatch=shape.hatch if hatch else "", edgecolor="black",
                 linewidth=0.5, label=label.replace("_", " "))  # fmt: skip


def _outcomes(found: pd.Series) -> list[str]:
    """What occurs, from the best to the worst."""
    return [name for name in operations.SHOWN if (found == name).any()]


def _legend_of_outcomes(names: list[str]) -> list[Patch]:
    return [_patch(OUTCOMES[name], name, name in LOST) for name in names]


# -- where it was killed --------------------------------------------------------------------------


def figure_operations(kills: pd.DataFrame) -> PaperFigure:
    """Every place to die in the order of its flow, coloured by what was recovered."""
    _some(kills, "kill")
    flows = operations.ranked(kills["flow"], FLOWS)
    single = set(kills.loc[kills["protocol"] == SINGLE_FILE, "flow"])
    # two panels a row, those of single files in rows of their own since they have fewer arms
    lines = [
        part[at : at + 2]
        for part in ([f for f in flows if f not in single], [f for f in flows if f in single])
        for at in range(0, len(part), 2)
    ]
    deep = [max(len(stats.arms(kills[kills["flow"] == f])) for f in line) for line in lines]
    looks = _outcomes(kills["outcome"])
    with style():
        fig, axes = canvas(PAGE, 0.7 + sum(0.36 + 0.125 * n for n in deep), len(lines), 2,
                           gridspec_kw={"height_ratios": [n + 0.4 for n in deep]})  # fmt: skip
        for ax in axes.flat:
            ax.set_visible(False)
        for line, row in zip(lines, axes, strict=True):
            for ax, flow in zip(row, line, strict=False):
                ax.set_visible(True)
                _strips(ax, kills[kills["flow"] == flow], flow, named=ax is row[0])
        fig.supxlabel("place to die, in the order of the flow", fontsize=8)
        marks = _legend_of_outcomes(looks)
        if (~kills["expected"]).any():
            marks.append(Line2D([], [], ls="", marker="v", ms=5, color="black",
                                label="a promise was broken"))  # fmt: skip
        fig.legend(handles=marks, loc="outside upper center", ncols=min(len(marks), PER_LINE))
    return fig.tell(
        f"""What is recovered after a real SIGKILL at each place of each flow: before an operation,
        amid a write, after it. {of_places(*operations.tried(kills))} places tried (in each panel:
        of how many), n = {len(kills):,} kills; counts, so without intervals. White places were not
        tried; rows end with their flow. Where the colour changes for good, the save counts; a flow
        without a save has no such place. {_seeds(kills)} Single places are drawn wider than they
        are, the worse in front.""",
        f"""Strips of coloured stretches, one for each write mode and protocol, a panel a flow:
        {counted(kills["outcome"], operations.SHOWN)}. A promise was broken in
        {int((~kills["expected"]).sum())}.""",
        kills[["flow", "mode", "protocol", "seed", "place", "operation", "name", "position",
               "outcome", "expected"]],
    )  # fmt: skip


def _seeds(kills: pd.DataFrame) -> str:
    seeds = kills["seed"].nunique()
    return f"Of {seeds} seeds the worst outcome is shown." if seeds > 1 else ""


def _strips(ax: Axes, part: pd.DataFrame, flow: str, named: bool) -> None:
    """One flow: a row an arm."""
    rows, width = stats.arms(part), int(part["places"].max())
    for y, of in enumerate(rows):
        own = stats.arm(part, *of)
        ax.add_patch(Rectangle((0, y), int(own["places"].max()), 1, facecolor="none",
                               edgecolor="#999999", linewidth=0.4, zorder=4))  # fmt: skip
        for outcome, first, last in stretches(own):
            least = NARROWEST_LOSS if outcome in LOST else NARROWEST
            wide = max(last + 1 - first, width * least)
            left = np.clip((first + last + 1 - wide) / 2, 0, width - wide)
            shape = OUTCOMES[outcome]
            ax.add_patch(Rectangle((left, y), wide, 1, facecolor=shape.color, edgecolor="black",
                                   linewidth=0, hatch=shape.hatch if outcome in LOST else "",
                                   zorder=2 + operations.SHOWN.index(outcome) / 10))  # fmt: skip
        wrong = own.loc[~own["expected"], "place"].drop_duplicates()
        if len(wrong):  # an empty unclipped artist would have no extent to lay out
            ax.plot(wrong + 0.5, np.full(len(wrong), y + 0.1), "v", ms=4, color="black",
                    mec="white", mew=0.5, zorder=5, clip_on=False)  # fmt: skip
    ax.set(xlim=(0, width), ylim=(len(rows), 0))
    ax.set_yticks(np.arange(len(rows)) + 0.5, [_arm(*of) if named else "" for of in rows])
    ax.set_title(f"{flow}: {of_places(*operations.tried(part))}", pad=2)
    ax.tick_params(length=0, pad=1.5)
    ax.locator_params(axis="x", nbins=5)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.grid(False)


def stretches(own: pd.DataFrame) -> Iterator[tuple[str, int, int]]:
    """Of one arm of a flow, places side by side of one outcome: outcome, first and last place.

    Of several seeds the worst outcome counts. A place that was not tried ends a stretch.
    """
    rank = own["outcome"].map(operations.SHOWN.index)
    worst = rank.groupby(own["place"].astype(int)).max().sort_index()
    places = worst.index.to_series()
    breaks = (places.diff() != 1) | (worst.diff() != 0)
    for _, stretch in worst.groupby(breaks.cumsum()):
        yield operations.SHOWN[stretch.iloc[0]], int(stretch.index[0]), int(stretch.index[-1])


def figure_operation_kinds(kills: pd.DataFrame) -> PaperFigure:
    """Operation by arm: kills and what they left, coloured by the worst outcome."""
    _some(kills, "kill")
    table = operations.by_call(kills)
    calls = operations.ranked(table["operation"], operations.CALLS)
    columns = stats.arms(kills)
    with style():
        fig, axes = canvas(PAGE, 1.2 + 0.2 * len(calls))
        ax = axes[0][0]
        for row in table.itertuples():
            x, y = columns.index((row.mode, row.protocol)), calls.index(row.operation)
            _cell(ax, x, y, 1, OUTCOMES[row.worst], row.worst in LOST)
            text = f"{row.kept}/{row.lost_unacknowledged}/{row.lost}"
            _write(ax, x, y, text, _ALARM if row.unexpected else _BOX)
        for y, call in enumerate(calls):
            of = int(table.loc[table["operation"] == call, "kills"].sum())
            ax.annotate(f"{of:,}", (1, y + 0.5), (4, 0), xycoords=("axes fraction", "data"),
                        textcoords="offset points", va="center", fontsize=7)  # fmt: skip
        ax.annotate("kills", (1, 1), (4, 3), xycoords="axes fraction", fontsize=7,
                    textcoords="offset points")  # fmt: skip
        ends = [f"{len(stats.arm(kills, *of)):,} kills" for of in columns]
        names = [_arm(m.replace("_", "\n", 1), p, "\n") for m, p in columns]
        _frame(ax, [f"{name}\n{end}" for name, end in zip(names, ends, strict=True)], calls)
        marks = _legend_of_outcomes(_outcomes(table["worst"]))
        if table["unexpected"].any():
            marks.append(_patch(Look("#000000"), "on black: a promise was broken"))
        fig.legend(handles=marks, loc="outside lower center", ncols=min(len(marks), PER_LINE),
                   title="worst outcome", title_fontsize=7)  # fmt: skip
    losses = table.groupby(["mode", "protocol"], sort=False)[["lost", "kills"]].sum()
    told = "; ".join(f"{_arm(*of)} {of_places(*map(int, losses.loc[of]))}" for of in columns)
    return fig.tell(
        f"""Kills by the operation that they struck at and by write mode and protocol, all flows
        together: kept / lost unacknowledged / lost, coloured by the worst outcome. n =
        {len(kills):,} kills at {of_places(*operations.tried(kills))} places; counts, so without
        intervals. White: the mode has no such operation, or none was tried.""",
        f"""A table of coloured cells, operations as rows, modes and protocols as columns. Something
        acknowledged was lost, of the kills: {told}. A promise was broken in
        {int(table["unexpected"].sum())}.""",
        table,
    )  # fmt: skip


# -- what failed ----------------------------------------------------------------------------------


def figure_errors(failed: pd.DataFrame) -> PaperFigure:
    """Operation by fault in the atomic modes: shares of what came of it."""
    strict = operations.atomic(failed)
    _some(strict, "fault of an atomic mode")
    table = operations.by_fault(strict)
    calls = operations.ranked(table["operation"], operations.CALLS)
    faults = operations.ranked(table["fault"], errors.FAULTS)
    results = operations.ranked(strict["result"], errors.RESULTS)
    with style():
        fig, axes = canvas(PAGE, 1.2 + 0.2 * len(calls))
        ax = axes[0][0]
        for _, row in table.iterrows():
            x, y = faults.index(row["fault"]), calls.index(row["operation"])
            left = 0.0
            for result in (name for name in results if row[name]):
                share = row[result] / row["faults"]
                _cell(ax, x + left, y, share, RESULTS.get(result, UNKNOWN))
                left += share
            ax.add_patch(Rectangle((x, y), 1, 1, facecolor="none", edgecolor="white", linewidth=2,
                                   zorder=3))  # fmt: skip
            text = f"{row['wrong']} of {row['faults']}" if row["wrong"] else f"{row['faults']}"
            _write(ax, x, y, text, _ALARM if row["wrong"] else _BOX)
        names = [f.replace(" ", "\n").replace("NAMETOO", "NAME\nTOO") for f in faults]
        _frame(ax, names, calls)
        marks = [_patch(RESULTS.get(name, UNKNOWN), name) for name in results]
        if table["wrong"].any():
            marks.append(_patch(Look("#000000"), "on black: so many not as declared"))
        beside = len(marks) if set(results) <= set(RESULTS) and len(marks) < 6 else 3
        fig.legend(handles=marks, loc="outside lower center", ncols=beside)
    wrong = int(table["wrong"].sum())
    return fig.tell(
        f"""What comes of an operation that fails once, in the atomic modes, by operation and
        fault: the width of a colour is its share of the faults counted in the cell. n =
        {len(strict):,} faults, {wrong} of which did not come out as declared beforehand, or left
        what must not be; counts, so without intervals. White: such a fault cannot befall the
        operation, or was not tried.""",
        f"""A table of cells divided by colour, operations as rows and faults as columns:
        {counted(strict["result"], errors.RESULTS)}. Not as declared: {wrong}.""",
        table,
    )


def _cell(ax: Axes, x: float, y: float, wide: float, shape: Look, hatch: bool = True) -> None:
    ax.add_patch(Rectangle((x, y), wide, 1, facecolor=shape.color, linewidth=0, zorder=2,
                           edgecolor="black", hatch=shape.hatch if hatch else ""))  # fmt: skip


def _write(ax: Axes, x: int, y: int, text: str, box: dict) -> None:
    alarm = box is _ALARM
    ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7, bbox=box, zorder=5,
            color="white" if alarm else "black", fontweight="bold" if alarm else "normal",
            )  # fmt: skip


def _frame(ax: Axes, columns: list[str], rows: list[str]) -> None:
    """A table's axes: headings, and lines between the cells."""
    ax.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    ax.set_xticks(np.arange(len(columns)) + 0.5, columns)
    ax.set_yticks(np.arange(len(rows)) + 0.5, rows)
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.grid(False)
    ax.hlines(range(1, len(rows)), 0, len(columns), color="white", linewidth=1.5, zorder=4)
    ax.vlines(range(1, len(columns)), 0, len(rows), color="white", linewidth=1.5, zorder=4)
