"""Loop devices and mounts that undo themselves, in a mount namespace that nobody else sees.

A process that called :func:`private_namespace` owns every mount that it makes: they are gone with
its last process, even after a SIGKILL, and a loop device is released by the kernel when its last
user is (``LO_FLAGS_AUTOCLEAR``). System calls are made directly, since a mount helper's start would
cost more than the mount. Linux only, and root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import pickle
import signal
import struct
import time
import traceback
import warnings
from collections.abc import Callable, Iterator

from ckptlib.errors import CkptError, explain

# <linux/sched.h>, <sys/mount.h>, <linux/loop.h>, <linux/btrfs.h>
CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
LOOP_CTL_GET_FREE, LOOP_CONFIGURE = 0x4C82, 0x4C0A
LO_FLAGS_AUTOCLEAR = 4
LOOP_MAJOR = 7
BTRFS_FORGET_DEV = 0x50009405
SECTOR = 512  # bytes; what the device promises to write whole
# struct loop_config: fd, block size, loop_info64 (232 bytes, its flags at 52), 64 reserved bytes
_CONFIG = struct.Struct("=II52xI176x64x")
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PATIENCE_S = 10.0


class ChildDied(CkptError):
    """The process that mounts file systems ended without an answer."""


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
    library.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
    return library


def checked(result: int, path: str) -> None:
    """Raise what a C library call left in errno, if it failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


def private_namespace() -> None:
    """Give this process mounts of its own, which nobody else sees and which go with it."""
    checked(_libc().unshare(CLONE_NEWNS), "mount namespace")
    mount("none", "/", None, "", flags=MS_REC | MS_PRIVATE)


def mount(source: str, target: str, kind: str | None, options: str, *, flags: int = 0) -> None:
    """mount(2); raises OSError with the file system's errno."""
    names = os.fsencode(source), os.fsencode(target), kind and kind.encode()
    act = functools.partial(_libc().mount, *names, flags, options.encode())
    if kind == "btrfs":  # before Linux 6.7 it is refused while a copy of it is mounted elsewhere
        _until(lambda: checked(act(), target), {errno.EEXIST})
    else:
        checked(act(), target)


def unmount(target: str, *, lazily: bool = False) -> None:
    """umount2(2); ``lazily`` takes it out of sight though it is in use."""
    checked(_libc().umount2(os.fsencode(target), MNT_DETACH if lazily else 0), target)


@contextlib.contextmanager
def mounted(source: str, target: str, kind: str, options: str) -> Iterator[str]:
    """Mount for the length of a block. If a file is left open in it, that is an error."""
    mount(source, target, kind, options)
    try:
        yield target
    finally:
        try:
            _until(lambda: unmount(target), {errno.EBUSY})
        except OSError:
            with contextlib.suppress(OSError):
                unmount(target, lazily=True)
            raise


@contextlib.contextmanager
def loop_device(backing: str) -> Iterator[str]:
    """A loop device over a file, for the length of a block; the kernel frees it with its last user.

    Every flush of the device, and every write with force-unit-access, becomes an ``fsync`` of the
    file: the driver offers a volatile cache and no FUA, so the block layer sends flushes instead.
    A flush is sent after the writes that it is about have completed, so they come before it.
    """
    file = os.open(backing, os.O_RDWR | os.O_CLOEXEC)
    try:  # another process can take the free device first, or be about to let go of it
        device, descriptor = _until(lambda: _attach(file), {errno.EBUSY, errno.ENXIO})
    finally:
        os.close(file)
    try:
        yield device
    finally:
        _forget_btrfs(device)
        os.close(descriptor)  # LOOP_CLR_FD would throw away what the page cache has still to write


def _attach(file: int) -> tuple[str, int]:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
    finally:
        os.close(control)
    device = f"/dev/loop{number}"
    if not os.path.exists(device):  # a container's /dev is not filled by the kernel
        with contextlib.suppress(FileExistsError):
            os.mknod(device, 0o600 | 0o060000, os.makedev(LOOP_MAJOR, number))
    descriptor = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, LOOP_CONFIGURE, _CONFIG.pack(file, SECTOR, LO_FLAGS_AUTOCLEAR))
    except BaseException:
        os.close(descriptor)
        raise
    return device, descriptor


def _forget_btrfs(device: str) -> None:
    """Let the kernel forget a btrfs that it has unmounted.

    Before Linux 6.3 it keeps each in mind, and refuses an older state of it on another device.
    """
    if not os.path.exists("/sys/fs/btrfs"):  # or opening its control device would load the module
        return
    with contextlib.suppress(OSError):
        control = os.open("/dev/btrfs-control", os.O_RDWR | os.O_CLOEXEC)
        try:  # a buffer that can be changed, since ioctl() copies at most 1024 bytes of others
            name = bytearray(struct.pack("=q4088s", 0, device.encode()))
            fcntl.ioctl(control, BTRFS_FORGET_DEV, name)
        finally:
            os.close(control)


def _until(act: Callable, passing: set[int]):
    """Repeat what fails with an errno that passes, for a while."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno not in passing or time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def isolated(function: Callable, *arguments, **keywords):
    """Call a function in a forked child with a mount namespace of its own; give what it returns.

    The child ends with the call, and with this process, however that ends; its mounts and loop
    devices end with it. An exception comes back as itself, with the child's traceback as a note.

    Raises
    ------
    ChildDied
        It ended without an answer, or raised what cannot be handed over.
    """
    reader, writer = os.pipe()
    child = fork()
    if child == 0:
        try:
            os.close(reader)
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(_answer(function, arguments, keywords))
            os._exit(0)
        finally:
            os._exit(1)
    try:
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            answer = pipe.read()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if status != 0 or not answer:
        code = os.waitstatus_to_exitcode(status)
        raise ChildDied(
            explain("the process that mounts the file systems died",
                    found=f"signal {-code}" if code < 0 else f"exit status {code}",
                    do="run again; if the system killed it, free memory")
        )  # fmt: skip
    result, error = pickle.loads(answer)  # from our own child
    if error is not None:
        raise error
    return result


def _answer(function: Callable, arguments: tuple, keywords: dict) -> bytes:
    try:
        private_namespace()
        return pickle.dumps((function(*arguments, **keywords), None))
    except Exception as error:
        error.add_note(traceback.format_exc())
        raised = error
    try:
        answer = pickle.dumps((None, raised))
        pickle.loads(answer)
    except Exception:  # some exceptions do not survive the way
        said = "".join(traceback.format_exception(raised))
        answer = pickle.dumps(
            (None, ChildDied(f"an exception that cannot be handed over:\n{said}"))
        )
    return answer


def fork() -> int:
    """Fork; the child is killed when the thread ends that has called this, however it does."""
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the parent, not used here
        child = os.fork()
    if child == 0:
        _libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it had ended before
            os._exit(1)
    return child
