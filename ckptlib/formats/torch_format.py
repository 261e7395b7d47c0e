"""PyTorch's zip container; never loaded without ``weights_only=True``.

What could not be loaded back that way is refused here, at save time and by name, instead of being
found out when it is needed.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict

from ckptlib.digests import demand_data, refuse, walk
from ckptlib.errors import CorruptCheckpoint

SUFFIX = ".pt"
MAX_BITS = 2039  # of an integer: beyond it pickle uses an opcode that weights_only does not know
_CONTAINERS = (dict, OrderedDict, list, tuple)


def check(state) -> None:
    """Raise UnsupportedState for anything that ``weights_only`` loading would lose or reject."""
    import torch

    plain = (
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        torch.Size,
        torch.dtype,
        torch.device,
    )
    tensors = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    for key, kind, leaf in walk(state):
        if kind == "tensor":
            demand_data(leaf, key)
            if type(leaf) not in tensors:
                name = type(leaf).__name__
                raise refuse(key, f"tensor subclass {name}", "save its plain tensors")
        elif kind in ("dict", "list", "tuple"):
            if type(leaf) not in _CONTAINERS:
                raise refuse(key, f"container {type(leaf).__name__}", "use dict, list or tuple")
        elif kind == "array":
            raise refuse(key, "a numpy array", "save torch.from_numpy(array) instead")
        elif type(leaf) not in plain:
            raise refuse(
                key,
                f"a {type(leaf).__module__}.{type(leaf).__qualname__}",
                "save tensors, numbers, strings and containers of them",
            )
        elif leaf == b"" and type(leaf) is bytes:  # pickled as a call, which is refused at load
            raise refuse(key, "empty bytes", "save an empty string or None")
        elif type(leaf) is int and leaf.bit_length() > MAX_BITS:
            raise refuse(key, f"an integer of {leaf.bit_length()} bits", "save it as a string")


def save(state, sink) -> None:
    """Stream ``torch.save``'s container into ``sink``; storages are handed over without a copy."""
    import torch

    check(state)
    torch.save(state, sink)


def load(file, map_location=None):
    """Load from the beginning of an open file.

    Raises
    ------
    CorruptCheckpoint
        The bytes cannot be loaded. What goes wrong with sound bytes (a device that is not there, no
        memory on it, the caller's own ``map_location``) is raised as it is.
    """
    import torch

    try:
        return _load(file, map_location)
    except (MemoryError, ImportError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if map_location is not None and _loads_on_cpu(file):
            raise
        reason = f"not loadable: {type(error).__name__}: {str(error)[:300]}"
        raise CorruptCheckpoint(reason, file.path) from error


class _Reader(io.RawIOBase):
    """Reads for torch, which turns whatever goes wrong here into an error of its own."""

    def __init__(self, file):
        super().__init__()
        self._file, self.error = file, None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer) -> int:
        try:
            return self._file.readinto(buffer)
        except BaseException as error:
            self.error = self.error or error
            raise


def _load(file, map_location):
    import torch

    file.seek(0)
    reader = _Reader(file)
    try:
        return torch.load(io.BufferedReader(reader), map_location=map_location, weights_only=True)
    except Exception:
        if reader.error is not None:  # an I/O error says nothing about the bytes
            raise reader.error from None
        raise


def _loads_on_cpu(file) -> bool:
    try:
        _load(file, "cpu")
        return True
    except (MemoryError, ImportError, OSError):
        raise
    except Exception:
        return False
