"""One crash state told from beginning to end: what was done, what was flushed, what was found."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ckptlib.crashes import mounts, power
from ckptlib.crashes.blocklog import FLUSH, MARK, WRITE, Record
from ckptlib.experiments import power_judging as judging
from ckptlib.experiments import power_loss
from ckptlib.experiments.workers import elsewhere

APPLICATION, DEVICE = "application", "device"
BEFORE = 80  # records of context before the window that is cut


@dataclass(frozen=True)
class Story:
    """One crash state of one log.

    ``events`` is a pandas frame with ``index`` (of the record), ``lane`` (application or device),
    ``kind``, ``label`` and ``size`` in bytes; ``kept`` holds the records that reached the medium
    although no flush said so; ``cut`` is the record before which the power went; ``listing`` is the
    tree that was found after the recovery.
    """

    row: dict
    events: object
    kept: frozenset[int]
    cut: int
    listing: str

    @property
    def before(self) -> list[str]:
        """The application's operations up to the cut, in words."""
        mine = self.events[(self.events["lane"] == APPLICATION) & (self.events["index"] < self.cut)]
        return mine["label"].tolist()


def story(run, row) -> Story:
    """Tell the crash state of a row of ``power_loss``, by recovering it once more.

    Parameters
    ----------
    row : mapping or named tuple
        With ``trial_id`` and ``log``.
    """
    fields = row._asdict() if hasattr(row, "_asdict") else dict(row)
    path = power_loss.log_path(run.results, fields["log"])
    number = int(fields["trial_id"].rpartition("-")[2])
    log = judging.read(path)
    state = judging.states_of(log)[number]
    folder = run.scratch / f"power_story.{os.getpid()}"
    listing = elsewhere(_listing, path, folder, number)
    first = max(0, state.applied - BEFORE)
    events = [
        event
        for index in range(first, len(log.records))
        if (event := _event(index, log.records[index])) is not None
    ]
    import pandas

    frame = pandas.DataFrame(events, columns=["index", "lane", "kind", "label", "size"])
    return Story(fields, frame, frozenset(state.kept), state.cut, listing)


def _event(index: int, record: Record) -> tuple | None:
    if record.kind == WRITE:
        label = f"write {len(record)} bytes at block {record.offset // 4096}"
        return index, DEVICE, WRITE, label, len(record)
    if record.kind == FLUSH:
        return index, DEVICE, FLUSH, "flush", 0
    mark = record.mark
    if "operation" in mark:
        target = f" to {mark['target']}" if "target" in mark else ""
        label = f"{mark['operation']} {mark['path']}{target}"
        return index, APPLICATION, mark["operation"], label, mark.get("size", 0)
    for name, words in ((power.BEGIN, "save of step {} begins"),
                        (power.ACKNOWLEDGED, "step {} is acknowledged")):  # fmt: skip
        if name in mark:
            return index, APPLICATION, MARK, words.format(mark[name]), 0
    if mark.get("writeback") == "begin":
        return index, APPLICATION, MARK, "the kernel writes back", 0
    return None


def _listing(path: Path, folder: Path, number: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return mounts.isolated(_look, path, folder, number)


def _look(path: Path, folder: Path, number: int) -> str:
    with judging.judge(path, folder) as judge:
        return judge.listing(judging.states_of(judge.log)[number])
