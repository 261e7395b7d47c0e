"""The layered check of a file or a group before it is used; it parses nothing that is unhashed.

In use the cheap and decisive layers come first and the first failure ends the check: commit record,
manifest, sizes, SHA-256 of each file. What passed is handed on as open files, so that the bytes
that are loaded are the bytes that were hashed. (The paper's order, where loading comes first, is
:mod:`ckptlib.diagnosis`, for experiments on damaged bytes.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass, field

from ckptlib import formats, manifests, sidecars
from ckptlib.digests import sha256_file
from ckptlib.errors import CorruptCheckpoint, UntrustedPath, explain
from ckptlib.manifests import COMMIT, MANIFEST, Manifest
from ckptlib.vfs import REAL, VFS, File
from ckptlib.write_modes import check_path

VALID, INVALID, UNVERIFIED, INDETERMINATE = "VALID", "INVALID", "UNVERIFIED", "INDETERMINATE"
#: Errors that say what is there, not that it cannot be read just now.
COMPLETED = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO}


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    ``status`` is VALID, INVALID (a completed check failed, or nothing was committed), UNVERIFIED
    (no digest on record) or INDETERMINATE (it could not be judged now: an I/O error, or a record of
    a later version). ``layer`` is the check that decided: ``commit``, ``manifest``, ``identity``,
    ``size``, ``sha256``, ``load``, ``finite``, ``read`` or, for VALID, empty.
    """

    status: str
    layer: str = ""
    reason: str = ""
    path: str = ""
    file: str = ""
    absent: bool = False  # ``file`` is not there, as opposed to being wrong
    errno: int = 0  # of the operating system, where reading failed

    def __bool__(self) -> bool:
        return self.status == VALID

    def __str__(self) -> str:
        where = f" {self.file}" if self.file else ""
        return f"{self.status}{where}: {self.layer}: {self.reason}" if self.reason else self.status


@dataclass
class Checked:
    """A verdict with what it rests on: the manifest, and each part's file, open and hashed."""

    verdict: Verdict
    manifest: Manifest | None = None
    manifest_digest: str = ""
    files: dict[str, File] = field(default_factory=dict)

    def close(self) -> None:
        for file in self.files.values():
            with contextlib.suppress(OSError):  # after reading, it says nothing
                file.close()
        self.files = {}


class _Stop(Exception):
    """The first failed layer."""

    def __init__(
        self,
        status: str,
        layer: str,
        reason: str,
        file: str = "",
        *,
        absent: bool = False,
        errno: int = 0,
    ):
        super().__init__(reason)
        self.fields = {"status": status, "layer": layer, "reason": reason, "file": file}
        self.fields |= {"absent": absent, "errno": errno}

    def verdict(self, path: str) -> Verdict:
        return Verdict(path=path, **self.fields)


@contextlib.contextmanager
def _layer(layer: str, file: str):
    """Map what goes wrong in one layer to a verdict; anything else propagates."""
    try:
        yield
    except manifests.NewerSchema as error:
        raise _Stop(INDETERMINATE, layer, str(error), file) from None
    except FileNotFoundError:
        raise _Stop(INVALID, layer, f"{file} is missing", file, absent=True) from None
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        if error.errno in COMPLETED:
            reason = f"{file} is not a regular file ({name})"
            raise _Stop(INVALID, layer, reason, file) from None
        reason = f"{file} cannot be read now ({name})"
        raise _Stop(INDETERMINATE, "read", reason, file, errno=error.errno or 0) from None
    except (CorruptCheckpoint, UntrustedPath) as error:
        raise _Stop(INVALID, layer, str(error), file) from None


def _demand(holds: bool, layer: str, reason: str, file: str = "") -> None:
    if not holds:
        raise _Stop(INVALID, layer, reason, file)


def _check_size_and_hash(file: File, name: str, size: int, sha256: str | None) -> None:
    found = file.stat().st_size
    _demand(found == size, "size", f"{name}: expected {size} bytes, found {found}", name)
    if sha256 is None:
        raise _Stop(UNVERIFIED, "sha256", f"{name}: no digest on record", name)
    digest, _ = sha256_file(file)
    reason = f"{name}: expected SHA-256 {sha256[:12]}..., found {digest[:12]}..."
    _demand(digest == sha256, "sha256", reason, name)


def read_manifest(vfs: VFS, directory: str) -> tuple[Manifest, str]:
    """The committed manifest of a step directory and its digest; parts are not looked at.

    Raises ``_Stop``; use :func:`peek` or :func:`check_group` from outside.
    """
    with _layer("commit", COMMIT):
        is_directory = stat.S_ISDIR(vfs.stat(directory).st_mode)
    _demand(is_directory, "commit", "it is a link or a file, not a directory")
    with _layer("commit", COMMIT):
        commit = sidecars.read_small(vfs, os.path.join(directory, COMMIT), manifests.MAX_COMMIT)
    with _layer("manifest", MANIFEST):
        path = os.path.join(directory, MANIFEST)
        text = sidecars.read_small(vfs, path, manifests.MAX_MANIFEST)
    if commit != manifests.commit_bytes(text):
        with _layer("commit", COMMIT):
            document = sidecars.parse(commit, COMMIT)
            manifests.check_schema(document, manifests.COMMIT_SCHEMA, COMMIT)
        raise _Stop(INVALID, "commit", "COMMIT.json does not match MANIFEST.json", COMMIT)
    with _layer("manifest", MANIFEST):
        manifest = manifests.from_bytes(text, path)
    return manifest, manifests.digest(text)


def peek(vfs: VFS, directory: str) -> tuple[Manifest | None, str, Verdict]:
    """The committed manifest alone, cheaply: which run, step and sequence this claims to be."""
    try:
        manifest, digest = read_manifest(vfs, directory)
        return manifest, digest, Verdict(VALID, path=directory)
    except _Stop as stop:
        return None, "", stop.verdict(directory)


def check_group(
    directory: str, *, step: int | None = None, vfs: VFS = REAL, keep_open: bool = False
) -> Checked:
    """Check a step directory: commit, manifest, identity, then size and SHA-256 of each part.

    Parameters
    ----------
    step : int, optional
        The step that this directory's name stands for; a manifest of another step is refused.
    keep_open : bool
        Hand the hashed files on, open, in :attr:`Checked.files`; the caller closes them.
    """
    checked = Checked(Verdict(VALID, path=directory))
    try:
        manifest, checked.manifest_digest = read_manifest(vfs, directory)
        checked.manifest = manifest
        if step is not None:
            reason = f"the directory stands for step {step}, its manifest for {manifest.step}"
            _demand(manifest.step == step, "identity", reason, MANIFEST)
        # all are opened before any is hashed: a writer may prune this directory meanwhile, and
        # open files stay readable
        for entry in manifest.entries:
            if entry.format not in formats.FORMATS:
                reason = f"{entry.file}: unknown format {entry.format[:50]!r}"
                raise _Stop(INDETERMINATE, "manifest", reason, MANIFEST)
            with _layer("size", entry.file):
                checked.files[entry.name] = vfs.open(os.path.join(directory, entry.file))
        for entry in manifest.entries:
            with _layer("sha256", entry.file):
                file = checked.files[entry.name]
                _check_size_and_hash(file, entry.file, entry.size, entry.sha256)
    except _Stop as stop:
        checked.close()
        checked.verdict = stop.verdict(directory)
    except BaseException:
        checked.close()
        raise
    if not keep_open:
        checked.close()
    return checked


def check_file(path: str, *, vfs: VFS = REAL, keep_open: bool = False) -> Checked:
    """Check a single file against its sidecar; the open file is handed on under its base name."""
    name, checked = os.path.basename(path), Checked(Verdict(VALID, path=path))
    try:
        with _layer("size", name):
            file = checked.files[name] = vfs.open(path)
        try:
            with _layer("manifest", name + sidecars.SUFFIX):
                recorded = sidecars.read(vfs, path)
        except _Stop as stop:
            if stop.fields["absent"]:
                reason = "no digest on record"
                raise _Stop(UNVERIFIED, "sha256", reason, stop.fields["file"]) from None
            raise
        sizes = sorted({d.size for d in recorded})
        found = file.stat().st_size
        _demand(found in sizes, "size", f"{name}: expected {sizes} bytes, found {found}", name)
        with _layer("sha256", name):
            digest, size = sha256_file(file)
        matching = [d for d in recorded if (d.sha256, d.size) == (digest, size)]
        reason = f"{name}: expected SHA-256 {recorded[0].sha256[:12]}..., found {digest[:12]}..."
        _demand(bool(matching), "sha256", reason, name)
        if matching[0].observed:
            raise _Stop(UNVERIFIED, "sha256", "its digest was observed, not recorded", name)
    except _Stop as stop:
        checked.close()
        checked.verdict = stop.verdict(path)
    except BaseException:
        checked.close()
        raise
    if not keep_open:
        checked.close()
    return checked


def verify(path, *, vfs: VFS = REAL) -> Verdict:
    """Judge a checkpoint without loading it.

    Parameters
    ----------
    path : path-like
        A step directory (MANIFEST.json, COMMIT.json and parts) or a file written by
        :func:`ckptlib.install` with its sidecar.

    Returns
    -------
    Verdict
        Never raises for anything that a damaged checkpoint could hold; MemoryError and
        KeyboardInterrupt propagate.
    """
    path = check_path(path)
    try:
        status = vfs.stat(path)
        if stat.S_ISLNK(status.st_mode):  # latest_ok, say
            path = os.path.join(os.path.dirname(path), vfs.readlink(path))
            status = vfs.stat(path)
        is_directory = stat.S_ISDIR(status.st_mode)
    except FileNotFoundError:
        return Verdict(INVALID, "read", "nothing is there", path)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        return Verdict(INDETERMINATE, "read", f"cannot be read now ({name})", path)
    check = check_group if is_directory else check_file
    return check(path, vfs=vfs).verdict


def load_parts(checked: Checked, map_location=None, *, finite: bool = False) -> dict[str, object]:
    """Load every part of a group from the open files whose hashes have just matched.

    Raises
    ------
    CorruptCheckpoint
        A part does not load, or is not finite where that was asked for; ``verdict`` says which.
        Anything else propagates (no memory, no such device, a mistaken ``map_location``): the
        hashes have matched, so it says nothing about the checkpoint.
    """
    from ckptlib.formats.schema import nonfinite

    parts, path = {}, checked.verdict.path

    def refuse(status: str, layer: str, reason: str, file: str) -> CorruptCheckpoint:
        verdict = Verdict(status, layer, f"{file}: {reason}", path, file)
        return CorruptCheckpoint(str(verdict), path, verdict)

    for entry in checked.manifest.entries:
        try:
            container = formats.get(entry.format)
            state = container.load(checked.files[entry.name], map_location)
        except CorruptCheckpoint as error:
            raise refuse(INVALID, "load", str(error), entry.file) from error
        except OSError as error:
            raise refuse(INDETERMINATE, "read", str(error), entry.file) from error
        if finite and (bad := nonfinite(state)):
            reason = f"NaN or infinity in {', '.join(bad[:5])}"
            raise refuse(INVALID, "finite", reason, entry.file)
        parts[entry.name] = state
    return parts


def load_file(path, *, format: str = "torch", map_location=None, vfs: VFS = REAL):
    """Load a file written by :func:`ckptlib.install`, after its hash has matched.

    Raises
    ------
    CorruptCheckpoint
        The verdict was not VALID; it is on the exception.
    """
    path = check_path(path)
    checked = check_file(path, vfs=vfs, keep_open=True)
    try:
        if not checked.verdict:
            raise CorruptCheckpoint(
                explain("refused to load", path=path, found=str(checked.verdict),
                        do="use an older checkpoint"),
                path, checked.verdict,
            )  # fmt: skip
        return formats.get(format).load(checked.files[os.path.basename(path)], map_location)
    finally:
        checked.close()
