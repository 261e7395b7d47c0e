"""What the experiments save: the paper's group and its small network; values follow from the seed.

One place for all of them, so that a latency and a crash are about the same checkpoint
(arXiv:2511.18323, Appendix A).
"""

from __future__ import annotations


def _generator(seed: int, step: int):
    import numpy
    import torch

    (word,) = numpy.random.SeedSequence([seed, step]).generate_state(1, numpy.uint64)
    return torch.Generator().manual_seed(int(word >> numpy.uint64(1)))


def network(seed: int, step: int) -> dict:
    """The small network: linear layers of 128x128 and 128x10, with biases still at zero.

    Returns
    -------
    dict of str to torch.Tensor
        float32; about 70 KiB. The values belong to this seed and step alone.
    """
    import torch

    draw = _generator(seed, step)
    return {
        "layer1.weight": torch.randn(128, 128, generator=draw) / 128**0.5,
        "layer1.bias": torch.zeros(128),
        "layer2.weight": torch.randn(10, 128, generator=draw) / 128**0.5,
        "layer2.bias": torch.zeros(10),
    }


def group(seed: int, step: int) -> dict[str, dict]:
    """The group: 128 KiB of model, 64 KiB of optimizer, and a generator's state, by part."""
    import torch

    draw = _generator(seed, step)
    weights = {f"layer{i}.weight": torch.randn(128, 128, generator=draw) for i in (1, 2)}
    momentum = {0: {"momentum_buffer": torch.randn(128, 128, generator=draw)}}
    settings = [{"lr": 0.01, "momentum": 0.9, "params": [0]}]
    return {
        "model": weights,
        "optimizer": {"state": momentum, "param_groups": settings},
        "rng": {"torch": draw.get_state()},
    }


def tensor_bytes(parts: dict[str, dict]) -> int:
    """Size of all tensors of a payload, in bytes."""
    from ckptlib.digests import walk

    return sum(leaf.nbytes for _, kind, leaf in walk(parts) if kind == "tensor")


def small_group(seed: int, step: int) -> dict[str, dict]:
    """A group of some pages a part, for recorded devices: 16 KiB, 4 KiB and a generator's state."""
    import torch

    draw = _generator(seed, step)
    return {
        "model": {"layer.weight": torch.randn(64, 64, generator=draw)},
        "optimizer": {"state": {0: {"momentum_buffer": torch.randn(32, 32, generator=draw)}}},
        "rng": {"torch": draw.get_state()},
    }
