"""Data that is computed when a client is drawn: the same samples however one asks, and no list of them all."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import StopAfter, final_state, small

from protofed import Experiment, UserError, run
from protofed.data.batches import Federation
from protofed.data.computed import Gaussians, PerClient
from protofed.data.computed_batches import DrawnFederation
from protofed.data.domain import Domain
from protofed.report.runs import read_run
from protofed.runs.loop import Interrupted
from protofed.runs.setup import prepare, prepare_split

TINY = Gaussians(shape=(1, 8, 8), classes=4, ways=2, train=20, test=6, common_test=8)
OPTIONS = "{shape=[1,8,8],classes=4,ways=2,train=20,test=6,common_test=8}"


def plan(*more: str) -> Experiment:
    """Twelve of these clients, half of them in a round."""
    return small(
        "clients=12", "participation=0.5", "data={name='gaussians'}", f"data.options={OPTIONS}",
        "partition={name='natural'}", "model=cnn_digits_8", "evaluate.gm=0", *more,
    )  # fmt: skip


def listed() -> Domain:
    """The same samples as a plain data set, by owner."""
    drawn = TINY.draw(0, range(12))
    owners = [np.repeat(np.arange(12), n) for n in (TINY.train, TINY.test)]
    parts = [part.reshape(-1, *part.shape[2:]) for part in drawn]
    names = tuple(map(str, range(4)))
    scale = np.zeros(1, np.float32), np.ones(1, np.float32)
    return Domain("gaussians", *parts, names, ids={"owner": (owners[0], owners[1])}, scale=scale)  # type: ignore[arg-type]


def test_a_clients_samples_depend_on_seed_and_number_alone() -> None:
    together = TINY.draw(3, [5, 900_000, 7])
    for place, client in enumerate((5, 900_000, 7)):
        alone = TINY.draw(3, [client])
        assert all((a[0] == b[place]).all() for a, b in zip(alone, together, strict=True))
    assert not (together.x[0] == together.x[2]).any()
    assert not (TINY.draw(4, [5]).x[0] == together.x[0]).any()


def test_gaussians_are_what_their_keys_say() -> None:
    drawn = Gaussians(ways=3, train=30, test=10).draw(0, range(200))
    assert drawn.x.shape == (200, 30, 1, 8, 8)
    assert {len(set(y)) for y in drawn.y.tolist()} == {3}
    assert all(set(a) == set(b) for a, b in zip(drawn.y.tolist(), drawn.y_test.tolist(), strict=True))
    held = np.bincount(drawn.y[:, :3].ravel(), minlength=10)
    assert 35 < held.min() <= held.max() < 90  # of 60 expected
    noise = Gaussians(apart=0.0, offset=0.0).draw(0, range(50)).x
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01
    near, far = (Gaussians(apart=0.0, offset=offset).draw(0, range(300)).x.mean(1).std() for offset in (0.0, 1.0))
    assert far > 3 * near
    x, y = Gaussians(common_test=50).common()
    assert np.bincount(y).tolist() == [5] * 10
    assert x.shape == (50, 1, 8, 8)


@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_training_is_that_of_the_same_samples_in_a_list(tmp_path: Path, method: str, engine: str) -> None:
    setting = plan(f"method={method}", f"engine.name={engine}", "engine.compile=never")
    found = run(setting, tmp_path / "computed")
    plain = dataclasses.replace(setting, data=dataclasses.replace(setting.data, name="listed"))
    prepared = prepare(plain, domains=[listed()])
    assert isinstance(prepared.reference.federation, Federation)
    same = run(plain, tmp_path / "listed", prepared=prepared)
    for mine, other in zip(found.rounds, same.rounds, strict=True):
        assert mine["loss"] == other["loss"]
        assert mine["accuracy_mean"] == other["accuracy_mean"]
    assert [client["accuracy"] for client in found.clients] == [client["accuracy"] for client in same.clients]
    assert [client["classes"] for client in found.clients] == [client["classes"] for client in same.clients]


def test_samples_stay_where_they_are_whoever_is_held() -> None:
    """Captured steps read them there."""
    setting = plan("clients=1000", "participation=0.1")
    domains, split = prepare_split(setting)
    data = setting.federation(domains, split)
    assert isinstance(data, DrawnFederation)
    before = data.train_part(0).x.data_ptr(), data.test_part(0).x.data_ptr()
    wanted = torch.from_numpy(TINY.draw(setting.seed, [777]).x[0])
    assert not data.hold(range(100))
    edition = data.edition
    assert not data.hold(range(50))
    assert data.edition == edition
    assert (data.train(777).x == wanted).all()
    assert data.edition == edition + 1
    assert (data.train_part(0).x.data_ptr(), data.test_part(0).x.data_ptr()) == before
    assert data.hold(range(300))  # more than there is room for
    assert torch.equal(data.class_counts([3]), data.class_counts(range(12))[3:4])
    assert data.class_counts([999, 0]).sum(1).tolist() == [20, 20]


def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    setting = plan("method=fedproto", "rounds=4")
    run(setting, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(setting, tmp_path / "cut", watch=StopAfter(2))
    run(setting, tmp_path / "cut", resume=True)
    assert final_state(tmp_path / "cut") == final_state(tmp_path / "whole")
    assert not (tmp_path / "cut" / "partition.npz").exists()
    with pytest.raises(UserError, match=r"data.options"):
        run(plan("method=fedproto", "rounds=4", "data.options.ways=1"), tmp_path / "cut", resume=True)


def test_a_million_clients_take_the_memory_of_a_cohort(tmp_path: Path) -> None:
    """A million lists of a hundred bytes would be more than what is allowed here."""
    before, cpu = _resident(), time.process_time()
    setting = Experiment.load(
        "demo", "clients=1000000", "participation=0.00002", "rounds=2", "data={name='gaussians'}",
        "partition={name='natural'}", "model=cnn_digits_8", "method={name='fedproto',init='per_client'}",
        "evaluate.clients=30", "record.snapshots=1", "record.samples=8",
    )  # fmt: skip
    result = run(setting, tmp_path / "out")
    assert _resident() - before < 100 * 2**20
    assert time.process_time() - cpu < 20
    assert len(result.clients) == 30
    assert [client["client"] for client in result.clients[:2]] == [0, 33333]
    assert result.summary["clients_measured"] == 30
    assert result.summary["clients_trained"] == 40
    remarks: list[Any] = []
    assert len(read_run(tmp_path / "out", remarks).clients) == 30
    assert not remarks


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def fitting(seed: int, client: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, client])
    return rng.random((6, 5), np.float32), np.arange(6) % 3, rng.random((2, 5), np.float32), np.arange(2)


def of_my_own(**kept: Any) -> PerClient:
    return PerClient(**{"function": fitting, "shape": (5,), "names": ("a", "b", "c"), "train": 6, "test": 2, **kept})


def test_data_of_ones_own_is_computed_client_by_client(tmp_path: Path) -> None:
    domain = of_my_own().domain("mine")
    setting = small(
        "clients=300", "participation=0.02", "partition={name='natural'}", "model=mlp_table", "evaluate.gm=0",
        "evaluate.clients=7",
    )  # fmt: skip
    prepared = prepare(setting, domains=[domain])
    x, y = prepared.reference.federation.train(123)
    assert torch.equal(x, torch.from_numpy(fitting(setting.seed, 123)[0]))
    assert y.tolist() == [0, 1, 2, 0, 1, 2]
    assert len(run(setting, tmp_path / "out", prepared=prepared).clients) == 7


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda seed, client: fitting(seed, client)[:3], "client 4: computing its samples raises ValueError"),
        (lambda seed, client: (*fitting(seed, client)[:3], np.array([0, 3])), "client 4: its labels are not whole"),
        (lambda seed, client: (np.zeros((7, 5)), *fitting(seed, client)[1:]), r"client 4: its training .* \(7, 5\)"),
        (lambda seed, client: (np.full((6, 5), np.nan), *fitting(seed, client)[1:]), "client 4: .* hold NaN"),
    ],
)
def test_what_a_function_gives_is_checked(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        of_my_own(function=function).draw(0, [4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["partition=iid"], "partition.name = 'iid' deals out samples, but gaussians computes"),
        (["partition=domain"], "partition.name = 'domain' deals out samples"),
        (["partition.min_size=3"], "but gaussians computes who has what"),
        (["held_out_clients=2"], "held_out_clients = 2 needs lists"),
        (["attack.kind=label_flip"], "attack.kind = 'label_flip' needs lists"),
        (["evaluate.validation=0.1"], "evaluate.validation = 0.1 holds back"),
        (["data.options.wayz=3"], "unknown key data.options.wayz. Did you mean 'ways'?"),
        (["data.options.ways=11"], "data.options.ways = 11, but there are 4 classes"),
        (["data.options.train=0"], "data.options.train = 0 should be a whole number from 1"),
        (["data.options.shape=8"], "data.options.shape = 8 should be a list"),
        (["data.options.apart=-1"], "data.options.apart = -1 should be a number"),
    ],
)
def test_what_needs_lists_is_refused(changes: Sequence[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(plan(*changes))


def test_a_million_clients_with_lists_are_refused_with_the_numbers() -> None:
    setting = small("clients=1000000", "partition={name='iid'}")
    with pytest.raises(
        UserError, match=r"clients = 1000000: lists of .* 2\.5 kB each, 2,500 MB in all, but only"
    ) as said:
        prepare(setting)
    assert "data.name = 'gaussians'" in str(said.value)
    assert "\n" not in str(said.value)
