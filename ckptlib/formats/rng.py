"""The state of the random generators, in a form that loads without running code."""

from __future__ import annotations

import random
import sys


def _hex(words) -> str:
    # one string instead of 625 numbers: every format holds it, and nothing walks it word by word
    return "".join(format(word, "08x") for word in words)


def _words(text: str) -> list[int]:
    return [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]


def rng_state() -> dict:
    """Collect the global generators' states: Python, and numpy and torch where imported.

    Returns
    -------
    dict
        Only tensors, numbers, strings and lists, so that every format can hold it. Generators of
        your own belong beside it, for example ``"data": generator.get_state()``.
    """
    version, words, gauss = random.getstate()
    state: dict = {"python": [version, _hex(words), gauss]}
    if numpy := sys.modules.get("numpy"):
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        words = _hex(keys.tolist())
        state["numpy"] = [name, words, int(position), int(has_gauss), float(cached)]
    if torch := sys.modules.get("torch"):
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: dict) -> None:
    """Put the generators back to what :func:`rng_state` collected, or to the part that was kept."""
    if "python" in state:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(_words(words)), gauss))
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, cached = state["numpy"]
        words = numpy.array(_words(keys), dtype=numpy.uint32)
        numpy.random.set_state((name, words, position, has_gauss, cached))
    if "torch" in state:
        import torch

        torch.set_rng_state(state["torch"].cpu())
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
