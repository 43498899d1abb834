"""Any classifier as a body and a head: its own layers, its own forward, stopped where the classifying layer begins."""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from protofed.errors import UserError
from protofed.importing import error_in_words
from protofed.models.adapted import Adapted, Body, Origin, Stop, as_buffers, reach, replace_layer
from protofed.models.functional import missing
from protofed.models.keyed import draws
from protofed.models.look import candidates, find_head, judging, same_scores, tensor_of, tensors_of, watch_layers

NEW = "linear"  # as `head`: a new linear layer


@dataclass(frozen=True)
class Adapt:
    """Where the embedding of a user's own module is, and what is added to the module."""

    embedding: Any = ""
    """The layer whose output is the embedding, or in Python a function (module, x) -> (B, D); empty: the input of the
    classifying layer."""
    head: str = ""
    """The classifying layer; empty: it is searched for; "linear": a new linear layer in its place."""
    project: Annotated[int, Ge(0), Le(65_536)] = 0
    """Width of a linear projection between the embedding and a new classifying layer; 0: none."""
    frozen: Any = None
    """True: the body is not trained, and its embeddings are computed once; False: everything is trained; unset: as
    `requires_grad` says."""


def adapt(module: nn.Module, sample: Tensor, classes: int, how: Adapt, label: str) -> nn.Module:
    """A module with .body, .head and .dim that computes what the given one does; it is copied, never changed."""
    net = _copied(module, label)
    sample, cast = _taken(net, sample)
    if why := missing(net, sample):  # else its outputs would be NaN, and no layer would be found by them
        raise UserError(f"{why} ({label}).")
    seen = watch_layers(net, sample, label)
    head = _head(net, seen, classes, how, label)
    frozen = _freeze(net, head, how, label)
    origin_net = copy.deepcopy(net)
    old = net.get_submodule(head) if head else None
    if head:
        _refuse_tied(net, head, label)
        replace_layer(net, head, Stop())
    embedding = how.embedding
    if isinstance(embedding, str) and embedding:
        _layer(net, embedding, seen, "embedding", label).register_forward_hook(reach)
    body = Body(net, embedding, None, cast)
    with judging(body):
        try:
            z = body(sample)
        except UserError as error:
            raise UserError(f"{label}: {error} Layers: {candidates(seen)}.") from None
        except Exception as error:
            raise UserError(f"{label} fails on its way to the embedding: {error_in_words(error)}.") from error
        _refuse_odd(body, sample, z, label)
    dim = int(z.shape[1])
    places = [("body.net.", "")]
    added: nn.Module | None = None
    if how.project or how.head == NEW or old is None:
        project = nn.Linear(dim, how.project) if how.project else None
        dim = how.project or dim
        old, body.project = nn.Linear(dim, classes), project
        parts: OrderedDict[str, nn.Module]
        parts = OrderedDict(project=project, head=old) if project is not None else OrderedDict(head=old)
        added = nn.Sequential(parts)
        head = "" if embedding else head  # what lies between another embedding and the old head is not to be passed
        at = f"{head}." if head else "head."
        places = [("body.net.", "" if head else "encoder.")]
        places += [("body.project.", f"{at}project.")] if project is not None else []
        places += [("body.", f"{at}project.")] if project is not None and frozen else []  # trained behind embeddings
        places += [("head.", f"{at}head.")]
    else:
        places += [("head.", f"{head}.")]
        _check_scores(old, z, seen, classes, head, how, label)
    width = f"{z.shape[1]} numbers" + (f", projected to {dim}" if how.project else "")
    source = "a function of yours" if callable(embedding) else f"the output of {embedding}" if embedding else ""
    source = source or (f"the input of layer {head}" if head else "the module's output")
    origin = Origin(origin_net, tuple(places), added, head, embedding, f"embedding = {source}, {width}")
    as_buffers(body)
    made = Adapted(body, old, dim, origin, frozen)
    made.draws_itself = not frozen and _draws(made, sample, label)
    return made


def _draws(module: Adapted, sample: Tensor, label: str) -> bool:
    """Whether it draws random numbers outside its dropout layers. Found by a first training pass, which also reveals
    what fails in one."""
    try:
        return draws(module, sample, label)
    except UserError as error:
        raise UserError(str(error).replace("body.net.", "")) from None  # by the names that the user gave
    except Exception as error:
        raise UserError(f"{label} fails in training mode: {error_in_words(error)}.") from error


def _refuse_odd(body: Body, sample: Tensor, z: Tensor, label: str) -> None:
    """Check that a batch of one sample works, and that the same samples give the same embeddings."""
    lost = (
        f"{label} takes {len(z)} samples at once, but not one: its forward loses the axis of samples (squeeze?). "
        "Keep that axis."
    )
    try:
        alone: Any = body(sample[:1])
    except Exception as error:  # whatever the user's own forward raises
        raise UserError(f"{lost} It says: {error_in_words(error)}.") from error
    if alone.shape != (1, z.shape[1]):
        raise UserError(lost)
    if not torch.allclose(body(sample), z, rtol=1e-3, atol=1e-4):
        raise UserError(
            f"{label} gives different embeddings for the same samples: it is random even in evaluation mode. "
            "Let it do so only where self.training is true, by dropout layers."
        )


def _copied(module: nn.Module, label: str) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise UserError(f"{label} is {type(module).__name__}, not a torch.nn.Module. Give a module, or its class.")
    if isinstance(module, torch.jit.ScriptModule):
        raise UserError(f"{label} is a compiled TorchScript module. Give the plain nn.Module.")
    try:
        return copy.deepcopy(getattr(module, "_orig_mod", module)).cpu().float()
    except Exception as error:
        if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
            return copy.deepcopy(module)
        raise UserError(f"{label} cannot be copied: {error_in_words(error)}. Detach tensors that it keeps.") from error


def _taken(net: nn.Module, sample: Tensor) -> tuple[Tensor, bool]:
    """The sample as the module takes it: whole numbers as they are (tokens), or as floats; lazy layers get shapes."""
    if sample.is_floating_point():
        if any(isinstance(p, UninitializedParameter) for p in net.parameters()):
            with judging(net):
                _try(net, sample)
        return sample, False
    with judging(net):
        as_is, as_float = _try(net, sample), None
        if as_is is not None:
            as_float = _try(net, sample.float())
    return (sample.float(), True) if as_is is not None and as_float is None else (sample, False)


def _try(net: nn.Module, sample: Tensor) -> Exception | None:
    try:
        net(sample)
    except Exception as error:  # `watch` will report it
        return error
    return None


def _layer(net: nn.Module, name: str, seen: Any, key: str, label: str) -> nn.Module:
    layers: dict[str, nn.Module] = dict(net.named_modules())
    if name not in layers or not name:
        raise UserError(f"{key} = {name!r}: {label} has no such layer. It has: {candidates(seen)}.")
    if not seen.of(name):
        raise UserError(f"{key} = {name!r} is not used in the forward of {label}. Used: {candidates(seen)}.")
    return layers[name]


def _head(net: nn.Module, seen: Any, classes: int, how: Adapt, label: str) -> str:
    """The name of the classifying layer; empty if there is none and a new one follows the embedding."""
    if how.head not in ("", NEW):
        _layer(net, how.head, seen, "head", label)
        return how.head
    found = find_head(net, seen, classes, label)
    if found is None and how.head != NEW and not how.project:
        if not seen.calls:
            raise UserError(
                f"{label} has no layers inside, but prototypes need a body with a classifying layer behind it, as in "
                "nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))."
            )
        raise UserError(
            f"the classifying layer of {label} was not found. Name it, as in head='fc', or head='linear' for a new one "
            f"behind embedding='...'. Its layers and what they make: {candidates(seen)}."
        )
    return found or ""


def _check_scores(head: nn.Module, z: Tensor, seen: Any, classes: int, name: str, how: Adapt, label: str) -> None:
    """Check that the head gives one score per class, and that it gives what the module gives."""
    try:
        with judging(head):
            scores = tensor_of(head(z))
    except Exception as error:
        raise UserError(
            f"{label}: its layer {name!r} cannot take the embedding of shape {tuple(z.shape[1:])}: "
            f"{error_in_words(error)}. Use head='linear', or another embedding: {candidates(seen)}."
        ) from error
    width = scores.shape[-1] if scores is not None and scores.ndim == 2 else None
    if scores is None or width != classes:
        got = f"{width} numbers" if width is not None else "no row of numbers"
        more = width is not None and width > classes
        absent = "name all classes (federate: labels=[...]) where the data does not show them all, " if more else ""
        raise UserError(
            f"{label}: its layer {name!r} gives {got} for each sample, but there are {classes} classes. "
            f"Build it with {classes} outputs, {absent}or use head='linear' for a new one."
        )
    if not any(same_scores(scores, output) for output in tensors_of(seen.output)):
        raise UserError(
            f"{label}: what it returns is not what {name} gives of the embedding: more happens before or after it. "
            f"Make that part of the layer (nn.Sequential), or name others with head=, embedding=: {candidates(seen)}."
        )


def _freeze(net: nn.Module, head: str, how: Adapt, label: str) -> bool:
    """Whether the body is frozen; afterwards requires_grad says what is trained."""
    parts = {name: p for name, p in net.named_parameters() if not (head and name.startswith(f"{head}."))}
    for name, p in net.named_parameters():
        if name not in parts and not p.requires_grad and how.frozen is None and how.head != NEW and not how.project:
            raise UserError(f"{label}: {name} has requires_grad=False, but a classifying layer has to be trained.")
        p.requires_grad_(name not in parts or (p.requires_grad if how.frozen is None else not how.frozen))
    return bool(parts) and not any(p.requires_grad for p in parts.values())


def _refuse_tied(net: nn.Module, head: str, label: str) -> None:
    owners: dict[int, str] = {}
    for name, p in net.named_parameters(remove_duplicate=False):
        other = owners.setdefault(id(p), name)
        if other.startswith(f"{head}.") != name.startswith(f"{head}."):
            raise UserError(
                f"{label}: {name} and {other} are one tensor (tied), but {head} is trained and shared apart from the "
                f"rest. Give {head} weights of its own."
            )
