"""Every output of the suite with its columns; no file may be produced that this page does not name.

``stable`` columns are the same byte for byte in every run on one machine with the same seeds;
``recorded`` columns are the same for the same recorded device log, which no second run can make
again; ``timing`` columns hold measured times and what follows from them; ``host`` columns describe
the machine. A frame is held to its entry by :func:`validate`, and written and read by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptlib.errors import InvalidInput, explain

KINDS = ("stable", "recorded", "timing", "host")
#: Column types, as pandas extension types: a missing whole number must not turn into a float.
DTYPES = {"text": "str", "int": "Int64", "float": "float64", "bool": "boolean"}


@dataclass(frozen=True)
class Column:
    """What one column means: kind (see above), unit, documentation, and type."""

    kind: str
    unit: str
    doc: str
    dtype: str = "text"


@dataclass(frozen=True)
class Output:
    """One csv of ``data/results/<profile>``: who makes it, its columns in order, and its key."""

    name: str
    notebook: str
    module: str
    columns: dict[str, Column] = field(repr=False)
    key: tuple[str, ...] = ("trial_id",)

    def stable(self) -> list[str]:
        """Columns that two runs must agree on, byte for byte."""
        return [name for name, column in self.columns.items() if column.kind == "stable"]


def _text(doc: str, kind: str = "stable") -> Column:
    return Column(kind, "", doc, "text")


def _int(doc: str, unit: str = "", kind: str = "stable") -> Column:
    return Column(kind, unit, doc, "int")


def _bool(doc: str, kind: str = "stable") -> Column:
    return Column(kind, "", doc, "bool")


def _time(doc: str, unit: str = "s") -> Column:
    return Column("timing", unit, doc, "float")


_TRIAL = {"trial_id": _text("the trial, zero-padded so that text order is trial order")}
_MODE = {"mode": _text("write mode: unsafe, atomic_nodirsync or atomic_dirsync")}
_SEED = {"seed": _int("seed of the run that the trial belongs to")}
_STEP = {"step": _int("training step of the checkpoint concerned")}
_RECOVERY = {
    "acknowledged_step": _int("newest step whose save() had returned; empty if none had"),
    "recovered_step": _int("step that load() returned; empty if nothing could be loaded"),
}

_POWER = {
    "filesystem": _text("ext4, xfs, btrfs, or ext4 under other mount options"),
    **_MODE,
    "protocol": _text("per_file, batched, single_file (install); artifact and bare_file beside"),
    "workload": _text("saves, prune, overwrite, numbered or recovery"),
    "omitted": _text("directory flush that was left out on purpose; else empty"),
    **_SEED,
    "log": _text("name of the recorded log"),
}

OUTPUTS: dict[str, Output] = {
    output.name: output
    for output in (
        Output(
            "training",
            "01_training",
            "ckptlib.experiments.training",
            {
                **_TRIAL,
                "mode": _text("write mode; empty in the arm without checkpoints"),
                "arm": _text("no_checkpoint, uninterrupted, or killed and recovered"),
                **_SEED,
                "epochs": _int("epochs trained in the end"),
                "saves": _int("checkpoints in the complete run"),
                "final_state_digest": _text("content digest of the complete final state"),
                "test_accuracy": Column("stable", "", "accuracy on the held-out digits", "float"),
                "kill_point": _text("inside a save or between saves; killed only"),
                "killed_at_step": _int(
                    "step that training had reached at the SIGKILL; killed only"
                ),
                "killed_after_step": _int("newest acknowledged step at the SIGKILL; killed only"),
                "recovered_step": _int("step that the second process continued from; killed only"),
                "bit_identical": _bool("final digest equals the uninterrupted run's; killed only"),
                "train_s": _time("time in training, saves included"),
                "save_s": _time("time in saves"),
                "share": _time("save_s / train_s", ""),
            },
        ),
        Output(
            "training_curve",
            "01_training",
            "ckptlib.experiments.training",
            {
                **_TRIAL,
                "process": _int("1; or 2 for the process that recovered and went on"),
                "step": _int("optimizer step, counted from 1"),
                "loss": Column("stable", "nat", "cross-entropy of the step's batch", "float"),
                "arm": _text("as in training"),
                "mode": _text("as in training"),
                **_SEED,
            },
            key=("trial_id", "process", "step"),
        ),
        Output(
            "latency",
            "02_latency",
            "ckptlib.experiments.latency",
            {
                **_TRIAL,
                **_MODE,
                "protocol": _text("per_file, batched, or single_file (install)"),
                **_SEED,
                **_STEP,
                "block": _int("random block in which the modes were interleaved"),
                "payload_bytes": _int("bytes of the saved parts", "B"),
                "latency_s": _time("time of the save() call"),
                "flush_calls": _int("flushes that the save asked for, files and directories"),
                "flush_primitive": _text("system call that did the flushing", "host"),
                "filesystem": _text("file system type of the scratch folder", "host"),
            },
        ),
        Output(
            "latency_process",
            "02_latency",
            "ckptlib.experiments.latency",
            {
                **_TRIAL,
                **_MODE,
                **_SEED,
                "run": _int("number of the run within its mode"),
                "saves": _int("checkpoints that the process saved"),
                "total_s": _time("whole life of the process"),
                "per_checkpoint_s": _time("total_s / saves, as the paper computes it"),
                "import_s": _time("part of total_s before the first save: start and imports"),
            },
        ),
        Output(
            "crash",
            "03_crash",
            "ckptlib.experiments.crash",
            {
                **_TRIAL,
                **_MODE,
                "protocol": _text("per_file, batched, artifact, or single_file (install)"),
                "method": _text("artifact: the paper's injection; sigkill: a child really killed"),
                "crash_point": _text("where in the save it struck; none in the control"),
                **_SEED,
                **_STEP,
                "in_flight_step": _int(
                    "step being saved when it struck, if one was. In the paper's after_model "
                    "it is acknowledged too, since that save returns"
                ),
                **_RECOVERY,
                "group_valid": _bool("whether the guard accepts the group in flight"),
                "killed": _bool("whether a process was really killed"),
                "outcome": _text("class of the recovery, see the oracle"),
                "rule": _text("first oracle rule broken, or empty"),
                "expected": _bool("whether the mode's promise allows this outcome"),
                "reason": _text(
                    "why the guard refused the group in flight; empty if valid. For a single file, "
                    "not installed: the old file still stands"
                ),
                "next_save_ok": _bool("whether the next save after recovery worked and was found"),
                "leftovers": _int("unrecognised or temporary names left after that save"),
            },
        ),
        Output(
            "crash_operations",
            "03_crash",
            "ckptlib.experiments.crash_operations",
            {
                **_TRIAL,
                "flow": _text("what was cut short: a save, prune, scrub, recovery or install"),
                **_MODE,
                "protocol": _text("per_file, batched, or single_file (install)"),
                "method": _text("sigkill: a child really killed"),
                "crash_point": _text("position, operation and name together"),
                **_SEED,
                "place": _int("number of the place to die within the flow"),
                "places": _int("places that the flow has"),
                "operation_index": _int("number of the operation within the flow"),
                "operation": _text("file operation that the kill is about, as the vfs has it"),
                "name": _text("file or directory of the operation, without its folder"),
                "position": _text("before, during (a write) or after the operation"),
                "prefix": _int("bytes of the write that were done; during only", "B"),
                "errno": _text("empty: the operation did not fail, the process was killed"),
                **_STEP,
                "in_flight_step": _int("step being saved when it struck; empty if acknowledged"),
                **_RECOVERY,
                "group_valid": _bool("whether the guard accepts the checkpoint of that step"),
                "killed": _bool("whether a process was really killed"),
                "outcome": _text("class of the recovery, see the oracle"),
                "rule": _text("first oracle rule broken, or empty"),
                "expected": _bool("whether the mode's promise allows this outcome"),
                "reason": _text("why the guard refused that checkpoint; empty if valid"),
                "next_save_ok": _bool("whether the next save after recovery worked and was found"),
                "leftovers": _int("unrecognised or temporary names left after that save"),
            },
        ),
        Output(
            "errors",
            "03_crash",
            "ckptlib.experiments.failing_operations",
            {
                **_TRIAL,
                "flow": _text("as in crash_operations"),
                **_MODE,
                "protocol": _text("per_file, batched, or single_file (install)"),
                **_SEED,
                "operation_index": _int("number of the operation within the flow"),
                "operation": _text("file operation that failed, as the vfs has it"),
                "name": _text("file or directory of the operation, without its folder"),
                "fault": _text("what befell it: an errno's name, or see ckptlib.faults.errors"),
                "errno": _text("the errno's name, if the fault is one"),
                "moment": _text("before, at or after the commit of the flow"),
                "right": _text("what was declared as right beforehand"),
                "result": _text("what came of it"),
                "as_declared": _bool("whether it is among the right ones"),
                "error": _text("class of the error that the caller got; empty if none"),
                **_RECOVERY,
                "outcome": _text("class of the recovery, see the oracle"),
                "rule": _text("first oracle rule broken, or empty"),
                "expected": _bool("whether the mode's promise allows this outcome"),
                "predecessor_lost": _bool("whether what had been acknowledged is gone"),
                "silent": _bool("whether the caller was told success, and it was none"),
                "next_save_ok": _bool("whether the next save worked and was found"),
                "leftovers": _int("unrecognised or temporary names left after that save"),
            },
        ),
        Output(
            "corruption",
            "04_corruption",
            "ckptlib.experiments.corruption",
            {
                **_TRIAL,
                "kind": _text("file: single-file checkpoint; group: checkpoint of several files"),
                "target": _text("file that was damaged"),
                "fault": _text("none, bitflip, zerorange or truncate"),
                **_SEED,
                **_STEP,
                "bytes_changed": _int("bytes that differ from before the fault", "B"),
                "effective": _bool("whether a checker must notice: bytes with meaning changed"),
                "detected": _bool("whether any layer objected"),
                "layer": _text("first layer that objected; empty if none did"),
                "load_error": _bool("layer 1: the file does not load"),
                "schema_mismatch": _bool("layer 2: other names, types or shapes"),
                "digest_mismatch": _bool("layer 3: other tensor contents"),
                "file_sha_mismatch": _bool("layer 4: another file hash"),
                "nonfinite": _bool("layer 5: NaN or Inf"),
                **_RECOVERY,
                "rollback_ok": _bool("load() returned the newest intact checkpoint"),
            },
        ),
        Output(
            "timeline",
            "05_timeline",
            "ckptlib.experiments.timeline",
            {
                "t_s": _time("time since the start of the run"),
                "kind": _text(
                    "sample: I/O counter; operation: of the vfs; event: of training", "timing"
                ),
                "name": _text("counter, operation or event", "timing"),
                "value": _time("counter reading, duration or size", "as named"),
                "unit": _text("unit of value", "timing"),
                "step": _int("training step; empty for samples", kind="timing"),
                "mode": _text("write mode in force", "timing"),
            },
            key=(),
        ),
        Output(
            "power_logs",
            "06_power_loss",
            "ckptlib.experiments.power_loss",
            {
                **_TRIAL,
                **_POWER,
                "sha256": _text("of the log file", "recorded"),
                "log_bytes": _int("size of the log file", "B", "recorded"),
                "device_bytes": _int("size of the recorded device", "B"),
                "writes": _int("writes that the device completed", kind="recorded"),
                "flushes": _int("flushes that it completed", kind="recorded"),
                "operations": _int("changing file operations of the library", kind="recorded"),
                "saves": _int("saves begun", kind="recorded"),
                "windows": _int("intervals between flushes", kind="recorded"),
                "largest_window": _int("writes in the fullest window", kind="recorded"),
                "states_possible": _text(
                    "sum of 2**n over the windows that matter; tears come on top", "recorded"
                ),
                "states_tried": _int("crash states of this log in power_loss", kind="recorded"),
                "kernel": _text("release of the kernel that ran the file system", "host"),
                "mkfs": _text("how the file system was made", "host"),
                "mount_options": _text("how it was mounted, beside the defaults"),
            },
        ),
        Output(
            "power_loss",
            "06_power_loss",
            "ckptlib.experiments.power_loss",
            {
                **_TRIAL,
                **_POWER,
                "policy": _text(
                    "what of the tail reached the medium, see crashes.power.POLICIES", "recorded"
                ),
                "cut": _int("record of the log before which the power goes", kind="recorded"),
                "window": _int("which interval between two flushes", kind="recorded"),
                "tail": _int("writes of that window up to the cut", kind="recorded"),
                "kept_writes": _int(
                    "writes of the tail that reached the medium, if only in part", kind="recorded"
                ),
                "exhaustive": _bool("every subset of this window's writes was tried", "recorded"),
                "acknowledged_step": _int(
                    "newest step acknowledged before the cut; empty if none", kind="recorded"
                ),
                "in_flight_step": _int("step being saved at the cut, if any", kind="recorded"),
                "recovered_step": _int(
                    "step found after the recovery; empty if none", kind="recorded"
                ),
                "outcome": _text("class of the recovery, see the oracle", "recorded"),
                "rule": _text("first oracle rule broken, or empty", "recorded"),
                "expected": _bool("whether the mode's promise allows this outcome", "recorded"),
                "damage": _text(
                    "what became of the newest acknowledged checkpoint; empty if it, "
                    "or a newer one, was found",
                    "recorded",
                ),
                "mount_error": _text(
                    "errno if the kernel refused to mount; else empty", "recorded"
                ),
                "repaired": _bool(
                    "it mounted after the file system's own offline repair", "recorded"
                ),
                "next_save_ok": _bool(
                    "the next save worked and was found; empty if not tried", "recorded"
                ),
            },
        ),
        Output(
            "power_controls",
            "06_power_loss",
            "ckptlib.experiments.power_loss",
            {
                **_TRIAL,
                "control": _text("no cut, or lying device: one that ignores flushes"),
                "filesystem": _POWER["filesystem"],
                "log": _text("the recorded log, of an atomic_dirsync run"),
                "states": _int("crash states tried", kind="recorded"),
                "acknowledged": _int("of them with a save acknowledged", kind="recorded"),
                "lost": _int("of these, the newest acknowledged one not found", kind="recorded"),
                "outcomes": _text("count of each outcome", "recorded"),
            },
        ),
        Output(
            "claims",
            "09_findings",
            "ckptlib.analysis.claims",
            {
                "claim_id": _text("identifier in data/published/claims.yml"),
                "source": _text("table or section of the paper"),
                "published": _text("what the paper reports"),
                "measured": _text("what was found here", "timing"),
                "ci_low": _time("lower end of the 95% interval", "as measured"),
                "ci_high": _time("upper end of the 95% interval", "as measured"),
                "verdict": _text("reproduced, differs or not_comparable", "timing"),
                "note": _text("why, in one sentence", "timing"),
            },
            key=("claim_id",),
        ),
    )
}

FIGURES: dict[str, str] = {
    "fig_training": "01_training",
    "fig1_latency_ecdf": "02_latency",
    "fig_process_vs_save": "02_latency",
    "fig2_group_validity": "03_crash",
    "fig3_failure_reasons": "03_crash",
    "fig_recovery_outcomes": "03_crash",
    "fig4_detection": "04_corruption",
    "fig5_timeline": "05_timeline",
    "fig_power_survival": "06_power_loss",
    "fig_power_policies": "06_power_loss",
    "fig_power_damage": "06_power_loss",
    "fig_power_story": "06_power_loss",
    "fig_power_directories": "06_power_loss",
    "fig_power_options": "06_power_loss",
    "fig_operations": "03_crash",
    "fig_operation_kinds": "03_crash",
    "fig_errors": "03_crash",
    "fig_guidance": "09_findings",
    "fig_claims": "09_findings",
}

TABLES: dict[str, str] = {
    "table_training": "01_training",
    "table1_latency": "02_latency",
    "table2_overhead": "02_latency",
    "table3_crash": "03_crash",
    "table_outcomes": "03_crash",
    "table4_corruption": "04_corruption",
    "table_layers": "04_corruption",
    "table_power": "06_power_loss",
    "table_power_logs": "06_power_loss",
    "table_power_policies": "06_power_loss",
    "table_power_damage": "06_power_loss",
    "table_power_directories": "06_power_loss",
    "table_power_workloads": "06_power_loss",
    "table_power_beside": "06_power_loss",
    "table_operations": "03_crash",
    "table_operation_reasons": "03_crash",
    "table_errors": "03_crash",
    "table_claims": "09_findings",
    "table_guidance": "09_findings",
}


def output(name: str) -> Output:
    """Give one entry of :data:`OUTPUTS`.

    Raises
    ------
    InvalidInput
        No output has this name.
    """
    if name not in OUTPUTS:
        raise InvalidInput(
            explain(
                "unknown output",
                expected=f"one of {', '.join(OUTPUTS)}",
                found=repr(name),
                do="register it in ckptlib/experiments/registry.py",
            )
        )
    return OUTPUTS[name]


def empty(name: str):
    """Give a canonical frame without rows: what an output holds that could not be made here."""
    import pandas

    return validate(pandas.DataFrame(columns=list(output(name).columns)), name)


def check_columns(names: Iterable[str], name: str, path=None) -> None:
    """Hold a set of column names to the registry.

    Raises
    ------
    InvalidInput
        A column is missing, or one is there that the registry does not name.
    """
    found, wanted = set(names), set(output(name).columns)
    if found != wanted:
        raise InvalidInput(
            explain(
                f"the columns of output {name} are not those of the registry",
                path=path,
                expected=f"also {sorted(wanted - found)}" if wanted - found else None,
                found=f"unknown {sorted(found - wanted)}" if found - wanted else None,
                do="correct the experiment, or ckptlib/experiments/registry.py with it",
            ),
            path,
        )


def validate(frame, name: str, path=None):
    """Hold a frame to the registry and bring it into canonical form.

    Parameters
    ----------
    frame : pandas.DataFrame
        One row a trial (or another key, see the entry).
    name : str
        Name of the output.

    Returns
    -------
    pandas.DataFrame
        The same rows with the registry's columns in its order and types, sorted by the key.

    Raises
    ------
    InvalidInput
        Missing or unknown columns, values of another type, or a key that is not unique.
    """
    entry = output(name)
    check_columns(frame.columns, name, path)
    canonical = {}
    for column, spec in entry.columns.items():
        values = frame[column]
        try:
            if spec.dtype == "text":
                values = values.where(values.notna(), "").astype("str")
            else:
                values = values.astype(DTYPES[spec.dtype])
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                explain(
                    f"column {column} of output {name} has values of another type",
                    path=path,
                    expected=spec.dtype,
                    found=str(error),
                    do="correct the experiment",
                ),
                path,
            ) from error
        canonical[column] = values
    result = frame.assign(**canonical)[list(entry.columns)]
    key = list(entry.key)
    if key:
        twice = result[result.duplicated(key)]
        if len(twice):
            raise InvalidInput(
                explain(
                    f"output {name} has several rows with one key",
                    path=path,
                    expected=f"unique {', '.join(key)}",
                    found=f"{len(twice)} repeated, the first being {tuple(twice[key].iloc[0])}",
                    do="correct the experiment's plan",
                ),
                path,
            )
        result = result.sort_values(key, kind="stable")
    return result.reset_index(drop=True)
