"""The file systems on which power is cut, one entry each, and whether they can run on this machine.

Every file system is made anew for each recording, with its own UUID and its developers' defaults
except for what a small image needs: its size, and nothing left for the kernel to do lazily.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptlib.crashes import blockdev, mounts
from ckptlib.crashes.blocklog import BLOCK, DeviceLog, extents, filled
from ckptlib.errors import CkptError, InvalidInput, explain

MIB = 2**20
CAP_SYS_ADMIN = 21  # <linux/capability.h>
#: Where an administrator's tools lie, though they may be left out of a user's PATH.
TOOLS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class MakeFailed(CkptError):
    """mkfs refused."""


@dataclass(frozen=True)
class FileSystem:
    """How one is made and mounted.

    ``make`` is the mkfs command, in which ``{uuid}`` stands for the file system's own; ``options``
    are the mount options of the recording and of every recovery; ``repair`` is the command that an
    administrator runs on the device when the kernel refuses to mount it; ``package`` is Debian's.
    """

    name: str
    kind: str
    size: int
    make: tuple[str, ...]
    repair: tuple[str, ...]
    package: str
    options: str = ""

    def log(self, image: Path, seed: int, **about) -> DeviceLog:
        """Make a fresh one in the file ``image``, and give it as a log without records."""
        import numpy

        words = numpy.random.SeedSequence(seed).generate_state(2, numpy.uint64)
        own = uuid.UUID(bytes=words.tobytes(), version=4)
        command = [part.format(uuid=own) for part in self.make]
        command[0] = shutil.which(command[0], path=TOOLS) or command[0]
        try:
            base = self._made(image, command)
        finally:
            Path(image).unlink(missing_ok=True)
        return DeviceLog(self.size, {"filesystem": self.name, "seed": seed, **about}, base)

    def _made(self, image: Path, command: list[str]) -> list[tuple[int, bytes]]:
        """Run mkfs on a file of zeros; give what is not zero afterwards."""
        with open(image, "wb") as file:
            file.truncate(self.size)
        try:
            done = subprocess.run([*command, str(image)], stdin=subprocess.DEVNULL, text=True,
                                  errors="replace", capture_output=True, check=False,
                                  preexec_fn=_alone)  # fmt: skip
            status = done.returncode
            said = (done.stderr.strip() or done.stdout.strip())[-500:] or f"exit status {status}"
        except OSError as error:
            status, said = error.errno, error.strerror
        if status:
            raise MakeFailed(
                explain(f"{self.make[0]} failed", path=image, found=said,
                        do=f"try it by hand; it comes with the package {self.package}"),
                image,
            )  # fmt: skip
        with open(image, "rb") as file:
            descriptor = file.fileno()
            return extents(
                lambda offset, length: os.pread(descriptor, length, offset),
                self.size,
                filled(descriptor, 0, self.size),
            )

    def repaired(self, device: str) -> None:
        """Run the repair; whether it has helped, the next mount tells."""
        tool = shutil.which(self.repair[0], path=TOOLS) or self.repair[0]
        with contextlib.suppress(OSError):  # not installed
            subprocess.run([tool, *self.repair[1:], device], capture_output=True, check=False)

    @contextlib.contextmanager
    def mounted(self, backing: str, mountpoint) -> Iterator[str]:
        """Mount what a file holds, through a loop device, for the length of a block."""
        with (
            mounts.loop_device(backing) as device,
            mounts.mounted(device, str(mountpoint), self.kind, self.options) as place,
        ):
            yield place


def _alone() -> None:
    """Hide all block devices from mkfs, of which its file is none.

    mkfs.btrfs reads each, notes what it saw in /run, and refuses a UUID that is there already, as
    when another process works with the same seed.
    """
    os.environ["BLKID_FILE"] = os.devnull
    with contextlib.suppress(OSError):  # not root
        mounts.private_namespace()
        mounts.mount("none", "/sys/block", "tmpfs", "")
        mounts.mount(os.devnull, "/proc/partitions", None, "", flags=mounts.MS_BIND)


def _ext4(name: str, options: str = "") -> FileSystem:
    make = ("mkfs.ext4", "-q", "-F", "-b", "4096", "-J", "size=4", "-U", "{uuid}", "-E",
            "lazy_itable_init=0,lazy_journal_init=0,nodiscard,hash_seed={uuid}")  # fmt: skip
    repair = "e2fsck", "-f", "-y"
    return FileSystem(name, "ext4", 160 * MIB, make, repair, "e2fsprogs", options)


FILESYSTEMS = {
    entry.name: entry
    for entry in (
        _ext4("ext4"),  # data=ordered, auto_da_alloc
        _ext4("ext4_writeback", "data=writeback"),
        _ext4("ext4_journal", "data=journal"),
        _ext4("ext4_noauto_da_alloc", "noauto_da_alloc"),
        FileSystem(
            "xfs", "xfs", 300 * MIB, ("mkfs.xfs", "-q", "-f", "-K", "-m", "uuid={uuid}"),
            ("xfs_repair",), "xfsprogs", "nouuid",  # another process may be replaying the same log
        ),
        FileSystem(
            "btrfs", "btrfs", 128 * MIB, ("mkfs.btrfs", "-q", "-f", "-K", "-U", "{uuid}"),
            ("btrfs", "rescue", "super-recover", "-y"), "btrfs-progs",
        ),
    )
}  # fmt: skip
#: The three that the claims are about; the others are ext4 under other mount options.
MAIN = ("ext4", "xfs", "btrfs")


def filesystem(name: str) -> FileSystem:
    """Give one entry of :data:`FILESYSTEMS`, or raise InvalidInput with the names."""
    if name not in FILESYSTEMS:
        raise InvalidInput(
            explain("unknown file system", expected=", ".join(FILESYSTEMS), found=repr(name),
                    do="choose one of these, or add it to ckptlib/crashes/filesystems.py")
        )  # fmt: skip
    return FILESYSTEMS[name]


def support() -> dict[str, str]:
    """Per file system: an empty text if power can be cut on it here, else why not and what to do.

    Nothing is made to find out, and nothing is left.
    """
    common = _machine()
    return {name: common or _own(entry) for name, entry in FILESYSTEMS.items()}


def _machine() -> str:
    if sys.platform != "linux":
        return f"power loss needs Linux's loop devices; this is {sys.platform}"
    if not _is_administrator():
        return (
            "power loss mounts file systems, which needs root with CAP_SYS_ADMIN. As root, or "
            "in a container started with --privileged: sudo make reproduce"
        )
    for device, module in (("/dev/fuse", "fuse"), ("/dev/loop-control", "loop")):
        try:
            os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            return (
                f"{device} cannot be opened ({error.strerror}): modprobe {module}, "
                f"or start the container with --privileged"
            )
    try:
        blockdev.library()
    except ModuleNotFoundError as error:
        return f"{error}: make setup"
    except (ImportError, OSError, AttributeError) as error:
        return f"libfuse 3 cannot be loaded ({error}): apt install fuse3"
    try:
        mounts.isolated(_attached)
    except OSError as error:  # the profile of a container can forbid what its capabilities allow
        return (
            f"mounts or loop devices are refused ({error}): start the container with "
            "--privileged, on Linux 5.8 or newer"
        )
    return ""


def _attached() -> None:
    with mounts.loop_device(blockdev.Image(BLOCK).path):
        pass


def _is_administrator() -> bool:
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return os.geteuid() == 0 and bool(int(fields["CapEff"], 16) >> CAP_SYS_ADMIN & 1)


def _own(entry: FileSystem) -> str:
    if shutil.which(entry.make[0], path=TOOLS) is None:
        return f"{entry.make[0]} is missing: apt install {entry.package}"
    known = Path("/proc/filesystems").read_text().split()
    module = Path("/lib/modules", os.uname().release, "kernel/fs", entry.kind)
    if entry.kind not in known and not module.exists():
        return f"this kernel has no {entry.kind}: modprobe {entry.kind}, or use another kernel"
    return ""
