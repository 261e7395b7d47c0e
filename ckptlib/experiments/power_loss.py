"""What a write mode keeps when the power goes, on real file systems: recorded once, cut many times.

Two grids. The first records logs (:mod:`.power_recording`). The second takes the crash states of
each log, lets the kernel mount and so recover each, and has the oracle judge what is found there,
in processes that know of the saves only what the log says. Both need Linux, root, FUSE and loop
devices; what can't run is told by :func:`skipped`.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy

from ckptlib.crashes import mounts, oracle, power
from ckptlib.crashes.blocklog import FLUSH, WRITE, DeviceLog
from ckptlib.crashes.filesystems import MAIN, filesystem, support
from ckptlib.crashes.oracle import Ledger
from ckptlib.crashes.power import State
from ckptlib.errors import InvalidInput, explain
from ckptlib.experiments import outputs, registry
from ckptlib.experiments import power_judging as judging
from ckptlib.experiments import power_recording as recording
from ckptlib.experiments.power_recording import BARE_FILE, OMITTED, SINGLE_FILE
from ckptlib.write_modes import WriteMode

#: Arms of every file system: workload and protocol by mode.
ARMS = {
    "unsafe": (
        ("saves", "per_file"), ("prune", "per_file"), ("recovery", "per_file"),
        ("overwrite", SINGLE_FILE), ("numbered", SINGLE_FILE),
    ),
    "atomic_nodirsync": (
        ("saves", "per_file"), ("saves", "batched"), ("prune", "batched"),
        ("recovery", "batched"), ("overwrite", SINGLE_FILE), ("numbered", SINGLE_FILE),
    ),
    "atomic_dirsync": (
        ("saves", "per_file"), ("saves", "batched"), ("prune", "batched"),
        ("recovery", "per_file"), ("recovery", "batched"),
        ("overwrite", SINGLE_FILE), ("numbered", SINGLE_FILE),
    ),
}  # fmt: skip
#: Shown beside, never counted in: the paper's artifact, which leaves the outer directory out; and
#: one file as most jobs write it, with no record of its digest, so that whatever loads is taken.
LABELLED = {
    "unsafe": (("overwrite", BARE_FILE), ("numbered", BARE_FILE)),
    "atomic_nodirsync": (("overwrite", BARE_FILE), ("numbered", BARE_FILE)),
    "atomic_dirsync": (
        ("overwrite", BARE_FILE), ("numbered", BARE_FILE), ("saves", "artifact"),
    ),
}  # fmt: skip
NO_CUT, LYING = CONTROLS = "no cut", "lying device"
LIAR_STATES = 60
EXAMPLE = ("atomic_nodirsync", "batched", "saves")  # the log of each file system that is kept


# -- plans --------------------------------------------------------------------------------------


def plan(
    *,
    filesystems: str | Sequence[str],
    seed: int,
    seeds: int,
    states_per_log: int,
    dirsync_seeds: int,
    dirsync_states_per_log: int,
    variant_seeds: int,
    omitted_seeds: int,
) -> list[dict]:
    """The logs to record: one trial each.

    Parameters
    ----------
    filesystems : str or sequence of str
        Names in :data:`.filesystems.FILESYSTEMS`, as a list or with commas between.
    seed : int
        The first seed; the others follow it.
    seeds, states_per_log : int
        Of every arm on ext4, xfs and btrfs: independent logs, and crash states of each at most.
    dirsync_seeds, dirsync_states_per_log : int
        The same for atomic_dirsync, for which the claim is that nothing is lost.
    variant_seeds : int
        Logs of every arm on ext4 under other mount options.
    omitted_seeds : int
        Logs in which atomic_dirsync leaves one directory flush out, for each such directory.

    Raises
    ------
    InvalidInput
        A count is not a whole number, 1 or more, or a file system is unknown.
    """
    counts = dict(seeds=seeds, states_per_log=states_per_log, dirsync_seeds=dirsync_seeds,
                  dirsync_states_per_log=dirsync_states_per_log, variant_seeds=variant_seeds,
                  omitted_seeds=omitted_seeds)  # fmt: skip
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise InvalidInput(
                explain(f"unusable {name}", expected="a whole number, 1 or more", found=repr(value))
            )
    names = filesystems.split(",") if isinstance(filesystems, str) else filesystems
    trials = []
    for name in [filesystem(name.strip()).name for name in names]:
        for mode, arms in ARMS.items():
            strict = WriteMode(mode).flushes_directories
            times = dirsync_seeds if strict else seeds
            states = dirsync_states_per_log if strict else states_per_log
            if name not in MAIN:
                times, states = variant_seeds, states_per_log
            for own in range(seed, seed + times):
                trials += [_trial(name, mode, *arm, "", own, states) for arm in arms]
        if name in MAIN:
            trials += [
                _trial(name, mode, *arm, "", own, states_per_log)
                for own in range(seed, seed + seeds)
                for mode, arms in LABELLED.items()
                for arm in arms
            ]
            for own in range(seed, seed + omitted_seeds):
                trials += [
                    _trial(name, "atomic_dirsync", "saves", protocol, omitted, own, states_per_log)
                    for omitted in OMITTED
                    for protocol in ("per_file", "batched")
                    if (omitted, protocol) not in {("staging", "per_file"), ("step", "batched")}
                ]
    return trials


def _trial(name, mode, workload, protocol, omitted, seed, states) -> dict:
    words = [name, mode, workload, protocol, *([f"no-{omitted}"] if omitted else []), str(seed)]
    log = "-".join(words)
    return {
        "trial_id": log, "filesystem": name, "mode": mode, "protocol": protocol,
        "workload": workload, "omitted": omitted, "seed": seed, "log": log, "states": states,
    }  # fmt: skip


# -- recording ----------------------------------------------------------------------------------


def logs_folder(results: Path) -> Path:
    """Where the logs of a run lie."""
    return results / "power_logs"


def log_path(results: Path, log: str) -> Path:
    """Where one log lies."""
    return logs_folder(results) / f"{log}.plog"


def record(run, trials: list[dict]):
    """Record the logs that this machine can record; give ``power_logs``.

    A log cannot be made a second time with the same bytes. So logs that are gone or altered since
    they were recorded are all recorded anew, with everything that follows from them.
    """
    reasons = skip_reasons(trials)
    runnable = [trial for trial in trials if not reasons.get(trial["filesystem"])]
    if not runnable:
        return run.write("power_logs", registry.empty("power_logs"), skipped=reasons)
    folder = logs_folder(run.results)
    given = [{**trial, "folder": str(folder)} for trial in runnable]
    frame = run.grid("power_logs", given, record_batch, batch=None, skipped=reasons)
    if any(_sha256(log_path(run.results, row.log)) != row.sha256 for row in frame.itertuples()):
        outputs.discard(run.results, "power_logs")
        frame = run.grid("power_logs", given, record_batch, batch=None, skipped=reasons)
    return frame


def skip_reasons(trials: Iterable[dict]) -> dict[str, str]:
    """Of the file systems in a plan, those that can't run here, with the reason."""
    can = support()
    return {name: can[name] for name in dict.fromkeys(t["filesystem"] for t in trials) if can[name]}


def skipped(run) -> dict[str, str]:
    """File systems that a run has left out, with the reason and how to enable each."""
    return outputs.skipped(run.results, "power_logs")


def record_batch(trials: list[dict], scratch: Path) -> list[dict]:
    """Record logs, one after the other, each in a process with mounts of its own."""
    _warm()
    return [record_one(trial, scratch)[1] for trial in trials]


def record_one(trial: dict, scratch: Path) -> tuple[Path, dict]:
    """Record one log into ``trial["folder"]``; give its path and its row."""
    path = Path(trial["folder"]) / f"{trial['log']}.plog"
    sha256 = mounts.isolated(_record, trial, scratch, path)
    log = DeviceLog.load(path)
    kinds = [record.kind for record in log.records]
    windows = power.windows(log)
    row = {
        **{name: value for name, value in trial.items() if name not in ("folder", "states")},
        "sha256": sha256,
        "log_bytes": path.stat().st_size,
        "device_bytes": log.size,
        "writes": kinds.count(WRITE),
        "flushes": kinds.count(FLUSH),
        "operations": sum(1 for _ in log.marks("operation")),
        "saves": sum(1 for _ in log.marks(power.BEGIN)),
        "windows": len(windows),
        "largest_window": max(len(window.writes) for window in windows),
        "states_possible": f"{float(power.possible(log)):.3g}",
        "states_tried": len(judging.states_of(log)),
        "kernel": log.about["kernel"],
        "mkfs": log.about["make"],
        "mount_options": log.about["options"],
    }
    return path, {name: row[name] for name in registry.output("power_logs").columns}


def _record(trial: dict, scratch: Path, path: Path) -> str:
    if trial["workload"] != "recovery":
        return recording.record(trial, scratch, path)
    # the first power loss: a crash state of an ordinary run, most telling with a save in flight
    first = scratch / "first.plog"
    recording.record({**trial, "workload": "saves"}, scratch, first)
    crashed = scratch / "crashed.plog"
    with judging.judge(first, scratch) as judge:
        # one that the kernel refuses to mount is no start for a job that nobody looks after
        for state in _telling(judge.log, trial["seed"]):
            found = judge.judge(state, saves=False)
            if not found.mount_error:
                break
        ledger = judging.ledger_at(judge.log, state.cut)
        step = found.judged.recovered_step
        # what is found after the first loss is there, and must be found after the second
        ledger = Ledger(ledger.saves, [] if step is None else [step])
        judge.device.serve(**state.request)
        judge.device.keep(crashed, {"ledger": ledger.to_json()})
    return recording.record(trial, scratch, path, DeviceLog.load(crashed))


def _telling(log: DeviceLog, seed: int) -> list[State]:
    """Crash states in a random order, with something acknowledged and a save in flight if any."""
    states = power.plan(log, seed=seed)
    ledgers = [judging.ledger_at(log, state.cut) for state in states]
    telling = [
        state
        for state, ledger in zip(states, ledgers, strict=True)
        if ledger.acknowledged and ledger.in_flight is not None
    ]
    choice = telling or states
    return [choice[index] for index in numpy.random.default_rng(seed).permutation(len(choice))]


# -- replaying ----------------------------------------------------------------------------------


def replay(run, logs):
    """Try the crash states of recorded logs; give ``power_loss``.

    Parameters
    ----------
    logs : pandas.DataFrame
        What :func:`record` gave.
    """
    if not len(logs):
        return run.write("power_loss", registry.empty("power_loss"), skipped=skipped(run))
    trials = [
        {"trial_id": f"{row.log}-{number:05d}", "log": row.log, "sha256": row.sha256,
         "number": number, "folder": str(logs_folder(run.results))}
        for row in logs.itertuples()
        for number in range(row.states_tried)
    ]  # fmt: skip
    return run.grid("power_loss", trials, replay_batch, batch="log", skipped=skipped(run))


def replay_batch(trials: list[dict], scratch: Path) -> list[dict]:
    """Judge crash states of one log."""
    _warm()
    first = trials[0]
    path = Path(first["folder"]) / f"{first['log']}.plog"
    numbers = [trial["number"] for trial in trials]
    rows = mounts.isolated(judging.judge_log, path, scratch, numbers)
    return [{"trial_id": trial["trial_id"], **row} for trial, row in zip(trials, rows, strict=True)]


# -- controls, and examples to keep ---------------------------------------------------------------


def controls(run, logs, states: int = LIAR_STATES):
    """Two checks that the method can fail, and can pass; give ``power_controls``.

    On a device that ignores flushes even ``atomic_dirsync`` must lose acknowledged checkpoints, and
    where the power never goes nothing may be lost.
    """
    if not len(logs):
        return run.write("power_controls", registry.empty("power_controls"), skipped=skipped(run))
    strict = logs[(logs["mode"] == "atomic_dirsync") & (logs["omitted"] == "")]
    strict = strict[(strict["workload"] == "saves") & (strict["protocol"] == "batched")]
    trials = [
        {"trial_id": f"{row.log}-{control.replace(' ', '-')}", "control": control,
         "filesystem": row.filesystem, "log": row.log, "sha256": row.sha256, "states": states,
         "folder": str(logs_folder(run.results))}
        for row in strict.drop_duplicates("filesystem").itertuples()
        for control in CONTROLS
    ]  # fmt: skip
    return run.grid("power_controls", trials, control_batch, batch=None, skipped=skipped(run))


def control_batch(trials: list[dict], scratch: Path) -> list[dict]:
    """Judge the states of one control."""
    _warm()
    return [_control(trial, scratch) for trial in trials]


def _control(trial: dict, scratch: Path) -> dict:
    path = Path(trial["folder"]) / f"{trial['log']}.plog"
    rows = mounts.isolated(_judge_control, path, scratch, trial["control"], trial["states"])
    told = [row for row in rows if row["acknowledged_step"] is not None]
    lost = [row for row in told if row["outcome"] in oracle.LOST]
    counts = Counter(row["outcome"] for row in rows)
    row = {
        **trial,
        "states": len(rows),
        "acknowledged": len(told),
        "lost": len(lost),
        "outcomes": ", ".join(f"{counts[name]} {name}" for name in sorted(counts)),
    }
    return {name: row[name] for name in registry.output("power_controls").columns}


def _judge_control(path: Path, folder: Path, control: str, limit: int) -> list[dict]:
    with judging.judge(path, folder) as judge:
        log = judge.log
        if control == NO_CUT:
            states = [power.complete(log)]
        else:
            states = power.plan(log, seed=log.about["seed"], limit=limit, honest=False)
        return list(judge.rows(states))


def keep_examples(run, logs) -> list[Path]:
    """Copy one log of each file system to where it is kept for study; give the paths."""
    mode, protocol, workload = EXAMPLE
    chosen = logs[(logs["mode"] == mode) & (logs["protocol"] == protocol)]
    chosen = chosen[(chosen["workload"] == workload) & (chosen["omitted"] == "")]
    kept = []
    for row in chosen.drop_duplicates("filesystem").itertuples():
        target = run.results / "power_examples" / f"{row.filesystem}.plog"
        target.parent.mkdir(exist_ok=True)
        with outputs.replaced(target) as temporary:
            shutil.copyfile(log_path(run.results, row.log), temporary)
        kept.append(target)
    return kept


def _warm() -> None:
    """Import what every forked child would else import again."""
    import mfusepy  # noqa: F401
    import torch

    torch.set_num_threads(1)  # a forked child has no other threads to wait for


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
