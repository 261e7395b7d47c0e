"""Power is cut on real ext4, xfs and btrfs; each write mode keeps what is claimed of it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas
import pytest
import torch

from ckptlib.crashes import filesystems, mounts, oracle, power
from ckptlib.crashes.blocklog import MARK, CorruptLog, DeviceLog, Record
from ckptlib.crashes.filesystems import MAIN, filesystem
from ckptlib.errors import InvalidInput
from ckptlib.experiments import power_judging as judging
from ckptlib.experiments import power_loss, power_story, registry
from ckptlib.experiments.context import open_run

torch.set_num_threads(1)  # imported once, not in every forked child
COUNTS = dict(seed=7, seeds=1, states_per_log=40, dirsync_seeds=1, dirsync_states_per_log=40,
              variant_seeds=1, omitted_seeds=1)  # fmt: skip
every_filesystem = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs_power(name)) for name in MAIN]
)


def recorded(folder: Path, name: str, mode: str, workload: str, protocol: str, **other) -> Path:
    trial = {
        "trial_id": "t", "filesystem": name, "mode": mode, "protocol": protocol, "omitted": "",
        "workload": workload, "seed": 7, "log": f"{name}-{mode}-{workload}-{protocol}",
        "states": 40, "folder": str(folder), **other,
    }  # fmt: skip
    path, row = power_loss.record_one(trial, folder)
    assert set(row) == set(registry.output("power_logs").columns)
    return path


def judged(path: Path, folder: Path, *policies: str) -> pandas.DataFrame:
    """Rows of the states of a log: of those policies, or those that the log asks for."""
    rows = mounts.isolated(_judge, path, folder, policies)
    return pandas.DataFrame(rows).assign(trial_id=[f"{n:05d}" for n in range(len(rows))])


def _judge(path: Path, folder: Path, policies: tuple[str, ...]) -> list[dict]:
    with judging.judge(path, folder) as judge:
        if not policies:
            return list(judge.rows(judging.states_of(judge.log)))
        return list(judge.rows(s for s in power.plan(judge.log, seed=1) if s.policy in policies))


def lost(rows: pandas.DataFrame) -> int:
    told = rows[rows["acknowledged_step"].notna()]
    return int(told["outcome"].isin(oracle.LOST).sum())


# -- what the modes keep --------------------------------------------------------------------------


@every_filesystem
@pytest.mark.parametrize(
    ("workload", "protocol"), [("saves", "per_file"), ("prune", "batched"), ("recovery", "batched")]
)
def test_atomic_dirsync_loses_nothing_that_was_acknowledged(name, workload, protocol, tmp_path):
    rows = judged(recorded(tmp_path, name, "atomic_dirsync", workload, protocol), tmp_path)
    rows = rows[~rows["repaired"]]  # a torn superblock is the file system's, see below
    assert rows["acknowledged_step"].notna().any()
    assert lost(rows) == 0 and rows["expected"].all()
    assert set(rows["outcome"]) <= {"kept", "lost_unacknowledged"}
    assert rows["next_save_ok"].dropna().all()


@every_filesystem
def test_without_the_directory_flush_an_acknowledged_save_is_lost(name, tmp_path):
    path = recorded(tmp_path, name, "atomic_nodirsync", "saves", "batched")
    rows = judged(path, tmp_path, "none", "all")
    assert lost(rows) > 0
    assert set(rows["outcome"]) <= {*oracle.OUTCOMES[2:]}


@every_filesystem
def test_without_any_flush_acknowledged_saves_are_lost_and_nothing_damaged_is_accepted(
    name, tmp_path
):
    for workload, protocol in (("saves", "per_file"), ("overwrite", "single_file")):
        path = recorded(tmp_path, name, "unsafe", workload, protocol)
        rows = judged(path, tmp_path, "none", "all", "alone", "torn_4096")
        assert lost(rows) > 0
        assert not {"false_accept", "mixed"} & set(rows["outcome"])
        assert rows["damage"].ne("").sum() == lost(rows)


@every_filesystem
def test_leaving_out_the_flush_of_the_store_costs_what_it_was_for(name, tmp_path):
    path = recorded(tmp_path, name, "atomic_dirsync", "saves", "batched", omitted="store")
    rows = judged(path, tmp_path, "none", "all")
    assert lost(rows) > 0 and not rows["expected"].all()


@pytest.mark.needs_power
@pytest.mark.parametrize("name", [name for name in filesystems.FILESYSTEMS if name not in MAIN])
def test_ext4_under_other_mount_options_keeps_what_atomic_dirsync_acknowledged(name, tmp_path):
    rows = judged(recorded(tmp_path, name, "atomic_dirsync", "saves", "batched"), tmp_path)
    assert lost(rows[~rows["repaired"]]) == 0
    assert (
        filesystem(name).options in DeviceLog.load(next(tmp_path.glob("*.plog"))).about["options"]
    )


# -- controls -------------------------------------------------------------------------------------


@every_filesystem
def test_a_device_that_ignores_flushes_makes_atomic_dirsync_fail_and_no_cut_loses_nothing(
    name, tmp_path
):
    path = recorded(tmp_path, name, "atomic_dirsync", "saves", "batched")
    trial = {"trial_id": "t", "filesystem": name, "log": path.stem, "folder": str(tmp_path),
             "states": 40}  # fmt: skip
    liar, complete = power_loss.control_batch(
        [{**trial, "control": "lying device"}, {**trial, "control": "no cut"}], tmp_path
    )
    assert liar["acknowledged"] > 0 and liar["lost"] > 0
    assert complete == {**complete, "states": 1, "acknowledged": 1, "lost": 0, "outcomes": "1 kept"}


# -- what the file system itself needs of the device ----------------------------------------------


def torn_superblocks(folder: Path, path: Path, offset: int) -> pandas.DataFrame:
    """The states in which the superblock at ``offset`` is torn between 512-byte sectors."""
    rows = mounts.isolated(_judge_superblocks, path, folder, offset)
    return pandas.DataFrame(rows)


def _judge_superblocks(path: Path, folder: Path, offset: int) -> list[dict]:
    with judging.judge(path, folder) as judge:
        records = judge.log.records
        states = [
            state
            for state in power.plan(judge.log, seed=1)
            if state.policy == "torn_512"
            and records[state.torn].offset <= offset
            and offset < records[state.torn].offset + len(records[state.torn].data)
        ]
        return list(judge.rows(states))


@pytest.mark.needs_power("btrfs")
def test_btrfs_is_refused_if_its_superblock_is_torn_and_its_spare_one_is_older(tmp_path):
    """Found by the policy torn_512, here in its smallest form, one file that is installed: the
    primary superblock carries what fsync promised, the spare one what the last whole commit did. It
    takes a device that tears the 4 KiB that btrfs writes as one."""
    path = recorded(tmp_path, "btrfs", "atomic_dirsync", "numbered", "single_file")
    rows = torn_superblocks(tmp_path, path, 64 * 1024)
    refused = rows[rows["mount_error"] != ""]
    assert len(refused) > 0 and refused["repaired"].all()
    assert lost(refused) > 0
    assert lost(rows[rows["mount_error"] == ""]) == 0
    assert not {"mixed", "false_accept"} & set(rows["outcome"])


@pytest.mark.needs_power("ext4")
def test_ext4_is_refused_if_its_superblock_is_torn_and_complete_after_e2fsck(tmp_path):
    """Its superblock spans two 512-byte sectors; the spare one and the journal hold the rest."""
    path = recorded(tmp_path, "ext4", "atomic_dirsync", "recovery", "batched")
    rows = torn_superblocks(tmp_path, path, 1024)
    refused = rows[rows["mount_error"] != ""]
    assert len(refused) > 0 and refused["repaired"].all()
    assert lost(rows) == 0


# -- logs as files --------------------------------------------------------------------------------


@every_filesystem
def test_a_log_replays_from_its_file_in_a_fresh_process_to_the_same_table(name, tmp_path):
    path = recorded(tmp_path, name, "atomic_nodirsync", "saves", "batched")
    rows = judged(path, tmp_path)
    rows["trial_id"] = [f"{path.stem}-{number:05d}" for number in range(len(rows))]
    table = tmp_path / "power_loss.csv"
    registry.validate(rows, "power_loss").to_csv(table, index=False)
    command = [sys.executable, "-m", "ckptlib.replay", path, "--compare", table]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"equal to the {len(rows)} rows" in done.stdout
    altered = table.read_text().replace("lost_acknowledged", "kept").replace("kept", "mixed", 1)
    table.write_text(altered)
    assert subprocess.run(command, capture_output=True).returncode == 1


def test_a_log_that_says_nothing_of_checkpoints_is_refused(tmp_path):
    path = tmp_path / "other.plog"
    DeviceLog(2**20, {"filesystem": "ext4"}).save(path)
    with pytest.raises(CorruptLog, match=r"not the log of a checkpointing job.*mode"):
        judging.read(path)
    about = {"filesystem": "ext4", "mode": "unsafe", "protocol": "per_file", "workload": "saves",
             "omitted": "", "seed": 1, "log": "x", "states": 3,
             "ledger": oracle.Ledger().to_json()}  # fmt: skip
    DeviceLog(2**20, about, [], [Record(MARK, mark={"begin": 1})]).save(path)
    with pytest.raises(CorruptLog, match="the marks of its saves"):
        judging.read(path)
    DeviceLog(2**20, {**about, "filesystem": "zfs"}).save(path)
    with pytest.raises(CorruptLog, match="filesystem"):
        judging.read(path)


@pytest.mark.needs_power
def test_a_log_holds_no_path_of_the_machine_that_recorded_it(tmp_path):
    path = recorded(tmp_path, "ext4", "atomic_dirsync", "saves", "batched")
    log = DeviceLog.load(path)
    assert str(tmp_path) not in str(log.about)
    assert all(str(tmp_path) not in str(record.mark) for record in log.records)


# -- the grids ------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    return open_run(
        profile="smoke", results=str(tmp_path / "results"), figures=str(tmp_path / "figures"),
        scratch=str(tmp_path / "scratch"), notebook="06_power_loss", jobs=2,
    )  # fmt: skip


@pytest.mark.needs_power
def test_recording_replaying_and_telling_fit_together(run):
    plan = power_loss.plan(filesystems="ext4", **COUNTS | {"states_per_log": 10})
    plan = [trial for trial in plan if trial["mode"] != "atomic_dirsync"][:3]
    logs = power_loss.record(run, plan)
    rows = power_loss.replay(run, logs)
    assert Counter(rows["log"]) == dict(zip(logs["log"], logs["states_tried"], strict=True))
    assert power_loss.skipped(run) == {}
    again = power_loss.record(run, plan)
    assert list(again["sha256"]) == list(logs["sha256"])  # nothing is recorded twice
    bad = rows[rows["damage"] != ""].iloc[0]
    story = power_story.story(run, bad)
    assert story.cut == bad["cut"] and len(story.kept) == bad["kept_writes"]
    assert {"application", "device"} <= set(story.events["lane"])
    assert story.listing and story.before


@pytest.mark.needs_power
def test_logs_that_are_gone_are_recorded_anew(run):
    plan = power_loss.plan(filesystems="ext4", **COUNTS)[:1]
    logs = power_loss.record(run, plan)
    power_loss.log_path(run.results, logs["log"][0]).unlink()
    anew = power_loss.record(run, plan)
    path = power_loss.log_path(run.results, logs["log"][0])
    assert power_loss._sha256(path) == anew["sha256"][0]


def test_what_cannot_run_is_skipped_with_its_reason_and_never_reads_as_passed(run, monkeypatch):
    reasons = dict.fromkeys(filesystems.FILESYSTEMS, "no root: sudo make reproduce")
    monkeypatch.setattr(power_loss, "support", lambda: reasons)
    plan = power_loss.plan(filesystems="ext4,xfs", **COUNTS)
    logs = power_loss.record(run, plan)
    assert len(logs) == 0
    assert len(power_loss.replay(run, logs)) == len(power_loss.controls(run, logs)) == 0
    assert power_loss.skipped(run) == {name: reasons[name] for name in ("ext4", "xfs")}


def test_the_plan_has_ten_logs_and_a_thousand_states_for_every_main_arm_of_the_paper_profile():
    import yaml

    params = Path(__file__).parents[1] / "data" / "params" / "paper.yml"
    given = yaml.safe_load(params.read_text())
    plan = power_loss.plan(seed=given["common"]["seed"], **given["06_power_loss"])
    beside = {"artifact", "bare_file"}
    main = [t for t in plan if not t["omitted"] and t["protocol"] not in beside]
    for name in MAIN:
        for mode in power_loss.ARMS:
            logs = [t for t in main if (t["filesystem"], t["mode"]) == (name, mode)]
            assert len({t["log"] for t in logs}) >= 10
            assert sum(t["states"] for t in logs) >= 1000


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"omitted_seeds": True}, {"states_per_log": 1.5}])
def test_unusable_counts_are_refused(wrong):
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        power_loss.plan(filesystems="ext4", **COUNTS | wrong)


def test_an_unknown_file_system_is_refused_with_the_known_ones():
    with pytest.raises(InvalidInput, match=r"ext4, .*btrfs"):
        power_loss.plan(filesystems="ext4,zfs", **COUNTS)
