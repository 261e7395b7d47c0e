"""Everything read from a store is untrusted: any bytes give a verdict, and nothing is run."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
from faulty import contents, parts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptlib import CheckpointStore, guard, install, manifests, sidecars
from ckptlib.catalog import STORE, step_name
from ckptlib.errors import CkptError, NoValidCheckpoint
from ckptlib.guard import INVALID, VALID, check_group, verify
from ckptlib.manifests import COMMIT, MANIFEST
from ckptlib.vfs import RecordingVFS

FUZZ = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """One store with two checkpoints; each test puts back what it changed."""
    root = tmp_path_factory.mktemp("untrusted") / "store"
    writer = CheckpointStore(root, run_id="run")
    for step in (1, 2):
        writer.save(step, parts(step))
    return root


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("single") / "model.pt"
    install(path, b"payload")
    return path


def at(root: Path, step: int) -> Path:
    return root / step_name(step)


class Restored:
    """Files to change for a while."""

    def __init__(self, *paths: Path):
        self.saved = {path: path.read_bytes() for path in paths}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for path, data in self.saved.items():
            path.write_bytes(data)


# -- arbitrary bytes ------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(("model.pt", "../model.pt", "/etc/passwd", "torch", "run", "0" * 64)),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from((
        "schema", "run", "step", "sequence", "previous", "parts", "model", "file", "format",
        "size", "sha256", "content", "digests", "observed", "manifest_sha256", "manifest_size",
    )) | st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    """Random bytes, random JSON, or the right document with something changed."""
    way = draw(st.sampled_from(("bytes", "json", "field", "flip", "cut", "splice", "duplicate")))
    if way == "bytes":
        return draw(st.binary(max_size=300))
    if way == "json":
        return json.dumps(draw(json_values)).encode()
    if way == "field":
        document = json.loads(whole)
        node = document
        while True:
            key = draw(st.sampled_from(sorted(node)))
            if isinstance(node[key], dict) and node[key] and draw(st.booleans()):
                node = node[key]
                continue
            if draw(st.booleans()):
                node[key] = draw(json_values)
            else:
                del node[key]
            break
        return sidecars.canonical(document)
    position = draw(st.integers(0, len(whole) - 1))
    if way == "flip":
        changed = bytearray(whole)
        changed[position] ^= 1 << draw(st.integers(0, 7))
        return bytes(changed)
    if way == "cut":
        return whole[:position]
    if way == "splice":
        return whole[:position] + draw(st.binary(max_size=20)) + whole[position:]
    return whole[:1] + whole[1:-2] + b"," + whole[1:-2] + whole[-2:]  # every key twice


@FUZZ
@given(data=st.data())
def test_any_manifest_gives_a_verdict_and_is_never_wrongly_valid(store, data):
    """Both as it would rot on disk, and with a commit record that was made to fit."""
    manifest, commit = at(store, 2) / MANIFEST, at(store, 2) / COMMIT
    with Restored(manifest, commit) as old:
        changed = data.draw(damaged(old.saved[manifest]))
        manifest.write_bytes(changed)
        if changed != old.saved[manifest]:
            assert not verify(at(store, 2))
        commit.write_bytes(manifests.commit_bytes(changed))
        checked = check_group(str(at(store, 2)), step=2)
        if checked.verdict:
            # then it says the same of the parts; what it says of itself it may choose
            original = manifests.from_bytes(old.saved[manifest], "")
            recorded = {(e.file, e.size, e.sha256) for e in original.entries}
            assert {(e.file, e.size, e.sha256) for e in checked.manifest.entries} <= recorded
        else:
            assert checked.verdict.reason and len(str(checked.verdict)) < 2000
        reader = CheckpointStore(store, run_id="run")
        try:
            assert reader.load().step in (1, 2)
        except NoValidCheckpoint:
            pytest.fail("step 1 is intact")
        assert set(reader.steps()) <= {1, 2}


@FUZZ
@given(data=st.data())
def test_any_commit_record_but_the_right_one_is_not_valid(store, data):
    commit = at(store, 2) / COMMIT
    with Restored(commit) as old:
        changed = data.draw(damaged(old.saved[commit]))
        commit.write_bytes(changed)
        assert (verify(at(store, 2)).status == VALID) == (changed == old.saved[commit])
        assert CheckpointStore(store, run_id="run").load().step in (1, 2)


@FUZZ
@given(data=st.data())
def test_any_sidecar_gives_a_verdict_and_never_makes_other_bytes_valid(single, data):
    side = single.with_name(single.name + sidecars.SUFFIX)
    with Restored(side, single) as old:
        changed = data.draw(damaged(old.saved[side]))
        side.write_bytes(changed)
        if verify(single):
            assert {d.sha256 for d in sidecars.read(guard.REAL, str(single))} >= {
                d["sha256"] for d in json.loads(old.saved[side])["digests"]
            }
        single.write_bytes(b"Payload")
        verdict = verify(single)
        assert not verdict and (verdict.reason or verdict.status)


@FUZZ
@given(data=st.data())
def test_any_store_record_leaves_the_store_usable_or_is_a_typed_error(store, data):
    path = store / STORE
    with Restored(path) as old:
        path.write_bytes(data.draw(damaged(old.saved[path])))
        try:
            reader = CheckpointStore(store)
            found = reader.load(allow_empty=True)
        except CkptError as error:
            assert str(error)
        else:
            assert found is None or found.step == 2


@settings(max_examples=150)
@given(data=st.binary(max_size=400))
def test_any_bytes_at_all_are_parsed_or_refused(data):
    for parse in (
        lambda: manifests.from_bytes(data, "here"),
        lambda: sidecars.parse(data, "here"),
    ):
        try:
            parse()
        except CkptError as error:
            assert "here" in str(error)


# -- names that lead elsewhere --------------------------------------------------------------------


def rewrite(group: Path, change) -> None:
    document = json.loads((group / MANIFEST).read_text())
    change(document)
    data = sidecars.canonical(document)
    (group / MANIFEST).write_bytes(data)
    (group / COMMIT).write_bytes(manifests.commit_bytes(data))


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../secret", "../../secret", "a/../../secret", "..", ".", "", "model.pt/",
     "./model.pt", "\\secret", "secret\0", "~/secret", "COMMIT.json", "MANIFEST.json", "x" * 5000,
     "\ud800", "con\n", ".hidden"],
)  # fmt: skip
def test_a_name_that_leads_out_is_refused_before_anything_is_opened(tmp_path, store, name):
    secret = tmp_path / "secret"
    secret.write_bytes((at(store, 2) / "model.pt").read_bytes())
    root = tmp_path / "store"
    shutil.copytree(store, root, symlinks=True)
    rewrite(at(root, 2), lambda document: document["parts"]["model"].update(file=name))
    vfs = RecordingVFS()
    verdict = check_group(str(at(root, 2)), vfs=vfs).verdict
    assert verdict.status == INVALID and verdict.file == MANIFEST
    opened = {op.path for op in vfs.operations if op.call == "open"}
    assert opened == {str(at(root, 2) / COMMIT), str(at(root, 2) / MANIFEST)}
    assert CheckpointStore(root).load().step == 1


AUDIT = """
    import os, sys
    from ckptlib import CheckpointStore, verify, guard
    import torch, ckptlib.formats.torch_format, ckptlib.formats.schema
    root = os.path.realpath(sys.argv[1])
    CheckpointStore(root + "-warm", format="torch").save(1, {"a": {"w": torch.ones(1)}})
    CheckpointStore(root + "-warm").load()
    outside = []
    def hook(event, arguments):
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if arguments[2] & os.O_NOFOLLOW:  # refuses a link, so the link's own place counts
                path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            else:
                path = os.path.realpath(path)
            if not path.startswith(root + os.sep) and path != root:
                outside.append(path)
    sys.addaudithook(hook)
    for _ in range(2):
        try:
            CheckpointStore(root).load()
        except Exception as error:
            assert type(error).__module__ == "ckptlib.errors", error
    for name in sorted(os.listdir(root)):
        if not os.path.islink(os.path.join(root, name)):  # a link that is named is followed
            verify(os.path.join(root, name))
    CheckpointStore(root).scrub()
    ours = [p for p in outside if not p.startswith(("/proc", "/sys", sys.prefix, sys.base_prefix))]
    print([p for p in ours if not p.endswith((".py", ".pyc"))])
"""


def test_nothing_outside_the_store_is_opened_whatever_stands_in_it(tmp_path, store):
    """Watched by Python's own audit events, in a process of its own."""
    root, secret = tmp_path / "store", tmp_path / "secret"
    shutil.copytree(store, root, symlinks=True)
    secret.mkdir()
    shutil.copytree(at(store, 2), secret / step_name(5))
    shutil.copy(at(store, 2) / "model.pt", secret / "model.pt")

    def copy(step: int) -> Path:
        shutil.copytree(at(store, 2), at(root, step))
        rewrite(at(root, step), lambda document: document.update(step=step, sequence=step))
        return at(root, step)

    at(root, 5).symlink_to(secret / step_name(5))
    traversal, absolute, link, pipe, records = (copy(step) for step in range(6, 11))
    rewrite(traversal, lambda d: d["parts"]["model"].update(file="../../secret/model.pt"))
    rewrite(absolute, lambda d: d["parts"]["model"].update(file=str(secret / "model.pt")))
    (link / "model.pt").unlink(), (link / "model.pt").symlink_to(secret / "model.pt")
    (pipe / "model.pt").unlink(), os.mkfifo(pipe / "model.pt")
    for name in (MANIFEST, COMMIT):
        shutil.copy(records / name, secret / name)
        (records / name).unlink()
        (records / name).symlink_to(secret / name)
    (root / STORE).unlink()
    (root / STORE).symlink_to("/etc/passwd")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(AUDIT), str(root)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[]\n"
    assert (secret / "model.pt").exists() and verify(secret / step_name(5))


@pytest.mark.parametrize("kind", ["link", "dangling", "loop", "pipe", "folder", "device", "socket"])
@pytest.mark.parametrize("name", ["model.pt", MANIFEST, COMMIT])
def test_what_is_no_regular_file_is_invalid_and_never_waited_for(tmp_path, store, name, kind):
    root = tmp_path / "s"
    shutil.copytree(store, root, symlinks=True)
    path = at(root, 2) / name
    good = tmp_path / "good"
    shutil.move(path, good)
    if kind == "link":
        path.symlink_to(good)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "loop":
        path.symlink_to(name)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
        try:
            path.unlink()
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
        except PermissionError:
            pytest.skip("making a device node needs root")
    else:
        import socket

        here = os.getcwd()
        os.chdir(path.parent)  # the names of sockets are short
        try:
            socket.socket(socket.AF_UNIX).bind(name)
        finally:
            os.chdir(here)
    verdict = verify(at(root, 2))
    assert verdict.status == INVALID and verdict.file == name
    assert CheckpointStore(root).load().step == 1


# -- nothing is run -------------------------------------------------------------------------------


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def evil_container(path: Path, kind: str) -> bytes:
    out = io.BytesIO()
    if kind == "zip":
        torch.save({"weight": Evil(path)}, out)
    elif kind == "legacy":
        torch.save({"weight": Evil(path)}, out, _use_new_zipfile_serialization=False)
    elif kind == "pickle":
        pickle.dump(Evil(path), out)
    else:
        with zipfile.ZipFile(out, "w") as container:
            container.writestr("archive/data.pkl", pickle.dumps(Evil(path), 2))
            container.writestr("archive/version", "3")
    return out.getvalue()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle", "handmade"])
@pytest.mark.parametrize("hash_matches", [True, False])
def test_a_malicious_pickle_never_runs_whether_or_not_its_hash_matches(
    tmp_path, store, monkeypatch, kind, hash_matches
):
    root, executed = tmp_path / "s", tmp_path / "executed"
    shutil.copytree(store, root, symlinks=True)
    evil = evil_container(executed, kind)
    (at(root, 2) / "model.pt").write_bytes(evil)
    digest = manifests.digest(evil if hash_matches else b"something else")
    entry = {"size": len(evil), "sha256": digest}
    rewrite(at(root, 2), lambda document: document["parts"]["model"].update(entry))
    parsed = []
    real = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: parsed.append(1) or real(*a, **k))
    found = CheckpointStore(root).load()
    assert found.step == 1 and not executed.exists()
    assert found.skipped[0].verdict.layer == ("load" if hash_matches else "sha256")
    assert hash_matches or len(parsed) == len(parts(1)), "unhashed bytes are never parsed"
    path = tmp_path / "file.pt"
    install(path, evil)
    with pytest.raises(CkptError):
        guard.load_file(path)
    assert not executed.exists()


def test_the_malicious_pickles_of_this_test_would_run_if_they_could(tmp_path):
    """Or the test above proved nothing."""
    for kind in ("zip", "legacy", "handmade"):
        path = tmp_path / kind
        torch.load(io.BytesIO(evil_container(path, kind)), weights_only=False)
        assert path.exists()


def test_a_part_that_claims_another_format_is_a_verdict_not_an_import(tmp_path, store):
    root = tmp_path / "s"
    shutil.copytree(store, root, symlinks=True)
    before = set(sys.modules)
    for name in ("os", "../torch", "numpy", "safetensors", "schema", "tree", "rng", "", "torch\0"):
        rewrite(at(root, 2), lambda d, n=name: d["parts"]["model"].update(format=n))
        found = CheckpointStore(root).load()
        assert found.step == 1 and found.skipped[0].verdict.reason, name
    assert not {m for m in set(sys.modules) - before if m.startswith("ckptlib.formats.tor")}


def test_unhashed_bytes_of_a_group_are_never_handed_to_a_loader(tmp_path, store, monkeypatch):
    root = tmp_path / "s"
    shutil.copytree(store, root, symlinks=True)
    for step in (1, 2):
        path = at(root, step) / "optimizer.pt"
        path.write_bytes(path.read_bytes()[:-1] + b"\1")

    def never(*arguments, **options):
        raise AssertionError("a loader was called")

    monkeypatch.setattr(torch, "load", never)
    with pytest.raises(NoValidCheckpoint):
        CheckpointStore(root).load()


# -- bounds ---------------------------------------------------------------------------------------


def test_deep_and_huge_records_are_refused_in_bounded_memory(tmp_path, store):
    """In a process that may use little more than it has."""
    root = tmp_path / "s"
    shutil.copytree(store, root, symlinks=True)
    bombs = {
        "deep list": b"[" * (8 << 20),
        "deep object": b'{"a":' * (1 << 20),
        "many digits": b'{"step":' + b"9" * (4 << 20) + b"}",
        "wide": b"[" + b"0," * (4 << 20) + b"0]",
        "long text": b'{"run":"' + b"x" * (12 << 20) + b'"}',
    }
    for step, data in enumerate(bombs.values(), start=3):
        shutil.copytree(at(store, 2), at(root, step))
        (at(root, step) / MANIFEST).write_bytes(data)
        (at(root, step) / COMMIT).write_bytes(manifests.commit_bytes(data))
    code = textwrap.dedent(
        f"""
        import resource
        from ckptlib import CheckpointStore
        store = CheckpointStore({str(root)!r}, run_id="run")
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), used + (400 << 20)))
        print(store.steps(), [store.verify(s).status for s in range(3, {3 + len(bombs)})])
        """
    )
    if sys.platform != "linux":
        pytest.skip("the size of the address space is read from /proc")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == f"[2, 1] {[INVALID] * len(bombs)}\n", ran.stderr


def test_a_manifest_of_thousands_of_parts_does_not_exhaust_descriptors(tmp_path, store):
    root = tmp_path / "s"
    shutil.copytree(store, root, symlinks=True)

    def many(document):
        entry = document["parts"]["model"]
        document["parts"] = {f"p{n}": entry | {"file": f"p{n}.pt"} for n in range(5000)}

    rewrite(at(root, 2), many)
    for n in range(5000):
        os.link(at(root, 2) / "model.pt", at(root, 2) / f"p{n}.pt")
    gc.collect()  # what other tests left
    before = len(os.listdir("/dev/fd"))
    verdict = verify(at(root, 2))
    assert verdict.status != INVALID or "p" in verdict.file
    assert len(os.listdir("/dev/fd")) == before
    assert CheckpointStore(root).load().step in (1, 2)


# -- one seam -------------------------------------------------------------------------------------

SEAM = """
    import os, sys
    from ckptlib import CheckpointStore, install, verify, guard
    import ckptlib.vfs, torch
    root = os.path.realpath(sys.argv[1])
    seam = ckptlib.vfs.__file__
    inside, past = [0], []
    WATCHED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.listdir",
               "os.scandir", "os.link", "os.chmod", "os.chown", "os.truncate", "os.utime",
               "shutil.rmtree", "shutil.move", "shutil.copyfile", "tempfile.mkstemp"}
    def hook(event, arguments):
        if event not in WATCHED:
            return
        paths = [os.fsdecode(a) for a in arguments if isinstance(a, (str, bytes))]
        if not any(os.path.abspath(p).startswith(root) for p in paths):
            return
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != seam:
            frame = frame.f_back
        if frame is None:
            past.append((event, paths))
        else:
            inside[0] += 1
    sys.addaudithook(hook)
    state = {"model": {"w": torch.ones(5)}, "rng": {"n": 1}}
    for mode, protocol, format in (("atomic_dirsync", "batched", "torch"),
                                   ("atomic_dirsync", "per_file", "safetensors"),
                                   ("unsafe", "per_file", "numpy")):
        store = CheckpointStore(os.path.join(root, mode + protocol), mode=mode, protocol=protocol,
                                format=format, keep=2)
        for step in range(4):
            path = store.save(step, state).path
        with open("/dev/null"):
            pass
        store.load(), store.load(finite=True), store.steps(), store.latest(), store.head()
        store.prune(1), store.verify(3), verify(path), store.scrub()
        target = os.path.join(root, mode + protocol + ".bin")
        for _ in range(2):
            install(target, lambda sink: torch.save(state, sink), mode)
        guard.load_file(target)
    print(inside[0] > 500, past)
"""


def test_no_file_of_a_store_is_touched_past_the_seam(tmp_path):
    """Watched by Python's audit events: every one on a path of the store comes from vfs.py."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SEAM), str(tmp_path)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "True []\n"


def test_the_watch_on_the_seam_sees_an_operation_that_goes_past_it(tmp_path):
    code = textwrap.dedent(SEAM).replace("print(inside", "os.mkdir(root + '/past')\nprint(inside")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert "os.mkdir" in ran.stdout, ran.stderr


def test_this_files_fuzzing_left_the_store_as_it_was(store):
    assert CheckpointStore(store).load().step == 2 and len(contents(store)) > 10
