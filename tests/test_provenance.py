"""What is said about machine, file system and code is true, and costs no tensor library."""

import subprocess
import sys
from pathlib import Path

import pytest

from ckptlib import provenance

MOUNTINFO = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
25 27 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=1024k
30 27 8:17 / /mnt/my\040disk rw,noatime shared:7 master:1 - xfs /dev/sdb1 rw,nobarrier
31 27 0:40 / /tmp rw - ext4 /dev/vdb rw
32 31 0:41 / /tmp rw - tmpfs none rw
33 27 0:50 / /container rw - overlay overlay rw,lowerdir=/lower,upperdir=/dev/shm,workdir=/w
34 27 0:51 / /layered rw - overlay overlay rw,lowerdir=/lower,upperdir=/not/visible/here,workdir=/w
35 27 1:0 / /ramdisk rw - ext4 /dev/ram0 rw
broken line
"""


@pytest.fixture(scope="module")
def mounts():
    return provenance.parse_mountinfo(MOUNTINFO)


@pytest.fixture
def everything_exists(monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr(Path, "resolve", lambda self: self)


@pytest.mark.parametrize(
    ("path", "fstype", "device"),
    [
        ("/home/ada/scratch", "ext4", "/dev/vda"),
        ("/mnt/my disk/scratch", "xfs", "/dev/sdb1"),
        ("/mnt/my diskette", "ext4", "/dev/vda"),
        ("/dev/shm", "tmpfs", "tmpfs"),
        ("/tmp/a", "tmpfs", "none"),
    ],
)
def test_the_innermost_and_latest_mount_holds_a_path(
    mounts, everything_exists, path, fstype, device
):
    mount = provenance.mount_of(path, mounts)
    assert (mount.fstype, mount.device) == (fstype, device)


def test_mount_options_and_file_system_options_are_both_kept(mounts, everything_exists):
    assert provenance.mount_of("/mnt/my disk", mounts).options == "rw,noatime,nobarrier"


@pytest.mark.parametrize(
    ("path", "in_memory"),
    [
        ("/home", False),
        ("/dev/shm/x", True),
        ("/tmp", True),
        ("/ramdisk", True),
        ("/container/x", True),
        ("/layered/x", False),
    ],
)
def test_memory_is_recognised_also_below_an_overlay(
    mounts, everything_exists, monkeypatch, path, in_memory
):
    monkeypatch.setattr(provenance.os.path, "exists", lambda path: path == "/dev/shm")
    assert provenance.memory_backed(path, mounts) is in_memory


def test_a_path_that_does_not_exist_yet_counts_as_its_nearest_ancestor(tmp_path):
    assert provenance.filesystem(tmp_path / "a" / "b") == provenance.filesystem(tmp_path)


def test_a_symbolic_link_counts_as_what_it_points_to(tmp_path, mounts):
    (tmp_path / "link").symlink_to("/dev/shm", target_is_directory=True)
    if not Path("/dev/shm").is_dir():
        pytest.skip("needs a tmpfs at /dev/shm (Linux)")
    assert provenance.mount_of(tmp_path / "link", mounts).fstype == "tmpfs"


def test_without_mountinfo_the_mounts_come_from_psutil(monkeypatch):
    import psutil

    def missing(self, **options):
        raise FileNotFoundError

    part = psutil._ntuples.sdiskpart("/dev/disk3s1", "/", "apfs", "rw,journaled")
    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [part])
    assert provenance.mount_of("/").fstype == "apfs"


def test_the_machine_and_the_versions_are_described():
    assert {"system", "kernel", "architecture", "cpu", "cores"} == set(provenance.machine())
    found = provenance.versions(("numpy", "no-such-package-here"))
    assert found["numpy"][0].isdigit() and found["no-such-package-here"] == "not installed"


def test_finding_all_this_out_imports_neither_torch_nor_numpy():
    program = (
        "import sys; from ckptlib import provenance as p\n"
        "p.machine(), p.versions(), p.filesystem('.'), p.code_hash('ckptlib.store')\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture
def package(tmp_path):
    """A package of five modules that import one another in every way that Python has."""
    files = {
        "__init__.py": "",
        "top.py": "from pkg import middle\nfrom pkg.sub.inner import thing\n",
        "middle.py": "def late():\n    import pkg.low\n",
        "low.py": "import json\n",
        "sub/__init__.py": "from importlib import import_module\n"
        "def get(name):\n    return import_module(f'pkg.sub.{name}_format')\n",
        "sub/inner.py": "from . import sibling\n",
        "sub/sibling.py": "",
        "sub/torch_format.py": "from ..low import x\n",
        "unrelated.py": "from importlib import import_module\nimport_module('.low', 'pkg')\n",
    }
    for name, text in files.items():
        (tmp_path / "pkg" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pkg" / name).write_text(text)
    return {"package": "pkg", "root": tmp_path / "pkg"}


def test_the_sources_of_a_module_are_all_that_it_can_reach(package):
    found = provenance.sources("pkg.top", **package)
    names = "low middle sub sub.inner sub.sibling sub.torch_format top"
    assert list(found) == ["pkg", *(f"pkg.{name}" for name in names.split())]


def test_the_package_itself_stands_for_all_of_its_modules(package):
    assert "pkg.unrelated" in provenance.sources("pkg", **package)


@pytest.mark.parametrize(
    "name", ["top", "middle", "low", "sub/inner", "sub/sibling", "sub/torch_format", "__init__"]
)
def test_a_change_in_anything_that_a_module_reaches_changes_its_hash(package, name):
    before = provenance.code_hash("pkg.top", **package)
    assert provenance.code_hash("pkg.top", **package) == before
    path = package["root"] / f"{name}.py"
    path.write_text(path.read_text() + "# changed\n")
    assert provenance.code_hash("pkg.top", **package) != before


def test_a_change_elsewhere_does_not_change_the_hash(package):
    before = provenance.code_hash("pkg.top", **package)
    (package["root"] / "unrelated.py").write_text("")
    assert provenance.code_hash("pkg.top", **package) == before


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_another_version_of_the_numerics_changes_the_hash(package, monkeypatch, name):
    before = provenance.code_hash("pkg.low", **package)
    used = provenance.versions()
    monkeypatch.setattr(provenance, "versions", lambda: {**used, name: "0.0"})
    assert provenance.code_hash("pkg.low", **package) != before
