"""Encoders whose weights come from packages of their own, and what is trained on top of them."""

import importlib.util
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from annotated_types import Ge, Le
from torch import Tensor, nn

from protofed.errors import UserError
from protofed.importing import error_in_words
from protofed.models.adapted import Adapted, Body, Origin, as_buffers
from protofed.models.mlp import Shape, chain

BodyKind = Literal["frozen", "trained"]
AdapterKind = Literal["none", "linear", "mlp", "lowrank"]
Width = Annotated[int, Ge(1), Le(65_536)]
T = TypeVar("T")


class LowRank(nn.Module):
    """An embedding with a low-rank correction, which is 0 at first: z + B A z."""

    def __init__(self, dim: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, dim, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, z: Tensor) -> Tensor:
        corrected: Tensor = z + self.up(self.down(z))
        return corrected


class Behind(nn.Module):
    """The body of a model whose inputs are embeddings already: the adapter, if there is one."""

    def __init__(self, project: nn.Module | None) -> None:
        super().__init__()
        self.project = project

    def forward(self, z: Tensor) -> Tensor:
        return z if self.project is None else self.project(z)


def make_adapter(kind: AdapterKind, dim: int, width: int) -> tuple[nn.Module | None, int]:
    """What is trained between an encoder and a head, and the width of its output."""
    if kind == "linear":
        return nn.Linear(dim, width), width
    if kind == "mlp":
        return chain(fc1=nn.Linear(dim, width), relu1=nn.ReLU(), fc2=nn.Linear(width, width)), width
    if kind == "lowrank":
        return LowRank(dim, width), dim
    return None, dim


class Pretrained(Adapted):
    """An encoder with its weights, an adapter if requested, and a linear head."""

    pretrained: ClassVar[bool] = True
    takes_tokens: ClassVar[bool] = False
    embedding: ClassVar[int]  # numbers in an embedding

    def __init__(self, net: nn.Module, classes: int, body: BodyKind, adapter: AdapterKind, width: int) -> None:
        """`net`: inputs -> embeddings (B, `embedding`), with the scaling that it was trained with."""
        project, dim = make_adapter(adapter, self.embedding, width)
        head = nn.Linear(dim, classes)
        added = chain(head=head) if project is None else chain(project=project, head=head)
        places = (("body.net.", "encoder."), ("body.project.", "head.project."), ("head.", "head.head."))
        origin = Origin(net, places, added, told=f"{net}, {self.embedding} numbers")
        super().__init__(Body(net, "", project, False), head, dim, origin, body == "frozen")
        if self.frozen:
            net.requires_grad_(False)
            as_buffers(net)

    @classmethod
    def behind(
        cls, shape: Shape, classes: int, *, adapter: AdapterKind = "none", width: int = 64, **fields: Any
    ) -> Adapted:
        """What is trained on top of the frozen encoder, for inputs that are its embeddings; needs none of its
        weights."""
        if shape != (cls.embedding,):
            raise UserError(f"inputs of shape {shape} are not the {cls.embedding} numbers of its embeddings")
        project, dim = make_adapter(adapter, cls.embedding, width)
        head = nn.Linear(dim, classes)
        added = chain(head=head) if project is None else chain(project=project, head=head)
        places = (("body.project.", "head.project."), ("head.", "head.head."))
        return Adapted(Behind(project), head, dim, Origin(nn.Identity(), places, added), False)

    @classmethod
    def settled(cls, shape: Shape, **fields: Any) -> dict[str, Any]:
        """The fields under which samples of any shape are treated like those of this shape."""
        return fields

    @classmethod
    @abstractmethod
    def unfit_data(cls, x: np.ndarray, shape: Shape, **fields: Any) -> str:
        """Why it cannot take a data set's raw samples (N, *shape), in words; empty if it can."""


def file_of(encoder: str, package: str, name: str, install: str) -> Path:
    """A file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    path = Path(places[0]) / name if places else None
    if path is None or not path.is_file():
        raise UserError(f"{encoder} needs the package {package}, which is not installed. Install it: {install}")
    return path


def read_weights(path: Path, read: Callable[[Path], T], install: str) -> T:
    """The contents of a file of weights."""
    try:
        return read(path)
    except Exception as error:  # the library raises many kinds of errors for a damaged file
        again = install.replace("pip install", "pip install --force-reinstall")
        raise UserError(f"{path} is damaged ({error_in_words(error)}). Install it again: {again}") from None
