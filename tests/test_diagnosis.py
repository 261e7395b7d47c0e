"""The five layers on damaged bytes: each objects to what is its own, and no file can do harm."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from ckptlib import diagnosis, install
from ckptlib.diagnosis import LAYERS, Diagnosis, Expectation, Limits, diagnose, diagnose_many
from ckptlib.digests import content_digest
from ckptlib.errors import CkptError, InvalidInput
from ckptlib.formats import torch_format
from ckptlib.formats.schema import schema_of

STATE = {"weight": torch.arange(64.0).reshape(8, 8), "bias": torch.zeros(8), "step": 3}


def saved(path: Path, state=STATE, container=torch_format, name: str = "torch") -> Expectation:
    """Save a state as anybody would, and note what is recorded of it."""
    receipt = install(path, lambda sink: container.save(state, sink), "atomic_nodirsync")
    return Expectation(receipt.sha256, receipt.bytes, content_digest(state), schema_of(state), name)


@pytest.fixture
def good(tmp_path) -> tuple[Path, Expectation]:
    """An intact file, and what is recorded of it."""
    path = tmp_path / "good.pt"
    return path, saved(path)


def objections(found: Diagnosis) -> list[str]:
    return [name for name in LAYERS if getattr(found, name)]


@pytest.mark.parametrize("container", ["torch", "safetensors", "numpy"])
def test_no_layer_objects_to_an_intact_file_of_any_format(tmp_path, container):
    from ckptlib import formats

    path = tmp_path / "checkpoint"
    found = diagnose(path, saved(path, STATE, formats.get(container), container))
    assert not found.detected and found.layer == "" and found.details == ""


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _other_value(path: Path) -> None:
    torch.save({**STATE, "bias": torch.ones(8)}, path)


def _other_shape(path: Path) -> None:
    torch.save({**STATE, "bias": torch.zeros(9)}, path)


def _other_container(path: Path) -> None:
    torch.save(STATE, path)  # writes the file's own name into the archive, unlike our sink


def _not_a_number(path: Path) -> None:
    torch.save({**STATE, "bias": torch.full((8,), float("nan"))}, path)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (_truncated, ["load_error", "file_sha_mismatch"]),
        (_other_shape, ["schema_mismatch", "digest_mismatch", "file_sha_mismatch"]),
        (_other_value, ["digest_mismatch", "file_sha_mismatch"]),
        (_other_container, ["file_sha_mismatch"]),
        (_not_a_number, ["digest_mismatch", "file_sha_mismatch", "nonfinite"]),
    ],
)
def test_each_layer_objects_to_what_is_its_own(good, damage, expected):
    path, recorded = good
    damage(path)
    found = diagnose(path, recorded)
    assert objections(found) == expected
    assert found.layer == expected[0]
    assert all(name in found.details for name in expected)


def test_a_state_that_was_saved_with_nan_is_refused_by_the_last_layer_alone(tmp_path):
    path = tmp_path / "nan.pt"
    found = diagnose(path, saved(path, {"loss": float("nan"), "w": torch.ones(2)}))
    assert objections(found) == ["nonfinite"] == [found.layer]
    assert "loss" in found.details


def test_layers_without_a_record_are_not_judged(good):
    path, recorded = good
    _other_shape(path)
    found = diagnose(path, replace(recorded, content_digest=None, schema=None))
    assert objections(found) == ["file_sha_mismatch"]


def test_what_is_missing_or_no_file_is_a_load_error_and_never_hangs(tmp_path, good):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "pipe"):
        found = diagnose(path, good[1], limits=Limits(seconds=5))
        assert objections(found) == ["load_error", "file_sha_mismatch"]
        assert "no end within" not in found.details


def test_a_mistaken_format_is_an_error_and_not_damage(good):
    with pytest.raises(InvalidInput, match="unknown format"):
        diagnose(good[0], replace(good[1], format="pickle"))


class _Marks:
    """Leaves a file behind as soon as somebody unpickles it."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def test_code_in_a_damaged_file_never_runs(tmp_path, good):
    marker, path, recorded = tmp_path / "ran", *good
    program = pickle.dumps(_Marks(marker), protocol=2)
    pickle.loads(program).close()
    marker.unlink()  # it does run where it is let: the test is not toothless

    replaced = path.with_suffix(".replaced")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(replaced, "w") as new:
        for entry in old.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            new.writestr(entry.filename, program if is_pickle else old.read(entry))
    legacy = tmp_path / "legacy.pt"
    legacy.write_bytes(program)
    for found in diagnose_many([(replaced, recorded), (legacy, recorded)]):
        assert objections(found) == ["load_error", "file_sha_mismatch"]
    assert not marker.exists()


def _endless(path: Path) -> None:
    """A small file whose state has 2**50 leaves, as a list that holds one list twice, and so on."""
    state = [torch.zeros(1)]
    for _ in range(50):
        state = [state, state]
    torch.save(state, path)


def test_a_file_that_takes_forever_is_a_load_error_and_the_rest_goes_on(tmp_path, good):
    path, recorded = good
    _endless(tmp_path / "endless.pt")
    pairs = [(path, recorded), (tmp_path / "endless.pt", recorded), (path, recorded)]
    before, endless, after = diagnose_many(pairs, limits=Limits(seconds=2))
    assert not before.detected and not after.detected
    assert endless.layer == "load_error" and endless.file_sha_mismatch
    assert "no end within 2 s" in endless.details


def _bomb(path: Path, size: int) -> None:
    """A small torch file whose pickle unpacks to ``size`` bytes."""
    torch.save(STATE, path.with_suffix(".intact"))
    with zipfile.ZipFile(path.with_suffix(".intact")) as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            method = zipfile.ZIP_DEFLATED if is_pickle else zipfile.ZIP_STORED
            new.writestr(entry.filename, bytes(size) if is_pickle else old.read(entry), method)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="macOS does not limit memory")
def test_a_file_that_takes_all_memory_is_a_load_error_and_the_rest_goes_on(tmp_path, good):
    path, recorded = good
    size = 192 << 20
    _bomb(tmp_path / "bomb.pt", size)
    assert (tmp_path / "bomb.pt").stat().st_size < size / 500
    bomb = (tmp_path / "bomb.pt", recorded)
    small, after = diagnose_many([bomb, (path, recorded)], limits=Limits(memory=size // 2))
    assert small.layer == "load_error" and "can't allocate" in small.details
    assert not after.detected
    roomy = diagnose(*bomb, limits=Limits(memory=size * 8))
    assert roomy.load_error and "allocate" not in roomy.details  # it was the limit that bit


def test_a_child_that_died_in_between_is_replaced(good):
    assert not diagnose(*good).detected
    first = diagnosis._child.pid
    psutil.Process(first).kill()
    psutil.wait_procs([psutil.Process(first)], timeout=10)
    assert not diagnose(*good).detected
    assert diagnosis._child.pid != first


def test_an_interrupted_diagnosis_does_not_answer_for_the_next_file(tmp_path, good):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    _endless(tmp_path / "endless.pt")
    diagnose(*good)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            diagnose(tmp_path / "endless.pt", good[1])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not diagnose(*good).detected


def test_the_way_in_which_a_child_died_is_told(good):
    child = diagnosis._Child()
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(diagnosis._Died, match="SIGKILL"):
        child.ask({"path": str(good[0]), "wanted": {}, "limits": {"seconds": 1}})
    child.close()


def test_the_child_may_not_write_and_ends_when_its_caller_is_gone(good):
    diagnose(*good)
    limits = psutil.Process(diagnosis._child.pid)
    if hasattr(limits, "rlimit"):
        assert limits.rlimit(psutil.RLIMIT_FSIZE)[0] == 0
    pid = diagnosis._child.pid
    diagnosis.close()
    assert not psutil.pid_exists(pid)


def test_a_child_that_cannot_start_is_our_error_and_not_damage(good, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch on this machine')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    diagnosis.close()
    with pytest.raises(CkptError, match="no torch on this machine"):
        diagnose(*good)


def test_it_works_from_a_script_without_a_guard_and_leaves_no_process(good, tmp_path):
    path, recorded = good
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from ckptlib import diagnosis\n"
        f"wanted = diagnosis.Expectation({recorded.file_sha256!r}, {recorded.size})\n"
        f"print(diagnosis.diagnose({str(path)!r}, wanted).detected, diagnosis._child.pid,\n"
        "      'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=120
    )
    detected, pid, parsed_here = done.stdout.split()  # one line: it was not imported once more
    assert (detected, parsed_here) == ("False", "False")
    assert not psutil.pid_exists(int(pid))


def test_what_a_store_recorded_is_an_expectation(tmp_path):
    from ckptlib import CheckpointStore
    from ckptlib.guard import check_group

    receipt = CheckpointStore(tmp_path / "run", content_digests=True).save(1, {"model": STATE})
    (entry,) = check_group(receipt.path).manifest.entries
    recorded = Expectation.of(entry)
    assert json.loads(json.dumps(recorded.schema)) == schema_of(STATE)
    assert not diagnose(Path(receipt.path) / entry.file, recorded).detected
