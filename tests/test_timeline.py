"""The timeline puts samples, operations and checkpoints on one clock, on any system's counters."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pandas
import psutil
import pytest

from ckptlib.errors import CkptError, InvalidInput
from ckptlib.experiments import registry, timeline

HZ = 20
_calls = itertools.count()


def counting(pid: int, disk: str | None) -> dict[str, int]:
    """A system that writes 1,000 bytes between any two samples."""
    return {"disk_write_bytes": 5_000_000 + 1000 * next(_calls)}


class MacPsutil:
    """What psutil offers on macOS: counters of disks, and none of processes."""

    AccessDenied = PermissionError

    @staticmethod
    def disk_io_counters(perdisk: bool):
        counters = SimpleNamespace(read_bytes=10, write_bytes=1000 * next(_calls))
        return {"disk0": counters} if perdisk else counters

    @staticmethod
    def Process(pid: int):
        return SimpleNamespace(pid=pid)  # has no io_counters


def mac_counters(pid: int, disk: str | None) -> dict[str, int]:
    return timeline.read_counters(pid, None, psutil=MacPsutil)


def no_counters(pid: int, disk: str | None) -> dict[str, int]:
    return {}


def dying(pid: int, disk: str | None) -> dict[str, int]:
    os._exit(1)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A short recording with this system's own counters."""
    scratch = tmp_path_factory.mktemp("timeline")
    frame = timeline.record(seed=1, epochs=2, save_every=1, sample_hz=HZ, scratch=scratch)
    assert not list(scratch.iterdir()), "the checkpoints are removed"
    return registry.validate(frame, "timeline")


def of_kind(frame, kind: str, **where):
    found = frame[frame["kind"] == kind]
    for column, value in where.items():
        found = found[found[column] == value]
    return found


# -- sampling --------------------------------------------------------------------------------------


def test_samples_are_in_order_and_enclose_the_block_on_one_clock():
    with timeline.sampled(HZ, source=counting) as samples:
        begun = time.perf_counter()
        time.sleep(0.3)
        ended = time.perf_counter()
    times = [sample.time for sample in samples]
    assert times == sorted(set(times))
    assert times[0] < begun < ended < times[-1]


def test_samples_come_at_the_rate_that_was_asked_for_and_never_faster():
    with timeline.sampled(HZ, source=counting) as samples:
        time.sleep(1)
    ticks = (samples[-1].time - samples[0].time) * HZ
    assert 0.4 * ticks <= len(samples) <= ticks + 2


def test_a_rate_too_slow_to_tell_checkpoints_apart_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="sample_hz"), timeline.sampled(5):
        pytest.fail("sampling began")


def test_a_system_that_counts_nothing_is_an_error():
    with (
        pytest.raises(CkptError, match="no I/O counters"),
        timeline.sampled(HZ, source=no_counters),
    ):
        pytest.fail("sampling began")


def test_a_sampling_process_that_dies_is_an_error_and_not_a_hang():
    with pytest.raises(CkptError, match="died"), timeline.sampled(HZ, source=dying):
        pytest.fail("sampling began")


def test_the_sampling_process_ends_when_the_block_fails():
    before = set(psutil.Process().children())
    with pytest.raises(ZeroDivisionError), timeline.sampled(HZ, source=counting):
        1 / 0  # noqa: B018
    left = {child for child in psutil.Process().children() if child not in before}
    assert not [child for child in left if "spawn_main" in " ".join(child.cmdline())]


def test_the_sampling_process_need_not_import_torch():
    code = (
        "import sys, ckptlib.experiments.timeline;"
        "sys.exit(bool({'torch', 'numpy', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- counters --------------------------------------------------------------------------------------


def test_without_counters_of_processes_those_of_the_disk_are_taken(tmp_path):
    assert set(mac_counters(1, None)) == {"disk_read_bytes", "disk_write_bytes"}
    frame = timeline.record(
        seed=1, epochs=1, save_every=1, sample_hz=HZ, scratch=tmp_path, source=mac_counters
    )
    assert set(of_kind(frame, "sample")["name"]) == {"disk_read_bytes", "disk_write_bytes"}
    assert len(of_kind(frame, "event", name="checkpoint")) == len(timeline.MODES)


def test_the_counters_of_one_disk_are_told_from_those_of_all():
    class TwoDisks(MacPsutil):
        @staticmethod
        def disk_io_counters(perdisk: bool):
            disks = {
                name: SimpleNamespace(read_bytes=0, write_bytes=n)
                for name, n in (("a", 1), ("b", 2))
            }
            return disks if perdisk else SimpleNamespace(read_bytes=0, write_bytes=3)

    written = {disk: timeline.read_counters(1, disk, psutil=TwoDisks) for disk in ("a", "b", None)}
    assert [counters["disk_write_bytes"] for counters in written.values()] == [1, 2, 3]


def test_totals_start_at_zero_and_rates_add_up_to_them(tmp_path):
    frame = timeline.record(
        seed=1, epochs=1, save_every=1, sample_hz=HZ, scratch=tmp_path, source=counting
    )
    totals = of_kind(frame, "sample", unit="B").set_index("t_s")["value"]
    rates = of_kind(frame, "sample", unit="B/s").set_index("t_s")["value"]
    assert totals.tolist() == [1000 * n for n in range(len(totals))]
    steps = totals.index.to_series().diff().iloc[1:]
    assert (rates * steps).tolist() == pytest.approx([1000] * len(steps))


# -- operations and events -------------------------------------------------------------------------


def test_all_modes_save_at_the_same_steps(recorded):
    saves = of_kind(recorded, "event", name="checkpoint")
    steps = {mode: saves.loc[saves["mode"] == mode, "step"].tolist() for mode in timeline.MODES}
    assert len(steps["unsafe"]) == 2
    assert steps["unsafe"] == steps["atomic_nodirsync"] == steps["atomic_dirsync"]


def test_a_dirsync_save_shows_its_flushes_of_files_and_directories(recorded):
    for _, save in of_kind(recorded, "event", name="checkpoint", mode="atomic_dirsync").iterrows():
        calls = of_kind(recorded, "operation", mode="atomic_dirsync", step=save["step"])["name"]
        files = (calls == "create").sum()
        assert files >= 5, "three parts or more, MANIFEST and COMMIT"
        assert (calls == "flush").sum() == files
        assert (calls == "flush_dir").sum() >= files


def test_nodirsync_flushes_no_directory_and_unsafe_nothing(recorded):
    calls = of_kind(recorded, "operation").groupby("mode")["name"].agg(set)
    assert "flush" in calls["atomic_nodirsync"] and "flush_dir" not in calls["atomic_nodirsync"]
    assert not {"flush", "flush_dir"} & calls["unsafe"]


def test_the_operations_of_a_checkpoint_lie_between_its_begin_and_its_end(recorded):
    for _, save in of_kind(recorded, "event", name="checkpoint").iterrows():
        calls = of_kind(recorded, "operation", mode=save["mode"], step=save["step"])
        assert len(calls)
        assert (calls["t_s"] >= save["t_s"]).all()
        assert (calls["t_s"] + calls["value"] <= save["t_s"] + save["value"]).all()


def test_samples_enclose_everything_and_carry_the_mode_in_force(recorded):
    samples = of_kind(recorded, "sample")["t_s"]
    others = recorded.loc[recorded["kind"] != "sample", "t_s"]
    assert samples.min() == 0 <= others.min() and others.max() <= samples.max()
    assert recorded["t_s"].is_monotonic_increasing
    assert set(of_kind(recorded, "sample")["mode"]) <= {"", *timeline.MODES}


def test_what_a_mode_left_is_written_back_before_the_next_begins(recorded):
    events = of_kind(recorded, "event")
    assert events["name"].tolist() == ["checkpoint", "checkpoint", "write_back"] * 3


def test_arrivals_are_the_differences_between_the_samples_around_a_mode_and_its_write_back():
    frame = pandas.DataFrame(
        [
            (0.0, "sample", "disk_write_bytes", 0, "B", ""),
            (1.0, "event", "checkpoint", 0.5, "s", "unsafe"),
            (2.0, "sample", "disk_write_bytes", 10, "B", ""),
            (2.2, "event", "checkpoint", 0.5, "s", "unsafe"),
            (3.0, "sample", "disk_write_bytes", 30, "B", ""),
            (4.0, "event", "write_back", 0.5, "s", ""),
            (5.0, "sample", "disk_write_bytes", 100, "B", ""),
            (6.0, "event", "checkpoint", 0.5, "s", "atomic_dirsync"),
            (7.0, "sample", "disk_write_bytes", 300, "B", ""),
            (8.0, "event", "write_back", 0.5, "s", ""),
            (9.0, "sample", "disk_write_bytes", 301, "B", ""),
        ],
        columns=["t_s", "kind", "name", "value", "unit", "mode"],
    )
    assert timeline.arrivals(frame).to_dict("index") == {
        "unsafe": {"disk while saving": 30, "disk in the write-back": 70},
        "atomic_dirsync": {"disk while saving": 200, "disk in the write-back": 1},
    }


def test_arrivals_cover_every_mode_of_a_recording(recorded):
    found = timeline.arrivals(recorded)
    assert list(found.index) == list(timeline.MODES)
    assert (found >= 0).all(axis=None)


@pytest.mark.parametrize(("epochs", "save_every"), [(0, 1), (1, 0), (1, 2)])
def test_a_training_that_saves_nothing_is_refused(tmp_path, epochs, save_every):
    with pytest.raises(InvalidInput, match="no checkpoint"):
        timeline.record(
            seed=1, epochs=epochs, save_every=save_every, sample_hz=HZ, scratch=tmp_path
        )
