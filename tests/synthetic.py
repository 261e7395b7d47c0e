"""Trial tables made from formulas, in the registry's shape, for tests; they hold no measurement.

`world("paper")` obeys what the paper claims, `world("contrary")` contradicts every claim that can
be contradicted.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from ckptlib.experiments import registry

MODES = ("unsafe", "atomic_nodirsync", "atomic_dirsync")
ARMS = (("unsafe", "per_file"), *((m, p) for p in ("per_file", "batched") for m in MODES[1:]))
PACE = {"per_file": 1, "batched": 0.7, "single_file": 0.3}
FILE_ARMS = tuple((mode, "single_file") for mode in MODES)
CURVES = {  # p0, p50, p90, p99, p100 of one save, in seconds
    "unsafe": (0.0020, 0.002473, 0.003241, 0.003349, 0.0034),
    "atomic_nodirsync": (0.0030, 0.003870, 0.005317, 0.006978, 0.0071),
    "atomic_dirsync": (0.0035, 0.004555, 0.018670, 0.022456, 0.0230),
}
SLOW = {  # dirsync is the fastest, and everything takes seconds
    "unsafe": (8.0, 9.0, 9.2, 60.0, 80.0),
    "atomic_nodirsync": (3.0, 4.0, 4.5, 9.0, 9.5),
    "atomic_dirsync": (1.0, 2.0, 2.1, 2.2, 2.3),
}
POINTS = ("after_model", "before_manifest", "manifest_partial", "before_commit")
REASON = dict(
    zip(
        (*POINTS, "mid_write"),
        ("size mismatch", "missing COMMIT", "manifest error", "missing part", "not installed"),
        strict=True,
    )
)


def world(kind: str = "paper", *, runs: int = 40, saves: int = 40, seeds: int = 10) -> dict:
    """All tables that the claims and figures read: name -> DataFrame in canonical form."""
    good = kind == "paper"
    tables = {
        "latency": latency(good, runs, saves),
        "latency_process": process(good),
        "crash": crash(good, seeds, saves),
        "corruption": corruption(good, seeds, saves),
        "training": training(),
        "timeline": timeline(),
        "power_loss": power_loss(good, min(seeds, 3)),
        "crash_operations": crash_operations(good),
        "errors": operation_errors(good),
    }
    return {name: canonical(frame, name) for name, frame in tables.items()}


def canonical(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """The frame in the registry's shape; columns that no analysis reads stay empty."""
    columns = registry.output(name).columns
    return registry.validate(frame.reindex(columns=list(columns)), name)


def _number(rows: list[dict]) -> pd.DataFrame:
    return pd.DataFrame([{"trial_id": f"{i:06d}"} | row for i, row in enumerate(rows)])


def latency(good=True, runs=40, saves=40) -> pd.DataFrame:
    curves, primitive = (CURVES, "fsync") if good else (SLOW, "F_FULLFSYNC")
    rng = np.random.default_rng(7)
    rows = []
    for mode, protocol in ARMS + FILE_ARMS:
        times = _times(rng, curves[mode], runs, saves) * PACE[protocol]
        rows += [
            {
                "mode": mode, "protocol": protocol, "seed": run, "step": step + 1, "block": run,
                "payload_bytes": 200_000, "latency_s": times[run, step],
                "flush_calls": 0 if mode == "unsafe" else 5,
                "flush_primitive": "none" if mode == "unsafe" else primitive,
                "filesystem": "ext4",
            }
            for run in range(runs)
            for step in range(saves)
        ]  # fmt: skip
    return _number(rows)


def _times(rng, curve, runs, saves) -> np.ndarray:
    """Times (runs, saves) in which every run has its own pace and the percentiles are exact."""
    knots = (0, 50, 90, 99, 100)
    times = np.interp(rng.uniform(0, 100, (runs, saves)), knots, curve)
    times *= np.exp(rng.normal(0, 0.06, (runs, 1)))
    return np.interp(times, np.percentile(times, knots), curve)


def process(good=True, runs=30) -> pd.DataFrame:
    rng = np.random.default_rng(8)
    rows = []
    for run in range(runs):
        for mode in MODES:
            pace = 1.005 + 0.05 * (-1) ** run + 0.01 * rng.uniform()  # median about 1
            each = CURVES[mode][1] * pace if good else 90 / (1 + MODES.index(mode)) * pace
            rows.append({
                "mode": mode, "seed": run, "run": run, "saves": 40, "total_s": each * 40,
                "per_checkpoint_s": each, "import_s": each * 20,
            })  # fmt: skip
    return _number(rows)


def crash(good=True, seeds=10, saves=40) -> pd.DataFrame:
    rows = []
    for seed in range(seeds):
        for step in range(1, saves + 1):
            cells = [("artifact", "atomic_dirsync", "artifact", "none")]
            for point in POINTS if step == saves else POINTS[:1]:
                cells.append(("artifact", "unsafe", "artifact", point))
            if step <= 10:
                points = ("none", *POINTS, "before_acknowledge")
                cells += [("sigkill", *arm, point) for arm in ARMS for point in points]
                points = ("none", "mid_write", "before_acknowledge")
                cells += [("sigkill", *arm, point) for arm in FILE_ARMS for point in points]
            rows += [_crash(*cell, seed, step, good) for cell in cells]
    return _number(rows)


def _crash(method, mode, protocol, point, seed, step, good) -> dict:
    whole = point in ("none", "before_acknowledge")
    valid, outcome = whole, "kept" if whole else "lost_unacknowledged"
    reason = "" if whole else REASON[point]
    if mode == "unsafe" and point == "mid_write":
        outcome = "unrecoverable"  # what unsafe does not promise
    if not good:
        valid = not whole and (method == "sigkill" or step % 3 > 0)
        outcome = ("mixed", "unrecoverable")[step % 2]
        reason = "" if valid else "manifest error"
    return {
        "mode": mode, "protocol": protocol, "method": method, "crash_point": point, "seed": seed,
        "step": step, "in_flight_step": step, "acknowledged_step": step - 1 or pd.NA,
        "recovered_step": step if valid else step - 1 or pd.NA, "group_valid": valid,
        "killed": method == "sigkill" and point != "none", "outcome": outcome,
        "rule": "" if good else "1", "expected": good, "reason": reason,
    }  # fmt: skip


# Of 400 trials: (load error, digest mismatch, file hash, detected, effective), from Table 4.
COUNTS = {
    "none": (0, 0, 0, 0, 0),
    "bitflip": (7, 387, 400, 400, 400),
    "zerorange": (29, 370, 399, 399, 399),
    "truncate": (400, 0, 400, 400, 400),
}


def corruption(good=True, seeds=10, saves=40) -> pd.DataFrame:
    rows = []
    total = seeds * saves
    for kind, targets in (("file", ("model.pt",)), ("group", ("model.pt", "optimizer.pt"))):
        for fault, counts in COUNTS.items():
            for i in range(total):
                place = int(i * 400 / total)
                load, digest, sha, found, real = (place < count for count in counts)
                digest = counts[1] and place >= counts[0] and place < counts[0] + counts[1]
                if not good:
                    load, digest, sha, found = (i % 2 == 0,) * 4
                rows.append({
                    "kind": kind, "target": targets[i % len(targets)], "fault": fault,
                    "seed": i // saves, "step": i % saves + 1, "bytes_changed": int(real),
                    "effective": real, "detected": found, "layer": "sha256" if found else "",
                    "load_error": load, "schema_mismatch": False, "digest_mismatch": bool(digest),
                    "file_sha_mismatch": sha, "nonfinite": False,
                    "acknowledged_step": i % saves + 1, "recovered_step": i % saves or pd.NA,
                    "rollback_ok": good,
                })  # fmt: skip
    return _number(rows)


def training() -> pd.DataFrame:
    rng = np.random.default_rng(9)
    rows = []
    for seed in range(3):
        for mode in ("", *MODES):
            for arm in ("uninterrupted", "killed") if mode else ("no_checkpoint",):
                train = 2.0 + rng.uniform(0, 0.1)
                save = (0.0, 0.02, 0.05, 0.06)[("", *MODES).index(mode)] * rng.uniform(0.9, 1.1)
                rows.append({
                    "mode": mode, "arm": arm, "seed": seed, "epochs": 30,
                    "saves": 10 if mode else 0, "final_state_digest": f"{seed:064x}",
                    "test_accuracy": 0.95 + seed / 100,
                    "killed_after_step": 15 if arm == "killed" else pd.NA,
                    "recovered_step": 15 if arm == "killed" else pd.NA,
                    "bit_identical": True if arm == "killed" else pd.NA,
                    "train_s": train + save, "save_s": save, "share": save / (train + save),
                })  # fmt: skip
    return _number(rows)


def timeline() -> pd.DataFrame:
    rows = []
    written = 0

    def add(t, kind, name, value, unit, step, mode):
        rows.append([t, kind, name, value, unit, step, mode])

    for tick in range(100):
        t, mode = tick / 20, MODES[tick // 34]
        if tick % 10 == 5:
            step = tick // 10 % 3 + 1
            add(t, "event", "checkpoint", 0.02, "s", step, mode)
            calls = ("mkdir", "create", "write", "flush", "replace", "flush_dir")
            for i, call in enumerate(calls[:3] if mode == "unsafe" else calls):
                add(t + i * 0.004, "operation", call, 0.003, "s", step, mode)
            written += 200_000
        if tick in (33, 67, 99):
            add(t, "event", "write_back", 0.04, "s", pd.NA, "")
        for name, value in (("disk_write_bytes", 2 * written), ("process_write_bytes", written)):
            add(t, "sample", name, value, "B", pd.NA, mode)
            add(t, "sample", name, value / 20, "B/s", pd.NA, mode)
    columns = ["t_s", "kind", "name", "value", "unit", "step", "mode"]
    return pd.DataFrame(rows, columns=columns)


FILESYSTEMS = ("ext4", "ext4_writeback", "ext4_journal", "ext4_noauto_da_alloc", "xfs", "btrfs")
GROUPS = (
    ("per_file", "saves"),
    ("batched", "saves"),
    ("batched", "prune"),
    ("batched", "recovery"),
)
FILES = tuple(("single_file", workload) for workload in ("overwrite", "numbered"))
BESIDE = (("artifact", "saves"), ("bare_file", "overwrite"), ("bare_file", "numbered"))
LEFT_OUT = (
    *(("per_file", omitted) for omitted in ("parents", "store", "step")),
    *(("batched", omitted) for omitted in ("parents", "store", "staging")),
)
POLICIES = ("none", "all", "prefix", "missing", "alone", "subset", "torn_4096", "torn_512")


def power_loss(good=True, seeds=3, states=24) -> pd.DataFrame:
    """States of logs: unsafe loses nearly always, atomic_nodirsync about half, dirsync never."""
    rows = []
    for name in FILESYSTEMS:
        arms = [(mode, *arm, "") for mode in MODES for arm in GROUPS + FILES]
        arms = [a for a in arms if a[:2] != ("unsafe", "batched")]
        if "_" not in name:
            arms += [("atomic_dirsync", *arm, "") for arm in BESIDE]
            arms += [("atomic_dirsync", p, "saves", omitted) for p, omitted in LEFT_OUT]
        for seed in range(seeds):
            for arm in arms:
                rows += [_power(name, *arm, seed, number, good) for number in range(states)]
    return _number(rows)


def _power(filesystem, mode, protocol, workload, omitted, seed, number, good) -> dict:
    lost = {"unsafe": number % 12 > 0, "atomic_nodirsync": (number // 2 + seed) % 2 == 0}
    lost = lost.get(mode, (protocol, omitted) in {("batched", "store"), ("per_file", "step")})
    lost = lost if good else mode != "atomic_nodirsync"
    refused = POLICIES[number % 8] == "torn_512" and number // 8 == seed and filesystem == "btrfs"
    told = number >= 4  # before that, nothing has been acknowledged
    outcome, damage = "kept" if told else "lost_unacknowledged", ""
    if told and (lost or refused):
        outcome = ("lost_acknowledged", "unrecoverable")[number % 2]
        kinds = ("absent directory", "missing name", "torn content")
        if protocol in ("single_file", "bare_file"):
            kinds = ("missing name", "zero length", "stale content")
        damage = kinds[number % 3]
    if not good and mode != "atomic_nodirsync" and number % 8 == 7:
        outcome, damage = ("mixed", "false_accept")[number // 8 % 2], ""
    log = "-".join([filesystem, mode, protocol, workload, omitted, str(seed)])
    return {
        "filesystem": filesystem, "mode": mode, "protocol": protocol, "workload": workload,
        "omitted": omitted, "seed": seed, "log": log, "policy": POLICIES[number % 8],
        "cut": 100 + number, "window": number // 4, "tail": number % 5,
        "kept_writes": min(number % 8, number % 5), "exhaustive": number % 3 == 0,
        "acknowledged_step": 2 if told else pd.NA, "in_flight_step": 3,
        "recovered_step": pd.NA if outcome == "unrecoverable" else 1 if damage else 2,
        "outcome": outcome, "rule": "", "expected": good, "damage": damage,
        "mount_error": "EINVAL" if refused else "", "repaired": refused,
        "next_save_ok": True if number % 8 == 0 else pd.NA,
    }  # fmt: skip


def story_events() -> pd.DataFrame:
    """Records of a save whose rename was not flushed: the power goes before record 9."""
    rows = [
        (0, "application", "mark", "save of step 2 begins", 0),
        (1, "application", "write", "write runs/job/(temporary)/model.pt", 17961),
        (2, "application", "flush", "flush runs/job/(temporary)/model.pt", 17961),
        (3, "device", "write", "write 20480 bytes at block 7", 20480),
        (4, "device", "flush", "flush", 0),
        (5, "application", "rename", "rename runs/job/(temporary) to runs/job/step-2", 0),
        (6, "device", "write", "write 4096 bytes at block 9", 4096),
        (7, "device", "write", "write 8192 bytes at block 11", 8192),
        (8, "application", "mark", "step 2 is acknowledged", 0),
        (9, "device", "flush", "flush", 0),
        (10, "application", "mark", "save of step 3 begins", 0),
    ]
    return pd.DataFrame(rows, columns=["index", "lane", "kind", "label", "size"])


FLOWS = ("first save", "later save", "recovery", "overwrite")
KILLED = ("stat", "create", "write", "flush", "close", "replace", "flush_dir", "read")
_RIGHT = {"EINTR": "absorbed", "short write": "absorbed", "lying flush": "retried"}


def crash_operations(good=True, every=1) -> pd.DataFrame:
    """Kills at all places of a few flows: before the commit the old one is found, then the new."""
    rows = []
    for flow in FLOWS:
        single = flow == "overwrite"
        protocols = ("single_file",) if single else ("per_file", "batched")
        arms = [(m, p) for m in MODES for p in protocols if (m, p) != ("unsafe", "batched")]
        for mode, protocol in arms:
            places = 24 + 3 * len(mode) % 8
            for place in range(0, places, every):
                late = place > places * 2 // 3
                torn = single and mode == "unsafe" and 4 < place < 20
                outcome = "unrecoverable" if torn else "kept" if late else "lost_unacknowledged"
                fine = good or place % 9 != 4
                if not fine:
                    outcome = ("false_accept", "mixed")[place % 2]
                rows.append({
                    "flow": flow, "mode": mode, "protocol": protocol, "method": "sigkill",
                    "crash_point": f"before {KILLED[place % 8]} model.pt", "seed": 1,
                    "place": place, "places": places, "operation_index": place // 2,
                    "operation": KILLED[place % 8], "name": "model.pt",
                    "position": ("before", "after")[place % 2], "prefix": 0, "errno": "", "step": 3,
                    "in_flight_step": pd.NA if late else 3, "acknowledged_step": 2,
                    "recovered_step": 3 if late else 2, "group_valid": late, "killed": True,
                    "outcome": outcome, "rule": "" if fine else "3 no false accept",
                    "expected": fine, "reason": "" if late else "missing COMMIT",
                    "next_save_ok": fine, "leftovers": 0 if fine else 1,
                })  # fmt: skip
    return _number(rows)


def operation_errors(good=True) -> pd.DataFrame:
    """Faults at the operations of a save: absorbed, retried or refused, as declared."""
    rows = []
    protocols = ("per_file", "batched")
    arms = [(m, p) for m in MODES for p in protocols if (m, p) != ("unsafe", "batched")]
    for mode, protocol in arms:
        for number, call in enumerate(KILLED):
            for fault in ("EIO", "EINTR", "short write", "lying flush"):
                if (fault == "short write") != (call == "write") and fault == "short write":
                    continue
                if fault == "lying flush" and not call.startswith("flush"):
                    continue
                result = _RIGHT.get(fault, "refused")
                fine = good or number % 3
                if not fine:
                    result = "an error that is not typed"
                rows.append({
                    "flow": "later save", "mode": mode, "protocol": protocol, "seed": 1,
                    "operation_index": number, "operation": call, "name": "model.pt",
                    "fault": fault, "errno": fault if fault.startswith("E") else "",
                    "moment": "before the commit", "right": result if fine else "refused",
                    "result": result, "as_declared": bool(fine), "error": "WriteFailed",
                    "acknowledged_step": 2, "recovered_step": 2, "outcome": "lost_unacknowledged",
                    "rule": "", "expected": True, "predecessor_lost": not fine, "silent": not fine,
                    "next_save_ok": bool(fine), "leftovers": 0 if fine else 2,
                })  # fmt: skip
    return _number(rows)
