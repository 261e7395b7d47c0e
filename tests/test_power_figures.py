"""Power loss in figures, tables and words: states are counted, logs have intervals, and what was
not run never reads as a pass."""

from __future__ import annotations

import matplotlib as mpl
import pandas as pd
import pytest
from synthetic import FILESYSTEMS, canonical, story_events, world

from ckptlib.analysis import figures, figures_power, power, power_told, stats, tables_power
from ckptlib.crashes import filesystems
from ckptlib.crashes import power as crashes
from ckptlib.crashes.blocklog import FLUSH, MARK, WRITE, DeviceLog, Record
from ckptlib.experiments import power_loss, registry

NO_ROOT = "power loss needs root: sudo make reproduce"
NO_XFS = "mkfs.xfs is missing: apt install xfsprogs"
SKIPPED = {name: NO_XFS if name == "xfs" else NO_ROOT for name in FILESYSTEMS}
EMPTY = registry.empty("power_loss")
FIGURES = {
    "fig_power_survival": figures.figure_power_survival,
    "fig_power_options": figures.figure_power_options,
    "fig_power_policies": figures.figure_power_policies,
    "fig_power_damage": figures.figure_power_damage,
    "fig_power_directories": figures.figure_power_directories,
}
each_figure = pytest.mark.parametrize("name", FIGURES)
each_table = pytest.mark.parametrize("name", tables_power.TABLES)


@pytest.fixture(scope="module")
def loss():
    return world(runs=3, saves=4, seeds=3)["power_loss"]


def _states(*rows: dict) -> pd.DataFrame:
    """Rows of power_loss of one arm in which a save was acknowledged and kept, unless said."""
    usual = {
        "filesystem": "ext4", "mode": "atomic_nodirsync", "protocol": "batched", "omitted": "",
        "workload": "saves", "seed": 1, "log": "one", "policy": "none", "acknowledged_step": 2,
        "recovered_step": 2, "outcome": "kept", "expected": True, "damage": "", "mount_error": "",
        "window": 1, "tail": 0, "kept_writes": 0, "exhaustive": True, "repaired": False,
    }  # fmt: skip
    made = [usual | row | {"trial_id": f"{number:03d}"} for number, row in enumerate(rows)]
    return canonical(pd.DataFrame(made), "power_loss")


LOST = {"outcome": "lost_acknowledged", "recovered_step": 1, "damage": "absent directory"}
UNTOLD = {"acknowledged_step": pd.NA, "outcome": "lost_unacknowledged"}
REFUSED = {"mount_error": "EINVAL", "repaired": True, "policy": "torn_512"}


# -- what is counted ------------------------------------------------------------------------------


def test_states_with_nothing_acknowledged_or_refused_by_the_kernel_are_in_no_share():
    found = power.count(_states({}, LOST, UNTOLD, UNTOLD, LOST | REFUSED, REFUSED))
    assert (found["states"], found["acknowledged"], found["kept_newest"]) == (6, 2, 1)
    assert (found["lost_acknowledged"], found["refused"], found["refused_lost"]) == (1, 2, 1)


def test_what_nobody_saved_counts_whether_or_not_something_was_acknowledged():
    wrong = {"outcome": "false_accept", "expected": False}
    found = power.count(_states({}, wrong, UNTOLD | wrong, UNTOLD | wrong | {"outcome": "mixed"}))
    assert (found["false_accept"], found["mixed"], found["unexpected"]) == (2, 1, 3)
    assert found["kept_newest"] == 1


def test_the_comparison_of_modes_leaves_out_variants_and_missing_flushes(loss):
    rows = power.compared(loss)
    assert set(rows["protocol"]) == set(power.COMPARED) and set(rows["omitted"]) == {""}
    assert set(power.beside(loss)["protocol"]) == {"artifact", "bare_file"}
    parts = [rows, power.beside(loss), loss[loss["omitted"] != ""]]
    assert sum(map(len, parts)) == len(loss)


def test_the_ablation_compares_the_same_runs_of_the_same_seeds():
    strict = {"mode": "atomic_dirsync"}
    loss = _states(
        *(strict | {"seed": seed, "log": f"all-{seed}"} for seed in (1, 2, 3)),
        strict | LOST | {"seed": 2, "log": "less", "omitted": "store"},
        strict | {"seed": 2, "log": "other", "workload": "prune"},
        {"seed": 2, "log": "weak"},
    )
    assert set(power.ablation(loss)["log"]) == {"all-2", "less"}
    table = power.by_directory(loss)
    assert list(table["omitted"]) == ["", "store"]
    assert list(table["acknowledged"] - table["kept_newest"]) == [0, 1]


def test_every_share_stands_for_one_log_and_its_interval_for_logs_alone():
    many = [{"log": f"log-{n}", "seed": n} for n in range(8)]
    rows = [
        log | (LOST if n < 2 and state else {}) for n, log in enumerate(many) for state in (0, 1)
    ]
    table = power.survival(_states(*rows)).iloc[0]
    assert (table["logs"], table["states"], table["logs_with_loss"]) == (8, 16, 2)
    exact = stats.proportion(2, 8, safety=True).scaled(100)
    assert table["logs_with_loss_percent_high"] == pytest.approx(exact.high)
    median = stats.quantile_interval([50, 50, *[100] * 6], 50)
    assert (table["kept_percent"], table["kept_percent_low"]) == (100, median.low)
    more = power.survival(_states(*rows * 50)).iloc[0]  # more states of the same logs
    assert more["kept_percent_low"] == table["kept_percent_low"]
    assert more["logs_with_loss_percent_high"] == table["logs_with_loss_percent_high"]


def test_a_few_logs_have_no_interval_of_their_median_and_an_honest_bound_when_none_lost():
    table = power.survival(_states({"log": "a"}, {"log": "b"}, {"log": "c"})).iloc[0]
    assert pd.isna(table["kept_percent_low"]) and pd.isna(table["kept_percent_high"])
    assert table["logs_with_loss_percent_low"] == 0
    assert table["logs_with_loss_percent_high"] > 60  # three logs without a loss say little


def test_damage_is_told_of_losses_only_and_adds_up(loss):
    table = power.by_damage(loss)
    kinds = list(power.DAMAGE)
    assert (table[kinds].sum(axis=1) == table["lost"]).all()
    assert table.loc[table["mode"] == "atomic_dirsync", "lost"].sum() == 0
    assert (table["lost"] <= table["acknowledged"]).all()
    bad = power.by_damage(world("contrary", runs=3, saves=4, seeds=1)["power_loss"])
    assert (bad[[*kinds, "other"]].sum(axis=1) == bad["lost"]).all()


def test_names_stand_in_the_order_of_the_experiment(loss):
    assert list(power.POLICIES) == list(crashes.POLICIES)
    assert list(dict.fromkeys(power.by_policy(loss)["policy"])) == list(crashes.POLICIES)
    assert list(dict.fromkeys(power.survival(loss)["filesystem"])) == list(filesystems.FILESYSTEMS)
    assert set(power.OMITTED) == {"", *power_loss.OMITTED} == set(power.SAYS_OMITTED)
    ordinary = {protocol for arms in power_loss.ARMS.values() for _, protocol in arms}
    assert set(power.COMPARED) == ordinary
    assert set(power.WORKLOADS) == {w for arms in power_loss.ARMS.values() for w, _ in arms}


def test_the_example_is_an_atomic_nodirsync_loss_with_the_fewest_late_writes(loss):
    row = power.example(loss)
    assert row["mode"] == "atomic_nodirsync" and row["damage"] and row["mount_error"] == ""
    assert power.example(_states({}, UNTOLD)) is None and power.example(EMPTY) is None
    only = _states(LOST | {"mode": "unsafe", "tail": 3}, LOST | {"mode": "unsafe", "tail": 1})
    assert power.example(only)["tail"] == 1


# -- tables ---------------------------------------------------------------------------------------


def test_there_is_a_printed_table_for_every_one_of_the_registry():
    named = {name for name, notebook in registry.TABLES.items() if notebook == "06_power_loss"}
    assert set(tables_power.TABLES) == named
    drawn = {name for name, notebook in registry.FIGURES.items() if notebook == "06_power_loss"}
    assert {*FIGURES, "fig_power_story"} == drawn


@each_table
def test_a_table_is_saved_with_its_counts_and_caption(name, loss, tmp_path):
    saved = tables_power.save(name, loss, {}, tmp_path)
    table = pd.read_csv(tmp_path / f"{name}.csv")
    assert len(table) and "logs" in table and "result" not in table
    assert "not run" not in saved.caption.lower()
    if "acknowledged" in table and "lost" in table:
        assert (table["lost"] <= table["acknowledged"]).all()


@each_table
def test_a_table_of_what_was_not_run_holds_reasons_and_no_number(name, tmp_path):
    saved = tables_power.save(name, EMPTY, SKIPPED, tmp_path)
    assert saved.caption.startswith("Not run here")
    table = pd.read_csv(tmp_path / f"{name}.csv")
    assert list(table["reason"]) == [NO_ROOT, NO_XFS]
    assert set(table["result"]) == {tables_power.NOT_RUN}
    assert not table.select_dtypes("number").columns.size


def test_the_headline_table_counts_the_rows_of_its_arm(loss):
    table = tables_power.table_power(loss).set_index(["filesystem", "mode"])
    own = power.compared(loss)
    own = own[(own["filesystem"] == "btrfs") & (own["mode"] == "unsafe")]
    row = table.loc[("btrfs", "unsafe")]
    assert (row["states"], row["logs"]) == (len(own), own["log"].nunique())
    assert row["refused"] == (own["mount_error"] != "").sum() > 0
    kept_or_lost = row[["kept_newest", "lost_acknowledged", "unrecoverable"]].sum()
    assert kept_or_lost == row["acknowledged"] < row["states"] - row["refused"]
    assert table.loc[("ext4", "atomic_dirsync"), ["lost_acknowledged", "refused"]].sum() == 0


def test_a_variant_stands_beside_the_arm_that_it_is_a_variant_of(loss):
    table = tables_power.table_beside(loss)
    assert set(table["filesystem"]) == set(filesystems.MAIN)
    for _, part in table.groupby(["filesystem", "mode", "workload"]):
        assert list(part["protocol"]) in (["per_file", "artifact"], ["single_file", "bare_file"])


def test_losses_by_workload_are_laid_out_for_reading(loss):
    wide = tables_power.lost_by_workload(loss)
    assert list(wide.columns[3:]) == list(filesystems.FILESYSTEMS)
    assert wide.iloc[-1, 3:].str.match(r"0 of \d+").all()  # atomic_dirsync comes last
    assert "reason" in tables_power.lost_by_workload(EMPTY, SKIPPED)


# -- figures --------------------------------------------------------------------------------------


def _words(fig) -> str:
    return " ".join(" ".join(t.get_text().split()) for t in fig.findobj(mpl.text.Text))


def _fits(fig) -> None:
    with figures.style():
        fig.draw_without_rendering()
    box, (width, height) = fig.get_tightbbox(), fig.get_size_inches()
    assert min(box.x0, box.y0) > -0.01 and box.x1 < width + 0.01 and box.y1 < height + 0.01
    sizes = [t.get_fontsize() for t in fig.findobj(mpl.text.Text) if t.get_text().strip()]
    assert min(sizes) >= 7


@pytest.mark.filterwarnings("error::UserWarning")
@each_figure
def test_a_figure_of_what_was_not_run_says_so_with_the_reason(name, tmp_path):
    fig = FIGURES[name](EMPTY, SKIPPED)
    assert "Not run here" in _words(fig) and "sudo make reproduce" in _words(fig)
    assert fig.caption.startswith("Not run here") and "n = 0" in fig.caption
    assert list(fig.data["result"].unique()) == [tables_power.NOT_RUN]
    _fits(fig)
    figures.save(fig, name, folder=tmp_path)


@pytest.mark.filterwarnings("error::UserWarning")
@each_figure
def test_a_figure_of_some_file_systems_names_those_that_were_not_run(name, loss, tmp_path):
    left_out = {name: SKIPPED[name] for name in ("xfs", "ext4_journal")}
    fig = FIGURES[name](loss[~loss["filesystem"].isin(left_out)], left_out)
    assert "Not run here" in fig.caption
    _fits(fig)
    figures.save(fig, name, folder=tmp_path)


@each_figure
def test_a_file_system_that_nobody_planned_is_not_called_skipped(name, loss):
    fig = FIGURES[name](loss[loss["filesystem"] == "btrfs"], {})
    if name == "fig_power_options":
        assert "Nothing that this would show was planned." in _words(fig)
    else:
        assert "btrfs" in _words(fig) and "Not run" not in fig.caption
    _fits(fig)


def test_the_headline_figure_prints_lost_of_states_and_logs_beside_every_arm(loss):
    fig = figures.figure_power_survival(loss)
    words, table = _words(fig), fig.data
    for row in table.itertuples():
        lost = row.acknowledged - row.kept_newest
        assert f"{lost:,} of {row.acknowledged:,} ({row.logs})" in words
    assert f"n = {table['states'].sum():,} crash states" in fig.caption
    refused = table[table["refused"] > 0].iloc[0]
    assert f"+ {refused['refused_lost']} of {refused['refused']} after repair" in words


def test_a_skipped_file_system_keeps_its_place_in_the_headline_with_the_reason(loss):
    fig = figures.figure_power_survival(loss[loss["filesystem"] != "xfs"], {"xfs": NO_XFS})
    assert [ax.get_title(loc="left") for ax in fig.axes][1] == "xfs"
    assert "not run here: mkfs.xfs is missing" in _words(fig)


def test_a_policy_that_was_not_tried_is_an_empty_cell_and_no_zero(loss):
    rows = loss[(loss["policy"] != "alone") | (loss["mode"] == "unsafe")]
    fig = figures.figure_power_policies(rows)
    alone = fig.data[fig.data["policy"] == "alone"]
    assert set(alone["mode"]) == {"unsafe"}
    figures.figure_power_policies(loss[loss["filesystem"].isin(["ext4", "xfs"])])


def test_where_nothing_was_lost_the_panel_says_in_how_many_states(loss):
    fig = figures.figure_power_damage(loss[loss["mode"] == "atomic_dirsync"])
    _fits(fig)
    assert "nothing lost in " in _words(fig) and "n = 0 losses" in fig.caption


# -- one lost checkpoint --------------------------------------------------------------------------


def test_the_story_tells_which_writes_are_sure_got_through_or_are_lost():
    fig = figures.figure_power_story(story_events(), 9, {6})
    fates = dict(zip(fig.data["index"], fig.data["fate"], strict=True))
    assert (fates[3], fates[6], fates[7]) == ("flushed", "got through", "lost")
    assert fates[9] == fates[10] == "after the cut"
    words = _words(fig)
    assert "1 write, 8 KiB: lost" in words and "1 write, 4 KiB: got through" in words
    assert "the power goes here" in words and "step 2 is acknowledged" in words
    assert "1 later writes are lost and 1 get through" in fig.caption


def test_before_the_first_flush_every_write_is_late():
    events = story_events()
    fig = figures.figure_power_story(events, 4, set())
    assert fig.data.set_index("index").loc[3, "fate"] == "lost"


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_long_story_fits_a_page(tmp_path):
    one = story_events()
    long = pd.concat([one.assign(index=one["index"] + 11 * n) for n in range(40)])
    fig = figures.figure_power_story(long, 300, {299})
    _fits(fig)
    assert fig.get_size_inches()[1] < 9
    figures.save(fig, "fig_power_story", folder=tmp_path)


def test_a_story_that_cannot_be_told_says_which_of_the_two_it_is():
    lost_none = figures.figure_power_story(None, tried=1234)
    assert "Nothing to show" in _words(lost_none) and "1,234 states" in _words(lost_none)
    not_run = figures.figure_power_story(None, skipped=SKIPPED)
    assert "Not run here" in _words(not_run) and NO_XFS in _words(not_run)
    _fits(not_run)


def test_a_box_without_a_reason_says_that_nothing_was_planned():
    assert "planned" in _words(figures_power.figure_not_run("something", {}))


# -- words ----------------------------------------------------------------------------------------


def test_states_are_said_with_their_logs_and_without_an_interval(loss):
    assert power_told.of_states(0, 1234, 1) == "0 of 1,234 states in 1 log"
    said = power_told.lost(power.survival(loss))
    assert "- `atomic_dirsync`: ext4 **0 of " in said and " logs**" in said
    assert "%" not in said and "interval" not in said


def test_what_is_said_of_logs_has_an_exact_one_sided_bound(loss):
    said = power_told.bounds(power.survival(loss), "atomic_dirsync")
    strict = power.compared(loss)
    logs = strict.loc[strict["mode"] == "atomic_dirsync"].groupby("filesystem")["log"].nunique()
    assert f"- xfs: 0 of {logs['xfs']} (95% interval 0.00% to" in said
    assert "exact, one-sided" in said


def test_states_that_the_kernel_refused_are_told_by_errno_policy_and_loss(loss):
    said = power_told.refused(loss)
    rows = loss[loss["mount_error"] != ""]
    assert f"refused to mount {len(rows)}" in said and "EINVAL" in said and "`torn_512`" in said
    assert f"{int(power.lost(rows).sum())} had lost an acknowledged checkpoint" in said
    assert "mounted all 1 states" in power_told.refused(_states({}))


def test_broken_promises_and_false_accepts_are_counted_over_all_states(loss):
    assert "**0 of " in power_told.rules(loss)
    bad = world("contrary", runs=3, saves=4, seeds=1)["power_loss"]
    strict = power.mounted(power.compared(bad))
    broken = (strict["mode"] == "atomic_dirsync").sum()
    assert f"`atomic_dirsync`: **{broken:,} of {broken:,} states" in power_told.rules(bad)


def test_without_a_run_nothing_is_said_but_why():
    nothing = power.survival(EMPTY)
    assert not power_told.lost(nothing) and not power_told.bounds(nothing, "atomic_dirsync")
    assert not power_told.tried(EMPTY) and not power_told.rules(EMPTY)
    assert not power_told.refused(EMPTY) and not power_told.found(None, None, 0)
    box = power_told.skipped(SKIPPED)
    assert box.count(NO_ROOT) == 1 and f"xfs: {NO_XFS}" in box and box.startswith("> **Not run")
    assert power_told.skipped({}) == ""
    assert "Nothing was lost in the 12 states" in power_told.found(None, None, 12)


def test_the_plan_is_counted_by_arm_variant_and_ablation():
    counts = dict(seed=1, seeds=2, states_per_log=3, dirsync_seeds=1, dirsync_states_per_log=3,
                  variant_seeds=1, omitted_seeds=1)  # fmt: skip
    trials = power_loss.plan(filesystems="ext4,ext4_journal", **counts)
    table = power_told.planned(trials)
    assert table.iloc[:, 2:].to_numpy().sum() == len(trials)
    assert list(table["filesystem"].unique()) == ["ext4", "ext4_journal"]


def test_one_save_of_a_log_is_told_in_its_order():
    records = [
        Record(MARK, mark={"begin": 1, "parts": {}}),
        Record(MARK, mark={"operation": "write", "number": 4, "path": "a", "size": 9}),
        Record(MARK, mark={"done": 4}),
        Record(MARK, mark={"operation": "rename", "number": 5, "path": "a", "target": "b"}),
        Record(WRITE, 4096, b"x" * 512),
        Record(FLUSH),
        Record(MARK, mark={"acknowledged": 1}),
    ]
    table = power_told.one_save(DeviceLog(8192, {}, [], records))
    assert list(table["record"]) == [0, 1, 3, 4, 5, 6]
    assert list(table["the application says"])[:3] == ["begin 1", "write a", "rename a to b"]
    assert list(table["the disk is told"])[3:] == ["write", "flush", ""]
    assert list(table["bytes"].dropna()) == [9, 512]
    assert power_told.one_save(DeviceLog(0)).empty
    counts = power_told.policies(DeviceLog(0), 1)
    assert set(counts["states of this log"]) == {tables_power.NOT_RUN}


def test_what_can_run_here_is_told_for_every_file_system():
    table = power_told.supported()
    assert list(table["file system"]) == list(filesystems.FILESYSTEMS)
    assert ((table["here"] == "runs") == (table["what to do"] == "")).all()


def test_the_empty_output_has_the_shape_that_all_of_this_reads():
    assert list(EMPTY.columns) == list(world(runs=3, saves=4, seeds=1)["power_loss"].columns)
