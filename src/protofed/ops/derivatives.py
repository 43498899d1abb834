"""Gradients of stacked clients without torch's compiler.

`torch.func.grad` loads the compiler (torch._dynamo) only to tell it to stand aside. That takes longer than everything
else that a run does before its first round has ended.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms as levels
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


def grad(function: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """The gradient of a function by its first argument, a tree of tensors, as `torch.func.grad` gives it.

    `has_aux`: the function returns its value and something else, which comes after the gradient."""

    def gradient(inputs: Any, *rest: Any) -> Any:
        with recorded(inputs, rest) as (inputs, rest, slopes):
            output = function(inputs, *rest)
            return slopes(*output) if has_aux else slopes(output, ())[0]

    return gradient


@contextmanager
def recorded(inputs: Any, rest: Any = ()) -> Iterator[tuple[Any, Any, Callable[[Tensor, Any], tuple[Any, Any]]]]:
    """Both trees as a loss must take them inside, and a function that turns the loss, and anything else that was
    computed with it, into the gradient by `inputs` and that."""
    message = "gradients within torch.vmap cannot use hooks on saved tensors"
    hooks_off = torch.autograd.graph.disable_saved_tensors_hooks(message)
    with hooks_off, levels.grad_increment_nesting() as level, torch.enable_grad():
        inputs, rest = levels._wrap_all_tensors((inputs, rest), level)
        tree_map(partial(levels._create_differentiable, level=level), inputs)

        def slopes(value: Tensor, aux: Any) -> tuple[Any, Any]:
            leaves, form = tree_flatten(inputs)
            found: Sequence[Tensor | None] = [None] * len(leaves)  # of a loss that does not depend on any of them
            if value.requires_grad:
                found = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
            made = [torch.zeros_like(x) if slope is None else slope for x, slope in zip(leaves, found, strict=True)]
            gradient, others = levels._undo_create_differentiable((tree_unflatten(made, form), aux), level)
            return gradient, others

        yield inputs, rest, slopes
