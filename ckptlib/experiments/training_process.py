"""A training that saves, dies of a real SIGKILL at a given point, and is finished by a successor.

Run as a program (``python -m ckptlib.experiments.training_process``) this module is the process
that trains. It stands still at its point and waits there, so that where it dies is decided by the
trial and never by the scheduler; the kill itself always comes from outside.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ckptlib.errors import CkptError
from ckptlib.vfs import LayeredVFS, Operation

#: Every save makes at least this many file operations, so each of them can be the one to die in.
OPERATIONS = 8


def save_steps(epochs: int, save_every: int, steps_per_epoch: int) -> list[int]:
    """Optimizer steps after which a checkpoint is taken: in the middle of every n-th epoch."""
    saves = epochs // save_every
    return [k * save_every * steps_per_epoch - steps_per_epoch // 2 for k in range(1, saves + 1)]


@dataclass
class Course:
    """How one process's part of a training went."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    final_state_digest: str = ""
    test_accuracy: float | None = None
    train_s: float = 0.0
    save_s: float = 0.0
    acknowledged: int | None = None
    recovered_step: int | None = None


def train(trainer, steps: int, store, save_at: Sequence[int], say=lambda *words: None) -> Course:
    """Train up to a step, saving at some of the steps on the way.

    Parameters
    ----------
    trainer : ckptlib.experiments.network.Trainer
    store : CheckpointStore or None
    say : callable
        Told ``("step", step, loss)``, ``("begin", step)`` before a save and ``("ack", step)`` once
        it has returned.
    """
    course, due = Course(), set(save_at) if store is not None else set()
    started = time.perf_counter()
    while trainer.step < steps:
        loss = trainer.advance()
        course.losses.append((trainer.step, loss))
        say("step", trainer.step, loss)
        if trainer.step in due:
            say("begin", trainer.step)
            before = time.perf_counter()
            store.save(trainer.step, trainer.parts())
            course.save_s += time.perf_counter() - before
            course.acknowledged = trainer.step
            say("ack", trainer.step)
    course.train_s = time.perf_counter() - started
    course.final_state_digest, course.test_accuracy = trainer.digest(), trainer.accuracy()
    return course


# -- the process that watches ----------------------------------------------------------------------


def killed_and_recovered(trial: dict, folder: Path) -> tuple[Course, Course]:
    """Have a child train and kill it at its point; have another recover and finish.

    Raises
    ------
    CkptError
        A child ended in another way than it should; with what it said.
    """
    first = Course()
    started = begun = time.perf_counter()
    with _child(trial, folder, stop=True) as (process, lines):
        for words in lines:
            now = time.perf_counter()
            match words:
                case ["ready"]:
                    started = now
                case ["step", step, loss]:
                    first.losses.append((int(step), float(loss)))
                case ["begin", _]:
                    begun = now
                case ["ack", step]:
                    first.acknowledged = int(step)
                    first.save_s += now - begun
                case ["waiting"]:
                    first.train_s = now - started
                    process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            raise _child_failed(trial, folder, f"exit status {process.returncode}, not a SIGKILL")
    with _child(trial, folder, stop=False) as (process, lines):
        done = next((words for words in lines if words[0] == "done"), None)
        if process.wait() != 0 or done is None:
            raise _child_failed(trial, folder, f"exit status {process.returncode}")
    second = Course(**json.loads(done[1]))
    second.losses = [(step, loss) for step, loss in second.losses]
    return first, second


class _child:
    """A training process and the lines that it says; killed at the block's end if it still runs."""

    def __init__(self, trial: dict, folder: Path, *, stop: bool):
        folder.mkdir(parents=True, exist_ok=True)
        self._errors = (folder / "stderr").open("wb")
        command = [sys.executable, "-m", "ckptlib.experiments.training_process"]
        command += [json.dumps(trial), str(folder / "store"), *(["--stop"] if stop else [])]
        # Its standard input is a pipe that ends with this process: a child never outlives us.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def __enter__(self) -> tuple[subprocess.Popen, Iterator[list[str]]]:
        # A line without its end is one that the child was killed in.
        said = (line for line in self._process.stdout if line.endswith("\n"))
        return self._process, (line.strip().split(" ", 2) for line in said)

    def __exit__(self, *exception) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()


def _child_failed(trial: dict, folder: Path, what: str) -> CkptError:
    said = (folder / "stderr").read_text(errors="replace")[-2000:]
    return CkptError(f"the training process of {trial['trial_id']} ended with {what}:\n{said}")


# -- the process that trains -----------------------------------------------------------------------


def _say(*words) -> None:
    print(*words, flush=True)


def _wait_to_be_killed() -> None:
    """Stand still, in the middle of whatever is under way, until the parent kills us."""
    _say("waiting")
    sys.stdin.read()  # ends only if the parent died, and then there is nobody to work for
    os._exit(3)


class StoppingVFS(LayeredVFS):
    """Stands still before the n-th operation after :meth:`arm`, to be killed there."""

    def __init__(self):
        super().__init__()
        self._left = 0

    def arm(self, operations: int) -> None:
        """Stop before this many-th operation from now."""
        self._left = operations

    def around(self, op: Operation, call):
        if self._left:
            self._left -= 1
            if not self._left:
                _wait_to_be_killed()
        return call()


def child(trial: dict, folder: Path, stop: bool) -> None:
    """Train a trial from the newest checkpoint in a store, or from the beginning if it is empty."""
    from ckptlib import CheckpointStore

    vfs = StoppingVFS()
    store = CheckpointStore(folder, mode=trial["mode"], vfs=vfs)
    from ckptlib.experiments.network import Trainer, deterministic  # slow, so after the checks

    with deterministic():
        train(Trainer(0), 2, None, ())  # a process's first step is slow and belongs to no arm
        trainer = Trainer(trial["seed"])
        steps = trial["epochs"] * trainer.steps_per_epoch
        save_at = save_steps(trial["epochs"], trial["save_every"], trainer.steps_per_epoch)
        found = store.load(allow_empty=True)
        if found is not None:
            trainer.restore(found.parts)
        say = _killable(trial, save_at, vfs) if stop else (lambda *words: None)
        _say("ready")
        course = train(
            trainer, steps, store, [step for step in save_at if step > trainer.step], say
        )
        course.recovered_step = found.step if found is not None else None
        _say("done", json.dumps(asdict(course), separators=(",", ":")))


def _killable(trial: dict, save_at: list[int], vfs: StoppingVFS):
    """Make a listener that passes the words on, and stops this process at the trial's point."""
    save = save_at[trial["kill_save"]]
    interval = save_at[1] - save_at[0]
    rest = save + max(1, int(trial["kill_delay"] * interval))

    def say(word: str, *more) -> None:
        _say(word, *more)
        if word == "begin" and more[0] == save and trial["kill_operation"]:
            vfs.arm(trial["kill_operation"])
        if word == "step" and more[0] == rest and not trial["kill_operation"]:
            _wait_to_be_killed()

    return say


def main() -> None:
    """Be the process that trains, and perhaps is killed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("trial", type=json.loads, help="the trial, as JSON")
    parser.add_argument("store", type=Path, help="directory of the checkpoints")
    parser.add_argument("--stop", action="store_true", help="stop at the trial's kill point")
    arguments = parser.parse_args()
    child(arguments.trial, arguments.store, arguments.stop)


if __name__ == "__main__":
    main()
