"""What Mean and Each mean, and arithmetic on trees of them."""

import math
from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protofed.method import Batch, Client, Each, Mean, Spec, Tree
from protofed.ops.trees import all_finite, alone, deal, floating, merge, squared_distance, total, under

CLASSES, DIM = 3, 2
SMALL = st.integers(-20, 20)  # sums of small whole numbers are exact, whatever the order
COUNT = st.integers(0, 5)


def tensor(numbers) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@st.composite
def uploads(draw) -> dict:
    """One client's numbers, as plain lists: a prototype per class with its count, a model with its weight, a row."""
    return {
        "prototypes": [[draw(SMALL) for _ in range(DIM)] for _ in range(CLASSES)],
        "counts": [draw(COUNT) for _ in range(CLASSES)],
        "weight": draw(COUNT),
        "model": [draw(SMALL) for _ in range(4)],
        "row": [draw(SMALL), draw(SMALL)],
    }


def as_tree(client: dict) -> Tree:
    model = {"w": tensor(client["model"]).reshape(2, 2), "deep": [tensor(client["model"][0])]}
    return {
        "prototypes": Mean.of(tensor(client["prototypes"]), tensor(client["counts"])),
        "model": Mean.of(model, tensor(client["weight"])),
        "rows": Each({"a": tensor(client["row"]), "b": (tensor(client["row"][0]),)}),
    }


def grouped(draw, trees: list[Tree]) -> Tree:
    """Merge in some nesting of neighbours: ((a b) (c d)), (a (b (c d))), ..."""
    if len(trees) == 1:
        return trees[0]
    cut = draw(st.integers(1, len(trees) - 1))
    return merge(grouped(draw, trees[:cut]), grouped(draw, trees[cut:]))


# Mean


@given(st.data(), st.lists(uploads(), min_size=1, max_size=6))
def test_any_order_and_grouping_of_clients_gives_the_same(data, clients: list[dict]) -> None:
    order = data.draw(st.permutations(range(len(clients))))
    up = grouped(data.draw, [alone(as_tree(clients[i])) for i in order])

    for c in range(CLASSES):
        count = sum(client["counts"][c] for client in clients)
        assert float(up["prototypes"].weight[c]) == count
        for d in range(DIM):
            summed = sum(client["counts"][c] * client["prototypes"][c][d] for client in clients)
            assert float(up["prototypes"].total[c, d]) == summed
            assert float(up["prototypes"].value[c, d]) == (summed / count if count else 0)

    weight = sum(client["weight"] for client in clients)
    assert float(up["model"].weight) == weight
    for k in range(4):
        summed = sum(client["weight"] * client["model"][k] for client in clients)
        assert float(up["model"].total["w"].flatten()[k]) == summed
        assert float(up["model"].value["w"].flatten()[k]) == (summed / weight if weight else 0)
    assert torch.equal(up["model"].total["deep"][0], up["model"].total["w"][0, 0])

    assert up["rows"].rows["a"].tolist() == [clients[i]["row"] for i in order]  # who comes first, stands first
    assert up["rows"].rows["b"][0].tolist() == [clients[i]["row"][0] for i in order]


@given(st.lists(uploads(), min_size=1, max_size=6))
def test_total_adds_as_merging_does(clients: list[dict]) -> None:
    trees = [as_tree(client) for client in clients]
    merged = reduce(merge, [alone(tree) for tree in trees])
    summed = total({"p": tree["prototypes"], "m": tree["model"]} for tree in trees)
    assert torch.equal(summed["p"].total, merged["prototypes"].total)
    assert torch.equal(summed["p"].weight, merged["prototypes"].weight)
    assert torch.equal(summed["m"].total["w"], merged["model"].total["w"])
    assert torch.equal(total(tree["prototypes"] for tree in trees).total, merged["prototypes"].total)


def test_absent_classes_are_zero_and_otherwise_keeps_the_old() -> None:
    mean = Mean.of(tensor([[2, 4], [9, 9], [1, 3]]), tensor([2, 0, 1])) + Mean.of(
        tensor([[8, 1], [7, 7], [5, 5]]), tensor([1, 0, 3])
    )
    assert mean.weight.tolist() == [3, 0, 4]
    assert mean.total.tolist() == [[12, 9], [0, 0], [16, 18]]
    assert mean.value.tolist() == [[4, 3], [0, 0], [4, 4.5]]
    assert mean.otherwise(tensor([[1, 1], [-5, 6], [1, 1]])).tolist() == [[4, 3], [-5, 6], [4, 4.5]]


def test_a_weight_may_be_below_one() -> None:
    """Clients may count by shares; only a weight of 0 says that nothing was added."""
    mean = Mean.of(tensor([[2, 4], [1, 3]]), tensor([0.25, 1e-6]))
    assert mean.value.tolist() == [[2, 4], [pytest.approx(1), pytest.approx(3)]]
    assert mean.otherwise(tensor([[7, 7], [7, 7]])).tolist() == mean.value.tolist()


def test_otherwise_of_a_tree_with_one_weight() -> None:
    old = {"w": tensor([[1, 2], [3, 4]]), "b": [tensor(5)]}
    nothing = Mean.of({"w": torch.ones(2, 2).double(), "b": [tensor(1)]}, tensor(0))
    assert nothing.value["w"].tolist() == [[0, 0], [0, 0]]
    kept = nothing.otherwise(old)
    assert kept["w"].tolist() == [[1, 2], [3, 4]]
    assert kept["b"][0].item() == 5
    new = (nothing + Mean.of({"w": tensor([[8, 8], [8, 8]]), "b": [tensor(6)]}, tensor(2))).otherwise(old)
    assert new["w"].tolist() == [[8, 8], [8, 8]]
    assert new["b"][0].item() == 6


def test_a_weight_per_row_serves_every_leaf_of_a_tree() -> None:
    value = {"vector": tensor([1, 2]), "matrix": tensor([[1, 2], [3, 4]]), "cube": torch.ones(2, 2, 2).double()}
    mean = Mean.of(value, tensor([3, 0]))
    assert mean.total["vector"].tolist() == [3, 0]
    assert mean.total["matrix"].tolist() == [[3, 6], [0, 0]]
    assert mean.total["cube"].tolist() == [[[3, 3], [3, 3]], [[0, 0], [0, 0]]]
    assert mean.value["matrix"].tolist() == [[1, 2], [0, 0]]
    assert mean.otherwise(value)["matrix"].tolist() == [[1, 2], [3, 4]]


def test_weights_may_have_several_axes() -> None:
    """A pool of prototypes has one weight per client, cluster and class."""
    mean = Mean.of(torch.arange(8).double().reshape(2, 2, 2), tensor([[1, 0], [2, 4]]))
    assert mean.total.tolist() == [[[0, 1], [0, 0]], [[8, 10], [24, 28]]]
    assert mean.value.tolist() == [[[0, 1], [0, 0]], [[4, 5], [6, 7]]]


@given(st.integers(1, 10**6), st.floats(-1e6, 1e6, width=32))
def test_the_mean_of_one_client_is_its_value(weight: int, value: float) -> None:
    mean = Mean.of(torch.tensor([value]), torch.tensor(float(weight)))
    assert math.isclose(float(mean.value), value, rel_tol=1e-6, abs_tol=1e-30)


def test_adding_changes_neither_side() -> None:
    left, right = Mean.of(tensor([1, 2]), tensor(1)), Mean.of(tensor([3, 4]), tensor(2))
    both = left + right
    assert isinstance(both, Mean)
    assert (left.total.tolist(), left.weight.item()) == ([1, 2], 1)
    assert (right.total.tolist(), right.weight.item()) == ([6, 8], 2)


# Each


def test_alone_then_merge_then_deal_gives_every_client_its_own() -> None:
    ups = [
        {"mine": Each({"w": tensor([i, 10 * i]), "n": tensor(i)}), "sum": Mean.of(tensor(i), tensor(1))}
        for i in range(4)
    ]
    assert alone(ups[2])["mine"].rows["w"].shape == (1, 2)
    assert alone(ups[2])["mine"].rows["n"].shape == (1,)
    assert alone(ups[2])["sum"] is ups[2]["sum"]
    merged = reduce(merge, map(alone, ups))
    assert merged["mine"].rows["w"].tolist() == [[0, 0], [1, 10], [2, 20], [3, 30]]
    for i in range(4):
        dealt = deal(merged, i)
        assert dealt["mine"]["w"].tolist() == [i, 10 * i]
        assert dealt["mine"]["n"].item() == i
        assert dealt["sum"].total.item() == 6  # what is no Each goes to everybody
        assert dealt["sum"].weight.item() == 4


def test_an_each_of_means_is_not_added() -> None:
    """MP-FedCL's clusters: one pool row per client, each with a weight per class."""
    ups = [Each(Mean.of(tensor([[i, i], [1, 1]]), tensor([i, 0]))) for i in (1, 2)]
    pool = merge(alone(ups[0]), alone(ups[1])).rows
    assert isinstance(pool, Mean)
    assert pool.total.tolist() == [[[1, 1], [0, 0]], [[4, 4], [0, 0]]]
    assert pool.weight.tolist() == [[1, 0], [2, 0]]
    second = deal(Each(pool), 1)
    assert isinstance(second, Mean)
    assert second.total.tolist() == [[4, 4], [0, 0]]


def test_merge_keeps_groups_of_several() -> None:
    left = Each(tensor([[1], [2]]))
    right = Each(tensor([[3], [4], [5]]))
    assert merge(left, right).rows.tolist() == [[1], [2], [3], [4], [5]]
    assert merge({}, {}) == {}


def test_deal_passes_plain_trees_on() -> None:
    down = {"params": {"w": tensor([1, 2])}, "empty": {}, "list": [tensor(3)]}
    dealt = deal(down, 5)
    assert torch.equal(dealt["params"]["w"], down["params"]["w"])
    assert dealt["empty"] == {}
    assert dealt["list"][0].item() == 3


# names


PARAMS = {"body.fc.weight": 1, "body.fc.bias": 2, "head.fc.weight": 3, "personal.body.fc.weight": 4, "header.w": 5}
NAMED = {name: tensor(value) for name, value in PARAMS.items()}


@pytest.mark.parametrize(
    "prefixes, expected",
    [
        ("", list(PARAMS)),
        ((), []),
        ("body.", ["body.fc.weight", "body.fc.bias"]),
        (("body.",), ["body.fc.weight", "body.fc.bias"]),
        ("head.", ["head.fc.weight"]),  # not header.
        (("head.", "personal."), ["head.fc.weight", "personal.body.fc.weight"]),
        (("body.", "body.fc."), ["body.fc.weight", "body.fc.bias"]),
        ("nothing.", []),
    ],
)
def test_under(prefixes, expected: list[str]) -> None:
    chosen = under(NAMED, prefixes)
    assert list(chosen) == expected  # in the order of the whole
    assert all(chosen[name] is NAMED[name] for name in chosen)


def test_under_takes_a_prefix_off_once() -> None:
    assert list(under(NAMED, "body.", strip=True)) == ["fc.weight", "fc.bias"]
    assert list(under({"a.a.x": tensor(1)}, "a.", strip=True)) == ["a.x"]
    assert list(under(NAMED, "", strip=True)) == list(PARAMS)


def test_under_takes_off_each_of_several_prefixes() -> None:
    params = {"a.x": tensor(1), "b.y": tensor(2), "c.z": tensor(3)}
    assert list(under(params, ("a.", "b."), strip=True)) == ["x", "y"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_is_enough_to_be_not_finite(bad: float) -> None:
    good = {"one": torch.ones(3), "two": [tensor([0.0]), torch.tensor(5)]}
    assert all_finite(good)
    assert not all_finite(good | {"three": tensor([1.0, bad])})
    assert not all_finite({"zero": tensor([bad, 1.0])} | good)


def test_floating_leaves_counters_out() -> None:
    buffers = {
        "mean": torch.zeros(2),
        "n": torch.zeros((), dtype=torch.int64),
        "half": torch.zeros(1).half(),
        "flag": torch.zeros(1, dtype=torch.bool),
    }
    assert list(floating(buffers)) == ["mean", "half"]


def test_squared_distance_is_over_shared_names() -> None:
    left = {"a": tensor([1, 2]), "b": tensor([[3.0]]), "only": tensor([100])}
    right = {"b": tensor([[5.0]]), "a": tensor([0, 4]), "other": tensor([100])}
    assert squared_distance(left, right).item() == 1 + 4 + 4
    assert squared_distance(right, left).item() == 9
    assert squared_distance(left, left).item() == 0


def test_squared_distance_without_shared_names_is_zero() -> None:
    assert float(squared_distance({"a": tensor([1])}, {"b": tensor([1])})) == 0


def test_squared_distance_has_the_gradient_of_a_square() -> None:
    anchor = {"w": tensor([1, 5])}
    grad = torch.func.grad(lambda p: squared_distance(p, anchor))({"w": tensor([4, 4])})
    assert grad["w"].tolist() == [6, -2]


# the rest of the contract


def test_batch_mean_is_over_real_samples() -> None:
    batch = Batch(torch.zeros(4, 1), torch.zeros(4).long(), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert batch.mean(torch.tensor([1.0, 2.0, 6.0, 1000.0])).item() == 3
    empty = batch._replace(mask=torch.zeros(4))
    assert empty.mean(torch.ones(4)).item() == 0


def test_initial_randomness_depends_on_the_seed_alone() -> None:
    spec = Spec("mlp", 2, 3, {}, {}, seed=5)
    torch.manual_seed(0)
    first = torch.rand(3, generator=spec.generator())
    torch.manual_seed(1)
    assert torch.equal(first, torch.rand(3, generator=spec.generator()))
    assert not torch.equal(first, torch.rand(3, generator=spec._replace(seed=6).generator()))


def test_clients_do_not_share_their_memory() -> None:
    first, second = Client({}, {}), Client({}, {})
    assert first.memory == second.memory == {}
    assert first._replace(memory={"x": 1}).memory != second.memory
