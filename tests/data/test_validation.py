"""Validation samples: held back from training, the same for every method, and what a round is chosen by."""

from pathlib import Path

import numpy as np
import pytest

from protofed import Experiment, run
from protofed.data.split import Split
from protofed.report.columns import Column
from protofed.report.runs import read_finished
from protofed.runs.setup import prepare, prepare_split

SMALL = [
    "clients=6",
    "partition.shots=6",
    "rounds=3",
    "model=cnn_digits",
    "evaluate.pm_clients=1",
    "engine.compile=never",
]
HELD = "evaluate.validation=0.25"


def plan(*changes: str) -> Experiment:
    return Experiment.load("demo", *SMALL, *changes)


def test_a_share_is_held_back_and_every_class_keeps_a_sample() -> None:
    domains, whole = prepare_split(plan())
    _, split = prepare_split(plan(HELD))
    for client in range(6):
        train, held = split.train[client], split.validation[client]
        assert not np.intersect1d(train, held).size
        assert sorted([*train, *held]) == sorted(whole.train[client])
        assert len(held) == int(0.25 * len(whole.train[client]) + 0.5)
    assert ((split.counts(domains) > 0) == (whole.counts(domains) > 0)).all()
    assert split.hash != whole.hash  # other samples are trained on, so the two are not compared
    assert prepare_split(plan(HELD, "method=local"))[1].hash == split.hash
    _, scarce = prepare_split(plan("partition.shots=2", "partition.spread=0", "evaluate.validation=0.5"))
    assert (scarce.counts(domains).sum(1) == (scarce.counts(domains) > 0).sum(1)).all()  # one a class is left


def test_a_saved_split_keeps_its_validation_part_and_gives_it_back() -> None:
    domains, split = prepare_split(plan(HELD))
    split.save("partition.npz", domains)
    assert Split.load("partition.npz").hash == split.hash
    words = [word for word in SMALL if not word.startswith("partition")] + ["partition=file", "partition.path=."]
    again = Experiment.load("demo", *words, HELD)
    assert prepare_split(again)[1].hash == split.hash
    _, joined = prepare_split(Experiment.load("demo", *words))
    assert not joined.validation
    whole = prepare_split(plan())[1]
    assert [sorted(rows) for rows in joined.train] == [sorted(rows) for rows in whole.train]


def test_federation_gives_the_samples_that_were_held_back() -> None:
    made = prepare(plan(HELD, "data.normalize=none", "engine.name=reference"))
    federation = made.engine.federation  # type: ignore[attr-defined]
    digits = made.domains[0]
    for client in range(6):
        rows = made.split.validation[client]
        x, y = federation.test(client, "validation")
        np.testing.assert_allclose(x.numpy(), digits.x_train[rows] / 1.0, rtol=1e-6)
        assert y.tolist() == digits.y_train[rows].tolist()
        assert federation.test(client).y.tolist() == [digits.y_test[row] for row in made.split.test[client]]


@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_both_engines_measure_it_alike_and_a_round_is_chosen_by_it(method: str) -> None:
    curves = {}
    for engine in ("reference", "stacked"):
        result = run(
            plan(f"method={method}", HELD, f"engine.name={engine}", "method.init=common"), f"{method}-{engine}"
        )
        curves[engine] = [(r["validation_mean"], r.get("validation_global_mean")) for r in result.rounds]
        known = [r["validation_mean"] for r in result.rounds]
        best = result.rounds[known.index(max(known))]
        chosen = Column.parse("accuracy@validation").of(read_finished(result.folder))
        assert chosen == best["accuracy_mean"]
    assert curves["reference"] == [pytest.approx(numbers) for numbers in curves["stacked"]]
    assert (curves["reference"][0][1] is not None) == (method == "fedavg")
    assert Path(f"{method}-stacked/partition.npz").is_file()


def test_without_it_nothing_is_measured() -> None:
    result = run(plan("rounds=1"), "out")
    assert "validation_mean" not in result.rounds[0]
