"""What a profile gives to each notebook, checked before anything runs, never corrected silently.

papermill only logs a parameter that a notebook does not have, and takes any type. Here both are
errors, since a mistyped name would otherwise run the smoke size under the name of the paper.
"""

from __future__ import annotations

from pathlib import Path

import papermill
import yaml

from ckptlib.errors import InvalidInput, explain

COMMON = "common"
FINDINGS = "09"  # reads all the others, and so runs after them whatever their numbers
TYPES = ("bool", "float", "int", "str")


def notebooks(root: Path) -> dict[str, Path]:
    """The numbered notebooks of a project by name, in the order in which they run."""
    found = sorted((root / "notebooks").glob("[0-9]*.ipynb"))
    found.sort(key=lambda path: path.name.startswith(FINDINGS))
    if not found:
        raise InvalidInput(
            explain(
                "there are no notebooks",
                path=root / "notebooks",
                expected="files such as 00_tour.ipynb",
                do="run this from a complete checkout",
            ),
            root,
        )
    return {path.stem: path for path in found}


def read_profile(root: Path, profile: str) -> dict[str, dict]:
    """Read ``data/params/<profile>.yml``: section to parameters, ``common`` among the sections.

    Raises
    ------
    InvalidInput
        No such profile, or the file is not a mapping of mappings.
    """
    folder = root / "data" / "params"
    known = sorted(path.stem for path in folder.glob("*.yml"))
    if profile not in known:
        raise InvalidInput(
            explain(
                "unknown profile",
                path=folder,
                expected=" or ".join(known),
                found=repr(profile),
                do="set PROFILE to one of these",
            ),
            folder,
        )
    path = folder / f"{profile}.yml"
    try:
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInput(
            explain("this profile cannot be read", path=path, found=reason, do="correct the file"),
            path,
        ) from error
    if not isinstance(sections, dict) or not all(isinstance(s, dict) for s in sections.values()):
        raise InvalidInput(
            explain(
                "this profile is not of the right form",
                path=path,
                expected="sections (common, or the name of a notebook) of `name: value` lines",
                do="correct the file",
            ),
            path,
        )
    return sections


def effective(
    root: Path, profile: str, overrides: dict[str, object]
) -> dict[str, dict[str, object]]:
    """The parameters that every notebook gets: the profile's, then the command line's.

    Parameters
    ----------
    root : Path
        The project.
    profile : str
        Name of a file in ``data/params``, without its suffix.
    overrides : dict
        Common parameters that the caller decides, such as ``results``.

    Returns
    -------
    dict
        Notebook name to parameters, in the order in which the notebooks run.

    Raises
    ------
    InvalidInput
        A section without a notebook, a parameter that its notebook does not have, or a value that
        is not of the type which the notebook declares.
    """
    sections = read_profile(root, profile)
    source = root / "data" / "params" / f"{profile}.yml"
    paths = notebooks(root)
    if unknown := sorted(sections.keys() - paths.keys() - {COMMON}):
        raise InvalidInput(
            explain(
                f"the profile has parameters for {unknown[0]}, which is no notebook",
                path=source,
                expected=", ".join(paths),
                do="correct the name of the section",
            ),
            source,
        )
    common = {**sections.get(COMMON, {}), **overrides}
    return {
        name: _checked(path, {**common, **sections.get(name, {})}, source)
        for name, path in paths.items()
    }


def _checked(notebook: Path, values: dict, source: Path) -> dict[str, object]:
    declared = papermill.inspect_notebook(notebook)
    for name, value in values.items():
        if name not in declared:
            raise InvalidInput(
                explain(
                    f"{notebook.stem} has no parameter {name!r}",
                    path=source,
                    expected=", ".join(declared) or "none: no cell is tagged `parameters`",
                    do="correct the name in the profile",
                ),
                source,
            )
        kind = declared[name]["inferred_type_name"]
        if kind not in TYPES:
            raise InvalidInput(
                explain(
                    f"{notebook.stem} declares no usable type for {name!r}",
                    path=notebook,
                    expected=f"a line such as `{name}: int = 3  # what it means`",
                    do="add the type to the cell tagged `parameters`",
                ),
                notebook,
            )
        # By exact type: True is no number of seeds, though Python counts it as an int.
        allowed = ("int", "float") if kind == "float" else (kind,)
        if type(value).__name__ not in allowed:
            raise InvalidInput(
                explain(
                    f"parameter {name!r} of {notebook.stem} has the wrong type",
                    path=source,
                    expected=kind,
                    found=f"{value!r} ({type(value).__name__})",
                    do="correct the value in the profile",
                ),
                source,
            )
    if isinstance(values.get("seed"), int) and values["seed"] < 0:
        raise InvalidInput(
            explain("the seed is negative", path=source, expected="0 or more",
                    found=values["seed"], do="correct the value in the profile"),
            source,
        )  # fmt: skip
    return values
