"""Every accuracy against a loop over samples."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from torch import Tensor

from protofed.method import Method
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedproto import FedProto
from protofed.methods.local import Local
from protofed.metrics import (
    SCORES,
    Correct,
    Spread,
    add,
    auc,
    global_numbers,
    judged_by,
    mean_accuracy,
    of_one_length,
    own_numbers,
    personal_numbers,
    spread,
    tally,
)

CLASSES = 4
INF = math.inf


def counts(right: list[float], samples: list[float]) -> Correct:
    return Correct(torch.tensor(right, dtype=torch.float64), torch.tensor(samples, dtype=torch.float64))


def guess(scores: list[float], allowed: list[bool]) -> int | None:
    """The best-scored class among those allowed, the first where several are; None where no score is finite."""
    best = None
    for c, score in enumerate(scores):
        if allowed[c] and score > -INF and (best is None or score > scores[best]):
            best = c
    return best


SAMPLES = st.lists(
    st.tuples(st.permutations([float(v) for v in range(CLASSES)]), st.integers(0, CLASSES - 1)), max_size=20
)
OWN = st.lists(st.booleans(), min_size=CLASSES, max_size=CLASSES)


def tensors(samples: list[tuple[list[float], int]]) -> tuple[Tensor, Tensor]:
    scores = torch.tensor([list(s) for s, _ in samples]).reshape(-1, CLASSES)
    return scores, torch.tensor([y for _, y in samples], dtype=torch.int64)


@given(SAMPLES, OWN, st.sets(st.integers(0, CLASSES - 1)))
def test_tally_counts_as_a_loop_does(samples, own: list[bool], missing: set[int]) -> None:
    samples = [([-INF if c in missing else v for c, v in enumerate(s)], y) for s, y in samples]
    scores, y = tensors(samples)
    counted = tally({"head": scores, "proto": scores + 1}, y, torch.tensor(own))
    assert list(counted) == ["head", "head_own", "proto", "proto_own"]
    for kind, correct in counted.items():
        allowed = own if kind.endswith("_own") else [True] * CLASSES
        for c in range(CLASSES):
            mine = [(s, label) for s, label in samples if label == c]
            assert correct.samples[c] == len(mine)
            assert correct.right[c] == sum(guess(s, allowed) == label for s, label in mine)


@given(SAMPLES, SAMPLES, SAMPLES, OWN)
@settings(max_examples=40)
def test_counters_add_over_chunks(a, b, c, own: list[bool]) -> None:
    allowed = torch.tensor(own)
    parts = [tally({"head": s}, y, allowed) for s, y in map(tensors, (a, b, c))]
    scores, y = tensors([*a, *b, *c])
    whole = tally({"head": scores}, y, allowed)
    for summed in (add(add(parts[0], parts[1]), parts[2]), add(parts[0], add(parts[1], parts[2]))):
        for kind in whole:
            assert torch.equal(summed[kind].right, whole[kind].right)
            assert torch.equal(summed[kind].samples, whole[kind].samples)


def test_padding_does_not_count() -> None:
    """A batch ends with two samples of padding, which would be one right and one wrong answer of class 0."""
    scores = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0], [0.0, 2.0, 1.0], [2.0, 1.0, 0.0], [0.0, 2.0, 1.0]])
    y, mask = torch.tensor([0, 1, 1, 0, 0]), torch.tensor([1.0, 1, 1, 0, 0])
    for confusion in ("head", "head_own"):
        for kind, correct in tally({"head": scores}, y, torch.ones(3, dtype=torch.bool), mask, confusion).items():
            assert correct.right.tolist() == [1, 1, 0]
            assert correct.samples.tolist() == [1, 2, 0]
            assert kind != confusion or correct.said.tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]


def test_own_against_all_candidates() -> None:
    """A client that holds classes 0 and 1; class 2 is nearest for two of its samples."""
    scores = torch.tensor([[1.0, 0, 9, 0], [0, 5, 9, 0], [7, 1, 2, 0], [3, 4, 1, 0]])
    y = torch.tensor([0, 1, 0, 0])
    counted = tally({"head": scores}, y, torch.tensor([True, True, False, False]))
    assert counted["head"].accuracy() == 1 / 4
    assert counted["head_own"].accuracy() == 3 / 4
    assert counted["head_own"].right.tolist() == [2, 1, 0, 0]


@pytest.mark.parametrize("value", [-INF, math.nan])
def test_no_answer_is_wrong(value: float) -> None:
    """Before there are prototypes every distance is infinite: that is no vote for class 0."""
    counted = tally({"proto": torch.full((3, CLASSES), value)}, torch.tensor([0, 0, 1]), torch.ones(CLASSES).bool())
    assert counted["proto"].accuracy() == 0
    assert counted["proto_own"].accuracy() == 0
    assert counted["proto"].samples.tolist() == [2, 1, 0, 0]


def test_no_prototype_among_the_own_classes_is_wrong() -> None:
    scores = torch.tensor([[-INF, -1.0, -2.0, -3.0]])
    counted = tally({"proto": scores}, torch.tensor([0]), torch.tensor([True, False, False, False]))
    assert counted["proto_own"].accuracy() == 0


def test_no_samples_no_accuracy() -> None:
    counted = tally({"head": torch.zeros(0, CLASSES)}, torch.zeros(0).long(), torch.ones(CLASSES).bool())
    assert counted["head"].accuracy() is None
    assert counted["head"].per_class() == [None] * CLASSES
    assert counts([1, 0], [2, 0]).accuracy(torch.tensor([0.0, 1.0])) is None  # none of the classes asked for
    assert counts([1, 0], [2, 0]).per_class() == [0.5, None]


def test_accuracy_weighs_classes() -> None:
    correct = counts([8, 3, 0, 5], [10, 10, 10, 5])
    assert correct.accuracy() == 16 / 35
    assert correct.accuracy(torch.tensor([1.0, 1, 0, 0])) == 11 / 20
    assert correct.accuracy(torch.tensor([0.75, 0, 0.25, 0])) == pytest.approx(6 / 10)
    assert correct.accuracy(torch.tensor([3, 0, 1, 0])) == pytest.approx(24 / 40)  # whole numbers serve
    assert (correct + correct).accuracy() == 16 / 35
    assert (correct + correct).samples.tolist() == [20, 20, 20, 10]


# AUC and balanced accuracy


def scored(scores: Tensor, y: Tensor, own: Tensor | None = None, kind: str = "head", mask: Tensor | None = None) -> Any:
    own = torch.ones(scores.shape[1]).bool() if own is None else own
    return tally({"head": scores}, y, own, mask, SCORES + kind)[kind]


def test_auc_by_hand() -> None:
    """Of the six pairs of a sick and a healthy one, three are in the right order and one is a tie; only the difference
    of the two scores counts, however large both are."""
    logits = torch.tensor([[0.0, 3.0], [500.0, 501.0], [0.0, -1.0], [0.0, 2.0], [7.0, 6.0]])
    y = torch.tensor([1, 1, 1, 0, 0])  # odds of being sick: 3, 1, -1, and 2, -1
    assert auc(scored(logits, y)) == 3.5 / 6
    assert auc(scored(logits, 1 - y)) == 2.5 / 6
    assert auc(scored(logits[:3], y[:3])) is None  # nobody healthy
    assert auc(tally({"head": logits}, y, torch.ones(2).bool())["head"]) is None  # scores were not kept


NUMBERS = st.integers(-3, 3).map(float)  # with many ties


@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(0, 1)), min_size=2, max_size=30))
def test_auc_of_two_classes_is_that_of_sklearn(samples: list[tuple[float, float, int]]) -> None:
    scores, y = torch.tensor([s[:2] for s in samples]), torch.tensor([s[2] for s in samples])
    found = auc(scored(scores, y))
    if len(set(y.tolist())) == 1:
        assert found is None
    else:
        assert found == pytest.approx(roc_auc_score(y, scores[:, 1] - scores[:, 0]), abs=1e-12)


@pytest.mark.parametrize("classes", [3, 7])
def test_auc_of_several_classes_is_the_mean_of_one_against_the_rest(classes: int) -> None:
    rng = np.random.default_rng(classes)
    scores, y = torch.from_numpy(rng.normal(size=(60, classes))), torch.from_numpy(rng.integers(0, classes, 60))
    shares = scores.softmax(1).numpy()
    assert auc(scored(scores, y)) == pytest.approx(roc_auc_score(y, shares, multi_class="ovr"), abs=1e-12)
    there = torch.isin(y, torch.tensor([0, 2]))  # classes without samples do not count
    pair = [roc_auc_score(y[there] == c, shares[there, c]) for c in (0, 2)]
    assert auc(scored(scores[there], y[there])) == pytest.approx(np.mean(pair), abs=1e-12)


def test_auc_among_own_classes_and_without_answers() -> None:
    scores = torch.tensor([[1.0, 0.0, 9.0], [0.0, 1.0, -9.0], [0.5, 0.0, 9.0]])
    y = torch.tensor([0, 1, 1])
    own = torch.tensor([True, True, False])
    assert auc(scored(scores, y, own, "head_own")) == 1.0
    assert auc(scored(scores, y, own)) == (1 / 2 + 1) / 2  # the third class takes most of the odds of two samples
    nothing = torch.full((3, 3), -INF)  # before there are prototypes all samples tie
    assert auc(scored(nothing, y)) == 0.5
    alone = torch.tensor([[-INF, 0.0], [-INF, 1.0]])  # only one class has a prototype
    assert auc(scored(alone, torch.tensor([0, 1]))) == 0.5


def test_kept_scores_add_over_chunks_and_leave_padding_out() -> None:
    rng = np.random.default_rng(0)
    scores, y = torch.from_numpy(rng.normal(size=(40, 3))), torch.from_numpy(rng.integers(0, 3, 40))
    whole = scored(scores, y)
    mask = torch.cat([torch.ones(15), torch.zeros(5)])
    padded = scored(torch.cat([scores[25:], scores[:5]]), torch.cat([y[25:], y[:5]]), mask=mask)
    parts = scored(scores[:10], y[:10]) + scored(scores[10:25], y[10:25]) + padded
    assert auc(parts) == pytest.approx(auc(whole), abs=1e-12)
    short = scored(scores[:4], y[:4])
    both = of_one_length([{"head": parts}, {"head": short}])
    assert {tuple(scores.shape) for tally in both for scores, _ in tally["head"].said} == {(45, 3)}
    assert [auc(tally["head"]) for tally in both] == [auc(parts), auc(short)]
    assert of_one_length(TALLIES) == TALLIES


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_balanced_accuracy_is_that_of_sklearn(pairs: list[tuple[int, int]]) -> None:
    y, said = torch.tensor(pairs).T
    counted = tally({"head": torch.eye(4)[said]}, y, torch.ones(4).bool())["head"]
    known = np.isin(said, y)  # sklearn warns of classes that are only answers, and of a single one
    if known.all() and len(set(y.tolist())) > 1:
        assert counted.balanced() == pytest.approx(balanced_accuracy_score(y, said))
    assert counts([1, 0], [0, 0]).balanced() is None


# over clients


@given(st.lists(st.none() | st.floats(0, 1), max_size=35))
def test_spread_as_a_loop_does(values: list[float | None]) -> None:
    known = sorted(v for v in values if v is not None)
    got = spread(values)
    if not known:
        assert got == Spread(None, None, None)
        return
    mean = sum(known) / len(known)
    tenth = 1
    while tenth * 10 < len(known):
        tenth += 1
    assert got.mean == pytest.approx(mean, abs=1e-9)
    assert got.std == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in known) / len(known)), abs=1e-7)
    assert got.worst10 == pytest.approx(sum(known[:tenth]) / tenth, abs=1e-9)


def test_spread_by_hand() -> None:
    assert spread([0.5, None, 0.9, 0.7]) == pytest.approx((0.7, math.sqrt(0.08 / 3), 0.5))
    eleven = [i / 10 for i in range(11)]
    assert spread(eleven).worst10 == pytest.approx(0.05)  # two of eleven
    assert spread(eleven[:10]).worst10 == 0  # one of ten
    assert spread([0.25]) == (0.25, 0, 0.25)


def clients_of(*rows: dict[str, tuple[list[int], list[int]]]) -> list[dict[str, Correct]]:
    return [{kind: counts(*pair) for kind, pair in row.items()} for row in rows]


TALLIES = clients_of(
    {
        "head": ([1, 2], [4, 4]),
        "head_own": ([4, 2], [4, 4]),
        "proto": ([2, 2], [4, 4]),
        "proto_own": ([3, 4], [4, 4]),
    },
    {
        "head": ([0, 1], [0, 2]),
        "head_own": ([0, 2], [0, 2]),
        "proto": ([0, 0], [0, 2]),
        "proto_own": ([0, 1], [0, 2]),
    },
    {kind: ([0, 0], [0, 0]) for kind in ("head", "head_own", "proto", "proto_own")},  # nothing to test on
)


@pytest.mark.parametrize(
    "method, main",
    [
        (FedProto(), [7 / 8, 1 / 2]),  # the paper's: nearest prototype among the own classes
        (FedProto(candidates="all"), [4 / 8, 0]),
        (FedProto(inference="head"), [6 / 8, 1]),
        (FedProto(inference="head", candidates="all"), [3 / 8, 1 / 2]),
        (FedAvg(), [3 / 8, 1 / 2]),
        (Local(candidates="own"), [6 / 8, 1]),
    ],
)
def test_own_numbers(method: Method, main: list[float]) -> None:
    got = own_numbers(method, TALLIES)
    mean = sum(main) / 2  # the client without test samples does not count
    assert got["accuracy_mean"] == pytest.approx(mean)
    assert got["accuracy_std"] == pytest.approx(abs(main[0] - main[1]) / 2)
    assert got["accuracy_worst10"] == pytest.approx(min(main))
    assert got["accuracy_head_mean"] == pytest.approx((3 / 8 + 1 / 2) / 2)
    assert got["accuracy_head_own_mean"] == pytest.approx((6 / 8 + 1) / 2)
    assert got["accuracy_proto_own_mean"] == pytest.approx((7 / 8 + 1 / 2) / 2)
    assert got["accuracy_proto_all_mean"] == pytest.approx((4 / 8 + 0) / 2)
    key = "accuracy_proto_own_mean" if method.candidates == "own" else "accuracy_proto_all_mean"
    assert got["accuracy_proto_mean"] == got[key]
    assert mean_accuracy(method, TALLIES) == pytest.approx(mean)


def test_own_numbers_of_a_method_without_prototypes() -> None:
    heads = [{kind: t[kind] for kind in ("head", "head_own")} for t in TALLIES]
    got = own_numbers(FedAvg(), heads)
    assert got["accuracy_mean"] == pytest.approx(7 / 16)
    assert [got[f"accuracy_proto{kind}_mean"] for kind in ("", "_own", "_all")] == [None] * 3


def test_own_numbers_when_nobody_has_test_samples() -> None:
    got = own_numbers(FedProto(), TALLIES[2:])
    assert set(got.values()) == {None}


@pytest.mark.parametrize(
    "method, kind",
    [
        (FedAvg(), "head"),
        (FedAvg(candidates="own"), "head_own"),
        (FedProto(), "proto_own"),
        (FedProto(candidates="all"), "proto"),
    ],
)
def test_judged_by(method: Method, kind: str) -> None:
    assert judged_by(method) == kind


def test_global_numbers_are_gm() -> None:
    """All classes alike, all candidates, whatever counts on a client's own test set."""
    whole = clients_of({"head": ([3, 1], [4, 4]), "head_own": ([4, 4], [4, 4]), "proto": ([2, 0], [4, 4])})[0]
    expected: dict[str, Any] = {"global_accuracy_head": 0.5, "global_accuracy_proto": 0.25}
    assert global_numbers(FedAvg(candidates="own"), whole) == {"global_accuracy": 0.5, **expected}
    assert global_numbers(FedProto(), whole) == {"global_accuracy": 0.25, **expected}
    only_head = {"head": whole["head"], "head_own": whole["head_own"]}
    assert global_numbers(FedAvg(), only_head)["global_accuracy_proto"] is None
    assert set(global_numbers(FedAvg(), None).values()) == {None}


# FedNH's personal metrics, sample by sample


@given(st.data())
@settings(max_examples=50)
def test_gm_pmv_pml_as_fednh_defines_them(data) -> None:
    """acc = sum of w_c correct_c over sum of w_c count_c; w = 1, 1 where held, n_ic / |D_i|. No masking."""
    people = data.draw(st.integers(1, 5))
    held = [data.draw(st.lists(st.integers(0, 6), min_size=CLASSES, max_size=CLASSES)) for _ in range(people)]
    tests = [data.draw(SAMPLES) for _ in range(people)]
    tallies = []
    pm_v, pm_l = [], []
    for n, samples in zip(held, tests, strict=True):
        scores, y = tensors(samples)
        tallies.append(tally({"head": scores}, y, torch.tensor([v > 0 for v in n])))
        sums = {"v": [0.0, 0.0], "l": [0.0, 0.0], "g": [0.0, 0.0]}
        for s, label in samples:
            hit = guess(list(s), [True] * CLASSES) == label
            for kind, weight in (("g", 1.0), ("v", float(n[label] > 0)), ("l", n[label] / max(sum(n), 1))):
                sums[kind][0] += weight * hit
                sums[kind][1] += weight
        pm_v.append(sums["v"][0] / sums["v"][1] if sums["v"][1] else None)
        pm_l.append(sums["l"][0] / sums["l"][1] if sums["l"][1] else None)
        gm = sums["g"][0] / sums["g"][1] if sums["g"][1] else None
        assert global_numbers(FedAvg(), tallies[-1])["global_accuracy"] == (None if gm is None else pytest.approx(gm))
    got = personal_numbers(FedAvg(candidates="own"), tallies, torch.tensor(held, dtype=torch.float32))
    for key, values in (("pm_v", pm_v), ("pm_l", pm_l)):
        known = [v for v in values if v is not None]
        assert got[key] == (pytest.approx(sum(known) / len(known), abs=1e-6) if known else None)


def test_personal_numbers_by_hand() -> None:
    """Ten test samples a class; the client holds 30 of class 0 and 10 of class 2."""
    tallies = clients_of({"head": ([9, 8, 5, 0], [10] * 4)})
    got = personal_numbers(FedAvg(), tallies, torch.tensor([[30.0, 0, 10, 0]]))
    assert got["pm_v"] == pytest.approx((9 + 5) / 20)
    assert got["pm_l"] == pytest.approx(0.75 * 0.9 + 0.25 * 0.5)
    assert tallies[0]["head"].accuracy() == pytest.approx(22 / 40)


def test_personal_numbers_follow_the_inference() -> None:
    tallies = clients_of({"head": ([9, 8], [10, 10]), "proto": ([1, 2], [10, 10])})
    assert personal_numbers(FedProto(), tallies, torch.tensor([[1.0, 1.0]]))["pm_v"] == pytest.approx(0.15)
    assert personal_numbers(FedAvg(), tallies, torch.tensor([[1.0, 1.0]]))["pm_v"] == pytest.approx(0.85)


def test_large_counts_stay_exact() -> None:
    """Past 2**24 float32 would lose samples."""
    correct = counts([2**24 + 1, 0], [2**24 + 1, 1])
    assert correct.right[0] == 2**24 + 1
    assert correct.accuracy() == (2**24 + 1) / (2**24 + 2)
    one = tally({"head": torch.tensor([[1.0, 0.0]])}, torch.tensor([0]), torch.ones(2).bool())["head"]
    assert (correct + one).right[0] == 2**24 + 2
