"""A nested state as a JSON skeleton beside named tensors; the round trip keeps every type exactly.

This is what lets containers that only know flat names (safetensors, npz) hold an optimizer's state.
"""

from __future__ import annotations

import base64
import json
from collections import OrderedDict

from ckptlib.digests import (
    MAX_DEPTH,
    demand_data,
    demand_plain_array,
    is_array,
    is_tensor,
    refuse,
    walk,
)
from ckptlib.errors import CorruptCheckpoint


def flatten(state) -> tuple[str, dict[str, object]]:
    """Split a state into a skeleton (JSON text) and its tensors and arrays by name.

    Tensors that are the same view of the same storage are named once and stay tied.

    Raises
    ------
    UnsupportedState
        A leaf or container that the skeleton has no exact notation for.
    """
    names = {
        id(leaf): key or "value" for key, kind, leaf in walk(state) if kind in ("tensor", "array")
    }
    leaves: dict[str, object] = {}
    ties: dict[tuple, str] = {}

    def node(item, key: str):
        if is_tensor(item) or is_array(item):
            name = names[id(item)]
            if is_tensor(item):
                demand_data(item, name)
            else:
                demand_plain_array(item, name)
            if is_tensor(item) and (item.is_quantized or str(item.layout) != "torch.strided"):
                raise refuse(name, f"layout {item.layout}", "convert it to a dense tensor")
            if is_tensor(item) and item.numel():
                identity = (
                    item.data_ptr(),
                    item.dtype,
                    item.shape,
                    item.stride(),
                    str(item.device),
                    item.is_conj(),
                    item.is_neg(),
                )
                name = ties.setdefault(identity, name)
            leaves.setdefault(name, item)
            return {"x": name, "kind": "tensor" if is_tensor(item) else "array"}
        kind = type(item)
        if kind in (dict, OrderedDict):
            tag = "d" if kind is dict else "o"
            return {tag: [[_key(k), node(v, f"{key}/{k}")] for k, v in item.items()]}
        if kind in (list, tuple):
            return {kind.__name__[0]: [node(v, f"{key}/{i}") for i, v in enumerate(item)]}
        if item is None or kind in (bool, str):
            return item
        if kind is int:
            return {"i": format(item, "x")}
        if kind is float:
            return {"f": item.hex() if item == item else _nan_bits(item)}
        if kind is complex:
            return {"c": [node(item.real, key), node(item.imag, key)]}
        if kind is bytes:
            return {"y": base64.b64encode(item).decode()}
        raise refuse(
            key.lstrip("/"),
            f"a {kind.__module__}.{kind.__qualname__}",
            "save tensors, numbers, strings and containers of them",
        )

    return json.dumps(node(state, ""), separators=(",", ":")), leaves


class Misplaced(Exception):
    """The bytes are sound; putting the tensor where the caller wanted it failed."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


def place(tensor, map_location):
    """Move a tensor that was read, keeping the caller's mistakes apart from damaged bytes."""
    try:
        return tensor if map_location is None else tensor.to(map_location)
    except Exception as error:
        raise Misplaced(error) from error


#: What parsing damaged bytes may raise; anything else says nothing about the bytes.
DAMAGE = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RuntimeError,  # includes RecursionError and NotImplementedError
    OverflowError,
    EOFError,
)


def _key(name):
    return {"i": format(name, "x")} if type(name) is int else name


def _nan_bits(value: float) -> str:
    import struct

    return "bits:" + struct.pack("<d", value).hex()


def rebuild(skeleton: str, fetch):
    """Build the state back; ``fetch(name, kind)`` returns a tensor or an array.

    Raises
    ------
    CorruptCheckpoint
        The skeleton is not one that :func:`flatten` writes.
    """
    import struct

    cache: dict[str, object] = {}

    def build(item, depth: int):
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        if item is None or isinstance(item, (bool, str)):
            return item
        tag, value = next(iter(item.items()))
        if tag == "x":
            if value not in cache:
                cache[value] = fetch(value, item["kind"])
            return cache[value]
        if tag in ("d", "o"):
            kind = dict if tag == "d" else OrderedDict
            return kind((build(k, depth + 1), build(v, depth + 1)) for k, v in value)
        if tag in ("l", "t"):
            kind = list if tag == "l" else tuple
            return kind(build(v, depth + 1) for v in value)
        if tag == "i":
            return int(value, 16)
        if tag == "f":
            if value.startswith("bits:"):
                return struct.unpack("<d", bytes.fromhex(value[5:]))[0]
            return float.fromhex(value)
        if tag == "c":
            return complex(build(value[0], depth), build(value[1], depth))
        if tag == "y":
            return base64.b64decode(value, validate=True)
        raise ValueError(f"unknown tag {tag!r}")

    try:
        return build(json.loads(skeleton), 0)
    except (*DAMAGE, StopIteration) as error:
        raise CorruptCheckpoint(f"the state's skeleton cannot be read: {error}") from error
