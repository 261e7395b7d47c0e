"""Figures of kills at every operation and of every operation failing."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

from ckptlib.analysis import operations
from ckptlib.analysis.style import OUTCOMES, PAGE, PaperFigure, canvas, style
from ckptlib.experiments.flows import FLOWS
from ckptlib.faults import errors

RESULTS = {
    errors.ABSORBED: "#0072B2",
    errors.RETRIED: "#56B4E9",
    errors.REMARKED: "#F0E442",
    errors.REFUSED: "#E69F00",
    errors.COMMITTED: "#CC79A7",
}
OTHER = "#000000"


def _arm(mode: str, protocol: str) -> str:
    return f"{mode}, {protocol.replace('_', ' ')}"


def figure_operations(kills: pd.DataFrame) -> PaperFigure:
    """Every place to die in the order of its flow, coloured by what was recovered."""
    flows = operations.ranked(kills["flow"], FLOWS)
    looks = [name for name in operations.SHOWN if (kills["outcome"] == name).any()]
    heights = [len(operations.arms(kills[kills["flow"] == flow])) for flow in flows]
    shades = ListedColormap([OUTCOMES[name].color for name in looks])
    with style():
        fig, axes = canvas(PAGE, 0.9 + 0.14 * sum(heights) + 0.3 * len(flows), len(flows), 1,
                           gridspec_kw={"height_ratios": heights})  # fmt: skip
        for ax, flow in zip(axes[:, 0], flows, strict=True):
            part = kills[kills["flow"] == flow]
            rows = operations.arms(part)
            width = int(part["places"].max())
            cells = np.full((len(rows), width), np.nan)
            for y, (mode, protocol) in enumerate(rows):
                own = part[(part["mode"] == mode) & (part["protocol"] == protocol)]
                # where seeds differ, the worst is shown
                for place, outcomes in own.groupby("place")["outcome"]:
                    cells[y, place] = max(looks.index(name) for name in outcomes)
            edges = np.arange(width + 1), np.arange(len(rows) + 1)
            ax.pcolormesh(*edges, np.ma.masked_invalid(cells), cmap=shades, vmin=-0.5,
                          vmax=len(looks) - 0.5, rasterized=True)  # fmt: skip
            ax.set_yticks(np.arange(len(rows)) + 0.5, [_arm(*row) for row in rows], fontsize=7)
            ax.set(ylim=(len(rows), 0), xlim=(0, width))
            ax.set_title(flow, fontsize=7, pad=2)
            ax.tick_params(length=0, labelsize=7, pad=1.5)
            ax.grid(False)
        axes[-1][0].set_xlabel("place to die, in the order of the flow")
        handles = [Patch(facecolor=OUTCOMES[name].color, edgecolor="black", linewidth=0.5,
                         label=name.replace("_", " ")) for name in looks]  # fmt: skip
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    table = operations.by_flow(kills)
    places, tried = int(table["places"].sum()), int(table["tried"].sum())
    counts = kills["outcome"].value_counts()
    told = ", ".join(f"{int(counts[name]):,} {name.replace('_', ' ')}" for name in looks)
    return fig.tell(
        f"""What is recovered after a real SIGKILL at each place of each flow: before an operation,
        amid a write, after it. {tried:,} of {places:,} places tried, n = {len(kills):,} kills;
        counts, so without intervals. White places were not tried, or the flow is shorter. Where
        the colour changes for good, the save counts.""",
        f"Strips of coloured cells, one for each write mode and protocol, a panel a flow: {told}.",
        kills[["flow", "mode", "protocol", "place", "operation", "name", "position", "outcome"]],
    )


def figure_operation_kinds(kills: pd.DataFrame) -> PaperFigure:
    """Operation by arm: kills and losses, coloured by the worst outcome."""
    table = operations.by_call(kills)
    calls = operations.ranked(table["operation"], operations.CALLS)
    columns = operations.arms(kills)
    looks = [name for name in operations.SHOWN if (table["worst"] == name).any()]
    with style():
        fig, axes = canvas(PAGE, 1.1 + 0.19 * len(calls))
        ax = axes[0][0]
        for row in table.itertuples():
            x, y = columns.index((row.mode, row.protocol)), calls.index(row.operation)
            face = OUTCOMES[row.worst]
            ax.add_patch(_cell(x, y, face.color, face.hatch if row.lost else ""))
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            ax.text(x + 0.5, y + 0.5, f"{row.lost}/{row.kills}", ha="center", va="center",
                    fontsize=7, bbox=box)  # fmt: skip
        ax.set(xlim=(0, len(columns)), ylim=(len(calls), 0))
        ax.set_xticks(np.arange(len(columns)) + 0.5,
                      [f"{m.replace('_', chr(10), 1)}\n{p.replace('_', ' ')}" for m, p in columns],
                      fontsize=7)  # fmt: skip
        ax.set_yticks(np.arange(len(calls)) + 0.5, calls)
        ax.tick_params(length=0)
        ax.grid(False)
        handles = [Patch(facecolor=OUTCOMES[name].color, edgecolor="black", linewidth=0.5,
                         label=name.replace("_", " ")) for name in looks]  # fmt: skip
        fig.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)),
                   title="worst outcome", title_fontsize=7)  # fmt: skip
    lost = table.groupby("mode", sort=False)[["lost", "kills"]].sum()
    told = ", ".join(f"{mode} {k:,} of {n:,}" for mode, (k, n) in lost.iterrows())
    return fig.tell(
        f"""Kills by the operation that they struck at and by write mode and protocol, all flows
        together: lost / kills, coloured by the worst outcome. n = {len(kills):,} kills; counts,
        so without intervals.""",
        f"A table of coloured cells, operations as rows, modes and protocols as columns. Something "
        f"acknowledged was lost after: {told} kills.",
        table,
    )


def _cell(x: float, y: float, color: str, hatch: str = ""):
    return Rectangle((x, y), 1, 1, facecolor=color, hatch=hatch, edgecolor="white", linewidth=0.8)


def figure_errors(failed: pd.DataFrame) -> PaperFigure:
    """Operation by fault in the atomic modes: shares of what came of it."""
    atomic = failed[failed["mode"] != "unsafe"]
    calls = operations.ranked(atomic["operation"], operations.CALLS)
    faults = [fault for fault in errors.FAULTS if (atomic["fault"] == fault).any()]
    results = operations.ranked(atomic["result"], RESULTS)
    with style():
        fig, axes = canvas(PAGE, 1.3 + 0.2 * len(calls))
        ax = axes[0][0]
        for (call, fault), own in atomic.groupby(["operation", "fault"]):
            x, y, left = faults.index(fault), calls.index(call), 0.0
            for result in results:
                share = float((own["result"] == result).mean())
                if share:
                    cell = _cell(x + left, y, RESULTS.get(result, OTHER))
                    cell.set_width(share)
                    cell.set_linewidth(0)
                    ax.add_patch(cell)
                left += share
            wrong = int((~own["as_declared"]).sum())
            text = f"{len(own)}" if not wrong else f"{wrong} of {len(own)} otherwise"
            ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7,
                    bbox={"facecolor": "white" if not wrong else "#FF6666", "edgecolor": "none",
                          "pad": 0.6})  # fmt: skip
        for x in range(len(faults) + 1):
            ax.axvline(x, color="white", lw=1.5)
        for y in range(len(calls) + 1):
            ax.axhline(y, color="white", lw=1.5)
        ax.set(xlim=(0, len(faults)), ylim=(len(calls), 0))
        names = [f.replace(" ", "\n").replace("NAMETOO", "NAME\nTOO") for f in faults]
        ax.set_xticks(np.arange(len(faults)) + 0.5, names, fontsize=7)
        ax.set_yticks(np.arange(len(calls)) + 0.5, calls)
        ax.tick_params(length=0)
        ax.grid(False)
        handles = [Patch(facecolor=RESULTS.get(name, OTHER), edgecolor="black", linewidth=0.5,
                         label=name) for name in results]  # fmt: skip
        fig.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)))
    counts = atomic["result"].value_counts()
    told = ", ".join(f"{int(counts[name]):,} {name}" for name in results)
    wrong = int((~atomic["as_declared"]).sum())
    return fig.tell(
        f"""What comes of an operation that fails once, in the atomic modes, by operation and
        fault: the width of a colour is its share of the faults counted in the cell. n =
        {len(atomic):,} faults, {wrong} otherwise than declared beforehand; counts, so without
        intervals. Empty: such a fault cannot befall the operation.""",
        f"A table of cells divided by colour, operations as rows and faults as columns: {told}.",
        operations.by_fault(atomic),
    )
