"""Kills and faults in figures, tables and words: all are counted, what is bad shows, a sample says
that it is one, and no place has an interval."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import pytest
from matplotlib.colors import to_rgba
from synthetic import canonical, crash_operations, operation_errors

from ckptlib.analysis import (
    figures,
    figures_operations,
    operations,
    operations_told,
    stats,
    style,
    tables_operations,
)
from ckptlib.crashes.oracle import LOST, OUTCOMES
from ckptlib.errors import InvalidInput
from ckptlib.experiments import flows, registry
from ckptlib.faults import errors
from ckptlib.vfs import Operation

FIGURES = {
    "fig_operations": figures_operations.figure_operations,
    "fig_operation_kinds": figures_operations.figure_operation_kinds,
    "fig_errors": figures_operations.figure_errors,
}
OF_KILLS = ["fig_operations", "fig_operation_kinds"]
UNTYPED = "an error that is not typed"
each_figure = pytest.mark.parametrize("name", FIGURES)
each_table = pytest.mark.parametrize("name", tables_operations.TABLES)


@pytest.fixture(scope="module")
def kills() -> pd.DataFrame:
    return canonical(crash_operations(), "crash_operations")


@pytest.fixture(scope="module")
def bad_kills() -> pd.DataFrame:
    return canonical(crash_operations(good=False), "crash_operations")


@pytest.fixture(scope="module")
def sample() -> pd.DataFrame:
    return canonical(crash_operations(every=5), "crash_operations")


@pytest.fixture(scope="module")
def failed() -> pd.DataFrame:
    return canonical(operation_errors(), "errors")


@pytest.fixture(scope="module")
def bad_failed() -> pd.DataFrame:
    return canonical(operation_errors(good=False), "errors")


def _words(fig) -> str:
    return " ".join(" ".join(t.get_text().split()) for t in fig.findobj(mpl.text.Text))


def _legend(fig) -> list[str]:
    return [text.get_text() for text in fig.legends[0].get_texts()]


def _fits(fig) -> None:
    with figures.style():
        fig.draw_without_rendering()
    box, (width, height) = fig.get_tightbbox(), fig.get_size_inches()
    assert min(box.x0, box.y0) > -0.01 and box.x1 < width + 0.01 and box.y1 < height + 0.01
    sizes = [t.get_fontsize() for t in fig.findobj(mpl.text.Text) if t.get_text().strip()]
    assert min(sizes) >= 7


def _one(rows: pd.DataFrame, flow: str, mode: str, protocol: str) -> pd.DataFrame:
    return stats.arm(rows[rows["flow"] == flow], mode, protocol)


# -- kills ----------------------------------------------------------------------------------------


def test_every_kill_is_counted_once_by_flow_and_once_by_operation(kills):
    by_flow, by_call = operations.by_flow(kills), operations.by_call(kills)
    assert by_flow["kills"].sum() == by_call["kills"].sum() == len(kills)
    for table in (by_flow, by_call):
        assert (table[list(OUTCOMES)].sum(axis=1) == table["kills"]).all()
    assert (by_flow["tried"] == by_flow["places"]).all()
    assert by_call["lost"].sum() == by_flow[list(LOST)].sum().sum() > 0


def test_rows_stand_in_the_order_of_the_flows_and_of_the_modes(kills):
    table = operations.by_flow(kills.sample(frac=1, random_state=1))
    assert list(table["flow"].unique()) == [f for f in flows.FLOWS if f in set(kills["flow"])]
    for _, part in table.groupby("flow"):
        assert list(part["mode"].unique()) == stats.in_order(part["mode"])


def test_seeds_add_kills_and_no_places(kills):
    twice = pd.concat([kills, kills.assign(seed=2)])
    assert operations.tried(twice) == operations.tried(kills)
    table = operations.by_flow(twice)
    assert (table["kills"] == 2 * table["tried"]).all()
    assert "with 2 seeds" in operations_told.places(twice)
    assert "2 seeds" in figures_operations.figure_operations(twice).caption


def test_a_place_that_was_missed_on_one_side_of_an_operation_is_found():
    trace = [Operation(index, "stat", "a") for index in range(3)]
    of = ("overwrite", "unsafe", "single_file")
    places = [
        {"flow": of[0], "mode": of[1], "protocol": of[2], "position": side, "operation_index": n}
        for n in range(3)
        for side in ("before", "after")
    ]
    whole = operations.positions(places, {of: trace}).iloc[0]
    assert (whole["operations"], whole["before"], whole["after"]) == (3, 3, 3)
    holed = operations.positions(places[:-1], {of: trace, ("scrub", *of[1:]): trace})
    assert list(holed["after"]) == [2, 0]


def test_the_group_in_flight_is_valid_or_refused_for_a_reason(kills):
    rows = kills.copy()
    rows.loc[rows.index[0], "reason"] = "manifest error"
    table = operations.by_reason(rows)
    own = rows[(rows["protocol"] != "single_file") & rows["in_flight_step"].notna()]
    assert table["kills"].sum() == len(own)
    reasons = table.drop(columns=["mode", "protocol", "kills", "valid"])
    assert list(reasons.columns) == ["missing COMMIT", "manifest error"]
    assert (reasons.sum(axis=1) + table["valid"] == table["kills"]).all()
    assert "single_file" not in set(table["protocol"])


def test_kills_without_a_refused_group_make_a_table_of_valid_ones(kills):
    table = operations.by_reason(kills.assign(group_valid=True, reason=""))
    assert len(table) and (table["valid"] == table["kills"]).all()


def test_what_unsafe_leaves_of_a_single_file_is_told_from_where_to_where(kills):
    own = _one(kills, "overwrite", "unsafe", "single_file")
    gone = own[own["outcome"].isin(LOST)]
    said = operations_told.torn(kills)
    assert f"overwrite: lost in **{len(gone)} of {len(own)}** kills" in said
    ends = (gone["place"].min(), gone["place"].max())
    assert all(f"(place {end} of {own['places'].max()})" in said for end in ends)
    assert ", at *" in operations_told.torn(gone.iloc[:1])
    assert "nothing lost in" in operations_told.torn(kills, "atomic_dirsync")
    assert operations_told.torn(kills[kills["protocol"] != "single_file"]) == ""


def test_all_places_are_told_from_a_sample(kills, sample):
    tried, places = operations.tried(sample)
    assert tried == len(sample) < places == len(kills)
    assert f"**{places:,} operation boundaries, all tried**" in operations_told.places(kills)
    said = operations_told.places(sample)
    assert f"{tried:,} of {places:,} tried, a sample" in said
    assert f"{places - tried:,} that were left out nothing is known" in operations_told.broken(
        sample
    )
    assert "none was left out" in operations_told.broken(kills)


def test_broken_promises_are_counted_and_places_have_no_interval(kills, bad_kills):
    said = operations_told.broken(kills)
    assert f"**0** in {len(kills):,} kills" in said
    assert "%" not in said
    broken = int((~bad_kills["expected"]).sum())
    assert f"**{broken}** in" in operations_told.broken(bad_kills) and broken
    for table in (
        operations.by_flow(kills),
        operations.by_call(kills),
        operations.by_reason(kills),
    ):
        assert not [name for name in table if name.endswith(("_low", "_high", "_percent"))]


def test_a_promise_that_was_broken_shows_in_every_figure_table_and_sentence(kills, bad_kills):
    assert operations.by_flow(bad_kills)["unexpected"].sum() > 0
    assert "promises broken, all modes: **0 of" in operations_told.lost(kills)
    assert "promises broken, all modes: **0 of" not in operations_told.lost(bad_kills)
    assert "false_accept" in set(operations.by_call(bad_kills)["worst"])
    for name in OF_KILLS:
        good, bad = FIGURES[name](kills), FIGURES[name](bad_kills)
        assert "false accept" in _legend(bad) and "false accept" not in _legend(good)
        assert [text for text in _legend(bad) if "promise was broken" in text]
        assert "promise was broken" not in _words(good)
        assert "broken in 0." in good.alt and "broken in 0." not in bad.alt


# -- the heat map ---------------------------------------------------------------------------------


def _panels(fig) -> dict:
    return {ax.get_title(loc="left").split(":")[0]: ax for ax in fig.axes if ax.get_visible()}


def _colour_at(ax, place: int, row: int):
    """The colour in front at the middle of a place, or None."""
    boxes = [p for p in ax.patches if p.get_facecolor()[3]]
    there = [
        p
        for p in boxes
        if p.get_y() == row and p.get_x() <= place + 0.5 <= p.get_x() + p.get_width()
    ]
    return max(there, key=lambda p: p.get_zorder()).get_facecolor() if there else None


def test_every_place_has_the_colour_of_its_outcome_and_rows_end_with_their_flow(kills):
    panels = _panels(figures_operations.figure_operations(kills))
    assert list(panels) == [f for f in flows.FLOWS if f in set(kills["flow"])]
    for flow, ax in panels.items():
        part = kills[kills["flow"] == flow]
        for row, of in enumerate(stats.arms(part)):
            own = stats.arm(part, *of)
            for place, outcome in zip(own["place"], own["outcome"], strict=True):
                wanted = pytest.approx(to_rgba(style.OUTCOMES[outcome].color))
                assert _colour_at(ax, place, row) == wanted
            assert _colour_at(ax, int(own["places"].max()), row) is None


def test_a_place_that_was_not_tried_stays_blank_and_the_panel_says_how_many_were(sample):
    fig = figures_operations.figure_operations(sample)
    ax = _panels(fig)["later save"]
    part = sample[sample["flow"] == "later save"]
    first = stats.arm(part, *stats.arms(part)[0])
    tried = set(first["place"])
    blank = [p for p in range(int(first["places"].max())) if p not in tried]
    assert blank and all(_colour_at(ax, place, 0) is None for place in blank)
    places = operations.by_flow(part)["places"].sum()
    assert ax.get_title(loc="left") == f"later save: {len(part)} of {places}"
    tried, places = operations.tried(sample)
    assert f"{tried} of {places} places tried" in fig.caption


def test_places_side_by_side_are_one_stretch_and_the_worst_of_several_seeds_counts(kills):
    own = _one(kills, "later save", "atomic_dirsync", "batched")
    found = list(figures_operations.stretches(own))
    assert [outcome for outcome, _, _ in found] == ["lost_unacknowledged", "kept"]
    assert found[0][2] + 1 == found[1][1] and found[1][2] == own["place"].max()
    other = own.assign(seed=2)
    other.loc[other["place"] == 7, "outcome"] = "mixed"
    both = list(figures_operations.stretches(pd.concat([own, other])))
    assert ("mixed", 7, 7) in both and len(both) == 4
    assert len(list(figures_operations.stretches(own[own["place"] != 3]))) == 3


def test_a_single_bad_place_among_thousands_is_wide_enough_to_be_seen_and_marked(kills):
    rows = _one(kills, "later save", "atomic_dirsync", "batched").head(20)
    rows = pd.concat([rows.assign(place=rows["place"] + 20 * n) for n in range(200)])
    rows = rows.assign(places=4000, outcome="kept")
    rows.loc[rows["place"] == 1234, ["outcome", "expected"]] = ["mixed", False]
    [ax] = _panels(figures_operations.figure_operations(rows)).values()
    colour = to_rgba(style.OUTCOMES["mixed"].color)
    [bad] = [p for p in ax.patches if p.get_facecolor() == colour]
    assert bad.get_width() / 4000 >= figures_operations.NARROWEST_LOSS
    [mark] = ax.lines
    assert list(mark.get_xdata()) == [1234.5]


# -- operations by arm ----------------------------------------------------------------------------


def test_a_cell_tells_kept_unacknowledged_and_lost(kills):
    fig = figures_operations.figure_operation_kinds(kills)
    words = _words(fig)
    for row in operations.by_call(kills).itertuples():
        assert f"{row.kept}/{row.lost_unacknowledged}/{row.lost}" in words
    colours = {p.get_facecolor() for p in fig.axes[0].patches}
    worst = {to_rgba(style.OUTCOMES[name].color) for name in operations.by_call(kills)["worst"]}
    assert colours == worst


# -- errors ---------------------------------------------------------------------------------------


def test_every_fault_is_counted_by_what_came_of_it(failed):
    for table in (operations.by_result(failed), operations.by_fault(failed)):
        assert table["faults"].sum() == table["as_declared"].sum() == len(failed)
        assert (table[list(errors.RESULTS)].sum(axis=1) == table["faults"]).all()


def test_what_was_not_declared_stands_out_with_its_count(failed, bad_failed):
    strict = operations.atomic(bad_failed)
    table = operations.by_fault(strict)
    assert table["wrong"].sum() == (~strict["as_declared"]).sum() > 0
    assert table[UNTYPED].sum() == table["wrong"].sum()
    good, bad = map(figures_operations.figure_errors, (failed, bad_failed))
    assert UNTYPED in _legend(bad) and UNTYPED not in _legend(good)
    for row in table[table["wrong"] > 0].itertuples():
        [text, *_] = [
            t for t in bad.axes[0].texts if t.get_text() == f"{row.wrong} of {row.faults}"
        ]
        assert text.get_color() == "white" and text.get_bbox_patch().get_facecolor()[:3] == (
            0,
            0,
            0,
        )
    assert not [t for t in good.axes[0].texts if " of " in t.get_text()]
    assert "Otherwise than declared: **0**" in operations_told.failures(failed)
    assert "Otherwise than declared: **0**" not in operations_told.failures(bad_failed)
    assert "0 of which did not come out" in good.caption


@pytest.mark.parametrize(
    ("column", "value"),
    [("silent", True), ("expected", False), ("next_save_ok", False), ("leftovers", 3)],
)
def test_a_declared_result_with_something_wrong_stands_out_as_well(failed, column, value):
    rows = failed.copy()
    place = operations.atomic(rows).index[0]
    rows.loc[place, column] = value
    assert operations.by_fault(rows)["wrong"].sum() == 1
    fig = figures_operations.figure_errors(rows)
    assert [t for t in fig.axes[0].texts if t.get_text().startswith("1 of ")]


def test_the_figure_of_errors_holds_the_atomic_modes_only(failed):
    fig = figures_operations.figure_errors(failed)
    strict = operations.atomic(failed)
    assert set(strict["mode"]) == {"atomic_nodirsync", "atomic_dirsync"}
    assert fig.data["faults"].sum() == len(strict)
    assert f"n = {len(strict):,} faults" in fig.caption


def test_the_shares_of_a_cell_fill_it(failed):
    rows = failed.copy()
    cell = rows[(rows["operation"] == "stat") & (rows["fault"] == "EIO")].index
    rows.loc[operations.atomic(rows.loc[cell]).index[0], "result"] = errors.ABSORBED
    fig = figures_operations.figure_errors(rows)
    column = [t.get_text() for t in fig.axes[0].get_xticklabels()].index("EIO")
    line = [t.get_text() for t in fig.axes[0].get_yticklabels()].index("stat")
    parts = [
        p
        for p in fig.axes[0].patches
        if p.get_facecolor()[3] and p.get_y() == line and column <= p.get_x() < column + 1
    ]
    assert len(parts) == 2 and sum(p.get_width() for p in parts) == pytest.approx(1)


def test_lying_flushes_are_told_by_what_they_are_of(failed):
    rows = failed.copy()
    lying = rows["fault"] == errors.LIE
    rows.loc[lying & (rows["operation"] == "flush_dir"), "result"] = errors.REFUSED
    said = operations_told.lies(rows)
    assert f"Lying flushes, {int(lying.sum())}: of files" in said
    assert "retried" in said and "of directories" in said and "Believed: **0**" in said


# -- all of them ----------------------------------------------------------------------------------


def test_there_is_a_figure_and_a_table_for_every_one_of_the_registry():
    named = {name for name, notebook in registry.TABLES.items() if notebook == "03_crash"}
    assert set(tables_operations.TABLES) <= named
    drawn = {name for name, notebook in registry.FIGURES.items() if notebook == "03_crash"}
    assert set(FIGURES) <= drawn


def _rows(name: str, of_kills, of_faults):
    return of_faults if name.endswith("_errors") else of_kills


@pytest.mark.filterwarnings("error::UserWarning")
@each_figure
@pytest.mark.parametrize("world", ["good", "bad", "sampled"])
def test_a_figure_fits_its_page_and_says_n_and_that_it_has_no_interval(
    name, world, kills, bad_kills, sample, failed, bad_failed, tmp_path
):
    given = {
        "good": (kills, failed), "bad": (bad_kills, bad_failed), "sampled": (sample, failed[::9])
    }  # fmt: skip
    rows = _rows(name, *given[world])
    fig = FIGURES[name](rows)
    _fits(fig)
    assert "n = " in fig.caption and "without intervals" in fig.caption
    assert fig.alt and len(fig.data) and fig.get_size_inches()[1] < 9
    figures.save(fig, name, folder=tmp_path)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", OF_KILLS)
def test_a_figure_of_all_flows_in_all_arms_fits_a_page(name, kills):
    base = kills[kills["flow"] == "later save"].iloc[:1]
    rows = pd.concat([
        base.assign(flow=flow, mode=mode, protocol=protocol, places=2, place=place,
                    outcome=OUTCOMES[number % len(OUTCOMES)], expected=number % 3 > 0,
                    operation=operations.CALLS[number % len(operations.CALLS)])
        for number, (flow, mode, protocol, place) in enumerate(
            (flow, *arm, place) for flow in flows.FLOWS for arm in flows.arms(flow)
            for place in range(2)
        )
    ])  # fmt: skip
    fig = FIGURES[name](rows)
    _fits(fig)
    assert fig.get_size_inches()[1] < 9


@each_figure
def test_where_nothing_was_tried_there_is_nothing_to_draw(name):
    rows = _rows(name, registry.empty("crash_operations"), registry.empty("errors"))
    with pytest.raises(InvalidInput, match="to draw"):
        FIGURES[name](rows)


def test_where_nothing_was_tried_nothing_is_said():
    kills, failed = registry.empty("crash_operations"), registry.empty("errors")
    said = [operations_told.places, operations_told.lost, operations_told.broken,
            operations_told.torn]  # fmt: skip
    assert not "".join(tell(kills) for tell in said)
    assert not operations_told.failures(failed) and not operations_told.lies(failed)


@each_table
def test_a_table_is_written_with_exact_counts_in_its_caption(name, kills, sample, failed, tmp_path):
    rows = _rows(name, kills, failed)
    saved = tables_operations.save(name, rows, tmp_path)
    assert {path.suffix for path in saved.paths} == {".csv", ".md", ".tex"}
    assert f"{len(rows):,} of {len(rows):,}" in saved.caption and "interval" in saved.caption
    if name != "table_errors":
        tried, places = operations.tried(sample)
        caption = tables_operations.save(name, sample, tmp_path).caption
        assert f"{tried} of {places} places tried (a sample)" in caption


def test_the_names_by_which_the_findings_say_it_say_the_same(kills, failed):
    assert operations.told(kills) == operations_told.places(kills)
    assert operations.promises(kills) == operations_told.lost(kills)
    assert operations.told_errors(failed) == operations_told.failures(failed)


def test_results_differ_in_grey_by_lightness_or_hatch():
    looks = [*figures_operations.RESULTS.values(), figures_operations.UNKNOWN]
    grey = [sum(w * c for w, c in zip((0.299, 0.587, 0.114), to_rgba(x.color), strict=False))
            for x in looks]  # fmt: skip
    for i, one in enumerate(looks):
        for j in range(i + 1, len(looks)):
            assert abs(grey[i] - grey[j]) > 0.15 or one.hatch != looks[j].hatch
    assert set(figures_operations.RESULTS) == set(errors.RESULTS)


def test_flows_and_faults_are_listed_for_reading():
    listed = operations_told.flows()
    assert list(listed["flow"]) == list(flows.FLOWS)
    assert listed["arms"].sum() == sum(len(flows.arms(flow)) for flow in flows.FLOWS)
    befalls = operations_told.faults()
    assert list(befalls["fault"]) == list(errors.FAULTS)
    assert befalls.iloc[:, 1].str.len().min() > 5


def test_the_notebook_says_what_every_result_means(root: Path):
    cells = json.loads((root / "notebooks" / "03_crash.ipynb").read_text("utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for result in errors.RESULTS:
        assert f"| {result} |" in text
