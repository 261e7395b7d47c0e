"""The statistics: known values, properties that hold for all inputs, and coverage by simulation."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import world

from ckptlib.analysis import intervals, stats
from ckptlib.analysis.intervals import Resampling
from ckptlib.errors import InvalidInput

counts = st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [(400, 400, 99.0, 100.0), (0, 400, 0.0, 1.0), (0, 10, 0.0, 27.8), (399, 400, 98.6, 100.0)],
)
def test_wilson_gives_the_intervals_that_the_paper_prints(k, n, low, high):
    found = stats.proportion(k, n, method="wilson").scaled(100)
    assert (round(found.low, 1), round(found.high, 1)) == (low, high)


@pytest.mark.parametrize(
    ("k", "n", "safety", "method"),
    [
        (3, 10, False, "Wilson"),
        (0, 10, False, "exact"),
        (10, 10, False, "exact"),
        (3, 10, True, "exact"),
        (0, 10, True, "exact, one-sided"),
        (10, 10, True, "exact, one-sided"),
    ],
)
def test_a_proportion_says_which_interval_it_uses(k, n, safety, method):
    assert stats.proportion(k, n, safety).method == method


@given(st.integers(20, 5000))
def test_the_bound_for_no_failure_in_n_is_close_to_three_over_n(n):
    none, all_ = stats.proportion(0, n, safety=True), stats.proportion(n, n, safety=True)
    assert none.low == 0 and none.high == pytest.approx(1 - 0.05 ** (1 / n))
    assert none.high == pytest.approx(3 / n, rel=0.08)
    assert all_.high == 1 and 1 - all_.low == pytest.approx(none.high)


@given(counts, st.booleans())
def test_every_interval_contains_its_rate_and_mirrors_that_of_the_failures(case, safety):
    k, n = case
    found, mirror = stats.proportion(k, n, safety), stats.proportion(n - k, n, safety)
    assert 0 <= found.low <= found.rate <= found.high <= 1
    assert mirror.low == pytest.approx(1 - found.high, abs=1e-9)


@given(counts)
def test_an_exact_interval_of_all_or_nothing_is_wider_when_two_sided(case):
    _, n = case
    assert stats.proportion(0, n).high > stats.proportion(0, n, safety=True).high


def test_no_trial_gives_no_interval():
    found = stats.proportion(0, 0)
    assert found.method.startswith("not estimable") and np.isnan([found.low, found.high]).all()


@pytest.mark.parametrize(("k", "n"), [(-1, 3), (4, 3), (1, -1)])
def test_impossible_counts_are_refused(k, n):
    with pytest.raises(InvalidInput, match="0 <= k <= n"):
        stats.proportion(k, n)
    with pytest.raises(InvalidInput, match="0 <= k <= n"):
        stats.difference(k, n, 1, 2)


def test_an_unknown_interval_method_is_refused():
    with pytest.raises(InvalidInput, match="wilson"):
        stats.proportion(1, 2, method="wald")


def test_newcombe_gives_the_interval_of_his_example():
    # Newcombe 1998, Statistics in Medicine 17:873, Table II, method 10, comparison (a).
    found = stats.difference(56, 70, 48, 80)
    assert found.rate == pytest.approx(0.2)
    assert (round(found.low, 4), round(found.high, 4)) == (0.0524, 0.3339)


@given(counts, counts)
def test_a_difference_changes_its_sign_when_the_arms_are_exchanged(first, second):
    there, back = stats.difference(*first, *second), stats.difference(*second, *first)
    assert there.low <= there.rate + 1e-12 and there.rate <= there.high + 1e-12
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-9)


def test_mcnemar_is_the_binomial_test_of_the_discordant_pairs():
    first = [True] * 8 + [False] * 1 + [True] * 20
    second = [False] * 8 + [True] * 1 + [True] * 20
    # 1 or fewer, or 8 or more, of 9 fair coins
    assert stats.mcnemar(first, second).pvalue == pytest.approx(2 * (1 + 9) / 2**9)
    with pytest.raises(InvalidInput, match="one length"):
        stats.mcnemar([True], [True, False])


def test_holm_adjusts_in_the_order_given():
    assert stats.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert stats.holm([]) == []


@settings(max_examples=10)  # statsmodels takes some 20 ms each
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_never_lowers_a_p_value(pvalues):
    adjusted = stats.holm(pvalues)
    assert all(p <= q + 1e-12 and q <= 1 for p, q in zip(pvalues, adjusted, strict=True))


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=50))
def test_the_ecdf_rises_to_one(values):
    found = stats.ecdf(values)
    assert found["value"].is_monotonic_increasing
    assert found["probability"].is_monotonic_increasing
    assert found["probability"].iloc[-1] == pytest.approx(1)


def test_the_interval_of_a_median_is_a_pair_of_order_statistics():
    found = stats.quantile_interval(range(1, 11), 50)
    # The 2nd and 9th of 10: coverage 1 - 2 * 11 / 1024, the shortest pair that reaches 95%.
    assert (found.rate, found.low, found.high) == (5.5, 2, 9)


def test_ten_values_have_no_interval_for_p99():
    found = stats.quantile_interval(range(1, 11), 99)
    assert found.method == "not estimable: 10 values are too few for p99"
    assert np.isnan(found.high)


def test_percentiles_are_linear_interpolations_over_all_saves():
    runs = pd.DataFrame(np.arange(60.0).reshape(30, 2))
    assert stats.percentile(runs, 90).rate == pytest.approx(0.9 * 59)


@pytest.mark.parametrize("q", [50, 90, 99])
def test_fewer_than_thirty_runs_print_not_estimable(q):
    few = pd.DataFrame(np.ones((29, 40)))
    found = stats.percentile(few, q)
    assert found.method == "not estimable: 29 runs, 30 needed"
    assert np.isnan([found.low, found.high]).all() and found.rate == 1


def test_equal_seeds_give_equal_bounds_and_other_seeds_give_others():
    runs = pd.DataFrame(np.random.default_rng(0).lognormal(size=(30, 10)))
    first, again = (stats.percentile(runs, 90, Resampling(resamples=200)) for _ in range(2))
    other = stats.percentile(runs, 90, Resampling(resamples=200, seed=1))
    assert first == again
    assert (other.low, other.high) != (first.low, first.high)


def test_a_paired_ratio_does_not_see_what_slows_both_arms_of_a_run():
    rng = np.random.default_rng(3)
    pace = rng.lognormal(0, 1, (30, 1))
    base = pd.DataFrame(pace * rng.lognormal(0, 0.01, (30, 10)))
    paired = stats.ratio(2 * base, base, 50)
    shuffled = stats.ratio(2 * base.iloc[rng.permutation(30)].reset_index(drop=True), base, 50)
    assert (paired.low, paired.high) == pytest.approx((2, 2))
    assert shuffled.high - shuffled.low > 0.5


def test_arms_with_other_runs_cannot_be_paired():
    runs = pd.DataFrame(np.ones((30, 2)))
    with pytest.raises(InvalidInput, match="same runs"):
        stats.ratio(runs, runs.iloc[:-1], 50)


def test_a_run_that_was_cut_short_is_not_summarised():
    frame = pd.DataFrame({"seed": [1, 1, 2], "step": [1, 2, 1], "latency_s": [1.0, 1.0, 1.0]})
    with pytest.raises(InvalidInput, match="same number of saves"):
        stats.run_matrix(frame)
    with pytest.raises(InvalidInput, match="no save"):
        stats.run_matrix(frame.iloc[:0])


def _coverage(draw, truth: float, q: float, repetitions: int) -> float:
    hits = 0
    for _ in range(repetitions):
        found = stats.percentile(draw(), q, Resampling(resamples=300))
        hits += found.low <= truth <= found.high
    return hits / repetitions


def test_the_bootstrap_over_runs_covers_where_one_over_saves_does_not():
    rng = np.random.default_rng(11)

    def runs() -> np.ndarray:  # a pace a run; the median of all is exactly 1
        return np.exp(rng.normal(0, 0.3, (40, 1)) + rng.normal(0, 0.3, (40, 20)))

    over_runs = _coverage(lambda: pd.DataFrame(runs()), 1.0, 50, 150)
    over_saves = _coverage(lambda: pd.DataFrame(runs().reshape(-1, 1)), 1.0, 50, 150)
    # Of 150 at 95%, 134 or more are seen in 99.8 of 100 such tests.
    assert over_runs >= 134 / 150
    assert over_saves < 0.75


def test_the_latency_summary_has_a_row_for_each_arm_and_percentile():
    found = stats.latency_summary(world()["latency"], how=Resampling(resamples=100))
    assert len(found) == 24
    assert (found["low"] <= found["estimate"]).all() and (found["estimate"] <= found["high"]).all()
    assert set(found["n_runs"]) == {40} and set(found["n_saves"]) == {1600}


def test_a_batched_arm_is_held_against_unsafe_per_file():
    found = stats.overhead_summary(world()["latency"], (50,), Resampling(resamples=100))
    pairs = set(zip(found["protocol"], found["baseline"], strict=True))
    assert pairs == {
        ("per_file", "unsafe per_file"),
        ("batched", "unsafe per_file"),
        ("single_file", "unsafe single_file"),
    }
    latency = world()["latency"]
    with pytest.raises(InvalidInput, match="unsafe"):
        stats.overhead_summary(latency[latency["mode"] != "unsafe"])


def test_the_paired_ratio_of_processes_needs_the_same_runs():
    process = world()["latency_process"]
    assert stats.process_ratio(process, "atomic_dirsync", "unsafe").n == 30
    with pytest.raises(InvalidInput, match="same process runs"):
        stats.process_ratio(process.iloc[1:], "atomic_dirsync", "unsafe")


def test_modes_are_compared_on_the_same_crashes_only():
    crash = world()["crash"]
    killed = crash[(crash["method"] == "sigkill") & (crash["protocol"] != "single_file")]
    found = stats.compare_modes(killed, ["mixed"])
    assert list(found["pairs"]) == [600] * 4  # three pairs per_file, one batched
    assert (found["adjusted"] == 1).all()
    torn = killed.assign(outcome=killed["outcome"].where(killed["mode"] != "unsafe", "mixed"))
    found = stats.compare_modes(torn, ["mixed"]).set_index(["protocol", "first", "second"])
    assert found.loc[("per_file", "unsafe", "atomic_dirsync"), "only_first"] == 600
    assert found.loc[("per_file", "unsafe", "atomic_dirsync"), "adjusted"] < 1e-9
    assert found.loc[("batched", "atomic_nodirsync", "atomic_dirsync"), "adjusted"] == 1
    with pytest.raises(InvalidInput, match="same crashes"):
        stats.compare_modes(killed.iloc[1:], ["mixed"])


def test_names_are_shown_in_one_order():
    assert stats.in_order(["zz", "atomic_dirsync", "unsafe"]) == ["unsafe", "atomic_dirsync", "zz"]


def test_scaling_an_interval_moves_its_bounds_and_keeps_its_counts():
    found = intervals.Interval(1.5, 1.2, 2.0, "m", 9, 3).scaled(100, -100)
    assert (found.rate, found.low, found.high) == pytest.approx((50, 20, 100))
    assert (found.n, found.k) == (9, 3)
