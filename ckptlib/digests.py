"""SHA-256 of open files, of tensors, and of whole states; two different states never share one.

A content digest speaks about values, not about a container: the same state saved by two formats, or
with other strides, has the same digest, while a change of a key, a type, a shape or a single bit
changes it. torch and numpy are used only if the caller's state already brought them along.
"""

from __future__ import annotations

import hashlib
import re
import struct
import sys
from collections.abc import Iterator, Mapping

from ckptlib.errors import UnsupportedState, explain

CHUNK = 1 << 20  # bytes read at a time; larger chunks fall out of the second-level cache
MAX_DEPTH = 64  # of nesting; a state deeper than this is a mistake or an attack
_SUB_BYTE = re.compile(r"torch\.(u?int[1-7]|bits?\d*|bits\dx\d)\Z")


def sha256_file(file) -> tuple[str, int]:
    """Hash an open binary file from its beginning.

    Parameters
    ----------
    file : ckptlib.vfs.File
        Left positioned at its end.

    Returns
    -------
    tuple of (str, int)
        Hexadecimal SHA-256, what ``sha256sum`` prints, and the number of bytes hashed.
    """
    file.seek(0)
    digest, size, buffer = hashlib.sha256(), 0, bytearray(CHUNK)
    view = memoryview(buffer)
    while n := file.readinto(view):
        digest.update(view[:n])
        size += n
    return digest.hexdigest(), size


def _torch():
    return sys.modules.get("torch")


def is_tensor(leaf) -> bool:
    torch = _torch()
    return torch is not None and isinstance(leaf, torch.Tensor)


def is_array(leaf) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.ndarray)


def refuse(key: str, what: str, do: str) -> UnsupportedState:
    """The error for a leaf that cannot be kept, naming its place in the state."""
    where = key or "(the state itself)"
    return UnsupportedState(explain(f"cannot save {where}", found=what, do=do), key=key)


def demand_data(tensor, key: str = "") -> None:
    """Refuse tensors that have no data of their own to save, or whose elements share bytes."""
    if tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        # torch.save accepts these, and the data is gone (safetensors issue 300)
        raise refuse(key, "a meta tensor, which has no data", "materialise it first")
    if tensor.is_nested:
        raise refuse(key, "a nested tensor", "save its components")
    if _SUB_BYTE.match(str(tensor.dtype)):
        raise refuse(key, f"dtype {tensor.dtype}", "view it as a whole-byte dtype")


def tensor_bytes(tensor, key: str = ""):
    """C-order bytes of a dense tensor, as a buffer; no copy is made if it is contiguous already.

    Covers every dtype torch stores in whole bytes: float8, bfloat16 and complex included. A lazy
    conjugate or negation is carried out first, so that the bytes are the values seen.

    Raises
    ------
    UnsupportedState
        Meta tensors (they have no data), and layouts that are not dense.
    """
    torch = _torch()
    demand_data(tensor, key)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise refuse(key, f"layout {tensor.layout}", "convert it to a dense tensor")
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if dense.numel() == 0:
        return b""
    # torch calls a dimension of size one contiguous whatever its stride; a byte view does not
    flat = dense.as_strided((dense.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())


def demand_plain_array(array, key: str = "") -> None:
    """Refuse arrays whose bytes are not the whole truth: masks, fields, Python objects."""
    if type(array).__name__ != "ndarray":
        raise refuse(key, f"a numpy {type(array).__name__}", "save plain arrays")
    if array.dtype.hasobject or array.dtype.names or array.dtype.subdtype:
        raise refuse(key, f"an array of dtype {array.dtype}", "use a plain numeric dtype")


def _components(tensor):
    """The dense tensors that make up a tensor, with names: several for sparse and quantised."""
    torch = _torch()
    if tensor.is_quantized:
        yield "int", tensor.int_repr()
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            yield "scale", torch.tensor([tensor.q_scale()], dtype=torch.float64)
            yield "zero", torch.tensor([tensor.q_zero_point()], dtype=torch.int64)
        else:
            yield "scales", tensor.q_per_channel_scales()
            yield "zeros", tensor.q_per_channel_zero_points()
            yield "axis", torch.tensor([tensor.q_per_channel_axis()], dtype=torch.int64)
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        yield "indices", tensor.indices()
        yield "values", tensor.values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield "crow", tensor.crow_indices()
        yield "col", tensor.col_indices()
        yield "values", tensor.values()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield "ccol", tensor.ccol_indices()
        yield "row", tensor.row_indices()
        yield "values", tensor.values()
    else:
        yield "", tensor


def _frame(digest, tag: bytes, payload) -> None:
    """Feed one length-prefixed, tagged field: no boundary can be mistaken for another."""
    view = memoryview(payload).cast("B")
    digest.update(tag + struct.pack("<Q", len(view)))
    digest.update(view)


def tensor_digest(tensor, key: str = "") -> str:
    """SHA-256 over a tensor's dtype, shape and C-order bytes (hexadecimal).

    ``requires_grad``, device, strides and storage sharing do not enter; NaN payloads and the sign
    of zero do, since they are bits.
    """
    demand_data(tensor, key)
    digest = hashlib.sha256()
    _frame(digest, b"t", f"{tensor.dtype}|{tensor.layout}".encode())
    _frame(digest, b"s", repr(tuple(tensor.shape)).encode())
    try:
        parts = list(_components(tensor))
    except RuntimeError as error:  # a quantised tensor without its parameters, say
        raise refuse(key, str(error)[:200], "save its values as a plain tensor") from None
    for name, part in parts:
        _frame(digest, b"n", f"{name}|{part.dtype}|{tuple(part.shape)}".encode())
        _frame(digest, b"b", tensor_bytes(part, key))
    return digest.hexdigest()


def _scalar(leaf, key: str) -> tuple[bytes, bytes]:
    """Tag and canonical bytes of a leaf that is not a tensor."""
    kind = type(leaf)
    if leaf is None:
        return b"N", b""
    if kind is bool:
        return b"B", b"1" if leaf else b"0"
    if kind is int:
        return b"I", format(leaf, "x").encode()  # decimal conversion of huge integers is limited
    if kind is float:
        return b"F", struct.pack("<d", leaf)
    if kind is complex:
        return b"C", struct.pack("<dd", leaf.real, leaf.imag)
    if kind is str:
        return b"S", leaf.encode("utf-8", "surrogatepass")
    if kind in (bytes, bytearray):
        return b"Y", bytes(leaf)
    torch = _torch()
    if torch is not None and kind in (torch.dtype, torch.Size, torch.device):
        return b"O", repr(leaf).encode()
    raise refuse(
        key,
        f"{kind.__module__}.{kind.__qualname__}",
        "save tensors, numbers, strings, bytes, and dicts, lists and tuples of them",
    )


def walk(state, key: str = "", depth: int = 0) -> Iterator[tuple[str, str, object]]:
    """Yield ``(key, kind, leaf)`` for every node of a nested state, containers included.

    Dictionaries are visited in the order of their keys, so that insertion order does not matter;
    ``kind`` is ``dict``, ``list``, ``tuple``, ``tensor``, ``array`` or ``leaf``. Key parts are
    written with their type (``state/0`` for an integer, ``'0'`` quoted if it is a string that could
    be taken for one), joined by ``/``.

    Raises
    ------
    UnsupportedState
        A dictionary key that is neither a string nor an integer, or nesting deeper than 64.
    """
    if depth > MAX_DEPTH:
        raise refuse(key, f"more than {MAX_DEPTH} levels of nesting", "flatten the state")
    if isinstance(state, Mapping):
        yield key, "dict", state
        for name in sorted(state, key=_order):
            yield from walk(state[name], _join(key, name), depth + 1)
    elif isinstance(state, (list, tuple)) and not type(state).__module__.startswith("torch"):
        yield key, "tuple" if isinstance(state, tuple) else "list", state
        for index, item in enumerate(state):
            yield from walk(item, _join(key, index), depth + 1)
    elif is_tensor(state):
        yield key, "tensor", state
    elif is_array(state):
        yield key, "array", state
    else:
        yield key, "leaf", state


def _order(name):
    """Integers first, then strings; anything else is refused a moment later, by ``_join``."""
    return (type(name) is not int, name if type(name) in (int, str) else repr(name))


def _join(key: str, name) -> str:
    if type(name) is int:
        part = str(name)
    elif type(name) is str:
        # quoted: what could be taken for an integer, and the one name that safetensors reserves
        plain = name and not name.lstrip("-").isdigit() and not set(name) & set("/'\\")
        plain = plain and name != "__metadata__"
        part = name if plain else repr(name)
    else:
        raise refuse(key, f"a dictionary key of type {type(name).__name__}", "use str or int keys")
    return f"{key}/{part}" if key else part


def content_digest(state) -> str:
    """SHA-256 over a whole nested state: structure, keys, types, shapes and every value.

    Parameters
    ----------
    state
        Nested dicts (str or int keys), lists and tuples of tensors, numpy arrays, numbers, strings,
        bytes, booleans and None. Dictionary order does not matter; list order does.

    Returns
    -------
    str
        Hexadecimal digest. Equal states give equal digests whatever the strides, devices or format.

    Raises
    ------
    UnsupportedState
        Something in the state has no defined bytes; the message names its key.
    """
    digest = hashlib.sha256(b"ckptlib.content/1")
    for key, kind, leaf in walk(state):
        _frame(digest, b"k", key.encode("utf-8", "surrogatepass"))
        if kind in ("dict", "list", "tuple"):
            _frame(digest, kind[:1].encode(), str(len(leaf)).encode())
        elif kind == "tensor":
            _frame(digest, b"T", tensor_digest(leaf, key).encode())
        elif kind == "array":
            demand_plain_array(leaf, key)
            _frame(digest, b"A", f"{leaf.dtype.str}|{leaf.shape}".encode())
            _frame(digest, b"b", leaf.tobytes())
        else:
            _frame(digest, *_scalar(leaf, key))
    return digest.hexdigest()
