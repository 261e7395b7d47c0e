"""Every operation of every flow fails, in every way; what comes of it was declared beforehand.

The process lives on, so a fault is tried in the worker itself. What is right for each kind of
operation and fault stands in :mod:`ckptlib.faults.errors`. Whatever comes of it, the predecessor
must load, nothing may be acknowledged that is not there or whose flush failed, and the next save
must work and clear away what was left.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from ckptlib.crashes import kill, oracle, trace_rule
from ckptlib.crashes.oracle import Ledger
from ckptlib.errors import CkptError, CommittedNotDurable, InvalidInput, OperationFailed, explain
from ckptlib.experiments import flows, registry
from ckptlib.experiments.flows import Place
from ckptlib.faults import errors
from ckptlib.faults.errors import EARLY, FAULTS, FINISHING, LATE, FailingVFS
from ckptlib.vfs import Operation, RecordingVFS
from ckptlib.write_modes import WriteMode

#: Fields of a trial that make a batch for the engine.
BATCH = ("flow", "mode", "protocol", "seed", "part")
PART = 200
STRIDE = 37  # between the operations that a sample has of one fault and of the next
#: Makes the operations of another flow, only more of them.
MORE_OF_THE_SAME = "prune, keep=3"
UNDECLARED = "an error that is not typed"


def plan(traced: dict, *, seed: int, every: int) -> list[dict]:
    """A trial for each operation and each fault that can befall it.

    Parameters
    ----------
    traced : dict
        What :func:`.crash_operations.traces` gave, in the order of flows and arms.
    every : int
        1 tries every pair of operation and fault; n tries one in n.
    """
    if type(every) is not int or every < 1:
        raise InvalidInput(
            explain("unusable every", expected="a whole number, 1 or more", found=repr(every))
        )
    places = [
        (*arm, number, op, fault)
        for arm, trace in traced.items()
        if arm[0] != MORE_OF_THE_SAME
        for number, (op, fault) in enumerate(itertools.product(trace, FAULTS))
        if errors.applies(op, fault)
    ]
    chosen = []
    for number, fault in enumerate(FAULTS):  # a sample has some of each, at other operations
        own = [place for place in places if place[-1] == fault]
        chosen += own[STRIDE * number % min(every, len(own) or 1) :: every]
    return [
        {
            "trial_id": f"{flow}-{mode}-{protocol}-{number:05d}".replace(" ", "_"),
            "flow": flow, "mode": mode, "protocol": protocol, "seed": seed,
            "part": number // PART, "operation_index": op.index, "operation": op.call,
            "fault": fault,
        }
        for flow, mode, protocol, number, op, fault in chosen
    ]  # fmt: skip


def run_batch(trials: list[dict], scratch: Path) -> list[dict]:
    """Fail one flow at one operation after the other; each starts from the same state."""
    import torch

    torch.set_num_threads(1)
    first = trials[0]
    arm = [first[name] for name in ("flow", "mode", "protocol", "seed")]
    template = flows.place(Path(scratch) / "template", *arm)
    ledger = template.prepare()
    undisturbed = template.copy(Path(scratch) / "undisturbed")
    trace, usual = undisturbed.recorded()
    commit = template.commits_at(trace)
    rows = []
    for trial in trials:
        when = moment(template, trace, trial["operation_index"], commit)
        place = template.copy(Path(scratch) / "trial")
        rows.append(_run(trial, place, ledger.copy(), when, usual))
        shutil.rmtree(Path(scratch) / "trial")
    return rows


def moment(place: Place, trace: list[Operation], index: int, commit: int) -> str:
    """When in its flow an operation happens: see :mod:`ckptlib.faults.errors`."""
    if index <= commit:
        return EARLY
    flushes = [op.index for op in trace if op.call == "flush_dir" and op.index > commit]
    finishing = WriteMode.of(place.mode).flushes_directories and index == min(flushes, default=-1)
    return FINISHING if finishing else LATE


def _run(trial: dict, place: Place, ledger: Ledger, when: str, usual: str) -> dict:
    failing = FailingVFS(trial["operation_index"], trial["fault"])
    recorder = RecordingVFS(failing)
    error = receipt = None
    try:
        receipt = place.act(recorder, ledger.acknowledge)
    except Exception as raised:  # whatever it is, it is what the caller would have got
        error = raised
    struck = failing.struck
    result = _result(trial, error, receipt, usual)
    found = place.judge(ledger)
    atomic = WriteMode.of(place.mode).atomic
    said_done = error is None and place.flow.step is not None
    against = []
    if atomic and said_done and result != errors.REMARKED:  # a remark says what was not done
        against = trace_rule.broken(recorder.operations, place.mode)
    after = place.next_save(ledger, found)
    found = found.also(*after.broken)
    declared = errors.right(struck.call, trial["fault"], when)
    row = {
        **trial,
        "name": kill.name_of(struck),
        "errno": trial["fault"] if trial["fault"] in errors.ERRNOS else "",
        "moment": when,
        "right": ", ".join(declared),
        "result": result,
        "as_declared": result in declared,
        "error": type(error).__name__ if error else "",
        "acknowledged_step": ledger.newest,
        "recovered_step": found.recovered_step,
        "outcome": found.outcome,
        "rule": found.rule,
        "expected": found.expected,
        "predecessor_lost": found.outcome in oracle.LOST,
        "silent": bool(said_done and (against or not found.group_valid)),
        "next_save_ok": after.next_save_ok,
        "leftovers": after.leftovers,
    }
    return {name: row[name] for name in registry.output("errors").columns}


def _result(trial: dict, error, receipt, usual: str) -> str:
    if isinstance(error, CommittedNotDurable):
        return errors.COMMITTED if error.receipt is not None else UNDECLARED
    if isinstance(error, OperationFailed):
        named = error.path and error.operation and error.errno
        return errors.REFUSED if named else UNDECLARED
    if isinstance(error, CkptError):
        return errors.REFUSED
    if error is not None:
        return UNDECLARED
    if receipt is not None and receipt.reason != usual:
        return errors.REMARKED
    failed = trial["fault"] != "EINTR" and trial["operation"] == "flush"
    return errors.RETRIED if failed else errors.ABSORBED
