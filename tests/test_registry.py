"""The registry names every output once, and a frame that it does not describe is refused."""

import importlib.util
import re

import numpy
import pandas
import pytest

from ckptlib.errors import InvalidInput
from ckptlib.experiments import registry
from ckptlib.experiments.registry import DTYPES, FIGURES, KINDS, OUTPUTS, TABLES, validate

# The columns that others build on, by heart.
PROMISED = {
    "latency": "trial_id mode protocol seed step payload_bytes latency_s flush_calls "
    "flush_primitive filesystem",
    "crash": "trial_id mode protocol crash_point seed step acknowledged_step recovered_step "
    "group_valid outcome rule expected reason method killed in_flight_step",
    "corruption": "trial_id target fault seed step bytes_changed effective detected load_error "
    "schema_mismatch digest_mismatch file_sha_mismatch nonfinite acknowledged_step recovered_step",
    "claims": "claim_id source published measured ci_low ci_high verdict note",
}
ROW = {
    "trial_id": "t1",
    "process": 1,
    "step": 3,
    "loss": 0.5,
    "arm": "killed",
    "mode": "unsafe",
    "seed": 7,
}

each_output = pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)


@pytest.mark.parametrize("name", PROMISED)
def test_the_columns_that_others_build_on_are_there(name):
    assert set(PROMISED[name].split()) <= set(OUTPUTS[name].columns)


@each_output
def test_every_column_is_documented_typed_and_of_a_known_kind(output):
    for name, column in output.columns.items():
        assert column.kind in KINDS and column.dtype in DTYPES and column.doc, name
        assert re.fullmatch("[a-z0-9_]+", name)
        if name.endswith("_s"):
            assert column.unit == "s" and column.kind == "timing", name


@each_output
def test_the_key_is_made_of_stable_columns(output):
    assert set(output.key) <= set(output.stable())


@each_output
def test_the_module_of_an_output_exists(output):
    assert importlib.util.find_spec(output.module)


def test_outputs_figures_and_tables_name_notebooks_that_are_there(root):
    there = {path.stem for path in (root / "notebooks").glob("*.ipynb")}
    named = {output.notebook for output in OUTPUTS.values()} | {*FIGURES.values(), *TABLES.values()}
    assert named <= there


def test_a_frame_comes_out_in_order_sorted_and_typed():
    rows = [{**ROW, "trial_id": name, "step": None} for name in ("t2", "t1")]
    frame = validate(pandas.DataFrame(rows)[list(reversed(ROW))], "training_curve")
    assert list(frame.columns) == list(ROW)
    assert list(frame["trial_id"]) == ["t1", "t2"]
    assert frame["step"].isna().all() and str(frame["step"].dtype) == "Int64"


def test_the_text_of_a_table_is_canonical():
    row = {**ROW, "step": numpy.int64(3), "loss": numpy.float64(0.1) + 0.2, "mode": None}
    frame = validate(pandas.DataFrame([row]), "training_curve")
    text = frame.to_csv(index=False, lineterminator="\n").splitlines()[1]
    assert text == "t1,1,3,0.30000000000000004,killed,,7"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame.drop(columns="loss"), r"also \['loss'\]"),
        (lambda frame: frame.assign(extra=1), r"unknown \['extra'\]"),
        (lambda frame: frame.assign(step=1.5), "column step .* another type; expected int"),
        (lambda frame: frame.assign(loss="low"), "column loss .* another type; expected float"),
        (lambda frame: pandas.concat([frame, frame]), "several rows with one key"),
    ],
)
def test_a_frame_that_the_registry_does_not_describe_is_refused(change, message):
    with pytest.raises(InvalidInput, match=message):
        validate(change(pandas.DataFrame([ROW])), "training_curve")


def test_an_output_that_nobody_registered_is_refused():
    with pytest.raises(InvalidInput, match=r"unknown output.*Register it"):
        registry.output("trainings")
