"""One look for every figure: colours, marks, sizes; it never touches matplotlib's global state.

The colours are Okabe and Ito's, chosen so that the three modes also differ in lightness; a line
style, a marker and a hatch per mode carry the same information in grey.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

COLUMN, PAGE = 3.35, 6.9  # inches: one column (85 mm) and a full page (175 mm)
GREY = "#666666"


@dataclass(frozen=True)
class Look:
    """How one mode or category is drawn."""

    color: str
    marker: str = "o"
    line: str | tuple = "-"
    hatch: str = ""


MODES = {
    "unsafe": Look("#D55E00", "s", ":", "...."),
    "atomic_nodirsync": Look("#56B4E9", "^", "--", "////"),
    "atomic_dirsync": Look("#0072B2", "o", "-", ""),
}
OUTCOMES = {
    "kept": Look("#0072B2"),
    "lost_unacknowledged": Look("#56B4E9", hatch="...."),
    "lost_acknowledged": Look("#E69F00", hatch="////"),
    "unrecoverable": Look("#D55E00", hatch="xxxx"),
    "mixed": Look("#CC79A7", hatch="++++"),
    "false_accept": Look("#000000"),
}
REASONS = {
    "size mismatch": Look("#0072B2"),
    "missing COMMIT": Look("#E69F00", hatch="////"),
    "manifest error": Look("#56B4E9", hatch="...."),
    "missing part": Look("#CC79A7", hatch="xxxx"),
    "digest mismatch": Look("#F0E442", hatch="++++"),
}
DAMAGE = {
    "absent directory": Look("#0072B2", hatch="\\\\\\\\"),
    "missing name": Look("#E69F00", hatch="////"),
    "zero length": Look("#F0E442", hatch="++++"),
    "torn content": Look("#D55E00", hatch="xxxx"),
    "stale content": Look("#56B4E9", hatch="...."),
    "not mounted": Look("#000000"),
    "other": Look("#FFFFFF", hatch="OO"),
}
VERDICTS = {
    "reproduced": Look("#0072B2", "o"),
    "differs": Look("#D55E00", "X"),
    "not_comparable": Look("#FFFFFF", "D"),
}

RC = {
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # TrueType: text stays text for publishers and screen readers
    "ps.fonttype": 42,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine has it
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.6,
    "figure.constrained_layout.use": True,
}


def style() -> AbstractContextManager:
    """The look as a context: `with style(): ...`; outside it matplotlib is as it was."""
    return mpl.rc_context({**mpl.rcParamsDefault, "backend": mpl.rcParams["backend"], **RC})


class PaperFigure(Figure):
    """A figure that carries what belongs to it in print.

    Attributes
    ----------
    caption : what is shown, with n and how the intervals were made
    alt : the same for somebody who cannot see it
    data : the plotted numbers
    """

    caption: str = ""
    alt: str = ""
    data: pd.DataFrame

    def tell(self, caption: str, alt: str, data: pd.DataFrame) -> PaperFigure:
        """Attach caption, alt text and plotted data; returns the figure itself."""
        self.caption, self.alt, self.data = " ".join(caption.split()), " ".join(alt.split()), data
        return self


def canvas(width: float, height: float, rows: int = 1, columns: int = 1, **subplots):
    """A new figure and its axes as an array (rows, columns); call it inside `style()`."""
    figure = PaperFigure(figsize=(width, height))
    axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    return figure, axes


def look(mode: str) -> Look:
    """The look of a write mode; an unknown one is grey."""
    return MODES.get(mode, Look(GREY, "v", "-."))


def plain_log(axes: Axes, which: str, low: float, high: float) -> None:
    """A logarithmic axis ("x" or "y") from `low` to `high`, labelled with plain numbers."""
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    axis = getattr(axes, f"{which}axis")
    span = np.log10(high / low)
    steps = (1,) if span > 2.5 else (1, 2, 5) if span > 0.8 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    axis.set_major_locator(LogLocator(subs=steps, numticks=30))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def reason_look(reason: str) -> Look:
    """The look of a reason for refusing a group; a rare one is white with a hatch."""
    return REASONS.get(reason, Look("#FFFFFF", hatch="OO"))


def errorbar(axes: Axes, x, y, low, high, shape: Look, **kwargs) -> None:
    """Horizontal estimates with intervals; a missing bound leaves the marker alone."""
    x, low, high = (np.asarray(v, dtype=float) for v in (x, low, high))
    if not x.size:
        return  # an empty unclipped artist would have no extent to lay out
    spread = np.clip(np.vstack([x - low, high - x]), 0, None)
    axes.errorbar(
        x, y, xerr=np.nan_to_num(spread), fmt=shape.marker, color=shape.color,
        markeredgecolor="black", markeredgewidth=0.5, elinewidth=1.0, capsize=2, ecolor="black",
        zorder=3, **kwargs,
    )  # fmt: skip


def stacked(axes: Axes, counts: pd.DataFrame, looks: dict[str, Look]) -> None:
    """Horizontal bars of shares in percent, one row of `counts` a bar, its n at the right end."""
    totals = counts.sum(axis=1)
    shares = counts.div(totals.where(totals > 0, 1), axis=0) * 100
    left = np.zeros(len(counts))
    places = np.arange(len(counts))
    for name in counts.columns:
        axes.barh(
            places, shares[name], left=left, height=0.68, color=looks[name].color,
            hatch=looks[name].hatch, edgecolor="black", linewidth=0.5, label=name.replace("_", " "),
        )  # fmt: skip
        left += shares[name].to_numpy()
    for place, total in zip(places, totals, strict=True):
        axes.annotate(
            f"{int(total)}", (1, place), (2, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", fontsize=7,
        )  # fmt: skip
    axes.set(xlim=(0, 100), xticks=(0, 50, 100))
    axes.set_yticks(places, [str(name) for name in counts.index])
    axes.set_ylim(len(counts) - 0.4, -0.6)
    axes.grid(False, axis="y")
