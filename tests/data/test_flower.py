"""Partitioners of flwr-datasets by name."""

from pathlib import Path

import numpy as np
import pytest
from needs import needs

from protofed import Experiment, UserError, run
from protofed.data.sources import load
from protofed.data.split import Split

needs("flwr_datasets", "pip install 'protofed[hub]'")

DIRICHLET = ("partition=flwr:DirichletPartitioner", "partition.alpha=0.5", "clients=6")


def dealt(*overrides: str) -> tuple[Split, np.ndarray]:
    plan = Experiment.load("demo", *overrides)
    domains = load(plan.data, None)
    return plan.partition(domains, plan.clients, plan.seed), domains[0].y_train


def test_every_sample_is_dealt_once_by_the_seed() -> None:
    split, y = dealt(*DIRICHLET)
    assert np.array_equal(np.sort(np.concatenate(split.train)), np.arange(len(y)))
    again, _ = dealt(*DIRICHLET)
    assert all(map(np.array_equal, split.train, again.train))
    other, _ = dealt(*DIRICHLET, "seed=1")
    assert not all(map(np.array_equal, split.train, other.train))


def test_it_is_their_partitioner() -> None:
    split, y = dealt("partition=flwr:PathologicalPartitioner", "partition.num_classes_per_partition=3", "clients=5")
    assert [len(np.unique(y[rows])) for rows in split.train] == [3] * 5
    uneven, _ = dealt("partition=flwr:LinearPartitioner", "clients=4")
    sizes = np.array([len(rows) for rows in uneven.train])
    assert sizes / sizes[0] == pytest.approx([1, 2, 3, 4], rel=0.05)


def test_an_experiment_keeps_its_name_and_runs_again(tmp_path: Path) -> None:
    words = (*DIRICHLET, "partition.test=all", "rounds=1", "model=mlp_digits")
    plan = Experiment.load("demo", *words)
    (tmp_path / "mine.toml").write_text(plan.to_toml())
    assert Experiment.load(tmp_path / "mine.toml") == plan
    first = run(plan, tmp_path / "run")
    assert len(first.clients) == 6
    assert (tmp_path / "run" / "experiment.toml").read_text().count("DirichletPartitioner") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("flwr:DirichletPartitionr partition.alpha=1", "Did you mean 'DirichletPartitioner'?"),
        ("flwr:DirichletPartitioner", "needs partition.alpha"),
        ("flwr:DirichletPartitioner partition.alpa=1", "unknown key partition.alpa"),
        ("flwr:DirichletPartitioner partition.alpha=-1", "strictly greater than zero"),
        ("flwr:DirichletPartitioner partition.alpha=1 partition.partition_by=writer", "It has: label"),
        ("flwr:NaturalIdPartitioner", "makes 10 partitions, but clients = 20. Set clients to 10"),
        ("flwr:VerticalEvenPartitioner", "splits columns, not samples"),
        ("flwr:IidPartitioner partition.num_partitions=3", "unknown key partition.num_partitions"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        dealt(*f"partition={words}".split())
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
