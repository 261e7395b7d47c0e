"""Kills and faults told: counts are what the rows say, bad ones show, a sample says so."""

from __future__ import annotations

import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from synthetic import canonical, crash_operations, operation_errors

from ckptlib.analysis import figures_operations, operations
from ckptlib.analysis.style import OUTCOMES


@pytest.fixture(scope="module")
def kills() -> pd.DataFrame:
    return canonical(crash_operations(), "crash_operations")


@pytest.fixture(scope="module")
def failed() -> pd.DataFrame:
    return canonical(operation_errors(), "errors")


def test_the_counts_of_a_flow_add_up_to_its_kills(kills):
    table = operations.by_flow(kills)
    assert table["kills"].sum() == len(kills)
    assert (table[list(operations.SHOWN)].sum(axis=1) == table["kills"]).all()
    assert (table["tried"] == table["places"]).all()
    assert operations.by_call(kills)["kills"].sum() == len(kills)


def test_all_places_are_told_from_a_sample(kills):
    assert "all tried" in operations.told(kills)
    sample = canonical(crash_operations(every=5), "crash_operations")
    said = operations.told(sample)
    assert "a sample" in said and f"{len(sample):,} processes killed" in said
    caption = figures_operations.figure_operations(sample).caption
    places = operations.by_flow(sample)["places"].sum()
    assert f"{len(sample)} of {places:,} places tried" in caption


def test_an_outcome_that_no_mode_may_have_shows_in_every_figure_table_and_sentence(kills):
    bad = canonical(crash_operations(good=False), "crash_operations")
    assert operations.by_flow(bad)["unexpected"].sum() > 0
    assert "promises broken, all modes: **0 of" in operations.promises(kills)
    assert "promises broken, all modes: **0 of" not in operations.promises(bad)
    assert "false_accept" in set(operations.by_call(bad)["worst"])
    for figure in (figures_operations.figure_operations, figures_operations.figure_operation_kinds):
        legend = [text.get_text() for text in figure(bad).legends[0].get_texts()]
        assert "false accept" in legend
        assert "false accept" not in [t.get_text() for t in figure(kills).legends[0].get_texts()]


def test_the_heat_map_has_a_cell_for_every_place_in_the_colour_of_its_outcome(kills):
    figure = figures_operations.figure_operations(kills)
    panels = [ax for ax in figure.axes if ax.get_title(loc="left") == "later save"]
    [mesh] = panels[0].collections
    own = kills[kills["flow"] == "later save"]
    rows = operations.arms(own)
    cells = mesh.get_array().reshape(len(rows), -1)
    colours = mesh.cmap(mesh.norm(cells))
    for y, (mode, protocol) in enumerate(rows):
        arm = own[(own["mode"] == mode) & (own["protocol"] == protocol)]
        for place, outcome in zip(arm["place"], arm["outcome"], strict=True):
            assert tuple(colours[y, place][:3]) == pytest.approx(to_rgb(OUTCOMES[outcome].color))
        assert cells.mask[y].sum() == cells.shape[1] - len(arm)


def test_faults_are_counted_by_what_came_of_them_and_otherwise_than_declared_stands_out(failed):
    bad = canonical(operation_errors(good=False), "errors")
    table = operations.by_result(bad)
    assert table["otherwise_than_declared"].sum() == (~bad["as_declared"]).sum() > 0
    assert operations.by_result(failed)["otherwise_than_declared"].sum() == 0
    texts = [t.get_text() for t in figures_operations.figure_errors(bad).axes[0].texts]
    assert any("otherwise" in text for text in texts)
    texts = [t.get_text() for t in figures_operations.figure_errors(failed).axes[0].texts]
    assert not any("otherwise" in text for text in texts)
    assert "Otherwise than declared: **0**" in operations.told_errors(failed)
    assert "Otherwise than declared: **0**" not in operations.told_errors(bad)


@pytest.mark.parametrize("name", operations.TABLES)
def test_every_table_is_written_with_its_caption(name, kills, failed, tmp_path):
    saved = operations.save(name, failed if name == "table_errors" else kills, tmp_path)
    assert {path.suffix for path in saved.paths} == {".csv", ".md", ".tex"}
    assert "ount" in saved.caption


@pytest.mark.parametrize("name", ["figure_operations", "figure_operation_kinds", "figure_errors"])
def test_every_figure_has_a_caption_an_alt_text_and_its_data(name, kills, failed):
    rows = failed if name == "figure_errors" else kills
    figure = getattr(figures_operations, name)(rows)
    assert "n =" in figure.caption and figure.alt and len(figure.data)
