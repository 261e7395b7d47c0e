"""The rule that a recorded save is held to: bytes, flush, rename, directory flush, in that order.

It looks at what was asked of the file system, not at what came of it, so it finds a missing flush
even where the page cache hides it. It holds for the atomic modes; ``unsafe`` keeps none of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ckptlib import sidecars
from ckptlib.manifests import COMMIT, MANIFEST
from ckptlib.vfs import Operation
from ckptlib.write_modes import WriteMode

NAMING = ("replace", "rename")


def broken(operations: Sequence[Operation], mode) -> list[str]:
    """What the operations of one save, install or scrub do against the rule; empty if nothing.

    Parameters
    ----------
    operations : sequence of Operation
        As :class:`ckptlib.vfs.RecordingVFS` keeps them.
    mode : WriteMode or str
        An atomic one.
    """
    mode = WriteMode.of(mode)
    trace = list(operations)
    return [
        *_unflushed(trace),
        *_flushed_again(trace),
        *_early_commits(trace),
        *(_unflushed_names(trace) if mode.flushes_directories else ()),
    ]


def _done(op: Operation) -> bool:
    """Whether the operation succeeded: a failure leaves its errno's name, a flush its primitive."""
    return not op.result or (op.call in ("flush", "flush_dir") and not op.result.startswith("E"))


def _written(trace: Sequence[Operation]) -> dict[str, Operation]:
    """The creation of each file that was written under a name that it does not keep."""
    return {op.path: op for op in trace if op.call == "create" and _done(op)}


def _inside(name: str, path: str) -> bool:
    return name == path or name.startswith(path + os.sep)


def _unflushed(trace: list[Operation]) -> Iterator[str]:
    created = _written(trace)
    for naming in trace:
        if naming.call not in NAMING or not _done(naming):
            continue
        for path, creation in created.items():
            if not _inside(path, naming.path) or creation.index > naming.index:
                continue
            own = [op for op in trace if op.path == path and creation.index < op.index]
            own = [op for op in own if op.index < naming.index and _done(op)]
            size = max((op.offset + op.size for op in own if op.call == "write"), default=0)
            last = max((op.index for op in own if op.call == "write"), default=creation.index)
            flushes = [op for op in own if op.call == "flush" and op.index > last]
            if not flushes:
                yield f"{_name(path)} got its name by {naming.call} before it was flushed"
            elif flushes[-1].size < size:
                yield f"{_name(path)} was flushed at {flushes[-1].size} of {size} bytes"


def _flushed_again(trace: list[Operation]) -> Iterator[str]:
    failed: dict[str, int] = {}
    for op in trace:
        if op.call == "create":
            failed.pop(op.path, None)  # a fresh file under that name
        elif op.call == "flush" and op.path in failed:
            yield f"{_name(op.path)} was flushed again after a flush of it had failed"
        elif op.call == "flush" and not _done(op):
            failed[op.path] = op.index


def _early_commits(trace: list[Operation]) -> Iterator[str]:
    created = _written(trace)
    finals = {op.path: op.target for op in trace if op.call == "replace" and _done(op)}
    commits = [p for p in created if os.path.basename(finals.get(p, p)) == COMMIT]
    for commit in commits:
        folder, begun = os.path.dirname(finals.get(commit, commit)), created[commit].index
        if any(op.call == "rename" and op.path == folder and op.index > begun for op in trace):
            continue  # a staged directory: its rename commits, and all in it is flushed by then
        for path in created:
            final = finals.get(path, path)
            if path == commit or os.path.dirname(final) != folder:
                continue
            ends = [op.index for op in trace if _done(op) and op.path == path
                    and op.call in ("write", "replace")]  # fmt: skip
            if max(ends, default=created[path].index) > begun:
                yield f"{COMMIT} was begun before {_name(final)} was complete"
        names = {os.path.basename(finals.get(path, path)) for path in created}
        if MANIFEST not in names:
            yield f"{COMMIT} was written without {MANIFEST}"


def _unflushed_names(trace: list[Operation]) -> Iterator[str]:
    links = {op.path for op in trace if op.call == "symlink"}  # latest_ok: nothing depends on it
    sides: set[str] = set()
    for naming in trace:
        if naming.call not in NAMING or not _done(naming) or naming.path in links:
            continue
        later = [op for op in trace if op.index > naming.index and op.call == "flush_dir"]
        later = {op.path for op in later if _done(op)}
        target = naming.target
        if target.endswith(sidecars.SUFFIX):
            # of the two sidecars of an install either vouches for the file, see install()
            if target in sides:
                continue
            sides.add(target)
        for folder in {os.path.dirname(naming.path), os.path.dirname(target)}:
            if folder not in later:
                yield f"{os.path.basename(folder)} was not flushed after {_name(target)} was named"
    for made in trace:
        if made.call != "mkdir" or not _done(made):
            continue
        renames = [op for op in trace if op.call == "rename" and op.path == made.path]
        renames = [op for op in renames if op.index > made.index]
        if renames and _staged_unflushed(trace, made.path, renames[0].index):
            name = _name(renames[0].target)
            yield f"the staged directory of {name} was not flushed before its rename"
        elif not renames and not _flushed_after(trace, os.path.dirname(made.path), made.index):
            yield f"the directory that holds {_name(made.path)} was not flushed after it was made"


def _staged_unflushed(trace: list[Operation], staging: str, rename: int) -> bool:
    inside = [op.index for op in trace if op.call == "create" and _inside(op.path, staging)]
    flushed = [op.index for op in trace if op.call == "flush_dir" and op.path == staging]
    return bool(inside) and not any(max(inside) < index < rename for index in flushed)


def _flushed_after(trace: list[Operation], folder: str, index: int) -> bool:
    return any(
        op.call == "flush_dir" and op.path == folder and op.index > index and _done(op)
        for op in trace
    )


def _name(path: str) -> str:
    return os.path.basename(path)
