"""Measure the speeds of this suite on this machine, print them and record them.

Exit status: 0 measured, or skipped with the reason, however slow; 1 a benchmark raised an error;
2 the input is wrong; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pandas
from tqdm import tqdm

from ckptlib import provenance
from ckptlib.bench import frame
from ckptlib.bench.frame import Run, Setting
from ckptlib.bench.table import table
from ckptlib.errors import CkptError, InvalidInput, explain
from ckptlib.experiments import engine
from ckptlib.experiments.context import check_scratch
from ckptlib.experiments.outputs import replaced
from ckptlib.experiments.paths import resolve

NAME = "bench"
ROUNDS = 5


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ckptlib.bench", description=__doc__)
    add = parser.add_argument
    add("--only", default="", help="names or groups, such as power or power/xfs (default: all)")
    add("--rounds", default=str(ROUNDS), help=f"how often each is measured (default: {ROUNDS})")
    add("--jobs", default="2", help="workers of what runs on several (default: 2)")
    add("--scratch", default="data/scratch", help="folder on the disk under test")
    add("--output", default="data/results/bench", help="folder of bench.json and bench.csv")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see the module for the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except CkptError as error:
        print(f"Nothing was measured: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"Stopped: {error.strerror}: {error.filename}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped; nothing was recorded.", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    jobs, rounds = _whole("JOBS", options.jobs), _whole("--rounds", options.rounds)
    entries = frame.choose(table(jobs), options.only)
    output, scratch = resolve(options.output), resolve(options.scratch)
    check_scratch(scratch, force_memory=True)  # what measures a disk says so by its needs
    output.mkdir(parents=True, exist_ok=True)
    engine.sweep(scratch, NAME)
    place = scratch / f"{NAME}.{os.getpid()}"
    place.mkdir()
    begun = datetime.now(UTC)
    steps = len(entries) * (rounds + 1)
    try:
        with tqdm(total=steps, desc=NAME, leave=False, disable=not sys.stderr.isatty()) as bar:
            result = frame.run(entries, Setting(place, jobs), rounds, lambda name: bar.update())
    finally:
        shutil.rmtree(place, ignore_errors=True)
    record = {
        "date": begun.isoformat(timespec="seconds"),
        "minutes": round((datetime.now(UTC) - begun).total_seconds() / 60, 1),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "code_hash": provenance.code_hash(),
        "filesystem": provenance.filesystem(scratch),
        "jobs": jobs,
        "rounds": rounds,
        "benchmarks": frame.summary(result),
        "skipped": result.skipped,
        "failed": result.failed,
    }
    _write(output, result, record)
    print(_told(record))
    print(f"\n{_shown(output)}: bench.json and bench.csv")
    return 1 if result.failed else 0


def _whole(knob: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise InvalidInput(
            explain(f"{knob} is not a whole number", expected="1 or more", found=repr(text))
        )
    return int(text)


def _write(output: Path, result: Run, record: dict) -> None:
    rows = [
        {"benchmark": entry.name, "round": number, "position": order.index(entry.name),
         "unit": entry.unit, "amount": sample.amount, "seconds": sample.seconds,
         "rate": sample.rate}
        for entry in result.measured()
        for number, (order, sample) in enumerate(
            zip(result.orders, result.samples[entry.name], strict=True)
        )
    ]  # fmt: skip
    names = ["benchmark", "round", "position", "unit", "amount", "seconds", "rate"]
    with replaced(output / f"{NAME}.csv") as temporary:
        pandas.DataFrame(rows, columns=names).to_csv(temporary, index=False, lineterminator="\n")
    with replaced(output / f"{NAME}.json") as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _told(record: dict) -> str:
    """The record for people."""
    machine = record["machine"]
    parts = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']} {machine['kernel']}; "
        f"{record['date']}\nEach was measured once in each of {record['rounds']} rounds; a ratio "
        f"is one of rates of the same round.\n",
        _speeds(record["benchmarks"]),
    ]
    if detailed := [row for row in record["benchmarks"] if row["parts_ms"]]:
        times = pandas.DataFrame([row["parts_ms"] for row in detailed])
        times.insert(0, "ms for each", [row["name"] for row in detailed])
        parts += ["\nWhere the time goes, in the worker that has the work:\n", _plain(times)]
    reasons: dict[str, list[str]] = {}
    for name, reason in record["skipped"].items():
        reasons.setdefault(reason, []).append(name)
    parts += [f"\nskipped: {', '.join(names)}: {why}" for why, names in reasons.items()]
    for name, trace in record["failed"].items():
        parts.append(f"\nfailed: {name}: {trace.strip().splitlines()[-1]} (all of it: bench.json)")
    return "\n".join(parts)


def _speeds(rows: list[dict]) -> str:
    columns = [
        {
            "what": row["measures"],
            "median": _rounded(row["median"]),
            "lowest to highest": f"{_rounded(row['lowest'])} to {_rounded(row['highest'])}",
            "unit": row["unit"],
            "ratio": _ratio(row),
            "name": row["name"],
        }
        for row in rows
    ]
    return _plain(pandas.DataFrame(columns)) if columns else "Nothing could be measured."


def _ratio(row: dict) -> str:
    if "ratio" not in row:
        return ""
    ratio = row["ratio"]
    low, high = ratio["lowest"], ratio["highest"]
    return f"{ratio['median']:.2f} ({low:.2f} to {high:.2f}) of {row['peer']}"


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _plain(rows: pandas.DataFrame) -> str:
    text = rows.select_dtypes(exclude="number").astype(str)
    left = {name: text[name].str.pad(text[name].str.len().max(), side="right") for name in text}
    return rows.assign(**left).to_string(
        index=False, float_format="%.2f", na_rep="", justify="left"
    )


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the workers, too
    sys.exit(main())
