"""A real SIGKILL at every operation of every flow: before it, after it, and amid every write.

Nothing is chosen by hand. Each flow is run once on a recorder; its trace is the list of operations,
and every one of them is a place to die, reading and looking around included. After each kill
another process recovers, the oracle judges what is found, and the job saves on.

A kill says nothing about flushes, since the page cache outlives the process.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ckptlib.crashes import kill
from ckptlib.crashes.kill import Point
from ckptlib.crashes.oracle import Ledger
from ckptlib.errors import InvalidInput, explain
from ckptlib.experiments import flows, registry
from ckptlib.experiments.flows import Place

#: Fields of a trial that make a batch for the engine.
BATCH = ("flow", "mode", "protocol", "seed", "part")
PART = 100  # trials of a flow that go to one worker together


def traces(scratch: Path, seed: int) -> dict[tuple[str, str, str], list]:
    """The operations of every flow in every arm, by flow, mode and protocol."""
    found = {}
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="traces.", dir=scratch) as folder:
        for number, (flow, mode, protocol) in enumerate(covered()):
            place = flows.place(Path(folder) / str(number), flow, mode, protocol, seed)
            place.prepare()
            found[flow, mode, protocol], _ = place.recorded()
    return found


def covered() -> Iterator[tuple[str, str, str]]:
    """Every flow in every arm: flow, mode, protocol."""
    for flow in flows.FLOWS:
        for mode, protocol in flows.arms(flow):
            yield flow, mode, protocol


def plan(traced: dict, *, seed: int, seeds: int, every: int) -> list[dict]:
    """A trial for each place to die.

    Parameters
    ----------
    traced : dict
        What :func:`traces` gave.
    seed, seeds : int
        The first seed, and how many: other bytes, the same operations.
    every : int
        1 tries every place; n tries one in n, each flow from another one on.

    Raises
    ------
    InvalidInput
        A count is not a whole number, 1 or more.
    """
    for name, value in {"seeds": seeds, "every": every}.items():
        if type(value) is not int or value < 1:
            raise InvalidInput(
                explain(f"unusable {name}", expected="a whole number, 1 or more", found=repr(value))
            )
    trials = []
    for own in range(seed, seed + seeds):
        for number, (arm, trace) in enumerate(traced.items()):
            points = list(kill.every_point(trace))
            for place in range(number % every, len(points), every):
                trials.append(_trial(*arm, own, points[place], place, len(points)))
    return trials


def _trial(flow, mode, protocol, seed: int, point: Point, place: int, places: int) -> dict:
    return {
        "trial_id": f"{flow}-{mode}-{protocol}-{seed}-{place:04d}".replace(" ", "_"),
        "flow": flow, "mode": mode, "protocol": protocol, "seed": seed, "part": place // PART,
        "place": place, "places": places, "operation_index": point.index,
        "operation": point.call, "name": point.name, "position": point.position,
        "prefix": point.prefix,
    }  # fmt: skip


def run_batch(trials: list[dict], scratch: Path) -> list[dict]:
    """Kill one flow at one place after the other; each starts from the same state."""
    import torch

    torch.set_num_threads(1)  # a forked child has no other threads to wait for
    first = trials[0]
    arm = [first[name] for name in ("flow", "mode", "protocol", "seed")]
    template = flows.place(Path(scratch) / "template", *arm)
    ledger = template.prepare()
    folder = Path(scratch) / "trial"
    rows = [_run(trial, template, ledger.copy(), folder) for trial in trials]
    shutil.rmtree(Path(scratch) / "template")
    return rows


def _run(trial: dict, template: Place, ledger: Ledger, folder: Path) -> dict:
    place = template.copy(folder)
    point = Point(*(trial[name] for name in ("operation_index", "position", "operation", "name",
                                             "prefix")))  # fmt: skip
    for acknowledged in kill.run_killed(place.act, point):
        ledger.acknowledge(acknowledged)
    found = place.judge(ledger)
    after = place.next_save(ledger, found)
    found = found.also(*after.broken)
    shutil.rmtree(folder)
    row = {
        **trial,
        "method": "sigkill",
        "crash_point": f"{trial['position']} {trial['operation']} {trial['name']}",
        "errno": "",
        "step": template.flow.step or template.flow.damaged,
        "in_flight_step": ledger.in_flight,
        "acknowledged_step": ledger.newest,
        "recovered_step": found.recovered_step,
        "group_valid": found.group_valid,
        "killed": True,
        "outcome": found.outcome,
        "rule": found.rule,
        "expected": found.expected,
        "reason": found.reason,
        "next_save_ok": after.next_save_ok,
        "leftovers": after.leftovers,
    }
    return {name: row[name] for name in registry.output("crash_operations").columns}
