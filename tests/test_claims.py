"""The claims: every rule has teeth, every mistake in claims.yml has a sentence."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import yaml
from synthetic import world

from ckptlib.analysis import claims, guidance, measures
from ckptlib.analysis.intervals import Interval
from ckptlib.errors import InvalidInput, MissingInput
from ckptlib.experiments import registry

DECLARED = claims.load_claims()
JUDGED = [claim for claim in DECLARED if claim.rule["name"] != "not_comparable"]


def evaluated(tables: dict, *names: str) -> pd.DataFrame:
    """The named claims, judged, by id."""
    chosen = [claim for claim in DECLARED if claim.id in names]
    return claims.evaluate(chosen, tables).set_index("claim_id")


@pytest.fixture(scope="module")
def verdicts():
    kinds = ("paper", "contrary")
    return {kind: claims.evaluate(DECLARED, world(kind)).set_index("claim_id") for kind in kinds}


def test_at_least_twenty_claims_are_judged_and_only_a_machines_times_are_not():
    assert len(JUDGED) >= 20
    spared = {claim.id for claim in DECLARED} - {claim.id for claim in JUDGED}
    assert spared == {
        *(f"latency_{m}_p{q}" for m in ("unsafe", "nodirsync", "dirsync") for q in (50, 90, 99)),
        "process_dirsync_p99",
        "flush_is_plain_fsync",
    }


@pytest.mark.parametrize("claim", JUDGED, ids=lambda claim: claim.id)
def test_a_claim_is_reproduced_where_it_is_true_and_differs_where_it_is_not(claim, verdicts):
    assert verdicts["paper"].loc[claim.id, "verdict"] == "reproduced"
    assert verdicts["contrary"].loc[claim.id, "verdict"] == "differs"


def test_every_note_is_one_sentence_and_the_table_fits_the_registry(verdicts):
    for table in verdicts.values():
        frame = registry.validate(table.reset_index(), "claims")
        assert frame["note"].str.fullmatch(r"[A-Z0-9].*\.").all()
        assert not frame["note"].str.contains("nan").any()
        assert set(frame["verdict"]) <= set(claims.VERDICTS)


def test_the_readable_table_keeps_the_declared_order_and_every_claim(verdicts):
    shown = claims.readable(verdicts["paper"].reset_index(), DECLARED)
    assert shown["claim"].to_list() == [claim.says for claim in DECLARED]
    row = shown[shown["claim"] == "Every flipped bit is detected."].iloc[0]
    assert row["here [95% CI]"] == "100% [99.25, 100]"


def test_a_tiny_run_judges_counts_and_leaves_intervals_alone():
    tiny = claims.evaluate(DECLARED, world(runs=3, saves=4, seeds=2)).set_index("claim_id")
    assert tiny.loc["overhead_dirsync_p50", "verdict"] == "not_comparable"
    assert tiny.loc["overhead_dirsync_p50", "note"] == "Not estimable: 3 runs, 30 needed."
    assert tiny.loc["bitflip_detected", "verdict"] == "reproduced"
    assert tiny.loc["zerorange_detected_as_counted", "verdict"] == "not_comparable"


def test_trials_that_are_not_there_are_no_evidence():
    tables = world()
    crash = tables["crash"]
    tables["crash"] = crash[crash["method"] != "sigkill"]
    found = evaluated(tables, "nothing_half_installed")
    assert found.loc["nothing_half_installed", "verdict"] == "not_comparable"
    assert found.loc["nothing_half_installed", "note"] == "Not estimable: no trial."


def test_one_lost_checkpoint_in_a_state_that_the_kernel_mounts_differs():
    tables = world()
    loss = tables["power_loss"]
    own = loss[(loss["mode"] == "atomic_dirsync") & (loss["protocol"] == "batched")]
    own = own[(own["omitted"] == "") & own["acknowledged_step"].notna()]
    for refused, verdict in (("EINVAL", "reproduced"), ("", "differs")):
        worse = loss.copy()
        worse.loc[own.index[0], ["outcome", "mount_error"]] = ["lost_acknowledged", refused]
        found = evaluated(tables | {"power_loss": worse}, "rename_is_durable_with_dirsync")
        assert found["verdict"].item() == verdict


def test_without_any_recorded_log_the_durability_of_a_rename_is_not_judged():
    tables = world()
    tables["power_loss"] = tables["power_loss"].iloc[:0]
    names = ("rename_is_durable_with_dirsync", "rename_may_be_lost_without_dirsync")
    found = evaluated(tables, *names)
    assert set(found["verdict"]) == {"not_comparable"}
    assert set(found["note"]) == {"Not estimable: no trial."}


def test_one_undetected_fault_among_thousands_differs():
    tables = world()
    damaged = tables["corruption"].copy()
    damaged.loc[damaged.index[damaged["effective"]][-1], "detected"] = False
    found = evaluated(tables | {"corruption": damaged}, "every_effective_fault_detected")
    assert found.loc["every_effective_fault_detected", "verdict"] == "differs"


def _found(rate, low, high, n=40, k=None) -> Interval:
    return Interval(rate, low, high, "a method", n, k)


@pytest.mark.parametrize(
    ("rule", "found", "parameters", "verdict"),
    [
        ("interval_contains", _found(5, 4, 6), {"widest": 1}, "reproduced"),
        ("interval_contains", _found(7, 6, 8), {"widest": 1}, "differs"),
        ("interval_contains", _found(5, 1, 9), {"widest": 1}, "not_comparable"),
        ("interval_contains", _found(5, np.nan, np.nan), {"widest": 1}, "not_comparable"),
        ("proportion_equal", _found(95, 0, 0, 400, 380), {"of": [400, 400], "widest": 9},
         "differs"),
        ("proportion_equal", _found(99, 0, 0, 400, 399), {"of": [400, 400], "widest": 9},
         "reproduced"),
        ("proportion_equal", _found(99, 0, 0, 3, 3), {"of": [400, 400], "widest": 9},
         "not_comparable"),
        ("always", _found(100, 0, 0, 9, 9), {}, "reproduced"),
        ("always", _found(90, 0, 0, 10, 9), {}, "differs"),
        ("never", _found(0, 0, 0, 9, 0), {}, "reproduced"),
        ("never", _found(1, 0, 0, 9, 1), {}, "differs"),
        ("all_kinds", _found(100, 0, 0, 4, 4), {}, "reproduced"),
        ("all_kinds", _found(75, 0, 0, 4, 3), {}, "differs"),
        ("above", _found(2, 1.1, 3), {"threshold": 1, "widest": 2}, "reproduced"),
        ("above", _found(2, 0.9, 3), {"threshold": 1, "widest": 3}, "differs"),
        ("above", _found(0.5, 0.4, 0.6), {"threshold": 1, "widest": 3}, "differs"),
        ("above", _found(2, 0.9, 3), {"threshold": 1, "widest": 2}, "not_comparable"),
        ("above", _found(2, np.nan, np.nan), {"threshold": 1, "widest": 2}, "not_comparable"),
        ("below", _found(0.5, 0.4, 0.6), {"threshold": 1, "widest": 2}, "reproduced"),
        ("below", _found(0.9, 0.4, 1.6), {"threshold": 1, "widest": 3}, "differs"),
        ("not_comparable", _found(5, 4, 6), {"because": "so"}, "not_comparable"),
    ],
)  # fmt: skip
def test_a_rule_gives_the_verdict_it_declares(rule, found, parameters, verdict):
    assert claims.RULES[rule](found, 5, **parameters).verdict == verdict


def test_every_rule_but_not_comparable_is_used_and_described():
    used = {claim.rule["name"] for claim in DECLARED}
    assert used == set(claims.RULES)
    described = (claims.default_path().parent / "README.md").read_text()
    assert all(f"| `{rule}` |" in described for rule in claims.RULES)


def _entry(**changes) -> dict:
    entry = {
        "id": "one", "source": "Table 4", "says": "s", "published": 1, "unit": "%",
        "measure": {"name": "share", "table": "crash", "where": {}, "hit": {"killed": True}},
        "rule": {"name": "always"}, "judged": "j",
    }  # fmt: skip
    entry.update(changes)
    return {key: value for key, value in entry.items() if value is not None}


def _share(**changes) -> dict:
    return _entry()["measure"] | changes


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ("not a list", "holds a list"),
        ([], "holds a list"),
        (["text"], "claim number 1 is no mapping"),
        ([_entry(judged=None)], "'one'.*no 'judged'"),
        ([_entry(verdict="reproduced")], "unknown 'verdict'"),
        ([_entry(), _entry()], "share an id.*one"),
        ([_entry(published="many")], "no number.*many"),
        ([_entry(published=True)], "no number"),
        ([_entry(rule={"name": "always_true"})], "unknown rule.*always, never.*always_true"),
        ([_entry(rule={"threshold": 1})], "'rule'.*names none"),
        ([_entry(rule={"name": "above"})], "above.*threshold"),
        ([_entry(rule={"name": "always", "unless": 1})], "always.*unless"),
        ([_entry(measure={"name": "luck"})], "unknown measure.*share.*luck"),
        ([_entry(measure=_share(colour=1))], "share.*colour"),
        ([_entry(measure=_share(where={"mood": 1}))], "no column of crash.*mood"),
        ([_entry(measure=_share(hit=3))], "'hit'.*no mapping"),
        ([_entry(measure=_share(table="weather"))], "unknown output.*weather"),
    ],
)
def test_a_mistake_in_the_claims_is_named(tmp_path, entries, words):
    path = tmp_path / "claims.yml"
    path.write_text(yaml.safe_dump(entries))
    with pytest.raises(InvalidInput, match=words) as raised:
        claims.load_claims(path)
    assert str(path) in str(raised.value)


def test_a_missing_or_unreadable_file_of_claims_is_named(tmp_path):
    with pytest.raises(MissingInput, match=r"claims\.yml"):
        claims.load_claims(tmp_path / "claims.yml")
    (tmp_path / "claims.yml").write_text("- {id: [")
    with pytest.raises(InvalidInput, match="YAML"):
        claims.load_claims(tmp_path / "claims.yml")


def test_a_table_that_was_not_given_is_named():
    with pytest.raises(InvalidInput, match="latency"):
        claims.evaluate(DECLARED, {"crash": world()["crash"]})


def test_a_missing_value_meets_no_condition():
    frame = pd.DataFrame({"flag": pd.array([True, pd.NA, False], dtype="boolean")})
    assert measures.matching(frame, {"flag": True}).tolist() == [True, False, False]
    assert measures.matching(frame, {"flag": [True, False]}).tolist() == [True, False, True]


def test_the_least_interval_is_where_p99_meets_the_target():
    found = guidance.guidance(world()["latency"], target_share=0.02)
    share = found["save_p99_ms"] / 1e3 / found["smallest_interval_s"]
    assert share.to_list() == pytest.approx([0.02] * len(found))
    row = found.iloc[0]
    assert row["share_60s_percent"] == pytest.approx(row["save_p99_ms"] / 1e3 / 60 * 100)
    assert (found["smallest_interval_s_low"] < found["smallest_interval_s_high"]).all()


def test_the_advice_follows_the_numbers():
    tables = world()
    texts = []
    for factor in (1, 1000):
        slower = tables["latency"].assign(latency_s=tables["latency"]["latency_s"] * factor)
        cost = guidance.guidance(slower)
        texts.append(guidance.advice(cost, 0.01, tables["training"]))
    assert texts[0] != texts[1]
    assert "every 1.57 s" in texts[0] and "every 26.2 min" in texts[1]
    assert "Advice for this disk: **atomic_dirsync**" in texts[0]
    assert f"{guidance.stats.BASELINE} would gain" in texts[0]
    few = guidance.guidance(world(runs=3)["latency"])
    assert "not estimable" in guidance.advice(few, 0.01, tables["training"])


@pytest.mark.parametrize("target", [0, 1, -0.1, float("nan")])
def test_a_target_that_is_no_share_is_refused(target):
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        guidance.guidance(world(runs=3)["latency"], target_share=target)
