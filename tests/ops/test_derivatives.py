"""Gradients and losses equal torch's to the bit, without loading its compiler."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from protofed.ops.derivatives import grad
from protofed.ops.losses import cross_entropy

RUN = """
import sys
from protofed import Experiment, run
same = ("clients=4", "rounds=1", "model=mlp_digits", "partition.shots=2", "record.enabled=false", "device=cpu")
run(Experiment.load("demo", *same, *sys.argv[2:]), sys.argv[1])
print(*(name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["method=fedproto", "method=creff"])
def test_the_first_round_does_not_wait_for_the_compiler(method: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path / "run"), method]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == []


def some_loss(inputs: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (inputs["weight"] * x).sin().sum() + (inputs["bias"].exp() * x).mean()
    return loss, {"loss": loss, "doubled": inputs["bias"] * 2}


def equal(left: Any, right: Any) -> bool:
    left, right = torch.utils._pytree.tree_leaves(left), torch.utils._pytree.tree_leaves(right)
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("mapping", [lambda function: function, lambda function: vmap(function, in_dims=(0, None))])
def test_gradients_are_those_of_torch(mapping: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    inputs, x = {"weight": torch.randn(3, 4), "bias": torch.randn(3, 4), "unused": torch.randn(3, 2)}, torch.randn(4)
    ours, theirs = (mapping(of(some_loss, has_aux=True))(inputs, x) for of in (grad, torch.func.grad))
    assert equal(ours, theirs)
    assert not ours[0]["unused"].any()


def test_a_loss_without_any_of_the_inputs_has_gradients_of_zero() -> None:
    assert equal(grad(lambda inputs, x: x.sum())({"a": torch.ones(2)}, torch.ones(3)), {"a": torch.zeros(2)})


def test_a_gradient_can_be_taken_of_a_gradient() -> None:
    x = torch.tensor(0.7)
    assert torch.equal(grad(grad(torch.sin))(x), torch.func.grad(torch.func.grad(torch.sin))(x))


def test_cross_entropy_is_that_of_torch_for_one_client_and_for_many() -> None:
    torch.manual_seed(0)
    logits, y = 5 * torch.randn(3, 7, 10), torch.randint(0, 10, (3, 7))
    theirs = torch.stack([F.cross_entropy(a, b, reduction="none") for a, b in zip(logits, y, strict=True)])

    def slope(loss: Callable[..., Tensor]) -> Tensor:
        leaf = logits[0].clone().requires_grad_()
        (loss(leaf, y[0]) * torch.arange(7)).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert torch.equal(torch.stack([cross_entropy(a, b) for a, b in zip(logits, y, strict=True)]), theirs)
    assert torch.equal(vmap(cross_entropy)(logits, y), theirs)
    assert torch.equal(slope(cross_entropy), slope(lambda a, b: F.cross_entropy(a, b, reduction="none")))
