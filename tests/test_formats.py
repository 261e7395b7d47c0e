"""The containers: what goes in comes out, what could not come out does not go in."""

from __future__ import annotations

import contextlib
import io
import json
import random
import struct
import zipfile
from collections import OrderedDict, UserDict, namedtuple

import numpy
import pytest
import safetensors.torch
import torch
from faulty import DTYPES, canonical, same, states, tensor_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib import formats
from ckptlib.digests import MAX_DEPTH, content_digest
from ckptlib.errors import CorruptCheckpoint, InvalidInput, UnsupportedState
from ckptlib.formats import rng, schema
from ckptlib.streams import Sink
from ckptlib.vfs import REAL

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
]
RAW = bytes(range(1, 98))
EACH = pytest.mark.parametrize("name", formats.FORMATS)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """One file that every test of this module overwrites."""
    return str(tmp_path_factory.mktemp("formats") / "part")


def put(name: str, state, path: str) -> bytes:
    container = formats.get(name)
    container.check(state)
    file = REAL.create(path, exclusive=False)
    sink = Sink(file)
    container.save(state, sink)
    sink.flush()
    file.close()
    with open(path, "rb") as written:
        data = written.read()
    assert len(data) == sink.size
    return data


def get(name: str, path: str, **options):
    file = REAL.open(path)
    try:
        return formats.get(name).load(file, **options)
    finally:
        file.close()


def get_bytes(name: str, data: bytes, path: str):
    with open(path, "wb") as file:
        file.write(data)
    return get(name, path)


# -- round trips ----------------------------------------------------------------------------------


@EACH
@settings(max_examples=80)
@given(state=states())
def test_a_state_comes_back_exactly_or_is_refused_at_save_with_its_key(name, path, state):
    try:
        put(name, state, path)
    except UnsupportedState as error:
        assert error.key or not isinstance(state, (dict, list, tuple))
        return
    again = get(name, path)
    assert same(again, state)
    assert content_digest(again) == content_digest(state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_torch_and_numpy_containers_hold_every_dtype(name, path, dtype):
    state = {str(s): tensor_of(RAW, dtype, s) for s in ((), (3,), (0, 3), (3, 0), (2, 3))}
    put(name, state, path)
    assert same(get(name, path), state)


@EACH
def test_hard_keys_and_values_survive(name, path):
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8DEADBEEF0001))[0]
    state = OrderedDict()
    state["__metadata__"] = torch.ones(2)
    state["a/b"], state["a"] = torch.zeros(1), {"b": torch.ones(1), 0: {"": (None, ())}}
    state["ключ \n\0"] = [nan, -0.0, float("inf"), 10**600, -(2**64), 1e-320, nan * 1j]
    state[-5] = (True, False, 0, 1, "", "\0", b"\x80\xff", b"\0")
    state["nan"] = torch.tensor([0x7FA00001, -1], dtype=torch.int32).view(torch.float32)
    put(name, state, path)
    assert same(get(name, path), state)


def test_a_tensor_named_like_safetensors_own_metadata_is_kept(path):
    state = {"__metadata__": torch.arange(3)}
    put("safetensors", state, path)
    assert same(get("safetensors", path), state)


@EACH
def test_a_tensor_alone_is_a_state_too(name, path):
    put(name, torch.arange(3), path)
    assert same(get(name, path), torch.arange(3))


@EACH
def test_equal_values_with_odd_strides_come_back(name, path):
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "one": torch.arange(10.0)[::5][:1],
        "transposed": base.T,
        "expanded": base[0].expand(3, 6),
        "sliced": base[:, 1:3],
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        "negative": torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag,
        "gradient": torch.ones(2, requires_grad=True),
    }
    put(name, state, path)
    again = get(name, path)
    assert {k: canonical(v) for k, v in again.items()} == {
        k: canonical(v) for k, v in state.items()
    }


@EACH
def test_tied_weights_stay_tied(name, path):
    weight = torch.ones(1000)
    size = len(put(name, {"in": weight, "out": weight}, path))
    again = get(name, path)
    again["in"][0] = 7
    assert again["out"][0] == 7, "the two names must share their memory"
    assert size < 1.6 * weight.nbytes, "stored once"


@EACH
def test_what_only_looks_tied_does_not_become_so(name, path):
    put(name, {"a": torch.ones(4), "b": torch.ones(4)}, path)
    again = get(name, path)
    again["a"][0] = 7
    assert again["b"][0] == 1


@pytest.mark.parametrize("name", ["safetensors", "numpy"])
def test_a_small_view_does_not_carry_its_large_storage_along(name, path):
    view = torch.zeros(100_000)[5:15]
    assert len(put(name, {"view": view}, path)) < 4000
    assert same(get(name, path), {"view": view.clone()})


@EACH
def test_parameters_of_a_real_model_and_optimizer_come_back(name, path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    put(name, state, path)
    again = get(name, path)
    assert content_digest(again) == content_digest(state)
    model.load_state_dict(again["model"])
    optimizer.load_state_dict(again["optimizer"])


@EACH
def test_a_state_as_deep_as_allowed_comes_back_whatever_its_leaf(name, path):
    for leaf in (1j, 2**70, 0.5, torch.ones(1), {1: 2}, [()]):
        inner = 1 if isinstance(leaf, (dict, list)) else 0
        state = leaf
        for _ in range(MAX_DEPTH - inner):
            state = [state]
        put(name, state, path)
        assert same(get(name, path), state)
        with pytest.raises(UnsupportedState):
            formats.get(name).check([state])


def test_numpy_arrays_come_back_from_the_numpy_container(path):
    matrix = numpy.arange(6.0).reshape(2, 3)
    state = {
        "c": matrix, "f": numpy.asfortranarray(matrix), "step": matrix[:, ::2],
        "zero": numpy.array(5, dtype=">i2"), "empty": numpy.zeros((0, 3)),
        "text": numpy.array(["a", "ü"]), "when": numpy.array(["2026-01-01"], dtype="M8[D]"),
        "bits": numpy.array([True, False]), "half": numpy.array([1, 2], dtype="f2"),
    }  # fmt: skip
    put("numpy", state, path)
    assert same(get("numpy", path), state)


@pytest.mark.parametrize("name", ["safetensors", "numpy"])
def test_equal_states_make_byte_identical_files(name, path):
    base = torch.arange(12.0)
    first = {"a": base.reshape(3, 4), "n": [1, 2.5, "x"], "o": base[:0]}
    second = {"a": base.reshape(3, 4).T.contiguous().T, "n": [1, 2.5, "x"], "o": torch.zeros(0)}
    assert put(name, first, path) == put(name, second, path) == put(name, first, path)


def test_arrays_of_either_memory_order_make_byte_identical_files(path):
    matrix = numpy.arange(6.0).reshape(2, 3)
    other = numpy.asfortranarray(matrix)
    assert put("numpy", {"a": matrix}, path) == put("numpy", {"a": other}, path)


@EACH
def test_a_replayed_save_gives_the_same_bytes(name, path):
    """After a failed flush the source is written again; its hash must not have moved."""
    state = {"w": torch.arange(5.0), "more": [torch.ones(2, 2), {"x": 1}]}
    assert put(name, state, path) == put(name, state, path)


@EACH
def test_map_location_moves_every_tensor(name, path):
    put(name, {"a": torch.ones(2), "b": [torch.zeros(1)], "c": 1}, path)
    again = get(name, path, map_location="meta")
    assert again["a"].is_meta and again["b"][0].is_meta and again["c"] == 1


@EACH
def test_loading_starts_at_the_beginning_wherever_the_file_stands(name, path):
    put(name, {"a": torch.ones(2)}, path)
    file = REAL.open(path)
    file.seek(10)
    assert same(formats.get(name).load(file), {"a": torch.ones(2)})
    assert same(formats.get(name).load(file), {"a": torch.ones(2)}), "and leaves it open"
    file.close()


# -- the reference implementations ----------------------------------------------------------------

# what both know: their reader for torch lacks F8_E8M0
OFFICIAL = [
    dtype
    for dtype in DTYPES
    if dtype in safetensors.torch._TYPES.values()
    and str(dtype) in formats.get("safetensors")._NAMES
]


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=5).filter(
            lambda key: key != "__metadata__"
        ),
        st.builds(
            tensor_of,
            st.binary(min_size=1, max_size=8),
            st.sampled_from(OFFICIAL),
            st.lists(st.integers(0, 3), max_size=3).map(tuple),
        ),
        max_size=5,
    )
)
def test_the_official_safetensors_reader_reads_our_files_and_ours_reads_theirs(path, state):
    data = put("safetensors", state, path)
    theirs = safetensors.torch.load(data)
    assert sorted(map(canonical, theirs.values())) == sorted(map(canonical, state.values()))
    if not any(set(key) & set("/'\\") or key.lstrip("-").isdigit() for key in state):
        assert canonical(theirs) == canonical(state)
    again = get_bytes("safetensors", safetensors.torch.save(state, {"format": "pt"}), path)
    assert canonical(again) == canonical(state)


def test_tensors_are_aligned_to_their_element_size(path):
    state = {"b": torch.ones(3, dtype=torch.uint8), "d": torch.ones(2, dtype=torch.float64)}
    data = put("safetensors", state, path)
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert header["d"]["data_offsets"][0] % 8 == 0


def test_torch_load_reads_our_torch_files_with_weights_only(path):
    state = {"a": torch.ones(2), "b": [1, (2.5, "x")]}
    put("torch", state, path)
    assert same(torch.load(path, weights_only=True), state)


def test_numpy_load_reads_the_members_of_our_npz_files(path):
    put("numpy", {"a": numpy.arange(3)}, path)
    with numpy.load(path, allow_pickle=False) as members:
        assert numpy.array_equal(members["000000"], numpy.arange(3))


# -- refusals -------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


class Subclass(torch.Tensor):
    pass


def refused() -> dict:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    return {
        "meta": torch.empty(2, device="meta"),
        "fake": fake,
        "set": {1},
        "bytearray": bytearray(b"x"),
        "object": object(),
        "function": len,
        "namedtuple": Point(1, 2),
        "mapping": UserDict(a=1),
        "numpy scalar": numpy.float64(1),
        "numpy bool": numpy.bool_(True),
        "objects": numpy.array([{}], dtype=object),
        "masked": numpy.ma.masked_array([1, 2], [False, True]),
        "fields": numpy.zeros(1, dtype=[("a", "i4")]),
        "int4": torch.empty(2, dtype=torch.int4),
        "module": torch.nn.Linear(1, 1),
    }


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (name, what)
        for name in formats.FORMATS
        for what in sorted(refused())
        if (name, what) != ("numpy", "int4")  # it stores the bytes of any dtype
    ],
)
def test_what_could_not_be_loaded_back_is_refused_at_save_with_its_key(name, what):
    leaf = refused()[what]
    with pytest.raises(UnsupportedState) as caught:
        formats.get(name).check({"layers": [1, {"x": leaf}]})
    assert caught.value.key.replace("/", " ").split()[:2] == ["layers", "1"]
    assert "x" in caught.value.key


def test_tensor_subclasses_are_refused_by_torch_since_loading_would_need_their_code():
    with pytest.raises(UnsupportedState) as caught:
        formats.get("torch").check({"w": torch.ones(1).as_subclass(Subclass)})
    assert caught.value.key == "w"


def test_integers_that_weights_only_can_not_read_are_refused(path):
    """The restricted unpickler knows no integers of 256 bytes and more."""
    for bits in (2030, 2039, 2040, 2048, 20_000):
        for value in (2**bits, -(2**bits), 2**bits - 1):
            try:
                put("torch", {"n": value}, path)
            except UnsupportedState as error:
                assert bits > 2030 and error.key == "n"
            else:
                assert get("torch", path) == {"n": value}


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_a_lone_surrogate_as_key_comes_back_where_the_container_can_hold_it(name, path):
    state = {"\ud800": torch.ones(1), "v": "\udfff"}
    put(name, state, path)
    assert same(get(name, path), state)


def test_a_lone_surrogate_as_key_is_refused_by_safetensors_or_comes_back(path):
    state = {"\ud800": torch.ones(1), "v": "\udfff"}
    try:
        put("safetensors", state, path)
    except UnsupportedState:
        return
    assert same(get("safetensors", path), state)


@pytest.mark.parametrize("layout", ["sparse", "quantised"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_sparse_and_quantised_tensors_come_back_from_torch_and_are_refused_by_the_others(
    layout, path
):
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    tensor = (
        dense.to_sparse()
        if layout == "sparse"
        else torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8)
    )
    put("torch", {"t": tensor}, path)
    assert content_digest(get("torch", path)) == content_digest({"t": tensor})
    for name in ("safetensors", "numpy"):
        with pytest.raises(UnsupportedState) as caught:
            formats.get(name).check({"t": tensor})
        assert caught.value.key == "t"


def test_an_unknown_format_is_bad_input():
    with pytest.raises(InvalidInput, match="torch, safetensors, numpy"):
        formats.get("pickle")


# -- damaged and hostile files --------------------------------------------------------------------


@EACH
def test_a_torn_file_is_a_corrupt_checkpoint_at_every_length(name, path):
    data = put(name, {"w": torch.arange(40.0), "n": [1, "x"]}, path)
    for length in sorted({*range(0, len(data), max(1, len(data) // 60)), len(data) - 1}):
        with pytest.raises(CorruptCheckpoint):
            get_bytes(name, data[:length], path)


@EACH
def test_damaged_bytes_load_or_are_a_corrupt_checkpoint(name, path):
    """Nothing else may come out, whatever the bytes: the hash is what detects, not the loader."""
    data = put(name, {"w": torch.arange(40.0), "n": [1, "x", {2: 0.5}]}, path)
    generator = random.Random(7)
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(generator.choice((1, 1, 2, 8))):
            changed[generator.randrange(len(data))] = generator.randrange(256)
        with contextlib.suppress(CorruptCheckpoint):
            get_bytes(name, bytes(changed), path)


@EACH
@pytest.mark.parametrize("data", [b"", b"\0", b"garbage" * 9, b"PK\5\6" + bytes(18), b"[" * 5000])
def test_what_is_no_container_at_all_is_a_corrupt_checkpoint(name, path, data):
    with pytest.raises(CorruptCheckpoint) as caught:
        get_bytes(name, data, path)
    assert caught.value.path == path


def container_of(header, payload: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def entry(**changes) -> dict:
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes


HOSTILE = {
    "claims 2^60 bytes": struct.pack("<Q", 1 << 60) + b"{}",
    "claims all of 64 bits": b"\xff" * 8 + b"{}",
    "not an object": container_of([1, 2]),
    "deep": container_of(b"[" * 50_000),
    "not utf-8": container_of(b'{"\xff": 1}'),
    "negative extents": container_of({"a": entry(shape=[-2, -2])}),
    "vast extents of nothing": container_of({"a": entry(shape=[0, 2**70], data_offsets=[0, 0])}),
    "vast": container_of({"a": entry(shape=[2**62], data_offsets=[0, 2**64])}),
    "infinite offset": container_of(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[1e999,16]}}'),
    "outside": container_of({"a": entry(data_offsets=[56, 72])}),
    "backwards": container_of({"a": entry(data_offsets=[16, 0])}),
    "unknown dtype": container_of({"a": entry(dtype="F99")}),
    "no shape": container_of({"a": {"dtype": "F32", "data_offsets": [0, 16]}}),
    "three offsets": container_of({"a": entry(data_offsets=[0, 8, 16])}),
    "shape is text": container_of({"a": entry(shape="four")}),
    "entry is a list": container_of({"a": [1]}),
    "metadata is a list": container_of({"__metadata__": ["ckptlib.skeleton/1"]}),
    "skeleton is a number": container_of({"__metadata__": {"ckptlib.skeleton/1": 5}}),
    "skeleton is deep": container_of({"__metadata__": {"ckptlib.skeleton/1": "[" * 50_000}}),
    "skeleton names nothing": container_of(
        {"__metadata__": {"ckptlib.skeleton/1": '{"x":"gone","kind":"tensor"}'}}
    ),
    "skeleton has no tag": container_of({"__metadata__": {"ckptlib.skeleton/1": "{}"}}),
    "skeleton has a list as key": container_of(
        {"__metadata__": {"ckptlib.skeleton/1": '{"d":[[{"l":[]},1]]}'}}
    ),
    "huge float": container_of({"__metadata__": {"ckptlib.skeleton/1": '{"f":"0x1p+99999"}'}}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_safetensors_header_is_a_corrupt_checkpoint(what, path):
    with pytest.raises(CorruptCheckpoint):
        get_bytes("safetensors", HOSTILE[what], path)


def npz(members: dict[str, bytes], compression=zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as container:
        for name, data in members.items():
            container.writestr(name, data)
    return out.getvalue()


def npy(header: str, payload: bytes = bytes(64)) -> bytes:
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + payload


def index(skeleton='{"x":"a","kind":"array"}', leaves=None) -> bytes:
    leaves = {"a": ["000000", None, None]} if leaves is None else leaves
    return json.dumps({"skeleton": skeleton, "leaves": leaves}).encode()


INDEX = "ckptlib.index.json"
VAST = npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1125899906842624,), }")
OBJECTS = npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"cos\nsystem\n(tR.")
TENSOR = '{"x":"a","kind":"tensor"}'
FOUR = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (4,), }")


def hostile_npz() -> dict[str, bytes]:
    encrypted = bytearray(npz({INDEX: index()}))
    encrypted[6] |= 1
    encrypted[encrypted.rindex(b"PK\1\2") + 8] |= 1
    unknown = bytearray(npz({INDEX: index()}))
    unknown[8] = unknown[unknown.rindex(b"PK\1\2") + 10] = 99
    return {
        "claims 2^50 items": npz({INDEX: index(), "000000.npy": VAST}),
        "pickled objects": npz({INDEX: index(), "000000.npy": OBJECTS}),
        "no index": npz({"000000.npy": FOUR}),
        "index is a list": npz({INDEX: b"[1]"}),
        "index is deep": npz({INDEX: b"[" * 50_000}),
        "index is not utf-8": npz({INDEX: b"\xff\xfe"}),
        "member is missing": npz({INDEX: index()}),
        "note is short": npz({INDEX: index(leaves={"a": ["000000"]}), "000000.npy": FOUR}),
        "dtype is a function": npz(
            {INDEX: index(TENSOR, {"a": ["000000", "load", [4]]}), "000000.npy": FOUR}
        ),
        "dtype is too wide": npz(
            {INDEX: index(TENSOR, {"a": ["000000", "float64", [1]]}), "000000.npy": FOUR}
        ),
        "shape does not fit": npz(
            {INDEX: index(TENSOR, {"a": ["000000", "uint8", [3]]}), "000000.npy": FOUR}
        ),
        "shape is negative": npz(
            {INDEX: index(TENSOR, {"a": ["000000", "uint8", [-2, -2]]}), "000000.npy": FOUR}
        ),
        "compressed": npz({INDEX: index(), "000000.npy": FOUR}, zipfile.ZIP_DEFLATED)[:-40],
        "encrypted": bytes(encrypted),
        "unknown compression": bytes(unknown),
    }


@pytest.mark.parametrize("what", sorted(hostile_npz()))
def test_a_hostile_npz_is_a_corrupt_checkpoint(what, path):
    with pytest.raises(CorruptCheckpoint):
        get_bytes("numpy", hostile_npz()[what], path)


def test_a_compressed_npz_can_not_blow_up_memory(path):
    """We never compress, so a member that grows on reading is not ours."""
    bomb = npz({INDEX: b" " * 50_000_000 + index()}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < 100_000
    with pytest.raises(CorruptCheckpoint):
        get_bytes("numpy", bomb, path)


class Boom:
    def __reduce__(self):
        return (open, ("/nonexistent-folder/executed", "w"))


def test_a_malicious_pickle_is_refused_without_being_run(path):
    out = io.BytesIO()
    torch.save({"a": Boom()}, out)
    with pytest.raises(CorruptCheckpoint):  # running it would be a FileNotFoundError
        get_bytes("torch", out.getvalue(), path)


# -- random generators ----------------------------------------------------------------------------


@EACH
def test_generator_states_travel_in_every_container_and_restore_the_same_draws(name, path):
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), numpy.random.normal(), torch.rand(1)  # leaves half-used pairs behind
    put(name, rng.rng_state(), path)

    def draws():
        return random.gauss(0, 1), numpy.random.normal(), torch.rand(3).tolist()

    expected = draws()
    rng.restore_rng(get(name, path))
    assert draws() == expected


# -- schema ---------------------------------------------------------------------------------------


def test_the_schema_names_dtype_and_shape_of_every_tensor():
    state = {"b": {"w": torch.zeros(2, 3)}, "a": [torch.zeros((), dtype=torch.int8), 5]}
    expected = {"a/0": ["torch.int8", []], "b/w": ["torch.float32", [2, 3]]}
    assert schema.schema_of(state) == expected
    assert json.loads(json.dumps(expected)) == expected


def test_schema_differences_name_the_key_and_both_sides():
    old = {"a": ["torch.int8", [1]], "b": ["torch.int8", [1]]}
    new = {"a": ["torch.int8", [2]], "c": ["torch.int8", [1]]}
    lines = schema.differences(old, new)
    assert len(lines) == 3
    assert [line.split(":")[0] for line in lines] == ["b", "c", "a"]
    assert schema.differences(old, dict(old)) == []


FLOATING = [d for d in DTYPES if d.is_floating_point or d.is_complex]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_can_be_asked_for_finiteness(dtype):
    assert schema.nonfinite({"x": tensor_of(b"\1", dtype, (3,))}) == []


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_a_nan_or_infinity_of_every_floating_dtype_is_found(dtype):
    if dtype is torch.float8_e8m0fnu:
        bad = torch.full((1,), 255, dtype=torch.uint8).view(dtype)
    elif dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        bad = torch.full((1,), 128, dtype=torch.uint8).view(dtype)
    elif dtype.is_complex:
        bad = torch.view_as_complex(torch.tensor([[0.0, float("nan")]])).to(dtype)
    else:
        bad = torch.tensor([float("nan")]).to(dtype)
    assert schema.nonfinite({"fine": torch.ones(1), "layer": [bad]}) == ["layer/0"]


def test_finiteness_looks_into_sparse_tensors_arrays_and_numbers_and_ignores_the_rest():
    nan = float("nan")
    state = {
        "sparse": torch.tensor([0.0, nan]).to_sparse(), "array": numpy.array([1.0, nan]),
        "number": float("inf"), "complex": numpy.array([1j * nan]), "z": complex(0, nan),
        "zero": -0.0, "denormal": torch.tensor([1e-45]), "text": "nan", "n": None,
        "empty": torch.zeros(0), "times": numpy.array(["NaT"], dtype="M8[s]"),
    }  # fmt: skip
    assert sorted(schema.nonfinite(state)) == ["array", "complex", "number", "sparse", "z"]
