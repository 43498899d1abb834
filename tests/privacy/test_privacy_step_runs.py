"""Steps with noise in whole runs: what is computed, what it costs, stopped and resumed, and what is refused."""

import json
import re
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest
import torch
from accountants import by_convolution, by_renyi
from small_runs import StopAfter, Told, final_state
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from protofed import Experiment, UserError, federate, run
from protofed.explain.explain import explain
from protofed.method import Batch, Client, Each, LocalData, Mean
from protofed.ops import random
from protofed.ops.trees import alone, deal, map_nodes, merge, under
from protofed.privacy.accounting import NOTHING, PaidSteps, spent
from protofed.privacy.ledger import LEDGER, Released, SpendingLedger
from protofed.privacy.release import Layout
from protofed.runs import dpsgd
from protofed.runs.dpsgd import NoisySteps
from protofed.runs.folder import RunFolder
from protofed.runs.releases import Releases
from protofed.runs.setup import prepare

pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
SMALL = (
    "clients=3", "rounds=3", "model=mlp_digits", "local_epochs=1", "engine=reference", "record.enabled=false",
    "device=cpu", "evaluate.own=0", "evaluate.gm=0", "data.normalize=half", "engine.threads=1", "partition.shots=6",
    "engine.compile=never",
)  # fmt: skip
BUDGET = ("privacy.unit=sample", "privacy.epsilon=8", "privacy.sgd_rate=0.25")
NOISE = ("privacy.sgd_noise=1.3", "privacy.noise=2.5")
LOUD = (
    "privacy.epsilon=1e12",
    "privacy.sgd_noise=1e-5",
    "privacy.noise=1e-5",
    "privacy.sgd_clip=1000",
)
SUMMED = ("privacy.where=sum", "privacy.secure_sum=true", "privacy.bits=48", "privacy.range=1000")
METHODS = ("fedavg", "fedproto", "fednh", "fedpr", "spfedcl")


def small(*overrides: str) -> Experiment:
    return Experiment.load("demo", *SMALL, *BUDGET, *overrides)


def ledger(folder: str | Path) -> list[Released]:
    return SpendingLedger(Path(folder) / LEDGER).lines


def server_of(folder: str | Path) -> Any:
    state, _ = RunFolder(Path(folder)).restore()
    assert state is not None
    return state.server


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(small(*NOISE), folder)
    return folder


# what is computed


@pytest.mark.parametrize(
    ("method", "where"), [*((method, ()) for method in METHODS), ("fedavg", SUMMED), ("fedproto", SUMMED)]
)
def test_without_noise_and_clip_a_run_is_plain_sgd_on_the_same_batches(
    method: str, where: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that the steps drew, the sum of their samples' gradients over batch_size, and an optimiser with
    momentum, weight decay and another step size in the second round."""
    monkeypatch.setattr(dpsgd, "with_noise", lambda total, spread, key: total)
    more = (
        "optimizer.lr=0.02",
        "optimizer.momentum=0.5",
        "optimizer.weight_decay=0.01",
        "optimizer.lr_decay=0.5",
        "local_epochs=2",
    )
    longest = "privacy.clip=2" if method in ("fednh", "spfedcl") else "privacy.clip=50"  # of length 1, or any
    plan = small(f"method={method}", "rounds=2", *LOUD, longest, *more, *where)
    run(plan, "out")
    engine, kind = prepare(plan).reference, plan.method
    server = kind.init_server(engine.specs()[0])
    name = Releases(plan, engine, Path("none"), 0, lambda text: None).name
    engine.stand_in = None
    states: dict[int, Client] = {}
    for round in range(2):
        ups = []
        for number in range(3):
            down = deal(kind.broadcast(server, torch.arange(3)), number)
            model, data = engine.model(number), engine.federation.local(number, round)
            client = kind.receive(model, states.get(number, engine.client(kind, number)), data, down)
            client = by_hand(plan, engine, client, down, round, number, name)
            ups.append(by_sample(plan, model, client, data, down))
            states[number] = client
        server = kind.aggregate(server, together(ups), torch.arange(3))
    got, want = tree_leaves(server_of("out")), tree_leaves(server)
    for left, right in zip(got, want, strict=True):
        assert torch.allclose(left, right, atol=2e-3), float((left - right).abs().max())


def by_hand(plan: Experiment, engine: Any, client: Client, down: Any, round: int, number: int, name: str) -> Client:
    """Plain SGD with torch's own gradients and optimiser."""
    (phase,) = plan.method.phases()
    mine = under(client.params, phase.trains)
    leaves = {key: value.clone().requires_grad_() for key, value in mine.items()}
    key = random.fold(random.key(plan.seed, "steps", name, round, 0, number, 0), -2)
    sgd = torch.optim.SGD(leaves.values(), plan.scheduled.rate(round), momentum=0.5, weight_decay=0.01)
    for epoch in range(2):
        for step in range(4):
            batch = engine.federation.drawn(number, random.fold(random.fold(key, epoch), step), 0.25)
            sgd.zero_grad()
            losses = []
            for x, y, mask in zip(*batch, strict=True):
                one = Batch(x[None], y[None], mask[None])
                with_mine = client._replace(params=client.params | leaves)
                found = plan.method.loss(engine.model(number), with_mine, one, down)
                losses.append(found[0] if isinstance(found, tuple) else found)
            (sum(losses, torch.zeros(())) / plan.batch_size + 0 * sum(p.sum() for p in leaves.values())).backward()
            sgd.step()
    return client._replace(params=client.params | {key: value.detach() for key, value in leaves.items()})


def by_sample(plan: Experiment, model: Any, client: Client, data: LocalData, down: Any) -> Any:
    """A client's upload: its model counts once, and its class sums are of the uploads of its single samples."""
    (batch,) = data.batches
    singles = []
    for x, y, mask in zip(*batch, strict=True):
        counts = (torch.arange(10) == y).float()
        one = data._replace(batches=[Batch(x[None], y[None], mask[None])], counts=counts)
        singles.append(plan.method.upload(model, client, one, down)[0])

    def joined(*nodes: Any) -> Any:
        means = [node.rows if isinstance(node, Each) else node for node in nodes]
        if not means[0].weight.ndim:
            return Mean.of(means[0].value, torch.ones(()))
        whole = reduce(add, means)
        return Each(Mean.of(whole.value, (whole.weight > 0).float())) if isinstance(nodes[0], Each) else whole

    return map_nodes(joined, *singles)


def together(ups: list[Any]) -> Any:
    """What `aggregate` gets."""
    return reduce(merge, map(alone, ups))


@pytest.mark.parametrize("method", METHODS)
def test_both_engines_release_the_same_to_the_bit(method: str) -> None:
    told = Told()
    for engine in ("reference", "stacked"):
        run(small(f"method={method}", "rounds=2", *NOISE, f"engine={engine}"), engine, watch=told)
    for left, right in zip(*(tree_leaves(server_of(name)) for name in ("reference", "stacked")), strict=True):
        assert torch.equal(left, right)
    assert Path("reference", LEDGER).read_bytes() == Path("stacked", LEDGER).read_bytes()
    assert any("clients train one after another" in note for note in told.notes)


def test_clients_without_samples_are_not_told_from_others() -> None:
    """They take the same steps, of noise alone, and count as much."""
    plan = small("method=fedavg", "rounds=1", *NOISE, "participation=0.4")
    engine = prepare(plan).reference
    server = plan.method.init_server(engine.specs()[0])
    engine.stand_in = NoisySteps(plan, 1.3, "name").update
    engine.federation._train_rows = [rows[:0] for rows in engine.federation._train_rows]
    engine.federation._used_by = [0] * 3
    engine.by_client = True
    trained = engine.train(plan.method, server, range(3), 0)
    assert trained.up.weight.unique().numel() == 1
    assert float(trained.up.weight[0]) > 0
    for number in range(3):
        moved = [(trained.clients[number].params[n] - p).abs().max() for n, p in server["params"].items()]
        assert float(torch.stack(moved).min()) > 0
    assert float(trained.loss.weight.sum()) == 0


# what it costs


def test_a_run_keeps_its_budget_and_says_so(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    about, steps = summary["privacy"], PaidSteps(4, 0.25, 1.3)
    assert summary["epsilon_spent"] == spent(2.5, 3, 1e-5, steps) <= 8
    assert (about["unit"], about["sgd_rate"], about["sgd_noise"], about["noise"]) == ("sample", 0.25, 1.3, 2.5)
    assert (about["steps"], about["steps_of_one"], about["releases_of_one"]) == (4, 12, 3)
    assert len(about["signal_to_noise_steps"]) == len(about["signal_to_noise"]) == 3
    lines = RunFolder(whole).rounds()
    assert [line["epsilon_spent"] for line in lines] == [spent(2.5, n, 1e-5, steps) for n in (1, 2, 3)]
    assert [line["loss"] for line in lines] == [None] * 3
    raw = [json.loads(line) for line in (whole / LEDGER).read_text().splitlines()]
    assert [(line["steps"], line["rate"], line["step_noise"], line["noise"]) for line in raw] == [
        (4, 0.25, 1.3, 2.5)
    ] * 3


@pytest.mark.parametrize(("method", "sums"), [("fedproto", True), ("fedavg", False)])
def test_the_noise_is_computed_from_the_budget(method: str, sums: bool) -> None:
    told = Told()
    summary = run(small(f"method={method}", "rounds=2"), "out", watch=told).summary
    about = summary["privacy"]
    assert 7.9 < summary["epsilon_spent"] <= 8
    steps = PaidSteps(4, 0.25, about["sgd_noise"])
    assert summary["epsilon_spent"] == spent(about["noise"] or NOTHING, 2, 1e-5, steps)
    assert (about["noise"] is not None) is sums
    if sums:
        assert spent(about["noise"], 2, 5e-6) == pytest.approx(4, rel=0.01)  # half of the budget, by itself
    assert any("in each of 4 steps a round" in note for note in told.notes)


def test_a_run_ends_before_a_round_that_its_budget_does_not_pay_for() -> None:
    told = Told()
    result = run(small("rounds=9", "privacy.noise=2", "privacy.sgd_noise=0.9"), "out", watch=told)
    done, steps = result.summary["rounds"], PaidSteps(4, 0.25, 0.9)
    assert 1 <= done < 9
    assert len(ledger("out")) == done
    assert result.summary["epsilon_spent"] == spent(2.0, done, 1e-5, steps) <= 8 < spent(2.0, done + 1, 1e-5, steps)
    assert any(f"stopped after round {done} of 9" in note for note in told.notes)


def test_under_a_secure_sum_steps_have_all_of_their_noise_and_class_sums_their_shares() -> None:
    """Three clients, of whom one may tell its share: the shares of the other two make up the noise that is paid for,
    and the price is that of all steps and of all class sums, by Renyi divergences of our own."""
    plan = small(*NOISE, "privacy.noise=40", "privacy.where=sum", "privacy.secure_sum=true", "privacy.dishonest=1")
    result = run(plan, "out")
    about, steps = result.summary["privacy"], PaidSteps(4, 0.25, 1.3)
    assert result.summary["epsilon_spent"] == spent(40.0, 3, 1e-5, steps) < by_renyi(steps, 3, 40.0, 1e-5) <= 9
    assert result.summary["epsilon_spent"] == pytest.approx(by_convolution(steps, 3, 40.0, 1e-5), rel=0.02)
    assert (about["sgd_noise"], about["noise"], about["honest_answers"]) == (1.3, 40.0, 2)
    assert about["share"] == pytest.approx(40 / 2**0.5)
    assert all(kind == "masked sums" for line in result.rounds for kind in line["bytes_up_by"])
    # 330 numbers of three shares: (sum of squares / 330)^0.5 = noise * clip * sqrt(3 / 2), the samples are next to none
    heard: list[Tensor] = []
    opened = Layout.opened

    def hear(self: Any, vector: Tensor, *more: Any) -> Any:
        heard.append(vector)
        return opened(self, vector, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layout, "opened", hear)
        run(plan, "again")
    assert len(heard) == 3
    for vector in heard:
        assert float(vector.std()) == pytest.approx(40 * 1.5**0.5, rel=0.15)
    engine = prepare(plan).reference
    some = Releases(plan, engine, Path("none"), 0, lambda text: None)
    assert some.training is not None
    assert some.training.spread == 1.3 * plan.privacy.sgd_clip  # of each client, whatever the others do


def test_the_models_of_a_secure_sum_are_cut_at_the_range_and_the_run_says_so() -> None:
    told = Told()
    more = ("method=fedavg", "rounds=1", "privacy.where=sum", "privacy.secure_sum=true", "privacy.range=0.01")
    run(small("privacy.sgd_noise=1.3", *more), "out", watch=told)
    assert any("were beyond privacy.range = 0.01 and were cut" in note for note in told.notes)
    assert (
        max(float(leaf.abs().max()) for leaf in tree_leaves(server_of("out")["params"])) <= 2**-6
    )  # the end of the grid


# stopped runs


def test_a_run_under_a_secure_sum_that_is_stopped_pays_once_and_ends_the_same() -> None:
    plan = small("privacy.sgd_noise=1.3", "method=fednh", "privacy.where=sum", "privacy.secure_sum=true")
    run(plan, "whole")
    with pytest.raises(RuntimeError):
        run(plan, "out", watch=StopAfter(2, RuntimeError))
    run(plan, "out", resume=True)
    assert Path("out", LEDGER).read_bytes() == Path("whole", LEDGER).read_bytes()
    assert final_state(Path("out")) == final_state(Path("whole"))


def test_a_run_that_is_stopped_pays_once_and_ends_the_same(whole: Path) -> None:
    with pytest.raises(RuntimeError):
        run(small(*NOISE), "out", watch=StopAfter(2, RuntimeError))  # no checkpoint but the first
    assert len(ledger("out")) == 2
    run(small(*NOISE), "out", resume=True)
    assert Path("out", LEDGER).read_bytes() == (whole / LEDGER).read_bytes()
    assert final_state(Path("out")) == final_state(whole)


def test_another_result_of_a_released_round_gets_new_noise_and_batches_and_is_paid_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the same noise, the difference of both results would show what was hidden."""
    gradients, noise, drawn = dpsgd.gradient_sum, dpsgd.with_noise, NoisySteps._batches
    used: list[tuple[int, Tensor]] = []
    batches: list[tuple[int, int]] = []
    training: list[NoisySteps] = []

    def with_noise(total: Tensor, spread: float, key: Tensor) -> Tensor:
        used.append((training[-1].attempt, (made := noise(total, spread, key)) - total))
        return made

    def _batches(self: NoisySteps, engine: Any, number: int, key: Tensor, epoch: int) -> Any:
        training.append(self)
        for batch in drawn(self, engine, number, key, epoch):
            batches.append((self.attempt, hash(batch.x.numpy().tobytes())))
            yield batch

    monkeypatch.setattr(dpsgd, "with_noise", with_noise)
    monkeypatch.setattr(NoisySteps, "_batches", _batches)
    budget = ("privacy.noise=4", "privacy.sgd_noise=2", "rounds=3")
    with pytest.raises(RuntimeError):
        run(small(*budget), "out", watch=StopAfter(2, RuntimeError))
    monkeypatch.setattr(dpsgd, "gradient_sum", lambda *words: gradients(*words) * 0.99)
    result = run(small(*budget), "out", resume=True)
    assert [(line.round, line.attempt) for line in ledger("out")] == [(1, 0), (2, 0), (1, 1), (2, 1), (3, 0)]
    assert result.summary["epsilon_spent"] == spent(4.0, 5, 1e-5, PaidSteps(4, 0.25, 2.0)) <= 8
    first = {round_(noise) for attempt, noise in used if attempt == 0}
    second = {round_(noise) for attempt, noise in used if attempt == 1}
    assert len(second) == 2 * 3 * 4
    assert not first & second
    assert len({b for a, b in batches if a == 1} & {b for a, b in batches if a == 0}) <= 2  # small ones may be alike


def round_(noise: Tensor) -> tuple[float, ...]:
    return tuple(round(float(number), 6) for number in noise[:5])


def test_no_noise_and_no_batch_is_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in another step, epoch, phase, round or client: Ditto trains in two phases. It is as loud as is paid for."""
    keys: list[tuple[int, ...]] = []
    spreads: set[float] = set()
    noise = dpsgd.with_noise

    def with_noise(total: Tensor, spread: float, key: Tensor) -> Tensor:
        keys.append(tuple(key.tolist()))
        spreads.add(spread)
        return noise(total, spread, key)

    monkeypatch.setattr(dpsgd, "with_noise", with_noise)
    run(small("method=ditto", "rounds=2", "local_epochs=2", "privacy.sgd_noise=2", "privacy.sgd_clip=0.3"), "out")
    (first, *_) = ledger("out")
    assert (first.steps, first.step_noise) == (16, 2)
    assert spreads == {2 * 0.3}
    assert len(set(keys)) == len(keys) == 2 * 3 * 16


# what bad input gets


class Mixing(nn.Module):
    """A model of a user's own that takes off the mean of a batch, or something else."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.middle, self.fc = nn.Linear(6, 5), middle, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.a(x)
        out: Tensor = self.fc(torch.relu(z - z.mean(0) if self.middle is None else self.middle(z)))
        return out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["privacy.sgd_rate=0"], "privacy.unit = 'sample' needs a frozen encoder"),
        (["privacy.unit=client"], "privacy.sgd_rate = 0.25 hides single samples. Use privacy.unit = 'sample'"),
        (["privacy.sgd_rate=0", "privacy.sgd_noise=1"], "privacy.sgd_noise = 1 has no effect without steps with noise"),
        (["privacy.where=sum"], "privacy.where = 'sum' needs a secure sum"),
        (["method=spfedcl", "privacy.where=sum", "privacy.secure_sum=true"], "sends"),
        (["privacy.sgd_rate=1.5"], "privacy.sgd_rate = 1.5"),
        (["privacy.epsilon=0.1", "privacy.sgd_noise=0.5", "privacy.noise=1"], "0.1 is too small for one round: with"),
        (["privacy.epsilon=0.5", "privacy.sgd_noise=0.5"], "leaves nothing of privacy.epsilon = 0.5 for class sums"),
        (["privacy.delta=0.02"], "privacy.delta = 0.02 is not below 1 /"),
        (["method.pull=prototype"], "the loss of fedproto compares the samples of a batch with each other"),
        (["method.source=inloop"], "fedproto sends what its training steps see"),
        (["method.aggregation=literal"], "fedproto needs more than the sums of a class's embeddings over samples"),
        (["method=fednh", "method.alpha=uniform"], "(for fednh: method.alpha = 'counts'"),
        (["method=fedpr", "method.divide=everyone"], "method.divide = 'samples' or 'holders'"),
        (["method=mpfedcl"], "mpfedcl needs more than the sums"),
        (["method=spfedcl", "privacy.where=server"], "sends values client by client"),
        (["method=fedrod"], "fedrod computes from a client's samples what it starts a round with"),
        (["method=fedbabu"], "fedbabu trains once more after the last round"),
        (["method=fedpac"], "can only noise means"),
        (["method=fedplvm"], "torch.vmap cannot make the upload of fedplvm sample by sample"),
        (["method=classmeans", "rounds=1"], "classmeans trains nothing, so privacy.sgd_rate has no effect"),
        (["engine=ray"], "engine.name = 'ray' does not go with privacy.sgd_rate"),
        (["data.normalize=auto"], "data.normalize = 'auto' scales every sample by all clients' samples"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_in_one_line(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as found:
        run(small(*words), "out")
    assert "\n" not in str(found.value)
    assert not Path("out").exists()


@pytest.mark.parametrize("middle", [None, nn.BatchNorm1d(5), nn.GroupNorm(1, 5), nn.Dropout(0.5)])
def test_a_model_of_ones_own_that_mixes_samples_is_refused(middle: nn.Module | None, tmp_path: Path) -> None:
    torch.manual_seed(1)
    clients = [(torch.randn(20, 6).numpy(), torch.arange(20).numpy() % 3) for _ in range(3)]
    settings = {"privacy": {"unit": "sample", "epsilon": 8.0, "sgd_rate": 0.2}}
    words: dict[str, Any] = {"out": tmp_path / "out", "settings": settings, "quiet": True}
    if isinstance(middle, nn.GroupNorm | nn.Dropout):
        federate(Mixing(middle), clients, "fedproto", 1, **words)
        assert len(ledger(tmp_path / "out")) == 1
        return
    with pytest.raises(UserError, match="Mixing mixes the samples of a batch in training, as BatchNorm does"):
        federate(Mixing(middle), clients, "fedproto", 1, **words)


class Recurrent(Mixing):
    """One whose gradients cannot be taken sample by sample."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.gru = nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.gru(x[:, None])[0][:, 0])


def test_a_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    clients = [(torch.randn(20, 6).numpy(), torch.arange(20).numpy() % 3) for _ in range(3)]
    settings = {"privacy": {"unit": "sample", "epsilon": 8.0, "sgd_rate": 0.2}}
    with pytest.raises(UserError, match=r"Recurrent has recurrent layers \(LSTM, GRU\)"):
        federate(Recurrent(), clients, "fedproto", 1, out=tmp_path / "out", settings=settings, quiet=True)


@pytest.mark.parametrize("method", METHODS)
def test_explain_says_how_steps_are_noised(method: str) -> None:
    told = explain(small(f"method={method}"))
    lines = told["private"]["server_learns"]
    assert "hides any single sample: epsilon 8, delta 1e-05" in lines[0]
    assert any("local training is DP-SGD" in line for line in lines)


def test_explain_says_who_sees_models_and_class_sums_under_a_secure_sum() -> None:
    told = explain(small("method=fednh", "privacy.where=sum", "privacy.secure_sum=true"))
    (seen,) = {group["seen"] for group in told["up"]["groups"]}
    assert seen == (
        "only in the sum over at least 3 clients: models noised (by each client's steps), class sums noised, epsilon 8 "
        "for the run (by shares of 2 of them)"
    )
    assert any("a share of the class sums' noise under the secure sum" in t for t in told["private"]["server_learns"])
    summary = run(small("method=fednh", "privacy.where=sum", "privacy.secure_sum=true", "rounds=1"), "out").rounds[0]
    assert told["up"]["bytes"]["round"] == summary["bytes_up"]


def test_what_the_docs_say_of_steps_runs() -> None:
    words = "model=mlp_digits data.normalize=half privacy.unit=sample privacy.epsilon=8 privacy.sgd_rate=0.2"
    docs = Path(__file__).parents[2] / "docs" / "privacy.md"
    assert f"protofed run demo rounds=3 {words}" in docs.read_text(encoding="utf-8")
    more = ("engine.threads=1", "clients=4", "rounds=1", "record.enabled=false")
    assert run(Experiment.load("demo", *words.split(), *more), "out").summary["epsilon_spent"] <= 8
