"""Setting up: versions written once, and a Makefile that says what it can do."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import ckptlib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TARGETS = ("setup", "reproduce", "smoke", "test", "lint", "lab", "report", "reference")
TARGETS += ("readme", "clean", "bench")
KNOBS = ("PROFILE", "ENGINE", "SCHEDULER", "RESULTS", "FIGURES", "SCRATCH", "JOBS", "TORCH_INDEX")
KNOBS += ("ONLY",)
#: What the default torch wheel for Linux brings along: versions are pinned by torch itself.
OF_TORCH = re.compile(r"nvidia-|cuda-|triton")


def direct() -> list[Requirement]:
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    found = [Requirement(text) for texts in lists for text in texts]
    return [requirement for requirement in found if requirement.name != PROJECT["name"]]


def locked() -> dict[str, Requirement]:
    lines = (ROOT / "requirements.lock").read_text("utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    names = [canonicalize_name(pin.name) for pin in pins]
    assert len(set(names)) == len(names), "a package is locked twice"
    return dict(zip(names, pins, strict=True))


def version_of(pin: Requirement) -> str:
    return next(iter(pin.specifier)).version


# ---- versions


def test_every_locked_pin_is_one_exact_public_version():
    for pin in locked().values():
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier)), pin
        assert not pin.url and not pin.extras


def test_the_lock_is_sorted_so_that_a_change_is_one_line():
    names = [pin.name.lower() for pin in locked().values()]
    assert names == sorted(names)


def test_torch_is_the_version_that_the_suite_is_about():
    assert version_of(locked()["torch"]) == "2.13.0"


def test_every_direct_dependency_is_locked_and_the_lock_satisfies_it():
    pins = locked()
    for requirement in direct():
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version_of(pin)), requirement


def test_everything_that_the_package_imports_is_a_direct_dependency():
    home = importlib.metadata.packages_distributions()
    named = {canonicalize_name(requirement.name) for requirement in direct()}
    for path in (ROOT / "ckptlib").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names:
                found = {canonicalize_name(name) for name in home.get(top, [top])}
                assert top == "ckptlib" or found & named, f"{path.name} imports {top}"


def test_no_exact_version_is_written_beside_the_lock():
    assert not [str(requirement) for requirement in direct() if "==" in str(requirement.specifier)]
    assert "==" not in (ROOT / "environment.yml").read_text("utf-8")


def test_a_direct_dependency_is_named_once():
    names = [canonicalize_name(requirement.name) for requirement in direct()]
    assert sorted(set(names)) == sorted(names)


def test_the_lock_holds_what_the_direct_dependencies_need_and_nothing_else():
    """Walks the installed packages; pins for other systems are left out of the comparison."""
    waiting, needed = list(direct()), set()
    seen = set()
    while waiting:
        requirement = waiting.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen or OF_TORCH.match(key[0]):
            continue
        seen.add(key)
        needed.add(key[0])
        for text in importlib.metadata.requires(requirement.name) or ():
            child = Requirement(text)
            if child.marker is None or any(
                child.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
            ):
                waiting.append(child)
    here = {n for n, p in locked().items() if p.marker is None or p.marker.evaluate()}
    assert here == needed


def test_what_is_installed_is_what_is_locked():
    for name, pin in locked().items():
        if pin.marker is None or pin.marker.evaluate():
            found = importlib.metadata.version(name)
            assert found.split("+")[0] == version_of(pin), name


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0", "3.13.0"])
def test_every_locked_version_runs_on_every_python_that_is_promised(python):
    assert Requirement(f"x{PROJECT['requires-python']}").specifier.contains("3.11.0")
    for name, pin in locked().items():
        if pin.marker is None or pin.marker.evaluate():
            wanted = importlib.metadata.metadata(name).get("Requires-Python") or ""
            assert SpecifierSet(wanted).contains(python), f"{pin} wants Python {wanted}"


def test_markers_of_the_lock_are_only_for_other_systems_and_pythons():
    assert {str(pin.marker) for pin in locked().values() if pin.marker} <= {
        'sys_platform == "darwin"',
        'python_version == "3.12"',
    }
    assert default_environment()["implementation_name"] == "cpython"


def test_conda_users_get_python_from_conda_and_every_version_from_the_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
    *conda, pip = environment["dependencies"]
    python = Requirement(
        next(text for text in conda if text.startswith("python")).replace("=", "==")
    )
    assert {text.split("=")[0] for text in conda} == {"python", "pip"}
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(version_of(python))
    assert pip["pip"] == ["-r requirements.lock", "-e ."]


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == ckptlib.__version__
    assert citation["license"] == PROJECT["license"]


def test_no_folder_of_a_run_is_seen_by_git_but_the_reference_is():
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout")
    paths = ["data/results/paper/x.csv", "figures/paper/x.pdf", "data/scratch/x", ".venv/x"]
    kept = ["data/reference/x.csv", "figures/reference/x.pdf", "data/published/x.csv"]
    done = subprocess.run(
        ["git", "check-ignore", *paths, *kept], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split() == paths


# ---- the Makefile

needs_make = pytest.mark.skipif(not shutil.which("make"), reason="no make here")


def make(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    inherited = {k: v for k, v in os.environ.items() if k not in (*KNOBS, "PYTHON", "MAKEFLAGS")}
    return subprocess.run(
        ["make", *arguments],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def clone(tmp_path) -> Path:
    """A fresh clone, as far as make looks at it, in a folder with a space in its name."""
    folder = tmp_path / "fresh clone"
    folder.mkdir()
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


@needs_make
def test_make_alone_prints_every_target_and_knob_and_does_nothing(clone):
    done = make(cwd=clone)
    assert done.returncode == 0 and done.stderr == ""
    for target in TARGETS:
        assert re.search(rf"^  {target} +\S", done.stdout, re.M), target
    for knob in (*KNOBS, "PYTHON"):
        assert f"  {knob}=" in done.stdout, knob
    assert not (clone / ".venv").exists()


@needs_make
@pytest.mark.parametrize(
    "target", ["setup", "reproduce", "smoke", "test", "lint", "lab", "report", "bench"]
)
def test_every_target_of_a_fresh_clone_begins_with_the_set_up(clone, target):
    done = make("-n", target, cwd=clone)
    assert done.returncode == 0, done.stderr
    assert "-m venv" in done.stdout and "-r requirements.lock" in done.stdout


def ready(folder: Path) -> None:
    """Make the folder look set up: a Python that works, and a stamp newer than the lock."""
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/python").write_text("#!/bin/sh\nexit 0\n")
    (folder / ".venv/bin/python").chmod(0o755)
    (folder / ".venv/ready").write_text(f"{folder}\n")


@needs_make
def test_the_set_up_is_done_once_and_again_when_its_reasons_change(clone):
    ready(clone)
    assert "-m venv" not in make("-n", "lint", cwd=clone).stdout

    for name in ("requirements.lock", "pyproject.toml"):
        newer = (clone / ".venv/ready").stat().st_mtime + 5
        before = (clone / name).stat()
        os.utime(clone / name, (newer, newer))
        assert "-m venv" in make("-n", "lint", cwd=clone).stdout, name
        os.utime(clone / name, (before.st_atime, before.st_mtime))

    moved = clone.rename(clone.with_name("moved"))
    assert "-m venv" in make("-n", "lint", cwd=moved).stdout, "it still points at the old place"


@needs_make
def test_the_knobs_reach_the_executor(clone):
    ready(clone)
    knobs = {
        "PROFILE": "full",
        "ENGINE": "dask",
        "SCHEDULER": "tcp://h:1",
        "SCRATCH": "/d",
        "JOBS": "9",
    }
    command = make("-n", "reproduce", *(f"{k}={v}" for k, v in knobs.items()), cwd=clone).stdout
    for knob, value in knobs.items():
        assert f"--{knob.lower()} '{value}'" in command
    assert "--results 'data/results/full'" in command
    assert "--figures 'figures/full'" in command
    assert (
        "--profile 'smoke' --results 'data/results/smoke'" in make("-n", "smoke", cwd=clone).stdout
    )


@needs_make
def test_the_knobs_reach_the_benchmarks(clone):
    ready(clone)
    command = make("-n", "bench", "ONLY=power", "JOBS=3", "SCRATCH=/d", cwd=clone).stdout
    assert "-m ckptlib.bench --only 'power' --scratch '/d' --jobs '3'" in command


@needs_make
@pytest.mark.parametrize("command", ["python3-that-is-nowhere", "./old"])
def test_a_missing_or_old_python_is_one_clear_sentence(clone, command):
    is_new = "[ \"$2\" = 'import sys; sys.exit(sys.version_info < (3, 11))' ]"
    (clone / "old").write_text(f"#!/bin/sh\n{is_new} && exit 1\necho 3.9.6\n")
    (clone / "old").chmod(0o755)
    done = make("setup", f"PYTHON={command}", cwd=clone)
    assert done.returncode != 0
    sentence = done.stderr.splitlines()[0]
    assert "Python 3.11 or newer" in sentence and "PYTHON=" in sentence and command in sentence
    assert not (clone / ".venv").exists()


@needs_make
def test_the_lab_listens_on_this_machine_only_and_keeps_its_token():
    command = make("-n", "lab").stdout
    assert "--ServerApp.ip=127.0.0.1" in command
    assert "token" not in command and "password" not in command, "the default is a random token"


@needs_make
def test_clean_keeps_the_reference_the_environment_and_other_disks(clone):
    ready(clone)
    keep = ["data/reference/a.csv", "figures/reference/a.pdf", "data/published/claims.yml"]
    go = [
        "data/results/paper/a.csv",
        "figures/paper/a.pdf",
        "data/scratch/a",
        "ckptlib/__pycache__/a",
    ]
    disk = clone.with_name("disk")
    for path in [*(clone / name for name in (*keep, *go)), disk / "mine"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert make("clean", f"SCRATCH={disk}", f"RESULTS={disk}", cwd=clone).returncode == 0
    assert [name for name in keep if not (clone / name).exists()] == []
    assert [name for name in go if (clone / name).exists()] == []
    assert (disk / "mine").exists() and (clone / ".venv/bin/python").exists()


def test_the_makefile_uses_nothing_newer_than_make_3_81():
    text = (ROOT / "Makefile").read_text("utf-8")
    for newer in (".ONESHELL", "!=", "::=", "$(file", "&:", ".RECIPEPREFIX", "--output-sync"):
        assert newer not in text.replace("!= '", ""), newer


def test_ci_runs_make_test():
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert script.read_text("utf-8").rstrip().endswith("\nmake test")
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


def test_a_mistyped_knob_is_refused_and_the_known_ones_are_named():
    done = subprocess.run(
        ["make", "-n", "smoke", "PROFLIE=smoke"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "Unknown knob PROFLIE" in done.stderr and "PROFILE" in done.stderr
