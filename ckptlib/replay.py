"""Try the crash states of a recorded device log again, in a fresh process, and say what comes out.

    python -m ckptlib.replay data/reference/power_examples/ext4.plog

needs nothing but the file and what mounting it takes (Linux, root, FUSE, loop devices). With
``--compare``, the rows are held to those of an earlier run's ``power_loss.csv``. Exit status: 0
done and equal, 1 other rows, 2 the input is wrong, 3 it can't run on this machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ckptlib.crashes import mounts
from ckptlib.crashes.filesystems import support
from ckptlib.errors import CkptError, MissingInput, explain
from ckptlib.experiments import power_judging as judging
from ckptlib.experiments import registry


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see the module for the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ckptlib.replay", description=__doc__)
    parser.add_argument("log", type=Path, help="a device log, *.plog")
    parser.add_argument("--compare", type=Path, metavar="CSV", help="power_loss.csv to hold it to")
    parser.add_argument("--output", type=Path, metavar="CSV", help="where to write the rows")
    options = parser.parse_args(arguments)
    try:
        about = judging.read(options.log).about
        if reason := support()[about["filesystem"]]:
            print(f"{options.log} can't be replayed here: {reason}", file=sys.stderr)
            return 3
        frame = replay(options.log)
        expected = None if options.compare is None else _rows(options.compare, about["log"])
    except CkptError as error:
        print(error, file=sys.stderr)
        return 2
    if options.output:
        frame.to_csv(options.output, index=False, lineterminator="\n")
    counts = frame["outcome"].value_counts()
    print(f"{about['log']}: {len(frame)} crash states")
    print("\n".join(f"  {count:6}  {outcome}" for outcome, count in counts.items()))
    if expected is None:
        return 0
    if frame.to_csv(index=False) == expected.to_csv(index=False):
        print(f"equal to the {len(expected)} rows of {options.compare}")
        return 0
    print(f"not equal to the {len(expected)} rows of {options.compare}", file=sys.stderr)
    return 1


def replay(path: Path):
    """The rows of ``power_loss`` that a log gives.

    Returns
    -------
    pandas.DataFrame
        In canonical form.
    """
    import pandas

    with tempfile.TemporaryDirectory(prefix="ckptlib-") as folder:
        rows = mounts.isolated(judging.judge_log, path, Path(folder))
    rows = [{"trial_id": f"{row['log']}-{number:05d}", **row} for number, row in enumerate(rows)]
    return registry.validate(pandas.DataFrame(rows), "power_loss")


def _rows(path: Path, log: str):
    """Rows of a log in a table that may be anybody's."""
    import pandas

    try:
        frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
        frame = frame[frame["log"] == log]
    except (OSError, ValueError, KeyError) as error:
        raise MissingInput(
            explain("this table cannot be compared with", path=path, expected="power_loss.csv",
                    found=str(error)),
            path,
        ) from error  # fmt: skip
    return frame.reset_index(drop=True)


if __name__ == "__main__":
    sys.exit(main())
