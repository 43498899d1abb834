"""Looking into a module: what its layers output for a few samples, and which of them is its classifier."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from protofed.errors import UserError
from protofed.importing import error_in_words

CONVENTIONS = ("head", "classifier", "fc", "heads")  # body/head, features/classifier, torchvision, timm, Hugging Face
SHOWN = 12  # layers that an error names


class Call(NamedTuple):
    """One layer during the pass."""

    name: str
    layer: nn.Module
    given: Any
    made: Any


class LayerPass(NamedTuple):
    """A pass of a few samples through a module."""

    calls: list[Call]
    output: Any

    def of(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]


@contextlib.contextmanager
def judging(module: nn.Module) -> Iterator[None]:
    """In evaluation mode, without gradients; afterwards as it was."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, mode in modes:
            m.training = mode


def watch_layers(module: nn.Module, sample: Tensor, label: str) -> LayerPass:
    """Every layer's input and output on some samples (B, ...)."""
    calls: list[Call] = []
    hooks = [
        layer.register_forward_hook(
            lambda _, args, kwargs, made, name=name, layer=layer: calls.append(
                Call(name, layer, first_argument(args, kwargs), tensor_of(made))
            ),
            with_kwargs=True,
        )
        for name, layer in module.named_modules()
        if name
    ]
    try:
        with judging(module):
            return LayerPass(calls, module(sample))
    except UserError:
        raise
    except Exception as error:
        shape = f"{tuple(sample.shape[1:])} ({str(sample.dtype).removeprefix('torch.')})"
        raise UserError(
            f"{label} cannot take inputs of shape {shape}: {error_in_words(error)}. {_remedy(error, module, sample)}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def _remedy(error: Exception, module: nn.Module, sample: Tensor) -> str:
    """What to do if a module's forward fails on some inputs."""
    whole = not sample.is_floating_point()
    if isinstance(error, IndexError) and whole and any(isinstance(m, nn.Embedding) for m in module.modules()):
        lowest, highest = int(sample.min()), int(sample.max())
        return f"Token ids go from {lowest} to {highest}: its nn.Embedding needs a row for each, counted from 0."
    if not isinstance(error, RuntimeError | ValueError | IndexError):
        return "Correct its forward."
    images = any(isinstance(m, nn.Conv2d) for m in module.modules())
    if images and sample.ndim == 3:
        return "Images need an axis for the channel: x[:, None]."
    if images and sample.ndim == 4 and sample.shape[3] in (1, 3, 4) and sample.shape[1] > 4:
        return "Channels come first: x.transpose(0, 3, 1, 2), of tensors x.permute(0, 3, 1, 2)."
    return "Give data of the shape that the module takes, with the samples along the first axis."


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors of an output, which may be a tensor, a dict, a tuple, or Hugging Face's ModelOutput; logits first."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        named = sorted(output.items(), key=lambda item: item[0] != "logits")
        return [tensor for _, value in named for tensor in tensors_of(value)]
    if isinstance(output, tuple | list):
        return [tensor for value in output for tensor in tensors_of(value)]
    if hasattr(output, "__dict__") and not isinstance(output, nn.Module):
        return tensors_of(vars(output))
    return []


def tensor_of(output: Any) -> Tensor | None:
    return next(iter(tensors_of(output)), None)


def pooled_embeddings(z: Tensor | None, what: str) -> Tensor:
    """A layer's output as embeddings (B, D): maps (B, D, H, W) and sequences (B, T, D) are averaged."""
    if z is None:
        raise UserError(f"{what} gives no tensor. Name another layer as embedding.")
    if z.ndim < 2 or z.ndim > 5:
        raise UserError(f"{what} gives shape {tuple(z.shape)}, but an embedding is (samples, width).")
    if z.ndim == 2:
        return z
    return z.mean(1) if z.ndim == 3 else z.flatten(2).mean(2)


def find_head(module: nn.Module, seen: LayerPass, classes: int, label: str) -> str | None:
    """The name of the classifying layer: one with a usual name, or else the last linear one whose output the module
    returns. If there are several, one with as many outputs as classes."""
    named = [name for name in CONVENTIONS if isinstance(getattr(module, name, None), nn.Module)]
    offered = getattr(module, "get_classifier", None)
    if callable(offered):
        with contextlib.suppress(Exception):  # a method of that name that wants arguments is none of timm's
            known = {id(layer): name for name, layer in module.named_modules()}
            named += [known[id(offered())]] if id(offered()) in known else []
    usual = [found for name in named if (found := _flat(seen, name))]
    outputs = tensors_of(seen.output)
    linear = [call.name for call in reversed(seen.calls) if isinstance(call.layer, nn.Linear)]
    returned = [n for n in usual if _returned(seen, n, outputs)]
    returned += [name for out in outputs for name in linear if _returned(seen, name, [out])]
    fitting = [name for name in returned if seen.of(name)[-1].made.shape[-1] == classes]
    return next(iter([*fitting, *returned, *usual]), None)


def _returned(seen: LayerPass, name: str, outputs: list[Tensor]) -> bool:
    """Whether a layer's output is one of these."""
    return any(same_scores(seen.of(name)[-1].made, out) for out in outputs)


def _flat(seen: LayerPass, name: str) -> str | None:
    """The layer itself if it is called once on embeddings (B, D); else the last linear one inside it that is."""
    calls = seen.of(name)
    if len(calls) != 1 or isinstance(calls[0].layer, nn.Identity):
        return None
    if isinstance(calls[0].given, Tensor) and calls[0].given.ndim == 2:
        return name
    inner = [c for c in seen.calls if c.name.startswith(f"{name}.") and isinstance(c.layer, nn.Linear)]
    fits = [c.name for c in inner if isinstance(c.given, Tensor) and c.given.ndim == 2]
    return fits[-1] if fits else None


def same_scores(scores: Any, output: Any) -> bool:
    """Whether a module's output is these scores, or their (log-)softmax or sigmoid."""
    if not isinstance(scores, Tensor) or not isinstance(output, Tensor) or scores.shape != output.shape:
        return False
    ways = (scores, scores.log_softmax(-1), scores.softmax(-1), scores.sigmoid())
    return any(torch.allclose(way, output, rtol=1e-4, atol=1e-5) for way in ways)


def candidates(seen: LayerPass) -> str:
    """Layers that could give the embedding, with the shapes of their outputs."""
    outer = [call for call in seen.calls if call.name.count(".") < 2 and isinstance(call.made, Tensor)]
    shown = [f"{call.name} {tuple(call.made.shape[1:])}" for call in outer[-SHOWN:]]
    return ", ".join(shown) or "none"
