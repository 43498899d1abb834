"""The stacked engine does what the reference engine does: every method, both presets, ragged clients, few of them."""

import inspect
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import protofed
from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.engines import Engine, resources
from protofed.engines.reference import ReferenceEngine
from protofed.engines.stacked.cache import OFTEN
from protofed.engines.stacked.data import StackedData
from protofed.engines.stacked.engine import StackedEngine
from protofed.engines.stacked.groups import Sizes, Work
from protofed.engines.stacks import one_by_one
from protofed.engines.sums import merged, summed_in_order
from protofed.errors import UserError
from protofed.method import Client, LocalData, Mean, Method, Phase
from protofed.methods import METHODS
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedproto import FedProto
from protofed.models import MODELS
from protofed.models.mlp import Net, chain
from protofed.ops.optim import Optimizer
from protofed.ops.trees import deal
from protofed.runs.compiling import no_compiler

pytestmark = pytest.mark.usefixtures("traced")
ROOT = Path(protofed.__file__).parent
ROWS = (range(0, 17), (17,), range(20, 48, 4), (18, 19, 22, 23, 26), range(48, 60))
COHORTS = [[0, 1, 2, 3, 4], [2, 0], [3, 1, 4, 0, 2]]
FEWER = [[0, 1, 2, 3], [2, 0], [3, 1, 0, 2]]


def federation(drop_last: bool = False, without: int | None = None, batch_size: int = 4) -> Federation:
    """Five clients in two domains: many samples, a single one, a single class, and uneven batches."""
    g = np.random.default_rng(0)
    y = np.arange(60) % 4
    x = (g.normal(size=(60, 1, 28, 28)) + y[:, None, None, None]).astype(np.float32)
    domains = [Domain(name, x + i, y, x[:10] + i, y[:10], tuple("abcd")) for i, name in enumerate(("one", "two"))]
    kept = [i for i in range(5) if i != without]
    rows = tuple(np.array(ROWS[i]) for i in kept)
    split = Split(np.array([0, 0, 1, 0, 1])[kept], rows, tuple(np.arange(3 + i) for i in kept))
    return Federation(
        domains, split, seed=1, batch_size=batch_size, drop_last=drop_last, augmentations=("crop", "flip")
    )


def engine(method: Method, names: tuple[str, ...] = ("cnn_mnist",) * 5, clip: float = 5.0) -> ReferenceEngine:
    builders = [(name, lambda shape, classes, name=name: MODELS[name](shape, classes)) for name in names]
    optimizer = Optimizer(lr=0.01, momentum=0.5, weight_decay=1e-3, clip=clip)
    return ReferenceEngine(federation(), builders, optimizer, seed=1, local_epochs=2, init=method.init)  # type: ignore[arg-type]


def play(one: Engine, method: Method, cohorts: list[list[int]] = COHORTS) -> dict[str, Any]:
    """Three rounds, then everything that is measured."""
    server = method.init_server(one.specs()[0])
    lines = []
    for round, cohort in enumerate(cohorts):
        trained = one.train(method, server, cohort, round)
        server = method.aggregate(server, trained.up, torch.tensor(cohort))
        one.clients = {**one.clients, **trained.clients}
        lines.append((trained.sent, trained.received, trained.finite.tolist()))
        losses = trained.loss.value
    found = {
        "server": server,
        "clients": one.clients,
        "losses": losses,
        "own": one.evaluate(method, server, cohorts[0], on="own", who="personal"),
        "wide": one.evaluate(method, server, [3, 1], on="global", who="personal"),
        "lines": lines,
    }
    if method.global_client(server) is not None:
        found["whole"] = one.evaluate(method, server, [3, 0], on="own", who="global")
    if method.last_phases():
        found["last"] = one.finish(method, server, [2, 0], 9).clients
    return found


def agree(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.pop("lines") == right.pop("lines")
    assert left["clients"].keys() == right["clients"].keys()
    tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4), left, right)


@pytest.mark.parametrize("preset", [pytest.param("paper", marks=pytest.mark.slow), "official"])
@pytest.mark.parametrize("name", METHODS)
def test_engines_agree(name: str, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if preset == "official":  # steps traced from the second round on, and in the other preset as they are
        monkeypatch.setitem(OFTEN, "cpu", 1)
    quick = {"creff": {"head_epochs": 3, "steps": 3}, "fedrep": {"head_epochs": 2}}
    quick |= {"fedtgp": {"server_epochs": 2}, "fedpac": {"head_lr": 0.01}}  # large steps make rounding grow
    method = METHODS[name].preset(preset, **quick.get(name, {}))
    stacked = StackedEngine(engine(method), workers=2)
    assert (stacked.why_not(method) is None) == method.stackable
    agree(play(engine(method), method), play(stacked, method))


@pytest.mark.parametrize("preset", ["paper", "official"])  # which clip other parts of a gradient
@pytest.mark.parametrize("name", ["ditto", "fedrod"])
def test_engines_clip_alike(name: str, preset: str) -> None:
    method = METHODS[name].preset(preset)
    clipped = play(engine(method, clip=0.05), method, COHORTS[:2])
    free = play(engine(method, clip=0.0), method, COHORTS[:2])["clients"][0].params
    assert any(not torch.allclose(p, free[n], atol=1e-3) for n, p in clipped["clients"][0].params.items())
    agree(clipped, play(StackedEngine(engine(method, clip=0.05)), method, COHORTS[:2]))


@pytest.mark.parametrize("chunk", [1, 2])
def test_chunks_and_several_architectures_change_nothing(chunk: int) -> None:
    method, names = METHODS["fedproto"](), ("cnn_mnist", "mlp_digits", "cnn_mnist", "mlp_digits", "cnn_mnist")
    small = tuple(n if n == "cnn_mnist" else "wide" for n in names)

    def build() -> ReferenceEngine:
        builders = [
            (n, lambda s, c, n=n: MODELS["cnn_mnist"](s, c) if n == "cnn_mnist" else MODELS["mlp_digits"](s, c, dim=50))
            for n in small
        ]
        return ReferenceEngine(federation(), builders, Optimizer(lr=0.05), seed=1, local_epochs=1, init="common")

    agree(play(build(), method), play(StackedEngine(build(), chunk=chunk), method))


@pytest.mark.slow
def test_batchnorm_dropout_and_attention_stack_too() -> None:
    """Statistics of ragged batches are those of the real samples; running ones are kept client by client. Where all
    batches are full, the layer is torch's own."""

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        attention = nn.TransformerEncoderLayer(36, 2, 16, dropout=0.1, batch_first=True)
        body = chain(
            conv=nn.Conv2d(shape[0], 4, 5, stride=4),
            norm=nn.BatchNorm2d(4),
            relu=nn.ReLU(),
            drop=nn.Dropout2d(0.3),
            tokens=nn.Flatten(2),
            attention=attention,
            flat=nn.Flatten(),
            fc=nn.Linear(4 * 36, 8),
            last=nn.BatchNorm1d(8, momentum=None),
        )
        return Net(body, chain(fc=nn.Linear(8, classes)), 8)

    def one(method: Method, batch_size: int = 4) -> ReferenceEngine:
        # drop_last: BatchNorm1d cannot train on a batch of one sample
        data = federation(drop_last=True, without=1, batch_size=batch_size)
        assert data.even == (batch_size == 4)
        return ReferenceEngine(data, [("odd", build)] * 4, Optimizer(lr=0.02), seed=1, local_epochs=1, init="common")

    for name in ("fedavg", "fedproto", "ditto"):
        method = METHODS[name]()
        agree(play(one(method), method, FEWER), play(StackedEngine(one(method)), method, FEWER))
    agree(play(one(method, 64), method, FEWER), play(StackedEngine(one(method, 64)), method, FEWER))  # one batch each


def test_the_same_engine_twice_is_the_same_to_the_bit() -> None:
    method = METHODS["fednh"]()
    first, second = (play(StackedEngine(engine(method), workers=2), method) for _ in range(2))
    first.pop("lines"), second.pop("lines")
    tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), first, second)


@pytest.mark.parametrize(("batch_size", "wide"), [(4, 4), (17, 17), (18, 17)])  # no client has more than 17 samples
def test_batches_come_in_the_same_order_to_the_bit(batch_size: int, wide: int) -> None:
    one = federation(batch_size=batch_size)
    side = StackedData(one, range(5))
    numbers = [4, 0, 2]
    for epoch in range(2):
        plan = side.epoch(numbers, side.keys("order", 3, numbers), epoch)
        for row, number in enumerate(numbers):
            for step, batch in enumerate(one.epoch(number, 3, epoch)):
                mine = side.batch(plan.step(step), side.black(numbers))
                size = len(batch.y)
                assert torch.equal(mine.x[row, :size], batch.x)
                assert torch.equal(mine.y[row, :size], batch.y)
                assert mine.mask[row].tolist() == [1.0] * size + [0.0] * (wide - size)


@pytest.mark.parametrize("name", ["fedavg", "fedproto", "fedbabu", "mpfedcl"])
def test_clients_without_data_do_no_harm(name: str) -> None:
    """A worker may get nobody else."""
    method = METHODS[name]()

    def one() -> ReferenceEngine:
        made = engine(method)
        for number in (1, 3, 4):
            made.federation._train_rows[number] = torch.empty(0, dtype=torch.int64)
            made.federation._used_by[number] = 0
            made.federation.counts[number] = 0
        return made

    agree(play(one(), method), play(StackedEngine(one(), chunk=1, workers=2), method))
    made = one()  # a step on no samples would let weights decay
    down = deal(method.broadcast(method.init_server(made.specs()[0]), torch.tensor([1])), 0)
    trained = made.update(method, 1, down, 0).client.params
    assert all(torch.equal(trained[name], value) for name, value in made.client(method, 1).params.items())


def test_what_cannot_be_stacked_is_said() -> None:
    ragged = engine(METHODS["fedavg"](), ("cnn_mnist",) * 5)
    assert StackedEngine(ragged).why_not(METHODS["fedavg"]()) is None
    assert "host" in str(StackedEngine(ragged).why_not(METHODS["dpfedcl"]()))


@pytest.mark.slow
@pytest.mark.skipif(no_compiler(torch.device("cpu")) is not None, reason="compiling needs a C++ compiler")
def test_compiled_steps_agree_too() -> None:
    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        conv = nn.Conv2d(shape[0], 4, 5, stride=2)
        body = chain(conv=conv, relu=nn.ReLU(), pool=nn.MaxPool2d(4), flat=nn.Flatten(), fc=nn.Linear(4 * 9, 8))
        return Net(body, chain(fc=nn.Linear(8, classes)), 8)

    def one() -> ReferenceEngine:  # torch 2.13 cannot compile this step with clipping
        optimizer = Optimizer(lr=0.01, momentum=0.5)
        return ReferenceEngine(federation(), [("small", build)] * 5, optimizer, seed=1, local_epochs=1, init="common")

    class Turned(METHODS["fedprox"]):  # type: ignore[misc]
        """What it sends lies otherwise in memory from the second round on."""

        def aggregate(self, server: Any, up: Any, cohort: Tensor) -> Any:
            made = super().aggregate(server, up, cohort)
            return tree_map(lambda t: t.mT.contiguous().mT if t.ndim > 1 else t, made)

    for method in (METHODS["fedproto"](source="inloop"), Turned(mu=10.0)):
        compiled = StackedEngine(one(), workers=2, compiled=True)
        agree(play(one(), method), play(compiled, method))
        assert compiled.notes == []


def test_where_compiling_fails_steps_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such flag\nand more")

    monkeypatch.setattr(torch._inductor, "compile", fail)
    method = METHODS["fedavg"]()
    compiled = StackedEngine(engine(method), compiled=True)
    agree(play(engine(method), method), play(compiled, method))
    assert compiled.notes[0] == "a training step could not be compiled and runs as it is (no such flag)"


def test_ordered_sums_are_those_of_one_client_after_another() -> None:
    method = METHODS["fednh"]()
    agree(play(engine(method), method), play(StackedEngine(engine(method), workers=2, ordered=True), method))


def test_ordered_sums_do_not_depend_on_the_groups() -> None:
    rows = torch.tensor([1e8, 1.0, -1e8, 1.0])
    ups = {
        order: [{"sum": Mean(rows[list(part)], torch.zeros(len(part)))} for part in order]
        for order in (((0, 1, 2, 3),), ((2, 0), (3, 1)), ((3,), (2,), (1,), (0,)))
    }
    sums = {
        summed_in_order(merged(parts, torch.tensor([i for part in order for i in part]).argsort(), ordered=True))[
            "sum"
        ].total.item()
        for order, parts in ups.items()
    }
    assert len(sums) == 1


def test_a_model_that_vmap_cannot_take_is_trained_one_client_after_another() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.mean().item() > -100 else x

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        return Net(chain(odd=Odd(), flat=nn.Flatten(), fc=nn.Linear(784, 8)), chain(fc=nn.Linear(8, classes)), 8)

    def one(method: Method) -> ReferenceEngine:
        return ReferenceEngine(
            federation(), [("odd", build)] * 5, Optimizer(lr=0.02), seed=1, local_epochs=1, init="common"
        )

    method = METHODS["fedproto"]()
    stacked = StackedEngine(one(method))
    agree(play(one(method), method), play(stacked, method))
    (note,) = stacked.notes
    assert note.startswith("one client after another, not stacked: torch.vmap cannot take .item()")


def test_where_memory_runs_out_fewer_train_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS["fedproto"]()
    stacked = StackedEngine(engine(method))
    whole = stacked.lanes._phase

    def tight(work: Work, *rest: Any) -> Any:
        if stacked.sizes.width(work.group) > 1:
            raise torch.OutOfMemoryError("full")
        return whole(work, *rest)

    monkeypatch.setattr(stacked.lanes, "_phase", tight)
    agree(play(engine(method), method), play(stacked, method))
    assert stacked.notes[-1].endswith("going on with 1")
    monkeypatch.setattr(stacked.lanes, "_phase", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(UserError, match=r"training one client at a time takes more memory than there is: only .* MB"):
        stacked.train(method, method.init_server(stacked.specs()[0]), [0, 1], 0)


def test_too_little_memory_for_one_client_is_said_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "free", lambda device: 1_000_000)
    method = METHODS["fedproto"]()
    with pytest.raises(
        UserError, match=r"training one client of cnn_mnist takes about \d+ MB, but only 1 MB of .* free"
    ):
        StackedEngine(engine(method)).train(method, method.init_server(engine(method).specs()[0]), [0, 1], 0)


def test_bf16_is_near_fp32_and_not_the_same() -> None:
    method = METHODS["fedproto"]()
    exact, rounded = engine(method), engine(method)
    rounded.precision = "bf16"
    server = method.init_server(exact.specs()[0])
    a, b = (StackedEngine(e).train(method, server, [0, 2], 0).clients[0].params for e in (exact, rounded))
    assert all(p.dtype == torch.float32 for p in b.values())
    moved = sum(float((a[n] - exact.specs()[0].params[n]).norm()) for n in a)
    apart = sum(float((a[n] - b[n]).norm()) for n in a)
    assert 0 < apart < 0.2 * moved


def test_one_client_after_another_within_a_pass_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sizes, "mapped", lambda self, group, sizes: one_by_one)
    for name in ("fedproto", "fesem"):  # with something that is dealt, and without
        method = METHODS[name]()
        agree(play(engine(method), method), play(StackedEngine(engine(method)), method))


def renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function under another name, as a decorator may leave it."""

    def wrapped(*args: Any) -> Any:
        return function(*args)

    wrapped.__name__ = name
    return wrapped


def looking(self: FedAvg, model: Any, client: Client, data: LocalData, down: Any) -> Client:
    assert data.batches[0].x.numel()
    return FedAvg.receive(self, model, client, data, down)


class Looks(FedProto):
    receive = renamed(FedProto.receive, "upload")
    upload = renamed(FedProto.upload, "wrapped")


class LooksBefore(FedAvg):
    receive = renamed(looking, "upload")
    upload = renamed(FedAvg.upload, "wrapped")


@pytest.mark.parametrize(("method", "looks"), [(Looks(), True), (LooksBefore(), False)])
def test_whether_an_upload_looks_at_samples_is_found_whatever_it_is_called(method: Method, looks: bool) -> None:
    stacked = StackedEngine(engine(method))
    agree(play(engine(method), method), play(stacked, method))
    assert stacked.training._looks == {method: looks}


class TwoPhases(FedProto):
    """The head for one epoch at a step size of its own and without momentum, then everything for three."""

    def phases(self) -> list[Phase]:
        return [Phase(("head.",), epochs=1, lr=0.1, plain=True), Phase(epochs=3)]


def test_phases_their_losses_and_what_the_last_epoch_saw_are_those_of_one_client() -> None:
    """`local.train` and the lanes write the loop over steps each for itself."""
    method = TwoPhases(source="inloop", aggregation="weighted")
    expected, found = (
        one.train(method, method.init_server(one.specs()[0]), COHORTS[2], 0)
        for one in (engine(method), StackedEngine(engine(method), chunk=2))
    )
    torch.testing.assert_close(found.loss.weight, expected.loss.weight, rtol=0, atol=0)  # samples of all steps
    tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4), expected, found)
    for trained in (expected, found):  # one epoch's samples by class, although three were trained on
        assert trained.up["prototypes"].weight.tolist() == engine(method).counts(COHORTS[2]).sum(0).tolist()


def test_a_phase_that_trains_nothing_is_refused_before_anything_is_trained() -> None:
    class Nothing(FedAvg):
        def phases(self) -> list[Phase]:
            return [Phase(), Phase(("tail.",))]

        def loss(self, *inputs: Any) -> Tensor:
            raise AssertionError("trained")

    method = Nothing()
    for one in (engine(method), StackedEngine(engine(method))):
        with pytest.raises(UserError, match=r"a phase of Nothing trains \('tail.',\), which this model does not have"):
            one.train(method, method.init_server(one.specs()[0]), [0, 1], 0)


@pytest.mark.parametrize("workers", [1, 2])
def test_from_the_engine_to_the_loss_there_are_at_most_six_files_each_passed_once(workers: int) -> None:
    passed: set[tuple[str, ...]] = set()

    class Watched(FedAvg):
        def loss(self, *inputs: Any) -> Tensor:
            frames = [Path(frame.filename) for frame in inspect.stack(0)[:0:-1]]
            ours = [path.relative_to(ROOT).as_posix() for path in frames if path.is_relative_to(ROOT)]
            passed.add(tuple(name for name, _ in groupby(ours)))
            return super().loss(*inputs)

    method = Watched()
    one = StackedEngine(engine(method), workers=workers)
    server = method.init_server(one.specs()[0])
    for round in range(OFTEN["cpu"] + 2):  # as it is, then traced
        one.train(method, server, COHORTS[0], round)
    way = ("engines/stacked/training.py", "engines/stacked/lanes.py", "engines/stacked/step.py", "local.py")
    start = ("engines/stacked/engine.py",) if workers == 1 else ()  # a thread begins at what it is given
    assert (*start, *way) in passed
    for files in passed:
        assert len(set(files)) == len(files) <= 6, files
