"""Samples that differ by client: each change by hand, on the samples it should change and on no others."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from small_runs import StopAfter, final_state, small
from torch import Tensor

from protofed import Experiment, UserError, run
from protofed.data import Data, Skew
from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.skew import blurred, check_skew, fewer, long_tailed, skewed, strength, turned
from protofed.data.sources import load
from protofed.data.split import Split
from protofed.runs.loop import Interrupted
from protofed.runs.setup import prepare

G = np.random.default_rng(3)
BLACK = torch.zeros(1, 1, 1)


def federation(clients: int = 3, shape: Sequence[int] = (1, 9, 9), many: int = 400) -> Federation:
    """Clients with equal parts of one data set, whose last tests and validation samples are held back."""
    y = np.arange(many) % 4
    x = np.random.default_rng(8).normal(size=(many, *shape)).astype(np.float32)
    domain = Domain("one", x, y, x[: many // 2] + 1, y[: many // 2], tuple("abcd"))
    rows = np.array_split(np.arange(many - 60), clients)
    tests = np.array_split(np.arange(many // 2 + 12), clients)  # the last ones are training rows 0 to 11
    held = np.array_split(np.arange(many - 60, many), clients)
    split = Split(np.zeros(clients, int), tuple(rows), tuple(tests), validation=tuple(held))
    return Federation([domain], split, seed=4, batch_size=8, normalize="none")


def test_turns_and_rises() -> None:
    assert [strength([1.0, 5.0], False, client, 4) for client in range(4)] == [1.0, 5.0, 1.0, 5.0]
    assert [strength([2.0], True, client, 4) for client in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert strength([], True, 1, 4) == 0


def test_a_turned_image_by_hand() -> None:
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 4] = 1  # right of the middle
    where = {0: (2, 4), 90: (0, 2), 180: (2, 0), 270: (4, 2), -90: (4, 2), 450: (0, 2)}
    for degrees, place in where.items():
        assert turned(x, degrees, BLACK)[0, 0][place] == 1
    almost = turned(x, 90.0001, BLACK)  # the other way of computing it agrees
    assert torch.allclose(almost, turned(x, 90, BLACK), atol=1e-4)
    wide = torch.zeros(1, 1, 3, 7)
    wide[0, 0, 1, 4] = 1
    assert float(turned(wide, 90, BLACK)[0, 0, 0, 3]) == pytest.approx(1, abs=1e-5)
    dark = turned(torch.full((1, 1, 8, 8), 0.5), 45, torch.full((1, 1, 1), -2.0))
    assert float(dark[0, 0, 0, 0]) == -2.0  # a corner that comes in from outside
    assert float(dark[0, 0, 4, 4]) == 0.5


@pytest.mark.parametrize("sigma", [0.5, 1.7])
def test_a_blurred_image_is_scipys(sigma: float) -> None:
    x = torch.from_numpy(G.normal(size=(3, 2, 12, 10)))
    wanted = gaussian_filter(
        x.numpy(), (0, 0, sigma, sigma), mode="nearest", radius=(0, 0, *[math.ceil(3 * sigma)] * 2)
    )
    torch.testing.assert_close(blurred(x, sigma), torch.from_numpy(wanted))


def kept(one: Tensor, other: Tensor) -> float:
    return float((one == other).float().mean())


def test_noise_is_on_a_clients_own_samples_and_everybodys_tests_stay() -> None:
    before, after = federation(), federation()
    before_rows = after._test[0].x.clone()
    skewed(after, Skew(noise=[0.0, 0.5]))
    for client, deviation in enumerate((0.0, 0.5, 0.0)):
        for one, other in (
            (before.train(client), after.train(client)),
            (before.test(client), after.test(client)),
            (before.test(client, "validation"), after.test(client, "validation")),
        ):
            noise = other.x - one.x
            assert float(noise.std()) == pytest.approx(deviation, rel=0.1)
            assert float(noise.mean()) == pytest.approx(0, abs=0.03)
            assert (one.y == other.y).all()
    assert torch.equal(after.global_test(0).x, before.global_test(0).x)
    assert torch.equal(after._test[0].x[: len(before_rows)], before_rows)
    assert torch.equal(after.counts, before.counts)
    noise = after.train(1).x - before.train(1).x
    assert len(noise[:50, 0, 0, 0].unique()) == 50  # every sample has its own


def test_wrong_labels_are_another_class_and_in_training_only() -> None:
    before, after = federation(), federation()
    skewed(after, Skew(labels=[0.0, 0.5, 1.0]))
    for client, share in enumerate((0.0, 0.5, 1.0)):
        one, other = before.train(client), after.train(client)
        assert round(share * len(one.y)) == int((one.y != other.y).sum())
        assert kept(before.test(client).y, after.test(client).y) == 1
        assert torch.equal(after.counts[client], torch.bincount(other.y, minlength=4).float())
    moved = (after.train(2).y - before.train(2).y) % 4
    often = torch.bincount(moved, minlength=4) / len(moved)
    assert often[0] == 0
    assert often[1:].tolist() == pytest.approx([1 / 3] * 3, abs=0.15)


def test_the_changes_follow_the_seed_and_both_engines_train_on_them() -> None:
    keys = ("model=mlp_digits", "skew.noise=[0.0,1.0]", "skew.rotation=[0.0,0.0,30.0]", "evaluate.validation=0.2")
    found = [prepare(small(*keys, f"seed={seed}", "skew.labels=[0.3]")).reference.federation for seed in (0, 0)]
    plain = prepare(small("model=mlp_digits", "evaluate.validation=0.2")).reference.federation
    for client in range(6):
        one, other = (part.train(client) for part in found)
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.y, other.y)
        assert torch.equal(one.x, plain.train(client).x) == (client in (0, 4))
    plan = small(*keys, "rounds=2")
    run(plan, "stacked")
    run(replace(plan, engine=replace(plan.engine, name="reference")), "reference")
    one, other = (run(small(*keys, "rounds=2", f"engine={e}"), f"{e}-again") for e in ("stacked", "reference"))
    assert one.summary["accuracy_mean"] == pytest.approx(other.summary["accuracy_mean"], abs=0.05)
    with pytest.raises(Interrupted):
        run(plan, "cut", watch=StopAfter(1))
    run(plan, "cut", resume=True)
    assert final_state(Path("cut")) == final_state(Path("stacked"))


def test_a_long_tail_by_hand() -> None:
    y = np.repeat(np.arange(3), (100, 100, 40))
    domain = Domain(
        "one", np.arange(240.0)[:, None], y, np.zeros((3, 1)), np.arange(3), tuple("abc"), {"w": (y, y[:3])}
    )
    tail = long_tailed(domain, 100.0)
    assert np.bincount(tail.y_train).tolist() == [100, 10, 1]
    assert (y[tail.x_train[:, 0].astype(int)] == tail.y_train).all()
    assert (tail.ids["w"][0] == tail.y_train).all()
    assert tail.x_test is domain.x_test
    assert np.bincount(long_tailed(domain, 2.0).y_train).tolist() == [100, 71, 40]  # no more than there are
    (digits,) = load(Data(imbalance=10.0), None)
    (whole,) = load(Data(), None)
    counts = np.bincount(digits.y_train)
    assert counts[0] / counts[-1] == pytest.approx(10, rel=0.1)  # the first is not quite the largest
    assert len(digits.y_test) == len(whole.y_test)
    assert "imbalance" not in Experiment.load("demo").to_dict()["data"]
    assert "skew" not in Experiment.load("demo").to_dict()


def test_fewer_samples_keep_the_shares_of_classes_and_their_owners() -> None:
    y = np.repeat(np.arange(3), (100, 60, 40))
    domain = Domain(
        "one", np.arange(200.0)[:, None], y, np.arange(20.0)[:, None], y[::10], tuple("abc"), {"w": (y, y[::10])}
    )
    less = fewer(domain, 50, 5)
    assert np.bincount(less.y_train).tolist() == [25, 15, 10]
    assert (y[less.x_train[:, 0].astype(int)] == less.y_train).all()
    assert np.array_equal(less.ids["w"][0], less.y_train)
    assert np.array_equal(less.ids["w"][1], less.y_test)
    assert len(less.y_test) == 5
    assert (y[::10][less.x_test[:, 0].astype(int)] == less.y_test).all()
    assert np.array_equal(fewer(domain, 0, 999).x_test, domain.x_test)  # no more than there are
    (digits,) = load(Data(train_samples=100, test_samples=30), None)
    assert len(digits.y_train) == 100
    assert len(digits.y_test) == 30
    assert np.bincount(digits.y_train).min() >= 9
    assert "train_samples" not in Experiment.load("demo").to_dict()["data"]


@pytest.mark.parametrize(
    ("skew", "shape", "said"),
    [
        (Skew(noise=[1.0, 2.0], deal="rising"), (1, 9, 9), "with skew.deal = 'rising' it is one number"),
        (Skew(rotation=[90.0]), (7,), r"skew.rotation is for images, but the samples have shape \(7,\)\. Leave it out"),
        (Skew(blur=[1.0]), (7,), "skew.blur is for images"),
    ],
)
def test_what_cannot_be_changed_is_refused(skew: Skew, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_skew(skew, federation(shape=shape), frozen=False, held_out=0)


@pytest.mark.parametrize("key", ["skew.labels=[0.5]", "data.imbalance=10.0", "data.test_samples=9"])
def test_data_that_is_computed_when_drawn_refuses_it(key: str) -> None:
    with pytest.raises(UserError, match="needs lists of the clients' samples, but gaussians computes"):
        prepare(Experiment.load("demo", "data.name=gaussians", "partition=natural", "clients=6", key))


def test_frozen_encoders_and_newcomers_refuse_changed_inputs() -> None:
    with pytest.raises(
        UserError, match=r"skew.blur changes inputs, and clients of a frozen encoder train on embeddings"
    ):
        check_skew(Skew(blur=[1.0]), federation(), frozen=True, held_out=0)
    check_skew(Skew(labels=[0.5]), federation(), frozen=True, held_out=0)
    with pytest.raises(UserError, match=r"held_out_clients = 1: newcomers' samples are not changed by \[skew\]"):
        prepare(small("held_out_clients=1", "skew.labels=[0.5]"))
    with pytest.raises(UserError, match=r"skew.labels = \[2.0\]"):
        small("skew.labels=[2.0]")
