"""The hierarchy of errors: one base, errno kept, and messages that say what to do."""

from __future__ import annotations

import errno
import inspect
import os
import pickle
import subprocess
import sys

import pytest
from faulty import FailingVFS, parts

from ckptlib import CheckpointStore, errors, install
from ckptlib.errors import CkptError, WriteFailed, explain
from ckptlib.guard import Verdict

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, Exception) and kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_has_one_base_a_message_and_a_path(kind):
    error = kind("what happened", path="/some/where")
    assert isinstance(error, CkptError)
    assert str(error) == "what happened", "not the form that OSError would make of it"
    assert error.path == "/some/where"
    assert kind("no path").path is None
    assert kind.__doc__


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_travels_between_processes(kind):
    """joblib and multiprocessing pickle what a worker raises."""
    error = kind("what happened", path="/some/where")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == "what happened"
    assert again.path == "/some/where"


def test_details_travel_too():
    error = WriteFailed("full", "/x", errno.ENOSPC, "write")
    again = pickle.loads(pickle.dumps(error))
    assert (again.errno, again.operation) == (errno.ENOSPC, "write")
    verdict = Verdict("INVALID", "size", "short", "/x", "a.pt")
    corrupt = pickle.loads(pickle.dumps(errors.CorruptCheckpoint("x", "/x", verdict)))
    assert corrupt.verdict == verdict
    refused = pickle.loads(pickle.dumps(errors.UnsupportedState("x", "model/w")))
    assert refused.key == "model/w"
    nothing = pickle.loads(pickle.dumps(errors.NoValidCheckpoint("x", "/x", [verdict])))
    assert nothing.skipped == [verdict]


def test_errors_are_also_what_a_caller_would_expect_them_to_be():
    expected = {
        errors.InvalidInput: ValueError,
        errors.UnsupportedState: TypeError,
        errors.WriteFailed: OSError,
        errors.CommittedNotDurable: OSError,
        errors.MissingInput: FileNotFoundError,
    }
    for kind, builtin in expected.items():
        assert issubclass(kind, builtin)
    # a caller who retries failed writes must not retry what is already there
    assert not issubclass(errors.CommittedNotDurable, WriteFailed)
    assert not issubclass(errors.StoreEmpty, errors.NoValidCheckpoint)
    assert not issubclass(errors.NoValidCheckpoint, errors.StoreEmpty)


def test_an_explanation_says_what_where_expected_found_and_what_to_do():
    text = explain("too short", path="/a/b", expected="5 bytes", found="3 bytes", do="copy it")
    assert text == "too short: /a/b; expected 5 bytes; found 3 bytes. Copy it."
    assert explain("gone") == "gone."
    assert explain("gone", do="look!") == "gone. Look!"


@pytest.mark.parametrize(
    "code", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EFBIG]
)
def test_a_failed_write_says_which_step_which_path_and_which_error(tmp_path, code):
    vfs = FailingVFS(0, code, lambda op: op.call == "write")
    with pytest.raises(WriteFailed) as caught:
        install(tmp_path / "model.pt", b"x", vfs=vfs)
    error = caught.value
    assert error.errno == code and error.operation == "write"
    assert errno.errorcode[code] in str(error) and os.strerror(code) in str(error)
    assert error.path and str(tmp_path) in str(error)
    assert isinstance(error.__cause__, OSError), "the original is kept"


def test_messages_are_sentences_that_name_the_place(tmp_path):
    store = CheckpointStore(tmp_path / "store")
    store.save(1, parts(1))
    failures = [
        lambda: store.save(1, parts(1)),
        lambda: store.save(-1, parts(1)),
        lambda: store.save(2, {"a/b": {}}),
        lambda: store.save(2, {"model": object()}),
        lambda: CheckpointStore(tmp_path / "empty").load(),
        lambda: CheckpointStore(tmp_path / "x", mode="fast"),
        lambda: CheckpointStore(tmp_path / "x", keep=0),
        lambda: install(tmp_path / "absent/x", b""),
        lambda: install(tmp_path, b""),
    ]
    for failure in failures:
        with pytest.raises(CkptError) as caught:
            failure()
        text = str(caught.value)
        assert text.endswith((".", "!", "?")) and ".." not in text.replace("...", ""), text
        assert 20 < len(text) < 500 and "\n" not in text, text


def test_importing_the_core_loads_no_tensor_library():
    code = """
import sys, importlib
for name in ("", ".errors", ".vfs", ".digests", ".provenance", ".write_modes", ".formats",
             ".groups", ".guard", ".store", ".catalog", ".manifests", ".sidecars", ".streams",
             ".temps", ".housekeeping"):
    importlib.import_module("ckptlib" + name)
import ckptlib
ckptlib.CheckpointStore, ckptlib.install, ckptlib.verify, ckptlib.WriteMode, ckptlib.errors
print(sorted({"torch", "numpy", "pandas", "scipy"} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stderr


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import ckptlib

    with pytest.raises(AttributeError, match="CheckpointSore"):
        _ = ckptlib.CheckpointSore
    assert set(ckptlib.__all__) <= set(dir(ckptlib))
    assert all(getattr(ckptlib, name) is not None for name in ckptlib.__all__)
