"""README tells the truth: its code runs, its commands exist, its numbers are measured ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckptlib import readme
from ckptlib.crashes.filesystems import MAIN
from ckptlib.errors import InvalidInput

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
#: Where each command of the page is really run; `make -n` below shows that each target exists.
RUN_BY = {
    "make reproduce": "test_smoke.py (the same executor, at smoke size)",
    "make smoke": "test_smoke.py",
    "make report": "test_smoke.py",
    "make test": "this very run",
    "make lab": "test_lab.py",
    "make reference": "test_readme.py (readme), test_smoke.py (the executor)",
    "make setup": "what made the .venv that runs this",
    "make bench": "test_bench.py",
    "python -m ckptlib.replay": "below, of every file system",
}


def commands() -> set[str]:
    spans = re.findall(r"`(make [^`]+)`", TEXT) + re.findall(r"^    (make .+)$", TEXT, re.MULTILINE)
    modules = re.findall(r"^    \.venv/bin/(python -m \S+)", TEXT, re.MULTILINE)
    return {" ".join(span.split()[:2]) for span in spans} | set(modules)


def test_every_number_in_readme_is_that_of_the_reference_run():
    assert readme.fill(TEXT, ROOT) == TEXT, "run `make readme`"


def test_a_changed_number_in_readme_is_noticed():
    start = TEXT.index("<!-- reference:corruption -->")
    digit = re.search(r"\d", TEXT[start:])
    at = start + digit.start()
    forged = TEXT[:at] + str((int(digit[0]) + 1) % 10) + TEXT[at + 1 :]
    assert readme.fill(forged, ROOT) != forged


def test_a_page_that_lost_a_block_is_refused():
    with pytest.raises(InvalidInput, match="reference blocks"):
        readme.fill(TEXT.replace("reference:latency", "reference:latencies"), ROOT)


def test_the_code_in_readme_runs_and_resumes_in_a_second_process(tmp_path):
    assert len(PYTHON) == 1
    runs = [
        subprocess.run(
            [sys.executable, "-c", PYTHON[0]], cwd=tmp_path, capture_output=True, text=True
        )
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert runs[0].stdout.startswith("4 ")
    assert runs[1].stdout.startswith("resuming after step 19; passed over: []")


def test_every_command_in_readme_is_a_target_and_is_run_by_some_test():
    assert commands() == set(RUN_BY)
    for command in commands():
        if not command.startswith("make"):
            continue
        done = subprocess.run(
            ["make", "-n", command.split()[1]], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs_power(name)) for name in MAIN]
)
def test_a_committed_log_gives_the_rows_of_the_reference_run_in_a_fresh_process(name):
    [line] = re.findall(r"^    \.venv/bin/python (-m ckptlib\.replay .+)$", TEXT, re.MULTILINE)
    arguments = line.replace("ext4", name).split()
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal to the" in done.stdout


def test_the_number_of_lines_that_a_training_loop_needs_is_small():
    ours = [line for line in PYTHON[0].splitlines() if re.search(r"store|found|rng|state =", line)]
    assert len(ours) <= 12


def test_links_in_readme_lead_to_files_that_are_there():
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT) + re.findall(
        r"`((?:data|figures)/[\w/.]+)`", TEXT
    )
    local = [
        t for t in targets if "://" not in t and not t.startswith(("data/results", "figures/paper"))
    ]
    assert local
    for target in local:
        assert (ROOT / target).exists(), target
