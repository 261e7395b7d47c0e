"""The safetensors container, streamed tensor by tensor; parsing it never runs code.

Layout (https://github.com/huggingface/safetensors, "Format"): an unsigned little-endian 64-bit
header length, a JSON header, then the tensors' bytes without gaps. The library's own writer either
opens the path itself or builds the whole file in memory, so the format is written here and held to
the library's reader by tests. Nested states travel as a skeleton in the header's metadata.
"""

from __future__ import annotations

import json
import struct

from ckptlib.digests import refuse, tensor_bytes
from ckptlib.errors import CorruptCheckpoint
from ckptlib.formats import tree

SUFFIX = ".safetensors"
MAX_HEADER = 100_000_000  # bytes; the limit of the reference reader
SKELETON = "ckptlib.skeleton/1"
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}  # fmt: skip
_NAMES = {f"torch.{name}": code for code, name in _DTYPES.items()}


def _flat(state) -> tuple[str, dict[str, object]]:
    import torch

    skeleton, leaves = tree.flatten(state)
    for name, leaf in leaves.items():
        if not isinstance(leaf, torch.Tensor):
            raise refuse(name, "a numpy array", "save torch.from_numpy(array) instead")
        if str(leaf.dtype) not in _NAMES:
            raise refuse(name, f"dtype {leaf.dtype}", 'use format="torch" for this part')
        if leaf.layout is not torch.strided:
            raise refuse(name, f"layout {leaf.layout}", "convert it to a dense tensor")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise refuse(name, "a key that is not valid Unicode", "rename it") from None
    return skeleton, leaves


def check(state) -> None:
    """Raise UnsupportedState for anything this container cannot hold exactly."""
    _flat(state)


def save(state, sink) -> None:
    """Stream header and tensors into ``sink``; one tensor at a time is made contiguous."""
    skeleton, leaves = _flat(state)
    # widest dtype first keeps every tensor aligned, which the reference reader's users rely on
    order = sorted(leaves, key=lambda name: (-leaves[name].dtype.itemsize, name))
    header: dict[str, dict] = {"__metadata__": {"format": "pt", SKELETON: skeleton}}
    offset = 0
    for name in order:
        leaf = leaves[name]
        size = leaf.numel() * leaf.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[str(leaf.dtype)],
            "shape": list(leaf.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    sink.write(struct.pack("<Q", len(text)) + text)
    for name in order:
        sink.write(tensor_bytes(leaves[name], name))


def _read_exactly(file, buffer) -> None:
    view = memoryview(buffer).cast("B")
    while len(view):
        n = file.readinto(view)
        if not n:
            raise CorruptCheckpoint("the file ends inside a tensor or its header", file.path)
        view = view[n:]


def _header(file, file_size: int) -> tuple[dict, int]:
    prefix = bytearray(8)
    _read_exactly(file, prefix)
    (length,) = struct.unpack("<Q", prefix)
    if length > min(MAX_HEADER, file_size - 8):
        raise CorruptCheckpoint(f"the header claims {length} bytes", file.path)
    text = bytearray(length)
    _read_exactly(file, text)
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    return header, 8 + length


def load(file, map_location=None):
    """Load from the beginning of an open file; without our skeleton, a flat dict of tensors."""
    import torch

    file.seek(0)
    size = file.stat().st_size
    try:
        header, start = _header(file, size)
        metadata = header.pop("__metadata__", {})

        def fetch(name: str, kind: str = "tensor"):
            entry = header[name]
            dtype = getattr(torch, _DTYPES[entry["dtype"]])
            begin, end = (int(v) for v in entry["data_offsets"])
            shape = tuple(int(v) for v in entry["shape"])
            count = 1
            for extent in shape:
                count *= extent
            if min(shape, default=0) < 0:
                raise ValueError(f"tensor {name!r} has a negative extent")
            if not 0 <= begin <= end <= size - start or end - begin != count * dtype.itemsize:
                raise ValueError(f"tensor {name!r} lies outside the file")
            tensor = torch.empty(shape, dtype=dtype)
            if count:
                file.seek(start + begin)
                _read_exactly(file, tensor.reshape(-1).view(torch.uint8).numpy())
            return tree.place(tensor, map_location)

        if SKELETON in metadata:
            return tree.rebuild(metadata[SKELETON], fetch)
        return {name: fetch(name) for name in header}
    except tree.Misplaced as error:
        raise error.cause from None
    except tree.DAMAGE as error:
        raise CorruptCheckpoint(f"not a readable safetensors file: {error}", file.path) from error
