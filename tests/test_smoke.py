"""Every notebook, run at smoke size by the same executor that ``make reproduce`` uses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]


def test_every_notebook_runs_at_smoke_size_and_then_is_up_to_date(tmp_path):
    results, figures = tmp_path / "results", tmp_path / "figures"
    places = ["--results", str(results), "--figures", str(figures)]
    # Figures and tables of a disk in memory mean nothing, but a checkout may well lie on one.
    command = [sys.executable, "-m", "ckptlib.reproduce", "--profile", "smoke", *places]
    command += ["--scratch", str(ROOT / "data/scratch/tests"), "--force-memory-scratch"]

    first = subprocess.run(command, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout + first.stderr
    names = sorted(path.name for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
    executed = results / "notebooks"
    assert sorted(path.name for path in executed.iterdir()) == names
    for name in names:
        outputs = [o for c in nbformat.read(executed / name, 4).cells for o in c.get("outputs", ())]
        assert not [o for o in outputs if o.output_type == "error"], name

    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 0 and "Nothing to do" in second.stdout, second.stdout

    report = [sys.executable, "-m", "ckptlib.report", *places]
    done = subprocess.run(report, capture_output=True, text=True)
    assert done.returncode == 0 and (results / "report.html").is_file(), done.stderr
