"""Imports within ckptlib run downwards only, and importing it costs no tensor library."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import ckptlib

PACKAGE = Path(__file__).resolve().parents[1] / "ckptlib"

#: Rooms by floor, from the ground up; a room is a module or a folder directly below ckptlib.
FLOORS = (
    ("errors", "vfs", "temps", "streams", "digests", "sidecars", "provenance"),
    ("write_modes", "formats", "manifests"),
    ("groups",),
    ("guard", "diagnosis"),
    ("catalog", "housekeeping", "recovery", "store", "asynchronous", "multirank"),
    ("faults", "crashes"),
    ("experiments",),
    ("analysis",),
    ("__main__", "bench", "reproduce", "report", "readme", "replay", "soak"),
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS, 1) for room in rooms}


def imports(source: str, home: str) -> set[str]:
    """Every ckptlib module that a source names in an import, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, home) if node.level else base
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return {name for name in found if name.split(".")[0] == "ckptlib"}


def home_of(name: str) -> str:
    """Where a name lives that is offered by the face, ``ckptlib/__init__.py``; else the name."""
    _, _, offered = name.partition(".")
    return ckptlib._HOME.get(offered, name)


def room_of(module: str) -> str:
    """``ckptlib.formats.torch_format.save`` lies in the room ``formats``."""
    return module.split(".")[1]


def rooms_used(source: str, module: str, *, package: bool = False) -> set[str]:
    """The other rooms that a module imports from; the face alone counts as a room on top."""
    home = module if package else module.rpartition(".")[0]
    names = {home_of(name) for name in imports(source, home)}
    return {room_of(name) if "." in name else "__main__" for name in names} - {room_of(module)}


def offences(source: str, module: str, *, package: bool = False) -> list[str]:
    """The rooms above its own that a module imports from."""
    own = FLOOR_OF[room_of(module)]
    used = rooms_used(source, module, package=package)
    return sorted(room for room in used if FLOOR_OF[room] > own)


def modules() -> dict[str, Path]:
    """All modules of the package but its face, ``ckptlib/__init__.py``, which only points."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            found[".".join(("ckptlib", *parts)).removesuffix(".__init__")] = path
    return found


def test_every_room_has_a_floor():
    assert {room_of(name) for name in modules()} <= FLOOR_OF.keys()


@pytest.mark.parametrize("module", modules())
def test_imports_run_downwards_only(module):
    path = modules()[module]
    source = path.read_text(encoding="utf-8")
    assert offences(source, module, package=path.name == "__init__.py") == []


def test_no_two_rooms_import_each_other():
    """Within a floor the order is free, but there is one."""
    graph: dict[str, set[str]] = {}
    for module, path in modules().items():
        used = rooms_used(path.read_text("utf-8"), module, package=path.name == "__init__.py")
        graph.setdefault(room_of(module), set()).update(used)
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize(
    "source",
    [
        "import ckptlib.store",
        "from ckptlib.store import CheckpointStore",
        "from ckptlib import store",
        "from ckptlib import CheckpointStore",
        "from . import store",
        "from .store import CheckpointStore",
        "def later():\n    from ckptlib.experiments import engine",
        "if TYPE_CHECKING:\n    from ckptlib.analysis import stats",
        "import ckptlib",
    ],
)
def test_an_upward_import_is_caught_however_it_is_written(source):
    assert offences(source, "ckptlib.guard")


@pytest.mark.parametrize(
    ("source", "module", "package"),
    [
        ("from ckptlib.errors import CkptError", "ckptlib.guard", False),
        ("from ckptlib import errors, vfs", "ckptlib.store", False),
        ("from .schema import schema_of", "ckptlib.formats.torch_format", False),
        ("from . import schema", "ckptlib.formats", True),
        ("from ..errors import CkptError", "ckptlib.formats.schema", False),
        ("import json, os.path", "ckptlib.errors", False),
    ],
)
def test_a_downward_import_is_not_held_against_a_module(source, module, package):
    assert offences(source, module, package=package) == []


@pytest.mark.parametrize(
    "module",
    ["ckptlib"] + [name for name in modules() if FLOOR_OF.get(room_of(name), 9) <= 5],
)
def test_importing_it_loads_neither_torch_nor_numpy(module):
    """One process for each, since a module that is loaded already would hide the import."""
    code = f"import sys, {module}; print(sorted(sys.modules.keys() & {{'torch', 'numpy'}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
