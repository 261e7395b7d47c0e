"""Run the notebooks that are not up to date; nothing is made if the input is wrong.

Exit status: 0 all is up to date, 1 a notebook failed, 2 the input is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptlib.crashes import filesystems
from ckptlib.errors import CkptError, InvalidInput, MissingInput, StaleResults, explain
from ckptlib.experiments import context, engine, outputs, registry
from ckptlib.experiments.paths import project_root
from ckptlib.reproduce.kernel import NotebookFailed, interruptible, run_notebook
from ckptlib.reproduce.parameters import effective
from ckptlib.reproduce.stamps import FOLDER, Work, common_inputs

COMMON = ("results", "figures", "scratch", "jobs", "engine", "scheduler", "force_memory_scratch")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ckptlib.reproduce", description=__doc__)
    add = parser.add_argument
    add("--profile", default="paper", help="smoke, paper or full (default: paper)")
    add("--results", help="folder of the tables (default: as the profile says)")
    add("--figures", help="folder of the figures (default: as the profile says)")
    add("--scratch", help="folder on the disk under test (default: as the profile says)")
    add("--jobs", help="worker processes; no result depends on it")
    add("--engine", help="loky, or dask for a cluster")
    add("--scheduler", help="address of the Dask scheduler, tcp://host:port")
    add("--force-memory-scratch", action="store_true", default=None, help="accept a disk in memory")
    add("--only", nargs="+", metavar="NOTEBOOK", help="run these alone, such as 03_crash")
    add("--force", action="store_true", help="run notebooks that are up to date, too")
    add("--output-dir", help="folder of the executed notebooks (default: RESULTS/notebooks)")
    add("--project", type=Path, help="checkout whose notebooks are run (default: this one)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see the module for the exit status."""
    options = _parser().parse_args(arguments)
    try:
        with _private_jupyter(), interruptible():
            return run(options)
    except NotebookFailed as error:
        print(error, file=sys.stderr)
        return 1
    except CkptError as error:
        print(f"Nothing was run: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"Stopped: {error.strerror}: {error.filename}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # only now are the workers gone that were still writing there
        for name in registry.OUTPUTS if options.scratch else ():
            engine.sweep(Path(options.scratch), name)
        print(
            "\nStopped. Finished notebooks and trials are kept: the same command continues.",
            file=sys.stderr,
        )
        return 130


@contextlib.contextmanager
def _private_jupyter() -> Iterator[None]:
    """Keep the user's IPython start-up files out, and need no writable home."""
    names = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="ckptlib-", ignore_cleanup_errors=True) as folder:
        os.environ.update(dict.fromkeys(names, folder))
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def run(options: argparse.Namespace) -> int:
    """Check everything, then run the notebooks that are not up to date.

    Raises
    ------
    InvalidInput, MissingInput, StaleResults, UnsuitableScratch
        Before anything is made.
    NotebookFailed
        With where the notebook is kept and what it raised last.
    """
    root = (options.project or project_root()).resolve()
    works = _plan(root, options)
    options.scratch = str(root / Path(works[0].parameters["scratch"]).expanduser())
    with _alone(works[0].results):
        return _run(root, works, options)


def _plan(root: Path, options: argparse.Namespace) -> list[Work]:
    """Everything that may be wrong is found here; the folders of the run are made last."""
    given = {name: getattr(options, name) for name in COMMON}
    if given["jobs"] is not None:
        given["jobs"] = _whole(given["jobs"])
    overrides = {name: value for name, value in given.items() if value is not None}
    plan = effective(root, options.profile, {**overrides, "profile": options.profile})
    for name in options.only or ():
        if name not in plan:
            raise InvalidInput(
                explain("unknown notebook", expected=", ".join(plan), found=repr(name))
            )
    places = next(iter(plan.values()))
    folders = {name: root / Path(places[name]).expanduser() for name in ("results", "figures")}
    scratch = root / Path(places["scratch"]).expanduser()
    _ours(folders["results"])
    if places["scheduler"]:
        context.check_scheduler(places["scheduler"])
    executed = root / Path(options.output_dir or folders["results"] / "notebooks").expanduser()
    chosen = [
        Work(
            root / "notebooks" / f"{name}.ipynb",
            values,
            **folders,
            executed=executed / f"{name}.ipynb",
        )
        for name, values in plan.items()
        if name in (options.only or plan)
    ]
    _upstream(chosen)
    context.open_run(
        **{name: places[name] for name in COMMON if name not in (*folders, "scratch")},
        **{name: str(path) for name, path in folders.items()},
        scratch=str(scratch),
        profile=options.profile,
        notebook="",
    )
    return chosen


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(
            explain("JOBS is not a number of workers", expected="1 or more", found=repr(text))
        ) from None


def _ours(results: Path) -> None:
    """Refuse to write among files that this suite did not make."""
    if not results.exists():
        return
    if not results.is_dir():
        raise InvalidInput(
            explain("the results folder is a file", path=results, do="choose another with RESULTS"),
            results,
        )
    marks = (FOLDER, "notebooks", "*.provenance.json", ".partial")
    others = [path.name for path in results.iterdir() if not path.name.startswith(".")]
    if others and not any(True for mark in marks for _ in results.glob(mark)):
        raise StaleResults(
            explain(
                "the results folder holds files that this suite did not make",
                path=results,
                expected="an empty or new folder, or one of an earlier run",
                found=", ".join(sorted(others)[:3]),
                do="choose another with RESULTS",
            ),
            results,
        )


def _upstream(works: list[Work]) -> None:
    running = {product for work in works for product in work.products()}
    for work in works:
        for path in work.upstream().values():
            if path not in running and not path.is_file():
                raise MissingInput(
                    explain(
                        f"a table that {work.name} builds on is missing",
                        path=path,
                        do="run the notebook that makes it first, or leave out --only",
                    ),
                    path,
                )


@contextlib.contextmanager
def _alone(results: Path) -> Iterator[None]:
    """One run at a time in a results folder; the lock goes with the process, however it ends."""
    (results / FOLDER).mkdir(exist_ok=True)
    with (results / FOLDER / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(
                explain(
                    "another run is using this results folder",
                    path=results,
                    do="wait for it, or choose another with RESULTS",
                ),
                results,
            ) from None
        yield


def _run(root: Path, works: list[Work], options: argparse.Namespace) -> int:
    common = common_inputs(root, root / Path(works[0].parameters["scratch"]).expanduser())
    support = functools.cache(filesystems.support)  # asked only if something was skipped
    started, ran = time.monotonic(), []
    for number, work in enumerate(works, 1):
        inputs = work.inputs(common)
        why = work.why_run(inputs, support) or ("--force" if options.force else "")
        if not why:
            continue
        ran.append(work)
        label = f"[{number}/{len(works)}] {work.name}"
        print(f"{label} ({why}) ...", flush=True)
        begun = time.monotonic()
        work.stamp.unlink(missing_ok=True)
        before = work.drawn()
        try:
            bar = {"desc": label, "leave": False} if sys.stderr.isatty() else None
            run_notebook(work.notebook, work.parameters, work.executed, cwd=root, progress=bar)
        except NotebookFailed as error:
            raise NotebookFailed(
                f"{work.name} failed: {error}\nAs executed so far: {_shown(error.path)}", error.path
            ) from error
        if work.nothing_made():  # what an earlier run drew would pass for this one's
            for path, _ in before.items() & work.drawn().items():
                path.unlink()
        if missing := work.missing():
            raise NotebookFailed(
                f"{work.name} ended without making {_shown(missing[0])}, which "
                f"ckptlib/experiments/registry.py promises.\nAs executed: {_shown(work.executed)}",
                work.executed,
            )
        work.write_stamp(inputs)
        print(f"{label} done in {time.monotonic() - begun:.0f} s", flush=True)
    where = f"{_shown(works[0].results)} and {_shown(works[0].figures)}"
    if not ran:
        noun = f"all {len(works)} notebooks are" if len(works) > 1 else f"{works[0].name} is"
        print(f"Nothing to do: {noun} up to date, see {where}.")
    else:
        spent = time.monotonic() - started
        print(f"{len(ran)} of {len(works)} notebooks ran in {spent:.0f} s: {where}")
    for work in ran:
        if work.used_root():
            print(f"{outputs.title(work.name)}: used root, which it needs")
    if outputs.skipped_lines(works[0].results):
        for line in outputs.skipped_lines(works[0].results, support()):
            print(line)
    return 0


def _shown(path: str | Path) -> str:
    """A path as somebody standing here would write it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


if __name__ == "__main__":
    sys.exit(main())
