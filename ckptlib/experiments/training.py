"""Trains a network under each write mode and kills some of the runs; the kill is never pretended.

For every seed: one run without checkpoints, and in each mode one uninterrupted run and one that
receives a real SIGKILL and is finished by a second process from what the first had saved.
"""

from __future__ import annotations

from pathlib import Path

from ckptlib.errors import InvalidInput, explain
from ckptlib.experiments.training_process import (
    OPERATIONS,
    Course,
    killed_and_recovered,
    save_steps,
    train,
)
from ckptlib.write_modes import WriteMode

MODES = tuple(mode.value for mode in WriteMode)
#: Fields whose equal values make a batch: the killed run is compared with the uninterrupted one.
BATCH_BY = ("seed", "mode")


def plan(*, seed: int, seeds: int, epochs: int, save_every: int) -> list[dict]:
    """List the trials: for each seed, the same place to be killed at in all modes.

    Parameters
    ----------
    seed : int
        Seed of the study; the runs' own are ``seed``, ``seed + 1``, ...
    seeds : int
        Number of runs per arm and mode.
    epochs : int
        Passes over the training images.
    save_every : int
        Epochs between checkpoints; each is taken in the middle of an epoch, where the place in
        the data order matters.

    Raises
    ------
    InvalidInput
        Fewer than three checkpoints in a run, or numbers below 1.
    """
    if min(seeds, epochs, save_every) < 1 or epochs // save_every < 3:
        raise InvalidInput(
            explain(
                "this training cannot be killed between two checkpoints",
                expected="seeds, epochs, save_every of 1 or more, and at least 3 saves in a run",
                found=f"seeds={seeds}, epochs={epochs}, save_every={save_every}",
                do="raise epochs or lower save_every",
            )
        )
    trials = []
    for index in range(seeds):
        common = {"seed": seed + index, "epochs": epochs, "save_every": save_every}
        kill = _kill_point(seed, index, epochs // save_every)
        arms = [("no_checkpoint", "", {})]
        arms += [("uninterrupted", mode, {}) for mode in MODES]
        arms += [("killed", mode, kill) for mode in MODES]
        for arm, mode, more in arms:
            trial_id = f"training-{index:03d}-{arm}" + (f"-{mode}" if mode else "")
            trials.append({"trial_id": trial_id, "arm": arm, "mode": mode, **common, **more})
    return trials


def _kill_point(seed: int, index: int, saves: int) -> dict:
    """Draw where to kill: in which save (counted from 0), and there or after it, by turns."""
    import numpy

    draw = numpy.random.default_rng(numpy.random.SeedSequence([seed, index]))
    save = int(draw.integers(max(1, saves // 3), saves - 1))  # never in the first or the last
    if index % 2 == 0:
        return {
            "kill_save": save,
            "kill_point": "inside a save",
            "kill_operation": int(draw.integers(1, OPERATIONS + 1)),
            "kill_delay": 0,
        }
    return {
        "kill_save": save,
        "kill_point": "between saves",
        "kill_operation": 0,
        "kill_delay": float(draw.uniform(0.05, 0.95)),
    }


def run_batch(trials: list[dict], scratch: Path) -> list[dict]:
    """Run the trials of one seed and mode; see :mod:`.engine` for what is expected of it."""
    from ckptlib import CheckpointStore
    from ckptlib.experiments.network import Trainer, deterministic

    with deterministic():  # a process's first step is slow: it must not count for one arm only
        train(Trainer(0), 2, None, ())

    reference, rows = "", []
    for trial in sorted(trials, key=lambda trial: trial["arm"] == "killed"):
        folder = scratch / trial["trial_id"]
        if trial["arm"] == "killed":
            first, second = killed_and_recovered(trial, folder)
            row = _row(
                trial,
                [first, second],
                killed_at_step=first.losses[-1][0],
                killed_after_step=first.acknowledged,
                recovered_step=second.recovered_step,
                bit_identical=second.final_state_digest == reference,
            )
        else:
            store = CheckpointStore(folder, mode=trial["mode"]) if trial["mode"] else None
            with deterministic():
                trainer = Trainer(trial["seed"])
                steps = trial["epochs"] * trainer.steps_per_epoch
                at = save_steps(trial["epochs"], trial["save_every"], trainer.steps_per_epoch)
                course = train(trainer, steps, store, at)
            row = _row(trial, [course])
            reference = course.final_state_digest
        rows.append(row)
    return rows


def _row(trial: dict, courses: list[Course], **more) -> dict:
    train_s = sum(course.train_s for course in courses)
    save_s = sum(course.save_s for course in courses)
    same = {name: trial[name] for name in ("trial_id", "mode", "arm", "seed")}
    return {
        **same,
        "epochs": trial["epochs"],
        "saves": trial["epochs"] // trial["save_every"] if trial["mode"] else 0,
        "kill_point": trial.get("kill_point", ""),
        "killed_at_step": None,
        "killed_after_step": None,
        "recovered_step": None,
        "bit_identical": None,
        "final_state_digest": courses[-1].final_state_digest,
        "test_accuracy": courses[-1].test_accuracy,
        "train_s": train_s,
        "save_s": save_s,
        "share": save_s / train_s,
        "training_curve": [
            {**same, "process": number, "step": step, "loss": loss}
            for number, course in enumerate(courses, start=1)
            for step, loss in course.losses
        ],
        **more,
    }
