"""Does anything notice? The library is broken on purpose, and the trials must find it out.

Each mutant is a mistake that somebody could make. It is caught if a trial's outcome changes, if a
fault comes out otherwise than was declared, or if a trace breaks the trace rule. The same trials
find nothing wrong with the library as it is: that is the control.

One mutant of the list is harmless, and is declared so here, with the reason.
"""

from __future__ import annotations

import contextlib
import os

import pytest
from faulty import WatchingVFS

from ckptlib import groups, housekeeping, install, store, streams, temps, verify, write_modes
from ckptlib.catalog import Catalog
from ckptlib.crashes import kill, oracle, trace_rule
from ckptlib.errors import CkptError, WriteFailed
from ckptlib.experiments import failing_operations, flows
from ckptlib.experiments.crash_operations import _run as kill_once
from ckptlib.experiments.crash_operations import _trial
from ckptlib.faults import errors

DIRSYNC = "atomic_dirsync"
EVERY = 3  # one place to die in so many; enough, since a mistake shows at more than one


# -- the trials -----------------------------------------------------------------------------------


def evidence(folder) -> list[str]:
    """What undisturbed flows, kills, faults and a second writer say against the library."""
    found = []
    arms = [(name, DIRSYNC, protocol) for name in ("later save", "prune, keep=1", "prune, damaged",
                                                   "save again", "scrub")
            for protocol in ("per_file", "batched")]  # fmt: skip
    arms.append(("overwrite", DIRSYNC, "single_file"))
    for number, arm in enumerate(arms):
        try:
            found += [f"{arm[0]}: {what}" for what in _trials(arm, folder / str(number))]
        except (CkptError, OSError, AssertionError, IndexError) as error:
            found.append(f"{arm[0]}: undisturbed, it fails with {type(error).__name__}")
        if found:
            return found  # one is enough
    return found + _two_writers(folder / "two")


def _trials(arm, folder):
    place = flows.place(folder / "template", *arm, 1)
    ledger = place.prepare()
    undisturbed = place.copy(folder / "undisturbed")
    trace, _ = undisturbed.recorded()
    yield from trace_rule.broken(trace, arm[1])
    told = ledger.copy()
    if place.flow.step is not None:
        told.acknowledge(place.flow.step)
    found = undisturbed.judge(told)
    if not found.expected or found.outcome != "kept":
        yield f"undisturbed, {found.outcome} {found.rule}"
    if undisturbed.next_save(told, found) != oracle.Aftermath(True, 0):
        yield "undisturbed, the next save fails or leaves something"
    points = list(kill.every_point(trace))
    for number in range(0, len(points), EVERY):
        trial = _trial(*arm, 1, points[number], number, len(points))
        row = kill_once(trial, place, ledger.copy(), folder / "killed")
        if not row["expected"]:
            yield f"killed {row['crash_point']}: {row['outcome']} {row['rule']}"
    traced = {arm: trace}
    wanted = ("flush", "flush_dir", "replace", "rename", "write")
    faults = ("EIO", errors.LIE, errors.SHORT)
    trials = failing_operations.plan(traced, seed=1, every=1)
    trials = [t for t in trials if t["operation"] in wanted and t["fault"] in faults]
    for row in failing_operations.run_batch(trials, folder / "failing"):
        if not row["as_declared"] or row["silent"] or row["predecessor_lost"] or row["leftovers"]:
            yield f"{row['operation']} {row['name']} {row['fault']}: {row['result']}"


def _two_writers(folder) -> list[str]:
    """One process installs a file while another is between its flush and its rename beside it."""
    folder.mkdir(parents=True)

    def meanwhile(op):
        if op.call == "replace" and op.target == str(folder / "mine.pt"):
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException):
                    install(folder / "other.pt", b"other")
                os._exit(0)
            os.waitpid(pid, 0)

    try:
        install(folder / "mine.pt", b"mine", vfs=WatchingVFS(meanwhile))
    except CkptError as error:
        return [f"two writers: {error}"]
    right = verify(folder / "mine.pt") and verify(folder / "other.pt")
    return [] if right else ["two writers: a file is not there"]


def test_the_library_as_it_is_gives_no_evidence_against_itself(tmp_path):
    assert evidence(tmp_path) == []


# -- the mutants ----------------------------------------------------------------------------------


def no_rename(patch):
    """The staged file never gets its name."""
    patch.setattr(write_modes, "move_into_place", lambda vfs, staged, path: None)
    patch.setattr(groups, "_rename_free", lambda vfs, source, target: None)


def rename_before_flush(patch):
    """The bytes are flushed under the final name, after the rename."""

    def put(vfs, path, source, mode, flushes, permissions=None):
        if not mode.atomic:
            return real(vfs, path, source, mode, flushes, permissions)
        temp = os.path.join(os.path.dirname(path), temps.temp_name())
        file, written = streams.write_open(vfs, temp, source, permissions=permissions)
        vfs.replace(temp, path)
        streams.finish(vfs, file, flush=lambda f: flushes.add(f.flush_durable(), path))
        if mode.flushes_directories:
            write_modes.flush_directory(vfs, os.path.dirname(path), flushes)
        return streams.Written(path, written.size, written.sha256)

    real = write_modes.put
    patch.setattr(write_modes, "put", put)
    patch.setattr(groups, "put", put)


def commit_first(patch):
    """COMMIT.json is written before the parts that it commits."""
    real = groups.put

    def put(vfs, path, source, mode, flushes, permissions=None):
        commit = os.path.join(os.path.dirname(path), groups.COMMIT)
        if os.path.basename(path) == "model.pt" and not vfs.exists(commit):
            real(vfs, commit, streams.as_source(b"early"), mode, flushes)
        return real(vfs, path, source, mode, flushes, permissions)

    patch.setattr(groups, "put", put)


def no_check_in_prune(patch):
    """Pruning counts checkpoints without looking whether they are valid."""
    patch.setattr(Catalog, "is_valid", lambda self, candidate: True)


def prune_before_save(patch):
    """Older checkpoints go before the new one stands."""
    real = store.groups.write_group

    def write(vfs, directory, *rest):
        root = os.path.dirname(directory)
        for name in vfs.list(root):
            if name.startswith("step-"):
                temps.remove_tree(vfs, os.path.join(root, name))
        return real(vfs, directory, *rest)

    patch.setattr(store.groups, "write_group", write)


def swallowed_flush_error(patch):
    """A flush that fails is taken for one that did not."""

    def finish(vfs, file, *, exclusive=True, flush=None):
        if flush is not None:
            with contextlib.suppress(OSError):
                flush(file)
        file.close()

    patch.setattr(streams, "finish", finish)
    patch.setattr(groups, "finish", finish)


def flush_again(patch):
    """A flush that failed is tried again on the same file."""
    real = streams.finish

    def finish(vfs, file, *, exclusive=True, flush=None):
        def twice(opened):
            try:
                flush(opened)
            except OSError:
                flush(opened)

        real(vfs, file, exclusive=exclusive, flush=twice if flush else None)

    patch.setattr(streams, "finish", finish)
    patch.setattr(groups, "finish", finish)


def no_directory_flush(patch):
    """Directories are not flushed."""
    patch.setattr(write_modes, "flush_directory", lambda vfs, directory, flushes: None)
    patch.setattr(groups, "flush_directory", lambda vfs, directory, flushes: None)


def short_writes_ignored(patch):
    """What a write returns is not looked at."""

    def write_out(self, view):
        self._digest.update(view)
        self.size += len(view)
        self._file.write(view)

    patch.setattr(streams.Sink, "_write_out", write_out)


def live_writers_cleaned(patch):
    """Whatever has a temporary name is taken for a dead writer's."""
    patch.setattr(temps, "abandoned", lambda name, modified, now: True)


def leftovers_stay(patch):
    """Nobody clears away what a dead writer left."""
    patch.setattr(temps, "sweep", lambda vfs, directory, *, own_all=False: [])


def damaged_is_deleted(patch):
    """A scrub deletes what it should move aside, the last valid checkpoint's neighbours too."""

    def quarantine(vfs, root, directory, flushes):
        for name in vfs.list(root):
            if name.startswith("step-"):
                temps.remove_tree(vfs, os.path.join(root, name))
        return ""

    patch.setattr(housekeeping, "quarantine", quarantine)


MUTANTS = (
    no_rename, rename_before_flush, commit_first, no_check_in_prune, prune_before_save,
    swallowed_flush_error, flush_again, no_directory_flush, short_writes_ignored,
    live_writers_cleaned, leftovers_stay, damaged_is_deleted,
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught(mutant, tmp_path, monkeypatch):
    mutant(monkeypatch)
    assert evidence(tmp_path), mutant.__doc__


def manifest_first(patch):
    """MANIFEST.json is written before the parts that it lists.

    Harmless, and so it survives: COMMIT.json is still the last to be written, without it nothing
    counts, and with it every part is held to the digest in the manifest. A manifest that is there
    early promises nothing to anybody.
    """

    class Nowhere:
        def write(self, data):
            return len(data)

    def written(part):
        sink = streams.Sink(Nowhere())
        part.source(sink)
        sink.flush()
        return streams.Written(part.file, sink.size, sink.hexdigest())

    def per_file(vfs, directory, parts, identity, mode, flushes, *, outer):
        vfs.mkdir(directory)
        write_modes.flush_directory(vfs, os.path.dirname(directory), flushes)
        entries = [part.entry(written(part)) for part in parts]
        manifest, text, commit = groups._records(identity, entries)
        sources = {groups.MANIFEST: streams.as_source(text)}
        sources |= {part.file: part.source for part in parts}
        sources[groups.COMMIT] = streams.as_source(commit)
        done = groups._result(manifest, text, commit)
        for name, source in sources.items():
            try:
                groups.put(vfs, os.path.join(directory, name), source, mode, flushes)
            except WriteFailed as error:
                if (name, error.operation) == (groups.COMMIT, "flush_dir"):
                    raise groups._not_durable(directory, error, done) from error
                raise
        return done

    patch.setattr(groups, "_per_file", per_file)


def test_the_mutant_that_is_declared_harmless_is_harmless(tmp_path, monkeypatch):
    manifest_first(monkeypatch)
    arm = ("later save", DIRSYNC, "per_file")
    place = flows.place(tmp_path / "first", *arm, 1)
    place.prepare()
    trace, _ = place.recorded()
    named = [op.target for op in trace if op.call == "replace"]
    assert [os.path.basename(name) for name in named][:2] == ["MANIFEST.json", "model.pt"]
    assert list(_trials(arm, tmp_path / "trials")) == []
