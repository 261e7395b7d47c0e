"""What a notebook's outputs were made from; a stamp never vouches for a file changed since.

A stamp is a small JSON file beside the results. It holds a digest of each thing that can change a
result and of each output, so that the reason for running again can be named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptlib import provenance
from ckptlib.experiments import outputs, registry
from ckptlib.reproduce.parameters import FINDINGS

FOLDER = ".stamps"
#: Where things lie and how many work on them; no result depends on these (the disk is seen apart).
NEUTRAL = frozenset({"results", "figures", "scratch", "jobs", "engine", "scheduler"})
#: Folders below data/ that a run writes, or that are looked at in another way.
NOT_INPUTS = frozenset({"params", "reference", "results", "scratch"})


#: What can't run on this machine, with the reason; an empty one if it can.
Support = Callable[[], dict[str, str]]


def file_digest(path: Path) -> str:
    """SHA-256 of a file, or an empty text where there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _digests(folder: Path, pattern: str, leave_out: frozenset[str] = frozenset()) -> dict[str, str]:
    # what is left out is never entered: a scratch folder changes while one looks at it
    tops = [top for top in sorted(folder.iterdir()) if top.name not in leave_out]
    found = [path for top in tops for path in (top.rglob(pattern) if top.is_dir() else [top])]
    return {
        str(path.relative_to(folder)): file_digest(path)
        for path in sorted(found)
        if path.is_file() and path.match(pattern)
    }


def common_inputs(root: Path, scratch: Path) -> dict[str, str]:
    """Digests of what all notebooks depend on, by the name under which a change is reported."""
    disk, data = provenance.filesystem(scratch), root / "data"
    made_here = {path.parent.name for path in data.glob(f"*/{FOLDER}")}
    if data in scratch.parents:
        made_here.add(scratch.relative_to(data).parts[0])
    return {
        "code": _digest(_digests(Path(provenance.__file__).parent, "*.py")),
        "versions": _digest(provenance.versions()),
        "data": _digest(_digests(data, "*", NOT_INPUTS | made_here)),
        "scratch disk": _digest([disk["type"], disk["device"], disk["options"]]),
    }


@dataclass(frozen=True)
class Work:
    """One notebook with all that decides about it."""

    notebook: Path
    parameters: dict
    results: Path
    figures: Path
    executed: Path

    @property
    def name(self) -> str:
        return self.notebook.stem

    @property
    def stamp(self) -> Path:
        return self.results / FOLDER / f"{self.name}.json"

    def upstream(self) -> dict[str, Path]:
        """Tables of other notebooks that this one may read: for the findings, all of them."""
        source = self.notebook.read_text(encoding="utf-8")
        # Quotes inside a notebook's JSON are escaped, if they are double ones.
        return {
            name: outputs.csv_path(self.results, name)
            for name, output in registry.OUTPUTS.items()
            if output.notebook != self.name
            and (self.name.startswith(FINDINGS) or f"'{name}'" in source or f'"{name}\\"' in source)
        }

    def tables(self) -> list[str]:
        """Names of the outputs that the notebook makes."""
        return [name for name, output in registry.OUTPUTS.items() if output.notebook == self.name]

    def pictures(self) -> list[Path]:
        """Figures and printed tables of the notebook."""
        figures = [n for n, notebook in registry.FIGURES.items() if notebook == self.name]
        printed = [n for n, notebook in registry.TABLES.items() if notebook == self.name]
        return [
            *(self.figures / f"{name}.{kind}" for name in figures for kind in ("pdf", "png")),
            *(self.figures / f"{name}.{kind}" for name in printed for kind in ("csv", "md", "tex")),
        ]

    def products(self) -> list[Path]:
        """Every file that the notebook must leave behind, itself as executed included."""
        tables, pictures = self.tables(), self.pictures()
        if self.nothing_made():
            pictures = [path for path in pictures if path.is_file()]
        return [
            self.executed,
            *(outputs.csv_path(self.results, name) for name in tables),
            *(outputs.provenance_path(self.results, name) for name in tables),
            *pictures,
        ]

    def drawn(self) -> dict[Path, tuple[int, int]]:
        """Every file of its figures and printed tables, with what changes if it is made anew."""
        names = [n for n, notebook in (registry.FIGURES | registry.TABLES).items()
                 if notebook == self.name]  # fmt: skip
        files = [path for name in names for path in self.figures.glob(f"{name}.*")]
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}

    def nothing_made(self) -> bool:
        """Whether all that the notebook makes was skipped, so that there is nothing to draw."""
        tables = self.tables()
        return bool(tables) and all(outputs.nothing_made(self.results, name) for name in tables)

    def skipped(self) -> dict[str, str]:
        """What the notebook left out because it could not run here, with the reasons."""
        found = {}
        for name in self.tables():
            found |= outputs.skipped(self.results, name)
        return found

    def used_root(self) -> bool:
        """Whether root made something that not every user can make."""
        return not self.nothing_made() and any(
            outputs.record_of(self.results, name).get("root") is True for name in self.tables()
        )

    def inputs(self, common: dict[str, str]) -> dict[str, str]:
        """Digests of everything that can change the notebook's results."""
        chosen = {k: v for k, v in self.parameters.items() if k not in NEUTRAL}
        read = {name: file_digest(path) for name, path in self.upstream().items()}
        return {
            "notebook": file_digest(self.notebook),
            "parameters": _digest(chosen),
            "upstream tables": _digest(read),
            **common,
        }

    def why_run(self, inputs: dict[str, str], support: Support = dict) -> str:
        """Say why the notebook has to run; an empty text if all that it makes is up to date.

        ``support`` tells what can't run on this machine at this moment. That something can run now
        is a reason; that it no longer can is none, or a run without root would throw away what one
        with root has made.
        """
        try:
            made = json.loads(self.stamp.read_text(encoding="utf-8"))
            before, files = dict(made["inputs"]), dict(made["outputs"])
        except FileNotFoundError:
            return "not run yet"
        except (ValueError, KeyError, TypeError):
            return "its stamp is damaged"
        if changed := [name for name in inputs if before.get(name) != inputs[name]]:
            return f"changed: {', '.join(changed)}"
        for path in self.products():
            if not path.is_file():
                return f"missing: {path.name}"
            if files.get(path.name) != file_digest(path):
                return f"altered: {path.name}"
        left_out = self.skipped()
        now = support() if left_out else {}
        able = [name for name in left_out if now.get(name) == ""]
        return f"can run now: {', '.join(able)}" if able else ""

    def missing(self) -> list[Path]:
        """Outputs that are not there."""
        return [path for path in self.products() if not path.is_file()]

    def write_stamp(self, inputs: dict[str, str]) -> None:
        """Record that the outputs, as they now are, were made from these inputs."""
        made = {
            "inputs": inputs,
            "outputs": {path.name: file_digest(path) for path in self.products()},
        }
        with outputs.replaced(self.stamp) as temporary:
            temporary.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
