"""The notebooks as they are kept: without outputs, typed parameters, short, and lintable."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path

import nbformat
import papermill
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_notebook, new_output
from nbstripout import strip_output

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PARAMS = ROOT / "data" / "params"
PARAMETER_LINE = re.compile(r"^[a-z_]+: (str|int|float|bool) = .+  # \S.*$")
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|Users|root|work|tmp|var|opt|mnt|private)/|[A-Z]:\\\\")
MAX_CODE_LINES, MAX_CODE_CELLS = 150, 25

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def code_of(notebook) -> str:
    """All code, with the lines that only IPython understands left out."""
    lines = "\n".join(cell.source for cell in code_cells(notebook)).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))


def parameters_cells(notebook) -> list:
    return [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]


def stripped(notebook):
    """What nbstripout would leave; also, no widget state and no language version."""
    bare = strip_output(
        copy.deepcopy(notebook),
        keep_output=False,
        keep_count=False,
        keep_id=True,
        extra_keys=[
            "metadata.widgets",
            "metadata.language_info.version",
            "cell.metadata.execution",
        ],
    )
    return bare


def test_there_are_notebooks():
    assert NOTEBOOKS


@each_notebook
def test_it_is_a_valid_notebook_with_cell_ids(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)


@each_notebook
def test_it_holds_no_outputs_counts_or_widget_state(path):
    notebook = read(path)
    assert not [cell.id for cell in code_cells(notebook) if cell.outputs]
    assert not [cell.id for cell in code_cells(notebook) if cell.execution_count is not None]
    assert "widgets" not in notebook.metadata
    assert stripped(notebook) == notebook, "nbstripout would change it"


def test_the_check_above_notices_an_output():
    dirty = new_notebook(cells=[new_code_cell("1", outputs=[new_output("stream", text="1")])])
    assert stripped(dirty) != dirty
    counted = new_notebook(cells=[new_code_cell("1", execution_count=3)])
    assert stripped(counted) != counted


@each_notebook
def test_its_kernel_is_plain_python3(path):
    kernel = read(path).metadata.kernelspec
    assert kernel.name == "python3" and kernel.language == "python"
    assert kernel.display_name in ("Python 3", "Python 3 (ipykernel)")


@each_notebook
def test_it_has_one_parameters_cell_of_typed_and_explained_lines(path):
    cells = parameters_cells(read(path))
    assert len(cells) == 1
    lines = [line for line in cells[0].source.splitlines() if not line.startswith("#")]
    assert lines and not [line for line in lines if not PARAMETER_LINE.match(line)]


@each_notebook
def test_its_defaults_are_the_smoke_profile(path):
    profile = yaml.safe_load((PARAMS / "smoke.yml").read_text("utf-8"))
    wanted = {**profile["common"], **profile.get(path.stem, {})}
    declared = papermill.inspect_notebook(path)
    found = {name: ast.literal_eval(entry["default"]) for name, entry in declared.items()}
    assert found == wanted
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in wanted.items()
    }


@pytest.mark.parametrize("profile", ["paper", "full"])
def test_every_profile_sets_what_smoke_sets(profile):
    """What a profile leaves out would run at the smoke size without a word."""
    smoke = yaml.safe_load((PARAMS / "smoke.yml").read_text("utf-8"))
    other = yaml.safe_load((PARAMS / f"{profile}.yml").read_text("utf-8"))
    assert {name: sorted(section) for name, section in other.items()} == {
        name: sorted(section) for name, section in smoke.items()
    }


@each_notebook
def test_it_is_short_and_defines_no_class(path):
    notebook = read(path)
    lines = [line for line in code_of(notebook).splitlines() if line.strip()]
    assert len(lines) <= MAX_CODE_LINES
    assert len(code_cells(notebook)) <= MAX_CODE_CELLS
    assert not [n for n in ast.walk(ast.parse(code_of(notebook))) if isinstance(n, ast.ClassDef)]


@each_notebook
def test_it_names_no_path_of_one_machine(path):
    for cell in read(path).cells:
        assert not MACHINE_PATH.search(cell.source), cell.id


@each_notebook
def test_it_tells_what_is_learned_needed_and_not_shown(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    assert len(re.findall(r"^# ", text, re.M)) == 1
    for heading in (
        "What you will learn",
        "What you need",
        "What this cannot show",
        "Where to go next",
    ):
        assert re.search(rf"^##+ {heading}", text, re.M), heading


def test_a_machine_path_is_recognised_and_a_relative_one_is_not():
    assert MACHINE_PATH.search("read('/home/ada/x.csv')") and MACHINE_PATH.search('"/tmp/x"')
    assert not MACHINE_PATH.search("data/results/tmp/x and https://example.org/home/x")
