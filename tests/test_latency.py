"""The arms of the latency experiment meet equal conditions; what is recorded is what happened."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ckptlib.errors import CkptError, InvalidInput
from ckptlib.experiments import engine, latency, outputs, payloads, registry
from ckptlib.vfs import RecordingVFS

each_arm = pytest.mark.parametrize(
    ("mode", "protocol"), latency.ARMS, ids=["-".join(arm) for arm in latency.ARMS]
)


def plan(**changes) -> list[dict]:
    return latency.plan(**{"seed": 7, "runs": 6, "saves": 3, "process_runs": 3, **changes})


def without_processes(trials: list[dict]) -> list[dict]:
    """The same plan without its whole-process runs, each of which starts an interpreter."""
    return [{**trial, "process_run": None} for trial in trials]


def orders(trials: list[dict]) -> list[list[tuple[str, str]]]:
    """The arms of each block in the order in which they are run."""
    found: dict[int, dict] = {}
    for trial in sorted(trials, key=lambda trial: trial["trial_id"]):
        found.setdefault(trial["block"], {})[trial["mode"], trial["protocol"]] = None
    return [list(block) for block in found.values()]


def on_disk(folder: Path) -> int:
    """Bytes that a tree takes on the disk, in whole blocks."""
    paths = [folder, *folder.rglob("*")]
    return sum(path.lstat().st_blocks * 512 for path in paths)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """One small grid, run through the engine; each interpreter it starts leaves its process id."""
    place = tmp_path_factory.mktemp("grid")
    python = place / "python"
    python.write_text(f'#!/bin/sh\necho $$ >> "{place}/pids"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        frame = engine.run_grid(
            "latency",
            plan(runs=1, saves=2, process_runs=1),
            latency.run_batch,
            results=place,
            scratch=place / "scratch",
            batch="block",
            jobs=1,
        )
    return frame, place


@pytest.fixture(scope="module")
def block(tmp_path_factory):
    """One block that was run by itself, its own scratch folder gone since, as the engine has it."""
    place = tmp_path_factory.mktemp("block")
    trials = without_processes(plan(runs=1, saves=2, process_runs=1))
    (place / "batch").mkdir()
    latency.run_batch(trials, place / "batch")
    shutil.rmtree(place / "batch")
    return trials, place


# -- the plan --------------------------------------------------------------------------------------


def test_every_arm_has_the_same_blocks_seeds_and_steps():
    trials = plan()
    conditions = {
        arm: sorted((t["block"], t["seed"], t["step"]) for t in trials
                    if (t["mode"], t["protocol"]) == arm)
        for arm in latency.ARMS
    }  # fmt: skip
    assert len(conditions[latency.ARMS[0]]) == 6 * 3
    assert all(found == conditions[latency.ARMS[0]] for found in conditions.values())
    assert len({(t["block"], t["seed"]) for t in trials}) == len({t["seed"] for t in trials}) == 6


def test_a_block_is_a_permutation_of_all_arms_drawn_from_the_seed():
    assert all(sorted(block) == sorted(latency.ARMS) for block in orders(plan()))
    assert orders(plan()) == orders(plan())
    assert orders(plan()) != orders(plan(seed=8))


def test_the_order_differs_between_blocks():
    found = {tuple(block) for block in orders(plan())}
    assert len(found) == 6


def test_an_arm_is_run_at_one_stretch_within_its_block():
    trials = plan()
    arms = [(trial["block"], trial["mode"], trial["protocol"]) for trial in trials]
    changes = sum(before != after for before, after in itertools.pairwise(arms))
    assert changes == 6 * len(latency.ARMS) - 1


@pytest.mark.parametrize("process_runs", [1, 2, 3, 5, 6])
def test_whole_process_runs_are_spread_over_the_blocks_and_the_same_in_each_mode(process_runs):
    marked = [
        trial for trial in plan(process_runs=process_runs) if trial["process_run"] is not None
    ]
    assert {trial["protocol"] for trial in marked} == {"per_file"}
    runs = {
        mode: {t["process_run"]: t["block"] for t in marked if t["mode"] == mode}
        for mode in latency.MODES
    }
    assert sorted(runs["unsafe"]) == list(range(process_runs))
    assert runs["unsafe"] == runs["atomic_nodirsync"] == runs["atomic_dirsync"]
    gaps = [b - a for a, b in itertools.pairwise([*sorted(runs["unsafe"].values()), 6])]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    "wrong", [{"runs": 0}, {"saves": 0}, {"process_runs": 0}, {"process_runs": 7}]
)
def test_a_plan_that_measures_nothing_is_refused(wrong):
    with pytest.raises(InvalidInput, match=r"runs=.*saves=.*process_runs="):
        plan(**wrong)


def test_the_payload_is_the_papers():
    parts = latency.payload("per_file", 1)
    sizes = {name: payloads.tensor_bytes({name: part}) for name, part in parts.items()}
    assert (sizes["model"], sizes["optimizer"]) == (128 * 1024, 64 * 1024)
    assert 0 < sizes["rng"] < 8 * 1024
    assert latency.payload_bytes("per_file") == sum(sizes.values())
    single = latency.payload("single_file", 1)["model"]
    assert sorted(tuple(t.shape) for t in single.values()) == [(10,), (10, 128), (128,), (128, 128)]


def test_runs_of_one_seed_save_the_same_values_and_others_do_not():
    first, again, other = (
        latency.payload("per_file", seed)["model"]["layer1.weight"] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


# -- what is recorded ------------------------------------------------------------------------------


@each_arm
def test_the_flush_calls_on_record_are_those_that_reach_the_file_system(tmp_path, mode, protocol):
    recorder = RecordingVFS()
    save = latency.saver(
        tmp_path / "run", mode, protocol, latency.payload(protocol, 1), vfs=recorder
    )
    counts = []
    for step in range(1, 5):
        before = len(recorder.operations)
        receipt = save(step)
        flushes = [op for op in recorder.operations[before:] if op.call in ("flush", "flush_dir")]
        assert receipt.flush_calls == len(flushes)
        assert set(receipt.primitive.split("+")) == ({op.result for op in flushes} or {"none"})
        counts.append(len(flushes))
    assert len(set(counts[latency.WARM_UP :])) == 1
    assert (counts[-1] == 0) == (mode == "unsafe")


def test_dirsync_flushes_more_often_than_nodirsync_and_batched_less_than_per_file(grid):
    frame, _ = grid
    calls = frame.groupby(["mode", "protocol"])["flush_calls"].max()
    for protocol in ("per_file", "batched", "single_file"):
        assert calls["atomic_dirsync", protocol] > calls["atomic_nodirsync", protocol] > 0
    assert calls["atomic_dirsync", "batched"] < calls["atomic_dirsync", "per_file"]


def test_warm_up_saves_are_made_and_not_counted(tmp_path):
    steps = [latency.WARM_UP + 1, latency.WARM_UP + 2]
    timed = latency.timed_saves(tmp_path / "run", "unsafe", "per_file", 1, steps)
    assert [receipt.step for _, receipt in timed] == steps
    assert len(list((tmp_path / "run").glob("step-*"))) == latency.WARM_UP + len(steps)


def test_the_collector_is_off_and_torch_has_one_thread_while_saves_are_timed(tmp_path, monkeypatch):
    conditions = []

    def timed_saves(folder, mode, protocol, seed, steps):
        conditions.append((gc.isenabled(), torch.get_num_threads()))
        return [(0.0, SimpleNamespace(flush_calls=0, primitive="none"))] * len(steps)

    monkeypatch.setattr(latency, "timed_saves", timed_saves)
    latency.run_batch(without_processes(plan(runs=1, process_runs=1)), tmp_path)
    assert conditions == [(False, 1)] * len(latency.ARMS)


def test_collector_and_threads_are_put_back_as_they_were():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with latency.undisturbed():
            pass
        assert gc.isenabled() and torch.get_num_threads() == 2
        gc.disable()
        with latency.undisturbed():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        torch.set_num_threads(threads)


def test_nothing_that_a_block_wrote_is_deleted_with_the_blocks_own_folder(block):
    _, place = block
    stores = list(place.glob("block-*/*"))
    assert len(stores) == len(latency.ARMS)
    assert all(any(store.iterdir()) for store in stores)


def test_the_space_asked_for_holds_what_is_written(block):
    trials, place = block
    assert on_disk(place) <= latency.space_needed(trials)


def test_two_runs_give_the_same_stable_columns_byte_for_byte(grid, tmp_path):
    frame, _ = grid
    trials = without_processes(plan(runs=1, saves=2, process_runs=1))
    again = engine.run_grid(
        "latency", trials, latency.run_batch, results=tmp_path, scratch=tmp_path / "scratch",
        batch="block", jobs=1,
    )  # fmt: skip
    stable = registry.output("latency").stable()
    assert frame[stable].to_csv().encode() == again[stable].to_csv().encode()
    assert {"flush_calls", "payload_bytes", "block"} <= set(stable)


def test_every_planned_save_has_its_time_primitive_and_file_system(grid):
    frame, _ = grid
    assert len(frame) == len(plan(runs=1, saves=2, process_runs=1))
    assert (frame["latency_s"] > 0).all()
    assert (frame["filesystem"] != "").all()
    assert set(frame.loc[frame["mode"] == "unsafe", "flush_primitive"]) == {"none"}
    assert "none" not in set(frame.loc[frame["mode"] != "unsafe", "flush_primitive"])


def test_the_grid_leaves_no_scratch_behind(grid):
    _, place = grid
    assert not list((place / "scratch").iterdir())


# -- the paper's method ----------------------------------------------------------------------------


def test_the_grid_writes_the_whole_process_runs_beside_its_own_table(grid):
    _, place = grid
    whole = outputs.read(place, "latency_process")
    assert sorted(whole["mode"]) == sorted(latency.MODES)
    assert set(whole["saves"]) == {2} and set(whole["run"]) == {0}
    assert ((whole["import_s"] > 0) & (whole["import_s"] < whole["total_s"])).all()
    assert (whole["per_checkpoint_s"] == whole["total_s"] / whole["saves"]).all()


def test_each_whole_process_run_starts_a_new_process(grid):
    _, place = grid
    pids = [int(line) for line in (place / "pids").read_text().split()]
    assert len(set(pids)) == len(pids) == len(latency.MODES)
    assert os.getpid() not in pids


def test_a_whole_process_makes_every_save_and_says_when_the_first_began(tmp_path, capsys):
    store = tmp_path / "store"
    before = time.perf_counter()
    latency._process({"mode": "unsafe", "seed": 1, "saves": 3, "folder": str(store)})
    assert len(list(store.glob("step-*"))) == 3
    assert before < float(capsys.readouterr().out) < time.perf_counter()


def test_a_process_that_fails_is_an_error_with_its_own_words(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    trial = next(trial for trial in plan() if trial["process_run"] is not None)
    with pytest.raises(CkptError, match=r"exit status 1: (.|\n)*ENOTDIR|Not a directory"):
        latency.whole_process(trial, blocked / "store", 1)
