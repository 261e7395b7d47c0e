"""Every outcome is reachable with files on a disk, and no torn or foreign bytes pass unnoticed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptlib import CheckpointStore, guard, install, manifests
from ckptlib.catalog import step_name
from ckptlib.crashes import kill, oracle
from ckptlib.crashes.oracle import FILE, Ledger, classify, digests_of, judge, judge_file, next_save
from ckptlib.errors import InvalidInput
from ckptlib.formats import torch_format
from ckptlib.manifests import COMMIT, MANIFEST
from ckptlib.write_modes import WriteMode

ATOMIC = ("atomic_nodirsync", "atomic_dirsync")


def state(step: int) -> dict:
    return {"model": {"weights": [0.5 * step] * 50}, "optimizer": {"lr": 1.0 / step, "t": step}}


class Case:
    """A store with steps 1 to 3 acknowledged, and its ledger."""

    def __init__(self, path: Path, mode: str = "unsafe", acknowledged: int = 3):
        self.path, self.mode, self.ledger = path, mode, Ledger()
        for step in range(1, acknowledged + 1):
            self.save(step)

    def save(self, step: int, parts: dict | None = None, acknowledge: bool = True) -> None:
        parts = state(step) if parts is None else parts
        self.ledger.begin(step, digests_of(parts))
        CheckpointStore(
            self.path, mode=self.mode, protocol="per_file", run_id="r", format="numpy"
        ).save(step, parts)
        if acknowledge:
            self.ledger.acknowledge(step)

    def directory(self, step: int) -> Path:
        return self.path / step_name(step)

    def parts(self, step: int) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in self.directory(step).glob("*.npz")}

    def forge(self, step: int, files: dict[str, bytes]) -> None:
        """A step directory whose records are right for bytes that no save ever made."""
        self.directory(step).mkdir()
        entries = []
        for name, data in files.items():
            (self.directory(step) / name).write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            entries.append(manifests.Entry(Path(name).stem, name, "numpy", len(data), digest))
        text = manifests.Manifest("r", step, 100, None, tuple(entries)).to_bytes()
        (self.directory(step) / MANIFEST).write_bytes(text)
        (self.directory(step) / COMMIT).write_bytes(manifests.commit_bytes(text))

    def judge(self, **options) -> oracle.Judgement:
        return judge(self.path, self.ledger, self.mode, **options)


@pytest.fixture
def case(tmp_path) -> Case:
    return Case(tmp_path / "store")


# -- every outcome, made by hand ----------------------------------------------------------------


def test_kept_when_the_newest_acknowledged_is_found_and_nothing_was_under_way(case):
    found = case.judge()
    assert (found.outcome, found.rule, found.recovered_step, found.expected) == (
        "kept",
        "",
        3,
        True,
    )
    assert found.group_valid and found.reason == "" and found.skipped == ()


def test_kept_when_the_save_in_flight_is_found_although_it_never_returned(case):
    case.save(4, acknowledge=False)
    found = case.judge()
    assert (found.outcome, found.recovered_step, found.group_valid) == ("kept", 4, True)


def test_lost_unacknowledged_when_the_save_in_flight_is_torn(case):
    case.save(4, acknowledge=False)
    (case.directory(4) / COMMIT).unlink()
    found = case.judge()
    assert (found.outcome, found.rule, found.recovered_step) == ("lost_unacknowledged", "", 3)
    assert (found.group_valid, found.reason) == (False, "missing COMMIT")
    assert found.skipped == ((4, "missing COMMIT"),)


def test_lost_unacknowledged_when_nothing_was_acknowledged_and_the_store_is_empty(tmp_path):
    case = Case(tmp_path / "store", acknowledged=0)
    assert case.judge().outcome == "lost_unacknowledged"
    case.ledger.begin(1, digests_of(state(1)))
    assert (case.judge().outcome, case.judge().recovered_step) == ("lost_unacknowledged", None)


def test_lost_acknowledged_when_an_older_one_is_found(case):
    (case.directory(3) / "model.npz").write_bytes(b"")
    found = case.judge()
    assert (found.outcome, found.recovered_step) == ("lost_acknowledged", 2)
    assert found.rule == "2 acknowledged means durable"
    assert found.skipped == ((3, "size mismatch"),)


def test_unrecoverable_when_nothing_loads(case):
    for step in (1, 2, 3):
        (case.directory(step) / COMMIT).unlink()
    found = case.judge()
    assert (found.outcome, found.recovered_step) == ("unrecoverable", None)
    assert found.broken == {2, 4} and found.rule == "2 acknowledged means durable"


def test_mixed_when_a_forged_manifest_joins_parts_of_different_saves(case):
    case.forge(4, case.parts(3) | {"model.npz": case.parts(2)["model.npz"]})
    found = case.judge()
    assert (found.outcome, found.rule) == ("mixed", "1 whole or absent")


def test_mixed_when_whole_parts_stand_under_the_step_of_another_save(case):
    case.forge(4, case.parts(2))
    assert case.judge().outcome == "mixed"


def test_mixed_when_a_part_of_the_save_is_left_out(case):
    case.ledger.begin(4, digests_of(state(4)))
    case.forge(4, {"model.npz": case.parts(3)["model.npz"]})
    assert case.judge().outcome == "mixed"


def test_false_accept_when_the_guard_passes_bytes_that_nobody_saved(case, tmp_path):
    other = Case(tmp_path / "elsewhere", acknowledged=0)
    other.save(9)
    case.forge(4, case.parts(3) | {"model.npz": other.parts(9)["model.npz"]})
    found = case.judge()
    assert (found.outcome, found.rule) == ("false_accept", "3 no false accept")
    assert not found.expected  # the guard promises this in every mode


# -- a guard without teeth is caught ------------------------------------------------------------


def torn_in_place(tmp_path) -> Case:
    """A file of the right size whose second half never reached the disk."""
    parts = {"model": {"weights": torch.full((4000,), 7, dtype=torch.uint8)}}
    case = Case(tmp_path / "store", acknowledged=2)
    case.ledger.begin(3, digests_of(parts))
    CheckpointStore(case.path, mode="unsafe", run_id="r", format="safetensors").save(3, parts)
    path = case.directory(3) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-2000] + bytes(2000))
    return case


def test_a_torn_part_of_the_right_size_is_rolled_back(tmp_path):
    found = torn_in_place(tmp_path).judge()
    assert (found.outcome, found.recovered_step) == ("lost_unacknowledged", 2)
    assert found.reason == "digest mismatch"


def test_a_guard_that_does_not_hash_is_caught_as_false_accept(tmp_path, monkeypatch):
    case = torn_in_place(tmp_path)
    monkeypatch.setattr(guard, "_check_size_and_hash", lambda *arguments: None)
    found = case.judge()
    assert (found.outcome, found.recovered_step, found.expected) == ("false_accept", 3, False)


def test_a_guard_that_does_not_ask_for_the_commit_record_is_caught_as_mixed(case, monkeypatch):
    def without_commit(vfs, directory):
        text = (Path(directory) / MANIFEST).read_bytes()
        return manifests.from_bytes(text, directory), manifests.digest(text)

    case.forge(4, case.parts(2))  # a manifest that was never committed
    (case.directory(4) / COMMIT).unlink()
    assert case.judge().outcome == "kept"
    monkeypatch.setattr(guard, "read_manifest", without_commit)
    assert case.judge().outcome == "mixed"


@pytest.mark.parametrize("mode", ATOMIC)
def test_a_store_that_acknowledges_before_it_saves_is_caught(tmp_path, mode):
    case = Case(tmp_path / "store", mode)
    case.ledger.begin(4, digests_of(state(4)))

    def hasty(vfs, acknowledge):
        acknowledge(4)
        kill.die()

    for step in kill.run_killed(hasty):
        case.ledger.acknowledge(step)
    found = case.judge()
    assert (found.outcome, found.expected) == ("lost_acknowledged", False)


def test_a_recovery_that_answers_differently_the_second_time_breaks_rule_5(case, monkeypatch):
    answers = iter([oracle._recover(case.path, WriteMode.unsafe), (None, {}, ())])
    monkeypatch.setattr(oracle, "_recover", lambda store, mode: next(answers))
    found = case.judge(loads=2)
    assert found.rule == "5 recovery is repeatable"


def test_judging_only_reads(case):
    def everything():
        return {p: p.read_bytes() for p in sorted(case.path.rglob("*")) if p.is_file()}

    case.save(4, acknowledge=False)
    (case.directory(4) / "model.npz").write_bytes(b"torn")
    before = everything()
    case.judge()
    assert everything() == before


# -- promises -----------------------------------------------------------------------------------


def test_unsafe_promises_only_what_the_guard_does_and_the_atomic_modes_everything():
    def expected(mode, outcome):
        broken = frozenset(oracle._BROKEN[outcome])
        return oracle.Judgement(WriteMode.of(mode), outcome, broken, None, False, "").expected

    allowed = {o for o in oracle.OUTCOMES if expected("unsafe", o)}
    assert allowed == set(oracle.OUTCOMES) - {"false_accept", "mixed"}
    for mode in ATOMIC:
        assert {o for o in oracle.OUTCOMES if expected(mode, o)} == {"kept", "lost_unacknowledged"}


def test_a_rule_that_is_found_broken_later_counts_too(case):
    assert case.judge().also(6).rule.startswith("6 ")
    assert case.judge().also(6).expected  # unsafe promises nothing about what comes after
    assert not judge(case.path, case.ledger, "atomic_dirsync").also(6).expected


# -- reasons ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: (d / COMMIT).unlink(), "missing COMMIT"),
        (lambda d: (d / COMMIT).write_text("{}"), "manifest error"),
        (lambda d: (d / MANIFEST).unlink(), "manifest error"),
        (lambda d: (d / MANIFEST).write_text('{"torn'), "manifest error"),
        (lambda d: (d / "model.npz").unlink(), "missing part"),
        (lambda d: os.truncate(d / "model.npz", 100), "size mismatch"),
        (lambda d: flip(d / "model.npz"), "digest mismatch"),
        (lambda d: d.rename(d.with_name(step_name(7))), "missing COMMIT"),
    ],
)
def test_every_damage_has_its_reason(case, damage, reason):
    damage(case.directory(3))
    found = case.judge(struck=3)
    assert (found.group_valid, found.reason) == (False, reason)
    assert reason in oracle.REASONS


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# -- single files -------------------------------------------------------------------------------


@pytest.fixture
def single(tmp_path):
    """A file that was overwritten once, and its ledger."""

    def save(step: int, mode: str = "atomic_dirsync") -> None:
        install(tmp_path / "f", lambda sink: torch_format.save(state(step), sink), mode)

    ledger = Ledger()
    for step in (1, 2):
        ledger.begin(step, digests_of({FILE: state(step)}))
        save(step)
        ledger.acknowledge(step)
    ledger.begin(3, digests_of({FILE: state(3)}))
    return tmp_path / "f", ledger, save


def test_of_a_single_file_the_old_one_or_the_new_one_is_legal(single):
    path, ledger, save = single
    found = judge_file(path, ledger, "atomic_dirsync")
    assert (found.outcome, found.recovered_step) == ("lost_unacknowledged", 2)
    assert (found.group_valid, found.reason) == (False, "not installed")
    save(3)
    found = judge_file(path, ledger, "atomic_dirsync")
    assert (found.outcome, found.recovered_step, found.group_valid) == ("kept", 3, True)


def test_a_torn_single_file_leaves_nothing_since_it_was_the_only_copy(single):
    path, ledger, _ = single
    os.truncate(path, 100)
    found = judge_file(path, ledger, "unsafe")
    assert (found.outcome, found.reason, found.expected) == ("unrecoverable", "size mismatch", True)
    assert not judge_file(path, ledger, "atomic_dirsync").expected


def test_a_single_file_that_nobody_saved_is_a_false_accept(single):
    path, ledger, save = single
    save(8)
    assert judge_file(path, ledger, "atomic_dirsync").outcome == "false_accept"


def test_a_single_file_of_an_older_save_is_a_lost_acknowledged_one(single):
    path, ledger, save = single
    save(1)
    assert judge_file(path, ledger, "atomic_dirsync").outcome == "lost_acknowledged"


# -- what comes after ---------------------------------------------------------------------------


def test_a_store_whose_directory_cannot_be_read_is_a_next_save_that_failed(tmp_path, monkeypatch):
    """As ext4 has it (EBADMSG) after a device had lied about its flushes."""
    damaged = Case(tmp_path / "store", "atomic_dirsync")

    def unreadable(path):
        raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG), path)

    monkeypatch.setattr(oracle.REAL, "list", unreadable)
    found = judge(damaged.path, damaged.ledger, "atomic_dirsync")
    assert found.outcome == "unrecoverable"
    after = next_save(damaged.path, 4, {"model": {"step": 4}}, "atomic_dirsync", "batched")
    assert (after.next_save_ok, after.broken) == (False, {6})


def test_the_next_save_clears_what_a_killed_one_left(case):
    case.save(4, acknowledge=False)
    (case.directory(4) / COMMIT).unlink()
    (case.path / ".ckpt-tmp.0.1.0").mkdir()
    assert set(oracle.leftovers(case.path)) == {".ckpt-tmp.0.1.0", step_name(4)}
    after = next_save(case.path, 4, {"model": {"step": 4}}, "unsafe", "per_file")
    assert (after.next_save_ok, after.leftovers, after.broken) == (True, 0, set())


def test_what_nobody_clears_and_a_save_that_fails_break_rule_6(case):
    (case.directory(2) / "stray").touch()
    (case.path / "core").touch()
    after = next_save(case.path, 4, {"model": {"step": 4}}, "unsafe", "per_file")
    assert (after.leftovers, after.broken) == (2, {6})
    again = next_save(case.path, 4, {"model": {"step": 4}}, "unsafe", "per_file")
    assert not again.next_save_ok


# -- the ledger and the classes, for any history ------------------------------------------------

DIGESTS = st.sampled_from("abcd")
SAVED = st.fixed_dictionaries({"model": DIGESTS, "optimizer": DIGESTS})


@st.composite
def ledgers(draw, at_least: int = 0) -> Ledger:
    steps = draw(st.lists(st.integers(0, 50), unique=True, min_size=at_least, max_size=6))
    ledger = Ledger()
    for step in steps:
        ledger.begin(step, draw(SAVED))
        if step != steps[-1] or draw(st.booleans()):
            ledger.acknowledge(step)
    return ledger


@given(ledgers())
def test_a_ledger_survives_json(ledger):
    assert Ledger.from_json(ledger.to_json()) == ledger
    assert list(Ledger.from_json(ledger.to_json()).saves) == list(ledger.saves)
    json.loads(ledger.to_json())


@given(ledgers(at_least=1))
def test_what_was_saved_and_found_whole_is_never_called_mixed_or_false(ledger):
    steps = list(ledger.saves)
    for place, step in enumerate(steps):
        outcome = classify(ledger, step, ledger.saves[step])
        older = ledger.newest is not None and place < steps.index(ledger.newest)
        behind = ledger.in_flight is not None and step != ledger.in_flight
        wanted = "lost_acknowledged" if older else "lost_unacknowledged" if behind else "kept"
        assert outcome == wanted


@given(ledgers(), st.integers(0, 50), SAVED)
def test_anything_else_is_called_mixed_or_false_and_never_accepted(ledger, step, parts):
    saved = list(ledger.saves.values())
    known = all(any(s[name] == digest for s in saved) for name, digest in parts.items())
    outcome = classify(ledger, step, parts)
    if ledger.saves.get(step) == parts:
        assert outcome not in ("mixed", "false_accept")
    else:
        assert outcome == ("mixed" if known else "false_accept")


@given(ledgers())
def test_finding_nothing_is_legal_only_while_nothing_was_acknowledged(ledger):
    wanted = "unrecoverable" if ledger.acknowledged else "lost_unacknowledged"
    assert classify(ledger, None, {}) == wanted


def test_a_ledger_refuses_what_would_make_it_ambiguous():
    ledger = Ledger()
    ledger.begin(1, {"model": "a"})
    ledger.begin(1, {"model": "a"})  # the same again, after a crash
    with pytest.raises(InvalidInput, match="other contents"):
        ledger.begin(1, {"model": "b"})
    with pytest.raises(InvalidInput, match="never begun"):
        ledger.acknowledge(2)


def test_newest_is_the_one_saved_last_not_the_highest_step():
    ledger = Ledger()
    for step in (5, 6, 2):
        ledger.begin(step, {"model": str(step)})
        ledger.acknowledge(step)
    assert ledger.newest == 2
    assert classify(ledger, 6, {"model": "6"}) == "lost_acknowledged"
