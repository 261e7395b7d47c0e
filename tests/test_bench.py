"""Benchmarks run interleaved, say what they left out and why, and never fail by being slow."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pandas
import pytest

from ckptlib.bench import __main__ as command
from ckptlib.bench import calibration, frame, power
from ckptlib.bench.frame import Benchmark, Sample, Setting
from ckptlib.bench.table import table
from ckptlib.crashes import filesystems
from ckptlib.crashes.filesystems import MAIN
from ckptlib.errors import InvalidInput

ENABLE = "no root: sudo make bench"


def toy(name: str, log: list[str], *seconds: float, **more) -> Benchmark:
    """A benchmark whose clock is made up: each measurement takes the next of ``seconds``."""

    def prepare(setting: Setting):
        log.append(f"prepare {name}")
        assert setting.scratch.is_dir() and not list(setting.scratch.iterdir())
        waiting = iter(seconds)

        def measure() -> Sample:
            log.append(name)
            spent = next(waiting)
            return Sample(6.0, spent, {"think": spent / 3})

        return measure

    return Benchmark(name, f"the toy {name}", "things/s", prepare, **more)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run the command with a table of its own; give what it recorded."""

    def run(entries: list[Benchmark], *arguments: str, status: int = 0) -> dict:
        monkeypatch.setattr(command, "table", lambda jobs: entries)
        output = tmp_path / "out"
        given = ["--scratch", str(tmp_path / "scratch"), "--output", str(output), *arguments]
        assert command.main(given) == status
        assert not list((tmp_path / "scratch").iterdir()), "what was measured on is gone"
        return json.loads((output / "bench.json").read_text())

    return run


# -- the table ------------------------------------------------------------------------------------


def test_every_benchmark_has_a_name_of_its_own_in_a_group_and_a_known_peer():
    entries = table(jobs=3)
    names = [entry.name for entry in entries]
    assert len(set(names)) == len(names)
    for entry in entries:
        assert len(entry.name.split("/")) >= 2 and entry.measures and entry.unit.endswith("/s")
        assert entry.peer in ("", *names) and entry.peer != entry.name


def test_power_is_measured_on_each_file_system_with_one_worker_and_with_all():
    names = {entry.name for entry in table(jobs=3)}
    assert {f"power/{name}/{workers}" for name in MAIN for workers in (1, 3)} <= names
    alone = {entry.name for entry in table(jobs=1)}
    assert {f"power/{name}/1" for name in MAIN} <= alone and "power/ext4/3" not in alone


@pytest.mark.parametrize(
    ("only", "chosen"),
    [
        ("", {"calibration/c", "a/1", "a/2", "b/1"}),
        ("a", {"calibration/c", "a/1", "a/2"}),
        ("b", {"calibration/c", "b/1"}),
        ("a/2", {"calibration/c", "a/1", "a/2"}),
        ("b, a/1", {"calibration/c", "a/1", "b/1"}),
    ],
)
def test_a_choice_brings_its_peers_and_the_calibration(only, chosen):
    entries = [toy(name, []) for name in ("calibration/c", "a/1", "b/1")]
    entries.append(toy("a/2", [], peer="a/1"))
    assert {entry.name for entry in frame.choose(entries, only)} == chosen


@pytest.mark.parametrize("only", ["c", "a/3", "aa", "a/"])
def test_an_unknown_choice_is_refused_with_the_known_groups(only):
    with pytest.raises(InvalidInput, match=r"no such benchmark.*calibration, a"):
        frame.choose([toy("calibration/c", []), toy("a/1", [])], only)


# -- rounds ---------------------------------------------------------------------------------------


def test_every_round_measures_each_once_and_the_order_changes_but_not_between_runs(tmp_path):
    log, names = [], ["x/1", "x/2", "y/1"]
    entries = [toy(name, log, *[1.0] * 6) for name in names]
    result = frame.run(entries, Setting(tmp_path / "one"), rounds=6)
    assert log[:3] == [f"prepare {name}" for name in names], "nothing is prepared in between"
    rounds = [log[start : start + 3] for start in range(3, 21, 3)]
    assert all(sorted(part) == names for part in rounds) and len(set(map(tuple, rounds))) > 1
    assert result.orders == rounds
    again = frame.run([toy(n, [], *[1.0] * 6) for n in names], Setting(tmp_path / "two"), rounds=6)
    assert again.orders == rounds


def test_ratios_are_those_of_the_same_round_and_parts_are_for_one_unit(tmp_path):
    one, two = toy("x/1", [], 1.0, 6.0, 2.0), toy("x/2", [], 0.5, 3.0, 2.0, peer="x/1")
    rows = frame.summary(frame.run([one, two], Setting(tmp_path / "place"), rounds=3))
    assert [row["rates"] for row in rows] == [[6.0, 1.0, 3.0], [12.0, 2.0, 3.0]]
    assert (rows[0]["median"], rows[0]["lowest"], rows[0]["highest"]) == (3.0, 1.0, 6.0)
    assert rows[1]["ratio"] == {"median": 2.0, "lowest": 1.0, "highest": 2.0}
    assert "ratio" not in rows[0]
    assert rows[0]["parts_ms"]["think"] == pytest.approx(1e3 * (9 / 3) / (3 * 6))


# -- the command ----------------------------------------------------------------------------------


def test_the_record_says_what_was_measured_where_and_when(bench, tmp_path, capsys):
    entries = [toy("calibration/c", [], 1, 1), toy("a/1", [], 2, 3), toy("a/2", [], 1, 1)]
    record = bench(entries, "--rounds", "2", "--jobs", "3")
    assert {"kernel", "cpu", "cores"} <= record["machine"].keys() and record["versions"]["python"]
    assert record["date"] and record["code_hash"] and record["filesystem"]["type"]
    assert (record["rounds"], record["jobs"]) == (2, 3)
    assert [row["name"] for row in record["benchmarks"]] == ["calibration/c", "a/1", "a/2"]
    rows = pandas.read_csv(tmp_path / "out" / "bench.csv")
    assert list(rows[rows["benchmark"] == "a/1"]["rate"]) == [3.0, 2.0]
    assert set(rows["position"]) == {0, 1, 2}
    said = capsys.readouterr().out
    assert "the toy a/1" in said and "think" in said and "bench.json" in said


def test_what_cannot_run_is_skipped_with_its_reason_and_that_is_no_failure(bench, capsys):
    log = []
    needs = {"needs": lambda setting: ENABLE}
    record = bench([toy("a/1", log, **needs), toy("a/2", log, peer="a/1", **needs)])
    assert log == [] and record["benchmarks"] == []
    assert record["skipped"] == {"a/1": ENABLE, "a/2": ENABLE}
    said = capsys.readouterr().out
    assert f"skipped: a/1, a/2: {ENABLE}" in said and "Nothing could be measured" in said


def test_one_that_fails_is_named_and_the_others_go_on(bench, capsys):
    def broken(setting):
        raise OSError("no such device")

    entries = [toy("a/1", [], 1, 1, 1), toy("a/2", [], 1, peer="a/1"),
               Benchmark("a/3", "broken", "things/s", broken)]  # fmt: skip
    record = bench(entries, "--rounds", "3", status=1)  # a/2 fails in the second round
    assert [row["name"] for row in record["benchmarks"]] == ["a/1"]
    assert "StopIteration" in record["failed"]["a/2"]
    assert "no such device" in record["failed"]["a/3"]
    assert "failed: a/3: OSError: no such device" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", [["--only", "nothing"], ["--rounds", "0"], ["--jobs", "two"], ["--jobs", "-1"]]
)
def test_a_wrong_option_is_one_sentence_and_nothing_is_made(tmp_path, capsys, wrong):
    places = ["--scratch", str(tmp_path / "scratch"), "--output", str(tmp_path / "out")]
    assert command.main([*places, *wrong]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Nothing was measured") and len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_choice_without_root_says_how_to_enable_it(tmp_path, capsys, monkeypatch):
    reasons = dict.fromkeys(filesystems.FILESYSTEMS, "it needs root: sudo make reproduce")
    monkeypatch.setattr(power, "_support", lambda: reasons)
    places = ["--scratch", str(tmp_path / "scratch"), "--output", str(tmp_path / "out")]
    assert command.main([*places, "--only", "power", "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    assert "skipped: power/ext4/1" in said and "it needs root: sudo make bench" in said
    assert "SHA-256" in said


# -- what is measured -----------------------------------------------------------------------------


@pytest.mark.parametrize("prepare", [calibration.sha256, calibration.forks])
def test_the_calibration_measures_something(prepare, tmp_path):
    sample = prepare(Setting(tmp_path))()
    assert sample.amount > 0 and sample.seconds > 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs_power(name)) for name in MAIN]
)
def test_crash_states_are_judged_and_all_of_their_time_is_told_by_part(name, tmp_path):
    assert power.needs(name, Setting(tmp_path)) == ""
    sample = power.judging(name, 1, Setting(tmp_path), states=5)()
    assert sample.amount == 5 * len(power.ARMS)
    assert {"serve", "mount", "judge", "unmount", power.REST} <= sample.parts.keys()
    assert all(spent > 0 for spent in sample.parts.values())
    assert sum(sample.parts.values()) <= sample.seconds, "one worker does one thing at a time"


@pytest.mark.needs_power
def test_each_worker_judges_as_many_states_as_one_alone(tmp_path):
    measure = partial(power.judging, "ext4", 2)(Setting(tmp_path), states=5)
    assert measure().amount == 2 * 5 * len(power.ARMS)
    assert measure().amount == 2 * 5 * len(power.ARMS), "it can be repeated"
    assert not [line for line in Path("/proc/self/mounts").read_text().splitlines()
                if str(tmp_path) in line]  # fmt: skip
