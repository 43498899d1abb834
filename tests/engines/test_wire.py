"""Trees as bytes: exact, sparse, measured, and safe to read from anybody."""

import ast
import inspect
import json
import math
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor, nn

from protofed.engines import wire
from protofed.engines.wire import Size, decode, encode, encoded_size
from protofed.method import Batch, Client, Each, LocalData, Mean, Spec, Tree
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedproto import FedProto
from protofed.methods.local import Local
from protofed.models import MODELS, Net, chain
from protofed.models.functional import FunctionalModel, state
from protofed.ops import random
from protofed.ops.trees import deal

DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8]
PLAIN = st.text("abcxyz0189._-é", min_size=1, max_size=6)
ODD = st.text("ab/#~._ ", max_size=4)


def same(left: Any, right: Any) -> bool:
    """Equal in structure, types, shapes and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return left.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return len(left) == len(right) and all(map(same, left, right))


def tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [t for part in (tree.values() if isinstance(tree, dict) else tree) for t in tensors_in(part)]


@st.composite
def tensors(draw, dtypes=DTYPES) -> Tensor:
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.sampled_from([(), (1,), (3,), (0,), (2, 3), (2, 0), (1, 2, 2)]))
    if dtype.is_floating_point:
        number = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -0.0])
    else:
        number = {torch.bool: st.booleans(), torch.uint8: st.integers(0, 255)}.get(
            dtype, st.integers(-(2**63), 2**63 - 1)
        )
    return torch.tensor(
        draw(st.lists(number, min_size=math.prod(shape), max_size=math.prod(shape))), dtype=dtype
    ).reshape(shape)


def structures(leaves, keys):
    return st.recursive(
        leaves,
        lambda inner: (
            st.dictionaries(keys, inner, max_size=3)
            | st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
        ),
        max_leaves=5,
    )


@st.composite
def means(draw, keys) -> Mean:
    """A Mean whose absent rows are 0, as Mean.of makes it."""
    kind = draw(st.sampled_from(["number", "rows", "grid", "tree"]))
    floats = st.floats(-10, 10, width=32)
    if kind == "number":
        return Mean(draw(structures(tensors(), keys)), torch.tensor(draw(floats)))
    size = {"rows": (4,), "tree": (4,), "grid": (2, 3)}[kind]
    count = math.prod(size)
    weight = torch.tensor(draw(st.lists(st.sampled_from([0.0, 0.0, 1.0, 7.0]), min_size=count, max_size=count)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    numbers = draw(st.lists(floats, min_size=2 * count, max_size=2 * count))
    total = torch.tensor(numbers, dtype=dtype).reshape(*size, 2)
    weight = weight.reshape(size)
    total = torch.where(weight[..., None] > 0, total, torch.zeros((), dtype=dtype))
    if draw(st.booleans()):
        total = total[..., 0]
    return Mean({"deep": [total]} if kind == "tree" else total, weight)


def trees(keys=PLAIN):
    plain = structures(tensors(), keys)
    params = st.dictionaries(keys, tensors(), max_size=3)
    node = means(keys) | plain.map(Each) | st.builds(Client, params, params, plain) | means(keys).map(Each) | tensors()
    return structures(node, keys)


# there and back


@given(trees())
@settings(max_examples=200)
def test_round_trip_is_exact(tree: Tree) -> None:
    assert same(decode(encode(tree)), tree)


@given(trees(ODD))
@settings(max_examples=200)
def test_any_key_travels(tree: Tree) -> None:
    """Slashes and hashes in names must not make two tensors one."""
    assert same(decode(encode(tree)), tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": torch.tensor(1.0)}, "a/b": torch.tensor(2.0)},
        {"a": [torch.tensor(1.0)], "a/0": torch.tensor(2.0)},
        {"a": Mean(torch.tensor(1.0), torch.tensor(2.0)), "a#n": torch.tensor(3.0)},
        {"a": Mean(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])), "a#i": torch.tensor(3.0)},
        {"": torch.tensor(1.0), "/": torch.tensor(2.0), "//": {"": torch.tensor(3.0)}},
        {"__metadata__": torch.tensor(1.0), "tree": torch.tensor(2.0)},
    ],
)
def test_names_do_not_collide(tree: Tree) -> None:
    assert same(decode(encode(tree)), tree)


@pytest.mark.parametrize("tree", [{}, [], (), {"a": {}, "b": [], "c": ()}, Client({}, {}), Each({})])
def test_trees_without_tensors(tree: Tree) -> None:
    assert same(decode(encode(tree)), tree)
    assert encoded_size(tree) == Size(0, 0)  # nothing is sent


def test_tensors_may_share_their_memory() -> None:
    """Two clients that start alike and freeze a part hold one tensor, and both are in a checkpoint."""
    frozen, whole = torch.arange(3.0), torch.arange(6.0).reshape(2, 3)
    tree = {"0": {"w": frozen, "row": whole[0]}, "1": {"w": frozen, "all": whole, "column": whole[:, 1]}}
    assert same(decode(encode(tree)), tree)
    assert encoded_size(tree).bytes == len(encode(tree))


def test_views_and_gradients_are_sent_as_they_look() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tree = {"t": base.T, "slice": base[1:, ::2].clone().expand(2, 2), "flat": torch.ones(1).expand(5)}
    back = decode(encode(tree))
    assert back["t"].tolist() == base.T.tolist()
    assert back["slice"].tolist() == [[4, 6], [8, 10]]
    assert back["flat"].tolist() == [1] * 5
    grown = torch.ones(2, requires_grad=True)
    back = decode(encode([grown]))
    assert back[0].tolist() == [1, 1]
    assert not back[0].requires_grad


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@pytest.mark.parametrize(
    "tree",
    [
        {0: torch.ones(1)},
        {0: torch.ones(1), "0": torch.zeros(1)},
        Pair(torch.ones(1), torch.zeros(1)),
        {"deep": [Pair(torch.ones(1), torch.zeros(1))]},
    ],
    ids=["int key", "two keys alike", "named tuple", "deep named tuple"],
)
def test_what_cannot_come_back_the_same_is_refused(tree: Tree) -> None:
    """Either exactly that comes back, or a TypeError tells at once; never something similar."""
    try:
        message = encode(tree)
    except TypeError:
        return
    assert same(decode(message), tree)


@pytest.mark.parametrize(
    "thing", [3, 2.5, "text", None, {1, 2}, object(), {"a": 1}, [None], Mean([1.0], torch.ones(()))]
)
def test_only_tensors_travel(thing: Any) -> None:
    with pytest.raises(TypeError, match="only tensors travel"):
        encode(thing)
    with pytest.raises(TypeError, match="only tensors travel"):
        encoded_size(thing)


# rows of weight 0


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_absent_rows_are_not_sent(present: list[bool]) -> None:
    weight = torch.tensor([3.0 * p for p in present])
    total = torch.full((len(present), 500), 7.0)  # also where the weight is 0: that is what must not travel
    message = encode({"p": Mean(total, weight)})
    assert 2000 * sum(present) <= len(message) <= 2000 * sum(present) + 400
    back = decode(message)["p"]
    assert torch.equal(back.weight, weight)
    for c, p in enumerate(present):
        assert back.total[c].tolist() == [7.0 * p] * 500


def test_absent_rows_of_a_tree_are_not_sent() -> None:
    """A Mean may hold a tree with one weight per row."""
    total = {"mean": torch.full((4, 500), 7.0), "square": torch.full((4, 500), 9.0)}
    message = encode(Mean(total, torch.tensor([0.0, 2.0, 0.0, 0.0])))
    assert len(message) < 2 * 2000 + 600
    back = decode(message)
    assert back.weight.tolist() == [0, 2, 0, 0]
    assert back.total["mean"][:, 0].tolist() == [0, 7, 0, 0]
    assert back.total["square"][:, 499].tolist() == [0, 9, 0, 0]


@pytest.mark.parametrize("classes", [1, 255, 256, 257, 32768, 32769, 40_000])
def test_row_numbers_of_many_classes(classes: int) -> None:
    weight = torch.zeros(classes)
    weight[classes - 1] = 2
    weight[classes // 2] = 1
    mean = Mean(weight * 3, weight)
    back = decode(encode(mean))
    assert same(back, mean)


def test_a_pool_loses_its_empty_slots() -> None:
    weight = torch.zeros(5, 4, 10)
    weight[2, 1, 3] = 6
    pool = Mean.of(torch.ones(5, 4, 10, 256), weight)
    message = encode(Each(pool))
    assert len(message) < 2000
    assert same(decode(message), Each(pool))


# what it costs


@given(trees() | trees(ODD))
@settings(max_examples=200)
def test_measured_bytes_are_sent_bytes(tree: Tree) -> None:
    assume(tensors_in(tree))
    size = encoded_size(tree)
    assert size.bytes == len(encode(tree)) == sum(size.kinds.values())


def test_measuring_again_gives_the_same_and_other_shapes_another() -> None:
    first = encoded_size({"a": torch.zeros(3)})
    assert encoded_size({"a": torch.ones(3)}) == first
    assert encoded_size({"a": torch.zeros(4)}).params == 4
    assert encoded_size({"a": torch.zeros(3).double()}).bytes == len(encode({"a": torch.zeros(3).double()}))
    both = {"b": torch.zeros(3), "c": torch.zeros(1)}
    size = len(encode(both))
    assert encoded_size(both) == Size(size, 4, {"b": 12, "c": 4, "counts and header": size - 16})


def test_sizes_add() -> None:
    assert Size(1, 2) + Size(10, 20) == Size(11, 22)
    assert Size(1, 2, {"a": 1}) + Size(10, 20, {"a": 3, "b": 7}) == Size(11, 22, {"a": 4, "b": 7})
    assert Size(3, 2, {"a": 1, "b": 2}).times(4) == Size(12, 8, {"a": 4, "b": 8})


def test_bytes_are_told_by_what_they_are() -> None:
    up = {
        "model": Mean({"params": {"body.w": torch.zeros(5), "s": torch.zeros(())}, "buffers": {"n": torch.zeros(2)}},
                      torch.tensor(3.0)),
        "prototypes": Mean(torch.zeros(4, 6), torch.tensor([1.0, 0, 2, 0])),  # two rows of four
        "gradients": torch.zeros(2, 2),
        "size": torch.tensor(7.0),
    }  # fmt: skip
    kinds = dict(encoded_size(up).kinds)
    beside = kinds.pop("counts and header")
    assert kinds == {"weights": 24, "buffers": 8, "prototypes": 2 * 6 * 4, "gradients": 16}
    assert beside == len(encode(up)) - 24 - 8 - 48 - 16
    assert (
        encoded_size(Mean(torch.zeros(2, 3), torch.ones(2))).kinds["prototypes"] == 24
    )  # a message that is nothing else


class Table:
    """A model whose embeddings are its inputs."""

    def __call__(self, client: Client, x: Tensor, at: str = "") -> tuple[Tensor, Tensor]:
        return x, x

    def embed(self, client: Client, x: Tensor, at: str = "") -> Tensor:
        return x

    def classify(self, client: Client, z: Tensor, at: str = "") -> Tensor:
        return z


def fedproto_up(method: FedProto, held: list[int]) -> Tree:
    y = torch.tensor(held * 3)
    batch = Batch(torch.rand(len(y), 50) + 0.1, y, torch.ones(len(y)))
    down = method.init_server(Spec("table", 10, 50, {}, {}, 0))
    data = LocalData([batch], torch.bincount(y, minlength=10).float(), random.key(0))
    return method.upload(Table(), Client({}, {}), data, down)[0]


@pytest.mark.parametrize("aggregation", ["mean", "weighted", "literal"])
@pytest.mark.parametrize("n", [1, 3, 5, 10])
def test_fedproto_costs_what_the_paper_counts(aggregation, n: int) -> None:
    """20 clients x n classes x 50 numbers: 3,000 at n = 3, 4,000 at n = 4, 5,000 at n = 5."""
    method = FedProto(aggregation=aggregation)
    held = [[(i + k) % 10 for k in range(n)] for i in range(20)]
    sent = [encoded_size(fedproto_up(method, classes)) for classes in held]
    assert sum(size.params for size in sent) == 20 * n * 50
    assert all(size.bytes < 4000 for size in sent)
    assert all(size.bytes == len(encode(fedproto_up(method, c))) for size, c in zip(sent, held, strict=True))


def fedavg_up(net: nn.Module) -> Tree:
    params, buffers = state(net)
    data = LocalData([], torch.tensor([3.0, 4.0]), random.key(0))
    return FedAvg().upload(FunctionalModel(net), Client(params, buffers), data, {})[0]


def test_fedavg_costs_the_model() -> None:
    up = fedavg_up(MODELS["cnn_mnist"]((1, 28, 28), 10))
    assert encoded_size(up).params == 21_840
    assert 4 * 21_840 < encoded_size(up).bytes < 4 * 21_840 + 2_000


def test_buffers_are_sent_and_not_counted() -> None:
    body = chain(fc=nn.Linear(3, 4), bn=nn.BatchNorm1d(4))
    net = Net(body, chain(fc=nn.Linear(4, 2)), 4)
    up = fedavg_up(net)
    assert encoded_size(up).params == (3 * 4 + 4) + (4 + 4) + (4 * 2 + 2)
    assert set(decode(encode(up)).total["buffers"]) == {"body.bn.running_mean", "body.bn.running_var"}
    params, buffers = state(net)
    assert encoded_size(Client(params, buffers)).params == 34  # in a client, too


def test_counts_and_whole_numbers_are_not_counted() -> None:
    assert encoded_size(Mean(torch.zeros(3), torch.ones(3))).params == 3
    assert encoded_size(Mean(torch.zeros(3, 2), torch.tensor([1.0, 0.0, 1.0]))).params == 4
    assert encoded_size({"n": torch.zeros(5, dtype=torch.int64), "w": torch.zeros(2)}).params == 2
    assert encoded_size(Each(Mean(torch.zeros(2, 3), torch.ones(2)))).params == 6


def test_a_name_with_a_hash_is_counted_like_another() -> None:
    assert encoded_size({"layer#1": torch.zeros(5)}).params == 5


def test_local_sends_nothing() -> None:
    data = LocalData([], torch.ones(2), random.key(0))
    up, _ = Local().upload(Table(), Client({}, {}), data, {})
    assert encoded_size(up) == Size(0, 0)


def test_ten_prototypes_of_fifty_are_under_4_kb() -> None:
    for weight in (torch.ones(10), torch.tensor([1.0] * 9 + [0.0])):
        message = encode({"prototypes": Mean.of(torch.rand(10, 50), weight)})
        assert len(message) < 4000


# damage


SAMPLE = encode(
    {
        "p": Mean.of(torch.arange(6.0).reshape(3, 2), torch.tensor([1.0, 0.0, 2.0])),
        "l": [torch.ones(2), (torch.zeros(1),), Each(torch.ones(1, 2))],
        "c": Client({"w": torch.ones(2, 2)}, {"n": torch.tensor(3)}),
        "e": {},
    }
)
HEADER = 8 + int.from_bytes(SAMPLE[:8], "little")


def refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="not a tree of tensors"):
        decode(message)


def test_every_truncation_is_refused() -> None:
    for length in range(len(SAMPLE)):
        refused(SAMPLE[:length])
    refused(SAMPLE + b"\0")


@given(st.integers(0, HEADER - 1), st.integers(0, 7))
@settings(max_examples=500)
def test_a_flipped_bit_in_the_header_gives_a_value_error_at_worst(place: int, bit: int) -> None:
    damaged = bytearray(SAMPLE)
    damaged[place] ^= 1 << bit
    try:
        tree = decode(bytes(damaged))
    except ValueError:
        return
    assert len(tree) == 4  # a changed number or name may pass, a changed structure may not
    assert [type(part) for part in tree.values()] == [Mean, list, Client, dict]
    assert [type(part) for part in tree["l"]] == [Tensor, tuple, Each]


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(message: bytes) -> None:
    refused(message)


@given(st.binary(max_size=200))
def test_random_bytes_behind_a_valid_length_are_refused(header: bytes) -> None:
    refused(len(header).to_bytes(8, "little") + header)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["mean", "each", "client", "dict", "list", "tuple", "rows", "total", "a"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=8,
)


@given(JSON)
@settings(max_examples=400)
def test_a_false_structure_is_refused_or_harmless(shape: Any) -> None:
    """Right tensors with any JSON for their tree."""
    tensors = {
        "": torch.ones(2),
        "#n": torch.ones(2),
        "#i": torch.tensor([0, 1], dtype=torch.uint8),
        "/a": torch.ones(1),
    }
    message = save(tensors, metadata={"tree": json.dumps(shape)})
    try:
        tree = decode(message)
    except ValueError:
        return
    assert same(decode(encode(tree)), tree)  # what was let in is a tree


@pytest.mark.parametrize(
    "shape",
    [
        *['{"lisu":[]}', '{"dicu":{}}', '{"set":[]}', '{"dict":[]}', "{}", "[]", "3", ""],
        *['{"mean":null}', '{"mean":{}}', '{"mean":{"rows":[-1]}}', '{"mean":{"rows":["a"]}}', '{"mean":{"rows":[1]}}'],
        *['{"mean":{"rows":[99999999999999999999999]}}', '{"client":{"dict":{}}}', '{"client":{"list":[]}}'],
        *['{"client":{"dict":{"params":null,"buffers":null,"memory":null,"more":null}}}', "[" * 50_000],
        *['{"list":[],"tuple":[]}', '{"each":{"unknown":[]}}'],
    ],
)
def test_a_tree_that_encode_never_writes_is_refused(shape: str) -> None:
    tensors = {"": torch.ones(2), "#n": torch.ones(2), "#i": torch.tensor([0, 1], dtype=torch.uint8)}
    refused(save(tensors, metadata={"tree": shape}))


def test_a_safetensors_file_of_somebody_else_is_refused() -> None:
    refused(save({"w": torch.ones(2)}))
    refused(save({"w": torch.ones(2)}, metadata={"format": "pt"}))


@pytest.mark.parametrize("index", [[0, 2], [0, 5], [-1, 0], [0, 0], [0]])
def test_row_numbers_must_fit(index: list[int]) -> None:
    """Two rows of three: numbers that are right, then out of range, negative, twice, or too few."""
    message = encode(Mean(torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]), torch.tensor([1.0, 0.0, 1.0])))
    header = json.loads(message[8 : 8 + int.from_bytes(message[:8], "little")])
    tensors = load(message)
    (place,) = [name for name, tensor in tensors.items() if tensor.dtype == torch.uint8]
    kind = torch.uint8 if min(index) >= 0 else torch.int16
    changed = save(tensors | {place: torch.tensor(index, dtype=kind)}, metadata=header["__metadata__"])
    if index == [0, 2]:
        assert decode(changed).total.tolist() == [[1, 2], [0, 0], [3, 4]]
    else:
        refused(changed)
    many = torch.ones(300, 2).index_fill(0, torch.tensor([7]), 0)  # row numbers of a type that has negative ones
    message = encode(Mean(many, many[:, 0]))
    tensors, header = load(message), json.loads(message[8 : 8 + int.from_bytes(message[:8], "little")])
    (place,) = [name for name, tensor in tensors.items() if tensor.dtype == torch.int16]
    changed = save(tensors | {place: tensors[place] - 1}, metadata=header["__metadata__"])
    assert torch.equal(decode(message).total, many)
    refused(changed)


def test_a_broadcast_with_rows_for_single_clients_costs_what_they_get() -> None:
    """Also where what all of them get has other classes than in the round before."""
    rows = Each(Mean(torch.ones(3, 2), torch.tensor([0.0, 1, 1])))
    for known in ([0.0, 0, 0], [1.0, 1, 1], [1.0, 0, 1]):
        down = {"prototypes": Mean(torch.ones(3, 8), torch.tensor(known)), "own": rows}
        parts = [encoded_size(deal(down, row)) for row in range(3)]
        assert wire.measure_down(down, 3) == parts[0] + parts[1] + parts[2]


# nothing is pickled


def test_nothing_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args, **kwargs):
        raise AssertionError("pickled")

    for module, name in ((pickle, "dumps"), (pickle, "loads"), (pickle, "dump"), (pickle, "load"), (torch, "save")):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr(torch, "load", never)
    tree = {"a": Mean(torch.ones(2), torch.ones(())), "b": Client({"w": torch.ones(1)}, {})}
    assert same(decode(encode(tree)), tree)


def test_the_module_knows_no_pickle() -> None:
    parsed = ast.parse(inspect.getsource(wire))
    names = {alias.name for node in ast.walk(parsed) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(parsed) if isinstance(node, ast.ImportFrom)}
    assert not {str(name).split(".")[0] for name in names} & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused(protocol: int) -> None:
    refused(pickle.dumps({"a": [1, 2]}, protocol=protocol))
