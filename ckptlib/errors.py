"""Every error that this suite raises on purpose; a message never leaves out what to do about it.

One small hierarchy under :class:`CkptError`. Errors that come from the operating system keep its
``errno``, so that a caller can still tell a full disk from a denied one.
"""

from __future__ import annotations

import os


def explain(what: str, *, path=None, expected=None, found=None, do: str | None = None) -> str:
    """Build one readable sentence group: what happened, where, expected, found, what to do."""
    text = what
    if path is not None:
        text += f": {os.fspath(path)}"
    if expected is not None:
        text += f"; expected {expected}"
    if found is not None:
        text += f"; found {found}"
    if do:
        text += f". {do[0].upper()}{do[1:]}"
    return text if text.endswith((".", "!", "?")) else text + "."


class CkptError(Exception):
    """Base of all errors of this suite.

    Attributes
    ----------
    path : str or None
        The file or directory concerned.
    """

    def __init__(self, message: str, path=None):
        super().__init__(message)
        self.path = None if path is None else os.fspath(path)

    def __reduce__(self):
        # OSError keeps its errno outside of __dict__, and would lose it on the way from a worker
        return _rebuild, (type(self), self.args, vars(self) | {"errno": self.errno})

    #: Of the operating system, where one refused; None otherwise.
    errno = None

    def __str__(self) -> str:  # OSError's own __str__ would drop the message
        return str(self.args[0]) if self.args else self.__class__.__name__


def _rebuild(kind: type[CkptError], arguments: tuple, fields: dict) -> CkptError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    for name, value in fields.items():
        setattr(error, name, value)
    return error


class InvalidInput(CkptError, ValueError):
    """An argument, parameter or configuration file is not acceptable."""


class UnsupportedState(CkptError, TypeError):
    """A state holds something that could not be saved, or not loaded back safely.

    Attributes
    ----------
    key : str
        Where in the state it sits, for example ``optimizer/state/0/step``.
    """

    def __init__(self, message: str, key: str = "", path=None):
        super().__init__(message, path)
        self.key = key


class OperationFailed(CkptError, OSError):
    """The operating system refused a file operation.

    Attributes
    ----------
    errno : int
        The operating system's error number.
    operation : str
        The step that failed, for example ``flush``.
    """

    def __init__(self, message: str, path=None, errno: int | None = None, operation: str = ""):
        super().__init__(message, path)
        self.errno = errno
        self.operation = operation


class WriteFailed(OperationFailed):
    """A step of a save was refused; the previous checkpoint is untouched."""


class ReadFailed(OperationFailed):
    """What is there cannot be seen just now; nothing was concluded from it."""


class CommittedNotDurable(CkptError, OSError):
    """The checkpoint is in place and complete, but a flush after the commit failed.

    Attributes
    ----------
    receipt : object
        The receipt of the save, with ``durable`` False and the reason.
    """

    def __init__(self, message: str, path=None, errno: int | None = None, receipt=None):
        super().__init__(message, path)
        self.errno = errno
        self.receipt = receipt


class SymlinkRefused(CkptError):
    """The target of a write is a symbolic link and following it was not asked for."""


class UntrustedPath(CkptError):
    """A manifest names a path that could lead out of its own directory."""


class StoreError(CkptError):
    """Base of what a :class:`~ckptlib.store.CheckpointStore` raises."""


class AlreadyExists(StoreError):
    """A committed checkpoint stands at this step; committed steps are write-once."""


class StoreBusy(StoreError):
    """Another process is saving, pruning or scrubbing this store."""


class StoreEmpty(StoreError):
    """The store holds no checkpoint at all."""


class NoValidCheckpoint(StoreError):
    """Checkpoints exist, but none of them may be loaded.

    Attributes
    ----------
    skipped : list
        Every checkpoint that was passed over, with its verdict.
    """

    def __init__(self, message: str, path=None, skipped=()):
        super().__init__(message, path)
        self.skipped = list(skipped)


class CorruptCheckpoint(CkptError):
    """A file or group does not match its recorded digests.

    Attributes
    ----------
    verdict : ckptlib.guard.Verdict or None
        What the guard found.
    """

    def __init__(self, message: str, path=None, verdict=None):
        super().__init__(message, path)
        self.verdict = verdict


class MissingInput(CkptError, FileNotFoundError):
    """A table, figure or notebook that this step builds on is not there."""


class StaleResults(CkptError):
    """Results on disk were made by another version of the code or are not ours."""


class UnsuitableScratch(CkptError):
    """The scratch folder cannot serve: memory-backed, full or read-only."""
