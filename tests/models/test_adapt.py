"""Any module as a body and a head: what is found, what is computed, and what is refused."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from protofed import UserError
from protofed.method import Client, Params
from protofed.models.adapt import Adapt, adapt
from protofed.models.adapted import WithHead
from protofed.models.attention import open_attention
from protofed.models.functional import FunctionalModel, state
from protofed.models.own import call, handed, plain, same
from protofed.ops import random

X = torch.arange(18.0).reshape(3, 6) / 10


class Plain(nn.Module):
    """Whose last layer is known by what it gives alone."""

    def __init__(self, width: int = 5, out: int = 3) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, width), nn.Linear(width, out)

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.relu(self.a(x)))


class Resnet(nn.Module):
    """torchvision's names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.avgpool(F.relu(self.bn1(self.conv1(x)))).flatten(1))


class Convnext(nn.Module):
    """Whose classifier begins with maps."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, 4, 3)
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class Timm(nn.Module):
    """timm's get_classifier, with a pooling head in front."""

    def __init__(self, out: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.last = nn.Linear(4, out) if out else nn.Identity()

    def get_classifier(self) -> nn.Module:
        return self.last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.stem(x).mean((2, 3)))


class Bert(nn.Module):
    """Hugging Face's habits: token ids, dropout of attention weights, an output with logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.classifier = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None) -> Any:
        assert input_ids is not None
        q, k, v = self.qkv(self.words(input_ids)).chunk(3, -1)
        hidden = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if self.training else 0.0)
        hidden = F.dropout(hidden[:, 0], 0.5, self.training)
        return SimpleNamespace(loss=None, hidden=hidden, logits=self.classifier(hidden))


class Several(nn.Module):
    """A hidden layer that has the usual name, and a second head that is called last and returned first."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.main, self.side = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Any:
        z = torch.relu(self.fc(x))
        logits = self.main(z)
        return SimpleNamespace(side=self.side(z), logits=logits)


IMAGES = torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(12).reshape(3, 4) % 9
FOUND = [
    (Plain(), X, "b", 5),
    (nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3), nn.LogSoftmax(1)), X, "2", 7),
    (Resnet(), IMAGES, "fc", 4),
    (Convnext(), IMAGES, "classifier.2", 4),
    (Timm(), IMAGES, "last", 4),
    (Bert(), TOKENS, "classifier", 8),
    (Several(), X, "main", 5),
]


@pytest.mark.parametrize(("module", "x", "head", "dim"), FOUND, ids=lambda value: type(value).__name__)
def test_the_classifying_layer_is_found_and_nothing_is_changed(
    module: nn.Module, x: Tensor, head: str, dim: int
) -> None:
    before = {name: value.clone() for name, value in module.state_dict().items()}
    adapted: Any = adapt(module, x, 3, Adapt(), "it")
    assert adapted.dim == dim
    assert f"the input of layer {head}" in adapted.origin.told
    client = Client(*state(adapted))
    z, logits = FunctionalModel(adapted)(client, x)
    assert z.shape == (3, dim)
    out = module.eval()(x)
    own = getattr(out, "logits", out)
    assert torch.allclose(logits.log_softmax(1), own.log_softmax(1), atol=1e-5)
    moved = {name: value + 0.1 for name, value in client.params.items()}
    back = plain(adapted, moved, client.buffers)  # the user's own class, with a client's weights
    assert type(back) is type(module)
    assert set(back.state_dict()) == set(before)
    again = back(x)
    assert torch.allclose(
        getattr(again, "logits", again).log_softmax(1),
        FunctionalModel(adapted)(Client(moved, client.buffers), x)[1].log_softmax(1),
        atol=1e-5,
    )
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_randomness_in_a_forward_is_keyed_alone_and_stacked() -> None:
    adapted: Any = adapt(Bert(), TOKENS, 3, Adapt(), "it")
    assert adapted.draws_itself
    model, client = FunctionalModel(adapted), Client(*state(adapted))
    keys = torch.stack([random.key(1), random.key(2), random.key(1)])

    def scores(key: Tensor) -> Tensor:
        return model.training(client.buffers, key)(client, TOKENS)[1]

    one, other, again = torch.func.vmap(scores)(keys)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.allclose(one, scores(keys[0]), atol=1e-6)


class Dropping(nn.Module):
    """Drops numbers with a mask that `bernoulli_` fills."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.fc, self.head = form, nn.Linear(6, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Any:
        z = torch.relu(self.fc(x)) + 1
        if not self.training:
            return self.head(z)
        mask = torch.empty(z.shape) if "shared" in self.form else z.new_empty(z.shape)
        mask.fill_(7.0)  # what memory happens to hold
        if self.form == "shared parts":
            for row in mask:
                row.bernoulli_(0.5)
        elif "statement" in self.form:
            mask.bernoulli_(0.5)
        else:
            mask = mask.bernoulli_(0.5)
        mask.div_(0.5)
        return self.head(z * mask)


@pytest.mark.parametrize("form", ["shared statement", "statement", "shared expression", "expression"])
def test_a_mask_that_is_filled_in_place_is_keyed_alone_and_stacked(form: str) -> None:
    adapted: Any = adapt(Dropping(form), X, 3, Adapt(), "it")
    assert adapted.draws_itself
    model, client = FunctionalModel(adapted), Client(*state(adapted))
    keys = torch.stack([random.key(1), random.key(2), random.key(1)])

    def embedded(key: Tensor, x: Tensor) -> Tensor:
        return model.training(client.buffers, key).embed(client, x)

    one, other, again = torch.func.vmap(embedded)(keys, torch.stack([X] * 3))
    alone = embedded(keys[0], X)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.allclose(one, alone, atol=1e-6)
    kept = alone != 0
    assert 0.3 < kept.float().mean() < 0.7
    assert torch.allclose(alone[kept], 2 * model.embed(client, X)[kept], atol=1e-5)

    def height(params: Params, key: Tensor, x: Tensor) -> Tensor:
        return model.training(client.buffers, key).embed(client._replace(params=params), x).sum()

    slopes = torch.func.vmap(torch.func.grad(height), in_dims=(None, 0, 0))(client.params, keys, torch.stack([X] * 3))
    for name, slope in torch.func.grad(height)(client.params, keys[0], X).items():
        assert torch.allclose(slopes[name][0], slope, atol=1e-5), "with gradients too"


def test_a_mask_that_is_filled_in_parts_is_keyed_alone_and_never_left_as_memory_was() -> None:
    adapted: Any = adapt(Dropping("shared parts"), X, 3, Adapt(), "it")
    model, client = FunctionalModel(adapted), Client(*state(adapted))

    def embedded(key: Tensor, x: Tensor) -> Tensor:
        return model.training(client.buffers, key).embed(client, x)

    alone = embedded(random.key(1), X)
    kept = alone != 0
    assert torch.allclose(alone[kept], 2 * model.embed(client, X)[kept], atol=1e-5)
    keys = torch.stack([random.key(1), random.key(2)])
    with pytest.raises(RuntimeError, match="a part of a tensor that stacked clients share"):  # so they are not stacked
        torch.func.vmap(embedded)(keys, torch.stack([X] * 2))


def test_tied_lazy_and_partly_frozen_modules_work() -> None:
    tied = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    tied[2].weight = tied[0].weight
    adapted: Any = adapt(tied, X, 3, Adapt(), "it")
    client = Client(*state(adapted))
    assert "body.net.2.weight" not in client.params
    moved = {name: value * 1.5 for name, value in client.params.items()}
    back: Any = plain(adapted, moved, {})
    assert back[0].weight is back[2].weight
    assert torch.allclose(FunctionalModel(adapted)(Client(moved, {}), X)[1], back(X), atol=1e-5)

    lazy: Any = adapt(nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(3)), X, 3, Adapt(), "it")
    assert lazy.dim == 4

    partly = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    partly[0].requires_grad_(False)
    adapted = adapt(partly, X, 3, Adapt(), "it")
    assert not adapted.frozen
    assert set(state(adapted)[0]) == {"body.net.2.weight", "body.net.2.bias", "head.weight", "head.bias"}
    assert "body.net.0.weight" in state(adapted)[1]


def test_projections_new_heads_and_encoders_without_one() -> None:
    adapted: Any = adapt(Plain(), X, 3, Adapt(project=2), "it")
    assert adapted.dim == 2
    client = Client(*state(adapted))
    back: Any = plain(adapted, client.params, client.buffers)
    assert type(back) is Plain
    assert torch.allclose(back(X), FunctionalModel(adapted)(client, X)[1], atol=1e-6)

    for module, how in (
        (nn.Sequential(), Adapt(head="linear")),  # an encoder without a head
        (Plain(out=9), Adapt("a", "linear")),
        (Plain(out=9), Adapt(lambda net, x: net.a(x) ** 2, project=4)),
    ):
        adapted = adapt(module, X, 3, how, "it")
        client = Client(*state(adapted))
        back = plain(adapted, client.params, client.buffers)
        assert isinstance(back, WithHead)
        assert torch.allclose(back(X), FunctionalModel(adapted)(client, X)[1], atol=1e-5)


class Squeezes(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)).squeeze())


class Noisy(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x + torch.rand_like(x) if self.training else x))


class Scaled(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x))) / 2


def tied_head() -> nn.Module:
    module = Plain(width=3)
    module.a = nn.Linear(6, 3)
    module.b = nn.Linear(3, 3)
    middle = nn.Linear(3, 3)
    module.b.weight = middle.weight
    return nn.Sequential(module.a, middle, module.b)


@pytest.mark.parametrize(
    ("module", "how", "said"),
    [
        (Plain(out=7), Adapt(), r"its layer 'b' gives 7 numbers for each sample, but there are 3 classes.*labels=\["),
        (
            nn.Sequential(Plain(out=1), nn.Sigmoid()),
            Adapt(),
            "its layer '0.b' gives 1 numbers for each sample, but there are 3",
        ),
        (nn.Linear(6, 3), Adapt(), "it has no layers inside, but prototypes need a body"),
        (Plain(), Adapt(embedding="c"), r"embedding = 'c': it has no such layer. It has: a \(5,\), b \(3,\)"),
        (Plain(), Adapt(embedding="a"), "what it returns is not what b gives"),
        (Plain(), Adapt(head="c"), "head = 'c': it has no such layer"),
        (Scaled(), Adapt(), r"classifying layer of it was not found.*a \(5,\), b \(3,\)"),
        (Timm(0), Adapt(), "not found.*head='linear'"),
        (Squeezes(), Adapt(), "takes 3 samples at once, but not one"),
        (Noisy(), Adapt(), "draws random numbers in its forward"),
        (tied_head(), Adapt(), "are one tensor .tied."),
        (Plain().requires_grad_(False), Adapt(), "b.weight has requires_grad=False"),
        (nn.Linear(4, 3), Adapt(), r"cannot take inputs of shape \(6,\)"),
        (3, Adapt(), "is int, not a torch.nn.Module"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(module: Any, how: Adapt, said: str) -> None:
    x = IMAGES if isinstance(module, Timm) else X
    with pytest.raises(UserError, match=said) as caught:
        adapt(module, x, 3, how, "it")
    assert "\n" not in str(caught.value)


def test_clients_of_equal_modules_are_trained_at_once_and_others_apart() -> None:
    one, other, wide = Plain(), Plain(), Plain(6)
    odd = Plain()
    odd.scale = 2.0
    assert same(one, other)
    assert not same(one, wide)
    assert not same(one, odd)
    found = handed([one, other, wide, odd], 4, Adapt())
    assert [item.label for item in found] == ["Plain", "Plain", "Plain-2", "Plain-3"]
    assert all(item.own_weights for item in found)
    assert not any(item.own_weights for item in handed([one] * 3, 3, Adapt()))
    assert [item.name for item in handed(Plain, 2, Adapt())] == ["test_adapt:Plain"] * 2
    assert handed(one, 1, Adapt())[0].name == "memory:test_adapt:Plain"


def test_classes_and_functions_are_called_as_they_can_be() -> None:
    def known(in_features: int, num_classes: int = 10) -> nn.Module:
        return nn.Linear(in_features, num_classes)

    assert call(known, {}, (2, 3), 4, "it").weight.shape == (4, 6)
    assert call(lambda classes: nn.Linear(2, classes), {}, (2,), 4, "it").weight.shape == (4, 2)
    assert call(lambda form, count: nn.Linear(form[0], count), {}, (2,), 4, "it").weight.shape == (4, 2)
    assert call(lambda: nn.Linear(2, 4), {}, (2,), 4, "it").weight.shape == (4, 2)
    assert call(lambda classes, width: nn.Linear(width, classes), {"width": 7}, (2,), 4, "it").weight.shape == (4, 7)
    with pytest.raises(UserError, match="takes a, b, c, which protofed does not know"):
        call(lambda a, b, c: None, {}, (2,), 4, "it")
    with pytest.raises(UserError, match="makes int, not a torch"):
        call(lambda: 3, {}, (2,), 4, "it")


def test_open_attention_is_torchs_own() -> None:
    """With masks of both kinds, with samples first or second, as a part of an encoder, and for one sample."""
    torch.manual_seed(0)
    x, causal = torch.randn(3, 5, 8), torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    for first in (True, False):
        theirs = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=first).eval()
        given = x if first else x.transpose(0, 1)
        ours = copy.deepcopy(theirs)
        open_attention(ours)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        for masks in ({}, {"attn_mask": causal, "key_padding_mask": padding}, {"average_attn_weights": False}):
            for one, other in zip(
                ours(given, given, given, **masks), theirs(given, given, given, **masks), strict=True
            ):
                assert torch.allclose(one, other, atol=1e-6)
    assert torch.allclose(ours(x[0], x[0], x[0])[0], theirs(x[0], x[0], x[0])[0], atol=1e-6)
    layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    same = copy.deepcopy(layer)
    open_attention(same)
    with torch.no_grad():
        told = same(x, src_key_padding_mask=padding)
        assert torch.allclose(told[~padding], layer(x, src_key_padding_mask=padding)[~padding], atol=1e-5)
