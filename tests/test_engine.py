"""The engine keeps what is finished, runs nothing twice, and gives the same bytes in any order."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptlib.errors import (
    InvalidInput,
    MissingInput,
    StaleResults,
    StoreBusy,
    UnsuitableScratch,
)
from ckptlib.experiments import engine, outputs, registry, workers
from ckptlib.experiments.context import check_scratch, open_run
from ckptlib.experiments.journal import Journal
from ckptlib.experiments.registry import Column, Output

TOY = Output(
    "toy",
    "00_tour",
    "test_engine",
    {
        "trial_id": Column("stable", "", "trial"),
        "seed": Column("stable", "", "seed", "int"),
        "value": Column("stable", "", "a float", "float"),
        "even": Column("stable", "", "a truth value", "bool"),
        "note": Column("stable", "", "text, often empty"),
        "maybe": Column("stable", "", "an int that may be missing", "int"),
    },
)
SIDE = Output(
    "toy_side",
    "00_tour",
    "test_engine",
    {"trial_id": Column("stable", "", "trial"), "i": Column("stable", "", "index", "int")},
    key=("trial_id", "i"),
)


def toy_batch(trials, scratch):
    """Leave one line on disk for every trial that really runs."""
    rows = []
    for trial in trials:
        assert not list(scratch.iterdir()), "every batch starts in an empty folder"
        if "log" in trial:
            with open(trial["log"], "a") as log:
                log.write(trial["trial_id"] + "\n")
        time.sleep(trial.get("sleep", 0))
        if trial.get("fail"):
            raise ValueError("the disk of this trial has gone")
        value = random.Random(trial["trial_id"]).random()
        rows.append(
            {
                "trial_id": trial["trial_id"],
                "seed": trial["seed"],
                "value": value,
                "even": trial["seed"] % 2 == 0,
                "note": "" if value < 0.5 else "above, a half",
                "maybe": None if value < 0.5 else int(10 * value),
            }
        )
    return rows


def batch_with_side_table(trials, scratch):
    rows = toy_batch(trials, scratch)
    for row in rows:
        row["toy_side"] = [{"trial_id": row["trial_id"], "i": i} for i in range(3)]
    return rows


def toy_plan(seeds=4, each=3, **more):
    return [
        {"trial_id": f"t{seed:03d}-{i}", "seed": seed, **more}
        for seed in range(seeds)
        for i in range(each)
    ]


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    monkeypatch.setitem(registry.OUTPUTS, "toy", TOY)
    monkeypatch.setitem(registry.OUTPUTS, "toy_side", SIDE)


def grid(folder: Path, plan, run_batch=toy_batch, **options):
    options = {"jobs": 1, **options}
    return engine.run_grid(
        "toy", plan, run_batch, results=folder / "results", scratch=folder / "scratch", **options
    )


def ran(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def csv_bytes(folder: Path, name="toy") -> bytes:
    return (folder / "results" / f"{name}.csv").read_bytes()


# One program for the tests that have to kill or interrupt a real run.
PROGRAM = """
import sys, test_engine
from pathlib import Path
from ckptlib.experiments import registry
registry.OUTPUTS["toy"] = test_engine.TOY
folder, jobs = Path(sys.argv[1]), int(sys.argv[2])
plan = test_engine.toy_plan(10, 1, sleep=0.15, log=str(folder / "log"))
test_engine.grid(folder, plan, jobs=jobs)
"""


def program(folder: Path, jobs: int) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(jobs)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished_in_journal(folder: Path) -> set[str]:
    journal = folder / "results" / ".partial" / "toy.jsonl"
    lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []
    return {row["trial_id"] for line in lines for row in json.loads(line)["rows"]}


def test_one_worker_and_two_give_the_same_bytes(tmp_path):
    grid(tmp_path / "one", toy_plan(), jobs=1)
    grid(tmp_path / "two", toy_plan(), jobs=2)
    assert csv_bytes(tmp_path / "one") == csv_bytes(tmp_path / "two")


STOPS = {
    "interrupted": lambda process: process.send_signal(signal.SIGINT),
    "interrupted_with_its_workers": lambda process: os.killpg(process.pid, signal.SIGINT),  # Ctrl-C
    "killed": lambda process: process.kill(),
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_a_run_stopped_in_the_middle_goes_on_and_runs_no_finished_trial_again(tmp_path, stop):
    process = program(tmp_path, 2)
    while len(finished_in_journal(tmp_path)) < 3:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    stop(process)
    process.wait()
    assert process.returncode != 0
    kept = finished_in_journal(tmp_path)
    assert 3 <= len(kept) < 10
    assert not (tmp_path / "results" / "toy.csv").exists()

    again = program(tmp_path, 2)
    said, _ = again.communicate()
    assert again.returncode == 0, said
    counts = {trial: ran(tmp_path / "log").count(trial) for trial in kept}
    assert counts == dict.fromkeys(kept, 1)

    quiet = tmp_path / "uninterrupted"
    grid(quiet, toy_plan(10, 1, log=str(tmp_path / "other")))
    assert csv_bytes(tmp_path) == csv_bytes(quiet)
    assert list((tmp_path / "scratch").iterdir()) == [], "nothing of the dead run is left"


def test_a_complete_result_is_not_made_again(tmp_path):
    log = tmp_path / "log"
    first = grid(tmp_path, toy_plan(log=str(log)))
    second = grid(tmp_path, toy_plan(log=str(log)))
    assert len(ran(log)) == 12
    assert first.equals(second)


def test_a_changed_plan_runs_what_is_new_and_nothing_else(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(engine.TrialFailed):
        plan = toy_plan(3, 1, log=str(log))
        grid(tmp_path, [*plan[:2], {**plan[2], "fail": True}])
    grid(tmp_path, plan)
    assert sorted(ran(log)) == ["t000-0", "t001-0", "t002-0", "t002-0"]


def test_other_code_means_that_every_trial_is_run_again(tmp_path, monkeypatch):
    source = tmp_path / "changing_toy.py"
    monkeypatch.syspath_prepend(tmp_path)
    log = tmp_path / "log"
    body = "import test_engine\ndef run_batch(t, s):\n    return test_engine.toy_batch(t, s)\n"
    source.write_text(body)
    import changing_toy

    grid(tmp_path, toy_plan(2, 1, log=str(log)), changing_toy.run_batch)
    grid(tmp_path, toy_plan(2, 1, log=str(log)), changing_toy.run_batch)
    assert len(ran(log)) == 2
    source.write_text(body + "# another version\n")
    grid(tmp_path, toy_plan(2, 1, log=str(log)), changing_toy.run_batch)
    assert len(ran(log)) == 4


@pytest.fixture(scope="module")
def half_done(tmp_path_factory):
    """A journal with four finished batches, and the keys that a fifth run would look for."""
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder / "toy.jsonl", set())
    for i in range(4):
        journal.append(f"key{i}", [{"trial_id": f"t{i}", "value": i / 7}])
    return (folder / "toy.jsonl").read_bytes()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_torn_or_altered_journal_never_yields_a_row_that_was_not_written(
    tmp_path, half_done, data
):
    damaged = bytearray(half_done)
    if data.draw(st.booleans(), label="tear"):
        damaged = damaged[: data.draw(st.integers(0, len(damaged)), label="length")]
    else:
        at = data.draw(st.integers(0, len(damaged) - 1), label="at")
        damaged[at] ^= data.draw(st.integers(1, 255), label="with")
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(damaged)
    keys = {f"key{i}" for i in range(4)}
    journal = Journal(path, keys)
    whole = {f"key{i}": [{"trial_id": f"t{i}", "value": i / 7}] for i in range(4)}
    assert all(whole.get(key) == rows for key, rows in journal.finished.items())
    journal.append("key9", [{"trial_id": "t9"}])
    assert Journal(path, keys | {"key9"}).finished["key9"] == [{"trial_id": "t9"}]


def test_a_torn_last_line_costs_one_batch(tmp_path):
    log = tmp_path / "log"
    plan = toy_plan(4, 1, log=str(log))
    with pytest.raises(engine.TrialFailed):
        grid(tmp_path, [*plan[:3], {**plan[3], "fail": True}])
    journal = tmp_path / "results" / ".partial" / "toy.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])
    grid(tmp_path, plan)
    assert sorted(ran(log)) == ["t000-0", "t001-0", "t002-0", "t002-0", "t003-0", "t003-0"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failing_trial_is_named_and_what_was_done_is_kept(tmp_path, jobs):
    plan = toy_plan(3, 3, log=str(tmp_path / "log"))
    plan[7] = {**plan[7], "fail": True}
    with pytest.raises(engine.TrialFailed, match=r"trial t002-1 failed: ValueError: the disk"):
        grid(tmp_path, plan, jobs=jobs)
    if jobs == 1:
        assert len(finished_in_journal(tmp_path)) == 6
    assert not (tmp_path / "results" / "toy.csv").exists()


def test_a_worker_that_dies_is_reported_as_such(tmp_path):
    with pytest.raises(engine.TrialFailed, match="a worker died"):
        grid(tmp_path, toy_plan(2, 1), killing_batch, jobs=2)


def killing_batch(trials, scratch):
    os.kill(os.getpid(), signal.SIGKILL)


def test_rows_under_the_name_of_another_output_become_its_table(tmp_path):
    grid(tmp_path, toy_plan(2, 2), batch_with_side_table)
    side = outputs.read(tmp_path / "results", "toy_side")
    assert len(side) == 12
    (tmp_path / "results" / "toy_side.csv").unlink()
    grid(tmp_path, toy_plan(2, 2), batch_with_side_table)
    assert len(outputs.read(tmp_path / "results", "toy_side")) == 12


def test_rows_for_trials_that_were_not_asked_for_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="rows for other trials"):
        grid(tmp_path, toy_plan(1, 2), forgetful_batch)


def forgetful_batch(trials, scratch):
    return toy_batch(trials, scratch)[1:]


@pytest.mark.parametrize("plan", [[], [{"seed": 1}], [{"trial_id": "a"}, {"trial_id": "a"}]])
def test_a_plan_without_unique_trial_ids_is_refused(tmp_path, plan):
    with pytest.raises(InvalidInput, match="the plan is not usable"):
        grid(tmp_path, plan)


def test_two_processes_cannot_make_one_output_at_once(tmp_path):
    process = program(tmp_path, 1)
    while not finished_in_journal(tmp_path):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    with pytest.raises(StoreBusy, match="another process is making toy"):
        grid(tmp_path, toy_plan(10, 1))
    process.kill()
    process.wait()


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.floats(allow_nan=False),
    maybe=st.none() | st.integers(-(2**62), 2**62),
    note=st.text(st.characters(codec="utf-8", exclude_characters="\r\0")),
)
def test_every_value_comes_back_from_a_table_unchanged(tmp_path, value, maybe, note):
    row = {"trial_id": "NA", "seed": 7, "value": value, "even": True, "note": note, "maybe": maybe}
    outputs.write(tmp_path, "toy", pandas.DataFrame([row]), facts={})
    found = outputs.read(tmp_path, "toy").iloc[0].to_dict()
    assert {**found, "maybe": None if pandas.isna(found["maybe"]) else found["maybe"]} == row


def test_a_table_comes_back_as_it_was_written(tmp_path):
    written = grid(tmp_path, toy_plan())
    read = outputs.read(tmp_path / "results", "toy")
    assert read.equals(written)
    assert b"True" in csv_bytes(tmp_path) and b"\r" not in csv_bytes(tmp_path)


def test_a_missing_table_says_which_notebook_makes_it(tmp_path):
    with pytest.raises(MissingInput, match=r"toy\.csv.*[Rr]un notebook 00_tour"):
        outputs.read(tmp_path, "toy")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda record: record.update(code_hash="0" * 64), "another version of the code"),
        (lambda record: record.clear(), "no provenance beside it"),
        (lambda record: record.update(sha256="0" * 64), "changed after it was made"),
    ],
)
def test_a_table_that_the_present_code_did_not_make_is_refused(tmp_path, damage, message):
    grid(tmp_path, toy_plan())
    path = tmp_path / "results" / "toy.provenance.json"
    record = json.loads(path.read_text())
    damage(record)
    path.write_text(json.dumps(record))
    with pytest.raises(StaleResults, match=message):
        outputs.read(tmp_path / "results", "toy")


def test_a_table_without_rows_comes_back_and_says_what_was_skipped(tmp_path):
    run = open_toy(tmp_path)
    written = run.write("toy", registry.empty("toy"), skipped={"xfs": "no mkfs.xfs"})
    assert run.read("toy").equals(written) and len(written) == 0
    assert outputs.skipped(run.results, "toy") == {"xfs": "no mkfs.xfs"}
    assert outputs.nothing_made(run.results, "toy")
    assert outputs.record_of(run.results, "toy")["root"] == (os.geteuid() == 0)


def test_the_record_beside_a_table_says_how_it_was_made(tmp_path):
    run = open_toy(tmp_path, epochs=3)
    run.grid("toy", toy_plan(), toy_batch)
    record = json.loads((tmp_path / "results" / "toy.provenance.json").read_text())
    assert record["parameters"] == {"epochs": 3}
    assert record["workers"] == 1 and record["profile"] == "smoke"
    assert record["filesystem"]["type"] and record["machine"]["kernel"]
    assert record["versions"]["torch"] and record["date"]


def open_toy(folder: Path, **options):
    common = {
        "profile": "smoke",
        "results": str(folder / "results"),
        "figures": str(folder / "figures"),
        "scratch": str(folder / "scratch"),
        "notebook": "00_tour",
        "jobs": 1,
    }
    return open_run(**{**common, **options})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"profile": "smok"}, "unknown profile.*smoke, paper, full"),
        ({"engine": "ray"}, "unknown engine.*loky, dask"),
        ({"jobs": 0}, "jobs is not a number of workers"),
        ({"jobs": True}, "jobs is not a number of workers"),
        ({"scheduler": "tcp://127.0.0.1:1"}, "a scheduler needs the dask engine"),
    ],
)
def test_a_wrong_parameter_ends_with_one_sentence_and_nothing_made(tmp_path, wrong, message):
    with pytest.raises(InvalidInput, match=message):
        open_toy(tmp_path, **wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs at /dev/shm (Linux)")
def test_a_scratch_folder_in_memory_is_refused_unless_forced(tmp_path):
    with pytest.raises(UnsuitableScratch, match=r"in memory.*tmpfs.*SCRATCH"):
        open_toy(tmp_path, scratch="/dev/shm/ckptlib-test")
    assert not Path("/dev/shm/ckptlib-test").exists()
    check_scratch(Path("/dev/shm"), force_memory=True, space=0)


def test_a_full_disk_is_refused(tmp_path):
    with pytest.raises(UnsuitableScratch, match="the disk of the scratch folder is full"):
        check_scratch(tmp_path, space=2**62)


def test_a_scratch_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UnsuitableScratch, match="cannot be written"):
        check_scratch(tmp_path / "file" / "scratch")


def test_relative_folders_are_taken_from_the_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from ckptlib.experiments.paths import project_root, resolve

    assert resolve("data/results") == project_root() / "data" / "results"
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dask_gives_the_same_bytes_and_listens_on_the_loopback_only(tmp_path, capsys):
    grid(tmp_path / "loky", toy_plan(), jobs=1)
    grid(tmp_path / "dask", toy_plan(), jobs=1, engine="dask")
    assert csv_bytes(tmp_path / "loky") == csv_bytes(tmp_path / "dask")
    assert "dashboard at http://127.0.0.1:" in capsys.readouterr().out


def test_a_dask_scheduler_that_does_not_answer_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "CONNECT_TIMEOUT", 1)
    with pytest.raises(InvalidInput, match=r"no Dask scheduler answers: tcp://127\.0\.0\.1:1"):
        grid(tmp_path, toy_plan(), engine="dask", scheduler="tcp://127.0.0.1:1")
