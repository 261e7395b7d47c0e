"""The parameters of a notebook, checked before anything is made, and the run that they open."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ckptlib import provenance
from ckptlib.errors import InvalidInput, UnsuitableScratch, explain
from ckptlib.experiments import engine as engines
from ckptlib.experiments import outputs
from ckptlib.experiments.paths import resolve

PROFILES = ("smoke", "paper", "full")
#: Free space that every experiment can do with, in bytes.
SPACE_NEEDED = 256 * 2**20


@dataclass(frozen=True)
class Run:
    """Where a notebook reads and writes, and how it runs trials; made by :func:`open_run`."""

    profile: str
    results: Path
    figures: Path
    scratch: Path
    jobs: int
    engine: str
    scheduler: str
    notebook: str
    parameters: dict = field(default_factory=dict, repr=False)

    def facts(self) -> dict:
        """What the provenance record of an output says about this run."""
        return {
            "profile": self.profile,
            "notebook": self.notebook,
            "parameters": self.parameters,
            "scratch": _told(self.scratch),
            "filesystem": provenance.filesystem(self.scratch),
            "workers": self.jobs,
            "engine": self.engine,
        }

    def grid(
        self,
        name: str,
        trials: Sequence[dict],
        run_batch: engines.RunBatch,
        *,
        batch: str | Sequence[str] | None = "seed",
        jobs: int | None = None,
        skipped: dict[str, str] | None = None,
    ):
        """Run a grid of trials and write ``<name>.csv``; see :func:`.engine.run_grid`.

        Parameters
        ----------
        jobs : int, optional
            Fewer workers than the run has, say 1 where times are measured.
        skipped : dict of str to str, optional
            What was left out of the plan because it can't run on this machine, with the reasons;
            empty if all could run. Not given where every machine can run everything.

        Returns
        -------
        pandas.DataFrame
        """
        return engines.run_grid(
            name,
            trials,
            run_batch,
            results=self.results,
            scratch=self.scratch,
            batch=batch,
            jobs=self.jobs if jobs is None else jobs,
            engine=self.engine,
            scheduler=self.scheduler,
            facts=self.facts() | _demanding(skipped),
        )

    def write(self, name: str, frame, *, skipped: dict[str, str] | None = None):
        """Write an output that is not a grid of trials; return it in canonical form.

        ``skipped`` is as in :meth:`grid`.
        """
        facts = self.facts() | _demanding(skipped)
        return outputs.write(self.results, name, frame, facts=facts)

    def read(self, name: str):
        """Read an output of this or an earlier notebook.

        Raises
        ------
        MissingInput, StaleResults
            It is not there, or not the present code's.
        """
        return outputs.read(self.results, name)


def open_run(
    *,
    profile: str,
    results: str,
    figures: str,
    scratch: str,
    notebook: str,
    jobs: int = 2,
    engine: str = "loky",
    scheduler: str = "",
    force_memory_scratch: bool = False,
    **parameters,
) -> Run:
    """Check the common parameters and open a run; nothing is made unless all are right.

    Parameters
    ----------
    profile : {"smoke", "paper", "full"}
    results, figures, scratch : str
        Folders; relative ones are taken from the project. ``scratch`` is on the disk under test.
    notebook : str
        Name of the notebook, for the records.
    jobs : int
        Workers, at least 1.
    engine : {"loky", "dask"}
    scheduler : str
        Address of a Dask scheduler; empty for a local one.
    force_memory_scratch : bool
        Accept a scratch folder in memory, where no durability can be measured.
    **parameters
        The notebook's own parameters, for the records.

    Returns
    -------
    Run

    Raises
    ------
    InvalidInput
        A value is not one of those above.
    UnsuitableScratch
        ``scratch`` is memory-backed, read-only, not a directory or full.
    """
    _choice("profile", profile, PROFILES)
    _choice("engine", engine, engines.ENGINES)
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise InvalidInput(
            explain(
                "jobs is not a number of workers",
                expected="1 or more",
                found=repr(jobs),
                do="set JOBS",
            )
        )
    if scheduler and engine != "dask":
        raise InvalidInput(
            explain(
                "a scheduler needs the dask engine",
                expected="engine dask",
                found=repr(engine),
                do="add ENGINE=dask, or drop SCHEDULER",
            )
        )
    place = resolve(scratch)
    check_scratch(place, force_memory=force_memory_scratch)
    run = Run(
        profile=profile,
        results=resolve(results),
        figures=resolve(figures),
        scratch=place,
        jobs=jobs,
        engine=engine,
        scheduler=scheduler,
        notebook=notebook,
        parameters=parameters,
    )
    _writable({"RESULTS": run.results, "FIGURES": run.figures})
    return run


def _demanding(skipped: dict[str, str] | None) -> dict:
    """What the record says of an output that not every machine and user can make."""
    return {} if skipped is None else {"skipped": skipped, "root": os.geteuid() == 0}


def _told(folder: Path) -> str:
    """A folder for the records: from the project where it lies within, since others move it."""
    root = resolve(".")
    return str(folder.relative_to(root) if folder.is_relative_to(root) else folder)


def _writable(folders: dict[str, Path]) -> None:
    """Make the folders, by the knob that names each, and see that they can be written to."""
    made: list[Path] = []
    for knob, folder in folders.items():
        try:
            _make(folder, made)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            _unmake(made)
            raise InvalidInput(
                explain(
                    "this folder cannot be written",
                    path=folder,
                    found=error.strerror,
                    do=f"choose another with {knob}",
                ),
                folder,
            ) from error


def _make(folder: Path, made: list[Path]) -> None:
    """Make a folder and what is missing above it, noting what was made, outermost first."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir()
        made.append(place)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def _unmake(made: list[Path]) -> None:
    for place in reversed(made):
        with contextlib.suppress(OSError):
            place.rmdir()


def check_scheduler(address: str, timeout_s: float = 5.0) -> None:
    """See that something answers at a Dask scheduler's address, before anything is run."""
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 8786), timeout_s).close()
    except (OSError, ValueError) as error:
        raise InvalidInput(
            explain(
                "no Dask scheduler answers",
                path=address,
                expected="an address such as tcp://host:8786",
                found=str(error),
                do="start one there, or leave SCHEDULER empty for one on this machine",
            )
        ) from error


def _choice(what: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InvalidInput(
            explain(
                f"unknown {what}",
                expected=", ".join(allowed),
                found=repr(value),
                do="choose one of these",
            )
        )


def check_scratch(place: Path, *, force_memory: bool = False, space: int = SPACE_NEEDED) -> None:
    """Hold the scratch folder to what the experiments need; it is made if it is missing.

    Raises
    ------
    UnsuitableScratch
        With what is wrong and what to do.
    """
    kind = provenance.filesystem(place)
    if kind["memory_backed"] and not force_memory:
        raise UnsuitableScratch(
            explain(
                "the scratch folder is in memory, where nothing can be made durable",
                path=place,
                expected="a folder on a disk",
                found=kind["type"],
                do="set SCRATCH to the disk that you want to test, or force_memory_scratch "
                "for a trial run",
            ),
            place,
        )
    made: list[Path] = []
    try:
        _make(place, made)
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(bytes(2**16))
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(place).free
    except OSError as error:
        _unmake(made)
        raise UnsuitableScratch(
            explain(
                "the scratch folder cannot be written",
                path=place,
                expected="a folder that you may write to",
                found=error.strerror or str(error),
                do="set SCRATCH to a folder on a disk with free space",
            ),
            place,
        ) from error
    if free < space:
        _unmake(made)
        raise UnsuitableScratch(
            explain(
                "the disk of the scratch folder is full",
                path=place,
                expected=f"{space / 2**20:.0f} MiB free",
                found=f"{free / 2**20:.0f} MiB",
                do="free some space, or set SCRATCH to another disk",
            ),
            place,
        )
