"""The schema of a state: the name, dtype and shape of each tensor; it never looks at values."""

from __future__ import annotations

import cmath

from ckptlib.digests import walk


def schema_of(state) -> dict[str, list]:
    """Map each tensor's or array's key to ``[dtype, [shape]]``, JSON-ready.

    Keys are those of :func:`ckptlib.digests.walk`, for example ``layer1/weight``.
    """
    return {
        key: [str(leaf.dtype), list(leaf.shape)]
        for key, kind, leaf in walk(state)
        if kind in ("tensor", "array")
    }


def differences(expected: dict[str, list], found: dict[str, list]) -> list[str]:
    """Readable differences between two schemas, empty if they agree."""
    lines = [f"{key}: missing" for key in expected if key not in found]
    lines += [f"{key}: unexpected" for key in found if key not in expected]
    lines += [
        f"{key}: expected {expected[key]}, found {found[key]}"
        for key in expected
        if key in found and list(expected[key]) != list(found[key])
    ]
    return lines


def nonfinite(state) -> list[str]:
    """Keys of floating-point or complex tensors, arrays and numbers that hold NaN or infinity."""
    bad = []
    for key, kind, leaf in walk(state):
        if kind == "tensor":
            if (leaf.is_floating_point() or leaf.is_complex()) and not _finite_tensor(leaf):
                bad.append(key)
        elif kind == "array":
            if leaf.dtype.kind in "fc" and not bool(_isfinite(leaf).all()):
                bad.append(key)
        elif type(leaf) in (float, complex) and not cmath.isfinite(leaf):
            bad.append(key)
    return bad


def _finite_tensor(tensor) -> bool:
    values = tensor.detach()
    if str(values.layout) != "torch.strided":
        values = values.to_dense()
    if "float4" in str(values.dtype):
        return True  # this type has neither NaN nor infinity
    if values.dtype.itemsize == 1:  # float8 has no isfinite kernel of its own
        values = values.float()
    return bool(values.isfinite().all())


def _isfinite(array):
    import numpy

    return numpy.isfinite(array)
