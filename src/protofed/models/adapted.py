"""A classifier of the user's own, stopped where its classifying layer begins."""

import copy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from protofed.method import Params
from protofed.models.look import pooled_embeddings, tensor_of


class _Reached(BaseException):
    """Raised when the classifying layer is reached, with its input. Handlers in the user's forward should not catch
    it."""

    def __init__(self, z: Any) -> None:
        super().__init__()
        self.z = z


class Stop(nn.Module):
    """Stands in for the classifying layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Reached(next(iter((*args, *kwargs.values())), None))


def reach(layer: nn.Module, args: Any, made: Any) -> None:
    """A hook that ends the forward pass: this layer's output is wanted, and nothing after it."""
    raise _Reached(made)


class Body(nn.Module):
    """Inputs -> embeddings (B, dim), by the user's own forward."""

    def __init__(self, net: nn.Module, embedding: Any, project: nn.Module | None, cast: bool) -> None:
        super().__init__()
        self.net, self.embedding, self.cast = net, embedding, cast
        self.project = project

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() if self.cast else x
        try:
            made = self.embedding(self.net, x) if callable(self.embedding) else self.net(x)
        except _Reached as reached:
            made = reached.z
        z = pooled_embeddings(tensor_of(made), "the embedding")
        return z if self.project is None else self.project(z)


class Adapted(nn.Module):
    """A body, a head and the width between them, made from a user's own module."""

    def __init__(self, body: Any, head: nn.Module, dim: int, origin: "Origin", frozen: bool) -> None:
        super().__init__()
        self.body, self.head = body, head
        self.dim, self.origin, self.frozen = dim, origin, frozen
        self.draws_itself = False  # whether its forward draws random numbers outside its dropout layers

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings (B, dim) and logits (B, classes)."""
        z = self.body(x)
        return z, self.head(z)

    def encoder(self) -> nn.Module:
        """The body without a projection, on its own: inputs -> embeddings."""
        return Body(self.body.net, self.body.embedding, None, self.body.cast).eval()

    def without_body(self) -> "Adapted":
        """The same for inputs that are the frozen body's embeddings already."""
        body = nn.Identity() if self.body.project is None else self.body.project
        return Adapted(body, self.head, self.dim, self.origin.behind_embeddings(), False)


@dataclass(frozen=True, eq=False)
class Origin:
    """The user's module as it was given, and where in it a client's tensors belong."""

    net: nn.Module
    places: tuple[tuple[str, str], ...]  # prefix of a client's tensors -> prefix of the module's
    added: nn.Module | None = None  # what stands in place of the classifying layer, or behind all
    head: str = ""  # where that is; empty: behind all
    embedding: Any = ""
    told: str = field(default="")

    def __deepcopy__(self, memo: Any) -> "Origin":
        return self

    def behind_embeddings(self) -> "Origin":
        places = tuple(
            (p.replace("body.project.", "body.") if p.startswith("body.") else p, to)
            for p, to in self.places
            if p != "body.net."
        )
        return Origin(self.net, places, self.added, self.head, self.embedding, self.told)

    def plain(self, params: Params, buffers: Params) -> nn.Module:
        """A copy of the module with these tensors, in its own class. A new head takes the place of the old one."""
        module = copy.deepcopy(self.net).eval()
        if self.added is not None and self.head:
            replace_layer(module, self.head, copy.deepcopy(self.added))
        elif self.added is not None:
            module = WithHead(module, copy.deepcopy(self.added), self.embedding)
        mine: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        mine |= dict(module.named_buffers(remove_duplicate=False))
        for name, value in (params | buffers).items():
            prefix, to = next(((p, to) for p, to in self.places if name.startswith(p)), (None, ""))
            if prefix is not None:
                mine[to + name.removeprefix(prefix)].data.copy_(value)
        return module.eval()


class WithHead(nn.Module):
    """An encoder without a classifier of its own, and a new one behind it: inputs -> logits."""

    def __init__(self, encoder: nn.Module, head: nn.Module, embedding: Any = "") -> None:
        super().__init__()
        self.encoder, self.head, self.embedding = encoder, head, embedding

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes)."""
        named = isinstance(self.embedding, str) and self.embedding
        hook = self.encoder.get_submodule(self.embedding).register_forward_hook(reach) if named else None
        try:
            logits: Tensor = self.head(Body(self.encoder, self.embedding, None, False)(x))
        finally:
            if hook is not None:
                hook.remove()
        return logits


def replace_layer(module: nn.Module, name: str, layer: nn.Module) -> None:
    """Replace a layer by its name."""
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, layer)


def as_buffers(module: nn.Module) -> None:
    """Turn what is not trained into buffers, so that no phase of any method touches it."""
    for layer in module.modules():
        for name, p in list(layer._parameters.items()):
            if p is not None and not p.requires_grad:
                del layer._parameters[name]
                layer.register_buffer(name, p.detach())
