"""Test doubles: file systems that fail, write short or kill their process; and states to save.

Each is one short override of the hook that the real code passes through, so that what is tested is
the protocol that ships.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import torch
from hypothesis import strategies as st

from ckptlib import CheckpointStore, temps
from ckptlib.catalog import step_name
from ckptlib.errors import CkptError
from ckptlib.vfs import LayeredVFS, Operation, RecordingVFS

ERRNOS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT)
#: (mode, protocol) of every way to save a group.
PROTOCOLS = (
    ("unsafe", "per_file"),
    ("atomic_nodirsync", "per_file"),
    ("atomic_dirsync", "per_file"),
    ("atomic_dirsync", "artifact"),
    ("atomic_nodirsync", "batched"),
    ("atomic_dirsync", "batched"),
)
ATOMIC = tuple(pair for pair in PROTOCOLS if pair[0] != "unsafe")

Predicate = Callable[[Operation], bool]


def everything(op: Operation) -> bool:
    return True


class FailingVFS(LayeredVFS):
    """Fails the operations ``first`` to ``last`` (counted from 0) among those that ``when`` picks.

    ``error`` is an errno, an exception to raise, or for writes ``"short"`` (one byte less than
    half is taken), ``"zero"`` (nothing is taken), or ``"partial"`` (half is written, then ENOSPC).
    """

    def __init__(self, first: int, error, when: Predicate = everything, *, last: int | None = None):
        super().__init__()
        self.first, self.last, self.error, self.when = first, last, error, when
        if last is None:
            self.last = first
        self.seen = 0
        self.failed: list[Operation] = []

    def around(self, op: Operation, call: Callable):
        if not self.when(op):
            return call()
        number, self.seen = self.seen, self.seen + 1
        if not self.first <= number <= self.last:
            return call()
        self.failed.append(op)
        if self.error in ("short", "zero", "partial"):
            if op.call != "write":
                return call()
            if self.error == "zero":
                return 0
            done = call(op.data[: max(1, len(op.data) // 2 - 1)])
            if self.error == "short":
                return done
            raise OSError(errno.ENOSPC, "injected", op.path)
        if isinstance(self.error, BaseException):
            raise self.error
        if op.call == "close":  # the descriptor is gone, whatever close(2) says
            call()
        raise OSError(self.error, "injected", op.path)


class KillingVFS(LayeredVFS):
    """Kills its own process with SIGKILL before operation ``n``; ``kept`` bytes of a write land."""

    def __init__(self, n: int, kept: Callable[[int], int] = lambda size: 0):
        super().__init__()
        self.n, self.kept = n, kept

    def around(self, op: Operation, call: Callable):
        if op.index == self.n:
            if op.call == "write" and self.kept(op.size):
                call(op.data[: self.kept(op.size)])
            os.kill(os.getpid(), signal.SIGKILL)
        return call()


class WatchingVFS(LayeredVFS):
    """Calls ``before(op)`` and does nothing else."""

    def __init__(self, before: Callable[[Operation], None]):
        super().__init__()
        self.before = before

    def around(self, op: Operation, call: Callable):
        self.before(op)
        return call()


def in_child(function: Callable[[], None]) -> int:
    """Run a function in a forked child; its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            function()
            status = 0
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def record(function: Callable[[RecordingVFS], object]) -> list[Operation]:
    """The operations that a successful run performs."""
    vfs = RecordingVFS()
    function(vfs)
    return vfs.operations


def parts(seed: int = 0) -> dict:
    """A small model, optimizer and counter, different for each seed."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 4, generator=generator)
    return {
        "model": {"weight": weight, "bias": torch.zeros(8)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(seed)), "avg": weight * 2}}},
        "extra": {"epoch": seed, "name": "näme", "best": None},
    }


def leftovers(directory: str | os.PathLike) -> list[str]:
    """Names of unfinished files anywhere below a directory."""
    return [str(p) for p in Path(directory).rglob("*") if temps.is_temp(p.name)]


def contents(directory: str | os.PathLike) -> dict[str, bytes]:
    """Every file below a directory with its bytes; links with their target."""
    found = {}
    for path in sorted(Path(directory).rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = b"-> " + os.fsencode(os.readlink(path))
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def flips(data: bytes, count: int = 64) -> Iterator[tuple[int, bytes]]:
    """``(offset, data with one bit flipped there)``, spread evenly over the whole of the data."""
    for offset in sorted({i * len(data) // count for i in range(count)} | {len(data) - 1}):
        changed = bytearray(data)
        changed[offset] ^= 1 << (offset % 8)
        yield offset, bytes(changed)


def is_typed(error: BaseException | None) -> bool:
    return isinstance(error, CkptError) and bool(str(error))


def skip_the_medium(monkeypatch) -> None:
    """Flushes return at once, for tests that only look at what a process sees."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# -- states for property tests --------------------------------------------------------------------

_NAMES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
    "complex32 complex64 complex128"
)
DTYPES = tuple(getattr(torch, name) for name in _NAMES.split(" "))
KEYS = ("", "a", "b", "a/b", "/", "0", "-1", "'a'", "\\", "__metadata__", "value", "ключ", "x\ny")


def tensor_of(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose bits are ``raw``, repeated as often as needed."""
    count = math.prod(shape) * dtype.itemsize
    data = bytearray((raw * (count // len(raw) + 1))[:count])
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype).reshape(shape)


@st.composite
def tensors(draw, dtypes=DTYPES) -> torch.Tensor:
    """Any bits of any dtype, with 0 to 3 dimensions, at times transposed, expanded or strided."""
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    raw = draw(st.binary(min_size=1, max_size=16))
    tensor = tensor_of(raw, draw(st.sampled_from(dtypes)), shape)
    layout = draw(st.sampled_from(("plain", "transposed", "expanded", "strided")))
    if layout == "transposed":
        return tensor.T if tensor.dim() == 2 else tensor
    if layout == "expanded":
        return tensor.unsqueeze(0).expand(2, *shape)
    if layout == "strided" and shape:
        return tensor[..., ::2]
    return tensor


def floats() -> st.SearchStrategy[float]:
    """Any 64 bits, so that NaN payloads and signed zeros are among them."""
    bits = st.integers(0, 2**64 - 1).map(lambda n: struct.unpack("<d", struct.pack("<Q", n))[0])
    return bits | st.sampled_from((0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324))


def scalars() -> st.SearchStrategy:
    return (
        st.none()
        | st.booleans()
        | st.integers()
        | st.sampled_from((2**63, -(2**63) - 1, 2**200, -(2**1000)))
        | floats()
        | st.builds(complex, floats(), floats())
        | st.text(max_size=4)
        | st.binary(max_size=4)
    )


def states(leaves: st.SearchStrategy | None = None, max_leaves: int = 8) -> st.SearchStrategy:
    """Nested dicts (plain and ordered), lists and tuples of scalars and tensors."""
    keys = st.sampled_from(KEYS) | st.text(max_size=3) | st.integers(-2, 2**70)
    leaves = scalars() | tensors() if leaves is None else leaves

    def nest(inner):
        pairs = st.lists(st.tuples(keys, inner), max_size=4)
        lists = st.lists(inner, max_size=3)
        return pairs.map(dict) | pairs.map(OrderedDict) | lists | lists.map(tuple)

    return nest(st.recursive(leaves, nest, max_leaves=max_leaves))


def bits(tensor: torch.Tensor) -> bytes:
    """The values' bits in C order, taken the slow and obvious way."""
    values = tensor.detach().resolve_conj().resolve_neg()
    flat = torch.empty(values.numel(), dtype=values.dtype).copy_(values.reshape(-1))
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def canonical(state) -> tuple:
    """A structural description, equal if and only if two states hold the same."""
    kind = type(state)
    if isinstance(state, dict):
        items = [(*canonical(k), canonical(v)) for k, v in state.items()]
        return ("dict", *sorted(items))
    if kind in (list, tuple):
        return (kind.__name__, *map(canonical, state))
    if isinstance(state, torch.Tensor):
        return ("tensor", str(state.dtype), tuple(state.shape), bits(state))
    if isinstance(state, numpy.ndarray):
        return ("array", state.dtype.str, state.shape, state.tobytes())
    if kind is float:
        return ("float", struct.pack("<d", state))
    if kind is complex:
        return ("complex", struct.pack("<dd", state.real, state.imag))
    return (kind.__name__, hex(state) if kind is int else repr(state))


def same(left, right) -> bool:
    """Whether two states hold the same, down to container types and the order of keys."""
    if type(left) is not type(right) or canonical(left) != canonical(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return all(map(same, left, right))
    return True


# -- stores ----------------------------------------------------------------------------------------


def filled(root, *steps, **options) -> CheckpointStore:
    store = CheckpointStore(root, **options)
    for step in steps:
        store.save(step, parts(step))
    return store


def at(root, step: int) -> Path:
    return Path(root) / step_name(step)


def tear(root, step: int, file: str = "model.pt") -> None:
    path = at(root, step) / file
    path.write_bytes(path.read_bytes()[:-7])
