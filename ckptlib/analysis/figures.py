"""The paper's five figures from trial tables; never draws a number that no table holds.

Each function takes tables as the registry describes them and returns a figure that knows its
caption (with n and the kind of interval), its alt text and the plotted data. `save` writes it.
The figures beyond the paper's are in :mod:`ckptlib.analysis.figures_more`, those of power loss in
:mod:`ckptlib.analysis.figures_power` and :mod:`ckptlib.analysis.figures_operations`; they are
offered here as well.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.lines import Line2D

from ckptlib.analysis import stats, tables
from ckptlib.analysis.export import SavedFigure, save
from ckptlib.analysis.figures_more import (
    figure_claims,
    figure_guidance,
    figure_outcomes,
    figure_process,
    figure_training,
)
from ckptlib.analysis.figures_operations import (
    figure_errors,
    figure_operation_kinds,
    figure_operations,
)
from ckptlib.analysis.figures_power import (
    figure_power_damage,
    figure_power_directories,
    figure_power_options,
    figure_power_policies,
    figure_power_survival,
)
from ckptlib.analysis.figures_power_story import figure_power_story
from ckptlib.analysis.style import (
    COLUMN,
    GREY,
    PAGE,
    Look,
    PaperFigure,
    canvas,
    errorbar,
    look,
    plain_log,
    reason_look,
    stacked,
    style,
)
from ckptlib.errors import InvalidInput

__all__ = [
    "PaperFigure",
    "SavedFigure",
    "figure1_latency_ecdf",
    "figure2_crash",
    "figure3_reasons",
    "figure4_corruption",
    "figure5_timeline",
    "figure_claims",
    "figure_errors",
    "figure_guidance",
    "figure_operation_kinds",
    "figure_operations",
    "figure_outcomes",
    "figure_power_damage",
    "figure_power_directories",
    "figure_power_options",
    "figure_power_policies",
    "figure_power_story",
    "figure_power_survival",
    "figure_process",
    "figure_training",
    "save",
    "style",
]


def figure1_latency_ecdf(latency: pd.DataFrame) -> PaperFigure:
    """Figure 1: distribution of save latency by mode, one panel a commit protocol."""
    protocols, modes = stats.in_order(latency["protocol"]), stats.in_order(latency["mode"])
    span = latency["latency_s"].min() * 900, latency["latency_s"].max() * 1100
    points, borrowed = [], set()
    with style():
        width = PAGE if len(protocols) > 1 else COLUMN
        fig, axes = canvas(width, 2.6, 1, len(protocols), sharex=True, sharey=True)
        for (ax, protocol), mode in product(zip(axes[0], protocols, strict=True), modes):
            own = protocol
            if stats.arm(latency, mode, protocol).empty:
                own = stats.baseline_protocol(latency, protocol, mode)
                borrowed.add(f"{mode} has no {protocol} commit and is shown there with {own}")
            values = stats.arm(latency, mode, own)["latency_s"] * 1e3
            sns.ecdfplot(x=values, ax=ax, color=look(mode).color, linestyle=look(mode).line)
            if own == protocol:
                found = stats.ecdf(values).rename(columns={"value": "latency_ms"})
                points.append(found.assign(mode=mode, protocol=protocol))
        for ax, protocol in zip(axes[0], protocols, strict=True):
            ax.set(title=protocol.replace("_", " "), xlabel="time of one save (ms)", ylim=(0, 1.02))
            plain_log(ax, "x", *span)
        axes[0][0].set_ylabel("share of saves")
        lines = [Line2D([], [], color=look(m).color, ls=look(m).line, label=m) for m in modes]
        fig.legend(handles=lines, loc="outside lower center", ncols=len(lines))
    arms = latency.groupby(["mode", "protocol"])
    runs = min(len(stats.run_matrix(stats.arm(latency, *arm))) for arm in stats.arms(latency))
    middle = arms["latency_s"].median() * 1e3
    told = ", ".join(f"{m} {p} {middle[m, p]:.2f} ms" for m, p in stats.arms(latency))
    stand_in = "".join(f"{sentence}. " for sentence in sorted(borrowed))
    return fig.tell(
        f"""Empirical distribution of the time of one save, by write mode and commit protocol; the
        axis is logarithmic. n = {arms.size().min()} saves in {runs} runs per arm, modes interleaved
        in random blocks. The curves show all saves and carry no interval, since saves within a run
        are not independent; intervals over runs are in Table 1. {stand_in}""",
        f"""Step curves of the cumulative share of saves over time in milliseconds, one curve a
        write mode. Medians: {told}.""",
        pd.concat(points, ignore_index=True),
    )


_METHOD = {"artifact": "injected, no process dies", "sigkill": "SIGKILL"}


def figure2_crash(crash: pd.DataFrame) -> PaperFigure:
    """Figure 2: groups in flight that are valid afterwards, by mode and crash point."""
    table = tables.table3_crash(crash)
    # The paper's condition keeps its own protocol label; its few arms share one panel.
    table["panel"] = np.where(
        table["method"] == "artifact",
        _METHOD["artifact"],
        table["method"].map(_METHOD).fillna(table["method"]) + ", " + table["protocol"],
    )
    panels = list(dict.fromkeys(table["panel"]))
    points = stats.in_order(table["crash_point"])
    with style():
        fig, axes = canvas(PAGE, 0.9 + 0.34 * len(points), 1, len(panels), sharey=True, sharex=True)
        for ax, panel in zip(axes[0], panels, strict=True):
            part = table[table["panel"] == panel]
            for mode in stats.in_order(table["mode"]):
                rows = part[part["mode"] == mode]
                shift = (list(stats.in_order(table["mode"])).index(mode) - 1.5) * 0.2
                y = [points.index(point) + shift for point in rows["crash_point"]]
                bounds = rows["rate_percent_low"], rows["rate_percent_high"]
                errorbar(ax, rows["rate_percent"], y, *bounds, look(mode), clip_on=False)
            theirs = part[part["published_trials"].notna()]
            rate = (theirs["published_valid"] / theirs["published_trials"] * 100).astype(float)
            y = [points.index(point) + 0.3 for point in theirs["crash_point"]]
            if len(rate):  # see style.errorbar
                ax.plot(rate, y, "D", mfc="none", mec=GREY, ms=3.5, clip_on=False)
            ax.set(title=panel, xlabel="groups valid (%)", xlim=(0, 100))
            ax.set_yticks(range(len(points)), [point.replace("_", " ") for point in points])
        axes[0][0].set_ylim(len(points) - 0.4, -0.6)
        _legend_of_modes(fig, stats.in_order(table["mode"]), "published")
    ns = _range(table["trials"])
    return fig.tell(
        f"""Groups in flight that the guard accepts after a crash, by crash point and write mode.
        Bars are 95% intervals (Wilson; exact where none or all are valid); n = {ns} trials
        a point. The paper's condition damages a group while no process dies; beside it a child
        process is killed. A SIGKILL leaves the page cache whole and says nothing about a power
        loss.""",
        "Dots with intervals, crash points as rows. "
        + " ".join(
            f"{panel}: {int(part['valid'].sum())} of {int(part['trials'].sum())} groups valid."
            for panel, part in table.groupby("panel", sort=False)
        ),
        table,
    )


def _range(counts: pd.Series) -> str:
    low, high = counts.min(), counts.max()
    return f"{low}" if low == high else f"{low} to {high}"


def _legend_of_modes(fig: PaperFigure, modes: list[str], published: str = "") -> None:
    marks = [
        Line2D([], [], color=look(m).color, marker=look(m).marker, ls="", label=m,
               markeredgecolor="black", markeredgewidth=0.5)
        for m in modes
    ]  # fmt: skip
    if published:
        marks.append(
            Line2D([], [], marker="D", ls="", mfc="none", mec=GREY, ms=3.5, label=published)
        )
    fig.legend(handles=marks, loc="outside lower center", ncols=len(marks))


def figure3_reasons(crash: pd.DataFrame) -> PaperFigure:
    """Figure 3: why groups were refused, by crash point."""
    refused = stats.refused(crash)
    if refused.empty:
        raise InvalidInput("no group was refused: there is no reason to draw")
    arms = [
        (method, mode)
        for method in stats.in_order(refused["method"])
        for mode in stats.in_order(refused.loc[refused["method"] == method, "mode"])
    ]
    points = stats.in_order(refused["crash_point"])
    kinds = list(refused["reason"].value_counts().index)  # the commonest first
    counts = (
        refused.groupby(["method", "mode", "crash_point", "reason"]).size().rename("groups")
    ).reset_index()
    with style():
        fig, axes = canvas(PAGE, 1.0 + 0.27 * len(points), 1, len(arms), sharey=True)
        for ax, (method, mode) in zip(axes[0], arms, strict=True):
            part = refused[(refused["method"] == method) & (refused["mode"] == mode)]
            bars = pd.crosstab(part["crash_point"], part["reason"])
            bars = bars.reindex(index=points, columns=kinds, fill_value=0)
            bars.index = [point.replace("_", " ") for point in points]
            stacked(ax, bars, {kind: reason_look(kind) for kind in kinds})
            title = f"{'SIGKILL' if method == 'sigkill' else 'injected'}\n{mode}"
            ax.set_title(title, fontsize=8 if len(arms) < 5 else 7)
            ax.set_xlabel("refused groups (%)")
        handles, labels = axes[0][0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    first = counts.groupby("reason")["groups"].sum().sort_values(ascending=False)
    told = ", ".join(f"{kind} {n}" for kind, n in first.items())
    return fig.tell(
        f"""Why the guard refused a group in flight, as shares of the refused groups of each crash
        point; the number at the end of a bar is their count, n = {len(refused)} in all. Counts, so
        without intervals. "Injected" is the paper's condition, in which no process dies.""",
        f"Stacked horizontal bars, one a crash point. Refused groups in all: {told}.",
        counts,
    )


def figure4_corruption(corruption: pd.DataFrame) -> PaperFigure:
    """Figure 4: detection rate by fault, over effective trials and as the paper counts."""
    table = tables.table4_corruption(corruption)
    table["of"] = table["effective"].where(table["fault"] != "none", table["trials"])
    every = []
    for _, row in table.iterrows():
        part = corruption[
            (corruption["kind"] == row["kind"]) & (corruption["fault"] == row["fault"])
        ]
        found = stats.proportion(int(part["detected"].fillna(False).sum()), len(part)).scaled(100)
        every.append((found.rate, found.low, found.high))
    table[["all_percent", "all_percent_low", "all_percent_high"]] = every
    kinds = stats.in_order(table["kind"])
    faults = stats.in_order(table["fault"])
    filled, hollow = Look("#0072B2", "o"), Look("#FFFFFF", "s")
    with style():
        fig, axes = canvas(PAGE, 1.0 + 0.36 * len(faults), 1, len(kinds), sharey=True, sharex=True)
        for ax, kind in zip(axes[0], kinds, strict=True):
            part = table[table["kind"] == kind]
            y = np.array([faults.index(fault) for fault in part["fault"]])
            bounds = part["rate_percent_low"], part["rate_percent_high"]
            errorbar(ax, part["rate_percent"], y - 0.22, *bounds, filled, clip_on=False,
                     label="trials that changed something")  # fmt: skip
            bounds = part["all_percent_low"], part["all_percent_high"]
            errorbar(ax, part["all_percent"], y, *bounds, hollow, clip_on=False,
                     label="all trials, as the paper counts")  # fmt: skip
            rate = (part["published_detected"] / 400 * 100).astype(float)
            ax.plot(rate, y + 0.22, "D", mfc="none", mec=GREY, ms=3.5, label="published",
                    clip_on=False)  # fmt: skip
            for place, row in zip(y, part.itertuples(), strict=True):
                ax.annotate(
                    f"{row.detected}/{row.of}", (1, place - 0.22), (6, 0), va="center",
                    xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=7,
                )  # fmt: skip
            ax.set(xlim=(0, 100), xlabel="detected (%)", title=f"checkpoint: {kind}")
            ax.set_yticks(range(len(faults)), faults)
        axes[0][0].set_ylim(len(faults) - 0.45, -0.55)
        handles, labels = axes[0][0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=3)
    no_op = int(table["no_op"].sum())
    return fig.tell(
        f"""Damage that was detected, by fault; n = {_range(table["trials"])}
        trials a fault. Filled: trials whose bytes changed in something that
        has meaning (for none: all trials, so false alarms), with 95% intervals that are exact, and
        one-sided where there was no exception. Hollow: all trials, as the paper counts them, Wilson
        or exact. {no_op} trials changed nothing and are counted apart.""",
        "Dots with intervals, faults as rows. "
        + " ".join(f"{r.kind} {r.fault}: {r.detected} of {r.of}." for r in table.itertuples()),
        table,
    )


_CALLS = ("mkdir", "create", "write", "flush", "replace", "rename", "flush_dir")


def figure5_timeline(timeline: pd.DataFrame) -> PaperFigure:
    """Figure 5: checkpoint events over I/O counters, with the operations on the same clock."""
    samples = timeline[(timeline["kind"] == "sample") & (timeline["unit"] == "B")]
    written = samples[samples["name"].str.contains("write")]
    calls = timeline[timeline["kind"] == "operation"]
    events = timeline[timeline["kind"] == "event"]
    saves = events[events["name"] == "checkpoint"]
    if written.empty or calls.empty:
        raise InvalidInput("the timeline needs samples of written bytes, and operations")
    modes = stats.in_order(calls["mode"])
    found = set(calls["name"])
    names = [name for name in _CALLS if name in found]
    with style():
        fig, axes = canvas(PAGE, 3.6, 2, 1, sharex=True, height_ratios=(1, 1.2))
        top, bottom = axes[0][0], axes[1][0]
        for (name, part), line in zip(written.groupby("name"), ("-", "--", "-."), strict=False):
            total = part["value"] / 1e6
            top.step(part["t_s"], total, where="post", color="black", ls=line, label=name)
        for mode in modes:
            shape = look(mode)
            own = calls[calls["mode"] == mode]
            y = [names.index(name) for name in own["name"]]
            bottom.scatter(own["t_s"], y, marker=shape.marker, s=12, color=shape.color, label=mode,
                           edgecolor="black", linewidth=0.3, zorder=3)  # fmt: skip
            for ax, at in product((top, bottom), saves.loc[saves["mode"] == mode, "t_s"]):
                ax.axvline(at, color=shape.color, ls=shape.line, lw=0.8, zorder=1)
        for ax, event in product(
            (top, bottom), events[events["name"] == "write_back"].itertuples()
        ):
            ax.axvspan(event.t_s, event.t_s + event.value, color="#CCCCCC", ec=GREY, zorder=0,
                       label="write-back afterwards")  # fmt: skip
        top.set_ylabel("written so far (MB)")
        top.set_ylim(0, written["value"].max() / 1e6 * 1.05 + 1e-3)
        bottom.set(xlabel="time since the start (s)", ylabel="operation")
        bottom.set_yticks(range(len(names)), names)
        bottom.set_ylim(len(names) - 0.5, -0.5)
        entries = {}
        for ax in (top, bottom):
            entries |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        fig.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=3)
    ticks = written["t_s"].nunique()
    return fig.tell(
        f"""Checkpoints over I/O counters. Top: bytes written since the start, {ticks} samples.
        Bottom: the operations that the library made, on the same clock; vertical lines mark the
        begin of a checkpoint in the line style of its mode, grey bands the writing back of what a
        mode had left in the page cache. n = {len(saves)} checkpoints of one run, no intervals.""",
        f"""Two panels over time. Above, counters of written bytes rising in steps; below, a mark
        for each of {len(calls)} file operations, grouped at the {len(saves)}
        checkpoints.""",
        timeline,
    )
