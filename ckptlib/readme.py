"""Put the reference run's numbers into README.md; no number there is ever typed by hand.

``python -m ckptlib.readme`` rewrites the text between ``<!-- reference:NAME -->`` and
``<!-- /reference:NAME -->``; ``--check`` only says whether anything would change.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from ckptlib.analysis import power, power_told, tables, tables_power
from ckptlib.errors import CkptError, InvalidInput, MissingInput, explain
from ckptlib.experiments import outputs, registry
from ckptlib.experiments.paths import project_root

_BLOCK = re.compile(r"(<!-- reference:(\w+) -->\n).*?(<!-- /reference:\2 -->)", re.DOTALL)
HEADLINE = "fig_power_survival"


def _read(root: Path, name: str) -> pd.DataFrame:
    path = outputs.csv_path(root / "data" / "reference", name)
    if not path.is_file():
        raise MissingInput(
            explain("the reference run lacks a table", path=path, do="run `make reference`"), path
        )
    # its code may be older than the working tree: the page says what that run found
    return pd.read_csv(path)


def _figure(root: Path) -> str:
    path = root / "figures" / "reference" / f"{HEADLINE}.json"
    if not path.is_file():
        raise MissingInput(
            explain("the reference run lacks a figure", path=path, do="run `make reference`"), path
        )
    record = json.loads(path.read_text(encoding="utf-8"))
    alt = record["alt"].replace("]", ")")
    return f"![{alt}](figures/reference/{HEADLINE}.png)\n\n*{record['caption']}*\n"


def _machine(root: Path) -> str:
    record = json.loads(
        outputs.provenance_path(root / "data" / "reference", "latency").read_text(encoding="utf-8")
    )
    machine, files = record["machine"], record["filesystem"]
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    return (
        f"*{machine['system']} {machine['kernel']}, {machine['cpu']}, {machine['cores']} cores; "
        f"{files['type']} ({files['options']}); {versions}; {record['date'][:10]}.*\n"
    )


def _claims(root: Path) -> str:
    claims = _read(root, "claims")
    counts = claims["verdict"].value_counts()
    line = ", ".join(f"{counts.get(v, 0)} {v.replace('_', ' ')}" for v in
                     ("reproduced", "differs", "not_comparable"))  # fmt: skip
    judged = claims[claims["verdict"] == "differs"]
    text = f"Of {len(claims)} claims: {line}. All of them: `figures/reference/table_claims.md`.\n"
    if len(judged):
        shown = judged[["claim_id", "source", "published", "measured"]].copy()
        # what the rule says about the interval stands in the full table; here only the reason
        shown["why"] = judged["note"].str.split("; ", n=1).str[-1]
        text += "\nThose that differ here:\n\n" + tables.to_markdown(tables.present(shown))
    return text


def _latency(root: Path) -> str:
    return _columns(
        tables.table1_latency(_read(root, "latency")),
        r"mode|protocol|runs|p50_.*|p99_.*|published_p50.*|published_p99.*",
    )


def _crash(root: Path) -> str:
    found = tables.outcomes(_read(root, "crash"))
    killed = found[(found["method"] == "sigkill") & (found["crash_point"] != "none")]
    killed = killed.drop(columns=["method", "crash_point"])
    summed = killed.groupby(["mode", "protocol"], sort=False).sum().reset_index()
    return tables.to_markdown(tables.present(summed))


def _corruption(root: Path) -> str:
    return _columns(
        tables.table4_corruption(_read(root, "corruption")),
        r"kind|fault|trials|.*effective.*|detected|rate_.*|published_.*",
    )


def _power_loss(root: Path) -> pd.DataFrame:
    """On the file systems that the page speaks of."""
    loss = registry.validate(_read(root, "power_loss"), "power_loss")
    return loss[loss["filesystem"].isin(power.MAIN)]


def _power(root: Path) -> str:
    table = tables_power.table_power(_power_loss(root))
    lost = table["acknowledged"] - table["kept_newest"]
    wanted = ["filesystem", "mode", "logs", "states", "acknowledged", "lost", "mixed"]
    wanted += ["false_accept", "refused", "refused_lost"]
    return tables.to_markdown(tables.present(table.assign(lost=lost)[wanted]))


def _refused(root: Path) -> str:
    return power_told.refused(power.compared(_power_loss(root)))  # as in the table above it


def _directories(root: Path) -> str:
    return tables.to_markdown(tables_power.lost_by_directory(_power_loss(root)))


def _columns(frame: pd.DataFrame, wanted: str) -> str:
    kept = [name for name in frame.columns if re.fullmatch(wanted, name)]
    return tables.to_markdown(tables.present(frame[kept]))


BLOCKS: dict[str, Callable[[Path], str]] = {
    "figure": _figure,
    "machine": _machine,
    "claims": _claims,
    "latency": _latency,
    "crash": _crash,
    "corruption": _corruption,
    "power": _power,
    "refused": _refused,
    "directories": _directories,
}


def fill(text: str, root: Path) -> str:
    """The page with every block computed anew from ``data/reference`` and ``figures/reference``.

    Raises
    ------
    InvalidInput
        A block is unknown, or one of :data:`BLOCKS` has no place on the page.
    MissingInput
        The reference run lacks something that the page shows.
    """
    found = [match[2] for match in _BLOCK.finditer(text)]
    if sorted(found) != sorted(BLOCKS):
        raise InvalidInput(
            explain("README.md's reference blocks are not the known ones",
                    expected=", ".join(BLOCKS), found=", ".join(found))
        )  # fmt: skip

    def block(match: re.Match) -> str:
        return f"{match[1]}{BLOCKS[match[2]](root).rstrip()}\n{match[3]}"

    return _BLOCK.sub(block, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ckptlib.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if outdated")
    options = parser.parse_args(arguments)
    root = project_root()
    page = root / "README.md"
    try:
        before = page.read_text(encoding="utf-8")
        after = fill(before, root)
    except (CkptError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if before == after:
        print("README.md agrees with the reference run.")
        return 0
    if options.check:
        print("README.md does not agree with the reference run. Run `make readme`.")
        return 1
    with outputs.replaced(page) as temporary:
        temporary.write_text(after, encoding="utf-8")
    print("README.md now holds the numbers of the reference run.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
