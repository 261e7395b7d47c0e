"""The report: complete, in order, and sufficient unto itself."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser

import nbformat
import pandas
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from ckptlib import report
from ckptlib.experiments import outputs, registry

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Loads(HTMLParser):
    """Collects what a browser would fetch to show a page, and the page's anchors and links."""

    def __init__(self, html: str):
        super().__init__()
        self.fetched, self.scripts, self.ids, self.links = [], 0, [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.scripts += tag == "script"
        for name in ("src", "srcset", "poster", "data", "background"):
            if values.get(name) and not values[name].startswith("data:"):
                self.fetched.append(values[name])
        if tag == "link" and values.get("href"):
            self.fetched.append(values["href"])
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if "id" in values:
            self.ids.append(values["id"])


def notebook_of(title: str, *outputs_: nbformat.NotebookNode) -> nbformat.NotebookNode:
    text = f"# {title}\n\n## What you need\n\n$x^2$ ![remote](https://example.org/remote.png)\n\n"
    text += "![local](local.png), [the next](04_corruption.ipynb), [none](../x/07_none.ipynb), "
    text += "[above](#What-you-need)"
    code = new_code_cell("print('computed')", execution_count=1, outputs=list(outputs_))
    return new_notebook(cells=[new_markdown_cell(text), code])


@pytest.fixture
def results(tmp_path):
    """A finished run of two notebooks, with everything in them that could load something."""
    folder = tmp_path / "results"
    (folder / "notebooks").mkdir(parents=True)
    (folder / "notebooks/local.png").write_bytes(PIXEL)
    html = '<script src="https://example.org/a.js"></script><iframe src="https://b.org"></iframe>'
    widget = {report.WIDGET: {"model_id": "x"}, "text/plain": "IntSlider(value=3)"}
    picture = {"image/png": base64.b64encode(PIXEL).decode()}
    for name, title in (("03_crash", "Crashes"), ("04_corruption", "Corruption & repair")):
        notebook = notebook_of(
            title,
            new_output("display_data", {"text/html": html}),
            new_output("display_data", widget),
            new_output("display_data", picture),
            new_output("stream", name="stdout", text=f"output of {name}"),
        )
        nbformat.write(notebook, folder / f"notebooks/{name}.ipynb")
    claims = pandas.DataFrame(
        {
            "claim_id": ["c1", "c2"],
            "source": ["Table 3", "Table 1"],
            "published": ["0 of 400", "2.5 ms"],
            "measured": ["0 of 400 <b>", "9 ms"],
            "ci_low": [0.0, None],
            "ci_high": [0.00916, None],
            "verdict": ["reproduced", "not_comparable"],
            "note": ["as published", "another disk"],
        }
    )
    outputs.write(folder, "claims", claims, facts={"profile": "smoke"})
    return folder


@pytest.fixture
def page(results, tmp_path) -> str:
    return report.build(results, tmp_path / "figures")


def test_the_page_fetches_nothing_and_runs_nothing(page):
    loads = Loads(page)
    assert loads.fetched == [] and loads.scripts == 0
    assert "@import" not in page and "url(" not in page


def test_local_images_are_inside_the_page_and_remote_ones_become_links(page):
    embedded = base64.b64encode(PIXEL).decode()
    assert page.count(embedded) == 4, "the markdown image and the output, in both notebooks"
    assert 'href="https://example.org/remote.png"' in page


def test_every_link_within_the_page_arrives_and_no_anchor_stands_twice(page):
    loads = Loads(page)
    assert len(loads.ids) == len(set(loads.ids))
    within = {link[1:] for link in loads.links if link.startswith("#")}
    assert {"claims", "03_crash", "04_corruption", "04_corruption-What-you-need"} <= within
    assert within <= set(loads.ids)
    assert not [link for link in loads.links if link.endswith(".ipynb")]


def test_the_claims_come_first_and_then_the_notebooks_in_order(page):
    places = [
        page.index(text)
        for text in (
            'id="claims"',
            "Measured here",
            "output of 03_crash",
            "output of 04_corruption",
        )
    ]
    assert places == sorted(places)
    assert "2 claims: 1 reproduced, 1 not comparable" in page
    assert "[0, 0.00916]" in page and "0 of 400 &lt;b&gt;" in page and "Corruption &amp; re" in page


def test_widgets_are_left_out(page):
    assert "IntSlider" not in page and "widget-view" not in page


def test_a_notebook_that_failed_is_named_and_left_out(results, tmp_path):
    done = results / "notebooks/03_crash.ipynb"
    done.rename(results / "notebooks/03_crash.failed.ipynb")
    page = report.build(results, tmp_path)
    assert "Left out, since they failed in the last run: 03_crash." in page
    assert "output of 03_crash" not in page


def test_what_was_skipped_is_told_with_its_reason(results, tmp_path):
    facts = {"skipped": {"xfs": "mkfs.xfs is <missing>", "btrfs": "mkfs.xfs is <missing>"}}
    for name in ("power_logs", "power_loss"):
        outputs.write(results, name, registry.empty(name), facts=facts)
    page = report.build(results, tmp_path)
    assert page.count("Power loss: skipped on xfs, btrfs: mkfs.xfs is &lt;missing&gt;") == 1


def test_the_overview_of_the_claims_is_shown_with_its_words(results, tmp_path):
    (tmp_path / "fig_claims.png").write_bytes(PIXEL)
    (tmp_path / "fig_claims.json").write_text('{"alt": "two <verdicts>", "caption": "Verdicts."}')
    assert 'alt="two &lt;verdicts&gt;"' in report.build(results, tmp_path)


def test_the_command_writes_the_page_and_says_where(results, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert report.main(["--results", str(results), "--output", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("gone", "words"), [("notebooks/*.ipynb", "make reproduce"), ("claims.csv", "claims.csv")]
)
def test_what_is_missing_is_named_and_nothing_is_written(results, capsys, gone, words):
    for path in results.glob(gone):
        path.unlink()
    assert report.main(["--results", str(results)]) == 2
    message = capsys.readouterr().err
    assert words in message and "Traceback" not in message
    assert not (results / "report.html").exists()


def test_claims_of_another_version_of_the_code_are_refused(results, capsys):
    record = results / "claims.provenance.json"
    record.write_text(record.read_text().replace('"code_hash": "', '"code_hash": "0'))
    assert report.main(["--results", str(results)]) == 2
    assert "another version of the code" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_one_sentence_and_not_a_traceback(results, capsys):
    arguments = ["--results", str(results), "--output", "/proc/no/such/place/report.html"]
    assert report.main(arguments) == 2
    said = capsys.readouterr().err
    assert "/proc/no/such/place" in said and "Traceback" not in said


def test_any_table_of_another_version_of_the_code_is_refused(results, tmp_path, capsys):
    record = {"name": "training", "code_hash": "0" * 64, "columns": {}}
    outputs.csv_path(results, "training").write_text("trial_id\n")
    outputs.provenance_path(results, "training").write_text(json.dumps(record))
    assert report.main(["--results", str(results), "--output", str(tmp_path / "r.html")]) == 2
    assert "training.csv" in capsys.readouterr().err
