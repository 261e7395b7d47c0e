"""The only place that writes a figure: PDF, PNG, data and caption together, each file whole.

Equal data gives equal PDF bytes: no creation date is written, and fonts come with matplotlib.
"""

from __future__ import annotations

import base64
import html
import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from ckptlib import provenance
from ckptlib.analysis.style import style
from ckptlib.errors import InvalidInput, explain
from ckptlib.experiments.outputs import replaced

PNG_DPI = 200


@dataclass(frozen=True)
class SavedFigure:
    """A figure that was written; it shows itself in a notebook with alt text and caption."""

    name: str
    caption: str
    alt: str
    paths: dict[str, Path]

    def _repr_html_(self) -> str:
        image = base64.b64encode(self.paths["png"].read_bytes()).decode("ascii")
        return (
            f'<figure><img src="data:image/png;base64,{image}" alt="{html.escape(self.alt)}" '
            f'style="max-width: 100%"><figcaption>{html.escape(self.caption)}</figcaption></figure>'
        )


def save(
    fig: Figure,
    name: str,
    caption: str | None = None,
    alt: str | None = None,
    *,
    folder: Path | str,
    data: pd.DataFrame | None = None,
) -> SavedFigure:
    """Write `<name>.pdf`, `.png`, `.csv` (plotted data) and `.json` (caption, alt, provenance).

    Parameters
    ----------
    fig : a figure of :mod:`ckptlib.analysis.figures`, or any matplotlib figure
    name : the file name without ending
    caption, alt, data : taken from the figure where not given

    Raises
    ------
    InvalidInput : caption, alt text or data is missing or empty
    """
    caption = getattr(fig, "caption", "") if caption is None else caption
    alt = getattr(fig, "alt", "") if alt is None else alt
    data = getattr(fig, "data", None) if data is None else data
    lacking = [
        what
        for what, there in (
            ("caption", bool(caption.strip())),
            ("alt text", bool(alt.strip())),
            ("plotted data", data is not None and not data.empty),
        )
        if not there
    ]
    if lacking:
        raise InvalidInput(explain(f"figure {name!r} is incomplete", found=f"no {lacking[0]}"))
    paths = {ending: Path(folder) / f"{name}.{ending}" for ending in ("pdf", "png", "csv", "json")}
    with style():
        with replaced(paths["pdf"]) as temporary:
            fig.savefig(temporary, format="pdf", metadata={"CreationDate": None})
        with replaced(paths["png"]) as temporary:
            fig.savefig(temporary, format="png", dpi=PNG_DPI)
    with replaced(paths["csv"]) as temporary:
        data.to_csv(temporary, index=False, lineterminator="\n")
    record = {
        "name": name,
        "caption": caption,
        "alt": alt,
        "code_hash": provenance.code_hash("ckptlib.analysis.figures"),
        "versions": provenance.versions(("matplotlib", "seaborn", "pandas", "numpy")),
        "machine": provenance.machine(),
    }
    with replaced(paths["json"]) as temporary:
        temporary.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return SavedFigure(name, caption, alt, paths)
