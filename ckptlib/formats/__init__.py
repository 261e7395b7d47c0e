"""States to bytes and back, in three containers; loading never runs code from a file.

A format is a module with ``SUFFIX``, ``check(state)``, ``save(state, sink)`` and
``load(file, map_location=None)``. ``sink`` needs ``write``; ``file`` is an open
:class:`ckptlib.vfs.File` whose hash has already matched.
"""

from importlib import import_module
from types import ModuleType

from ckptlib.errors import InvalidInput, explain

FORMATS = ("torch", "safetensors", "numpy")


def get(name: str) -> ModuleType:
    """The module of a format; its tensor library is imported only now.

    Raises
    ------
    InvalidInput
        ``name`` is none of :data:`FORMATS`.
    """
    if name not in FORMATS:
        raise InvalidInput(
            explain(
                "unknown format",
                expected=", ".join(FORMATS),
                found=repr(name),
                do="choose one of these",
            )
        )
    return import_module(f"ckptlib.formats.{name}_format")
