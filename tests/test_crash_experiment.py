"""The crash experiment: fair arms, real kills, and rows that depend on nothing but the seeds."""

from __future__ import annotations

import shutil
from functools import partial

import pandas as pd
import pytest

from ckptlib import guard, install, temps
from ckptlib.catalog import step_name
from ckptlib.crashes import kill, oracle
from ckptlib.digests import content_digest
from ckptlib.errors import InvalidInput
from ckptlib.experiments import crash, payloads, registry
from ckptlib.experiments.context import open_run
from ckptlib.vfs import REAL

PAPER = dict(seed=2025, seeds=10, saves=40, sigkill_seeds=10, sigkill_saves=10)
SMALL = dict(seed=7, seeds=1, saves=2, sigkill_seeds=2, sigkill_saves=1)
BEFORE_COMMIT = ["after_model", "before_manifest", "manifest_partial", "before_commit"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> pd.DataFrame:
    """One small grid, run once."""
    found = crash.run_batch(crash.plan(**SMALL), tmp_path_factory.mktemp("scratch"))
    return registry.validate(pd.DataFrame(found), "crash")


# -- the plan -----------------------------------------------------------------------------------


def test_the_paper_profile_has_the_papers_trials():
    trials = pd.DataFrame(crash.plan(**PAPER))
    artifact = trials[trials["method"] == "artifact"]
    assert artifact.groupby(["mode", "crash_point"]).size().to_dict() == {
        ("unsafe", "after_model"): 400,
        ("unsafe", "before_manifest"): 10,
        ("unsafe", "manifest_partial"): 10,
        ("unsafe", "before_commit"): 10,
        ("atomic_dirsync", "none"): 400,
    }


def test_every_killed_arm_meets_the_same_seeds_steps_and_points():
    trials = pd.DataFrame(crash.plan(**PAPER))
    killed = trials[trials["method"] == "sigkill"]
    for single in (True, False):
        part = killed[(killed["protocol"] == crash.SINGLE_FILE) == single]
        met = {
            arm: set(rows[["seed", "step", "crash_point"]].itertuples(index=False, name=None))
            for arm, rows in part.groupby(["mode", "protocol"])
        }
        assert len(met) == (3 if single else 5)
        assert len(set(map(frozenset, met.values()))) == 1


def test_ids_are_unique_and_their_text_order_is_the_plans():
    ids = [trial["trial_id"] for trial in crash.plan(**PAPER)]
    assert ids == sorted(set(ids))


@pytest.mark.parametrize("name", ["seeds", "saves", "sigkill_seeds", "sigkill_saves"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_count_that_is_none_is_refused_by_name(name, value):
    with pytest.raises(InvalidInput, match=rf"unusable {name}"):
        crash.plan(**{**PAPER, name: value})


def test_the_payload_has_the_papers_sizes_and_follows_from_seed_and_step():
    state = payloads.group(2025, 3)
    assert payloads.tensor_bytes({"model": state["model"]}) == 128 * 1024
    assert payloads.tensor_bytes({"optimizer": state["optimizer"]}) == 64 * 1024
    digests = {content_digest(payloads.group(*at)["model"]) for at in ((1, 2), (2, 1), (1, 3))}
    assert len(digests) == 3
    assert content_digest(payloads.group(2025, 3)) == content_digest(state)


def test_every_crash_point_is_explained():
    shown = pd.DataFrame(crash.crash_points())
    planned = {trial["crash_point"] for trial in crash.plan(**SMALL)}
    assert set(shown["crash_point"]) == planned
    assert shown["strikes when"].str.len().min() > 10


# -- the paper's injection ----------------------------------------------------------------------


def test_after_model_leaves_half_a_model_in_a_committed_group_and_nothing_dies(tmp_path):
    bench = crash.Bench(tmp_path, "unsafe", "artifact", 7)
    place, _ = bench.prepare(3)
    whole = (place / step_name(2) / crash.MODEL).stat().st_size
    assert crash._inject(bench, place, 3, "after_model") == [3]  # save() returned
    directory = place / step_name(3)
    manifest, _, verdict = guard.peek(REAL, str(directory))
    assert verdict  # COMMIT fits MANIFEST, which holds the size that was meant
    (entry,) = [entry for entry in manifest.entries if entry.file == crash.MODEL]
    assert (directory / crash.MODEL).stat().st_size == whole // 2 < entry.size == whole


def test_a_writer_that_stops_leaves_what_it_had_written(tmp_path):
    bench = crash.Bench(tmp_path, "unsafe", "artifact", 7)
    left = {}
    for point in crash.ARTIFACT_POINTS:
        place, _ = bench.prepare(3)
        assert crash._inject(bench, place, 3, point) == []
        left[point] = {p.name: p.stat().st_size for p in (place / step_name(3)).iterdir()}
        place.rename(tmp_path / point)
    parts = {"model.pt", "optimizer.pt", "rng.pt"}
    assert set(left["before_manifest"]) == parts
    assert set(left["before_commit"]) == set(left["manifest_partial"]) == {*parts, "MANIFEST.json"}
    full, torn = (left[p]["MANIFEST.json"] for p in ("before_commit", "manifest_partial"))
    assert torn == full // 2


def test_the_injected_groups_are_refused_and_the_controls_are_not(rows):
    injected = rows[rows["method"] == "artifact"]
    assert not injected["killed"].any()
    assert (injected["group_valid"] == (injected["crash_point"] == "none")).all()
    torn = injected[injected["crash_point"] == "after_model"]
    assert (torn["reason"] == "size mismatch").all()
    # save() had returned: what was acknowledged is lost, which unsafe does not promise otherwise
    assert (torn["outcome"] == "lost_acknowledged").all() and torn["expected"].all()


# -- the real kill ------------------------------------------------------------------------------


def test_a_kill_before_commit_leaves_the_group_invalid_in_every_mode(rows):
    killed = rows[(rows["method"] == "sigkill") & rows["crash_point"].isin(BEFORE_COMMIT)]
    assert killed.groupby(["mode", "protocol"]).ngroups == 5
    assert killed["killed"].all() and not killed["group_valid"].any()
    assert (killed["recovered_step"] == killed["acknowledged_step"]).all()
    assert (killed["outcome"] == "lost_unacknowledged").all()


def test_a_kill_after_commit_keeps_the_group_that_was_never_acknowledged(rows):
    groups = rows[rows["protocol"] != crash.SINGLE_FILE]
    late = groups[groups["crash_point"] == "before_acknowledge"]
    assert late["killed"].all() and (late["outcome"] == "kept").all()
    assert (late["recovered_step"] == late["in_flight_step"]).all()
    assert (late["acknowledged_step"] < late["in_flight_step"]).all()


def test_controls_acknowledge_and_keep(rows):
    control = rows[rows["crash_point"] == "none"]
    assert not control["killed"].any() and control["in_flight_step"].isna().all()
    assert (control["acknowledged_step"] == control["step"]).all()
    assert (control["outcome"] == "kept").all() and control["group_valid"].all()


def test_an_overwritten_single_file_is_lost_in_unsafe_and_old_or_new_in_the_atomic_modes(rows):
    struck = rows[(rows["protocol"] == crash.SINGLE_FILE) & rows["killed"]]
    unsafe = struck["mode"] == "unsafe"
    assert (struck.loc[unsafe, "outcome"] == "unrecoverable").all()
    by_point = struck[~unsafe].groupby("crash_point")["outcome"].unique().map(list).to_dict()
    assert by_point == {"mid_write": ["lost_unacknowledged"], "before_acknowledge": ["kept"]}


def test_no_trial_breaks_a_promise_and_every_reason_is_of_the_vocabulary(rows):
    assert rows["expected"].all()
    assert set(rows["reason"]) <= {"", *oracle.REASONS}
    assert set(rows["outcome"]) <= set(oracle.OUTCOMES)
    assert ((rows["reason"] == "") == rows["group_valid"]).all()


def test_an_atomic_mode_that_writes_in_place_is_caught(tmp_path, monkeypatch):
    def in_place(path, source, mode, *, vfs):
        install(path, source, "unsafe", vfs=vfs)

    monkeypatch.setattr(crash, "install", in_place)
    trials = [t for t in crash.plan(**SMALL) if t["protocol"] == crash.SINGLE_FILE]
    found = pd.DataFrame(crash.run_batch(trials, tmp_path))
    atomic = found[found["killed"] & (found["mode"] != "unsafe")]
    assert len(atomic) and not atomic["expected"].any()
    assert (atomic["rule"] == "2 acknowledged means durable").all()


def test_a_next_save_that_does_not_clean_up_is_caught(tmp_path, monkeypatch):
    trials = [t for t in crash.plan(**SMALL) if t["protocol"] == "batched"]
    trials = [t for t in trials if t["crash_point"] == "after_model"][:1]
    monkeypatch.setattr(temps, "sweep", lambda *arguments, **options: [])
    (found,) = crash.run_batch(trials, tmp_path)
    assert (found["rule"][:2], found["expected"]) == ("6 ", False)


def test_nothing_is_left_in_the_scratch_folder(tmp_path):
    crash.run_batch(crash.plan(**SMALL)[:3], tmp_path)
    assert not list(tmp_path.iterdir())


# -- any worker, any order ----------------------------------------------------------------------


def test_rows_are_the_same_bytes_for_one_and_two_workers(tmp_path):
    tables = []
    for jobs in (1, 2):
        run = open_run(
            profile="smoke", results=str(tmp_path / str(jobs)), figures=str(tmp_path / "figures"),
            scratch=str(tmp_path / "scratch"), notebook="03_crash", jobs=jobs,
            force_memory_scratch=True,
        )  # fmt: skip
        run.grid("crash", crash.plan(**SMALL)[::3], crash.run_batch, batch=crash.BATCH)
        tables.append((tmp_path / str(jobs) / "crash.csv").read_bytes())
    assert tables[0] == tables[1]


@pytest.mark.parametrize(("mode", "protocol"), crash.GROUP_ARMS)
def test_killed_at_any_operation_recovery_keeps_every_promise(tmp_path, mode, protocol):
    """A sample of all points of one save; every rule that the mode promises holds after each."""
    bench = crash.Bench(tmp_path, mode, protocol, 7)
    place, _ = bench.prepare(3)
    points = list(kill.every_point(bench.trace(3)))
    for point in points[:: len(points) // 12]:
        shutil.rmtree(place)
        place, ledger = bench.prepare(3)
        ledger.begin(3, bench.digests(3))
        for step in kill.run_killed(partial(bench.save, place, 3), point):
            ledger.acknowledge(step)
        found = bench.judge(place, ledger, 3)
        assert found.outcome in ("kept", "lost_unacknowledged"), point
        done = found.recovered_step == 3
        after = bench.next_save(place, 4 if done else 3)
        assert found.also(*after.broken).expected, (point, after)
