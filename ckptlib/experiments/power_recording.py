"""Recorded runs of a checkpointing job on a real file system: logs whose crash states are tried.

A workload runs on a file system that lies on a recording device. Every operation of the library is
marked in the device's log, and so are the begin and the acknowledgement of each save, with content
digests: a log says by itself what must be found after a crash.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy

from ckptlib import formats, temps
from ckptlib.crashes import blockdev, mounts, oracle, power
from ckptlib.crashes.blocklog import DeviceLog
from ckptlib.crashes.filesystems import filesystem
from ckptlib.crashes.oracle import FILE, Ledger
from ckptlib.experiments import payloads
from ckptlib.store import CheckpointStore
from ckptlib.vfs import LayeredVFS, Operation
from ckptlib.write_modes import Flushes, WriteMode, install, put

#: Protocols of one file: with the sidecar that the guard needs, and as jobs do it that have none.
SINGLE_FILE, BARE_FILE = "single_file", "bare_file"
FILES = (SINGLE_FILE, BARE_FILE)
FOLDER = "runs"  # where the job's checkpoints lie on the device
STORE = f"{FOLDER}/job"
NAME = "checkpoint.pt"
SAVES = 4
KEEP = 2  # of the workload that prunes
#: Directories whose flush can be left out, to see what it buys.
OMITTED = ("staging", "store", "step", "parents")
_CHANGING = {
    *("create", "write", "flush", "replace", "rename", "mkdir", "rmdir", "unlink", "symlink"),
    "flush_dir",
}


class MarkingVFS(LayeredVFS):
    """Marks begin and end of every operation that changes something in the device's log."""

    def __init__(self, device: blockdev.Server, root: Path):
        super().__init__()
        self._device, self._root = device, str(root)

    def around(self, op: Operation, call: Callable):
        if op.call not in _CHANGING:
            return call()
        label = {"operation": op.call, "number": op.index, "path": self._relative(op.path)}
        if op.target:
            label["target"] = self._relative(op.target)
        if op.size:
            label["size"] = op.size
        self._device.mark(**label)
        result = call()
        self._device.mark(done=op.index)
        return result

    def _relative(self, path: str) -> str:
        """Without the mount point, and with one name for all temporary ones."""
        inner = os.path.relpath(path, self._root) if os.path.isabs(path) else path
        parts = ("(temporary)" if temps.is_temp(part) else part for part in inner.split(os.sep))
        return "/".join(parts)


class OmittingVFS(LayeredVFS):
    """Says that one kind of directory was flushed, and does not flush it."""

    def __init__(self, inner: LayeredVFS, root: Path, omitted: str):
        super().__init__(inner)
        self._root, self._omitted = str(root), omitted

    def around(self, op: Operation, call: Callable):
        if op.call == "flush_dir" and self._kind(op.path) == self._omitted:
            return "fsync"
        return call()

    def _kind(self, path: str) -> str:
        inner = os.path.relpath(path, self._root)
        if inner == STORE:
            return "store"
        if not inner.startswith(STORE):
            return "parents"
        return "staging" if temps.is_temp(os.path.basename(inner)) else "step"


@dataclass
class Job:
    """A checkpointing job on a mounted device; what it saves and is told goes into the log."""

    trial: dict
    device: blockdev.Server
    root: Path
    draw: numpy.random.Generator
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self):
        self.vfs = MarkingVFS(self.device, self.root)
        if self.trial["omitted"]:
            self.vfs = OmittingVFS(self.vfs, self.root, self.trial["omitted"])

    def store(self, keep: int | None = None) -> CheckpointStore:
        trial = self.trial
        return CheckpointStore(
            self.root / STORE, mode=trial["mode"], protocol=trial["protocol"], keep=keep,
            run_id=f"seed-{trial['seed']}", vfs=self.vfs,
        )  # fmt: skip

    def state(self, step: int) -> dict:
        state = payloads.small_group(self.trial["seed"], step)
        return {FILE: state["model"]} if self.trial["protocol"] in FILES else state

    def save(self, step: int, save: Callable[[dict], object]) -> None:
        """Save one state, with its marks around."""
        state = self.state(step)
        self.device.mark(**{power.BEGIN: step, "parts": oracle.digests_of(state)})
        save(state)
        self.device.mark(**{power.ACKNOWLEDGED: step})

    def write_back(self) -> None:
        """What the kernel does after some seconds, at once: write this file system's dirty data."""
        self.device.mark(writeback="begin")
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            mounts.checked(ctypes.CDLL(None, use_errno=True).syncfs(descriptor), str(self.root))
        finally:
            os.close(descriptor)
        self.device.mark(writeback="end")


def _groups(job: Job, keep: int | None = None) -> None:
    store = job.store(keep)
    early = int(job.draw.integers(1, SAVES + 1))  # in some runs the kernel writes back in between
    for step in range(1, SAVES + 1):
        job.save(step, lambda state, step=step: store.save(step, state))
        if step == early:
            job.write_back()


def _files(job: Job, name: Callable[[int], str]) -> None:
    folder = job.root / FOLDER
    folder.mkdir()
    job.write_back()  # the folder is the user's, and was there long before
    early = int(job.draw.integers(1, SAVES + 1))
    for step in range(1, SAVES + 1):
        path = folder / name(step)
        job.save(step, lambda state, path=path: _install(job, path, state))
        if step == early:
            job.write_back()


def _install(job: Job, path: Path, state: dict) -> None:
    source = partial(formats.get("torch").save, state[FILE])
    mode = WriteMode.of(job.trial["mode"])
    if job.trial["protocol"] == SINGLE_FILE:
        install(path, source, mode, vfs=job.vfs)
    else:
        put(job.vfs, str(path), source, mode, Flushes(str(path), mode))


def numbered(step: int) -> str:
    """File name of a step."""
    return f"checkpoint-{step:06d}.pt"


def _recovery(job: Job) -> None:
    """What a restarted job does: look after the store, load, go on from there."""
    store = job.store()
    store.scrub()
    found = store.load(allow_empty=True)
    step = found.step + 1 if found else 1
    job.save(step, lambda state: store.save(step, state))


#: What a recorded job does.
WORKLOADS: dict[str, Callable[[Job], None]] = {
    "saves": _groups,
    "prune": partial(_groups, keep=KEEP),
    "overwrite": partial(_files, name=lambda step: NAME),
    "numbered": partial(_files, name=numbered),
    "recovery": _recovery,
}


def record(trial: dict, folder: Path, path: Path, base: DeviceLog | None = None) -> str:
    """Record one run in this process, which must have a mount namespace of its own.

    Parameters
    ----------
    trial : dict
        ``filesystem``, ``workload``, ``mode``, ``protocol``, ``omitted``, ``seed``, ``states``.
    folder : Path
        For the image, the device and the mount point.
    path : Path
        Where the log goes.
    base : DeviceLog, optional
        What is on the device; a new file system otherwise. Its ``about`` may hold a ``ledger``.

    Returns
    -------
    str
        SHA-256 of the log file.
    """
    entry = filesystem(trial["filesystem"])
    # every log has a file system and draws of its own
    words = [trial["seed"], *trial["log"].encode()]
    draw = numpy.random.default_rng(numpy.random.SeedSequence(words))
    if base is None:
        base = entry.log(folder / "image", int(draw.integers(2**62)))
    ledger = base.about.get("ledger", Ledger().to_json())
    about = {name: value for name, value in trial.items() if name not in ("trial_id", "folder")}
    about |= {"ledger": ledger, "kernel": platform.release(), "make": " ".join(entry.make),
              "options": entry.options}  # fmt: skip
    DeviceLog(base.size, about, base.base).save(folder / "base.plog")
    mountpoint = folder / "mnt"
    mountpoint.mkdir(exist_ok=True)
    with blockdev.serving(folder / "device") as device:
        device.load(folder / "base.plog")
        disk = device.record()
        if trial["workload"] == "recovery":
            device.mark(**{power.RECOVERY: "begin"})  # the kernel's own is part of it
        with entry.mounted(disk, mountpoint):
            job = Job(trial, device, mountpoint, draw, Ledger.from_json(ledger))
            WORKLOADS[trial["workload"]](job)
            job.write_back()
            return device.stop(path)
