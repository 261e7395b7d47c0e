"""Batches of trials on joblib's workers, here or on a Dask cluster; a trial's error is never lost.

There is no pool, queue or cluster of our own: joblib's ``loky`` and ``dask`` backends do the work.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckptlib.errors import CkptError, InvalidInput, explain

ENGINES = ("loky", "dask")
#: How long a Dask scheduler may take to answer, in seconds.
CONNECT_TIMEOUT = 10
RunBatch = Callable[[list[dict], Path], list[dict]]


class TrialFailed(CkptError):
    """A trial raised an error, or its worker died; batches that had finished are kept."""


@dataclass(frozen=True)
class Batch:
    """Trials that run one after the other in one worker; ``key`` covers all that decides them."""

    key: str
    trials: list[dict]

    @property
    def label(self) -> str:
        """The batch by the ids of its trials."""
        first, last = self.trials[0]["trial_id"], self.trials[-1]["trial_id"]
        return f"trial {first}" if first == last else f"trials {first} to {last}"


@dataclass
class Done:
    """What came of a batch: its rows, or the traceback and, where it is known, the trial."""

    batch: Batch
    rows: list[dict] = field(default_factory=list)
    failure: str = ""
    trial: str | None = None


class _Watched(list):
    """The trials of a batch, remembering which one a ``for`` loop has reached."""

    current: str | None = None

    def __iter__(self):
        for trial in super().__iter__():
            self.current = trial["trial_id"]
            yield trial
        self.current = None  # a loop that ran through, say to collect seeds, says nothing


def _run(run_batch: RunBatch, batch: Batch, scratch: Path) -> Done:
    """Run one batch in a worker, in a scratch folder of its own that is gone afterwards."""
    trials = _Watched(batch.trials)
    scratch.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="batch-", dir=scratch))
    try:
        return Done(batch, list(run_batch(trials, place)))
    except MemoryError:
        raise
    except Exception:
        return Done(batch, failure=traceback.format_exc(), trial=trials.current)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def finished(
    run_batch: RunBatch,
    batches: list[Batch],
    scratch: Path,
    *,
    jobs: int,
    engine: str = "loky",
    scheduler: str = "",
) -> Iterator[Done]:
    """Run batches and yield each as it finishes, in whatever order.

    Closing the iterator stops what is still running.

    Raises
    ------
    TrialFailed
        A worker died.
    InvalidInput
        No Dask scheduler answers at ``scheduler``.
    """
    import joblib

    if not batches:
        return
    tasks = (joblib.delayed(_run)(run_batch, batch, scratch) for batch in batches)
    with _backend(engine, scheduler, min(jobs, len(batches))) as workers:
        stream = joblib.Parallel(n_jobs=workers, return_as="generator_unordered", batch_size=1)(
            tasks
        )
        try:
            yield from stream
        except (CkptError, MemoryError):
            raise
        except Exception as error:  # never a trial's own, which comes back as Done
            raise TrialFailed(
                f"a worker died ({type(error).__name__}: {error}); finished trials are kept. "
                "Run again to go on, with fewer workers if memory was short."
            ) from error
        finally:
            with warnings.catch_warnings():  # that closing cancels tasks is what it is for
                warnings.filterwarnings("ignore", message=".*have been cancelled")
                stream.close()


def elsewhere(function: Callable, *arguments):
    """Call one function in a worker process, for what must not happen in a notebook's kernel."""
    import joblib

    with joblib.parallel_config("loky", inner_max_num_threads=1):
        (result,) = joblib.Parallel(n_jobs=2)([joblib.delayed(function)(*arguments)])
    return result


@contextlib.contextmanager
def _backend(engine: str, scheduler: str, jobs: int) -> Iterator[int]:
    """Select joblib's backend for a block; give the number of workers to ask for."""
    import joblib

    if engine == "loky":
        with joblib.parallel_config("loky", inner_max_num_threads=1):
            yield jobs
        return
    from distributed import Client, LocalCluster

    with contextlib.ExitStack() as stack:
        cluster: object = scheduler
        if not scheduler:
            cluster = stack.enter_context(
                LocalCluster(
                    n_workers=jobs,
                    threads_per_worker=1,
                    host="127.0.0.1",  # nobody else on the network may submit work
                    dashboard_address="127.0.0.1:0",
                )
            )
            print(f"dask: {jobs} workers on this machine, dashboard at {cluster.dashboard_link}")
        try:
            client = stack.enter_context(Client(cluster, timeout=CONNECT_TIMEOUT))
        except (OSError, ValueError) as error:
            raise InvalidInput(
                explain(
                    "no Dask scheduler answers",
                    path=scheduler,
                    found=str(error),
                    do="start one there, or leave SCHEDULER empty for one on this machine",
                )
            ) from error
        stack.enter_context(joblib.parallel_config("dask", client=client))
        yield 1 if jobs == 1 else -1  # else the cluster's own number of workers
