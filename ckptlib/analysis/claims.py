"""Holds the paper's claims against what was measured, by rules declared before; never bends a rule.

A rule is a function of an interval, the published number and the rule's own parameters. It answers
reproduced, differs or not_comparable with one clause that says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from ckptlib.analysis import measures, stats
from ckptlib.analysis.intervals import NOT_ESTIMABLE, Interval
from ckptlib.errors import InvalidInput, MissingInput, explain
from ckptlib.experiments.paths import project_root

REPRODUCED, DIFFERS, NOT_COMPARABLE = VERDICTS = ("reproduced", "differs", "not_comparable")
COLUMNS = [
    *("claim_id", "source", "published", "measured", "ci_low", "ci_high", "verdict", "note"),
]


@dataclass(frozen=True)
class Judgement:
    """A verdict, the interval that it rests on, and why, as one clause."""

    verdict: str
    found: Interval
    why: str


@dataclass(frozen=True)
class Claim:
    """One claim of the paper; `measure` and `rule` hold a name and the parameters under it."""

    id: str
    source: str
    says: str
    published: float
    unit: str
    measure: Mapping[str, object]
    rule: Mapping[str, object]
    judged: str
    if_differs: str = ""


Rule = Callable[..., Judgement]
RULES: dict[str, Rule] = {}


def _rule(function: Rule) -> Rule:
    RULES[function.__name__.rstrip("_")] = function
    return function


def _judge(holds: bool, found: Interval, why: str) -> Judgement:
    return Judgement(REPRODUCED if holds else DIFFERS, found, why)


def _no_interval(found: Interval) -> Judgement | None:
    if np.isfinite(found.low) and np.isfinite(found.high):
        return None
    why = found.method if found.method.startswith(NOT_ESTIMABLE) else "no interval"
    return Judgement(NOT_COMPARABLE, found, why)


@_rule
def interval_contains(found: Interval, published: float, widest: float) -> Judgement:
    """The published number lies in the measured interval, which is at most `widest` times it.

    An interval that leaves the number out says so however wide it is; one that holds it says
    something only if it is narrow.
    """
    missing = _no_interval(found)
    if missing:
        return missing
    if not found.low <= published <= found.high:
        why = f"the interval ({found.method}) does not contain the published number"
        return _judge(False, found, why)
    if found.high - found.low > widest * abs(published):
        why = f"the interval ({found.method}) is too wide to judge by"
        return Judgement(NOT_COMPARABLE, found, why)
    return _judge(True, found, f"the interval ({found.method}) contains the published number")


@_rule
def proportion_equal(
    found: Interval, published: float, of: tuple[int, int], widest: float
) -> Judgement:
    """Newcombe's interval of the difference to `of` = (k, n) contains 0 and is narrow enough."""
    if not found.n:
        return Judgement(NOT_COMPARABLE, found, found.method)
    gap = stats.difference(found.k, found.n, *of).scaled(100)
    trials = f"{found.k} of {found.n} here, {of[0]} of {of[1]} there"
    spread = f"difference {gap.rate:+.1f} points, Newcombe [{gap.low:.1f}, {gap.high:.1f}]"
    if gap.high - gap.low > widest:
        return Judgement(NOT_COMPARABLE, found, f"{trials}: too few trials to judge ({spread})")
    return _judge(gap.low <= 0 <= gap.high, found, f"{trials}: {spread}")


@_rule
def always(found: Interval, published: float) -> Judgement:
    """Every trial did it; the bound is one-sided and exact where none failed."""
    return _without_exception(found, wanted=found.n)


@_rule
def never(found: Interval, published: float) -> Judgement:
    """No trial did it; the bound is one-sided and exact where none did."""
    return _without_exception(found, wanted=0)


def _without_exception(found: Interval, wanted: int) -> Judgement:
    if not found.n:
        return Judgement(NOT_COMPARABLE, found, found.method)
    exact = stats.proportion(found.k, found.n, safety=True).scaled(100)
    return _judge(found.k == wanted, exact, f"{found.k} of {found.n} (interval: {exact.method})")


@_rule
def all_kinds(found: Interval, published: float) -> Judgement:
    """Every kind of a fixed list occurred; kinds are no trials, so there is no interval."""
    if not found.n:
        return Judgement(NOT_COMPARABLE, found, found.method)
    count = Interval(found.rate, np.nan, np.nan, "count", found.n, found.k)
    return _judge(found.k == found.n, count, f"{found.k} of {found.n} kinds occurred")


@_rule
def at_every_place(found: Interval, published: float) -> Judgement:
    """It held at every place that was tried; places are listed and not drawn, so no interval."""
    if not found.n:
        return Judgement(NOT_COMPARABLE, found, found.method)
    count = Interval(found.rate, np.nan, np.nan, "count", found.n, found.k)
    return _judge(found.k == found.n, count, f"{found.k} of {found.n} places to die")


@_rule
def above(found: Interval, published: float, threshold: float, widest: float) -> Judgement:
    """The whole interval lies above the threshold; one that holds it must not exceed `widest`."""
    return _side(found.low > threshold, found, "above", threshold, widest)


@_rule
def below(found: Interval, published: float, threshold: float, widest: float) -> Judgement:
    """The whole interval lies below the threshold; one that holds it must not exceed `widest`."""
    return _side(found.high < threshold, found, "below", threshold, widest)


def _side(holds: bool, found: Interval, side: str, threshold: float, widest: float) -> Judgement:
    missing = _no_interval(found)
    if missing:
        return missing
    if found.low <= threshold <= found.high:
        why = f"the interval ({found.method}) holds {threshold:g}"
        if found.high - found.low > widest:
            return Judgement(NOT_COMPARABLE, found, f"{why} and is too wide to judge by")
        return Judgement(DIFFERS, found, why)
    words = f"lies {side}" if holds else f"is not {side}"
    return _judge(holds, found, f"the interval ({found.method}) {words} {threshold:g}")


@_rule
def not_comparable(found: Interval, published: float, because: str) -> Judgement:
    """The number belongs to the paper's machine; ours is shown and not judged."""
    return Judgement(NOT_COMPARABLE, found, because)


def default_path() -> Path:
    """Where the project keeps the claims."""
    return project_root() / "data" / "published" / "claims.yml"


def load_claims(path: str | Path | None = None) -> list[Claim]:
    """Read and check the declared claims.

    Parameters
    ----------
    path : a claims.yml; by default the project's own

    Raises
    ------
    MissingInput : there is no such file
    InvalidInput : no YAML list of claims; a missing or unknown key; an unknown rule, measure or
        parameter; two claims of one id
    """
    path = default_path() if path is None else Path(path)
    if not path.is_file():
        raise MissingInput(explain("the declared claims are missing", path=path), path)
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInput(explain("not readable as YAML", path=path, found=error), path) from error
    if not isinstance(entries, list) or not entries:
        raise InvalidInput(
            explain("a file of claims holds a list", path=path, found=type(entries).__name__), path
        )
    claims = [_claim(entry, place, path) for place, entry in enumerate(entries, start=1)]
    ids = [claim.id for claim in claims]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise InvalidInput(explain("claims share an id", path=path, found=", ".join(twice)), path)
    return claims


def _claim(entry: object, place: int, path: Path) -> Claim:
    where = f"claim number {place}"
    fields = inspect.signature(Claim).parameters
    required = [name for name, field in fields.items() if field.default is field.empty]
    if not isinstance(entry, dict):
        raise InvalidInput(
            explain(f"{where} is no mapping", path=path, found=type(entry).__name__), path
        )
    if "id" in entry:
        where = f"claim {entry['id']!r}"
    wrong = [f"no {name!r}" for name in required if name not in entry]
    wrong += [f"unknown {name!r}" for name in entry if name not in fields]
    if wrong:
        raise InvalidInput(
            explain(f"{where} is not as declared", path=path, found=", ".join(wrong)), path
        )
    if isinstance(entry["published"], bool) or not isinstance(entry["published"], (int, float)):
        raise InvalidInput(
            explain(f"'published' of {where} is no number", path=path, found=entry["published"]),
            path,
        )
    for key in ("measure", "rule"):
        if not isinstance(entry[key], dict) or "name" not in entry[key]:
            raise InvalidInput(explain(f"{key!r} of {where} names none", path=path), path)
    try:
        measures.check(*_named(entry["measure"]))
        _check_rule(*_named(entry["rule"]))
    except InvalidInput as error:
        raise InvalidInput(f"{where} in {path}: {error}", path) from error
    return Claim(**entry)


def _named(call: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    return str(call["name"]), {key: value for key, value in call.items() if key != "name"}


def _check_rule(name: str, parameters: Mapping[str, object]) -> None:
    if name not in RULES:
        raise InvalidInput(explain("unknown rule", found=repr(name), expected=", ".join(RULES)))
    try:
        inspect.signature(RULES[name]).bind(None, None, **parameters)
    except TypeError as error:
        raise InvalidInput(explain(f"rule {name!r} cannot take these", found=error)) from error


def judge(claim: Claim, frames: measures.Frames) -> Judgement:
    """Measure one claim in the trial tables and apply its declared rule."""
    name, parameters = _named(claim.measure)
    found = measures.take(name, frames, parameters)
    rule, parameters = _named(claim.rule)
    return RULES[rule](found, claim.published, **parameters)


def evaluate(claims: list[Claim], frames: measures.Frames) -> pd.DataFrame:
    """Judge every claim.

    Parameters
    ----------
    claims : as `load_claims` gives them
    frames : the trial tables by output name: latency, latency_process, crash, corruption

    Returns
    -------
    DataFrame with the columns of the output `claims`, in the order declared. `published` and
    `measured` are text with their unit; `ci_low` and `ci_high` are numbers in the same unit.
    """
    rows = []
    for claim in claims:
        judged = judge(claim, frames)
        note = judged.why
        if judged.verdict == DIFFERS and claim.if_differs:
            note += f"; {claim.if_differs}"
        numbers = (claim.published, judged.found.rate)
        texts = [with_unit(number, claim.unit) for number in numbers]
        bounds = [judged.found.low, judged.found.high]
        sentence = f"{note[0].upper()}{note[1:]}."
        rows.append([claim.id, claim.source, *texts, *bounds, judged.verdict, sentence])
    return pd.DataFrame(rows, columns=COLUMNS)


def readable(table: pd.DataFrame, claims: list[Claim]) -> pd.DataFrame:
    """The table of `evaluate` for people: the claim in words, the interval beside the estimate."""
    words = {claim.id: claim.says for claim in claims}
    bounds = [
        f" [{low:.4g}, {high:.4g}]" if np.isfinite([low, high]).all() else ""
        for low, high in zip(table["ci_low"], table["ci_high"], strict=True)
    ]
    return pd.DataFrame(
        {
            "claim": table["claim_id"].map(words),
            "source": table["source"],
            "paper": table["published"],
            "here [95% CI]": table["measured"] + bounds,
            "verdict": table["verdict"].str.replace("_", " "),
            "why": table["note"],
        }
    )


def with_unit(value: float, unit: str) -> str:
    """A number for reading, four digits at most, with its unit; a ratio has none."""
    if not np.isfinite(value):
        return NOT_ESTIMABLE
    return f"{value:.4g}" + {"%": "%", "ratio": ""}.get(unit, f" {unit}")
