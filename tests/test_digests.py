"""Content digests: equal values, equal digest; anything else, another one."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict

import numpy
import pytest
import torch
from faulty import DTYPES, canonical, states, tensor_of, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.digests import CHUNK, MAX_DEPTH, content_digest, sha256_file, tensor_digest, walk
from ckptlib.errors import UnsupportedState
from ckptlib.vfs import REAL

RAW = bytes(range(1, 98))
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
]


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_a_files_digest_is_what_sha256sum_prints(tmp_path, size):
    data = random.Random(size).randbytes(size)
    (tmp_path / "a").write_bytes(data)
    file = REAL.open(str(tmp_path / "a"))
    file.seek(size // 2)  # wherever it stands
    assert sha256_file(file) == (hashlib.sha256(data).hexdigest(), size)
    file.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_hashes_by_its_bits(dtype):
    tensor = tensor_of(RAW, dtype, (3, 5))
    assert tensor_digest(tensor) == tensor_digest(tensor.clone())
    changed = tensor.clone()
    changed.view(torch.uint8)[2, -1] ^= 1
    assert tensor_digest(changed) != tensor_digest(tensor)


def test_no_two_dtypes_share_the_digest_of_the_same_bytes():
    digests = {tensor_digest(torch.zeros(0, dtype=dtype)) for dtype in DTYPES}
    assert len(digests) == len(DTYPES)
    assert tensor_digest(torch.zeros(4, dtype=torch.float32)) != tensor_digest(
        torch.zeros(4, dtype=torch.int32)
    )


def test_shapes_with_the_same_elements_differ():
    shapes = [(0, 3), (3, 0), (0,), (0, 0), (0, 3, 1)]
    assert len({tensor_digest(torch.zeros(shape)) for shape in shapes}) == len(shapes)
    ones = [torch.ones(()), torch.ones(1), torch.ones(1, 1)]
    assert len({tensor_digest(t) for t in ones}) == 3
    assert tensor_digest(torch.ones(2, 3)) != tensor_digest(torch.ones(3, 2))


@settings(max_examples=100)
@given(tensors())
def test_strides_never_matter(tensor):
    wide = torch.empty((*tensor.shape, 2), dtype=tensor.dtype)[..., 0]
    wide.copy_(tensor) if tensor.numel() else None
    digest = tensor_digest(tensor)
    assert digest == tensor_digest(tensor.contiguous()) == tensor_digest(wide)


def test_a_tensor_of_one_element_with_a_wide_stride_hashes():
    """torch calls it contiguous, since a stride over one element means nothing."""
    one = torch.arange(10.0)[::5][:1]
    assert one.is_contiguous() and one.stride() == (5,)
    assert tensor_digest(one) == tensor_digest(torch.zeros(1))


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_a_lazy_conjugate_hashes_as_the_values_it_stands_for(dtype):
    tensor = tensor_of(RAW, dtype, (2, 3))
    lazy = tensor.conj()
    assert lazy.is_conj()
    assert tensor_digest(lazy) == tensor_digest(lazy.resolve_conj().clone())
    assert tensor_digest(lazy) != tensor_digest(tensor)


def test_a_lazy_negation_hashes_as_the_values_it_stands_for():
    lazy = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert lazy.is_neg()
    assert tensor_digest(lazy) == tensor_digest(torch.tensor([-2.0, 4.0]))


def test_gradients_parameters_and_sharing_do_not_enter():
    base = torch.arange(12.0)
    digest = tensor_digest(base[4:8])
    assert digest == tensor_digest(base[4:8].clone().requires_grad_())
    assert digest == tensor_digest(torch.nn.Parameter(base[4:8].clone()))
    shared, apart = {"a": base, "b": base}, {"a": base, "b": base.clone()}
    assert content_digest(shared) == content_digest(apart)


def test_nan_payloads_and_the_sign_of_zero_are_values():
    words = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001, 0, -(2**31)], dtype=torch.int32)
    assert len({tensor_digest(word.view(torch.float32)) for word in words}) == 5
    assert content_digest([0.0]) != content_digest([-0.0])


def test_sparse_tensors_hash_by_indices_and_values():
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    kinds = [dense, dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()]
    assert len({tensor_digest(t) for t in kinds}) == 4
    for make in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc):
        assert tensor_digest(make(dense)) == tensor_digest(make(dense.clone()))
        assert tensor_digest(make(dense)) != tensor_digest(make(dense * 2))
        assert tensor_digest(make(dense)) != tensor_digest(make(dense.T))
    twice = torch.sparse_coo_tensor([[0, 0]], [1.0, 1.0], (2,))  # the same place given twice
    assert tensor_digest(twice) == tensor_digest(torch.tensor([2.0, 0.0]).to_sparse())
    wider = torch.sparse_coo_tensor([[0]], [1.0], (3,)), torch.sparse_coo_tensor([[0]], [1.0], (2,))
    assert tensor_digest(wider[0]) != tensor_digest(wider[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_tensors_hash_by_integers_scale_and_zero_point():
    values = torch.tensor([0.0, 0.5, 1.0])

    def quantise(scale, zero, dtype=torch.quint8):
        return torch.quantize_per_tensor(values, scale, zero, dtype)

    reference = quantise(0.1, 0)
    assert tensor_digest(reference) == tensor_digest(quantise(0.1, 0))
    others = [quantise(0.2, 0), quantise(0.1, 3), quantise(0.1, 0, torch.qint8), values]
    others.append(reference.int_repr())
    assert tensor_digest(reference) not in {tensor_digest(t) for t in others}
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
    channels = [
        torch.quantize_per_channel(torch.ones(2, 2), s, zeros, axis, torch.qint8)
        for s, axis in ((scales, 0), (scales, 1), (scales * 2, 0))
    ]
    assert len({tensor_digest(t) for t in channels}) == 3


@pytest.mark.filterwarnings("ignore")
def test_what_has_no_bytes_is_refused_with_its_key():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    objects = numpy.array([object()], dtype=object)
    for leaf in (torch.empty(2, device="meta"), fake, nested, objects, object(), {1, 2}):
        with pytest.raises(UnsupportedState) as caught:
            content_digest({"layer": [0, leaf]})
        assert caught.value.key == "layer/1"
        assert "layer/1" in str(caught.value)


def test_numpy_scalars_and_subclasses_are_refused_rather_than_taken_for_python_numbers():
    class Step(int):
        pass

    for leaf in (numpy.float64(1), numpy.int64(1), numpy.bool_(True), Step(1)):
        with pytest.raises(UnsupportedState):
            content_digest({"a": leaf})


def test_masked_arrays_and_structured_arrays_never_share_a_digest_with_others():
    """Their bytes do not say all: they are refused, or told apart."""
    plain, masked = numpy.array([1, 2]), numpy.ma.masked_array([1, 2], [False, True])
    one = numpy.zeros(2, dtype=[("a", "i4"), ("b", "i4")])
    two = numpy.zeros(2, dtype=[("c", "f4"), ("d", "i4")])
    for left, right in ((plain, masked), (one, two)):
        try:
            assert content_digest({"x": left}) != content_digest({"x": right})
        except UnsupportedState as error:
            assert error.key == "x"


def test_arrays_and_tensors_of_the_same_values_are_told_apart():
    array = numpy.arange(3, dtype="<f4")
    assert content_digest([array]) != content_digest([torch.from_numpy(array.copy())])
    assert content_digest([array]) != content_digest([array.astype(">f4")])
    assert content_digest([array]) == content_digest([numpy.arange(6, dtype="<f4")[::2] / 2])
    matrix = numpy.arange(6.0).reshape(2, 3)
    assert content_digest([matrix]) == content_digest([numpy.asfortranarray(matrix)])


def test_the_order_of_keys_does_not_matter_and_that_of_lists_does():
    assert content_digest({"a": 1, "b": 2, 3: 4}) == content_digest({3: 4, "b": 2, "a": 1})
    assert content_digest({"a": 1}) == content_digest(OrderedDict(a=1))
    assert content_digest([1, 2]) != content_digest([2, 1])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"a/b": 1}, {"a": {"b": 1}}),
        ({"a": {}, "b": 1}, {"a": {"b": 1}}),
        ({"1": 0}, {1: 0}),
        ({0: "x"}, ["x"]),
        (["x"], ("x",)),
        ([[], []], [[[]]]),
        ([["a"], "b"], [["a", "b"]]),
        ({"'a'": 1}, {"a": 1}),
        ({"a": b"x"}, {"a": "x"}),
        ({"a": True}, {"a": 1}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1.0}, {"a": 1 + 0j}),
        ({"a": None}, {"a": "None"}),
        ({"a": None}, {}),
        ({"": {}}, {"": {"": {}}}),
        ([""], [b""]),
        ({"a": 10**5000}, {"a": 10**5000 + 1}),
        ({"a": "\ud83d\ude00"}, {"a": "\U0001f600"}),
    ],
)
def test_a_boundary_can_not_be_confused_with_another(left, right):
    if canonical(left) == canonical(right):
        pytest.fail("the pair should differ")
    assert content_digest(left) != content_digest(right)


SMALL = st.sampled_from(
    [
        *(None, False, True, 0, 1, -1, 0.0, -0.0, 1.0, 0j, "", "0", "a", "a/b", b"", b"0", b"a"),
        *(torch.zeros(shape) for shape in ((), (0,), (1,), (0, 3), (3, 0))),
        *(torch.zeros(1, dtype=dtype) for dtype in (torch.int32, torch.float64, torch.bool)),
        *(numpy.zeros(shape, dtype="<f4") for shape in ((), (0,), (1,))),
    ]
)


@settings(max_examples=300)
@given(states(SMALL, max_leaves=4), states(SMALL, max_leaves=4))
def test_two_states_share_a_digest_only_if_they_hold_the_same(left, right):
    assert (content_digest(left) == content_digest(right)) == (canonical(left) == canonical(right))


@settings(max_examples=150)
@given(states(), st.data())
def test_a_change_anywhere_changes_the_digest(state, data):
    """Replace one leaf by another that is different: the digest follows."""
    spots: list[tuple] = []

    def collect(node):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            spots.append((node, key))
            if isinstance(value, (dict, list)):
                collect(value)

    if isinstance(state, tuple):
        state = list(state)
    collect(state)
    if not spots:
        return
    node, key = data.draw(st.sampled_from(spots))
    before, old = content_digest(state), canonical(node[key])
    node[key] = data.draw(SMALL)
    assert (content_digest(state) == before) == (canonical(node[key]) == old)


def test_too_deep_a_nesting_is_refused_with_a_typed_error():
    state: list = []
    for _ in range(MAX_DEPTH):
        state = [state]
    content_digest(state)
    with pytest.raises(UnsupportedState, match="nesting"):
        content_digest([state])
    loop: list = []
    loop.append(loop)
    with pytest.raises(UnsupportedState):
        content_digest(loop)


@pytest.mark.parametrize("key", [1.5, None, True, b"a", (1, 2)], ids=repr)
def test_keys_other_than_strings_and_integers_are_refused(key):
    with pytest.raises(UnsupportedState, match="key"):
        content_digest({"a": 1, key: 2})


def test_walking_names_each_leaf_uniquely():
    state = {"a/b": 1, "a": {"b": 2, 0: 3, "0": 4}, "": 5, "'a'": [6, (7,)]}
    keys = [key for key, kind, _ in walk(state) if kind == "leaf"]
    assert len(set(keys)) == len(keys) == 7


def test_the_digest_does_not_change_between_versions():
    """A recorded digest must stay comparable: whoever changes this changes the tag as well."""
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    state = {"w": weight, "n": [1, None, "é", b"\0", 0.5]}
    again = hashlib.sha256(b"ckptlib.content/1")

    def frame(tag, payload):
        again.update(tag + len(payload).to_bytes(8, "little") + payload)

    frame(b"k", b""), frame(b"d", b"2")
    frame(b"k", b"n"), frame(b"l", b"5")
    half = b"\0" * 6 + b"\xe0?"
    leaves = [(b"I", b"1"), (b"N", b""), (b"S", "é".encode()), (b"Y", b"\0"), (b"F", half)]
    for index, leaf in enumerate(leaves):
        frame(b"k", f"n/{index}".encode()), frame(*leaf)
    inner = hashlib.sha256()
    for tag, payload in (
        (b"t", b"torch.float32|torch.strided"), (b"s", b"(2, 3)"),
        (b"n", b"|torch.float32|(2, 3)"), (b"b", state["w"].numpy().tobytes()),
    ):  # fmt: skip
        inner.update(tag + len(payload).to_bytes(8, "little") + payload)
    frame(b"k", b"w"), frame(b"T", inner.hexdigest().encode())
    assert content_digest(state) == again.hexdigest()
