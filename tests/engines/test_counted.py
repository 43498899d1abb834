"""Bytes and operations are the same counted from shapes and in a real run, and those of torch's own counter."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from protofed.engines.resources import Products, counted_bytes, on_meta
from protofed.method import Client
from protofed.models import MODELS
from protofed.models.functional import FunctionalModel, state
from protofed.ops import random
from protofed.ops.derivatives import grad

SHAPES = {"cnn_digits": (1, 8, 8), "mlp_spiral": (2,), "cnn_mnist": (1, 28, 28), "cnn_fednh": (3, 32, 32)}


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_needs_the_same_counted_in_any_way(name: str) -> None:
    shape = SHAPES[name]
    module = MODELS[name](shape, 10)
    model, client, x = FunctionalModel(module), Client(*state(module)), torch.zeros(2, *shape)
    with torch.no_grad(), FlopCounterMode(display=False) as theirs:
        model(*on_meta((client, x)))
    with torch.no_grad(), Products() as ours:
        model(client, x)
    assert 0 < ours.total == theirs.get_total_flops()

    def step(of: Client, key: torch.Tensor) -> tuple[int, int]:
        def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return model.training(of.buffers, key)(Client(params, of.buffers), x)[1].square().sum()

        return counted_bytes(grad(loss), of.params, x, as_they_are=of is client)

    assert step(client, random.key(0)) == step(*on_meta((client, random.key(0))))


def test_products_inside_other_operations_count() -> None:
    x = torch.zeros(1, 5, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train()  # eval() is one kernel
    with torch.no_grad(), FlopCounterMode(display=False) as theirs:
        layer(x)
    with torch.no_grad(), Products() as ours:
        layer(x)
    assert 0 < ours.total == theirs.get_total_flops()
