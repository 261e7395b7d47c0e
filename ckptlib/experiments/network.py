"""A small network that learns digits, one step at a time; no state of it escapes a checkpoint.

Model, optimizer, every random generator, and the place in the data order: put back together, they
make training go on as if it had never stopped, bit for bit.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy
import torch
from torch import nn

from ckptlib import restore_rng, rng_state
from ckptlib.digests import content_digest
from ckptlib.experiments.digits import Digits, load_digits

BATCH = 64


def build_model() -> nn.Module:
    """Build a perceptron of 64, 256, 192 and 10 units with dropout: 67,914 parameters."""
    return nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(256, 192),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(192, 10),
    )


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """One thread and deterministic kernels for a block; the generators are put back after it.

    Sums over several threads depend on how many there are, so one thread is part of the promise.
    """
    threads, before = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    generators = rng_state()
    torch.set_num_threads(1)
    # "error" is use_deterministic_algorithms(True), which would load torch's compiler as well: 1 s.
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(before)
        restore_rng(generators)


class Trainer:
    """Training as a sequence of steps, with its whole state as checkpoint parts.

    Dropout draws from torch's global generator, so only one trainer may be at work in a process;
    the data order has a generator of its own.

    Parameters
    ----------
    seed : int
        Decides initial weights, data order and dropout.
    digits : Digits, optional
        The data; loaded if it is not given.
    """

    def __init__(self, seed: int, digits: Digits | None = None):
        digits = load_digits() if digits is None else digits
        self._images = torch.from_numpy(digits.train_images)
        self._labels = torch.from_numpy(digits.train_labels)
        self._test = torch.from_numpy(digits.test_images), torch.from_numpy(digits.test_labels)
        words = numpy.random.SeedSequence([seed, 0]).generate_state(4)
        random.seed(int(words[0]))
        numpy.random.seed(words[1])
        torch.manual_seed(int(words[2]))
        self._data = torch.Generator().manual_seed(int(words[3]))
        self.model = build_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0
        self._order = torch.randperm(len(self._images), generator=self._data)
        self._position = 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the training images."""
        return steps_per_epoch(len(self._images))

    def advance(self) -> float:
        """Take one optimizer step on the next batch; return its loss, in nats."""
        if self._position >= len(self._order):
            self._order = torch.randperm(len(self._images), generator=self._data)
            self._position = 0
        batch = self._order[self._position : self._position + BATCH]
        self.model.train()
        loss = nn.functional.cross_entropy(self.model(self._images[batch]), self._labels[batch])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self._position += BATCH
        self.step += 1
        return loss.item()

    def parts(self) -> dict[str, dict]:
        """Give the whole state, by checkpoint part; tensors are the live ones, not copies."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            # only generators that this training draws from: on a Dask worker, other threads draw
            # from Python's own
            "rng": {
                "global": {"torch": rng_state()["torch"]},
                "data": self._data.get_state(),
            },
            "progress": {"step": self.step, "position": self._position, "order": self._order},
        }

    def restore(self, parts: dict[str, dict]) -> None:
        """Put the state back that :meth:`parts` gave."""
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])
        self._data.set_state(parts["rng"]["data"])
        restore_rng(parts["rng"]["global"])
        progress = parts["progress"]
        self.step, self._position = progress["step"], progress["position"]
        self._order = progress["order"]

    def digest(self) -> str:
        """Content digest of the whole state: equal digests mean equal states, bit for bit."""
        return content_digest(self.parts())

    def accuracy(self) -> float:
        """Share of the held-out images that are classified correctly; changes no state."""
        images, labels = self._test
        self.model.eval()
        with torch.no_grad():
            right = int((self.model(images).argmax(1) == labels).sum())
        return right / len(labels)


def steps_per_epoch(images: int) -> int:
    """Batches in one pass, the last one shorter."""
    return -(-images // BATCH)
