"""Csv files with their provenance on disk: written whole or not at all, never read unchecked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from ckptlib import provenance
from ckptlib.errors import MissingInput, StaleResults, explain
from ckptlib.experiments import registry


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a temporary sibling that takes the place of ``path`` if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp makes it 0600; results are for everybody
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def csv_path(results: Path, name: str) -> Path:
    """Where the csv of an output lies."""
    return results / f"{name}.csv"


def provenance_path(results: Path, name: str) -> Path:
    """Where the record beside it lies."""
    return results / f"{name}.provenance.json"


def write(results: Path, name: str, frame, *, facts: dict, key: str = ""):
    """Write an output and its provenance.

    Parameters
    ----------
    results : Path
        Folder of the profile.
    name : str
        Name of the output in the registry.
    frame : pandas.DataFrame
        Rows; validated and brought into canonical form first.
    facts : dict
        What else the record should say: profile, parameters, workers, file system of the scratch.
    key : str
        Identity of the configuration that these rows answer to, see :mod:`.engine`.

    Returns
    -------
    pandas.DataFrame
        The canonical rows, as they were written.
    """
    frame = registry.validate(frame, name)
    path = csv_path(results, name)
    with replaced(path) as temporary:
        frame.to_csv(temporary, index=False, lineterminator="\n")
        digest = _sha256(temporary)
    record = {
        "output": name,
        "rows": len(frame),
        "sha256": digest,
        "key": key,
        "code_hash": provenance.code_hash(registry.output(name).module),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        **facts,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with replaced(provenance_path(results, name)) as temporary:
        temporary.write_text(json.dumps(record, indent=2, default=str) + "\n")
    return frame


def record_of(results: Path, name: str) -> dict:
    """Read the provenance of an output; an empty dict where there is none that can be read."""
    try:
        record = json.loads(provenance_path(results, name).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def skipped(results: Path, name: str) -> dict[str, str]:
    """What an output leaves out because it can't be made on this machine, with the reason of each.

    An output without rows is a result only if this is empty.
    """
    told = record_of(results, name).get("skipped")
    return told if isinstance(told, dict) else {}


def nothing_made(results: Path, name: str) -> bool:
    """Whether an output has no rows because all of it was skipped."""
    return bool(skipped(results, name)) and record_of(results, name).get("rows") == 0


def skipped_lines(results: Path, now: Mapping[str, str] | None = None) -> list[str]:
    """What the outputs of a run leave out, one sentence for each notebook and reason.

    Parameters
    ----------
    results : Path
        Folder of the profile.
    now : mapping of str to str, optional
        The reasons that hold by now, where they are not those of the record.
    """
    found: dict[tuple[str, str], dict[str, None]] = {}
    for name, entry in registry.OUTPUTS.items():
        for what, reason in skipped(results, name).items():
            reason = (now or {}).get(what) or reason
            found.setdefault((entry.notebook, reason), {})[what] = None
    return [
        f"{title(notebook)}: skipped on {', '.join(what)}: {reason}"
        for (notebook, reason), what in found.items()
    ]


def title(notebook: str) -> str:
    """A notebook's name as people say it: ``06_power_loss`` is "power loss"."""
    return notebook.partition("_")[2].replace("_", " ")


def discard(results: Path, name: str) -> None:
    """Remove an output and its record, so that it is made again."""
    csv_path(results, name).unlink(missing_ok=True)
    provenance_path(results, name).unlink(missing_ok=True)


def read(results: Path, name: str):
    """Read an output back, after checking that it is the one that the present code makes.

    Returns
    -------
    pandas.DataFrame
        In canonical form.

    Raises
    ------
    MissingInput
        The csv is not there.
    StaleResults
        It was made by another version of the code, or was changed after it was made.
    """
    import pandas

    entry = registry.output(name)
    path = csv_path(results, name)
    again = f"run notebook {entry.notebook} again with the same results folder"
    if not path.is_file():
        raise MissingInput(
            explain("a table that this step builds on is missing", path=path, do=again), path
        )
    record = record_of(results, name)
    code = provenance.code_hash(entry.module)
    if record.get("code_hash") != code:
        raise StaleResults(
            explain(
                "this table was made by another version of the code",
                path=path,
                expected=f"code hash {code[:12]}",
                found=str(record.get("code_hash") or "no provenance beside it")[:32],
                do=again,
            ),
            path,
        )
    if record.get("sha256") != _sha256(path):
        raise StaleResults(
            explain(
                "this table was changed after it was made",
                path=path,
                expected=f"SHA-256 {record.get('sha256')}",
                found=_sha256(path),
                do=f"delete it and {again}",
            ),
            path,
        )
    text = [column for column, spec in entry.columns.items() if spec.dtype == "text"]
    others = [column for column in entry.columns if column not in text]
    frame = pandas.read_csv(
        path,
        dtype={column: registry.DTYPES[spec.dtype] for column, spec in entry.columns.items()},
        keep_default_na=False,
        na_values={column: [""] for column in others},
    )
    return registry.validate(frame, name, path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
