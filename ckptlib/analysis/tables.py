"""The paper's tables from trial tables, beside what was published; never a typed-in result.

Every function returns numbers: one column a quantity, its unit in the name, and for an estimate `x`
its interval in `x_low` and `x_high`. `present` turns them into text for people; `save` writes both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ckptlib.analysis import stats
from ckptlib.analysis.intervals import DEFAULT, NOT_ESTIMABLE, Resampling
from ckptlib.errors import InvalidInput, MissingInput, explain
from ckptlib.experiments.outputs import replaced
from ckptlib.experiments.paths import project_root

LAYERS = ("load_error", "schema_mismatch", "digest_mismatch", "file_sha_mismatch", "nonfinite")
OUTCOMES = (
    *("kept", "lost_unacknowledged", "lost_acknowledged", "unrecoverable", "mixed"),
    "false_accept",
)
# The protocols under which a published latency may stand beside ours; `batched` is not the paper's.
PAPERS_PROTOCOLS = ("artifact", "per_file")
WIDE = 10  # a table with more columns is set smaller
# Characters: beside a cell longer than PROSE, only numbers up to SHORT stay on one line.
PROSE, SHORT = 60, 12
# Suffix of a column's name -> unit shown, digits behind the point.
_UNITS = {"_ms": ("ms", 2), "_s": ("s", 3), "_percent": ("%", 1)}


def published(name: str) -> pd.DataFrame:
    """A table of the paper from data/published, for example "table1_latency"."""
    path = project_root() / "data" / "published" / f"{name}.csv"
    if not path.is_file():
        raise MissingInput(explain("a published table is missing", path=path), path)
    return pd.read_csv(path)


def table1_latency(latency: pd.DataFrame, how: Resampling = DEFAULT) -> pd.DataFrame:
    """Table 1: latency of one save by mode and protocol, in ms, with intervals over runs."""
    return _by_quantile(
        stats.latency_summary(latency, how=how), "ms", 1e3, published("table1_latency"), "s"
    )


def table2_overhead(latency: pd.DataFrame, how: Resampling = DEFAULT) -> pd.DataFrame:
    """Table 2: overhead against unsafe in percent, paired over runs."""
    return _by_quantile(
        stats.overhead_summary(latency, how=how),
        "percent",
        1,
        published("table2_overhead"),
        "percent",
    )


def _by_quantile(
    summary: pd.DataFrame, unit: str, factor: float, paper: pd.DataFrame, paper_unit: str
) -> pd.DataFrame:
    paper = paper.set_index("mode")
    rows = []
    for (mode, protocol), part in summary.groupby(["mode", "protocol"], sort=False):
        row = {"mode": mode, "protocol": protocol, "runs": int(part["n_runs"].iloc[0])}
        for found in part.itertuples():
            name = f"p{found.q:g}_{unit}"
            row |= {name: found.estimate * factor, f"{name}_low": found.low * factor}
            row |= {f"{name}_high": found.high * factor}
        for q in part["q"]:
            known = mode in paper.index and protocol in PAPERS_PROTOCOLS
            value = paper.loc[mode, f"p{q:g}_{paper_unit}"] * factor if known else np.nan
            row[f"published_p{q:g}_{unit}"] = value
        rows.append(row)
    return pd.DataFrame(rows)


def table3_crash(crash: pd.DataFrame) -> pd.DataFrame:
    """Table 3: groups in flight that the guard accepts, by method, mode, protocol, crash point.

    The published numbers stand beside the paper's own condition (method `artifact`) only.
    """
    paper = published("table3_crash").set_index(["mode", "crash_point"])
    rows = []
    for key, part in _groups(stats.groups(crash), ["method", "mode", "protocol", "crash_point"]):
        method, mode, _, point = key.values()
        valid = part["group_valid"].fillna(False).astype(bool)
        row = key | {"trials": len(part), "valid": int(valid.sum())}
        row |= _rate(int(valid.sum()), len(part))
        theirs = (mode if mode == "unsafe" else "atomic", point)
        known = method == "artifact" and theirs in paper.index
        row["published_valid"] = int(paper.loc[theirs, "valid"]) if known else pd.NA
        row["published_trials"] = int(paper.loc[theirs, "trials"]) if known else pd.NA
        rows.append(row)
    return pd.DataFrame(rows).astype({"published_valid": "Int64", "published_trials": "Int64"})


def table4_corruption(corruption: pd.DataFrame) -> pd.DataFrame:
    """Table 4: detection by fault; trials that changed nothing are counted apart.

    `rate_percent` is over the effective trials (for the control, `none`, over all: false alarms);
    the interval is exact and one-sided where no exception was seen. The layers count all trials,
    as the paper does.
    """
    paper = published("table4_corruption").set_index("fault")
    rows = []
    for key, part in _groups(corruption, ["kind", "fault"]):
        effective = _flag(part, "effective")
        judged = part if key["fault"] == "none" else part[effective]
        found = int(_flag(judged, "detected").sum())
        control = key["fault"] == "none"  # meant to change nothing
        row = key | {"trials": len(part), "effective": int(effective.sum())}
        row |= {"no_op": 0 if control else len(part) - int(effective.sum()), "detected": found}
        row |= _rate(found, len(judged), safety=True)
        row |= {layer: int(_flag(part, layer).sum()) for layer in LAYERS}
        known = key["kind"] == "file" and key["fault"] in paper.index
        for name in ("detected", "load_error", "digest_mismatch", "file_sha_mismatch"):
            row[f"published_{name}"] = int(paper.loc[key["fault"], name]) if known else pd.NA
        rows.append(row)
    table = pd.DataFrame(rows)
    theirs = [name for name in table.columns if name.startswith("published_")]
    return table.astype(dict.fromkeys(theirs, "Int64"))


def outcomes(crash: pd.DataFrame) -> pd.DataFrame:
    """What recovery found, by method, mode, protocol and crash point: one column an outcome.

    `unexpected` counts the trials whose outcome the mode's promise does not allow.
    """
    rows = []
    for key, part in _groups(crash, ["method", "mode", "protocol", "crash_point"]):
        counts = {name: int((part["outcome"] == name).sum()) for name in OUTCOMES}
        unexpected = int((~_flag(part, "expected")).sum())
        rows.append(key | {"trials": len(part)} | counts | {"unexpected": unexpected})
    return pd.DataFrame(rows)


def layers(corruption: pd.DataFrame) -> pd.DataFrame:
    """Which layer objected, by kind, damaged file and fault, over the effective trials.

    `first_<layer>` counts the trials in which no earlier layer had objected.
    """
    rows = []
    effective = corruption[_flag(corruption, "effective")]
    for key, part in _groups(effective, ["kind", "target", "fault"]):
        objected = pd.DataFrame({layer: _flag(part, layer) for layer in LAYERS})
        earlier = objected.cumsum(axis=1).shift(axis=1, fill_value=0) > 0
        row = key | {"trials": len(part)}
        row |= {layer: int(objected[layer].sum()) for layer in LAYERS}
        row |= {f"first_{layer}": int((objected & ~earlier)[layer].sum()) for layer in LAYERS}
        rows.append(row | {"unnoticed": int((~objected.any(axis=1)).sum())})
    return pd.DataFrame(rows)


def training(trials: pd.DataFrame) -> pd.DataFrame:
    """Training by mode and arm: accuracy, bit-identity with the uninterrupted run, saves' share."""
    rows = []
    for key, part in _groups(trials, ["mode", "arm"]):
        row = key | {"runs": len(part), "saves": int(part["saves"].fillna(0).max())}
        row["accuracy_percent"] = part["test_accuracy"].mean() * 100
        compared = part["bit_identical"].dropna().astype(bool)
        same = int(compared.sum()) if len(compared) else pd.NA  # 0 would read as "none was"
        row |= {"compared": len(compared), "bit_identical": same}
        row |= {"train_s": part["train_s"].median(), "save_s": part["save_s"].median()}
        rows.append(row | {"share_percent": part["share"].median() * 100})
    return pd.DataFrame(rows).astype({"bit_identical": "Int64"})


def _groups(frame: pd.DataFrame, key: list[str]) -> Iterator[tuple[dict, pd.DataFrame]]:
    """Groups in showing order, with their key as a dict; the key's values as plain text."""
    found = dict(list(frame.groupby(key, sort=False, dropna=False)))
    ranks = [stats.in_order(frame[name].unique()) for name in key]
    places = [{name: place for place, name in enumerate(rank)} for rank in ranks]
    ordered = sorted(found, key=lambda k: [p[str(v)] for p, v in zip(places, k, strict=True)])
    for values in ordered:
        yield dict(zip(key, map(str, values), strict=True)), found[values]


def _flag(frame: pd.DataFrame, name: str) -> pd.Series:
    return frame[name].fillna(False).astype(bool)


def _rate(k: int, n: int, safety: bool = False) -> dict[str, float]:
    found = stats.proportion(k, n, safety).scaled(100)
    names = ("rate_percent", "rate_percent_low", "rate_percent_high")
    return dict(zip(names, (found.rate, found.low, found.high), strict=True))


def present(frame: pd.DataFrame) -> pd.DataFrame:
    """The same table as text: an estimate with its interval in one cell, units in the headings."""
    shown = {}
    for name in frame.columns:
        if name.endswith(("_low", "_high")) and name.rsplit("_", 1)[0] in frame.columns:
            continue
        unit, digits = next((u for end, u in _UNITS.items() if name.endswith(end)), ("", 3))
        heading = name
        for end in _UNITS:
            heading = heading.removesuffix(end)
        heading = heading.replace("published_", "paper: ").replace("_", " ")
        cells = [_cell(value, digits) for value in frame[name]]
        if f"{name}_low" in frame.columns:
            bounds = zip(frame[f"{name}_low"], frame[f"{name}_high"], strict=True)
            cells = [f"{c} {_bounds(*b, digits)}" for c, b in zip(cells, bounds, strict=True)]
            heading += " [95% CI]"
        shown[f"{heading} ({unit})" if unit else heading] = cells
    return pd.DataFrame(shown)


def _cell(value: object, digits: int) -> str:
    if pd.isna(value) or value == "":
        return "–"
    return _number(value, digits) if isinstance(value, float) else str(value)


def _number(value: float, digits: int) -> str:
    if 0 < abs(value) < 10**-digits:  # two digits that count, rather than a zero that is none
        return f"{value:.{1 - int(np.floor(np.log10(abs(value))))}f}"
    return f"{value:.{digits}f}"


def _bounds(low: float, high: float, digits: int) -> str:
    if pd.isna(low) or pd.isna(high):
        return f"[{NOT_ESTIMABLE}]"
    return f"[{_number(low, digits)}, {_number(high, digits)}]"


def to_markdown(shown: pd.DataFrame) -> str:
    """A pipe table of text cells."""
    lines = [list(shown.columns), ["---"] * shown.shape[1], *shown.to_numpy().tolist()]
    clean = [[str(c).replace("|", "\\|").replace("\n", " ") for c in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in clean)


@dataclass(frozen=True)
class SavedTable:
    """A table that was written; it shows itself in a notebook with its caption."""

    shown: pd.DataFrame
    caption: str
    paths: tuple[Path, ...]

    def _repr_html_(self) -> str:
        shown = self.shown.style.hide(axis="index").set_caption(self.caption)
        longest = [self.shown[name].str.len().max() for name in self.shown]
        unbroken = SHORT if max(longest) > PROSE else PROSE
        rules = []
        for place, name in enumerate(self.shown):
            words = self.shown[name].str.match(r"[^\W\d]").any()
            wrap = "nowrap" if longest[place] <= unbroken else "normal"
            look = "text-align: left" if words else f"white-space: {wrap}"
            rules.append({"selector": f"td.col{place}", "props": look})
            if words:
                rules.append({"selector": f"th.col{place}", "props": look})
        if self.shown.shape[1] > WIDE:  # so that a page shows the last column, too
            rules.append({"selector": "td, th", "props": "font-size: 80%; padding: 0.3em 0.4em"})
        return shown.set_table_styles(rules).to_html()

    def _repr_markdown_(self) -> str:
        return f"{self.caption}\n\n{to_markdown(self.shown)}"


def save(frame: pd.DataFrame, name: str, folder: Path, caption: str) -> SavedTable:
    """Write a table as csv (numbers), md and tex (text), each whole or not at all.

    Raises
    ------
    InvalidInput : the table has no row, or the caption is empty
    """
    if frame.empty or not caption.strip():
        raise InvalidInput(f"table {name!r} needs at least one row and a caption")
    shown = present(frame)
    texts = {
        "csv": frame.to_csv(index=False, lineterminator="\n"),
        "md": f"{caption}\n\n{to_markdown(shown)}",
        "tex": _latex(shown, name, caption),
    }
    paths: list[Path] = []
    for ending, text in texts.items():
        path = Path(folder) / f"{name}.{ending}"
        with replaced(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
        paths.append(path)
    return SavedTable(shown, caption, tuple(paths))


def _latex(shown: pd.DataFrame, name: str, caption: str) -> str:
    # pandas escapes the cells and headings, but takes a caption for LaTeX.
    plain = re.sub(r"([&%$#_{}])", r"\\\1", caption)
    widths = [shown[column].str.len().max() for column in shown.columns]
    return shown.to_latex(
        index=False,
        escape=True,
        caption=plain,
        label=f"tab:{name}",
        position="htbp",
        column_format="".join("p{4cm}" if width > 40 else "l" for width in widths),
    )
