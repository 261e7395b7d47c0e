"""Which file systems can run here, what enables the others, and how they are made."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import os
import shutil
import uuid
from pathlib import Path

import psutil
import pytest
from conftest import demand_power
from devices import fresh, in_namespace

from ckptlib.crashes import blockdev, filesystems, mounts
from ckptlib.crashes.blockdev import Image
from ckptlib.crashes.filesystems import FILESYSTEMS, MAIN, MakeFailed, filesystem, support
from ckptlib.errors import InvalidInput

# -- what can run -------------------------------------------------------------------------------


class Machine:
    """A machine on which everything is there, until a test takes something away."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self._patch = patch
        self.files: dict[str, str] = {}  # texts of files in /proc
        self.refused: dict[str, OSError] = {}  # by device
        patch.setattr(filesystems.sys, "platform", "linux")
        patch.setattr(filesystems.os, "geteuid", lambda: 0)
        patch.setattr(filesystems.os, "open", self._open)
        patch.setattr(filesystems.os, "close", lambda descriptor: None)
        patch.setattr(filesystems.Path, "read_text", lambda path: self.files[str(path)])
        patch.setattr(filesystems.Path, "exists", lambda path: str(path) in self.files)
        patch.setattr(filesystems.shutil, "which", lambda name, path=None: f"/usr/sbin/{name}")
        patch.setattr(blockdev, "library", lambda: None)
        patch.setattr(mounts, "isolated", lambda function: None)
        self.capabilities(1 << filesystems.CAP_SYS_ADMIN)
        self.files["/proc/filesystems"] = "nodev\ttmpfs\n\text4\n\txfs\n\tbtrfs\n"

    def _open(self, path, flags):
        if path in self.refused:
            raise self.refused[path]
        return 99

    def capabilities(self, effective: int) -> None:
        self.files["/proc/self/status"] = f"Name:\tpython\nCapEff:\t{effective:016x}\n"

    def replace(self, owner, name: str, value) -> None:
        self._patch.setattr(owner, name, value)

    def raising(self, owner, name: str, error: Exception) -> None:
        def fail(*arguments, **keywords):
            raise error

        self.replace(owner, name, fail)


@pytest.fixture
def machine(monkeypatch):
    with monkeypatch.context() as patch:
        yield Machine(patch)


def test_where_everything_is_there_every_file_system_can_run(machine):
    assert support() == dict.fromkeys(FILESYSTEMS, "")


def refuse(device: str):
    error = FileNotFoundError(errno.ENOENT, "No such file or directory")
    return lambda machine: machine.refused.update({device: error})


@pytest.mark.parametrize(
    ("lack", "said", "command"),
    [
        (lambda m: m.replace(filesystems.sys, "platform", "darwin"), "darwin", "Linux"),
        (lambda m: m.replace(os, "geteuid", lambda: 1000), "root", "sudo make reproduce"),
        (lambda m: m.capabilities(0xA80425FB), "CAP_SYS_ADMIN", "--privileged"),
        (refuse("/dev/fuse"), "/dev/fuse", "modprobe fuse"),
        (refuse("/dev/fuse"), "No such file", "--privileged"),
        (refuse("/dev/loop-control"), "/dev/loop-control", "modprobe loop"),
        (
            lambda m: m.raising(blockdev, "library", OSError("Unable to find libfuse")),
            "Unable to find libfuse", "apt install fuse3",
        ),
        (
            lambda m: m.raising(blockdev, "library", ModuleNotFoundError("No module 'mfusepy'")),
            "mfusepy", "make setup",
        ),
        (
            lambda m: m.raising(mounts, "isolated", PermissionError(errno.EPERM, "not permitted")),
            "refused ([Errno 1] not permitted)", "--privileged",
        ),
    ],
    ids=["not Linux", "not root", "no capability", "no fuse", "fuse in a container", "no loop",
         "no libfuse", "no mfusepy", "forbidden"],
)  # fmt: skip
def test_what_the_machine_lacks_is_said_of_every_file_system_with_the_remedy(
    machine, lack, said, command
):
    lack(machine)
    reasons = set(support().values())
    assert len(reasons) == 1
    assert said in (reason := reasons.pop()) and command in reason


@pytest.mark.parametrize("name", FILESYSTEMS)
def test_a_mkfs_that_is_missing_is_said_of_its_own_file_systems_with_the_package(machine, name):
    entry = FILESYSTEMS[name]
    machine.replace(
        shutil, "which", lambda tool, path=None: None if tool == entry.make[0] else "/x"
    )
    missing = {other for other, reason in support().items() if reason}
    assert missing == {other.name for other in FILESYSTEMS.values() if other.kind == entry.kind}
    package = {"ext4": "e2fsprogs", "xfs": "xfsprogs", "btrfs": "btrfs-progs"}[entry.kind]
    assert support()[name] == f"mkfs.{entry.kind} is missing: apt install {package}"


@pytest.mark.parametrize("kind", MAIN)
def test_a_kernel_that_lacks_a_file_system_is_told_apart_from_one_that_has_it_as_a_module(
    machine, kind
):
    known = machine.files["/proc/filesystems"]
    machine.files["/proc/filesystems"] = known.replace(f"\t{kind}\n", "\n")
    lacking = {name for name, reason in support().items() if reason}
    assert lacking == {entry.name for entry in FILESYSTEMS.values() if entry.kind == kind}
    assert f"modprobe {kind}" in support()[kind]
    machine.files[f"/lib/modules/{os.uname().release}/kernel/fs/{kind}"] = ""
    assert not any(support().values())


def test_tools_are_found_where_administrators_keep_them_though_path_leaves_that_out():
    assert {"/usr/sbin", "/sbin"} <= set(filesystems.TOOLS.split(os.pathsep))


def test_finding_out_leaves_no_descriptor_process_or_mount():
    def held():  # other tests of this worker may have left a pool of processes to be used again
        children = {child.pid for child in psutil.Process().children()}
        return set(os.listdir("/proc/self/fd")) | children, Path("/proc/self/mounts").read_text()

    descriptors_and_processes, mounted = held()
    support()
    found, mounted_now = held()
    assert found <= descriptors_and_processes
    assert mounted_now == mounted


def test_a_skip_says_why_and_in_ci_it_is_a_failure():
    reasons = {"ext4": "", "xfs": "mkfs.xfs is missing: apt install xfsprogs"}
    demand_power(["ext4"], reasons, in_ci=True)
    demand_power(["ext4"], reasons, in_ci=False)
    with pytest.raises(pytest.skip.Exception, match="apt install xfsprogs"):
        demand_power(["ext4", "xfs"], reasons, in_ci=False)
    with pytest.raises(pytest.fail.Exception, match=r"may not be skipped in CI.*apt install"):
        demand_power(["ext4", "xfs"], reasons, in_ci=True)


# -- the table ----------------------------------------------------------------------------------


def test_the_table_names_each_entry_by_its_own_name_and_holds_the_three_of_the_claims():
    assert [entry.name for entry in FILESYSTEMS.values()] == list(FILESYSTEMS)
    assert [filesystem(name).kind for name in MAIN] == list(MAIN)


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(InvalidInput, match=r"ext4, .*btrfs.*found 'zfs'"):
        filesystem("zfs")


@pytest.mark.needs_power
@in_namespace
def test_another_file_system_is_one_more_entry(tmp_path, monkeypatch):
    """ext2 has no journal; nothing but the table knows of it."""
    new = dataclasses.replace(
        FILESYSTEMS["ext4"], name="ext2", kind="ext4", size=2**23,
        make=("mkfs.ext2", "-q", "-F", "-U", "{uuid}"),
    )  # fmt: skip
    monkeypatch.setitem(FILESYSTEMS, "ext2", new)
    assert support()["ext2"] == ""
    log = filesystem("ext2").log(tmp_path / "image", seed=1)
    place = tmp_path / "mnt"
    place.mkdir()
    with filesystem("ext2").mounted(Image(log.size, log.base).path, place):
        (place / "file").write_text("x")
        assert f" {place} ext4 " in Path("/proc/self/mounts").read_text()


def identity(name: str, log) -> uuid.UUID:
    """The UUID in a superblock, where the three kinds keep it."""
    offset = {"ext4": 1024 + 104, "xfs": 32, "btrfs": 2**16 + 32}[filesystem(name).kind]
    image = Image(log.size, log.base)
    found = uuid.UUID(bytes=image.read(offset, 16))
    image.close()
    return found


@pytest.mark.needs_power("ext4", "xfs", "btrfs")
@pytest.mark.parametrize("name", MAIN)
def test_the_seed_gives_the_uuid_and_the_log_says_which_seed_it_was(tmp_path, name):
    made = [filesystem(name).log(tmp_path / "image", seed, run="a") for seed in (1, 1, 2)]
    first, again, other = (identity(name, log) for log in made)
    assert first == again != other
    assert first.version == 4
    assert made[2].about == {"filesystem": name, "seed": 2, "run": "a"}
    assert made[0].size == filesystem(name).size and made[0].records == []
    assert list(tmp_path.iterdir()) == []  # the image is in the log now


@pytest.mark.needs_power(*FILESYSTEMS)
@pytest.mark.parametrize("name", FILESYSTEMS)
@in_namespace
def test_a_fresh_one_can_be_mounted_with_its_options_and_written_to(tmp_path, name):
    entry, place = filesystem(name), tmp_path / "mnt"
    place.mkdir()
    log = entry.log(tmp_path / "image", seed=3)
    image = Image(log.size, log.base)
    with entry.mounted(image.path, place):
        (place / "file").write_bytes(b"x" * 100_000)
        [line] = [row for row in Path("/proc/self/mounts").read_text().splitlines()
                  if f" {place} " in row]  # fmt: skip
        assert line.split()[2] == entry.kind
        assert set(filter(None, entry.options.split(","))) <= set(line.split()[3].split(","))
    with entry.mounted(image.path, place):
        assert (place / "file").read_bytes() == b"x" * 100_000
    image.close()


@pytest.mark.needs_power("ext4", "xfs", "btrfs")
@pytest.mark.parametrize("name", MAIN)
def test_one_can_be_made_while_another_process_uses_one_of_the_same_seed(tmp_path, name):
    log = fresh(name)
    with mounts.loop_device(Image(log.size, log.base).path):
        again = filesystem(name).log(tmp_path / "image", seed=1)
    assert identity(name, again) == identity(name, log)


# -- making that fails --------------------------------------------------------------------------


def broken(*make: str):
    return dataclasses.replace(FILESYSTEMS["ext4"], make=make, size=2**20)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (("sh", "-c", "echo no room for it >&2; exit 3"), "no room for it"),
        (("sh", "-c", "echo told elsewhere; exit 1"), "told elsewhere"),
        (("sh", "-c", "kill -9 $$"), "exit status -9"),
        (("mkfs.of-nobody",), "No such file"),
    ],
    ids=["stderr", "stdout", "killed", "missing"],
)
def test_a_mkfs_that_fails_is_quoted_with_its_package_and_leaves_no_image(tmp_path, make, said):
    with pytest.raises(MakeFailed) as caught:
        broken(*make).log(tmp_path / "image", seed=1)
    text = str(caught.value)
    assert said in text and "e2fsprogs" in text and make[0] in text
    assert caught.value.path == str(tmp_path / "image")
    assert list(tmp_path.iterdir()) == []


def test_a_mkfs_that_asks_a_question_gets_no_answer_from_the_terminal(tmp_path):
    with pytest.raises(MakeFailed, match="nobody answers"):
        broken("sh", "-c", "read answer || (echo nobody answers; exit 1)").log(
            tmp_path / "image", seed=1
        )


@pytest.mark.needs_power
def test_what_the_real_mkfs_says_is_in_the_error(tmp_path):
    with pytest.raises(MakeFailed, match=r"(?i)mkfs.ext4 failed.*invalid"):
        broken("mkfs.ext4", "-q", "-F", "-b", "77").log(tmp_path / "image", seed=1)


def test_libfuse_3_is_chosen_though_2_would_be_found_first(monkeypatch):
    monkeypatch.delenv("FUSE_LIBRARY_NAME", raising=False)
    monkeypatch.setattr(
        importlib, "import_module", lambda name: (name, os.environ["FUSE_LIBRARY_NAME"])
    )
    assert blockdev.library.__wrapped__() == ("mfusepy", "fuse3")
