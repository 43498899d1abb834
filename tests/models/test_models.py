import inspect
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from annotated_types import Ge
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call

from protofed.errors import UserError
from protofed.models import MODELS, WithMask, layers
from protofed.models.functional import unfit

DIGITS = ["cnn_digits", "cnn_digits_8", "cnn_digits_16", "cnn_digits_24", "cnn_digits_deep", "mlp_digits"]


WITHOUT_WEIGHTS = [name for name in MODELS if not getattr(MODELS[name], "pretrained", False)]  # see test_pretrained.py
NATURAL: dict[str, tuple[tuple[int, ...], int]] = {
    "bag_of_words": ((12,), 20),
    "cnn_audio": ((1, 32, 32), 10),
    "cnn_series": ((1, 128, 6), 7),
    "mlp_table": ((13,), 2),
}


def inputs(name: str, *size: int) -> Tensor:
    """Inputs (*size, ...) of the shape and type that a model was made for."""
    shape, _ = home(name)
    return torch.randint(0, 10_002, (*size, *shape)) if name == "bag_of_words" else torch.randn(*size, *shape)


def home(name: str) -> tuple[tuple[int, ...], int]:
    """The input shape and the number of classes a model was made for (smaller images for ResNet18 and FEMNIST)."""
    if name in DIGITS:
        return (1, 8, 8), 10
    if name == "mlp_spiral":
        return (2,), 6
    if name.startswith("resnet18"):
        return (3, 16, 16), 10
    if name == "cnn_fednh":
        return (3, 32, 32), 10
    if name in NATURAL:
        return NATURAL[name]
    return (1, 28, 28), 62 if name.startswith("cnn_femnist") else 10


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def make(name: str, shape: tuple[int, ...], classes: int, **fields: object) -> Any:
    return MODELS[name](shape, classes, **fields)


def outline(name: str, shape: tuple[int, ...], classes: int, **fields: object) -> Any:
    """The model without its numbers."""
    with torch.device("meta"):
        return MODELS[name](shape, classes, **fields)


@pytest.mark.parametrize(
    "name, shape, classes, params",
    [
        ("cnn_mnist", (1, 28, 28), 10, 21_840),
        ("cnn_mnist_18", (1, 28, 28), 10, 19_738),
        ("cnn_mnist_20", (1, 28, 28), 10, 21_840),
        ("cnn_mnist_22", (1, 28, 28), 10, 23_942),
        ("cnn_femnist", (1, 128, 128), 62, 849_332),
        ("cnn_femnist_18", (1, 128, 128), 62, 764_730),
        ("cnn_femnist_20", (1, 128, 128), 62, 849_332),
        ("cnn_femnist_22", (1, 128, 128), 62, 933_934),
        ("resnet18", (3, 32, 32), 10, 11_181_642),
        ("resnet18_s14", (3, 32, 32), 10, 11_181_642),
        ("resnet18_s22", (3, 32, 32), 10, 11_181_642),
        ("cnn_fednh", (3, 32, 32), 10, 797_952),
        ("cnn_fednh", (3, 32, 32), 100, 815_232),
        ("resnet18_gn", (3, 64, 64), 10, 11_173_952),
        ("mlp_mpfedcl", (1, 28, 28), 10, 798_474),
    ],
)
def test_published_parameter_counts(name: str, shape: tuple[int, ...], classes: int, params: int) -> None:
    assert count(outline(name, shape, classes)) == params


@pytest.mark.parametrize("name", DIGITS)
def test_digits_models_are_small_and_share_one_embedding_size(name: str) -> None:
    model = outline(name, (1, 8, 8), 10)
    assert count(model) < 20_000
    assert model.dim == 32


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_forward_and_backward(name: str) -> None:
    torch.manual_seed(0)
    shape, classes = home(name)
    model = make(name, shape, classes)
    x = inputs(name, 5)
    z, logits = model(x)
    assert z.shape == (5, model.dim)
    assert logits.shape == (5, classes)
    assert isinstance(model.dim, int)
    if name == "mlp_spiral":  # its classes spread over the whole plane
        assert isinstance(model.body[-1], nn.Linear)
    else:
        assert z.min() >= 0
    # FedNH's heads have no bias
    bias_free = name in ("cnn_fednh", "resnet18_gn", "mlp_spiral")
    heads = [n for n, _ in model.named_parameters() if n.startswith("head.")]
    assert heads == (["head.fc.weight"] if bias_free else ["head.fc.weight", "head.fc.bias"])

    (logits.square().sum() + z.sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_functional_call_and_parts(name: str) -> None:
    shape, classes = home(name)
    model = make(name, shape, classes).eval()
    x = inputs(name, 3)
    z, logits = model(x)
    torch.testing.assert_close(model.head(model.body(x)), logits)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    hollow = outline(name, shape, classes).eval()
    again = functional_call(hollow, state, (x,))
    torch.testing.assert_close(again[0], z)
    torch.testing.assert_close(again[1], logits)


@pytest.mark.parametrize("name", ["cnn_mnist", "cnn_fednh", "cnn_digits_deep", "mlp_mpfedcl", *NATURAL])
def test_stacked_clients_equal_single_ones(name: str) -> None:
    shape, classes = home(name)
    models = [make(name, shape, classes).eval() for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)
    x = inputs(name, 3, 2)
    hollow = outline(name, shape, classes).eval()

    def one(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(hollow, params | buffers, (x,))[1]

    stacked = torch.vmap(one)(params, buffers, x)
    single = torch.stack([model(inputs)[1] for model, inputs in zip(models, x, strict=True)])
    torch.testing.assert_close(stacked, single, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("cnn_mnist", (3, 32, 32)),
        ("cnn_mnist", (1, 16, 16)),
        ("cnn_mnist", (1, 20, 33)),
        ("cnn_femnist", (1, 14, 14)),
        ("cnn_femnist", (3, 64, 64)),
        ("cnn_fednh", (1, 28, 28)),
        ("cnn_fednh", (3, 64, 64)),
        ("cnn_digits", (1, 4, 4)),
        ("cnn_digits", (3, 28, 30)),
        ("cnn_digits_deep", (1, 4, 5)),
        ("mlp_digits", (64,)),
        ("mlp_table", (5, 4)),
        ("cnn_series", (30, 3)),
        ("cnn_series", (1, 8, 1)),
        ("cnn_audio", (1, 40, 100)),
        ("mlp_mpfedcl", (3, 32, 32)),
        ("mlp_mpfedcl", (800,)),
        ("resnet18", (1, 28, 28)),
        ("resnet18", (3, 64, 64)),
        ("resnet18_gn", (1, 8, 8)),
    ],
)
def test_other_input_shapes(name: str, shape: tuple[int, ...]) -> None:
    z, logits = outline(name, shape, 7)(torch.empty(2, *shape, device="meta"))
    assert logits.shape == (2, 7)
    assert z.ndim == 2


@pytest.mark.parametrize(
    "name, shape, words",
    [
        ("cnn_mnist", (1, 8, 8), ["cnn_mnist", "(1, 8, 8)", "16x16", "cnn_digits", "data.size"]),
        ("cnn_mnist_22", (1, 15, 28), ["cnn_mnist", "16x16"]),
        ("cnn_mnist", (64,), ["cnn_mnist", "(64,)", "mlp_digits"]),
        ("cnn_femnist", (1, 13, 13), ["cnn_femnist", "14x14", "data.size"]),
        ("cnn_fednh", (3, 8, 8), ["cnn_fednh", "16x16", "data.size"]),
        ("cnn_digits", (1, 3, 3), ["cnn_digits", "4x4", "mlp_digits"]),
        ("cnn_digits_deep", (1, 3, 8), ["cnn_digits_deep", "4x4", "mlp_digits"]),
        ("resnet18", (784,), ["resnet18", "(784,)", "mlp_mpfedcl"]),
        ("cnn_series", (3, 32, 32), ["cnn_series", "(3, 32, 32)", "(time, channels)"]),
        ("cnn_audio", (64,), ["cnn_audio", "(64,)", "mlp_digits"]),
        ("resnet18_gn", (784,), ["resnet18_gn", "(784,)", "mlp_mpfedcl"]),
    ],
)
def test_misfit_is_one_line_with_a_remedy(name: str, shape: tuple[int, ...], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        make(name, shape, 10)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_missing_value_is_neither_the_mean_nor_infinite() -> None:
    mask = WithMask()
    x = torch.tensor([[1.5, math.nan, 0.0]])
    assert mask(x).tolist() == [[1.5, 0.0, 0.0, 0.0, 1.0, 0.0]]
    model = make("mlp_table", (3,), 2)
    assert not torch.equal(model(x)[1], model(x.nan_to_num(0))[1])
    model(x)[1].sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_bag_of_words_does_not_count_padding() -> None:
    model = make("bag_of_words", (4,), 3, words=10, width=5)
    mean = model.body.mean(torch.tensor([[3, 4, 0, 0], [0, 0, 0, 0]]))
    torch.testing.assert_close(mean[0], model.body.mean.vectors.weight[[3, 4]].mean(0))
    assert mean[1].tolist() == [0.0] * 5
    short, long = (model.body(torch.tensor([tokens])) for tokens in ([3, 4], [3, 4, 0, 0]))
    torch.testing.assert_close(short, long)


def test_series_in_both_forms_and_sounds_at_any_time() -> None:
    model = make("cnn_series", (1, 16, 3), 4)
    x = torch.randn(2, 1, 16, 3)
    torch.testing.assert_close(model(x)[1], make_like(model, "cnn_series", (16, 3), 4)(x[:, 0])[1])
    sound = torch.zeros(1, 1, 32, 64)
    sound[..., 32:36] = torch.randn(32, 4)  # in the middle, so that no edge is near
    model = make("cnn_audio", (1, 32, 64), 10)
    torch.testing.assert_close(model(sound)[1], model(sound.roll(4, -1))[1], rtol=1e-4, atol=1e-5)


def make_like(model: Any, name: str, shape: tuple[int, ...], classes: int) -> Any:
    other = make(name, shape, classes)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize(
    ("name", "x", "words"),
    [
        ("mlp_digits", torch.tensor([[0.0, 1.0], [math.nan, 1.0]]), "sample 1 holds NaN"),
        ("bag_of_words", torch.tensor([[1, 10]]), "token 10, but it knows 10. Set model.words = 11"),
        ("bag_of_words", torch.tensor([[-1, 3]]), "number from 0"),
        ("bag_of_words", torch.tensor([[1.0, 2.0]]), "not token ids"),
        ("mlp_table", torch.tensor([[0.0, math.nan]]), ""),
        ("bag_of_words", torch.tensor([[0, 9]]), ""),
    ],
)
def test_what_a_model_cannot_take_is_said(name: str, x: Tensor, words: str) -> None:
    fields = {"words": 10} if name == "bag_of_words" else {}
    said = unfit(make(name, (2,), 3, **fields), x)
    assert words in said
    assert bool(words) == bool(said)
    own = nn.Sequential(WithMask(), nn.Linear(4, 3))
    assert not unfit(own, torch.tensor([[0.0, math.nan]]))


def test_convolutions_are_a_prefix() -> None:
    """FedProto's FedPer shares the two convolutions: 5,280 parameters on MNIST, 5,120 on FEMNIST."""
    for name, shared in ("cnn_mnist", 5_280), ("cnn_femnist", 5_120):
        model = outline(name, *home(name))
        assert sum(p.numel() for n, p in model.named_parameters() if n.startswith("body.conv")) == shared


def test_stride_settings_of_resnet18() -> None:
    a, b = (outline(name, (3, 32, 32), 10) for name in ("resnet18_s14", "resnet18_s22"))
    shapes = [{n: v.shape for n, v in m.state_dict().items()} for m in (a, b)]
    assert shapes[0] == shapes[1]
    x = torch.empty(2, 3, 32, 32, device="meta")
    maps = [m.body[:-2](x).shape for m in (a, b)]  # before the average and the flattening
    assert maps == [(2, 512, 1, 1), (2, 512, 1, 1)]
    assert (a.body.conv1.stride, a.body.maxpool.stride) == ((1, 1), 4)
    assert (b.body.conv1.stride, b.body.maxpool.stride) == ((2, 2), 2)


def test_block_norm_leaves_the_stem_and_the_shortcuts() -> None:
    model = make("resnet18_gn", (3, 16, 16), 10, block_norm=False)
    norms = [n for n, m in model.body.named_modules() if isinstance(m, nn.GroupNorm)]
    assert norms == ["bn1", *(f"layer{i}.0.downsample.1" for i in (2, 3, 4))]
    assert all(m.num_groups == 2 for m in model.modules() if isinstance(m, nn.GroupNorm))
    assert not [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    z, logits = model(torch.randn(2, 3, 16, 16))
    assert z.shape == (2, 512)
    assert logits.isfinite().all()


def test_fields_change_the_model() -> None:
    assert outline("cnn_mnist", (1, 28, 28), 10, channels=18).body.conv2.out_channels == 18
    assert outline("mlp_mpfedcl", (64,), 10, hidden=20, dim=12).dim == 12
    assert outline("mlp_spiral", (2,), 6, width=8, dim=3).dim == 3
    assert outline("mlp_digits", (1, 8, 8), 10, hidden=8, dim=5).dim == 5
    clipped = make("mlp_mpfedcl", (64,), 10, output_relu=True)
    plain = make("mlp_mpfedcl", (64,), 10)
    x = torch.randn(20, 64)
    assert clipped(x)[1].min() == 0
    assert plain(x)[1].min() < 0


def test_dropout_of_the_embedding_is_in_the_head() -> None:
    """The embedding that becomes a prototype is the one before the dropout."""
    model = make("cnn_mnist", (1, 28, 28), 10)
    assert isinstance(model.head.dropout, nn.Dropout)
    z = torch.ones(4, 50)
    assert not torch.equal(model.head(z), model.head(z))
    assert [type(m) for m in model.body if isinstance(m, nn.Dropout | nn.Dropout2d)] == [nn.Dropout2d]


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_signature_and_docstring_tell_the_fields(name: str) -> None:
    parameters = list(inspect.signature(MODELS[name]).parameters.values())
    assert [p.name for p in parameters[:2]] == ["shape", "classes"]
    for field in parameters[2:]:
        assert field.kind is inspect.Parameter.KEYWORD_ONLY
        assert field.default is not inspect.Parameter.empty
        assert field.annotation is not inspect.Parameter.empty
        assert f"\n    {field.name}: " in (MODELS[name].__doc__ or "")
        if isinstance(field.default, int) and not isinstance(field.default, bool):
            assert Ge(1) in field.annotation.__metadata__


def test_variants_carry_their_defaults() -> None:
    fields = inspect.signature(MODELS["resnet18_s14"]).parameters
    assert {n: fields[n].default for n in ("stem_stride", "pool_stride")} == {"stem_stride": 1, "pool_stride": 4}
    assert inspect.signature(MODELS["cnn_femnist_22"]).parameters["channels"].default == 22


def torchvision_state(counters: bool = True) -> dict[str, Tensor]:
    """Random tensors by the names and shapes of torchvision's resnet18."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    state = {"conv1.weight": draw(64, 3, 7, 7)}

    def norm(name: str, channels: int) -> None:
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            state[f"{name}.{leaf}"] = draw(channels)
        if counters:
            state[f"{name}.num_batches_tracked"] = torch.tensor(3)

    norm("bn1", 64)
    before = 64
    for layer, channels in enumerate((64, 128, 256, 512), start=1):
        for block in (0, 1):
            at = f"layer{layer}.{block}"
            state[f"{at}.conv1.weight"] = draw(channels, channels if block else before, 3, 3)
            norm(f"{at}.bn1", channels)
            state[f"{at}.conv2.weight"] = draw(channels, channels, 3, 3)
            norm(f"{at}.bn2", channels)
            if layer > 1 and block == 0:
                state[f"{at}.downsample.0.weight"] = draw(channels, before, 1, 1)
                norm(f"{at}.downsample.1", channels)
        before = channels
    return state | {"fc.weight": draw(1000, 512), "fc.bias": draw(1000)}


def test_torchvision_names() -> None:
    own = outline("resnet18", (3, 32, 32), 10).body.state_dict()
    theirs = {n: v for n, v in torchvision_state().items() if not n.startswith("fc.")}
    assert {n: v.shape for n, v in own.items()} == {n: v.shape for n, v in theirs.items()}


@pytest.mark.parametrize(
    "file, counters, save", [("r.pth", False, torch.save), ("r.safetensors", True, save_file)], ids=["pth", "st"]
)
def test_pretrained_weights(tmp_path: Path, file: str, counters: bool, save: Callable[..., None]) -> None:
    path = tmp_path / file
    state = torchvision_state(counters)
    save(state, path)
    torch.manual_seed(0)
    model = make("resnet18_s14", (1, 32, 32), 10, weights=str(path))
    for name, value in model.body.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        taken = not name.startswith(("conv1.", "bn1."))
        assert (value.shape == state[name].shape and torch.equal(value, state[name])) == taken, name
    assert torch.equal(model.body.bn1.running_var, torch.ones(64))


def test_unfit_weights(tmp_path: Path) -> None:
    def refuses(path: Path, word: str) -> None:
        with pytest.raises(UserError, match=word) as caught:
            make("resnet18", (3, 32, 32), 10, weights=str(path))
        assert "\n" not in str(caught.value)
        assert path.name in str(caught.value)

    refuses(tmp_path / "absent.pth", "there is no file")
    for name in ("garbage.pth", "garbage.safetensors"):
        (tmp_path / name).write_text("not tensors")
        refuses(tmp_path / name, "cannot be read")
    torch.save([1, 2], tmp_path / "list.pth")
    refuses(tmp_path / "list.pth", "is not in it")
    save_file({"layer1.0.conv1.weight": torch.zeros(64, 64, 1, 1)}, tmp_path / "other.safetensors")
    refuses(tmp_path / "other.safetensors", r"layer1.0.conv1.weight has shape \(64, 64, 1, 1\)")


@pytest.mark.parametrize("long", [10, 10_000])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(5, 1, 0), (3, 2, 1), (3, 1, 1), ((3, 5), (2, 1), (0, 2)), (1, 2, 0)]
)
def test_a_convolution_as_a_product_is_the_same(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, stride: Any, padding: Any, long: int
) -> None:
    """Values and all gradients, of stacked clients; wide: only the gradient to the weights is a product."""
    monkeypatch.setattr(layers, "LONG", long)
    monkeypatch.setattr(layers, "SMALL", 0)
    conv = nn.Conv2d(3, 4, kernel, stride, padding)
    product, wide = layers.MatrixConv(conv, always=True), layers.MatrixConv(conv, always=False)
    g = torch.Generator().manual_seed(0)
    params = {n: torch.randn(2, *p.shape, generator=g) for n, p in conv.named_parameters()}
    x = torch.randn(2, 5, 3, 12, 11, generator=g)

    def loss(module: nn.Module) -> Any:
        def one(params: Any, x: Any) -> Any:
            out = torch.func.functional_call(module, params, (x,))
            return (out**2).sum(), out

        return torch.func.vmap(torch.func.grad(one, argnums=(0, 1), has_aux=True))(params, x)

    torch.testing.assert_close(loss(product), loss(conv), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss(wide), loss(conv), rtol=1e-4, atol=1e-4)
    right = loss(conv)
    with torch.autocast("cpu", torch.bfloat16):
        for module in (product, wide):
            torch.testing.assert_close(loss(module), loss(conv), rtol=0.05, atol=2.0)
    assert wide.to("meta")(x[0].to("meta")).shape == right[1].shape[1:]  # where only shapes are asked for
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.float32)
    torch.testing.assert_close(loss(wide), right, rtol=1e-4, atol=1e-4)
    x = x[:, :0]  # no images
    torch.testing.assert_close(loss(product), loss(conv))


def test_which_convolutions_become_products(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Any]()
    product = layers._conv
    monkeypatch.setattr(layers, "_conv", lambda *inputs: (made.append(inputs), product(*inputs))[1])

    def changed(conv: nn.Conv2d, rounded: bool, images: int) -> bool:
        made.clear()
        net, x = nn.Sequential(conv), torch.randn(images, conv.in_channels, 32, 32)
        before = net(x)
        layers.matrix_convs(net, rounded)
        torch.testing.assert_close(net(x), before, rtol=1e-4, atol=1e-4)
        return bool(made)

    assert changed(nn.Conv2d(3, 64, 5), rounded=True, images=64)
    assert changed(nn.Conv2d(32, 64, 3), rounded=False, images=64)
    assert not changed(nn.Conv2d(32, 64, 3), rounded=True, images=64)
    assert changed(nn.Conv2d(32, 64, 3), rounded=True, images=2)
    for odd in ({"groups": 3}, {"dilation": 2}, {"padding": "same"}, {"padding": 1, "padding_mode": "circular"}):
        assert not changed(nn.Conv2d(3, 3, 3, **odd), rounded=False, images=2)  # type: ignore[arg-type]


def test_a_mean_over_images_is_the_same_and_known_to_vmap() -> None:
    x = torch.randn(3, 2, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((1, 1)), nn.AdaptiveAvgPool2d(2))
    right = torch.stack([net[1](one) for one in x])
    layers.plain_means(net)
    assert [isinstance(m, layers.Mean2d) for m in net] == [True, True, False]
    last = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    for images in (x, last):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(torch.func.vmap(net[1])(images), right, rtol=0, atol=1e-7)


def test_pools_in_whole_tensors_are_the_same() -> None:
    x = torch.randn(2, 3, 7, 10, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0, 0] = torch.nan
    torch.testing.assert_close(layers.Pool2x2()(x), nn.MaxPool2d(2)(x), equal_nan=True, rtol=0, atol=0)
    pools = (layers.Pool2x2(), nn.MaxPool2d(2))
    slopes = [torch.func.grad(lambda x, pool=pool: (pool(x) ** 2).sum())(x[1]) for pool in pools]
    torch.testing.assert_close(*slopes, rtol=0, atol=0)
    net = nn.Sequential(nn.MaxPool2d(2), nn.MaxPool2d(3), nn.MaxPool2d(2, stride=1), nn.MaxPool2d(2, ceil_mode=True))
    layers.plain_pools(net)
    assert [isinstance(m, layers.Pool2x2) for m in net] == [True, False, False, False]
