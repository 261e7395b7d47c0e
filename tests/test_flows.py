"""Flows: each starts from a known state, says what it did, and is the same wherever it runs."""

from __future__ import annotations

import pytest

from ckptlib.crashes import kill, oracle, trace_rule
from ckptlib.experiments import crash_operations, flows
from ckptlib.guard import verify

EVERY = pytest.mark.parametrize(("name", "mode", "protocol"), list(crash_operations.covered()))


def shape(operations) -> list[tuple]:
    return [(op.call, kill.name_of(op), op.size, op.result) for op in operations]


@EVERY
def test_undisturbed_a_flow_keeps_every_promise_and_the_trace_rule(tmp_path, name, mode, protocol):
    place = flows.place(tmp_path, name, mode, protocol, 1)
    ledger = place.prepare()
    operations, _ = place.recorded()
    if place.flow.step is not None:
        ledger.acknowledge(place.flow.step)
    found = place.judge(ledger)
    spoiled = name == "overwrite again" and mode == "unsafe"  # the dead writer's doing, not its own
    assert (found.outcome, found.broken) == ("kept", frozenset()) or spoiled
    after = place.next_save(ledger, found)
    assert after == oracle.Aftermath(True, 0)
    if mode != "unsafe":
        assert trace_rule.broken(operations, mode) == []


@EVERY
def test_a_flow_makes_the_same_operations_in_any_folder_for_any_seed(
    tmp_path, name, mode, protocol
):
    traces = []
    for number, seed in enumerate((1, 2)):
        place = flows.place(tmp_path / str(number) / ("deep" * number), name, mode, protocol, seed)
        place.prepare()
        traces.append(place.copy(tmp_path / f"copy-{number}").recorded()[0])
    first, second = map(shape, traces)
    assert [op[:2] for op in first] == [op[:2] for op in second]


def test_all_modes_protocols_and_kinds_of_flow_are_covered():
    arms = set(crash_operations.covered())
    assert {flow for flow, _, _ in arms} == set(flows.FLOWS)
    for flow in flows.GROUP_FLOWS:
        assert {arm[1:] for arm in arms if arm[0] == flow} == set(flows.GROUP_ARMS)
    for flow in flows.FILE_FLOWS:
        assert {arm[1] for arm in arms if arm[0] == flow} == {
            "unsafe", "atomic_nodirsync", "atomic_dirsync",
        }  # fmt: skip


def test_what_a_flow_starts_from_is_as_its_description_says(tmp_path):
    def place(name: str, protocol: str = "batched", mode: str = "atomic_dirsync"):
        found = flows.place(tmp_path / name / protocol, name, mode, protocol, 1)
        return found, found.prepare()

    first, ledger = place("first save")
    assert not first.root.exists() and ledger.acknowledged == [] and ledger.in_flight == 1
    again, _ = place("save again", "per_file")
    assert verify(again.root / "step-000000000003").status == "INVALID"
    staged, _ = place("save again")
    assert oracle.temporary_files(staged.root) != []
    scrubbed, ledger = place("scrub")
    assert verify(scrubbed.root / "step-000000000003").layer == "sha256"
    assert (ledger.acknowledged, ledger.in_flight) == ([1, 2], None)
    between, ledger = place("overwrite again", "single_file")
    assert verify(between.root / flows.NAME) and ledger.acknowledged == [1]
