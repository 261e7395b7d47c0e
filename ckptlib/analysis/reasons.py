"""Sorts the guard's reasons into the four kinds of the paper's Figure 3; never invents a reason."""

from __future__ import annotations

import re

import pandas as pd

SIZE, COMMIT, MANIFEST, PART = "size mismatch", "missing COMMIT", "manifest error", "missing part"
OTHER = "other"
KINDS = (SIZE, COMMIT, MANIFEST, PART, OTHER)

# First match wins: a sentence about a missing COMMIT may well name the manifest, too.
_RULES = (
    (SIZE, r"\bsize\b|\bexpected \S+ bytes\b"),
    (COMMIT, r"\b(no|missing) commit\b|\bcommit(\.json)? is missing\b"),
    (MANIFEST, r"\bmanifest"),
    (PART, r"\bmissing\b"),
)


def classify(reason: str) -> str:
    """The kind of one reason; "" for an empty one (the group is valid), "other" if none fits."""
    text = str(reason).strip().lower()
    if not text:
        return ""
    if text in KINDS:
        return text
    return next((kind for kind, pattern in _RULES if re.search(pattern, text)), OTHER)


def refused(crash: pd.DataFrame) -> pd.DataFrame:
    """The trials whose group in flight was refused, with a column `kind` for the reason."""
    invalid = crash[~crash["group_valid"].fillna(False).astype(bool)]
    return invalid.assign(kind=[classify(reason) for reason in invalid["reason"]])
