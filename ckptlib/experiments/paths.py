"""Where the project is; nothing else may know or guess it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ckptlib.errors import MissingInput, explain


@cache
def project_root() -> Path:
    """Find the checkout, from any working directory.

    Returns
    -------
    Path
        The nearest directory with ``pyproject.toml`` and ``ckptlib/`` in it, at or above this
        file or, for a package installed elsewhere, at or above the working directory.

    Raises
    ------
    MissingInput
        Neither lies inside a checkout.
    """
    for start in (Path(__file__).resolve().parent, Path.cwd()):
        for place in (start, *start.parents):
            if (place / "pyproject.toml").is_file() and (place / "ckptlib").is_dir():
                return place
    raise MissingInput(
        explain(
            "the project folder was not found",
            path=Path.cwd(),
            expected="a checkout at or above this directory",
            do="run from inside a checkout",
        ),
        Path.cwd(),
    )


def resolve(path: str | Path) -> Path:
    """Make a path absolute; a relative one is taken from the project, not from where one stands."""
    return project_root() / Path(path).expanduser()
