"""A kill at every operation: none is left out, and what the modes promise holds at all of them."""

from __future__ import annotations

from collections import Counter

import pandas as pd
import pytest

from ckptlib.crashes import kill
from ckptlib.errors import InvalidInput
from ckptlib.experiments import crash_operations, flows, registry
from ckptlib.experiments.context import open_run


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    return crash_operations.traces(tmp_path_factory.mktemp("scratch"), 1)


def run(trials, folder) -> pd.DataFrame:
    rows, batches = [], {}
    for trial in trials:
        batches.setdefault(tuple(trial[name] for name in crash_operations.BATCH), []).append(trial)
    for number, batch in enumerate(batches.values()):
        rows += crash_operations.run_batch(batch, folder / str(number))
    return registry.validate(pd.DataFrame(rows), "crash_operations")


def test_the_plan_holds_every_operation_before_and_after_and_every_write_amid(traced):
    trials = pd.DataFrame(crash_operations.plan(traced, seed=1, seeds=1, every=1))
    assert trials["trial_id"].is_unique
    for arm, trace in traced.items():
        own = trials[(trials[["flow", "mode", "protocol"]] == list(arm)).all(axis=1)]
        for position in (kill.BEFORE, kill.AFTER):
            told = own[own["position"] == position]
            assert told["operation_index"].to_list() == [op.index for op in trace]
            assert told["operation"].to_list() == [op.call for op in trace]
        amid = own[own["position"] == kill.DURING].groupby("operation_index")["prefix"].agg(set)
        for op in (op for op in trace if op.call == "write"):
            assert {1, op.size // 2, op.size - 1} <= amid[op.index]
            assert op.size <= 2 * kill.PAGE or any(p % kill.PAGE == 0 for p in amid[op.index])


def test_a_sample_takes_one_place_in_n_and_seeds_repeat_it(traced):
    everything = crash_operations.plan(traced, seed=1, seeds=1, every=1)
    sample = crash_operations.plan(traced, seed=1, seeds=2, every=10)
    ids = {trial["trial_id"] for trial in everything}
    assert {trial["trial_id"] for trial in sample if trial["seed"] == 1} < ids
    assert Counter(trial["seed"] for trial in sample)[1] == len(sample) // 2
    assert abs(len(sample) / 2 - len(everything) / 10) <= len(traced)


@pytest.mark.parametrize("counts", [{"seeds": 0}, {"every": 0}, {"every": True}, {"seeds": 1.0}])
def test_a_count_that_is_none_is_refused(counts):
    with pytest.raises(InvalidInput, match="whole number"):
        crash_operations.plan({}, **{"seed": 1, "seeds": 1, "every": 1, **counts})


@pytest.mark.parametrize("mode", ["atomic_nodirsync", "atomic_dirsync"])
def test_an_atomic_overwrite_keeps_a_whole_file_whenever_it_is_killed(mode, traced, tmp_path):
    wanted = {("overwrite", mode, "single_file"): traced["overwrite", mode, "single_file"]}
    rows = run(crash_operations.plan(wanted, seed=1, seeds=1, every=1), tmp_path)
    assert set(rows["outcome"]) == {"kept", "lost_unacknowledged"}
    assert rows["expected"].all() and rows["next_save_ok"].all() and not rows["leftovers"].any()


def test_an_unsafe_overwrite_is_torn_from_its_first_operation_on_until_its_sidecar(
    traced, tmp_path
):
    key = ("overwrite", "unsafe", "single_file")
    rows = run(crash_operations.plan({key: traced[key]}, seed=1, seeds=1, every=1), tmp_path)
    rows = rows.sort_values("place")
    torn = rows[rows["outcome"] == "unrecoverable"]
    assert set(torn["reason"]) >= {"size mismatch", "digest mismatch"}
    assert torn["place"].max() - torn["place"].min() == len(torn) - 1  # one stretch, no holes
    assert rows["expected"].all(), "unsafe promises nothing about it"


def test_a_sample_of_all_flows_keeps_every_promise_and_leaves_nothing_behind(traced, tmp_path):
    trials = crash_operations.plan(traced, seed=1, seeds=1, every=37)
    rows = run(trials, tmp_path)
    assert set(rows["flow"]) == set(flows.FLOWS)
    assert rows["expected"].all(), rows[~rows["expected"]]
    atomic = rows[rows["mode"] != "unsafe"]
    assert set(atomic["outcome"]) <= {"kept", "lost_unacknowledged"}
    assert atomic["next_save_ok"].all() and not atomic["leftovers"].any()
    assert rows["killed"].all()


def test_the_rows_do_not_depend_on_the_number_of_workers(traced, tmp_path):
    trials = crash_operations.plan(traced, seed=1, seeds=1, every=199)
    tables = []
    for jobs in (1, 2):
        opened = open_run(
            profile="smoke", results=str(tmp_path / f"results-{jobs}"), notebook="03_crash",
            figures=str(tmp_path / "figures"), scratch=str(tmp_path / "scratch"), jobs=jobs,
        )  # fmt: skip
        opened.grid("crash_operations", trials, crash_operations.run_batch,
                    batch=crash_operations.BATCH)  # fmt: skip
        tables.append((tmp_path / f"results-{jobs}" / "crash_operations.csv").read_bytes())
    assert tables[0] == tables[1]
