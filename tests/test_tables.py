"""The tables: counts that follow from the rows, the published numbers, and three whole files."""

from __future__ import annotations

import re

import pandas as pd
import pytest
from synthetic import COUNTS, CURVES, world

from ckptlib.analysis import tables
from ckptlib.analysis.intervals import Resampling
from ckptlib.errors import InvalidInput, MissingInput

QUICK = Resampling(resamples=100)


@pytest.fixture(scope="module")
def paper():
    return world()


def test_table_1_holds_the_percentiles_of_its_rows_beside_the_papers(paper):
    table = tables.table1_latency(paper["latency"], QUICK).set_index(["mode", "protocol"])
    for mode, curve in CURVES.items():
        row = table.loc[(mode, "per_file")]
        found = row[["p50_ms", "p90_ms", "p99_ms"]].to_list()
        assert found == pytest.approx([s * 1e3 for s in curve[1:4]], rel=1e-3)
    assert table.loc[("atomic_dirsync", "per_file"), "published_p99_ms"] == pytest.approx(22.456)
    assert pd.isna(table.loc[("atomic_dirsync", "batched"), "published_p99_ms"])


def test_table_2_repeats_the_papers_overheads_from_its_table_1(paper):
    table = tables.table2_overhead(paper["latency"], QUICK)
    own = table[table["protocol"] == "per_file"]
    for q in (50, 90, 99):
        theirs = own[f"published_p{q}_percent"]
        assert own[f"p{q}_percent"].to_list() == pytest.approx(theirs.to_list(), abs=0.5)


def test_published_overheads_follow_from_published_latencies():
    latency = tables.published("table1_latency").set_index("mode")
    overhead = tables.published("table2_overhead").set_index("mode")
    for q in ("p50", "p90", "p99"):
        computed = (latency[f"{q}_s"] / latency.loc["unsafe", f"{q}_s"] - 1) * 100
        assert computed[overhead.index].to_list() == pytest.approx(
            overhead[f"{q}_percent"].to_list(), abs=0.11
        )


def test_published_intervals_of_table_3_are_wilsons():
    from ckptlib.analysis.stats import proportion

    for row in tables.published("table3_crash").itertuples():
        found = proportion(row.valid, row.trials, method="wilson").scaled(100)
        assert (round(found.low, 1), round(found.high, 1)) == (
            row.ci_low_percent,
            row.ci_high_percent,
        )


def test_table_3_counts_valid_groups_and_compares_the_papers_condition_only(paper):
    table = tables.table3_crash(paper["crash"])
    injected = table[(table["method"] == "artifact") & (table["mode"] == "unsafe")]
    assert injected["trials"].to_list() == [400, 10, 10, 10]
    assert injected["valid"].sum() == 0
    assert injected["published_trials"].to_list() == [400, 10, 10, 10]
    assert table.loc[table["method"] == "sigkill", "published_trials"].isna().all()
    assert "single_file" not in set(table["protocol"])
    assert len(table) == len(table.drop_duplicates(["method", "mode", "protocol", "crash_point"]))


def test_table_4_counts_trials_without_effect_apart(paper):
    table = tables.table4_corruption(paper["corruption"]).set_index(["kind", "fault"])
    row = table.loc[("file", "zerorange")]
    assert (row["trials"], row["no_op"], row["effective"], row["detected"]) == (400, 1, 399, 399)
    assert row["rate_percent"] == 100
    assert table.loc[("file", "none"), ["trials", "detected", "no_op"]].to_list() == [400, 0, 0]
    for fault, (load, digest, sha, *_) in COUNTS.items():
        found = table.loc[("file", fault), ["load_error", "digest_mismatch", "file_sha_mismatch"]]
        assert found.to_list() == [load, digest, sha]


def test_an_undetected_effective_fault_shows_in_table_4(paper):
    damaged = paper["corruption"].copy()
    first = damaged.index[(damaged["fault"] == "bitflip") & (damaged["kind"] == "file")][0]
    damaged.loc[first, "detected"] = False
    table = tables.table4_corruption(damaged).set_index(["kind", "fault"])
    assert table.loc[("file", "bitflip"), "rate_percent"] < 100


def test_the_layer_table_names_the_first_layer_that_objected(paper):
    table = tables.layers(paper["corruption"]).set_index(["kind", "target", "fault"])
    row = table.loc[("file", "model.pt", "bitflip")]
    assert (row["first_load_error"], row["first_digest_mismatch"]) == (7, 387)
    assert (row["file_sha_mismatch"], row["first_file_sha_mismatch"]) == (400, 6)
    assert row["unnoticed"] == 0


def test_every_trial_has_one_outcome_in_the_outcome_table(paper):
    table = tables.outcomes(paper["crash"])
    assert (table[list(tables.OUTCOMES)].sum(axis=1) == table["trials"]).all()
    assert table["trials"].sum() == len(paper["crash"])
    assert table["unexpected"].sum() == 0
    assert tables.outcomes(world("contrary")["crash"])["unexpected"].sum() > 0


def test_the_training_table_counts_bit_identical_runs(paper):
    table = tables.training(paper["training"]).set_index(["mode", "arm"])
    assert table.loc[("unsafe", "killed"), ["compared", "bit_identical"]].to_list() == [3, 3]
    assert table.loc[("unsafe", "uninterrupted"), "compared"] == 0
    assert pd.isna(table.loc[("unsafe", "uninterrupted"), "bit_identical"])


def test_text_joins_an_estimate_with_its_interval_and_says_not_estimable():
    frame = pd.DataFrame({
        "mode": ["a", "b"], "x_ms": [1.234, 5.0], "x_ms_low": [1.0, None],
        "x_ms_high": [2.0, None], "published_x_ms": [1.0, None],
    })  # fmt: skip
    shown = tables.present(frame)
    assert list(shown.columns) == ["mode", "x [95% CI] (ms)", "paper: x (ms)"]
    assert shown.iloc[:, 1].to_list() == ["1.23 [1.00, 2.00]", "5.00 [not estimable]"]
    assert shown.iloc[:, 2].to_list() == ["1.00", "–"]


def test_a_small_number_keeps_two_digits_that_count():
    shown = tables.present(pd.DataFrame({"share_percent": [0.0, 0.00123, 0.0698, 12.34]}))
    assert shown["share (%)"].to_list() == ["0.0", "0.0012", "0.070", "12.3"]


def test_an_empty_name_is_shown_as_a_dash():
    shown = tables.present(pd.DataFrame({"mode": ["unsafe", ""]}))
    assert shown["mode"].to_list() == ["unsafe", "–"]


def test_in_a_notebook_words_stand_left_and_only_a_wide_table_is_set_smaller(tmp_path):
    narrow = pd.DataFrame({"mode": ["unsafe"], "trials": [3]})
    page = tables.save(narrow, "narrow", tmp_path, "c")._repr_html_()
    assert re.search(r"td\.col0 \{\s*text-align: left", page)
    assert re.search(r"td\.col1 \{\s*white-space: nowrap", page)
    assert "font-size" not in page
    told = pd.DataFrame({"x": ["1 [0.123456789, 2.123456789]"], "y": ["1 s"], "why": ["w" * 61]})
    page = tables.save(told, "told", tmp_path, "c")._repr_html_()
    assert re.search(r"td\.col0 \{\s*white-space: normal", page)
    assert re.search(r"td\.col1 \{\s*white-space: nowrap", page)
    wide = pd.DataFrame({f"x{i}": [i] for i in range(tables.WIDE + 1)})
    assert "font-size" in tables.save(wide, "wide", tmp_path, "c")._repr_html_()


def test_a_saved_table_is_csv_markdown_and_latex_with_its_caption(tmp_path, paper):
    table = tables.table3_crash(paper["crash"])
    saved = tables.save(table, "table3_crash", tmp_path, "100% of a_b: see Table 3")
    assert sorted(path.suffix for path in saved.paths) == [".csv", ".md", ".tex"]
    again = pd.read_csv(tmp_path / "table3_crash.csv")
    assert again["rate_percent_high"].to_list() == table["rate_percent_high"].to_list()
    text = (tmp_path / "table3_crash.tex").read_text()
    assert r"\caption{100\% of a\_b: see Table 3}" in text and r"after\_model" in text
    lines = (tmp_path / "table3_crash.md").read_text().splitlines()
    assert {line.count("|") for line in lines[2:]} == {lines[2].count("|")}
    assert "100% of a_b" in saved._repr_html_()
    assert len(list(tmp_path.iterdir())) == 3  # nothing temporary is left


def test_a_bar_in_a_cell_does_not_break_the_markdown_table():
    assert "a\\|b" in tables.to_markdown(pd.DataFrame({"x": ["a|b"]}))


def test_an_empty_table_or_caption_is_refused_and_writes_nothing(tmp_path):
    full = pd.DataFrame({"x": [1]})
    for frame, caption in ((full.iloc[:0], "c"), (full, " ")):
        with pytest.raises(InvalidInput):
            tables.save(frame, "t", tmp_path, caption)
    assert not list(tmp_path.iterdir())


def test_an_unknown_published_table_is_named():
    with pytest.raises(MissingInput, match="table9"):
        tables.published("table9")
