"""What power loss left: survival, where the losses lie, what was lost, what each flush buys.

Counts of crash states are printed as they are; what has an interval is a median over logs. A file
system that could not be run here is drawn as such, with the reason, and so is a whole figure: an
empty panel would read as if nothing had been lost.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D

from ckptlib.analysis import power, power_told, stats, tables_power
from ckptlib.analysis.style import (
    DAMAGE,
    GREY,
    OUTCOMES,
    PAGE,
    Look,
    PaperFigure,
    canvas,
    errorbar,
    look,
    stacked,
    style,
)

Skipped = Mapping[str, str] | None
#: Up to a colour on which black numbers can be read.
_SHADES = LinearSegmentedColormap.from_list("losses", ["#FFFFFF", "#F5C9A6", "#D55E00"])


def figure_not_run(what: str, skipped: Skipped, why: str = "") -> PaperFigure:
    """In place of a figure: that it was not made here, and why.

    Parameters
    ----------
    why : str
        Why there is nothing to show although something was run.
    """
    head = "Nothing to show" if why else "Not run here"
    so = "not run: " * bool(why)
    given = [f"{', '.join(n)}: {so}{r}" for r, n in power.reasons(skipped or {}).items()]
    lines = [why, *given] if why else given or ["Nothing that this would show was planned."]
    text = "\n".join(textwrap.fill(line, 96) for line in lines)
    with style():
        fig, axes = canvas(PAGE, 0.55 + 0.14 * (text.count("\n") + 1))
        ax = axes[0][0]
        ax.set(xticks=[], yticks=[], facecolor="#F2F2F2")
        ax.set_title(f"{head}: {what}", fontweight="bold")
        ax.spines[["top", "right"]].set_visible(True)
        ax.text(0.01, 0.5, text, transform=ax.transAxes, va="center", fontsize=8)
    told = " ".join(lines)
    return fig.tell(
        f"""{head}: {what}. n = 0 crash states are shown, so there is neither a result nor an
        interval; this does not say that nothing is lost. {told}""",
        f"A box with the words: {head}: {what}. {told}",
        tables_power.not_run(skipped or {"all": lines[0]}),
    )


def figure_power_survival(loss: pd.DataFrame, skipped: Skipped = None) -> PaperFigure:
    """The headline: survival of the newest acknowledged save by file system and write mode."""
    return _survival(loss, power.MAIN, skipped, "what survives on ext4, xfs and btrfs")


def figure_power_options(loss: pd.DataFrame, skipped: Skipped = None) -> PaperFigure:
    """The same for ext4 under its mount options."""
    names = [name for name in power.FILESYSTEMS if name.startswith("ext4")]
    return _survival(loss, names, skipped, "what survives under ext4's mount options")


def _survival(loss: pd.DataFrame, names, skipped: Skipped, what: str) -> PaperFigure:
    table = power.survival(loss[loss["filesystem"].isin(names)])
    left_out = {name: why for name, why in (skipped or {}).items() if name in names}
    if table.empty:
        return figure_not_run(what, left_out)
    logs = power.per_log(power.compared(loss))
    modes = stats.in_order(table["mode"])
    shown = [name for name in names if name in set(table["filesystem"]) | set(left_out)]
    with style():
        fig, axes = canvas(PAGE, 0.95 + 1.08 * len(shown), len(shown), 1, sharex=True)
        for ax, name in zip(axes[:, 0], shown, strict=True):
            part = table[table["filesystem"] == name].set_index("mode")
            ax.set(title=power.SAYS_FILESYSTEM.get(name, name), xlim=(0, 100))
            ax.set_yticks(range(len(modes)), modes)
            ax.set_ylim(len(modes) - 0.5, -0.5)
            if part.empty:
                _say_skipped(ax, left_out[name])
            for mode in (m for m in modes if m in part.index):
                row = part.loc[mode]
                own = logs[(logs["filesystem"] == name) & (logs["mode"] == mode)]
                _one_arm(ax, modes.index(mode), own["kept_percent"], row, look(mode))
                more = f"\n+ {row['refused_lost']} of {row['refused']} after repair"
                _count(ax, modes.index(mode), row["acknowledged"] - row["kept_newest"],
                       row["acknowledged"], row["logs"], more * bool(row["refused"]))  # fmt: skip
        axes[0][0].annotate("lost, of states (logs)", (1, 1), (10, 4), va="bottom", fontsize=8,
                            xycoords="axes fraction", textcoords="offset points")  # fmt: skip
        axes[-1][0].set_xlabel("crash states in which it is still there (%)")
        fig.suptitle("The power goes: is the newest acknowledged save still there?", x=0.01,
                     ha="left", fontsize=9, fontweight="bold")  # fmt: skip
        _legend_of_logs(fig, bool(table["refused"].sum()))
    states = int(table["states"].sum())
    return fig.tell(
        f"""What a power loss leaves of the newest acknowledged save, by file system and write
        mode: n = {states:,} crash states in {int(table["logs"].sum())} independently recorded logs.
        A small dot is one log, the share of its crash states in which that save, or a newer one,
        was found after the kernel's own recovery; the large mark is the median log with its 95%
        interval (order statistics; without a bar there are too few logs). On the right, lost of the
        states that had something to lose. States are counted and have no interval, since those of
        one log are not independent; which cuts were tried decides the share, so it is no rate of
        failure. States that the kernel refused to mount stand apart (after "+"): what was lost
        there after the file system's own offline repair. {_told_left_out(left_out)}""",
        "Dots with intervals, write modes as rows, a panel a file system. "
        + " ".join(_told(row) for row in table.itertuples())
        + _told_left_out(left_out),
        table,
    )


def _told(row) -> str:
    lost = power_told.of_states(row.acknowledged - row.kept_newest, row.acknowledged, row.logs)
    return f"{row.filesystem} {row.mode}: lost in {lost}."


def _told_left_out(left_out: Mapping[str, str]) -> str:
    return f" Not run here: {', '.join(left_out)}." if left_out else ""


def _say_skipped(ax: Axes, why: str) -> None:
    ax.set_facecolor("#F2F2F2")
    ax.grid(False)
    ax.text(0.02, 0.5, textwrap.fill(f"not run here: {why}", 70), va="center", fontsize=7,
            transform=ax.transAxes)  # fmt: skip


def _one_arm(ax: Axes, place: float, shares: pd.Series, row: pd.Series, shape: Look) -> None:
    """The median log with its interval; below, a small dot for each log, equal ones spread."""
    values = np.sort(shares.to_numpy(dtype=float))
    y = place + 0.25 + 0.15 * np.linspace(-1, 1, len(values)) * (len(values) > 1)
    ax.plot(values, y, "o", ms=3, color=shape.color, mec="black", mew=0.2, clip_on=False, zorder=2)
    bounds = ([row[f"kept_percent{end}"]] for end in ("_low", "_high"))
    errorbar(ax, [row["kept_percent"]], [place - 0.15], *bounds, shape, clip_on=False, ms=6)


def _count(ax: Axes, place: float, lost: int, of: int, logs: int, more: str = "") -> None:
    ax.annotate(
        f"{lost:,} of {of:,} ({logs}){more}", (1, place), (10, 0), va="center", fontsize=7,
        xycoords=("axes fraction", "data"), textcoords="offset points",
    )  # fmt: skip


def _legend_of_logs(fig: PaperFigure, refused: bool) -> None:
    dot = Line2D([], [], ls="", marker="o", ms=3, color=GREY, label="one log")
    mark = Line2D([], [], ls="-", marker="o", ms=6, mfc=GREY, mec="black", color="black",
                  label="median log, 95% interval")  # fmt: skip
    plus = Line2D([], [], ls="", marker="+", ms=5, color="black",
                  label="the kernel refused to mount: lost, of those, after a repair")  # fmt: skip
    handles = [dot, mark, plus] if refused else [dot, mark]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def figure_power_policies(loss: pd.DataFrame, skipped: Skipped = None) -> PaperFigure:
    """Where in the reordering the losses lie: lost of states by policy, mode and file system."""
    table = tables_power.table_policies(loss, skipped)
    if "policy" not in table:
        return figure_not_run("what is lost, by what of the late writes got through", skipped)
    names = power.ranked(table["filesystem"], power.FILESYSTEMS)
    columns = min(3, len(names))
    modes, policies = stats.in_order(table["mode"]), power.ranked(table["policy"], power.POLICIES)
    share = (table["lost"] / table["acknowledged"].where(table["acknowledged"] > 0)) * 100
    text = table["lost"].astype(str) + "/" + table["acknowledged"].astype(str)
    table = table.assign(lost_percent=share.astype(float), shown=text)
    rows = -(-len(names) // columns)
    with style():
        fig, axes = canvas(PAGE, 0.6 + 1.95 * rows, rows, columns, sharex=True, sharey=True)
        for ax, name in zip(axes.flat, names, strict=False):
            own = table[table["filesystem"] == name]
            wide = [own.pivot(index="policy", columns="mode", values=v).reindex(policies)[modes]
                    for v in ("lost_percent", "shown")]  # fmt: skip
            sns.heatmap(wide[0], annot=wide[1], fmt="", vmin=0, vmax=100, cmap=_SHADES,
                        ax=ax, cbar=False, linewidths=0.5, linecolor="#999999",
                        annot_kws={"fontsize": 7, "color": "black"})  # fmt: skip
            ax.set(title=name, xlabel="", ylabel="")
            ax.set_yticks(np.arange(len(policies)) + 0.5, policies, rotation=0)
            ax.set_xticks(np.arange(len(modes)) + 0.5, [m.replace("_", "\n", 1) for m in modes],
                          rotation=0)  # fmt: skip
            ax.tick_params(length=0)
            ax.grid(False)
            ax.set_facecolor("#E4E4E4")
        for place, ax in enumerate(axes.flat):
            ax.set_visible(place < len(names))
            ax.tick_params(labelbottom=place + columns >= len(names))  # nothing is below it
        bar = fig.colorbar(axes.flat[0].collections[0], ax=axes, fraction=0.03, pad=0.01)
        bar.set_label("lost (%)")
    kinds = table.groupby("policy", sort=False)[["lost", "acknowledged"]].sum().loc[policies]
    told = ", ".join(f"{name} {k} of {n}" for name, (k, n) in kinds.iterrows())
    return fig.tell(
        f"""States in which the newest acknowledged save was lost, of those that had one to lose, by
        what of the late writes reached the medium: nothing, all, a prefix, all but one, one alone,
        other subsets, and one write torn between sectors of 4096 or 512 bytes. n =
        {int(table["acknowledged"].sum()):,} crash states; counts, so without intervals;
        grey: no such state was tried. {_told_left_out(skipped or {})}""",
        f"Tables with shaded cells, policies as rows and write modes as columns, a panel a file "
        f"system. All modes together: {told}.{_told_left_out(skipped or {})}",
        table.drop(columns="shown"),
    )


def figure_power_damage(loss: pd.DataFrame, skipped: Skipped = None) -> PaperFigure:
    """What was lost and how: kinds of damage to the newest acknowledged checkpoint."""
    table = tables_power.table_damage(loss, skipped)
    if "lost" not in table:
        return figure_not_run("what was lost, and how", skipped)
    kinds = [name for name in table.columns if name in DAMAGE and table[name].sum()]
    modes = stats.in_order(table["mode"])
    sorts = list(dict.fromkeys(table["checkpoint"]))
    names = power.ranked(table["filesystem"], power.FILESYSTEMS)
    with style():
        fig, axes = canvas(PAGE, 0.7 + len(sorts) * (0.5 + 0.2 * len(names)), len(sorts),
                           len(modes), sharey=True, sharex=True)  # fmt: skip
        for row, sort in enumerate(sorts):
            for ax, mode in zip(axes[row], modes, strict=True):
                part = table[(table["checkpoint"] == sort) & (table["mode"] == mode)]
                part = part.set_index("filesystem").reindex(names).fillna({"lost": 0})
                stacked(ax, part[kinds].fillna(0).astype(float), DAMAGE)
                ax.set_title(f"{mode}, {sort}s")
                if not part["lost"].sum():
                    states = int(part["acknowledged"].sum())
                    words = f"nothing lost\nin {states:,} states"
                    ax.text(0.5, 0.5, words, ha="center", va="center", transform=ax.transAxes,
                            backgroundcolor="white")  # fmt: skip
                if row == len(sorts) - 1:
                    ax.set_xlabel("of the losses (%)")
        _legend_of(fig, kinds)
    totals = ", ".join(f"{name} {int(table[name].sum())}" for name in kinds) or "nothing was lost"
    return fig.tell(
        f"""What had become of the newest acknowledged checkpoint where it was lost, as shares of
        the losses; the number at the end of a bar is their count, n = {int(table["lost"].sum()):,}
        losses in {int(table["acknowledged"].sum()):,} crash states that had something to lose.
        Counts, so without intervals. Stale content: whole bytes of an older save under that name.
        {_told_left_out(skipped or {})}""",
        f"Stacked horizontal bars, a bar a file system, a panel for each write mode and kind of "
        f"checkpoint. In all: {totals}.{_told_left_out(skipped or {})}",
        table,
    )


def _legend_of(fig: PaperFigure, kinds: list[str]) -> None:
    handles, labels = fig.axes[0].get_legend_handles_labels()
    if kinds:
        fig.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def figure_power_directories(loss: pd.DataFrame, skipped: Skipped = None) -> PaperFigure:
    """What each directory flush buys: losses of atomic_dirsync with one of them left out."""
    table = power.by_directory(loss)
    if table.empty:
        return figure_not_run("what each directory flush buys", skipped)
    logs = power.per_log(power.ablation(loss))
    names = power.ranked(table["filesystem"], power.FILESYSTEMS)
    arms = list(dict.fromkeys(table[["protocol", "omitted"]].itertuples(index=False, name=None)))
    labels = [f"{p.replace('_', ' ')}, {power.SAYS_OMITTED.get(o, o)}" for p, o in arms]
    widest = max(10, 10 * np.ceil((100 - logs["kept_percent"].min()) / 10 + 0.2))
    with style():
        fig, axes = canvas(PAGE, 0.9 + 0.23 * len(arms), 1, len(names), sharey=True, sharex=True)
        for ax, name in zip(axes[0], names, strict=True):
            for place, (protocol, omitted) in enumerate(arms):
                row = table[(table["filesystem"] == name) & (table["protocol"] == protocol)
                            & (table["omitted"] == omitted)]  # fmt: skip
                own = logs[(logs["filesystem"] == name) & (logs["protocol"] == protocol)
                           & (logs["omitted"] == omitted)]  # fmt: skip
                if row.empty:
                    continue
                lost, of = row["acknowledged"] - row["kept_newest"], row["acknowledged"]
                shape = OUTCOMES["lost_acknowledged"]
                percent = 100 * lost.iloc[0] / max(of.iloc[0], 1)
                ax.barh(place, percent, height=0.62, zorder=2, color=shape.color,
                        hatch=shape.hatch, edgecolor="black", lw=0.5)  # fmt: skip
                ax.plot(100 - own["kept_percent"], [place] * len(own), "o", ms=3, zorder=3,
                        color="black", mec="white", mew=0.3, clip_on=False)  # fmt: skip
                _count(ax, place, lost.iloc[0], of.iloc[0], row["logs"].iloc[0])
            ax.set(title=name, xlabel="lost (%)", xlim=(0, min(widest, 100)))
            ax.set_yticks(range(len(arms)), labels)
            ax.set_ylim(len(arms) - 0.4, -0.6)
            ax.grid(False, axis="y")
    return fig.tell(
        f"""States in which atomic_dirsync lost the newest acknowledged save although it was told
        that everything was flushed, while the flush of one directory was left out on purpose. Bars:
        share of the states; dots: single logs; on the right, lost of states (logs). n =
        {int(table["acknowledged"].sum()):,} crash states in {int(table["logs"].sum())} logs;
        counts, so without intervals; states that the kernel refused to mount are left out. That a
        file system keeps a name without a flush here is its own doing, and promised by nobody.
        {_told_left_out(skipped or {})}""",
        "Horizontal bars, a row for each directory flush that was left out, a panel a file system. "
        + " ".join(
            f"{r.filesystem} {r.protocol}, {power.SAYS_OMITTED.get(r.omitted, r.omitted)}: "
            f"{r.acknowledged - r.kept_newest} of {r.acknowledged}."
            for r in table.itertuples()
        ),
        table,
    )
