"""Have processes contend for one store, for a while, and say what came of it.

    python -m ckptlib.soak --seconds 60

Exit status: 0 nothing was violated, 1 something was (each is printed), 2 the input is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ckptlib.errors import CkptError
from ckptlib.experiments import soak
from ckptlib.experiments.context import check_scratch
from ckptlib.experiments.flows import GROUP_ARMS
from ckptlib.experiments.paths import resolve


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see the module for the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ckptlib.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all arms together")
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--scratch", default="data/scratch", help="on the disk under test")
    options = parser.parse_args(arguments)
    arms = [arm for arm in GROUP_ARMS if arm[0] != "unsafe"]
    violated = False
    try:
        scratch = resolve(options.scratch)
        check_scratch(scratch, force_memory=False)
        for mode, protocol in arms:
            with tempfile.TemporaryDirectory(prefix="soak.", dir=scratch) as folder:
                found = soak.soak(
                    Path(folder), seconds=options.seconds / len(arms), writers=options.writers,
                    readers=options.readers, mode=mode, protocol=protocol,
                )  # fmt: skip
            violations = found.pop("violations")
            told = ", ".join(f"{count:,} {name}" for name, count in found.items())
            print(f"{mode}, {protocol}: {told}; {len(violations)} violations", flush=True)
            print("".join(f"  {sentence}\n" for sentence in violations), end="")
            violated = violated or bool(violations)
    except CkptError as error:
        print(error, file=sys.stderr)
        return 2
    return int(violated)


if __name__ == "__main__":
    sys.exit(main())
