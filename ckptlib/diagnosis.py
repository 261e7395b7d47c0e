"""The paper's five layers on damaged bytes, for experiments; never parses them in this process.

The order is that of J. Jeon, arXiv:2511.18323: the file loads; names, types and shapes are the
expected ones; the content digest matches; the SHA-256 of the file matches; nothing is NaN or Inf.
To load first and hash afterwards is the wrong order for use, where :mod:`ckptlib.guard` hashes
first and parses nothing unhashed. Here every layer runs, so that one can count which would object.

Damaged bytes are parsed by a child (``python -m ckptlib.diagnosis``), always without running code
from the file, under limits on time and memory. It is a plain subprocess that talks JSON over its
pipes: nothing of the caller's main module is imported there, so it works from a notebook, from a
worker of joblib, and from a script without an ``if __name__`` guard.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ckptlib import formats
from ckptlib.digests import content_digest, sha256_file
from ckptlib.errors import CkptError, explain
from ckptlib.manifests import Entry
from ckptlib.vfs import REAL

#: The layers in the paper's order; also the names of the flags and of the columns in results.
LAYERS = ("load_error", "schema_mismatch", "digest_mismatch", "file_sha_mismatch", "nonfinite")
_CLOSING_S = 5  # how long an idle child may take to end before it is killed
_LONGEST = 400  # characters of a reason; a damaged file may put anything into a message


@dataclass(frozen=True)
class Expectation:
    """What was recorded when the file was saved.

    ``file_sha256`` is hexadecimal, ``size`` in bytes; ``content_digest`` and ``schema`` (key to
    ``[dtype, shape]``) may be None, and their layers are then not judged.
    """

    file_sha256: str
    size: int
    content_digest: str | None = None
    schema: dict | None = None
    format: str = "torch"

    @classmethod
    def of(cls, entry: Entry) -> Expectation:
        """What a manifest says of one part; a store records all of it with content_digests=True."""
        return cls(entry.sha256 or "", entry.size, entry.content, entry.schema, entry.format)


@dataclass(frozen=True)
class Diagnosis:
    """Which layers object to a file; a file that does not load has no content to object to.

    ``details`` gives the reasons, in the order of the layers.
    """

    load_error: bool
    schema_mismatch: bool
    digest_mismatch: bool
    file_sha_mismatch: bool
    nonfinite: bool
    details: str = ""

    @property
    def layer(self) -> str:
        """The first layer that objects, or an empty string."""
        return next((name for name in LAYERS if getattr(self, name)), "")

    @property
    def detected(self) -> bool:
        """Whether any layer objects."""
        return bool(self.layer)


@dataclass(frozen=True)
class Limits:
    """What one file may cost: ``seconds`` of time, ``memory`` in bytes beyond the idle child's.

    Memory is limited on Linux (``RLIMIT_AS``, man 2 setrlimit). macOS accepts the limit and does
    not enforce it, so there it is not set, and only the time is limited.
    """

    seconds: float = 30.0
    memory: int = 1 << 30


def diagnose(path, expectation: Expectation, *, limits: Limits | None = None) -> Diagnosis:
    """Run every layer on one file; see :func:`diagnose_many`."""
    return diagnose_many([(path, expectation)], limits=limits)[0]


def diagnose_many(
    pairs: Iterable[tuple[str | os.PathLike, Expectation]], *, limits: Limits | None = None
) -> list[Diagnosis]:
    """Run every layer on files that may hold anything.

    Parameters
    ----------
    pairs : iterable of (path, Expectation)
        Files, each with what was recorded of it. One whose parser hangs, runs out of memory or
        dies counts as a load error, and the rest goes on in a fresh child.
    limits : Limits, optional
        For each file.

    Returns
    -------
    list of Diagnosis
        In the order of ``pairs``.

    Raises
    ------
    InvalidInput
        An expectation names an unknown format.
    CkptError
        The child cannot be started at all, say because torch is missing.
    """
    limits = Limits() if limits is None else limits
    return [_diagnose(os.path.abspath(os.fspath(p)), wanted, limits) for p, wanted in pairs]


def _diagnose(path: str, wanted: Expectation, limits: Limits) -> Diagnosis:
    formats.get(wanted.format)  # our own mistake must not pass for damage
    found = {"file_sha_mismatch": _compare_file(path, wanted)}
    found |= _ask({"path": path, "wanted": asdict(wanted), "limits": asdict(limits)})
    reasons = {name: found.get(name, "") for name in LAYERS}
    details = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
    return Diagnosis(*(bool(reason) for reason in reasons.values()), details)


def _compare_file(path: str, wanted: Expectation) -> str:
    """Layer 4. It parses nothing, so it needs no child and outlives one."""
    try:
        with contextlib.closing(REAL.open(path)) as file:
            sha256, size = sha256_file(file)
    except OSError as error:
        return f"cannot be read ({errno.errorcode.get(error.errno or 0, type(error).__name__)})"
    if size != wanted.size:
        return f"expected {wanted.size} bytes, found {size}"
    if sha256 != wanted.file_sha256:
        return f"expected SHA-256 {wanted.file_sha256[:12]}..., found {sha256[:12]}..."
    return ""


# -- the caller's side of the pipe ----------------------------------------------------------------


class _Died(Exception):
    """The child ended before it answered; the message says how."""


class _Child:
    """A process that parses files, one at a time, for one process that asks."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        # a file, since nobody drains a pipe; open for as long as the child lives
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(),
            process_group=0,  # a Ctrl-C in the terminal is the caller's to handle
        )
        if not self._process.stdout.readline():
            self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            self.close()
            raise CkptError(
                explain(
                    "the process that parses damaged files cannot be started",
                    found=lines[-1] if lines else f"exit status {self._process.returncode}",
                    do="check that torch and numpy can be imported",
                )
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def usable(self) -> bool:
        """Whether it lives and is ours: after a fork two processes would share its pipes."""
        return self.owner == os.getpid() and self._process.poll() is None

    def ask(self, request: dict) -> dict[str, str]:
        answer = b""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        code = self._process.wait()
        if code == -signal.SIGALRM:
            raise _Died(f"no end within {request['limits']['seconds']:g} s")
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        raise _Died(f"the process that parsed it ended {how}")

    def close(self, *, at_once: bool = False) -> None:
        """End the child: by the end of its input if it is idle, by force if it is not."""
        if self.owner != os.getpid():
            return
        if at_once:
            self._process.kill()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


_lock = threading.Lock()
_child: _Child | None = None


def _environment() -> dict[str, str]:
    """Ours, with this very package first on the path and one thread a process."""
    home = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _ask(request: dict) -> dict[str, str]:
    """Ask this process's child, which is started when it is first needed and after it died."""
    global _child
    with _lock:
        if _child is not None and not _child.usable():
            _child.close(at_once=True)
            _child = None
        if _child is None:
            _child = _Child()
        try:
            return _child.ask(request)
        except BaseException as error:  # whatever it is, the next answer might be the wrong one's
            _child.close(at_once=True)
            _child = None
            if isinstance(error, _Died):
                return {"load_error": str(error)}
            raise


@atexit.register
def close() -> None:
    """End this process's child, if there is one; the next diagnosis starts another."""
    global _child
    with _lock:
        if _child is not None:
            _child.close()
        _child = None


# -- the child's side -----------------------------------------------------------------------------


def _examine(path: str, wanted: Expectation) -> dict[str, str]:
    """Layers 1, 2, 3 and 5: for each that objects, why."""
    from ckptlib.formats.schema import differences, nonfinite, schema_of

    def reason(error: Exception) -> str:
        return f"{type(error).__name__}: {error}"[:_LONGEST]

    try:
        with contextlib.closing(REAL.open(path)) as file:
            state = formats.get(wanted.format).load(file)
    except Exception as error:
        return {"load_error": reason(error)}
    found = {}

    def layer(name: str, judge) -> None:
        try:
            found[name] = judge()
        except Exception as error:  # what cannot be walked or hashed is not what was saved
            found[name] = reason(error)

    def schema() -> str:
        return "; ".join(differences(wanted.schema, schema_of(state)))[:_LONGEST]

    def content() -> str:
        digest = content_digest(state)
        equal = digest == wanted.content_digest
        return "" if equal else f"expected {wanted.content_digest[:12]}..., found {digest[:12]}..."

    if wanted.schema is not None:
        layer("schema_mismatch", schema)
    if wanted.content_digest is not None:
        layer("digest_mismatch", content)
    layer("nonfinite", lambda: ", ".join(nonfinite(state))[:_LONGEST])
    return found


def _address_space() -> int | None:
    """Bytes of address space in use, where the system both says and limits it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except FileNotFoundError:
        return None
    return pages * resource.getpagesize()


def _lower(limit: int, value: int) -> None:
    """Set a soft limit, no higher than the hard one."""
    _, hard = resource.getrlimit(limit)
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (soft, hard))


def _serve() -> None:
    """Answer one line of JSON with another until the input ends."""
    # Whatever a library prints goes to the error stream; only answers go to the caller.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # The default action of the alarm ends the process even inside a loop in C that never returns.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})

    import numpy  # noqa: F401 - both before memory is measured
    import torch

    torch.set_num_threads(1)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, 0)  # reading is all it is for
    idle = _address_space()
    answers.write(b"ready\n")
    answers.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        wanted, limits = Expectation(**request["wanted"]), Limits(**request["limits"])
        if idle is not None:
            _lower(resource.RLIMIT_AS, idle + limits.memory)
        signal.setitimer(signal.ITIMER_REAL, limits.seconds)
        found = _examine(request["path"], wanted)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(found).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
