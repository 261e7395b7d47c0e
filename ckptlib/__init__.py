"""Crash-consistent, verified checkpoints for training; importing it never loads torch or numpy.

The public face is small: :class:`CheckpointStore`, :func:`install`, :func:`verify`,
:class:`WriteMode`, and the errors in :mod:`ckptlib.errors`. Everything is resolved on first use, so
that a command line tool which only reads manifests does not pay for a tensor library.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "CheckpointStore": "ckptlib.store",
    "Found": "ckptlib.store",
    "Receipt": "ckptlib.store",
    "rng_state": "ckptlib.formats.rng",
    "restore_rng": "ckptlib.formats.rng",
    "install": "ckptlib.write_modes",
    "WriteMode": "ckptlib.write_modes",
    "verify": "ckptlib.guard",
    "Verdict": "ckptlib.guard",
    "errors": "ckptlib.errors",
}

__all__ = [
    "CheckpointStore",
    "Found",
    "Receipt",
    "Verdict",
    "WriteMode",
    "errors",
    "install",
    "restore_rng",
    "rng_state",
    "verify",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'ckptlib' has no attribute {name!r}")
    module = import_module(_HOME[name])
    return module if name == "errors" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
