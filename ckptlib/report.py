"""One page with the claims and all executed notebooks; it loads nothing from anywhere, ever.

The page opens offline and keeps its look for years: images are inside it, scripts are left out, and
widgets, which would need a running kernel, are dropped (a static figure stands beside each).
"""

from __future__ import annotations

import argparse
import base64
import json
import mimetypes
import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2
import nbformat
import pandas
from bs4 import BeautifulSoup
from nbconvert import HTMLExporter
from pygments.formatters import HtmlFormatter

from ckptlib.errors import CkptError, MissingInput, explain
from ckptlib.experiments import outputs, registry
from ckptlib.experiments.paths import resolve

TEMPLATE = Path(__file__).with_name("report.html.j2")
WIDGET = "application/vnd.jupyter.widget-view+json"
#: What a page might load by itself, and the attributes that would name it.
LOADERS = ("script", "link", "iframe", "object", "embed", "video", "audio", "source", "base")


def build(results: Path, figures: Path) -> str:
    """Build the page.

    Parameters
    ----------
    results : Path
        Folder with ``claims.csv`` and the executed ``notebooks``.
    figures : Path
        Folder of the figures; the overview of the claims is taken from it, if it is there.

    Returns
    -------
    str
        A complete HTML document.

    Raises
    ------
    MissingInput
        No executed notebooks, or no claims table.
    StaleResults
        The claims were made by another version of the code.
    """
    folder = results / "notebooks"
    executed = sorted(folder.glob("[0-9]*.ipynb"))
    failed = [path for path in executed if path.name.endswith(".failed.ipynb")]
    complete = [path for path in executed if path not in failed]
    if not complete:
        raise MissingInput(
            explain(
                "there is nothing to report: no executed notebooks",
                path=folder,
                do="run make reproduce first, with the same RESULTS and PROFILE",
            ),
            folder,
        )
    for name in registry.OUTPUTS:  # tables of another version would stand beside today's claims
        if outputs.csv_path(results, name).is_file():
            outputs.read(results, name)
    claims = outputs.read(results, "claims")
    counts = claims["verdict"].value_counts()
    record = outputs.record_of(results, "claims")
    template = jinja2.Environment(autoescape=True).from_string(TEMPLATE.read_text("utf-8"))
    return template.render(
        title=f"Crash-consistent checkpointing, reproduced ({record.get('profile', '?')} profile)",
        summary=f"{len(claims)} claims: "
        + ", ".join(f"{count} {verdict.replace('_', ' ')}" for verdict, count in counts.items())
        + f". Made on {record.get('date', 'an unknown date')}.",
        skipped=outputs.skipped_lines(results),
        failed=[path.name.removesuffix(".failed.ipynb") for path in failed],
        pages=[_page(path, {other.stem for other in complete}) for path in complete],
        overview=_overview(figures),
        claims=[{**row, "interval": _interval(row)} for row in claims.to_dict("records")],
        machine=_machine(record),
        highlight_css=HtmlFormatter(style="default").get_style_defs(".highlight"),
    )


def _page(path: Path, names: set[str]) -> dict:
    """The body of one executed notebook, made fit to stand beside others in one document."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        shown = [o for o in cell.get("outputs", ()) if WIDGET not in o.get("data", {})]
        if "outputs" in cell:
            cell.outputs = shown
    exporter = HTMLExporter(
        template_name="basic",
        embed_images=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        anchor_link_text="",
    )
    resources = {"metadata": {"path": str(path.parent)}}
    body, _ = exporter.from_notebook_node(notebook, resources)
    soup = BeautifulSoup(body, "html.parser")
    _detach(soup, path.parent)
    _prefix(soup, path.stem, names)
    title = soup.find("h1")
    return {
        "name": path.stem,
        "title": title.get_text(strip=True) if title else path.stem,
        "sections": [
            {"id": heading["id"], "title": heading.get_text(strip=True)}
            for heading in soup.find_all("h2", id=True)
        ],
        "body": str(soup),
    }


def _detach(soup: BeautifulSoup, folder: Path) -> None:
    """Embed local images, turn remote ones into links, and drop whatever else would load."""
    for tag in soup.find_all(LOADERS):
        tag.decompose()
    for image in soup.find_all("img"):
        source = image.get("src", "")
        if source.startswith("data:"):
            continue
        local = folder / source
        if "://" not in source and not source.startswith("//") and local.is_file():
            image["src"] = _data_url(local)
        else:
            link = soup.new_tag("a", href=source)
            link.string = image.get("alt") or source
            image.replace_with(link)
        del image["srcset"]


def _prefix(soup: BeautifulSoup, name: str, names: set[str]) -> None:
    """Keep anchors of different notebooks apart; let links between them lead within the page."""
    for tag in soup.find_all(id=True):
        tag["id"] = f"{name}-{tag['id']}"
    for link in soup.find_all("a", href=True):
        target, hash_sign, anchor = link["href"].partition("#")
        if not target and hash_sign:
            link["href"] = f"#{name}-{anchor}"
        elif target.endswith(".ipynb") and "://" not in target:
            if (other := Path(target).stem) in names:
                link["href"] = f"#{other}" + (f"-{anchor}" if anchor else "")
            else:
                link.unwrap()


def _data_url(path: Path) -> str:
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _overview(figures: Path) -> dict | None:
    image, words = figures / "fig_claims.png", figures / "fig_claims.json"
    if not image.is_file():
        return None
    said = json.loads(words.read_text("utf-8")) if words.is_file() else {}
    return {
        "src": _data_url(image),
        "alt": said.get("alt", "Verdicts on the claims"),
        "caption": said.get("caption", ""),
    }


def _interval(row: dict) -> str:
    low, high = row["ci_low"], row["ci_high"]
    return "" if pandas.isna(low) or pandas.isna(high) else f"[{low:.4g}, {high:.4g}]"


def _machine(record: dict) -> dict[str, object]:
    """What the provenance of the claims says about machine, disk and versions, one line each."""
    disk = record.get("filesystem") or {}
    return {
        **(record.get("machine") or {}),
        **{name: value for name, value in disk.items() if name in ("type", "device", "options")},
        **(record.get("versions") or {}),
        "code hash": record.get("code_hash", "unknown"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; 0 if it was written, 2 if something that it needs is not there."""
    parser = argparse.ArgumentParser(prog="python -m ckptlib.report", description=__doc__)
    parser.add_argument("--results", default="data/results/paper", help="folder of a run")
    parser.add_argument("--figures", default="figures/paper", help="its figures")
    parser.add_argument("--output", help="the page (default: RESULTS/report.html)")
    options = parser.parse_args(arguments)
    results = resolve(options.results)
    page = resolve(options.output) if options.output else results / "report.html"
    try:
        html = build(results, resolve(options.figures))
        with outputs.replaced(page) as temporary:
            temporary.write_text(html, encoding="utf-8")
    except CkptError as error:
        print(f"No report was made: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"No report was made: {error.strerror}: {page}. Choose another place for it.",
            file=sys.stderr,
        )
        return 2
    print(f"{page}: {len(html.encode()) / 2**20:.1f} MiB, opens offline")
    return 0


if __name__ == "__main__":
    sys.exit(main())
