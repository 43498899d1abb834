"""Classes that appear over time: who trains on what, the same on every engine, and what was forgotten, by hand."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from small_runs import StopAfter, final_state, lines

from protofed import Experiment, UserError, run
from protofed.data import Incremental
from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.incremental import GrowingFederation, classes_by_task
from protofed.data.split import Split
from protofed.runs.forgetting import forgetting
from protofed.runs.loop import Interrupted
from protofed.runs.setup import prepare
from protofed.sweep import fused

PLAIN = ("model=mlp_digits", "partition=dirichlet", "clients=6", "batch_size=4", "rounds=6", "record.enabled=false")


def plain(*overrides: str) -> Experiment:
    return Experiment.load("demo", *PLAIN, "engine.threads=1", *overrides)


def growing(*overrides: str) -> Experiment:
    return plain("incremental.tasks=3", *overrides)


# who trains on what


def test_classes_are_dealt_by_hand() -> None:
    assert classes_by_task(Incremental(tasks=3), 10, 0) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert classes_by_task(Incremental(tasks=3, first=6), 10, 0) == [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9]]
    assert classes_by_task(Incremental(tasks=10), 10, 0) == [[c] for c in range(10)]
    drawn = [classes_by_task(Incremental(tasks=3, order="random"), 10, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(label for part in drawn[0] for label in part) == list(range(10))


def test_rounds_are_dealt_by_hand() -> None:
    assert [Incremental(tasks=3).task(round, 7) for round in range(8)] == [0, 0, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("plan", "classes"),
    [(Incremental(tasks=5), 4), (Incremental(tasks=3, first=4), 5), (Incremental(tasks=2, first=9), 9)],
)
def test_a_task_without_a_class_is_refused(plan: Incremental, classes: int) -> None:
    with pytest.raises(UserError, match=f"tasks = {plan.tasks}.*but there are {classes} classes: every task needs one"):
        classes_by_task(plan, classes, 0)


def grown(plan: Incremental, labels: list[int], owners: list[int]) -> GrowingFederation:
    """Clients whose samples say where they are in the list."""
    y = np.array(labels)
    x = np.arange(len(y), dtype=np.float32)[:, None]
    domain = Domain("t", x, y, x[:6], np.arange(6) % 6, tuple("abcdef"))
    rows = tuple(np.flatnonzero(np.array(owners) == client) for client in range(max(owners) + 1))
    split = Split(np.zeros(len(rows), int), rows, tuple(np.arange(6) for _ in rows))
    whole = Federation([domain], split, seed=3, batch_size=2, normalize="none")
    return GrowingFederation(whole, plan, rounds=6)


def trained(federation: Federation, client: int) -> list[int]:
    return federation.train(client).x[:, 0].int().tolist()


def test_clients_have_their_samples_of_the_task_and_nothing_else() -> None:
    labels, owners = [0, 2, 1, 4, 5, 0, 3, 3, 2, 2], [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    federation = grown(Incremental(tasks=3), labels, owners)
    assert (trained(federation, 0), trained(federation, 1)) == ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])  # before the rounds
    found = []
    for round, news in ((0, True), (1, False), (2, True), (4, True), (6, False), (1, True)):
        assert federation.turn(round) is news
        found.append((trained(federation, 0), trained(federation, 1)))
    first, second, third = ([0, 2], [5]), ([1], [6, 7, 8, 9]), ([3, 4], [])
    assert found == [first, first, second, third, third, first]
    federation.turn(2)
    assert federation.counts_now([0, 1]).tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 2, 2, 0, 0]]
    assert federation.local(1, 2).counts.tolist() == [0, 0, 2, 2, 0, 0]
    assert federation.class_counts([0, 1]).tolist() == [[1, 1, 1, 0, 1, 1], [1, 0, 2, 2, 0, 0]]  # of all tasks
    assert (federation.used(0), federation.steps(1), federation.sizes) == (1, 2, [5, 5])
    assert [federation.smallest_batch(client) for client in (0, 1)] == [1, 1]  # 1 in some task
    assert not federation.even


def test_some_samples_of_earlier_classes_are_kept_the_same_ones_in_every_later_task() -> None:
    labels = [0] * 6 + [1] * 2 + [2] * 6 + [4] * 3
    federation = grown(Incremental(tasks=3, keep=3), labels, [0] * len(labels))
    rounds = []
    for round in (0, 2, 4):
        federation.turn(round)
        rounds.append(trained(federation, 0))
    assert rounds[0] == list(range(8))
    kept = [i for i in rounds[1] if i < 8]
    assert (len(kept), set(kept) >= {6, 7}) == (5, True)  # three of the six, and both of the two
    assert rounds[1] == kept + list(range(8, 14))
    assert [i for i in rounds[2] if i < 8] == kept
    assert len([i for i in rounds[2] if 8 <= i < 14]) == 3
    assert rounds[2][-3:] == [14, 15, 16]
    many = grown(Incremental(tasks=3, keep=100), labels, [0] * len(labels))
    many.turn(5)
    assert trained(many, 0) == list(range(len(labels)))


# training


def test_a_round_is_that_of_a_federation_that_has_only_these_samples() -> None:
    plan = growing("engine=reference", "method=fedavg")
    prepared = prepare(plan)
    whole = prepare(plain("engine=reference", "method=fedavg"))
    engine, other = prepared.engine, whole.reference
    server = plan.method.init_server(engine.specs()[0])
    found = engine.train(plan.method, server, list(range(6)), 3)  # the second task: classes 4 to 6
    for client in range(6):
        y = other.federation.train(client).y
        other.federation._train_rows[client] = other.federation.train_rows(client)[(y >= 4) & (y <= 6)]
        other.federation._used_by[client] = len(other.federation.train_rows(client))
        other.federation.counts[client, [0, 1, 2, 3, 7, 8, 9]] = 0
    expected = other.train(plan.method, server, list(range(6)), 3)
    assert torch.equal(found.loss.total, expected.loss.total)
    for name, total in expected.up.total["params"].items():
        assert torch.equal(found.up.total["params"][name], total)
    assert float(found.up.weight) == float(expected.up.weight)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", ("incremental.keep=2",)),
        ("fedproto", ("method.source=inloop", "incremental.order=random")),
        ("fedrep", ("partition=classes", "partition.ways=2", "incremental.tasks=5")),  # many without a sample in a task
        ("fednh", ("participation=0.5", "incremental.first=4")),
    ],
)
def test_both_engines_train_the_same(method: str, more: tuple[str, ...]) -> None:
    found: list[Any] = []
    for name in ("reference", "stacked"):
        plan = growing(f"method={method}", "rounds=5", *more, f"engine={name}", "engine.ordered=true")
        prepared = prepare(plan)
        engine, server = prepared.engine, plan.method.init_server(prepared.engine.specs()[0])
        weights = []
        for round in range(5):
            trained = engine.train(plan.method, server, list(range(6)), round)
            if trained.up is not None:
                server = plan.method.aggregate(server, trained.up, torch.arange(6))
            engine.clients = {**engine.clients, **trained.clients}
            weights.append(trained.loss.weight.tolist())
        found.append((weights, server, {number: client.params for number, client in engine.clients.items()}))
    assert found[0][0] == found[1][0]
    assert len({tuple(row) for row in found[0][0]}) >= 3  # other samples in other tasks
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=1e-3, atol=1e-4)


# measuring


def test_forgetting_by_hand() -> None:
    assert forgetting([[0.9], [0.5, 0.8], [0.6, 0.2, 1.0]]) == pytest.approx(((0.9 - 0.6) + (0.8 - 0.2)) / 2)
    assert forgetting([[0.2], [0.5, 1.0]]) == pytest.approx(-0.3)  # learnt better since
    assert forgetting([[0.5], [0.4, None], [0.3, 0.6, 0.1]]) == pytest.approx(0.2)  # task 2 was never measured before
    assert forgetting([[0.7]]) is None
    assert forgetting([[None], [None, 0.5]]) is None


def test_what_is_measured_is_what_the_models_say() -> None:
    """The last row against the confusion matrices of the run, and all else against its rows."""
    plan = growing("method=fedavg", "record.enabled=true", "record.snapshots=0", "optimizer.lr=0.1")
    done = run(plan, "out")
    told = lines(Path("out"))
    assert [line["task"] for line in told] == [1, 1, 2, 2, 3, 3]
    assert [len(line.get("accuracy_per_task", ())) for line in told] == [0, 1, 0, 2, 0, 0]
    tasks = [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    with np.load("out/confusion.npz") as said:
        for which, prefix in (("personal", ""), ("global", "global_")):
            counts = json.loads(Path("out/summary.json").read_text())
            right, asked = np.diag(said[which]), said[which].sum(1)
            last = [right[classes].sum() / asked[classes].sum() for classes in tasks]
            assert counts[f"{prefix}accuracy_per_task"] == pytest.approx(last)
            assert counts[f"{prefix}accuracy_seen"] == pytest.approx(right.sum() / asked.sum())
            rows = [told[1][f"{prefix}accuracy_per_task"], told[3][f"{prefix}accuracy_per_task"], last]
            lost = [max(rows[0][0], rows[1][0]) - last[0], rows[1][1] - last[1]]
            assert counts[f"{prefix}forgetting"] == pytest.approx(sum(lost) / 2)
            seen = [
                told[1][f"{prefix}accuracy_seen"],
                told[3][f"{prefix}accuracy_seen"],
                counts[f"{prefix}accuracy_seen"],
            ]
            assert counts[f"{prefix}accuracy_incremental"] == pytest.approx(sum(seen) / 3)
            assert told[1][f"{prefix}accuracy_seen"] == rows[0][0]
    assert done.summary["global_forgetting"] > 0.5  # nothing is kept, so nearly all is forgotten
    assert done.summary["global_accuracy"] == done.summary["global_accuracy_seen"]
    assert [record["classes"] for record in done.clients] == [
        sorted(set(np.flatnonzero(row).tolist())) for row in prepare(plan).reference.federation.counts.numpy()
    ]


def test_kept_samples_help_to_remember() -> None:
    lost = [
        run(growing("method=fedavg", "local_epochs=3", f"incremental.keep={keep}"), f"out{keep}").summary
        for keep in (0, 1000)
    ]
    assert lost[1]["global_forgetting"] < lost[0]["global_forgetting"] - 0.3


@pytest.mark.parametrize("stop", [1, 2, 3, 6])
def test_stopped_and_resumed_equals_never_stopped(stop: int) -> None:
    plan = growing("method=fedproto", "participation=0.7", "incremental.keep=1")
    run(plan, "whole")
    with pytest.raises(Interrupted):
        run(plan, "cut", watch=StopAfter(stop))
    run(plan, "cut", resume=True)
    assert final_state(Path("cut")) == final_state(Path("whole"))


def test_a_run_without_it_is_as_before() -> None:
    plan = plain()
    assert "incremental" not in plan.to_dict()
    assert type(prepare(plan).reference.federation) is Federation
    done = run(plain("rounds=2"), "out")
    assert not {"task", "forgetting", "accuracy_seen"} & {*done.summary, *done.rounds[0]}


def test_cells_of_a_sweep_are_trained_one_after_another() -> None:
    seats = []
    for seed in (0, 1):
        plan = growing("engine=stacked", f"seed={seed}")
        seats.append(fused.Seat(plan, mock.Mock(), mock.Mock(), prepare(plan)))
    assert not fused.together(seats, 1, mock.Mock(), mock.Mock())


# bad input


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["incremental.keep=3"], "have no effect without incremental.tasks"),
        (["incremental.tasks=1"], "is a run in which all classes are there"),
        (["incremental.tasks=9", "rounds=8"], "there are rounds = 8: every task needs one"),
        (["incremental.tasks=-1"], "incremental.tasks = -1 should be greater than or equal to 0"),
        (["incremental.order=size"], "incremental.order = 'size'"),
        (["incremental.steps=2"], "unknown key incremental.steps"),
        (["incremental.tasks=2", "stopping.patience=3", "evaluate.validation=0.2"], "may end the run before all"),
        (["incremental.tasks=2", "evaluate.theory=5"], "clients whose samples stay the same"),
        (
            ["incremental.tasks=2", "privacy.unit=sample", "privacy.epsilon=8"],
            "accounts for samples that are there in every round",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(keys: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Experiment.load("demo", *keys)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["incremental.tasks=11", "rounds=11"], "there are 10 classes: every task needs one"),
        (["incremental.tasks=2", "method=lda"], "clients send lda their sums once"),
        (
            ["incremental.tasks=2", "data=gaussians", "partition=natural"],
            "incremental.tasks = 2 needs lists of the clients' samples",
        ),
    ],
)
def test_what_the_data_or_the_method_cannot_do_is_refused_before_the_first_round(keys: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        prepare(Experiment.load("demo", "model=mlp_digits", "clients=4", *keys))
