"""Damage touches one file and is undone; the guard in use notices all of it, wherever it falls."""

from __future__ import annotations

import json
import os
import random
import shutil
import zipfile
from pathlib import Path

import numpy
import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib import CheckpointStore, install, verify
from ckptlib.catalog import step_name
from ckptlib.diagnosis import LAYERS
from ckptlib.errors import InvalidInput
from ckptlib.experiments import corruption, engine, payloads, registry
from ckptlib.faults.corruption import FAULTS, TARGETS, apply, chance_of_no_op, choose, damaged
from ckptlib.formats import torch_format
from ckptlib.guard import check_group
from ckptlib.manifests import COMMIT, MANIFEST
from ckptlib.sidecars import SUFFIX


def rng(seed: int = 0) -> numpy.random.Generator:
    return numpy.random.default_rng(seed)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- the faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_its_file_and_nothing_else(tmp_path, fault):
    for name in ("before", "target", "zzz"):
        (tmp_path / name).write_bytes(random.Random(name).randbytes(5000))
    before, inode = contents(tmp_path), (tmp_path / "target").stat().st_ino
    applied = apply(tmp_path / "target", fault, rng())
    after = contents(tmp_path)
    assert after.keys() == before.keys() and (tmp_path / "target").stat().st_ino == inode
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ([applied.path] if applied.effective else [])
    assert applied.effective == (fault != "none") and applied.description


@given(data=st.binary(min_size=1, max_size=3000), seed=st.integers(0, 1000))
def test_each_fault_of_the_paper_does_what_its_name_says(data, seed):
    same, flipped, zeroed, cut = (
        FAULTS[name].alter(data, rng(seed))[0]
        for name in ("none", "bitflip", "zerorange", "truncate")
    )
    assert same == data
    assert (int.from_bytes(flipped, "big") ^ int.from_bytes(data, "big")).bit_count() == 1
    assert cut == data[: len(data) // 2]
    assert len(flipped) == len(zeroed) == len(data)
    differing = [i for i, (old, new) in enumerate(zip(data, zeroed, strict=True)) if old != new]
    assert all(zeroed[i] == 0 for i in differing)
    if differing:
        assert differing[-1] - differing[0] < max(1, len(data) // 100)


def test_a_zero_range_takes_from_one_byte_to_one_percent_of_the_file():
    data = b"\xff" * 10_000
    lengths = [FAULTS["zerorange"].alter(data, rng(i))[0].count(0) for i in range(2000)]
    assert min(lengths) == 1 and max(lengths) == 100


@pytest.mark.parametrize("fault", FAULTS)
def test_equal_generators_do_equal_damage(fault):
    data = bytes(range(256)) * 20
    once, again = (FAULTS[fault].alter(data, rng(5)) for _ in range(2))
    assert once == again


def test_zeroing_what_is_zero_already_changes_nothing_and_is_not_effective(tmp_path):
    path = tmp_path / "zeros"
    path.write_bytes(bytes(4096))
    applied = apply(path, "zerorange", rng())
    assert (applied.bytes_changed, applied.effective) == (0, False)


@given(data=st.binary(max_size=250).map(lambda noise: bytes(80) + noise + bytes(80)))
def test_the_chance_that_a_zero_range_changes_nothing_is_exact(data):
    longest = len(data) // 100 or 1
    zeroed = [
        data[:start] + bytes(min(length, len(data) - start)) + data[start + length :]
        for start in range(len(data))
        for length in range(1, longest + 1)
    ]
    assert chance_of_no_op(data) == pytest.approx(zeroed.count(data) / len(zeroed))


def test_an_empty_file_is_left_as_it_is(tmp_path):
    path = tmp_path / "empty"
    for fault in FAULTS:
        path.write_bytes(b"")
        applied = apply(path, fault, rng())
        assert (applied.bytes_changed, applied.effective, path.read_bytes()) == (0, False, b"")


def test_bytes_that_were_cut_off_count_as_changed(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1001))
    assert apply(path, "truncate", rng()).bytes_changed == 501


def test_a_name_that_leads_to_another_file_is_refused(tmp_path):
    (tmp_path / "real").write_bytes(b"precious")
    (tmp_path / "symbolic").symlink_to("real")
    with pytest.raises(OSError):
        apply(tmp_path / "symbolic", "bitflip", rng())
    os.link(tmp_path / "real", tmp_path / "hard")
    with pytest.raises(InvalidInput, match="2 names"):
        apply(tmp_path / "hard", "bitflip", rng())
    assert (tmp_path / "real").read_bytes() == b"precious"


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_undone_after_the_block_even_if_that_fails(tmp_path, fault):
    path = tmp_path / "file"
    path.write_bytes(random.Random(1).randbytes(4000))
    before = contents(tmp_path)
    with pytest.raises(ZeroDivisionError), damaged(path, fault, rng()) as applied:
        assert (contents(tmp_path) != before) == applied.effective
        raise ZeroDivisionError
    assert contents(tmp_path) == before


def test_an_unknown_fault_or_target_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(InvalidInput, match="expected none, bitflip"):
        apply(tmp_path / "file", "bitflop", rng())
    with pytest.raises(InvalidInput, match="expected file, sidecar"):
        choose(tmp_path / "file", "everything", rng())


# -- what the guard notices -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    """A single file with its sidecar, and a committed group."""
    folder = tmp_path_factory.mktemp("checkpoints")
    state = payloads.network(1, 1)
    install(folder / "file.pt", lambda sink: torch_format.save(state, sink), "atomic_nodirsync")
    store = CheckpointStore(folder / "run", mode="atomic_nodirsync")
    parts = {"model": {"w": torch.arange(9.0)}, "rng": {"state": torch.zeros(5)}}
    return folder / "file.pt", Path(store.save(1, parts).path)


def zip_regions(path: Path) -> dict[str, range]:
    """Where in a torch file which kind of byte lies, by the zip format."""
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        entries, directory = archive.infolist(), archive.start_dir
    regions = {"central directory": range(directory, len(data) - 22)}
    regions["end record"] = range(len(data) - 22, len(data))
    for entry in entries:
        start = entry.header_offset
        name, extra = (int.from_bytes(data[start + i : start + i + 2], "little") for i in (26, 28))
        begin = start + 30 + name + extra
        kind = "pickle" if entry.filename.endswith("data.pkl") else "payload"
        if "/data" in entry.filename and entry.file_size:
            regions.setdefault("local header", range(start, start + 30 + name))
            regions.setdefault("padding", range(start + 30 + name, begin))
            regions.setdefault(kind, range(begin, begin + entry.file_size))
    return regions


def test_every_region_of_a_torch_file_is_told_apart(checkpoints):
    regions = zip_regions(checkpoints[0])
    assert all(len(region) for region in regions.values())
    assert set(regions) == {
        "central directory", "end record", "local header", "padding", "payload", "pickle",
    }  # fmt: skip


REGIONS = ("payload", "local header", "central directory", "end record", "padding", "pickle")


@pytest.mark.parametrize("region", REGIONS)
def test_a_bit_flip_in_any_region_of_a_torch_file_is_noticed(checkpoints, region):
    path = checkpoints[0]
    original = path.read_bytes()
    places = zip_regions(path)[region]
    try:
        for place in random.Random(region).sample(places, min(len(places), 25)):
            bit = place % 8
            path.write_bytes(
                original[:place] + bytes([original[place] ^ 1 << bit]) + original[place + 1 :]
            )
            verdict = verify(path)
            assert (verdict.status, verdict.layer, verdict.file) == ("INVALID", "sha256", path.name)
    finally:
        path.write_bytes(original)
    assert verify(path)


def test_a_bit_flip_anywhere_in_a_record_is_noticed_and_the_file_named(checkpoints):
    file, group = checkpoints
    for checkpoint, record, layers in (
        (file, Path(f"{file}{SUFFIX}"), {"manifest", "size", "sha256"}),
        (group, group / MANIFEST, {"commit", "manifest"}),
        (group, group / COMMIT, {"commit"}),
    ):
        original = record.read_bytes()
        meaning = json.loads(original)
        for place in range(len(original)):
            changed = bytearray(original)
            changed[place] ^= 1 << place % 8
            record.write_bytes(changed)
            verdict = verify(checkpoint)
            assert not verdict, (record.name, place)
            assert verdict.layer in layers and verdict.file and verdict.reason
        record.write_bytes(original)
        assert verify(checkpoint) and json.loads(original) == meaning


edits = st.one_of(
    st.tuples(st.just("set"), st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("insert"), st.floats(0, 1), st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("cut"), st.floats(0, 1, exclude_max=True), st.binary()),
    st.tuples(st.just("swap"), st.floats(0, 1), st.binary()),
)


def edited(data: bytes, edit: tuple[str, float, bytes]) -> bytes:
    kind, where, new = edit
    place = int(where * len(data))
    if kind == "set":
        return data[:place] + new + data[place + len(new) :]
    if kind == "insert":
        return data[:place] + new + data[place:]
    return data[:place] if kind == "cut" else data[place:] + data[:place]


@settings(max_examples=400)
@given(target=st.sampled_from(sorted(TARGETS)), pick=st.integers(0, 99), edit=edits)
def test_any_effective_change_of_any_file_of_a_checkpoint_is_noticed(
    checkpoints, target, pick, edit
):
    checkpoint = checkpoints[0] if target in ("file", "sidecar") else checkpoints[1]
    path = Path(choose(checkpoint, target, rng(pick)))
    before = path.read_bytes()
    after = edited(before, edit)
    effective = after != before
    path.write_bytes(after)
    try:
        assert not effective or not verify(checkpoint)
    finally:
        path.write_bytes(before)
    assert verify(checkpoint)


# -- the experiment -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> pandas.DataFrame:
    """One seed and three saves of both kinds, run in this process."""
    trials = corruption.plan(seed=7, seeds=1, saves=3)
    found = corruption.run_batch(trials, tmp_path_factory.mktemp("run"))
    return registry.validate(pandas.DataFrame(found), "corruption")


def test_every_effective_fault_is_detected_and_no_control_is(rows):
    assert len(rows) == 24 and rows["effective"].sum() > 12
    assert (rows["detected"] == rows["effective"]).all()
    assert not rows.loc[rows["fault"] == "none", ["detected", *LAYERS]].any(axis=None)


def test_the_guard_in_use_agrees_with_the_layers_together(rows):
    assert (rows["detected"] == rows[list(LAYERS)].any(axis=1)).all()
    first = rows[list(LAYERS)].idxmax(axis=1).where(rows["detected"], "")
    assert (rows["layer"] == first).all()


def test_recovery_finds_the_newest_intact_checkpoint_in_every_trial(rows):
    assert rows["rollback_ok"].all()
    before = rows["step"] - corruption.EPOCHS_BETWEEN_SAVES
    assert (rows["recovered_step"] == before.where(rows["effective"], rows["step"])).all()


def test_recovery_that_returns_another_state_is_not_ok(tmp_path, monkeypatch):
    """A load() that found the right step with the wrong bytes must not pass."""
    honest = corruption._Files.recover
    monkeypatch.setattr(corruption._Files, "recover", lambda self: (honest(self)[0], "other"))
    trials = corruption.plan(seed=7, seeds=1, saves=1, kinds=["file"], faults=["none", "bitflip"])
    assert [row["rollback_ok"] for row in corruption.run_batch(trials, tmp_path)] == [False, False]


def test_a_guard_that_accepts_everything_would_be_found_out(tmp_path, monkeypatch):
    from ckptlib import guard

    monkeypatch.setattr(guard, "verify", lambda path: guard.Verdict(guard.VALID))
    trials = corruption.plan(seed=7, seeds=1, saves=1, kinds=["group"], faults=["bitflip"])
    (row,) = corruption.run_batch(trials, tmp_path)
    assert row["effective"] and row["file_sha_mismatch"] and not row["detected"]


def test_no_trial_leaves_damage_behind(tmp_path):
    trials = corruption.plan(seed=8, seeds=1, saves=2)
    corruption.run_batch(trials, tmp_path)
    files = sorted((tmp_path / "file-8").glob("*.pt"))
    groups = [tmp_path / "group-8" / step_name(step) for step in (0, 3, 6)]
    assert len(files) == 3 and all(verify(path) for path in [*files, *groups])


def test_damage_comes_after_the_save_so_that_no_record_certifies_it(tmp_path):
    trials = corruption.plan(seed=8, seeds=1, saves=1, kinds=["group"], faults=["bitflip"])
    corruption.run_batch(trials, tmp_path)
    (entry, *_) = check_group(str(tmp_path / "group-8" / step_name(3))).manifest.entries
    state = payloads.group(8, 3)["model"]
    from ckptlib.digests import content_digest

    assert entry.content == content_digest(state)


def test_all_faults_get_the_same_seeds_and_checkpoints():
    trials = pandas.DataFrame(corruption.plan(seed=1, seeds=3, saves=5))
    arms = trials.groupby(["kind", "fault"])[["seed", "step"]].apply(
        lambda arm: sorted(arm.itertuples(index=False, name=None))
    )
    assert len(arms) == 8 and len(arms.iloc[0]) == 15
    assert all(points == arms.iloc[0] for points in arms)


def test_a_longer_list_of_faults_does_not_move_the_damage_of_the_others(tmp_path, rows):
    trials = corruption.plan(seed=7, seeds=1, saves=3, kinds=["file"], faults=["zerorange"])
    alone = pandas.DataFrame(corruption.run_batch(trials, tmp_path))
    among = rows[(rows["kind"] == "file") & (rows["fault"] == "zerorange")]
    assert list(alone["bytes_changed"]) == list(among["bytes_changed"])


def test_one_and_two_workers_give_equal_rows(tmp_path):
    trials = corruption.plan(seed=3, seeds=2, saves=1)
    tables = []
    for jobs in (1, 2):
        place = tmp_path / str(jobs)
        engine.run_grid(
            "corruption", trials, corruption.run_batch, results=place, scratch=place / "scratch",
            batch=corruption.BATCH, jobs=jobs,
        )  # fmt: skip
        tables.append((place / "corruption.csv").read_bytes())
        shutil.rmtree(place / "scratch", ignore_errors=True)
    assert tables[0] == tables[1] and tables[0].count(b"\n") == 17
