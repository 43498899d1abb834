"""Models of the user's own: classes and functions by import path, and modules handed in by a script."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from protofed.errors import UserError, did_you_mean, option
from protofed.importing import MEMORY, error_in_words, imported, path_of
from protofed.models.adapt import Adapt, adapt
from protofed.models.adapted import Adapted
from protofed.models.mlp import Net

CLASSES = ("classes", "num_classes", "n_classes", "num_labels", "n_labels", "out_features", "output_dim", "out_dim")
SHAPE = ("shape", "input_shape", "in_shape")
WIDTH = ("in_features", "input_dim", "in_dim", "n_features", "num_features")
CHANNELS = ("in_channels", "in_chans", "channels_in")
KEYS = tuple(Adapt.__dataclass_fields__)  # of [model], in addition to what the class takes
Build = Callable[[tuple[int, ...], int, Tensor], nn.Module]  # input shape, classes, some samples


class Handed(NamedTuple):
    """A client's model as a script gives it."""

    label: str  # equal for clients that can be trained at once
    name: str  # in the experiment's file
    build: Build
    own_weights: bool  # whether it differs from its neighbours in the weights it begins with


def check_own(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] section for a user's own model: keys that its class takes, and those of `Adapt`."""
    if name.startswith(MEMORY):
        return dict(options)
    kind = imported("model.name", name)
    if not callable(kind):
        raise UserError(
            f"model.name = {name!r} is {type(kind).__name__}, not a class or a function that makes a module."
        )
    takes = _parameters(kind)
    free = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    for key, value in options.items():
        if key not in KEYS and key not in takes and not free:
            raise UserError(f"unknown key model.{key} = {value!r}. {did_you_mean(key, [*takes, *KEYS])}")
    return dict(options)


def build_own(
    name: str, options: Mapping[str, Any], shape: tuple[int, ...], classes: int, sample: Tensor | None
) -> nn.Module:
    """A module by import path, with .body, .head and .dim."""
    if name.startswith(MEMORY):
        raise UserError(
            f"{name.removeprefix(MEMORY)} was passed in by a script as a module in memory, and cannot be built from "
            "the experiment alone. Pass it again, as in federate(models, clients, out=..., resume=True), or let a "
            f"newcomer join with a class that can be imported: {option('model', 'mymodule:MyNet')}."
        )
    made = call(imported("model.name", name), {k: v for k, v in options.items() if k not in KEYS}, shape, classes, name)
    how = Adapt(**{k: v for k, v in options.items() if k in KEYS})
    return ready(made, how, torch.zeros(2, *shape) if sample is None else sample, classes, name.rpartition(":")[2])


def ready(module: nn.Module, how: Adapt, sample: Tensor, classes: int, label: str) -> nn.Module:
    """The module with .body, .head and .dim: as it is if it has these, otherwise adapted."""
    if isinstance(module, Net) and how == Adapt() and all(p.requires_grad for p in module.parameters()):
        return copy.deepcopy(module)
    return adapt(module, sample, classes, how, label)


def _parameters(kind: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        return {}


def call(kind: Any, options: Mapping[str, Any], shape: tuple[int, ...], classes: int, label: str) -> nn.Module:
    """kind(shape, classes), kind(classes) or kind(), as its signature allows; well-known names are filled in."""
    known: dict[str, Any] = {
        **dict.fromkeys(CLASSES, classes), **dict.fromkeys(SHAPE, shape),
        **dict.fromkeys(WIDTH, prod(shape)), **dict.fromkeys(CHANNELS, shape[0] if shape else 1),
    }  # fmt: skip
    positional: list[Any] = []
    given = dict(options)
    parameters = [p for p in _parameters(kind).values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    unknown = [p for p in parameters if p.default is p.empty and p.name not in options and p.name not in known]
    for p in parameters:
        if p.name in options or p.name not in known:
            continue
        if p.default is p.empty or p.name in CLASSES:
            if p.kind is p.POSITIONAL_ONLY:
                positional.append(known[p.name])
            else:
                given[p.name] = known[p.name]
    if not given.keys() - options.keys() and len(unknown) in (1, 2):
        positional, unknown = ([shape, classes] if len(unknown) == 2 else [classes]), []
    if unknown:
        raise UserError(
            f"{label} takes {', '.join(p.name for p in unknown)}, which protofed does not know. Give it in [model], or "
            "write a function of (shape, classes) that makes the module."
        )
    try:
        made = kind(*positional, **given)
    except UserError:
        raise
    except Exception as error:
        what = ", ".join([*map(str, positional), *(f"{k}={v}" for k, v in given.items())])
        raise UserError(f"{label}({what}) raises {error_in_words(error)}. Give what it takes in [model].") from error
    if not isinstance(made, nn.Module):
        raise UserError(f"{label} makes {type(made).__name__}, not a torch.nn.Module.")
    return made


# modules in memory


def handed(models: Any, clients: int, how: Adapt, names: Sequence[str] = ()) -> list[Handed]:
    """One model per client, from a module, a class or function that makes one, or a list of these; errors name
    clients."""
    listed = isinstance(models, Sequence | nn.ModuleList) and not isinstance(models, nn.Sequential | str)
    given = list(models) if listed else [models] * clients
    if len(given) != clients:
        raise UserError(f"models has {len(given)} entries, clients has {clients}. Give one for all, or one for each.")
    return _labelled(
        [_one(model, how, names[number] if names else f"client {number}") for number, model in enumerate(given)], given
    )


def _one(model: Any, how: Adapt, client: str) -> Handed:
    if isinstance(model, nn.Module):
        name = f"{MEMORY}{path_of(type(model)) or type(model).__qualname__}"
        label = type(model).__name__

        def take(shape: tuple[int, ...], classes: int, sample: Tensor) -> nn.Module:
            return ready(model, how, sample, classes, label)

        return Handed(label, name, take, True)
    if not callable(model):
        raise UserError(f"the model of {client} is {type(model).__name__}. Give an nn.Module, or its class.")
    path = path_of(model)
    label = getattr(model, "__name__", type(model).__name__).replace("<lambda>", "model")

    def make(shape: tuple[int, ...], classes: int, sample: Tensor) -> nn.Module:
        return ready(call(model, {}, shape, classes, label), how, sample, classes, label)

    return Handed(label, path if path and not path.startswith("__main__") else f"{MEMORY}{label}", make, False)


def _labelled(found: list[Handed], given: list[Any]) -> list[Handed]:
    """Give clients whose modules differ in more than their weights labels of their own. Weights that are the same for
    all belong to nobody."""
    kinds: list[tuple[str, Any]] = []
    result = []
    for one, model in zip(found, given, strict=True):
        number = next((i for i, (label, other) in enumerate(kinds) if label == one.label and same(other, model)), None)
        if number is None:
            number = len(kinds)
            kinds.append((one.label, model))
        alike = [label for label, _ in kinds[: number + 1] if label == one.label]
        result.append(one._replace(label=one.label if len(alike) == 1 else f"{one.label}-{len(alike)}"))
    modules = {id(m): m for m in given if isinstance(m, nn.Module)}
    differ = len(modules) > 1
    return [one._replace(own_weights=one.own_weights and differ) for one in result]


def same(left: Any, right: Any) -> bool:
    """Whether two modules differ only in their weights, as far as can be seen; if not, they are trained apart."""
    if left is right:
        return True
    if not isinstance(left, nn.Module) or not isinstance(right, nn.Module) or type(left) is not type(right):
        return False
    if left._modules.keys() != right._modules.keys():
        return False
    for mine, other in ((left._parameters, right._parameters), (left._buffers, right._buffers)):
        if {k: _form(v) for k, v in mine.items()} != {k: _form(v) for k, v in other.items()}:
            return False
    hidden = {"_modules", "_parameters", "_buffers", "training"}
    mine, other = ({k: v for k, v in vars(m).items() if k not in hidden} for m in (left, right))
    if mine.keys() != other.keys() or not all(_equal(mine[k], other[k]) for k in mine):
        return False
    return all(
        same(left._modules[k], right._modules[k]) or left._modules[k] is right._modules[k] for k in left._modules
    )


def _form(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    lazy = isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer)
    shape = None if lazy else tuple(tensor.shape)
    return shape, tensor.dtype, tensor.requires_grad


def _equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.shape == right.shape and bool(torch.equal(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return isinstance(left, int | float | complex | str | bytes | set | frozenset | torch.Size) and bool(left == right)


def plain(module: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> nn.Module:
    """The user's own module, in its own class, with a client's tensors."""
    if isinstance(module, Adapted):
        return module.origin.plain(dict(params), dict(buffers))
    copied = copy.deepcopy(module)
    state = copied.state_dict() | {k: v for k, v in (dict(params) | dict(buffers)).items() if k in copied.state_dict()}
    copied.load_state_dict(state)
    return copied.eval()
