"""The handwritten digits that the network learns; never hands out data that fails its checksum.

Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998, CC BY 4.0. See ``data/digits/README.md``.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptlib.errors import CkptError, MissingInput, explain
from ckptlib.experiments.paths import project_root

if TYPE_CHECKING:
    import numpy

#: SHA-256 of the uncompressed text.
SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
#: Every so many rows, one is held out for testing.
HELD_OUT = 5


@dataclass(frozen=True)
class Digits:
    """Images as float32 of shape (n, 64), scaled to 0..1, and labels as int64 of shape (n,)."""

    train_images: numpy.ndarray
    train_labels: numpy.ndarray
    test_images: numpy.ndarray
    test_labels: numpy.ndarray


def digits_path() -> Path:
    """Where the data set lies."""
    return project_root() / "data" / "digits" / "digits.csv.gz"


def load_digits(path: Path | None = None) -> Digits:
    """Read the data set, check it, and split it: every fifth row is held out.

    Raises
    ------
    MissingInput
        The file is not there.
    CkptError
        It is not the file that it should be.
    """
    import numpy

    path = digits_path() if path is None else path
    repair = "restore data/digits from the repository"
    try:
        text = gzip.decompress(path.read_bytes())
        found = hashlib.sha256(text).hexdigest()
    except FileNotFoundError as error:
        raise MissingInput(explain("the digits are missing", path=path, do=repair), path) from error
    except (OSError, EOFError, zlib.error) as error:
        text, found = b"", f"not a gzip file ({error})"
    if found != SHA256:
        raise CkptError(
            explain("the digits are damaged", path=path, expected=SHA256, found=found, do=repair),
            path,
        )
    table = numpy.array([line.split(b",") for line in text.split()], dtype=numpy.int64)
    images = (table[:, :64] / 16).astype(numpy.float32)
    test = numpy.arange(len(table)) % HELD_OUT == HELD_OUT - 1
    return Digits(images[~test], table[~test, 64], images[test], table[test, 64])
