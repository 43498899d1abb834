"""Local training against plain PyTorch: modules, autograd, torch.optim."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from protofed.config.experiment import SCHEDULE
from protofed.local import local_update, train, train_step
from protofed.method import Batch, Client, LocalData, Mean, Method, Params, Phase
from protofed.methods.fedproto import FedProto
from protofed.methods.local import Local
from protofed.models import Net, chain
from protofed.models.functional import FunctionalModel, fresh, state
from protofed.models.layers import KeyedDropout, key_dropouts
from protofed.ops import optim, random
from protofed.ops.trees import under

FEATURES, CLASSES, DIM = 5, 3, 4
KEY = random.key("test")
SGD = optim.Optimizer(lr=0.1)
OPTIMIZERS = {
    "sgd": SGD,
    "momentum": optim.Optimizer(lr=0.1, momentum=0.9),
    "decay": optim.Optimizer(lr=0.1, weight_decay=0.05),
    "sgd all": optim.Optimizer(lr=0.1, momentum=0.5, weight_decay=0.01, clip=0.5),
    "loose clip": optim.Optimizer(lr=0.1, momentum=0.5, clip=1000.0),
    "adam": optim.Optimizer(name="adam", lr=0.01),
    "adam all": optim.Optimizer(name="adam", lr=0.01, weight_decay=0.1, clip=0.3),
}


def plain_net() -> Net:
    body = chain(fc1=nn.Linear(FEATURES, 6), relu1=nn.ReLU(), fc2=nn.Linear(6, DIM), relu2=nn.ReLU())
    return Net(body, chain(fc=nn.Linear(DIM, CLASSES)), DIM)


def norm_net() -> Net:
    """No biases before BatchNorm: it cancels them, and Adam would make steps of the rounding errors left."""
    body = chain(fc1=nn.Linear(FEATURES, 6, False), bn=nn.BatchNorm1d(6), relu=nn.ReLU(), fc2=nn.Linear(6, DIM, False))
    return Net(body, chain(bn=nn.BatchNorm1d(DIM), fc=nn.Linear(DIM, CLASSES)), DIM)


def image_net() -> Net:
    body = chain(
        conv=nn.Conv2d(1, 3, 3),
        bn=nn.BatchNorm2d(3),
        relu=nn.ReLU(),
        dropout=nn.Dropout2d(0.5),
        flatten=nn.Flatten(),
        fc=nn.Linear(12, DIM),
    )
    return Net(body, chain(dropout=nn.Dropout(0.25), fc=nn.Linear(DIM, CLASSES)), DIM)


def built(build=plain_net, seed: int = 0) -> tuple[Net, FunctionalModel, Client]:
    module = fresh(build, seed)
    params, buffers = state(copy.deepcopy(module))
    return module, FunctionalModel(module), Client(params, buffers)


def data(n: int, seed: int = 0, shape: tuple[int, ...] = (FEATURES,)) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(n, *shape, generator=g), torch.randint(CLASSES, (n,), generator=g), torch.ones(n))


def epochs_of(sizes: list[int], seed: int = 0):
    """Batches that differ from epoch to epoch."""
    return lambda epoch: [data(n, 1000 * seed + 100 * epoch + i) for i, n in enumerate(sizes)]


def torch_optimizer(o: optim.Optimizer, params, lr: float, plain: bool = False) -> torch.optim.Optimizer:
    if plain:
        return torch.optim.SGD(params, lr=lr)
    if o.name == "adam":
        return torch.optim.Adam(params, lr=lr, weight_decay=o.weight_decay)
    return torch.optim.SGD(params, lr=lr, momentum=o.momentum, weight_decay=o.weight_decay)


def torch_train(module: nn.Module, o: optim.Optimizer, batches: list[Batch], trains: str = "", **fields) -> list[float]:
    """What anybody would write: the losses, and the module is trained in place."""
    fields.setdefault("lr", o.lr)
    chosen = [p for name, p in module.named_parameters() if name.startswith(trains)]
    optimizer = torch_optimizer(o, chosen, **fields)
    module.train()
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(module(batch.x)[1], batch.y)
        loss.backward()
        if o.clip:
            nn.utils.clip_grad_norm_(chosen, o.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(client: Client, module: nn.Module, at: str = "") -> None:
    params, buffers = state(module)
    for name, value in params.items():
        torch.testing.assert_close(client.params[at + name], value, rtol=1e-5, atol=1e-5, msg=name)
    for name, value in buffers.items():
        torch.testing.assert_close(client.buffers[at + name], value, rtol=1e-5, atol=1e-5, msg=name)


def assert_close(left, right) -> None:
    tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5), left, right)


# against PyTorch


@pytest.mark.parametrize("o", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_train_is_plain_pytorch(o: optim.Optimizer, build) -> None:
    module, model, client = built(build)
    before = tree_map(torch.clone, client)
    batches = epochs_of([8, 8, 5])
    trained, loss, seen = train(Local(), model, o, (Phase(),), client, batches, {}, KEY, o.lr, 2)
    losses = torch_train(module, o, [*batches(0), *batches(1)])
    assert_same(trained, module)
    expected = sum(n * l for n, l in zip([8, 8, 5, 8, 8, 5], losses, strict=True)) / 42
    assert float(loss.value) == pytest.approx(expected, abs=1e-5)
    assert float(loss.weight) == 42
    assert seen == ()
    tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), client, before)  # the old one is a value


@pytest.mark.parametrize("o", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_train_step_is_one_step_of_pytorch(o: optim.Optimizer) -> None:
    module, model, client = built()
    moments = optim.first_moments(o, client.params)
    batch = data(7)
    step = train_step(Local(), model, o, Phase(), client, moments, batch, {}, KEY, 0.03)
    (loss,) = torch_train(module, o, [batch], lr=0.03)
    assert float(step.loss) == pytest.approx(loss, abs=1e-5)
    assert_same(step.client, module)


def test_moments_start_anew_with_every_call() -> None:
    """The papers' code builds its optimiser every round."""
    o = OPTIMIZERS["momentum"]
    module, model, client = built()
    batches = epochs_of([6, 6])
    for _ in range(2):
        client, _, _ = train(Local(), model, o, (Phase(),), client, batches, {}, KEY, o.lr, 1)
        torch_train(module, o, batches(0))
    assert_same(client, module)


def test_a_tensor_serves_as_step_size() -> None:
    _, model, client = built()
    moments, batch = optim.first_moments(SGD, client.params), data(7)
    one = train_step(Local(), model, SGD, Phase(), client, moments, batch, {}, KEY, 0.25)
    other = train_step(Local(), model, SGD, Phase(), client, moments, batch, {}, KEY, torch.tensor(0.25))
    assert_close(one.client, other.client)


def test_rate_decays_by_round() -> None:
    o = optim.Optimizer(lr=0.1, lr_decay=0.5)
    assert [o.rate(r) for r in range(3)] == [0.1, 0.05, 0.025]


def test_training_leaves_global_randomness_alone() -> None:
    _, model, client = built(image_net)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    batches = [data(4, shape=(1, 4, 4))]
    first, _, _ = train(Local(), model, SGD, (Phase(),), client, lambda e: batches, {}, KEY, 0.1, 2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    second, _, _ = train(Local(), model, SGD, (Phase(),), client, lambda e: batches, {}, KEY, 0.1, 2)
    assert all(torch.equal(first.params[name], second.params[name]) for name in first.params)


# phases


@pytest.mark.parametrize("trains", ["head.", "body.", "body.fc1."])
def test_a_phase_trains_its_prefixes_and_nothing_else(trains: str) -> None:
    o = OPTIMIZERS["sgd all"]
    module, model, client = built(norm_net)
    batches = epochs_of([8, 8])
    trained, _, _ = train(Local(), model, o, (Phase((trains,)),), client, batches, {}, KEY, o.lr, 1)
    for name, value in client.params.items():
        assert torch.equal(trained.params[name], value) == (not name.startswith(trains)), name
    torch_train(module, o, batches(0), trains)
    assert_same(trained, module)  # the buffers, too: BatchNorm of a frozen part still sees the batches


def test_phases_have_their_own_epochs_step_size_and_optimiser() -> None:
    o = OPTIMIZERS["sgd all"]
    module, model, client = built()
    asked: list[int] = []

    def batches(epoch: int) -> list[Batch]:
        asked.append(epoch)
        return epochs_of([6, 4])(epoch)

    phases = (
        Phase(("head.",), epochs=2, lr=0.3, plain=True),
        Phase(("body.",)),
        Phase(("body.fc2.", "head."), epochs=1, lr=0.02),
    )
    trained, loss, _ = train(Local(), model, o, phases, client, batches, {}, KEY, 0.1, 3)
    assert asked == [0, 1, 0, 1, 2, 0]  # every phase meets the same batches in the same order

    fixed = epochs_of([6, 4])
    losses = torch_train(module, o, [*fixed(0), *fixed(1)], "head.", lr=0.3, plain=True)
    losses += torch_train(module, o, [*fixed(0), *fixed(1), *fixed(2)], "body.", lr=0.1)
    # torch_train takes one prefix; the third phase trains all but body.fc1
    chosen = [p for name, p in module.named_parameters() if not name.startswith("body.fc1.")]
    optimizer = torch_optimizer(o, chosen, lr=0.02)
    for batch in fixed(0):
        optimizer.zero_grad()
        value = F.cross_entropy(module(batch.x)[1], batch.y)
        value.backward()
        nn.utils.clip_grad_norm_(chosen, o.clip)
        optimizer.step()
        losses.append(value.item())
    assert_same(trained, module)
    assert float(loss.weight) == 60
    assert float(loss.total) == pytest.approx(sum((6, 4)[i % 2] * l for i, l in enumerate(losses)), abs=1e-4)


def test_plain_leaves_out_adam_momentum_and_decay() -> None:
    for o in (OPTIMIZERS["adam all"], OPTIMIZERS["sgd all"]):
        module, model, client = built()
        batches = epochs_of([6, 6, 6])
        trained, _, _ = train(Local(), model, o, (Phase(plain=True),), client, batches, {}, KEY, 0.2, 1)
        torch_train(module, o, batches(0), lr=0.2, plain=True)
        assert_same(trained, module)


def test_a_phase_may_go_without_clipping_and_be_pulled_after_it() -> None:
    clipping = optim.Optimizer(lr=0.1, clip=1e-3)

    def pull(client: Client, down: Params) -> Params:
        return {name: 0.5 * (value - down[name]) for name, value in client.params.items()}

    _, model, client = built()
    anchor = {name: value + 1 for name, value in client.params.items()}
    batch = epochs_of([6])
    free, _, _ = train(Local(), model, clipping, (Phase(clip=False),), client, batch, anchor, KEY, 0.1, 1)
    plain, _, _ = train(Local(), model, SGD, (Phase(),), client, batch, anchor, KEY, 0.1, 1)
    pulled, _, _ = train(Local(), model, clipping, (Phase(pull=pull),), client, batch, anchor, KEY, 0.1, 1)
    clipped, _, _ = train(Local(), model, clipping, (Phase(),), client, batch, anchor, KEY, 0.1, 1)
    for name in client.params:
        torch.testing.assert_close(free.params[name], plain.params[name])
        torch.testing.assert_close(pulled.params[name], clipped.params[name] + 0.1 * 0.5)  # -lr * 0.5 * (w - (w + 1))


def test_a_phase_has_its_own_loss() -> None:
    def pull_to_zero(model, client: Client, batch: Batch, down) -> Tensor:
        return sum(((p**2).sum() for p in under(client.params, "head.").values()), torch.zeros(()))

    _, model, client = built()
    phases = (Phase(("head.",), loss=pull_to_zero),)
    trained, _, _ = train(Local(), model, SGD, phases, client, epochs_of([2]), {}, KEY, 0.1, 1)
    for name, value in client.params.items():
        expected = value * 0.8 if name.startswith("head.") else value  # w - 0.1 * 2 w
        torch.testing.assert_close(trained.params[name], expected)


def test_no_phases_train_nothing() -> None:
    _, model, client = built()
    same, loss, seen = train(Local(), model, SGD, (), client, epochs_of([4]), {}, KEY, 0.1, 1)
    assert same is client
    assert (float(loss.total), float(loss.weight), seen) == (0, 0, ())


@dataclass(frozen=True)
class Reporting(Local):
    """Reports the sum of its inputs and the number of samples."""

    def loss(self, model, client, batch, down):
        value = super().loss(model, client, batch, down)
        return value, {"x": Mean(batch.x.sum(0), batch.mask.sum())}


def test_what_is_seen_is_added_over_the_last_epoch_alone() -> None:
    _, model, client = built()
    batches = epochs_of([4, 4, 2])
    phases = (Phase(("head.",), epochs=2), Phase(("body.",), epochs=1))
    _, _, seen = train(Reporting(), model, SGD, phases, client, batches, {}, KEY, 0.1, 9)
    last = batches(0)
    assert float(seen["x"].weight) == 10
    torch.testing.assert_close(seen["x"].total, torch.cat([b.x for b in last]).sum(0))


def test_a_round_is_receive_train_upload() -> None:
    @dataclass(frozen=True)
    class Probe(Reporting):
        def receive(self, model, client, data, down):
            return client._replace(params=down["params"])

        def upload(self, model, client, data, down):
            return data.seen, client._replace(memory={"rounds": client.memory["rounds"] + 1})

    module, model, client = built(seed=1)
    other, _ = state(fresh(plain_net, 2))
    module.load_state_dict(other)
    batches = epochs_of([5, 3])
    start = client._replace(memory={"rounds": torch.tensor(4)})
    local = LocalData([], torch.zeros(CLASSES), KEY)
    update = local_update(Probe(), model, SGD, start, local, batches, {"params": other}, 0.1, 2)
    losses = torch_train(module, SGD, [*batches(0), *batches(1)])
    assert_same(update.client, module)
    assert update.client.memory["rounds"].item() == 5
    assert float(update.up["x"].weight) == 8
    assert float(update.loss.value) == pytest.approx(sum(n * l for n, l in zip([5, 3] * 2, losses, strict=True)) / 16)


# BatchNorm


def test_batchnorm_buffers_follow_training_and_serve_evaluation() -> None:
    module, model, client = built(norm_net)
    batches = epochs_of([8, 8, 4])
    trained, _, _ = train(Local(), model, SGD, (Phase(),), client, batches, {}, KEY, 0.1, 2)
    torch_train(module, SGD, [*batches(0), *batches(1)])
    assert int(trained.buffers["body.bn.num_batches_tracked"]) == 6
    assert not torch.allclose(trained.buffers["body.bn.running_mean"], client.buffers["body.bn.running_mean"])
    assert_same(trained, module)

    x = data(9, seed=5).x
    z, logits = model(trained, x)
    expected_z, expected_logits = module.eval()(x)
    torch.testing.assert_close(z, expected_z, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.embed(trained, x), z)
    torch.testing.assert_close(model.classify(trained, z), logits)
    torch.testing.assert_close(model(trained, x[:1])[1], logits[:1])  # one sample alone is no different


def test_evaluation_moves_no_buffer() -> None:
    _, model, client = built(norm_net)
    before = {name: value.clone() for name, value in client.buffers.items()}
    model(client, data(9).x)
    assert all(torch.equal(client.buffers[name], value) for name, value in before.items())


# dropout


def test_keyed_dropout_scales_what_it_keeps() -> None:
    for p in (0.1, 0.5, 0.75):
        layer = KeyedDropout(p, whole_channels=False)
        out = layer(torch.ones(200, 100))
        kept = out != 0
        assert torch.allclose(out[kept], torch.tensor(1 / (1 - p)))
        assert abs(float(kept.double().mean()) - (1 - p)) < 5 * (p * (1 - p) / 20_000) ** 0.5
        assert abs(float(out.mean()) - 1) < 0.06
        assert 0 < float(kept.double().mean(1).std()) < 0.1  # no row is all or nothing
    assert torch.equal(KeyedDropout(0.0, False)(torch.ones(3, 3)), torch.ones(3, 3))
    assert torch.equal(KeyedDropout(1.0, False)(torch.ones(3, 3)), torch.zeros(3, 3))
    assert torch.equal(KeyedDropout(0.5, False).eval()(torch.ones(3, 3)), torch.ones(3, 3))


@pytest.mark.parametrize(
    "layer, shape",
    [(nn.Dropout1d(0.5), (40, 30, 5)), (nn.Dropout2d(0.5), (40, 30, 3, 3)), (nn.Dropout3d(0.5), (40, 30, 2, 2, 2))],
)
def test_channel_dropouts_drop_whole_channels(layer: nn.Module, shape: tuple[int, ...]) -> None:
    module = chain(drop=layer)
    assert key_dropouts(module) == ["drop"]
    out = module(torch.ones(shape)).flatten(2)
    assert bool(((out == 0).all(2) | (out == 2).all(2)).all())
    kept = out[:, :, 0] > 0
    assert abs(float(kept.double().mean()) - 0.5) < 5 * 0.5 / 1200**0.5
    assert 0 < int(kept[:, 0].sum()) < 40  # another choice for every sample


def dropped(key: Tensor, build=image_net) -> tuple[Tensor, Tensor]:
    _, model, client = built(build)
    return model.training(client.buffers, key)(client, data(6, shape=(1, 4, 4)).x)


def test_dropout_depends_on_its_key_alone() -> None:
    first, again, other = dropped(KEY), dropped(KEY), dropped(random.fold(KEY, 1))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_every_dropout_of_a_model_has_its_own_mask() -> None:
    body = chain(one=nn.Dropout(0.5), two=nn.Dropout(0.5))
    _, model, client = built(lambda: Net(body, chain(fc=nn.Dropout(0.5)), 4))
    z, logits = model.training({}, KEY)(client, torch.ones(200, 50))
    assert abs(float((z != 0).double().mean()) - 0.25) < 0.03  # equal masks would keep half
    assert abs(float((logits != 0).double().mean()) - 0.125) < 0.02


def test_a_dropout_that_is_used_twice_is_keyed_twice() -> None:
    """One nn.Dropout in two places of a model is common; neither may draw from torch's generator."""
    drop = nn.Dropout(0.5)
    body = chain(one=drop, act=nn.ReLU(), two=drop)
    _, model, client = built(lambda: Net(body, chain(fc=nn.Linear(50, CLASSES)), 50))
    torch.manual_seed(0)
    first, _ = model.training({}, KEY)(client, torch.ones(40, 50))
    torch.manual_seed(1)
    second, _ = model.training({}, KEY)(client, torch.ones(40, 50))
    assert torch.equal(first, second)


def test_a_body_that_is_a_dropout_is_keyed() -> None:
    _, model, client = built(lambda: Net(nn.Dropout(0.5), chain(fc=nn.Linear(FEATURES, CLASSES)), FEATURES))
    x = torch.ones(20, FEATURES)
    first, _ = model.training({}, KEY)(client, x)
    second, _ = model.training({}, random.fold(KEY, 1))(client, x)
    assert not torch.equal(first, second)


def test_evaluation_drops_nothing() -> None:
    module, model, client = built(image_net)
    x = data(6, shape=(1, 4, 4)).x
    torch.testing.assert_close(model(client, x)[1], module.eval()(x)[1])


@dataclass(frozen=True)
class Embeddings(Local):
    """Reports its embeddings."""

    def loss(self, model, client, batch, down):
        z, logits = model(client, batch.x)
        return F.cross_entropy(logits, batch.y), Mean(z, batch.mask.sum())


def test_every_step_has_another_mask_and_a_rerun_the_same() -> None:
    _, model, client = built(image_net)
    batch = data(6, shape=(1, 4, 4))

    def last_epoch(epochs: int, key: Tensor) -> Tensor:
        """The embeddings of the last step; with a step size of 0 only the mask can make a difference."""
        phase = (Phase(("head.",), epochs=epochs, lr=0.0),)
        return train(Embeddings(), model, SGD, phase, client, lambda e: [batch], {}, key, 0.0, 1)[2].total

    assert torch.equal(last_epoch(1, KEY), last_epoch(1, KEY))
    assert not torch.equal(last_epoch(1, KEY), last_epoch(2, KEY))
    assert not torch.equal(last_epoch(2, KEY), last_epoch(3, KEY))
    assert not torch.equal(last_epoch(1, KEY), last_epoch(1, random.fold(KEY, 9)))
    phase = (Phase(("head.",), lr=0.0),)
    twice = train(Embeddings(), model, SGD, phase, client, lambda e: [batch, batch], {}, KEY, 0.0, 1)[2].total
    assert not torch.equal(twice, 2 * last_epoch(1, KEY)), "also within an epoch"


# one sample


@pytest.mark.parametrize(
    "build, shape, possible",
    [
        (plain_net, (FEATURES,), True),
        (norm_net, (FEATURES,), False),
        (image_net, (1, 4, 4), True),  # BatchNorm over several pixels; with dropout behind it
        (lambda: Net(chain(f=nn.Flatten(), bn=nn.BatchNorm1d(4)), chain(d=nn.Dropout(0.5)), 4), (4,), False),
    ],
)
def test_batchnorm_needs_two_numbers(build, shape: tuple[int, ...], possible: bool) -> None:
    _, model, client = built(build)
    assert model.trains_on_one(torch.zeros(1, *shape)) == possible
    x = torch.ones(1, *shape)
    if possible:
        model.training(client.buffers, KEY)(client, x)
    else:
        with pytest.raises(ValueError, match="more than 1 value"):
            model.training(client.buffers, KEY)(client, x)


# a second network


@dataclass(frozen=True)
class Personal(Local):
    """Trains the second network only."""

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(("personal.",)),)

    def loss(self, model, client, batch, down):
        _, logits = model(client, batch.x, at="personal.")
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))


def with_personal(client: Client, other: Client) -> Client:
    params = client.params | {f"personal.{name}": value for name, value in other.params.items()}
    return Client(params, client.buffers | {f"personal.{name}": value for name, value in other.buffers.items()})


def test_a_second_network_is_trained_alone() -> None:
    _, model, first = built(norm_net, seed=1)
    module, _, second = built(norm_net, seed=2)
    client = with_personal(first, second)
    batches = epochs_of([8, 6])
    method = Personal()
    o = OPTIMIZERS["sgd all"]
    trained, _, _ = train(method, model, o, method.phases(), client, batches, {}, KEY, o.lr, 2)
    torch_train(module, o, [*batches(0), *batches(1)])
    assert_same(trained, module, at="personal.")
    assert int(trained.buffers["personal.head.bn.num_batches_tracked"]) == 4
    for name in first.params:
        assert torch.equal(trained.params[name], first.params[name]), name
    for name in first.buffers:
        assert torch.equal(trained.buffers[name], first.buffers[name]), name
    x = data(5, seed=9).x
    torch.testing.assert_close(model(trained, x, at="personal.")[1], module.eval()(x)[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(trained, x)[1], model(first, x)[1])


def test_two_networks_in_one_loss() -> None:
    """Ditto's interleaved form: both see the same batch and neither the other's gradient."""

    def both(model, client: Client, batch: Batch, down) -> Tensor:
        mine = F.cross_entropy(model(client, batch.x, at="personal.")[1], batch.y)
        return mine + F.cross_entropy(model(client, batch.x)[1], batch.y)

    one, model, first = built(norm_net, seed=1)
    two, _, second = built(norm_net, seed=2)
    batches = epochs_of([8, 6])
    phase = (Phase(loss=both),)
    trained, _, _ = train(Local(), model, SGD, phase, with_personal(first, second), batches, {}, KEY, 0.1, 1)
    for module in (one, two):
        torch_train(module, SGD, batches(0))
    assert_same(trained, one)
    assert_same(trained, two, at="personal.")


# padding


def padded(batch: Batch, n: int) -> Batch:
    """The same samples with n rows of rubbish behind them."""
    rubbish = data(n, seed=77)
    parts = zip(batch, (rubbish.x * 50, rubbish.y, torch.zeros(n)), strict=True)
    return Batch(*(torch.cat(pair) for pair in parts))


PROTOTYPES = Mean(torch.arange(12.0).reshape(CLASSES, DIM) / 12, torch.tensor([1.0, 0.0, 1.0]))


@pytest.mark.parametrize(
    "method, down",
    [
        (Local(), {}),
        (FedProto(), PROTOTYPES),
        (FedProto(source="inloop"), PROTOTYPES),
    ],
)
@pytest.mark.parametrize("o", [SGD, OPTIMIZERS["sgd all"], OPTIMIZERS["adam all"]], ids=["sgd", "sgd all", "adam all"])
def test_padding_changes_nothing(method: Method, down, o: optim.Optimizer) -> None:
    _, model, client = built()
    moments = optim.first_moments(o, client.params)
    batch = data(5)
    bare = train_step(method, model, o, Phase(), client, moments, batch, down, KEY, 0.1)
    full = train_step(method, model, o, Phase(), client, moments, padded(batch, 3), down, KEY, 0.1)
    assert_close(bare._replace(seen=()), full._replace(seen=()))
    assert_close(bare.seen, full.seen)
    _, loss, _ = train(method, model, o, (Phase(),), client, lambda e: [padded(batch, 3)], down, KEY, 0.1, 1)
    assert float(loss.weight) == 5
    assert float(loss.value) == pytest.approx(float(bare.loss), rel=1e-5)


# stacked


STACKED = {
    "local": (Local(), {}, Phase()),
    "fedproto": (FedProto(), PROTOTYPES, Phase()),
    "inloop": (FedProto(source="inloop"), PROTOTYPES, Phase()),
    "head": (Local(), {}, Phase(("head.",), plain=True)),
}


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("o", [OPTIMIZERS["sgd all"], OPTIMIZERS["adam all"]], ids=["sgd", "adam"])
def test_stacked_clients_train_as_they_do_alone(name: str, o: optim.Optimizer) -> None:
    """Two clients with BatchNorm, dropout and a padded batch, in one vmap."""
    method, down, phase = STACKED[name]
    _, model, first = built(image_net, seed=1)
    _, _, second = built(image_net, seed=2)
    clients = [first, second]
    keys = [random.key("client", i) for i in range(2)]
    steps = 3
    batches = [[data(6, 10 * i + s, (1, 4, 4)) for s in range(steps)] for i in range(2)]
    batches[1][2] = batches[1][2]._replace(mask=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))

    def step(client: Client, moments: optim.Moments, batch: Batch, key: Tensor):
        return train_step(method, model, o, phase, client, moments, batch, down, key, 0.05, stacked=True)

    def stack(trees):
        return tree_map(lambda *leaves: torch.stack(leaves), *trees)

    def alone(i: int) -> Iterator:
        client, moments = clients[i], optim.first_moments(o, under(clients[i].params, phase.trains), phase.plain)
        for s in range(steps):
            result = step(client, moments, batches[i][s], random.fold(keys[i], s))
            client, moments = result.client, result.moments
            yield result

    expected = [list(alone(i)) for i in range(2)]
    client = stack(clients)
    moments = stack([optim.first_moments(o, under(c.params, phase.trains), phase.plain) for c in clients])
    for s in range(steps):
        batch = stack([batches[i][s] for i in range(2)])
        key = stack([random.fold(keys[i], s) for i in range(2)])
        result = torch.func.vmap(step, in_dims=0)(client, moments, batch, key)
        client, moments = result.client, result.moments
        for i in range(2):
            mine = tree_map(lambda t, i=i: t[i], result)
            assert_close(mine, expected[i][s])
    assert client.buffers["body.bn.num_batches_tracked"].tolist() == [steps, steps]


@pytest.mark.parametrize("how", [{}, {"plain": True}, {"clip": False}], ids=["all", "plain", "no clip"])
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lanes_in_place_move_as_single_clients_do(name: str, listed: bool, how: dict[str, bool]) -> None:
    """Three steps with a pull that is not clipped, in three lanes of which one stands still."""
    o, rates = OPTIMIZERS[name], torch.tensor([0.1, 0.0, 0.3])

    def numbers(seed: int) -> Params:
        drawn = torch.Generator().manual_seed(seed)
        return {"a": torch.randn(3, 2, 4, generator=drawn), "b": torch.randn(3, 5, generator=drawn)}

    lanes = numbers(0)
    start, plain = {n: p.clone() for n, p in lanes.items()}, how.get("plain", False)
    moments = tree_map(torch.clone, optim.first_moments(o, lanes, plain))._replace(step=torch.zeros(3))
    singles = [{n: p[i] for n, p in start.items()} for i in range(3)]
    ahead = [optim.first_moments(o, single, plain) for single in singles]
    for step in range(1, 4):
        grads, pull = numbers(step), dict(reversed(numbers(-step).items()))  # they meet by name
        optim.update_(o, lanes, grads, moments, rates, **how, pull=pull, listed=listed)
        for i in range(3):
            mine = [{n: p[i] for n, p in tree.items()} for tree in (grads, pull)]
            singles[i], ahead[i] = optim.update(o, singles[i], mine[0], ahead[i], rates[i], **how, pull=mine[1])
    for name_, value in lanes.items():
        torch.testing.assert_close(value, torch.stack([single[name_] for single in singles]))
        assert torch.equal(value[1], start[name_][1])


@pytest.mark.parametrize(
    "o, slope, moved",
    [
        (optim.Optimizer(lr=1.0, clip=1e-6), 1e-6, 0.5e-6),  # 1e-6 is added to the length
        (optim.Optimizer(name="adam", lr=1.0), 1e-8, 0.5),  # 1e-8 is added to the root
    ],
    ids=["clip", "adam"],
)
def test_tiny_slopes_are_not_divided_by_nothing(o: optim.Optimizer, slope: float, moved: float) -> None:
    params, grads = ({"a": torch.full((2, 1), value, dtype=torch.float64)} for value in (0.0, slope))
    one = {"a": params["a"][0]}
    after, _ = optim.update(o, one, {"a": grads["a"][0]}, optim.first_moments(o, one), 1.0)
    assert float(after["a"]) == pytest.approx(-moved, rel=1e-4)
    moments = tree_map(torch.clone, optim.first_moments(o, params))._replace(step=torch.zeros(2))
    optim.update_(o, params, grads, moments, torch.ones(2, dtype=torch.float64))
    assert params["a"].flatten().tolist() == pytest.approx([-moved] * 2, rel=1e-4)


def test_an_optimiser_as_it_comes_is_plain_sgd_and_remembers_nothing() -> None:
    usual = {"name": "sgd", "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0, "lr_decay": 1.0, "clip": 0.0}
    made = asdict(optim.Optimizer())
    assert {key: value for key, value in made.items() if key not in SCHEDULE} == usual
    assert [optim.Optimizer().rate(round) for round in (0, 7)] == [0.01, 0.01]
    zeros = {"a": torch.zeros(2)}
    for o, first, second in (("sgd", {}, {}), ("momentum", zeros, {}), ("adam", zeros, zeros)):
        moments = optim.first_moments(OPTIMIZERS[o], {"a": torch.ones(2)})
        assert (moments.first.keys(), moments.second.keys()) == (first.keys(), second.keys())
        plain = optim.first_moments(OPTIMIZERS[o], {"a": torch.ones(2)}, plain=True)
        assert (plain.first, plain.second) == ({}, {})


def test_a_stacked_second_network_trains_as_it_does_alone() -> None:
    _, model, a = built(norm_net, seed=1)
    _, _, b = built(norm_net, seed=2)
    clients = [with_personal(a, b), with_personal(b, a)]
    batches = [data(6, i) for i in range(2)]
    method = Personal()
    moments = optim.first_moments(SGD, under(a.params, ()))

    def step(client: Client, batch: Batch) -> Client:
        return train_step(method, model, SGD, method.phases()[0], client, moments, batch, {}, KEY, 0.1, True).client

    together = torch.func.vmap(step)(
        tree_map(lambda *t: torch.stack(t), *clients), tree_map(lambda *t: torch.stack(t), *batches)
    )
    for i in range(2):
        assert_close(tree_map(lambda t, i=i: t[i], together), step(clients[i], batches[i]))
