"""NumPy's npz container; never loaded with pickles allowed, and byte-identical for equal states.

Dtypes that numpy does not have (bfloat16, float8) are stored as bytes beside their torch name.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
import zlib

from ckptlib.digests import is_tensor, tensor_bytes
from ckptlib.errors import CorruptCheckpoint
from ckptlib.formats import tree

SUFFIX = ".npz"
INDEX = "ckptlib.index.json"


def check(state) -> None:
    """Raise UnsupportedState for anything this container cannot hold exactly."""
    tree.flatten(state)


def _array(leaf, name: str):
    """What is stored of one leaf: a tensor as its bytes, since numpy lacks some of its dtypes."""
    import numpy

    if is_tensor(leaf):
        return numpy.frombuffer(tensor_bytes(leaf, name), dtype=numpy.uint8)
    return numpy.asarray(leaf, order="C")  # one file for equal values


def save(state, sink) -> None:
    """Stream the container into ``sink``, members in state order, without time stamps."""
    from numpy.lib import format as npy

    skeleton, leaves = tree.flatten(state)
    members = {name: f"{number:06d}" for number, name in enumerate(leaves)}  # keys may be anything
    notes = {
        name: [members[name], str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
        if is_tensor(leaf)
        else [members[name], None, None]
        for name, leaf in leaves.items()
    }
    with zipfile.ZipFile(_Stream(sink), "w", zipfile.ZIP_STORED) as container:
        index = json.dumps({"skeleton": skeleton, "leaves": notes}, separators=(",", ":"))
        container.writestr(zipfile.ZipInfo(INDEX), index)
        for name, leaf in leaves.items():
            # ZipInfo's default date is 1980, which keeps equal states byte-identical
            entry = zipfile.ZipInfo(members[name] + ".npy")
            with container.open(entry, "w", force_zip64=True) as member:
                npy.write_array(member, _array(leaf, name), allow_pickle=False)


class _Stream:
    """What zipfile needs of an output that cannot seek."""

    def __init__(self, sink):
        self._sink = sink

    def write(self, data) -> int:
        self._sink.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Nothing is held back here; the sink flushes when it is finished."""


def _read_array(container: zipfile.ZipFile, member: str, limit: int):
    """One stored array; nothing is allocated that the file does not really hold."""
    import numpy
    from numpy.lib import format as npy

    info = container.getinfo(member)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > limit:
        raise ValueError(f"{member} is compressed or larger than its file")
    with container.open(info) as entry:
        data = io.BytesIO(entry.read())
    if npy.read_magic(data) != (1, 0):
        raise ValueError(f"{member} is not version 1.0")
    shape, fortran, dtype = npy.read_array_header_1_0(data)
    body = data.getbuffer()[data.tell() :]
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError(f"{member} holds objects or a negative extent")
    if math.prod(shape) * dtype.itemsize != len(body):
        raise ValueError(f"{member} claims another size than it has")
    array = numpy.frombuffer(body, dtype=dtype, count=math.prod(shape)) if len(body) else None
    array = numpy.empty(shape, dtype) if array is None else array
    return array.reshape(shape, order="F" if fortran else "C").copy(order="K")


def load(file, map_location=None):
    """Load from the beginning of an open file.

    Raises
    ------
    CorruptCheckpoint
        The bytes cannot be loaded.
    """
    file.seek(0)
    limit = file.stat().st_size
    reader = io.BufferedReader(file)
    try:
        with zipfile.ZipFile(reader) as container:
            if container.getinfo(INDEX).compress_type != zipfile.ZIP_STORED:
                raise ValueError("the index is compressed")
            index = json.loads(container.read(INDEX))
            notes = index["leaves"]

            def fetch(name: str, kind: str):
                member, dtype, shape = notes[name]
                array = _read_array(container, member + ".npy", limit)
                if kind == "array":
                    return array
                import torch

                wanted = getattr(torch, dtype)
                if array.size == 0:  # a byte view of nothing has no stride to speak of
                    tensor = torch.empty(shape, dtype=wanted)
                    if tensor.numel():
                        raise ValueError(f"{member} is empty, its tensor is not")
                else:
                    tensor = torch.from_numpy(array).view(wanted).reshape(shape)
                return tree.place(tensor, map_location)

            return tree.rebuild(index["skeleton"], fetch)
    except tree.Misplaced as error:
        raise error.cause from None
    except (zipfile.BadZipFile, zlib.error, struct.error, *tree.DAMAGE) as error:
        raise CorruptCheckpoint(f"not a readable npz file: {error}", file.path) from error
    finally:
        reader.detach()
