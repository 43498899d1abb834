"""Models that a client names over the wire: only protofed's own, and only as large as can be served."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from protofed.config import schema
from protofed.config.registry import ModelChoice
from protofed.errors import UserError
from protofed.models import MODELS
from protofed.remote.protocol import Refused, one_line

PARAMETERS = 2**24  # of a model that the experiment does not name: ResNet18 has 11 million
ACTIVATIONS = 2**27  # numbers between the layers, for the made-up samples that an upload's form is made of


def shipped_model(model: dict[str, Any]) -> ModelChoice:
    """One of protofed's models, with fields that it takes; nothing is imported or built."""
    name = model.get("name")
    if not isinstance(name, str) or name not in MODELS:
        raise Refused(
            f"its model {one_line(name)[:80]!r} is not known here. Over the network only protofed's own models and "
            "those that the experiment names are taken: the operator must name it in [model] of the experiment"
        )
    options = {key: value for key, value in model.items() if key != "name"}
    if not all(isinstance(value, int | float) for value in options.values()):  # a word could be a file of the server's
        raise Refused(
            f"the fields of its model {name} are not all numbers. Over the network only numbers are taken: the "
            "operator must name this model in [model] of the experiment"
        )
    try:
        return ModelChoice(name, schema.check_section("model", MODELS[name], options))
    except UserError as error:
        raise Refused(f"its model is not known here: {one_line(error)}") from None


def made_up(classes: int) -> np.ndarray:
    """Labels of the samples that an upload's form is made of: two of every other class and three of the rest, so that
    only what does not count samples is 1."""
    return np.arange(classes).repeat(2 + np.arange(classes) % 2)


def check_size(choice: ModelChoice, shape: tuple[int, ...], classes: int) -> None:
    """Refused where a model has too many parameters, or too much between its layers; nothing is allocated."""
    between = 0

    def count(module: nn.Module, given: Any, made: Any) -> None:
        nonlocal between
        between += made.numel() if isinstance(made, Tensor) else 0

    with torch.device("meta"), torch.no_grad():
        module = choice(shape, classes)
        params = sum(p.numel() for p in module.parameters())
        if params > PARAMETERS:
            raise Refused(
                f"its model {choice.label[:80]} has {params:,} parameters, where at most {PARAMETERS:,} are allowed. "
                "The operator must name a larger one in [model] of the experiment"
            )
        for part in module.modules():
            part.register_forward_hook(count)
        module(torch.zeros(len(made_up(classes)), *shape))
    if between > ACTIVATIONS:
        raise Refused(
            f"its model {choice.label[:80]} makes {between:,} numbers between its layers, where at most "
            f"{ACTIVATIONS:,} are allowed"
        )
