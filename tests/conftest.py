"""What the tests share: small projects to run in, and settings that keep them deterministic."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import hypothesis
import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_notebook

from ckptlib.crashes import filesystems

os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers of pytest-xdist share the cores

# No deadlines, since a slow machine is no error; the same examples in every run.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")

ROOT = Path(__file__).resolve().parents[1]

COMMON = """\
profile: str = "smoke"  # size of the run
results: str = "data/results/smoke"  # folder of the tables
figures: str = "figures/smoke"  # folder of the figures
scratch: str = "data/scratch"  # folder on the disk under test
jobs: int = 2  # workers
engine: str = "loky"  # loky or dask
scheduler: str = ""  # address of a Dask scheduler
force_memory_scratch: bool = False  # accept a disk in memory
seed: int = 2025  # of everything random
"""


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "needs_power(name, ...): mounts these file systems, ext4 by default; skipped with the "
        "reason where that is impossible, but failed in CI, where it must be possible",
    )


def pytest_runtest_setup(item):
    names = [name for mark in item.iter_markers("needs_power") for name in mark.args or ["ext4"]]
    if names:
        demand_power(names, _support(), in_ci=bool(os.environ.get("CI")))


def demand_power(names: list[str], support: dict[str, str], *, in_ci: bool) -> None:
    """Skip the test if power can't be cut here; a skip in CI would read like a pass."""
    for name in names:
        if support[name] and in_ci:
            pytest.fail(f"this test may not be skipped in CI: {support[name]}", pytrace=False)
        if support[name]:
            pytest.skip(support[name])


_support = functools.cache(filesystems.support)


class Project:
    """A project of a few tiny notebooks, laid out like this one."""

    def __init__(self, root: Path):
        self.root = root
        self.results = root / "data/results/smoke"
        (root / "notebooks").mkdir()
        (root / "data/params").mkdir(parents=True)
        self.write_profile({})

    def add(self, name: str, *code: str, parameters: str = "") -> Path:
        """Add a notebook, or write another version of it."""
        cells = [new_code_cell(COMMON + parameters, id="parameters")]
        cells[0].metadata["tags"] = ["parameters"]
        cells += [new_code_cell(text, id=f"cell-{n}") for n, text in enumerate(code)]
        notebook = new_notebook(cells=cells)
        notebook.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        path = self.root / "notebooks" / f"{name}.ipynb"
        nbformat.write(notebook, path)
        return path

    def write_profile(self, sections: dict, profile: str = "smoke") -> Path:
        path = self.root / f"data/params/{profile}.yml"
        common = {
            "results": "data/results/smoke",
            "figures": "figures/smoke",
            "scratch": "data/scratch",
            "jobs": 1,
            "engine": "loky",
            "scheduler": "",
            "force_memory_scratch": True,  # wherever pytest keeps its files
            "seed": 1,
        }
        path.write_text(yaml.safe_dump({"common": common, **sections}))
        return path

    def arguments(self, *more: str) -> list[str]:
        """Command line of the executor for this project."""
        return ["--project", str(self.root), "--profile", "smoke", *more]


@pytest.fixture
def project(tmp_path) -> Project:
    """An empty project; notebooks are added by the test."""
    return Project(tmp_path)


@pytest.fixture(scope="session")
def root() -> Path:
    """This project's own folder."""
    return ROOT
