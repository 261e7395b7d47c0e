"""The figures: complete, the same bytes for the same data, legible in grey, harmless."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from PIL import Image
from synthetic import story_events, world

from ckptlib.analysis import claims, figures, guidance, style
from ckptlib.analysis.intervals import Resampling
from ckptlib.errors import InvalidInput
from ckptlib.experiments import registry

QUICK = Resampling(resamples=100)


def _drawn(tables: dict) -> dict:
    cost = guidance.guidance(tables["latency"], how=QUICK)
    judged = pd.DataFrame({
        "claim_id": ["a", "b", "c"], "source": ["Table 1", "Table 1", "R1"],
        "verdict": list(claims.VERDICTS),
    })  # fmt: skip
    return {
        "fig1_latency_ecdf": figures.figure1_latency_ecdf(tables["latency"]),
        "fig2_group_validity": figures.figure2_crash(tables["crash"]),
        "fig3_failure_reasons": figures.figure3_reasons(tables["crash"]),
        "fig4_detection": figures.figure4_corruption(tables["corruption"]),
        "fig5_timeline": figures.figure5_timeline(tables["timeline"]),
        "fig_training": figures.figure_training(tables["training"]),
        "fig_recovery_outcomes": figures.figure_outcomes(tables["crash"]),
        "fig_process_vs_save": figures.figure_process(
            tables["latency_process"], tables["latency"], QUICK
        ),
        "fig_power_survival": figures.figure_power_survival(tables["power_loss"]),
        "fig_power_options": figures.figure_power_options(tables["power_loss"]),
        "fig_power_policies": figures.figure_power_policies(tables["power_loss"]),
        "fig_power_damage": figures.figure_power_damage(tables["power_loss"]),
        "fig_power_directories": figures.figure_power_directories(tables["power_loss"]),
        "fig_power_story": figures.figure_power_story(story_events(), 9, {6}),
        "fig_operations": figures.figure_operations(tables["crash_operations"]),
        "fig_operation_kinds": figures.figure_operation_kinds(tables["crash_operations"]),
        "fig_errors": figures.figure_errors(tables["errors"]),
        "fig_guidance": figures.figure_guidance(cost, 0.01),
        "fig_claims": figures.figure_claims(judged),
    }


@pytest.fixture(scope="module")
def drawn():
    return _drawn(world())


def test_there_is_a_drawing_for_every_figure_of_the_registry(drawn):
    assert set(drawn) == set(registry.FIGURES)


@pytest.mark.filterwarnings("error::UserWarning")  # a collapsed layout is a warning
@pytest.mark.parametrize("name", sorted(registry.FIGURES))
def test_a_saved_figure_is_complete(drawn, tmp_path, name):
    saved = figures.save(drawn[name], name, folder=tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {
        f"{name}.{end}" for end in ("pdf", "png", "csv", "json")
    }
    record = json.loads(saved.paths["json"].read_text("utf-8"))
    assert record["caption"] and record["alt"] and len(record["code_hash"]) == 64
    assert "n = " in record["caption"] and "interval" in record["caption"]
    assert len(pd.read_csv(saved.paths["csv"])) == len(drawn[name].data)
    assert f'alt="{record["alt"][:20]}' in saved._repr_html_()
    pdf = saved.paths["pdf"].read_bytes()
    assert b"/CreationDate" not in pdf and b"/Type3" not in pdf


@pytest.mark.filterwarnings("error::UserWarning")
def test_figures_of_a_tiny_run_in_a_bad_world_are_drawn_as_well(tmp_path):
    small = world("contrary", runs=3, saves=4, seeds=2)
    for name, fig in _drawn(small).items():
        figures.save(fig, name, folder=tmp_path)


def test_no_text_is_outside_the_page_or_smaller_than_seven_points(drawn):
    for name, fig in drawn.items():
        with figures.style():
            fig.draw_without_rendering()
        box, (width, height) = fig.get_tightbbox(), fig.get_size_inches()
        assert min(box.x0, box.y0) > -0.01, name
        assert box.x1 < width + 0.01 and box.y1 < height + 0.01, name
        shown = [text for text in fig.findobj(mpl.text.Text) if text.get_text().strip()]
        assert shown and min(text.get_fontsize() for text in shown) >= 7, name


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from synthetic import story_events, world
from ckptlib.analysis import figures
fig = figures.figure4_corruption(world()["corruption"])
figures.save(fig, "fig4_detection", folder=Path(sys.argv[2]))
"""


def test_the_same_data_gives_the_same_pdf_in_another_process(drawn, tmp_path):
    here = figures.save(drawn["fig4_detection"], "fig4_detection", folder=tmp_path / "here")
    tests = str(Path(__file__).parent)
    there = tmp_path / "there"
    subprocess.run([sys.executable, "-c", SCRIPT, tests, str(there)], check=True)
    assert (there / "fig4_detection.pdf").read_bytes() == here.paths["pdf"].read_bytes()


def test_other_data_gives_another_pdf(drawn, tmp_path):
    first = figures.save(drawn["fig4_detection"], "f", folder=tmp_path / "a")
    changed = figures.figure4_corruption(world("contrary")["corruption"])
    second = figures.save(changed, "f", folder=tmp_path / "b")
    assert first.paths["pdf"].read_bytes() != second.paths["pdf"].read_bytes()


@pytest.mark.parametrize("missing", ["caption", "alt", "data"])
def test_a_figure_without_caption_alt_text_or_data_is_not_written(tmp_path, missing):
    given = {"caption": "c", "alt": "a", "data": pd.DataFrame({"x": [1]})}
    given[missing] = given["data"].iloc[:0] if missing == "data" else " "
    fig = figures.PaperFigure()
    with pytest.raises(InvalidInput, match=missing):
        figures.save(fig, "f", given["caption"], given["alt"], folder=tmp_path, data=given["data"])
    assert not list(tmp_path.iterdir())


def _lightness(color: str) -> float:
    return float(np.dot(to_rgb(color), (0.299, 0.587, 0.114)))


def test_modes_differ_in_grey_by_lightness_line_marker_and_hatch():
    looks = list(style.MODES.values())
    shades = sorted(_lightness(look.color) for look in looks)
    assert min(np.diff(shades)) > 0.08
    for part in ("marker", "line", "hatch"):
        assert len({getattr(look, part) for look in looks}) == len(looks)


@pytest.mark.parametrize("looks", [style.OUTCOMES, style.REASONS, style.DAMAGE])
def test_stacked_categories_differ_in_grey_by_lightness_or_hatch(looks):
    seen = list(looks.values())
    for i, one in enumerate(seen):
        for other in seen[i + 1 :]:
            apart = abs(_lightness(one.color) - _lightness(other.color)) > 0.15
            assert apart or one.hatch != other.hatch


def test_a_png_is_200_dots_per_inch_of_a_page(drawn, tmp_path):
    saved = figures.save(drawn["fig_claims"], "f", folder=tmp_path)
    with Image.open(saved.paths["png"]) as image:
        assert image.width == round(style.PAGE * 200)


def test_drawing_leaves_the_global_style_alone():
    before = dict(mpl.rcParams)
    figures.figure4_corruption(world(seeds=2, saves=4, runs=3)["corruption"])
    assert dict(mpl.rcParams) == before


def test_the_loss_of_one_seed_is_drawn_beside_the_shares(tmp_path):
    steps = np.arange(1, 31)
    curve = pd.concat([
        pd.DataFrame({"step": steps, "loss": 2.0 / steps, "arm": arm, "mode": mode, "seed": 0})
        for arm, mode in (("uninterrupted", "atomic_dirsync"), ("killed", "atomic_dirsync"),
                          ("no_checkpoint", ""))
    ])  # fmt: skip
    fig = figures.figure_training(world(seeds=2, saves=4, runs=3)["training"], curve)
    loss, shares = fig.axes
    assert [line.get_label() for line in loss.lines] == ["uninterrupted", "killed"]
    assert "share" in shares.get_xlabel()
    figures.save(fig, "fig_training", folder=tmp_path)


def test_nothing_refused_means_nothing_to_draw():
    crash = world(seeds=2, saves=4, runs=3)["crash"]
    with pytest.raises(InvalidInput, match="no group was refused"):
        figures.figure3_reasons(crash[crash["crash_point"] == "none"])
