"""A killed training, recovered through the store, ends where the uninterrupted one ends."""

import gzip
import hashlib
import json
import subprocess
import sys

import numpy
import pytest

from ckptlib import CheckpointStore
from ckptlib.errors import CkptError, InvalidInput, MissingInput
from ckptlib.experiments import digits, training, training_process
from ckptlib.experiments.network import Trainer, build_model, deterministic

STEPS = 40


@pytest.fixture(scope="module")
def data():
    return digits.load_digits()


@pytest.fixture
def one_thread():
    with deterministic():
        yield


def advance(trainer: Trainer, steps: int) -> list[float]:
    return [trainer.advance() for _ in range(steps)]


@pytest.fixture(scope="module")
def uninterrupted(data):
    with deterministic():
        trainer = Trainer(7, data)
        return advance(trainer, STEPS), trainer.digest()


# Within the first epoch, at its last batch, at the first batch of the second, and at the end.
@pytest.mark.parametrize("step", [0, 1, 12, 23, 24, STEPS])
def test_training_continues_bit_for_bit_from_any_step(
    tmp_path, data, uninterrupted, one_thread, step
):
    first = Trainer(7, data)
    losses = advance(first, step)
    store = CheckpointStore(tmp_path, mode="atomic_nodirsync")
    store.save(step, first.parts())

    second = Trainer(8, data)  # another seed: whatever agrees came through the store
    second.restore(store.load().parts)
    assert second.digest() == first.digest()
    losses += advance(second, STEPS - step)
    assert (losses, second.digest()) == uninterrupted


@pytest.mark.parametrize("part", ["model", "optimizer", "rng", "progress"])
def test_leaving_out_any_part_of_the_state_would_show(data, uninterrupted, one_thread, part):
    first = Trainer(7, data)
    advance(first, 12)
    second = Trainer(8, data)
    advance(second, 12)
    second.restore({**first.parts(), part: second.parts()[part]})
    advance(second, STEPS - 12)
    assert second.digest() != uninterrupted[1]


def test_looking_at_the_accuracy_changes_nothing(data, uninterrupted, one_thread):
    trainer = Trainer(7, data)
    advance(trainer, STEPS)
    assert 0.5 < trainer.accuracy() <= 1
    assert trainer.digest() == uninterrupted[1]


def test_the_network_has_as_many_parameters_as_its_docstring_says():
    count = sum(parameter.numel() for parameter in build_model().parameters())
    assert f"{count:,} parameters" in build_model.__doc__


def test_generators_threads_and_switches_are_put_back():
    import torch

    before = torch.get_rng_state(), torch.get_num_threads(), torch.get_deterministic_debug_mode()
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == 1
        torch.rand(3)
    after = torch.get_rng_state(), torch.get_num_threads(), torch.get_deterministic_debug_mode()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


# -- the kill ------------------------------------------------------------------------------


def small_plan(**more):
    return training.plan(**{"seed": 3, "seeds": 2, "epochs": 3, "save_every": 1, **more})


def killed_trial(point: str, mode: str) -> dict:
    return next(t for t in small_plan() if t.get("kill_point") == point and t["mode"] == mode)


@pytest.mark.parametrize(
    ("point", "mode"), [("inside a save", "unsafe"), ("between saves", "atomic_dirsync")]
)
def test_a_killed_run_recovers_and_ends_bit_identical(tmp_path, data, point, mode):
    trial = killed_trial(point, mode)
    first, second = training_process.killed_and_recovered(trial, tmp_path)

    steps = training_process.save_steps(3, 1, 23)
    saved = [step for step in steps if step <= first.losses[-1][0]]
    if point == "inside a save":
        assert first.losses[-1][0] == saved[-1], "it died in the save after this step"
        saved = saved[:-1]
    assert first.acknowledged == second.recovered_step == saved[-1]
    assert second.losses[0][0] == saved[-1] + 1, "the second process goes on from there"

    with deterministic():
        trainer = Trainer(trial["seed"], data)
        whole = training_process.train(trainer, 3 * 23, None, ())
    assert second.final_state_digest == whole.final_state_digest
    assert second.test_accuracy == whole.test_accuracy
    assert set(first.losses) | set(second.losses) == set(whole.losses), "steps done twice agree"


def test_a_child_whose_parent_is_gone_does_not_wait_for_ever(tmp_path):
    trial = killed_trial("inside a save", "unsafe")
    program = [sys.executable, "-m", "ckptlib.experiments.training_process"]
    arguments = [json.dumps({**trial, "kill_operation": 1}), str(tmp_path / "store"), "--stop"]
    done = subprocess.run([*program, *arguments], stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == 3
    assert done.stdout.endswith(b"waiting\n")


def test_a_child_that_fails_is_reported_with_what_it_said(tmp_path):
    trial = {**killed_trial("between saves", "unsafe"), "mode": "unsave"}
    with pytest.raises(CkptError, match=r"(?s)exit status 1, not a SIGKILL.*'unsave'"):
        training_process.killed_and_recovered(trial, tmp_path)


# -- the plan ------------------------------------------------------------------------------


def test_every_mode_is_killed_at_the_same_point_and_both_kinds_of_point_occur():
    trials = [trial for trial in small_plan() if trial["arm"] == "killed"]
    points = {}
    for trial in trials:
        key = [trial[name] for name in ("kill_save", "kill_point", "kill_operation", "kill_delay")]
        points.setdefault(trial["seed"], []).append(key)
    assert all(found == [found[0]] * len(training.MODES) for found in points.values())
    assert {trial["kill_point"] for trial in trials} == {"inside a save", "between saves"}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("saves", [3, 4, 40])
def test_a_kill_strikes_after_the_first_acknowledged_save_and_before_the_last(seed, saves):
    for trial in training.plan(seed=seed, seeds=2, epochs=saves, save_every=1):
        if trial["arm"] == "killed":
            assert 1 <= trial["kill_save"] <= saves - 2


def test_saves_fall_into_the_middle_of_an_epoch():
    assert training_process.save_steps(6, 2, 23) == [35, 81, 127]


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"save_every": 2}, {"save_every": 0}])
def test_a_training_with_too_few_saves_to_be_killed_is_refused(wrong):
    with pytest.raises(InvalidInput, match="at least 3 saves"):
        small_plan(**wrong)


# -- the data ------------------------------------------------------------------------------


def test_the_digits_are_those_that_the_source_describes(data):
    labels = numpy.concatenate([data.train_labels, data.test_labels])
    # Class counts of optdigits.tes in the UCI repository's description.
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert numpy.bincount(labels).tolist() == counts
    assert data.train_images.shape == (1438, 64) and data.test_images.shape == (359, 64)
    assert data.train_images.min() == 0 and data.train_images.max() == 1
    assert data.train_images.dtype == numpy.float32


def test_the_page_beside_the_digits_states_their_checksums():
    path = digits.digits_path()
    page = (path.parent / "README.md").read_text()
    assert digits.SHA256 in page
    assert hashlib.sha256(path.read_bytes()).hexdigest() in page
    assert "CC BY 4.0" in page and "Alpaydin" in page


def test_the_packed_digits_can_be_made_again_byte_for_byte(tmp_path):
    header = digits.digits_path().read_bytes()[:10]
    assert header[3] == 0 and header[4:8] == bytes(4), "no file name, time 0"


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"not gzip",
        lambda raw: gzip.compress(gzip.decompress(raw).replace(b"16", b"15", 1)),
    ],
)
def test_damaged_digits_are_refused(tmp_path, damage):
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(damage(digits.digits_path().read_bytes()))
    with pytest.raises(CkptError, match=r"the digits are damaged.*Restore data/digits"):
        digits.load_digits(path)


def test_missing_digits_are_reported_as_missing(tmp_path):
    with pytest.raises(MissingInput, match="the digits are missing"):
        digits.load_digits(tmp_path / "digits.csv.gz")


def test_what_other_threads_draw_from_pythons_generator_does_not_enter_the_state():
    import random

    with deterministic():
        trainer = Trainer(3)
        trainer.advance()
        before = trainer.digest()
        random.random()
        assert trainer.digest() == before
