"""Run one notebook in this interpreter; never leaves a kernel or half a notebook behind."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import papermill
import psutil
from ipykernel.kernelspec import RESOURCES, get_kernel_dict
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from papermill.exceptions import PapermillExecutionError

from ckptlib.errors import CkptError

#: Seconds that interrupted processes get to end by themselves.
PATIENCE_S = 5
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # one thread a process: else times and sums depend on the machine
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # a debugger's warning in every notebook
    "TQDM_DISABLE": "1",  # a bar in an executed notebook stands still; the executor shows progress
}


class OwnKernelManager(AsyncKernelManager):
    """Starts this very interpreter, whatever a user has installed under the name ``python3``."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """The kernel of the environment that the executor runs in."""
        return KernelSpec(resource_dir=str(RESOURCES), **get_kernel_dict(), env=ENVIRONMENT)

    async def start_kernel(self, **options) -> None:
        """Start it with its start-up chatter off; what notebooks print is captured all the same."""
        await super().start_kernel(stderr=subprocess.DEVNULL, **options)


class NotebookFailed(CkptError):
    """A notebook raised an error; ``path`` is the notebook as far as it was executed."""


def run_notebook(
    notebook: Path, parameters: dict, executed: Path, *, cwd: Path, progress: dict | None = None
) -> None:
    """Execute a notebook with parameters; the executed copy appears when it is complete.

    Parameters
    ----------
    notebook, executed : Path
        Source, and the file for the executed copy.
    parameters : dict
        Values for the cell tagged ``parameters``, checked by the caller.
    cwd : Path
        Working directory of the kernel.
    progress : dict, optional
        Options of papermill's progress bar over the cells; no bar without them.

    Raises
    ------
    NotebookFailed
        Kept as executed beside ``executed``, with ``.failed`` before the suffix.
    """
    executed.parent.mkdir(parents=True, exist_ok=True)
    failed = executed.with_suffix(".failed.ipynb")
    unfinished = executed.with_name(f".{executed.stem}.unfinished.ipynb")
    failed.unlink(missing_ok=True)
    try:
        papermill.execute_notebook(
            notebook,
            unfinished,
            parameters,
            progress_bar=progress or False,
            cwd=cwd,
            kernel_manager_class=OwnKernelManager,
        )
    except (PapermillExecutionError, RuntimeError) as error:  # RuntimeError: the kernel died
        executed.unlink(missing_ok=True)  # that of an earlier run would pass for this one's
        if unfinished.exists():
            os.replace(unfinished, failed)
        raise NotebookFailed(_reason(error), failed) from error
    else:
        os.replace(unfinished, executed)
    finally:
        unfinished.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    if isinstance(error, PapermillExecutionError):
        # Errors of worker processes carry their whole story; it is in the notebook.
        summary = error.evalue.strip().split("\n\n")[0]
        return f"{error.ename} in cell [{error.exec_count}]: {summary}"
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into one KeyboardInterrupt, and end every process started within.

    A kernel lives in its own session, so that a Ctrl-C in the terminal does not reach it, and its
    workers may outlive it. The family is noted when the signal comes, since it cannot be traced
    once the kernel is gone.
    """
    family: list[psutil.Process] = []

    def stop(_number, _frame) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not cut the clean-up
        # The cell that is cut short ends in an error that nobody waits for any more.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        family.extend(psutil.Process().children(recursive=True))
        for kernel in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                kernel.send_signal(signal.SIGINT)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        _end(family)
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S if family else 0)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=PATIENCE_S)
