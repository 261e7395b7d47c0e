"""Figures beyond the paper's five; never draws a number that no table holds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from ckptlib.analysis import stats, tables
from ckptlib.analysis.intervals import DEFAULT, Resampling
from ckptlib.analysis.style import (
    COLUMN,
    GREY,
    OUTCOMES,
    PAGE,
    VERDICTS,
    Look,
    PaperFigure,
    canvas,
    errorbar,
    look,
    plain_log,
    stacked,
    style,
)


def figure_outcomes(crash: pd.DataFrame) -> PaperFigure:
    """What recovery found after a SIGKILL, by mode, protocol and crash point."""
    killed = crash[crash["method"] == "sigkill"]
    table = tables.outcomes(killed)
    modes, protocols = stats.in_order(table["mode"]), stats.in_order(table["protocol"])
    shown = [name for name in tables.OUTCOMES if table[name].sum()]
    points = {
        protocol: stats.in_order(table.loc[table["protocol"] == protocol, "crash_point"])
        for protocol in protocols
    }
    heights = [len(own) + 2.2 for own in points.values()]
    with style():
        fig, axes = canvas(
            PAGE, 0.5 + 0.22 * sum(heights), len(protocols), len(modes), height_ratios=heights
        )
        for (row, protocol), (column, mode) in product(enumerate(protocols), enumerate(modes)):
            ax = axes[row][column]
            part = stats.arm(table, mode, protocol).set_index("crash_point")
            bars = part[shown].reindex(points[protocol], fill_value=0)
            bars.index = [point.replace("_", " ") for point in bars.index]
            if part.empty:  # unsafe has no batched commit
                ax.set_yticks(range(len(bars)), bars.index)
                ax.set_ylim(len(bars) - 0.4, -0.6)
                ax.text(0.5, 0.5, f"no {protocol} commit", ha="center", transform=ax.transAxes)
                ax.grid(False)
                ax.tick_params(bottom=False, labelbottom=False)
            else:
                stacked(ax, bars, OUTCOMES)
            ax.set_title(f"{mode}, {protocol.replace('_', ' ')}")
            ax.tick_params(labelleft=column == 0)
            if row == len(protocols) - 1:
                ax.set_xlabel("trials (%)")
        handles, labels = axes[0][0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    totals = ", ".join(f"{name.replace('_', ' ')} {int(table[name].sum())}" for name in shown)
    return fig.tell(
        f"""What recovery found after a real SIGKILL at each point of a save, by write mode and
        commit protocol (single file: one file that every save overwrites; none: the control, in
        which nothing is killed). Counts at the end of the bars, n = {len(killed)} trials in all;
        the bars carry no interval. Losing a save that was never acknowledged is legal.""",
        f"Stacked horizontal bars, one a crash point, a panel for each arm. In all: {totals}.",
        table,
    )


def figure_process(
    process: pd.DataFrame, latency: pd.DataFrame, how: Resampling = DEFAULT
) -> PaperFigure:
    """The paper's whole-process time per checkpoint beside the time of the save itself."""
    summary = stats.latency_summary(latency, (50,), how)
    modes = stats.in_order(process["mode"])
    rows = []
    for mode in modes:
        own = stats.arm(process, mode)
        against = stats.baseline_protocol(latency, "per_file", mode)
        save = summary[(summary["mode"] == mode) & (summary["protocol"] == against)].iloc[0]
        whole = stats.quantile_interval(own["per_checkpoint_s"], 50)
        inner = stats.quantile_interval((own["total_s"] - own["import_s"]) / own["saves"], 50)
        rows += [
            (mode, "whole process / saves", whole.rate, whole.low, whole.high, whole.n),
            (mode, "the same, start and imports taken off", inner.rate, inner.low, inner.high,
             inner.n),
            (mode, "the save itself", save.estimate, save.low, save.high, save.n_runs),
        ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["mode", "measured_as", "p50_s", "low_s", "high_s", "n"])
    shapes = {
        "whole process / saves": Look("#E69F00", "s"),
        "the same, start and imports taken off": Look("#56B4E9", "^"),
        "the save itself": Look("#0072B2", "o"),
    }
    with style():
        fig, axes = canvas(PAGE, 2.0)
        ax = axes[0][0]
        for shift, (name, shape) in zip((-0.22, 0, 0.22), shapes.items(), strict=True):
            part = table[table["measured_as"] == name]
            y = np.arange(len(part)) + shift
            ms = part[["p50_s", "low_s", "high_s"]] * 1e3
            errorbar(ax, ms["p50_s"], y, ms["low_s"], ms["high_s"], shape, label=name)
        ax.set(xlabel="median time per checkpoint (ms)")
        spread = table[["p50_s", "low_s", "high_s"]]
        plain_log(ax, "x", spread.min(axis=None) * 900, spread.max(axis=None) * 1100)
        ax.set_yticks(range(len(modes)), modes)
        ax.set_ylim(len(modes) - 0.5, -0.5)
        fig.legend(loc="outside lower center", ncols=3)
    first, last = (table.loc[table["measured_as"] == name] for name in list(shapes)[::2])
    factor = first["p50_s"].to_numpy() / last["p50_s"].to_numpy()
    told = ", ".join(f"{mode} {f:.1f}" for mode, f in zip(modes, factor, strict=True))
    return fig.tell(
        f"""Median time per checkpoint measured in three ways; the axis is logarithmic. 95%
        intervals: order statistics over n = {first["n"].min()} processes, bootstrap over
        {last["n"].min()} runs for the save itself; a mark without a bar has too few values for one.
        Whole process over save: {told}.""",
        f"Dots with intervals, write modes as rows. Whole process over the save itself: {told}.",
        table,
    )


def figure_training(training: pd.DataFrame, curve: pd.DataFrame | None = None) -> PaperFigure:
    """Share of training spent in saves, and loss with and without a kill where a curve is given."""
    saving = training[(training["saves"].fillna(0) > 0) & (training["arm"] == "uninterrupted")]
    modes = stats.in_order(saving["mode"])
    panels = 1 if curve is None else 2
    with style():
        fig, axes = canvas(PAGE if panels == 2 else COLUMN, 2.3, 1, panels)
        ax = axes[0][-1]
        for place, mode in enumerate(modes):
            shares = stats.arm(saving, mode)["share"].astype(float) * 100
            shape = look(mode)
            y = place + np.linspace(-0.15, 0.15, len(shares))
            ax.plot(shares, y, shape.marker, color=shape.color, mec="black", mew=0.5)
            ax.plot(shares.median(), place, "|", color="black", ms=16, mew=1.4)
        ax.set(xlabel="share of training time in saves (%)")
        ax.set_xlim(left=0)
        ax.set_yticks(range(len(modes)), [mode.replace("_", "\n", 1) for mode in modes])
        ax.set_ylim(len(modes) - 0.5, -0.5)
        if curve is not None:
            _loss(axes[0][0], curve)
    compared = training["bit_identical"].dropna().astype(bool)
    told = ", ".join(
        f"{mode} {stats.arm(saving, mode)['share'].astype(float).median() * 100:.2g}%"
        for mode in modes
    )
    same = f"{int(compared.sum())} of {len(compared)} killed and recovered runs"
    text = f"""Share of training time spent in saves; a mark a run, n = {len(saving)} runs, the bar
        is their median ({told}), no interval. {same} ended bit-identical with the uninterrupted
        run of the same seed."""
    if curve is not None:
        text = f"""Left: loss of one seed, left alone (uninterrupted), and killed and recovered
        (killed); where recovery is exact, the lines coincide. Right: {text}"""
    left = "" if curve is None else "Left: the falling loss of two runs of one seed. Right: "
    return fig.tell(
        text,
        f"{left}Marks of the share of training spent in saves by write mode; medians {told}. "
        f"{same} were bit-identical.",
        saving[["mode", "arm", "seed", "train_s", "save_s", "share"]],
    )


def _loss(ax, curve: pd.DataFrame) -> None:
    seed = curve["seed"].min()
    mode = stats.in_order(m for m in curve["mode"] if m)[-1]
    own = curve[(curve["seed"] == seed) & (curve["mode"] == mode)]
    shapes = {"uninterrupted": ("#56B4E9", "-", 2.6), "killed": ("black", "--", 0.9)}
    for arm, (color, line, width) in shapes.items():
        part = own[own["arm"] == arm].sort_values("step")
        ax.plot(part["step"], part["loss"], color=color, ls=line, lw=width, label=arm)
    ax.set(xlabel="optimizer step", ylabel="loss (nat)", yscale="log")
    ax.legend(loc="upper right", title=f"{mode}, seed {seed}")


def figure_guidance(guidance: pd.DataFrame, target_share: float) -> PaperFigure:
    """Share of the time spent in saves against the checkpoint interval, by arm.

    Parameters
    ----------
    guidance : as :func:`ckptlib.analysis.guidance.guidance` gives it
    target_share : in (0, 1), drawn as a horizontal line
    """
    first = min(1.0, guidance["smallest_interval_s"].min() / 2)
    interval = np.geomspace(first, 3600, 60)
    arms = list(guidance[["mode", "protocol"]].itertuples(index=False, name=None))
    protocols = stats.in_order(guidance["protocol"])
    points = []
    with style():
        fig, axes = canvas(PAGE, 2.6, 1, len(protocols), sharex=True, sharey=True)
        for mode, protocol in arms:
            ax = axes[0][protocols.index(protocol)]
            row = stats.arm(guidance, mode, protocol).iloc[0]
            shape = look(mode)
            for name, width in (("save_p50_ms", 1.4), ("save_p99_ms", 0.7)):
                share = row[name] / 1e3 / interval * 100
                q = name.removeprefix("save_").removesuffix("_ms")
                ax.plot(interval, share, color=shape.color, ls=shape.line, lw=width)
                points.append(pd.DataFrame({
                    "mode": mode, "protocol": protocol, "quantile": q,
                    "interval_s": interval, "share_percent": share,
                }))  # fmt: skip
            at = row["smallest_interval_s"]
            if interval[0] <= at <= interval[-1]:
                ax.plot(at, target_share * 100, shape.marker, color=shape.color, mec="black")
        for ax, protocol in zip(axes[0], protocols, strict=True):
            ax.axhline(target_share * 100, color=GREY, lw=0.8)
            plain_log(ax, "x", interval[0], interval[-1])
            plain_log(ax, "y", min(target_share, 1e-4) * 10, max(20, target_share * 200))
            ax.set_title(f"protocol {protocol}")
            ax.set_xlabel("time between checkpoints (s)")
        axes[0][0].set_ylabel("share of time in saves (%)")
        modes = stats.in_order(guidance["mode"])
        handles = [Line2D([], [], color=look(m).color, ls=look(m).line, label=m) for m in modes]
        handles += [
            Line2D([], [], color="black", lw=1.4, label="p50"),
            Line2D([], [], color="black", lw=0.7, label="p99"),
            Line2D([], [], color=GREY, lw=0.8, label=f"target {target_share:.2%}"),
        ]
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    told = ", ".join(
        f"{row.mode} {row.protocol} {row.smallest_interval_s:.3g} s"
        for row in guidance.itertuples()
    )
    return fig.tell(
        f"""What checkpoints cost here, by the time between them; both axes logarithmic. Thick:
        median save; thin: p99; the horizontal line is the target of {target_share:.2%}. n =
        {guidance["n_saves"].min()} saves in {guidance["n_runs"].min()} runs per arm; the lines
        follow from Table 1, where the intervals are.""",
        f"Falling straight lines of cost over interval. The p99 meets the target from: {told}.",
        pd.concat(points, ignore_index=True),
    )


def figure_claims(claims: pd.DataFrame) -> PaperFigure:
    """Every claim's verdict as one mark, a row for each source in the paper."""
    sources = list(dict.fromkeys(claims["source"]))
    places = claims.groupby("source").cumcount()
    with style():
        fig, axes = canvas(PAGE, 0.7 + 0.22 * len(sources))
        ax = axes[0][0]
        for verdict, shape in VERDICTS.items():
            part = claims["verdict"] == verdict
            y = [sources.index(source) for source in claims.loc[part, "source"]]
            ax.scatter(
                places[part], y, marker=shape.marker, color=shape.color, s=34, edgecolor="black",
                linewidth=0.6, label=f"{verdict.replace('_', ' ')} ({int(part.sum())})",
            )  # fmt: skip
        ax.set_yticks(range(len(sources)), sources)
        ax.set_ylim(len(sources) - 0.5, -0.5)
        ax.set_xticks([])
        ax.set_xlabel("claims, in the order of the claims table")
        ax.set_xlim(-0.7, max(places.max(), 12) + 0.7)
        ax.grid(False, axis="x")
        fig.legend(loc="outside lower center", ncols=3)
    counts = claims["verdict"].value_counts()
    told = ", ".join(f"{counts.get(v, 0)} {v.replace('_', ' ')}" for v in VERDICTS)
    return fig.tell(
        f"""Verdicts on {len(claims)} claims of the paper, by the rule declared for each beforehand:
        {told}. n = {len(claims)}; the interval and the reason of each are in the claims table.""",
        f"A row of marks for each source in the paper, a mark a claim: {told}.",
        claims[["claim_id", "source", "verdict"]],
    )
