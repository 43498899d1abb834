"""A module as pure functions of a client's tensors."""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from protofed.method import Client, Params
from protofed.models.attention import open_attention
from protofed.models.layers import key_dropouts, mask_norms
from protofed.ops import random
from protofed.ops.trees import under

Change = Callable[[nn.Module], None]


def fresh(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A module with initial weights that depend on the seed alone.

    Modules draw them from torch's global generator, so it is seeded, and put back as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build()


def state(module: nn.Module) -> tuple[Params, Params]:
    """Parameters and buffers, detached, by name."""
    params = {name: p.detach() for name, p in module.named_parameters()}
    return params, {name: b.detach() for name, b in module.named_buffers()}


def unfit(module: nn.Module, x: Tensor) -> str:
    """Why a module cannot take these inputs (N, ...), in words; empty if it can, as far as the module says."""
    words = getattr(module, "words", None)
    if words is not None and x.is_floating_point():
        return "holds numbers, not token ids, which it takes. Use whole numbers from 0, or another model"
    if words is not None and len(x) and not 0 <= int(x.min()) <= int(x.max()) < words:
        return (
            f"holds token {int(x.max())}, but it knows {words}. Set model.words = {int(x.max()) + 1}, or number from 0"
        )
    return missing(module, x)


def missing(module: nn.Module, x: Tensor) -> str:
    """Why a module cannot take a table (N, F) with missing values, in words; empty if there are none or it can."""
    takes_missing = any(getattr(part, "takes_missing", False) for part in module.modules())
    if x.ndim == 2 and x.is_floating_point() and not takes_missing and len(rows := x.isnan().any(1).nonzero()):
        return (
            f"sample {int(rows[0])} holds NaN, a missing value, which this model does not take. Use mlp_table, put "
            "protofed.models.WithMask in front of your own model, or replace missing values"
        )
    return ""


class FunctionalModel:
    """One architecture: a module with .body and .head, without tensors of its own.

    Called with a client it gives embeddings and logits in evaluation mode; `training` gives it in training mode.
    """

    def __init__(self, module: nn.Module, *, padded: bool = False, change: Change = lambda module: None) -> None:
        """`padded`: batches may have padding; `change` may replace layers in a copy of the module by faster ones."""
        self.eval_module = _hollow(module).eval()
        self.train_module = _hollow(module).train()
        for made in (self.eval_module, self.train_module):
            open_attention(made)
            change(made)
        self.dropouts = key_dropouts(self.train_module)
        self.norms = [f"{name}.mask" for name in mask_norms(self.train_module, every=padded)]
        self.train_module.to("meta")
        self.draws_itself: bool = getattr(module, "draws_itself", False)

    def __call__(self, client: Client, x: Tensor, at: str = "") -> tuple[Tensor, Tensor]:
        z = self.embed(client, x, at)
        return z, self.classify(client, z, at)

    def embed(self, client: Client, x: Tensor, at: str = "") -> Tensor:
        return self._part(self.eval_module.body, f"{at}body.", client, x)

    def classify(self, client: Client, z: Tensor, at: str = "") -> Tensor:
        return self._part(self.eval_module.head, f"{at}head.", client, z)

    def training(
        self, buffers: Params, key: Tensor, mask: Tensor | None = None, drawn: Params | None = None
    ) -> "Training":
        """The model in training mode; the mask says which samples are real, `drawn` what dropouts keep if known."""
        return Training(self, buffers, key, mask, drawn or {})

    def draws(self, inputs: Tensor) -> dict[str, torch.Size]:
        """What the dropouts draw for a batch of such inputs, by name; empty if that is not known."""
        if not self.dropouts:
            return {}
        found: dict[str, torch.Size] = {}
        hooks = [
            self.train_module.get_submodule(name).register_forward_pre_hook(
                lambda module, inputs, name=name: found.__setitem__(name, module.shape(inputs[0]))
            )
            for name in self.dropouts
        ]
        try:
            self.train_module.head(self.train_module.body(inputs.to("meta")))  # type: ignore[operator]
        except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError):
            return {}  # they will be drawn from their keys in the step
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def draw(self, key: Tensor, draws: Mapping[str, torch.Size]) -> Params:
        """What the dropouts keep (..., *shape) in the steps of these keys (..., 2)."""
        keys = self.dropout_keys(key)
        return {name: self.train_module.get_submodule(name).draw(keys[name], shape) for name, shape in draws.items()}  # type: ignore[operator]

    def dropout_keys(self, key: Tensor) -> Params:
        """The keys (..., 2) of all dropouts in the steps of these keys."""
        if not self.dropouts:
            return {}
        numbers = torch.arange(len(self.dropouts), device=key.device)[:, None]
        return dict(zip(self.dropouts, random.fold(key[..., None, :], numbers).unbind(-2), strict=True))

    @property
    def normalises_batches(self) -> bool:
        """Whether a training step mixes the samples of a batch, as BatchNorm does."""
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.train_module.modules())

    @property
    def recurrent(self) -> bool:
        """Whether it has LSTMs or the like, which torch.vmap cannot take."""
        return any(isinstance(m, nn.RNNBase) for m in self.train_module.modules())

    def trains_on_one(self, sample: Tensor) -> bool:
        """Whether a training step works with one sample (1, ...): BatchNorm over one pixel does not."""
        if not self.normalises_batches:
            return True
        try:
            self.train_module(sample.to("meta"))
        except ValueError as error:
            return "per channel" not in str(error)
        except (RuntimeError, NotImplementedError, TypeError, IndexError):
            return True  # it needs numbers; training will tell
        return True

    def _part(self, module: Any, prefix: str, client: Client, x: Tensor) -> Tensor:
        tensors = under(client.params, prefix, strip=True) | under(client.buffers, prefix, strip=True)
        out: Tensor = functional_call(module, tensors, (x,))
        return out


class Training:
    """The model during one training step: dropout is keyed, and `buffers` holds what BatchNorm makes of the batch."""

    def __init__(
        self, model: FunctionalModel, buffers: Params, key: Tensor, mask: Tensor | None, drawn: Params
    ) -> None:
        self.model = model
        self.keys = {f"{name}.key": value for name, value in model.dropout_keys(key).items()}
        self.keys |= {f"{name}.kept": value for name, value in drawn.items()}
        self.keys |= {name: mask for name in model.norms if mask is not None}
        self.buffers = {name: value.clone() for name, value in buffers.items()}  # updated in place below
        self.randomness = _keyed(key) if model.draws_itself else nullcontext()

    def __call__(self, client: Client, x: Tensor, at: str = "") -> tuple[Tensor, Tensor]:
        z = self.embed(client, x, at)
        return z, self.classify(client, z, at)

    def embed(self, client: Client, x: Tensor, at: str = "") -> Tensor:
        return self._part(self.model.train_module.body, at, "body.", client, x)

    def classify(self, client: Client, z: Tensor, at: str = "") -> Tensor:
        return self._part(self.model.train_module.head, at, "head.", client, z)

    def _part(self, module: Any, at: str, part: str, client: Client, x: Tensor) -> Tensor:
        prefix = at + part
        tensors = under(client.params, prefix, strip=True) | under(self.buffers, prefix, strip=True)
        tensors |= under(self.keys, part, strip=True)
        with self.randomness:
            out: Tensor = functional_call(module, tensors, (x,))
            return out


def _keyed(key: Tensor) -> AbstractContextManager[Any]:
    """Random numbers of a module's own forward come from this key."""
    from protofed.models.keyed import Keyed  # few modules draw numbers themselves

    return Keyed(key)


def _hollow(module: nn.Module) -> nn.Module:
    """The module without its numbers: every call has to bring them, so none can be used by mistake."""
    hollow = copy.deepcopy(module)
    tied: dict[int, list[str]] = {}
    for name, p in hollow.named_parameters(remove_duplicate=False):
        tied.setdefault(id(p), []).append(name)
    hollow.to("meta")
    for first, *others in tied.values():  # leaving the CPU parts tensors that were one
        for name in others:
            parent, _, leaf = name.rpartition(".")
            hollow.get_submodule(parent)._parameters[leaf] = hollow.get_parameter(first)
    return hollow
