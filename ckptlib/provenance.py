"""Where and with what a result was made; must never import torch or numpy to find out.

Four questions, one function each: which machine (:func:`machine`), which file system
(:func:`filesystem`), which versions (:func:`versions`), which code (:func:`code_hash`).
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

#: File systems that live in memory: a flush there is a no-op, whatever it returns.
MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs", "zram"})
#: Block devices that are memory (Linux: drivers/block/brd.c and zram).
_MEMORY_DEVICE = re.compile(r"^/dev/(ram|zram)\d+$")
_OCTAL = re.compile(r"\\([0-7]{3})")
_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Mount:
    """One mounted file system: where, what kind, on which device, with which options."""

    mountpoint: str
    fstype: str
    device: str
    options: str
    number: str = ""

    @property
    def memory_backed(self) -> bool:
        """Whether the kind or the device says that this is memory; overlays are not resolved."""
        return self.fstype in MEMORY_FILESYSTEMS or bool(_MEMORY_DEVICE.match(self.device))


def _unescape(field: str) -> str:
    # The kernel writes space, tab, newline and backslash as three octal digits.
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


def parse_mountinfo(text: str) -> list[Mount]:
    """Read the format of ``/proc/self/mountinfo`` (man 5 proc_pid_mountinfo), in mount order."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split(" ")
        if len(left) < 6 or len(right) < 3:
            continue
        options = ",".join(dict.fromkeys(f"{left[5]},{right[2]}".split(",")))
        mounts.append(
            Mount(_unescape(left[4]), right[0], _unescape(right[1]), _unescape(options), left[2])
        )
    return mounts


def _mounts() -> list[Mount]:
    try:
        return parse_mountinfo(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))
    except FileNotFoundError:
        import psutil

        return [
            Mount(part.mountpoint, part.fstype, part.device, part.opts)
            for part in psutil.disk_partitions(all=True)
        ]


def _existing(path: str | os.PathLike) -> Path:
    place = Path(path).resolve()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def mount_of(path: str | os.PathLike, mounts: list[Mount] | None = None) -> Mount:
    """Find the mount that holds a path, or that would hold it once it exists.

    Among mounts on a prefix of the path the longest wins, and of two at one place the later one,
    which hides the earlier.
    """
    place = _existing(path)
    found = Mount(str(place), "unknown", "unknown", "")
    depth = -1
    for mount in _mounts() if mounts is None else mounts:
        point = Path(mount.mountpoint)
        if (place == point or point in place.parents) and len(point.parts) >= depth:
            found, depth = mount, len(point.parts)
    return found


def memory_backed(path: str | os.PathLike, mounts: list[Mount] | None = None) -> bool:
    """Whether what is written at this path stays in memory, so that no flush means anything.

    An overlay writes to its upper directory, so that one decides where it can be seen from here;
    inside a container it usually cannot, and the answer is then the optimistic one.
    """
    seen = _mounts() if mounts is None else mounts
    mount = mount_of(path, seen)
    for _ in range(8):  # overlays on overlays end somewhere; a loop of names must, too
        upper = re.search(r"(?:^|,)upperdir=([^,]+)", mount.options)
        if mount.fstype != "overlay" or not upper or not os.path.exists(upper[1]):
            break
        mount = mount_of(upper[1], seen)
    return mount.memory_backed


def filesystem(path: str | os.PathLike) -> dict:
    """Describe the file system under a path, with keys in a fixed order.

    Returns
    -------
    dict
        ``type``, ``device``, ``mountpoint``, ``options``, ``memory_backed``.
    """
    mount = mount_of(path)
    return {
        "type": mount.fstype,
        "device": mount.device,
        "mountpoint": mount.mountpoint,
        "options": mount.options,
        "memory_backed": memory_backed(path),
    }


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        return found[1].strip() if found else platform.processor() or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


@cache
def _machine() -> tuple[tuple[str, str | int], ...]:
    return (
        ("system", platform.system()),
        ("kernel", platform.release()),
        ("architecture", platform.machine()),
        ("cpu", _cpu_model()),
        ("cores", os.cpu_count() or 0),
    )


def machine() -> dict:
    """Describe this machine: system, kernel release, architecture, processor, cores."""
    return dict(_machine())


def versions(packages: tuple[str, ...] = ("torch", "numpy")) -> dict[str, str]:
    """Give Python's version and those of some packages from their metadata; imports none."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _source(name: str, package: str, root: Path) -> Path | None:
    """Find the file of a module below a package without importing anything."""
    if name != package and not name.startswith(package + "."):
        return None
    base = root.joinpath(*name.split(".")[1:])
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return path
    return None


def _imported(tree: ast.AST, home: str) -> set[str]:
    """Collect every dotted name that a source imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, home) if node.level else base
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def _named_at_run_time(tree: ast.AST, home: str, modules: tuple[str, ...]) -> set[str]:
    """Collect the modules that a source which calls ``import_module`` may mean by its strings."""
    words = {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, (ast.Name, ast.Attribute))
    }
    if not words & {"import_module", "__import__"}:
        return set()
    patterns = set()
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        pieces = [
            re.escape(part.value) if isinstance(part, ast.Constant) else r"\w+"
            for part in parts
            if isinstance(part, ast.FormattedValue)
            or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        ]
        pattern = "".join(pieces)
        if pattern.startswith(r"\."):
            pattern = re.escape(home) + pattern
        if pattern.startswith(modules[0].partition(".")[0]):
            patterns.add(pattern)
    return {name for name in modules for pattern in patterns if re.fullmatch(pattern, name)}


@lru_cache(maxsize=1024)
def _references(content: bytes, home: str, modules: tuple[str, ...]) -> frozenset[str]:
    """Everything that one source may import; remembered, since sources are parsed many times."""
    tree = ast.parse(content)
    return frozenset(_imported(tree, home) | _named_at_run_time(tree, home, modules))


def sources(module: str, *, package: str = "ckptlib", root: Path = _PACKAGE) -> dict[str, Path]:
    """List the source files that a module's behaviour rests on.

    Parameters
    ----------
    module : str
        Dotted name. The package itself stands for all of its modules; a module outside of it (a
        test, a user's script) counts as itself and what it imports of the package.
    package, root
        The package whose modules are followed, and its directory.

    Returns
    -------
    dict of str to Path
        Module name to file, sorted: the module, the packages around it, and everything of the
        package that these import, directly or not, also inside functions.
    """
    found: dict[str, Path] = {}
    modules = tuple(
        ".".join([package, *path.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
        for path in sorted(root.rglob("*.py"))
    )
    waiting = list(modules) if module == package else [module]
    while waiting:
        name = waiting.pop()
        path = _source(name, package, root)
        if path is None and name == module:
            path = _outside(module)
        if path is None or name in found:
            continue
        found[name] = path
        is_package = path.name == "__init__.py"
        home = name if is_package else name.rpartition(".")[0]
        waiting.extend(_references(path.read_bytes(), home, modules))
        waiting.append(name.rpartition(".")[0])
    return dict(sorted(found.items()))


def _outside(module: str) -> Path | None:
    loaded = sys.modules.get(module)
    origin = getattr(loaded, "__file__", None)
    if origin is None and loaded is None:
        spec = importlib.util.find_spec(module)
        origin = spec.origin if spec else None
    return Path(origin) if origin else None


def code_hash(module: str = "ckptlib", *, package: str = "ckptlib", root: Path = _PACKAGE) -> str:
    """Hash the sources that decide a module's results, with the torch and numpy versions.

    A change anywhere in the module or in what it imports of the package changes the hash; a
    change elsewhere does not, so that editing a figure does not invalidate a night of trials.

    Returns
    -------
    str
        SHA-256, 64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    used = versions()
    for package_name in ("torch", "numpy"):
        digest.update(f"{package_name}={used[package_name]}\n".encode())
    for name, path in sources(module, package=package, root=root).items():
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
