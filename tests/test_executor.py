"""The executor of the notebooks: what it refuses, runs, keeps, leaves out, and how it stops."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from ckptlib.errors import InvalidInput
from ckptlib.experiments import registry
from ckptlib.reproduce.__main__ import main
from ckptlib.reproduce.parameters import effective, notebooks
from ckptlib.reproduce.stamps import Work, common_inputs

APPEND = "with open('log.txt', 'a') as log:\n    log.write({name!r} + '\\n')"


def appends(name: str) -> str:
    return APPEND.format(name=name)


def log_of(project) -> list[str]:
    path = project.root / "log.txt"
    return path.read_text().splitlines() if path.exists() else []


# ---- what is refused, before anything runs


def test_an_unknown_parameter_is_refused_before_anything_is_made(project, capsys):
    project.add("01_one", appends("one"), parameters="seeds: int = 2  # runs\n")
    project.write_profile({"01_one": {"sedes": 3}})

    assert main(project.arguments()) == 2

    message = capsys.readouterr().err
    assert "no parameter 'sedes'" in message and "smoke.yml" in message and "seeds" in message
    assert "Traceback" not in message
    assert not project.results.exists() and not log_of(project)


@pytest.mark.parametrize("value", ["3", 2.0, True, None, [3]])
def test_a_value_of_another_type_is_refused(project, value):
    project.add("01_one", parameters="seeds: int = 2  # runs\n")
    project.write_profile({"01_one": {"seeds": value}})
    with pytest.raises(InvalidInput, match=r"'seeds' of 01_one .* expected int; found"):
        effective(project.root, "smoke", {})


def test_a_whole_number_is_accepted_where_a_float_is_declared(project):
    project.add("01_one", parameters="share: float = 0.5  # part\n")
    project.write_profile({"01_one": {"share": 1}})
    assert effective(project.root, "smoke", {})["01_one"]["share"] == 1


def test_a_parameter_without_a_type_is_refused(project):
    project.add("01_one", parameters="seeds = 2  # runs\n")
    project.write_profile({"01_one": {"seeds": 2}})
    with pytest.raises(InvalidInput, match="no usable type for 'seeds'"):
        effective(project.root, "smoke", {})


def test_a_section_without_a_notebook_is_refused(project):
    project.add("01_one")
    project.write_profile({"01_won": {}})
    with pytest.raises(InvalidInput, match=r"01_won, which is no notebook.*01_one"):
        effective(project.root, "smoke", {})


@pytest.mark.parametrize("text", ["common: [1, 2]", "just words", "common: {a: 1", "", "\t: x"])
def test_a_profile_that_is_no_table_of_parameters_is_refused(project, text):
    project.add("01_one")
    (project.root / "data/params/odd.yml").write_text(text)
    with pytest.raises(InvalidInput, match=r"odd\.yml"):
        effective(project.root, "odd", {})


def test_an_unknown_profile_is_refused_with_the_known_ones(project, capsys):
    project.add("01_one")
    assert main(["--project", str(project.root), "--profile", "huge"]) == 2
    message = capsys.readouterr().err
    assert "unknown profile" in message and "'huge'" in message and "smoke" in message


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [("--engine", "slurm", "engine"), ("--jobs", "0", "jobs"), ("--only", "01_won", "01_one")],
)
def test_a_wrong_option_is_refused_before_anything_is_made(project, capsys, option, value, word):
    project.add("01_one", appends("one"))
    assert main(project.arguments(option, value)) == 2
    assert word in capsys.readouterr().err
    assert not project.results.exists() and not log_of(project)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm here")
def test_a_scratch_folder_in_memory_is_refused_before_anything_is_made(project, capsys):
    project.add("01_one", appends("one"))
    profile = project.write_profile({})
    profile.write_text(profile.read_text().replace("scratch: true", "scratch: false"))
    assert main(project.arguments("--scratch", "/dev/shm/ckptlib-test")) == 2
    assert "in memory" in capsys.readouterr().err
    assert not project.results.exists() and not Path("/dev/shm/ckptlib-test").exists()


def test_a_results_folder_of_somebody_else_is_left_alone(project, capsys):
    project.add("01_one", appends("one"))
    theirs = project.root / "theirs"
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("years of work")

    assert main(project.arguments("--results", "theirs")) == 2

    assert "did not make" in capsys.readouterr().err
    assert [path.name for path in theirs.iterdir()] == ["thesis.tex"]


def test_a_missing_upstream_table_is_named_before_anything_runs(project, capsys, monkeypatch):
    entry = registry.Output("crash", "03_crash", "none", {})
    monkeypatch.setattr(registry, "OUTPUTS", {"crash": entry})
    project.add("09_findings", appends("nine"))
    assert main(project.arguments("--only", "09_findings")) == 2
    message = capsys.readouterr().err
    assert "crash.csv" in message and "09_findings builds on is missing" in message
    assert not log_of(project)


def test_two_runs_never_share_a_results_folder(project, capsys):
    project.add("01_one", appends("one"))
    (project.results / ".stamps").mkdir(parents=True)
    with (project.results / ".stamps/lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main(project.arguments()) == 2
    assert "another run is using" in capsys.readouterr().err and not log_of(project)


# ---- what runs, and what is left out


def test_the_findings_run_last_whatever_their_number(project):
    for name in ("10_savers", "09_findings", "00_tour", "02_latency"):
        project.add(name)
    assert list(notebooks(project.root)) == ["00_tour", "02_latency", "10_savers", "09_findings"]


def test_a_run_is_complete_and_a_second_one_does_nothing_and_says_so(project, capsys):
    project.add(
        "01_one", appends("one"), "assert seeds == 7", parameters="seeds: int = 2  # runs\n"
    )
    project.add("02_two", appends("two"))
    project.write_profile({"01_one": {"seeds": 7}})

    assert main(project.arguments()) == 0
    assert "[1/2] 01_one (not run yet)" in capsys.readouterr().out
    executed = project.results / "notebooks/01_one.ipynb"
    assert log_of(project) == ["one", "two"]
    assert nbformat.read(executed, 4).cells[-1].execution_count is not None

    assert main(project.arguments("--jobs", "2")) == 0  # no result depends on the workers
    assert "Nothing to do: all 2 notebooks are up to date" in capsys.readouterr().out
    assert log_of(project) == ["one", "two"]

    project.add("02_two", appends("two") + "  # changed")
    assert main(project.arguments()) == 0
    assert "02_two (changed: notebook)" in capsys.readouterr().out
    assert log_of(project) == ["one", "two", "two"]
    assert not list(executed.parent.glob(".*")), "nothing unfinished may stay"


@pytest.fixture
def work(project, monkeypatch) -> Work:
    """A notebook that is up to date: a table, its provenance and a figure are there."""
    monkeypatch.setattr(
        registry,
        "OUTPUTS",
        {
            "crash": registry.Output("crash", "03_crash", "none", {}),
            "latency": registry.Output("latency", "02_latency", "none", {}),
        },
    )
    monkeypatch.setattr(registry, "FIGURES", {"fig2": "03_crash"})
    monkeypatch.setattr(registry, "TABLES", {"table3": "03_crash"})
    source = project.add("03_crash", 'run.read("latency")')
    results, figures = project.root / "results", project.root / "figures"
    parameters = {"seeds": 2, "jobs": 1, "scratch": "data/scratch"}
    work = Work(source, parameters, results, figures, results / "notebooks/03_crash.ipynb")
    for path in [*work.products(), results / "latency.csv"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    work.write_stamp(work.inputs(common_inputs(project.root, project.root)))
    return work


def why(work: Work, **changed) -> str:
    work = Work(**{**work.__dict__, **changed})
    root = work.notebook.parents[1]
    return work.why_run(work.inputs(common_inputs(root, root)))


def test_nothing_is_the_reason_while_nothing_has_changed(work):
    assert why(work) == ""
    assert why(work, parameters={"seeds": 2, "jobs": 9, "scratch": "elsewhere"}) == ""


def test_every_kind_of_change_is_a_reason_and_is_named(work, monkeypatch):
    assert why(work, parameters={**work.parameters, "seeds": 3}) == "changed: parameters"

    table = work.results / "latency.csv"
    table.write_text("other numbers")
    assert why(work) == "changed: upstream tables"
    table.write_text(table.name)

    published = work.notebook.parents[1] / "data/published/claims.yml"
    published.parent.mkdir()
    published.write_text("claims: []")
    assert why(work) == "changed: data"
    published.unlink()

    monkeypatch.setattr("ckptlib.provenance.versions", lambda: {"torch": "0.0"})
    assert why(work) == "changed: versions"
    monkeypatch.undo()


@pytest.mark.parametrize("index", range(8))
def test_no_output_may_be_missing_or_altered(work, index):
    path = work.products()[index]
    path.write_text("altered")
    assert why(work) == f"altered: {path.name}"
    path.unlink()
    assert why(work) == f"missing: {path.name}"


def test_all_outputs_are_watched_by_the_test_above(work):
    assert len(work.products()) == 8


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"inputs": 1, "outputs": 2}', "\0"])
def test_a_damaged_stamp_is_a_reason_to_run_again(work, text):
    work.stamp.write_text(text)
    assert why(work) == "its stamp is damaged"


def test_a_notebook_that_does_not_make_what_it_promises_has_failed(project, capsys, monkeypatch):
    monkeypatch.setattr(registry, "FIGURES", {"fig_one": "01_one"})
    project.add("01_one", appends("one"))
    assert main(project.arguments()) == 1
    assert "fig_one.pdf" in capsys.readouterr().err
    assert main(project.arguments()) == 1, "it is not up to date"


# ---- what can't run on every machine

NO_XFS = "mkfs.xfs is missing: apt install xfsprogs"
#: Leaves xfs out, or everything, as it is told; draws only what it has.
POWER = """\
from pathlib import Path
import pandas
from ckptlib.experiments import outputs, registry
able = Path("able").read_text().split()
columns = registry.output("power_logs").columns
row = {name: "" if column.dtype == "text" else None for name, column in columns.items()}
frame = pandas.DataFrame([{**row, "trial_id": name} for name in able], columns=list(columns))
left_out = {name: "as it was then" for name in ("ext4", "xfs") if name not in able}
outputs.write(Path(results), "power_logs", frame, facts={"skipped": left_out, "root": True})
if able:
    for kind in ("pdf", "png", "json"):
        Path(figures, f"fig_power.{kind}").write_text(kind)
with open("log.txt", "a") as log:
    log.write(" ".join(able) + "\\n")
"""


@pytest.fixture
def power(project, monkeypatch):
    """Run a notebook that makes what the machine can; ``able`` are the file systems that can."""
    entry = registry.Output("power_logs", "06_power_loss", "none", {})
    monkeypatch.setattr(registry, "OUTPUTS", {"power_logs": entry})
    monkeypatch.setattr(registry, "FIGURES", {"fig_power": "06_power_loss"})
    monkeypatch.setattr(registry, "TABLES", {})
    project.add("06_power_loss", POWER)

    def run(able: str, *more: str) -> int:
        (project.root / "able").write_text(able)
        reasons = {name: "" if name in able.split() else NO_XFS for name in ("ext4", "xfs")}
        monkeypatch.setattr("ckptlib.crashes.filesystems.support", lambda: reasons)
        return main(project.arguments(*more))

    return run


def test_what_was_skipped_is_said_every_time_with_the_reason_that_holds_now(power, capsys):
    assert power("") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"power loss: skipped on ext4, xfs: {NO_XFS}"
    assert not [line for line in said if "used root" in line], "nothing was made with it"
    assert power("") == 0
    said = capsys.readouterr().out.splitlines()
    assert "Nothing to do" in said[0] and said[1] == f"power loss: skipped on ext4, xfs: {NO_XFS}"


def test_what_was_skipped_is_made_once_it_can_run_and_root_is_told(power, project, capsys):
    assert power("") == power("ext4") == 0
    said = capsys.readouterr().out
    assert "06_power_loss (can run now: ext4)" in said
    assert "power loss: used root, which it needs" in said
    assert said.splitlines()[-1] == f"power loss: skipped on xfs: {NO_XFS}"
    assert power("ext4 xfs") == power("ext4 xfs") == 0
    said = capsys.readouterr().out
    assert "(can run now: xfs)" in said and "skipped on" not in said
    assert log_of(project) == ["", "ext4", "ext4 xfs"]


def test_what_root_has_made_is_kept_by_a_run_that_could_not_make_it(power, project, capsys):
    assert power("ext4 xfs") == power("") == 0
    assert "Nothing to do" in capsys.readouterr().out
    assert log_of(project) == ["ext4 xfs"]


def test_figures_of_an_earlier_run_do_not_stand_beside_a_skipped_one(power, project, capsys):
    assert power("ext4 xfs") == 0
    assert len(list((project.root / "figures/smoke").iterdir())) == 3
    assert power("", "--force") == 0
    assert list((project.root / "figures/smoke").iterdir()) == []
    assert power("") == 0
    assert "Nothing to do" in capsys.readouterr().out


def test_figures_of_what_was_made_in_part_are_demanded(power, project, capsys):
    project.add("06_power_loss", POWER.replace("if able:", "if False:"))
    assert power("ext4") == 1
    assert "fig_power.pdf" in capsys.readouterr().err


# ---- how it fails and stops


def test_a_failing_notebook_is_kept_as_executed_and_named(project, capsys):
    project.add(
        "01_one",
        "print('so far')",
        "raise ValueError('too small\\n\\nTraceback\\n a long story')",
        appends("one"),
    )
    project.add("02_two", appends("two"))

    assert main(project.arguments()) == 1

    message = capsys.readouterr().err
    kept = project.results / "notebooks/01_one.failed.ipynb"
    assert (
        "01_one failed: ValueError in cell [4]: too small" in message and str(kept.name) in message
    )
    assert "Traceback" not in message and len(message.splitlines()) <= 3
    assert "so far" in json.dumps(nbformat.read(kept, 4))
    assert not log_of(project), "later cells and notebooks must not run"

    project.add("01_one", appends("one"))
    assert main(project.arguments()) == 0
    assert not kept.exists() and log_of(project) == ["one", "two"]


def test_a_kernel_that_dies_is_reported_like_an_error(project, capsys):
    project.add("01_one", "import os\nos._exit(9)")
    assert main(project.arguments()) == 1
    message = capsys.readouterr().err
    assert "01_one failed" in message and "died" in message.lower()
    assert (project.results / "notebooks/01_one.failed.ipynb").exists()


def test_the_kernel_is_this_interpreter_whatever_a_user_has_installed(project, monkeypatch):
    theirs = project.root / "jupyter/kernels/python3/kernel.json"
    theirs.parent.mkdir(parents=True)
    spec = {"argv": ["/bin/false"], "display_name": "theirs", "language": "python"}
    theirs.write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(project.root / "jupyter"))
    project.add(
        "01_one",
        "import os, pathlib, sys\n"
        "pathlib.Path('log.txt').write_text(f\"{sys.executable}\\n{os.environ['OMP_NUM_THREADS']}\")",
    )
    assert main(project.arguments()) == 0
    assert log_of(project) == [sys.executable, "1"]


STOPPED = "Stopped. Finished notebooks and trials are kept: the same command continues."
SLOW = """\
import os, pathlib, subprocess, sys, time
if not pathlib.Path("quick").exists():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path("pids.part").write_text(f"{os.getpid()} {child.pid}")
    os.replace("pids.part", "pids")
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_and_no_half_and_the_next_run_goes_on(project, number):
    project.add("01_one", appends("one"))
    project.add("02_two", SLOW, appends("two"))
    command = [sys.executable, "-m", "ckptlib.reproduce", *project.arguments()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pids = project.root / "pids"
    while not pids.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    _, message = process.communicate()

    assert process.returncode == 130
    assert message.strip() == STOPPED
    assert not [pid for pid in map(int, pids.read_text().split()) if psutil.pid_exists(pid)]
    left = [path.name for path in (project.results / "notebooks").iterdir()]
    assert left == ["01_one.ipynb"]

    (project.root / "quick").touch()
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert log_of(project) == ["one", "two"], again.stdout
    assert re.search(r"1 of 2 notebooks ran", again.stdout)


@pytest.mark.parametrize("jobs", ["abc", "", "1.5", "0"])
def test_a_number_of_workers_that_is_none_is_one_sentence_that_names_the_knob(
    project, capsys, jobs
):
    project.add("01_a", "1")
    assert main(project.arguments("--jobs", jobs)) == 2
    assert "JOBS" in capsys.readouterr().err
    assert not project.results.exists()


def test_a_scheduler_that_does_not_answer_is_found_before_anything_runs(project, capsys):
    project.add("01_a", "1")
    options = ["--engine", "dask", "--scheduler", "tcp://127.0.0.1:1"]
    assert main(project.arguments(*options)) == 2
    assert "no Dask scheduler answers" in capsys.readouterr().err
    assert not project.results.exists()


@pytest.mark.parametrize("knob", ["results", "figures"])
def test_a_folder_that_cannot_be_written_is_found_before_anything_runs(project, capsys, knob):
    project.add("01_a", "1")
    assert main(project.arguments(f"--{knob}", "/proc/nowhere")) == 2
    said = capsys.readouterr().err
    assert knob.upper() in said and "/proc/nowhere" in said
    assert not project.results.exists()


def test_a_negative_seed_is_refused_before_anything_runs(project, capsys):
    project.add("01_a", "1")
    project.write_profile({"01_a": {"seed": -1}})
    assert main(project.arguments()) == 2
    assert "seed" in capsys.readouterr().err
