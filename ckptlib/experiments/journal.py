"""Finished batches of trials, kept as they finish; a damaged line never becomes a result."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ckptlib.experiments.outputs import replaced


def canonical(value) -> str:
    """Write a value as JSON text in one way only; numpy scalars become plain numbers."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value):
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a trial or a row may hold text, numbers and truth values, not {value!r}")


class Journal:
    """Lines of ``{"key", "rows", "check"}`` in a file that is only ever appended to.

    Nothing is flushed to the medium: a lost line costs one batch, which is run again.

    Parameters
    ----------
    path : Path
        The journal's file; made on the first append.
    wanted : set of str
        Keys of the batches of the present plan; lines of other plans or code are dropped.
    """

    def __init__(self, path: Path, wanted: set[str]):
        self.path = path
        self.finished: dict[str, list[dict]] = {}
        if not path.exists():
            return
        kept = []
        for line in path.read_bytes().split(b"\n"):
            entry = self._parse(line)
            if entry and entry["key"] in wanted:
                self.finished[entry["key"]] = entry["rows"]
                kept.append(line)
        # Rewritten without what was torn or is foreign, so that the next append starts a line.
        with replaced(path) as temporary:
            temporary.write_bytes(b"".join(line + b"\n" for line in kept))

    @staticmethod
    def _parse(line: bytes) -> dict | None:
        try:
            entry = json.loads(line)
            if entry["check"] == _check(entry["key"], entry["rows"]):
                return entry
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        return None

    def append(self, key: str, rows: list[dict]) -> list[dict]:
        """Keep the rows of a finished batch; return them as they will be read back."""
        entry = {"key": key, "rows": rows, "check": _check(key, rows)}
        line = canonical(entry)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(line.encode() + b"\n")
        self.finished[key] = json.loads(line)["rows"]
        return self.finished[key]

    def remove(self) -> None:
        """Forget everything, once the complete result is in place."""
        self.path.unlink(missing_ok=True)


def _check(key: str, rows: list[dict]) -> str:
    return hashlib.sha256(canonical([key, rows]).encode()).hexdigest()
