"""The keys of an experiment's file that are the same whatever its method, data and partition are."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator

from protofed import schema
from protofed.models import MODELS, own


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        raise ValueError("should be auto, cpu, cuda or cuda:N")
    return name


@dataclass(frozen=True)
class EngineChoice:
    """How clients are run (the [engine] section)."""

    name: Literal["auto", "stacked", "reference", "ray"] = "auto"
    """Clients of one model trained together (stacked), or one after another (reference); auto stacks on a GPU, and on a
    CPU models of up to 200,000 parameters; ray spreads what auto does over the machines of a cluster."""
    chunk: Annotated[int, Ge(0)] = 0
    """Clients that are stacked at most; 0: all of a round."""
    threads: Annotated[int, Ge(0), Le(1024)] = 0
    """Threads on the CPU: groups of stacked clients at a time, or torch's own threads; 0 takes all cores, or one of
    torch's for small models, or for each of ray's workers an eighth of a machine's cores."""
    workers: Annotated[int, Ge(0), Le(4096)] = 0
    """Processes that ray spreads clients over, each with a GPU or so many threads; 0: as many as there is room for."""
    ordered: bool = False
    """Add up what clients send in the order of their numbers, one by one: sums do not depend on groups and threads."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Compile the training step: where the run is long enough to repay it, always, or never."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Training in full single precision, on a GPU with factors rounded to ten bits (tf32), or in bfloat16, seven bits
    (bf16; weights and sums stay fp32): each faster and less exact than the one before. For papers fp32 is right."""


@dataclass(frozen=True)
class Evaluate:
    """When what is measured (the [evaluate] section): every so many rounds; 0 is only after the last."""

    own: Annotated[int, Ge(0)] = 1
    """The round's clients on their own test sets."""
    gm: Annotated[int, Ge(0)] = 1
    """The global model, where there is one, on the global test set (FedNH's GM)."""
    pm: Annotated[int, Ge(0)] = 0
    """The round's clients on the global test set (FedNH's PM(V) and PM(L)); costs clients x test samples."""
    validation: Annotated[float, Ge(0), Le(0.5)] = 0.0
    """Share of every client's training samples that is held back to choose a round by, whenever `own` is measured."""
    pm_clients: Annotated[int, Ge(0)] = 1000
    """How many clients are measured on the global test set after the last round at most, evenly spaced; 0: all."""
    theory: Annotated[int, Ge(0)] = 0
    """The constants of FedProto's or FedNH's theorem, and whether its condition holds, on three clients; 0: never."""


@dataclass(frozen=True)
class Record:
    """What is kept for reports beside the numbers of a round (the [record] section)."""

    enabled: bool = True
    """Whether anything is kept: how prototypes move, views.npz and confusion.npz. Results do not depend on it."""
    snapshots: Annotated[int, Ge(0), Le(1000)] = 8
    """Rounds after which test samples' embeddings and all prototypes are kept in views.npz: the first, the last, and
    some between; 0: none."""
    clients: Annotated[int, Ge(1), Le(1000)] = 8
    """Clients whose samples and local prototypes are in a snapshot at most, evenly spaced."""
    samples: Annotated[int, Ge(1), Le(100_000)] = 400
    """Test samples in a snapshot at most, of all these clients together."""
    models: bool = True
    """Whether a finished run keeps its models, for `export`, `join` and pictures of embeddings; without them a sweep of
    large models for many clients does not fill the disk. A run that is not finished keeps them to go on from."""


@dataclass(frozen=True)
class Join:
    """How those join who took no part in training (the [join] section)."""

    steps: Annotated[int, Ge(1), Le(1_000_000)] = 100
    """Training steps of each phase; training alone, which it is compared with, takes as many in all."""
    shots: Annotated[int, Ge(0)] = 20
    """Samples of each class that a newcomer trains on at most; 0: all."""
    lam: list[Annotated[float, Ge(0)]] = field(default_factory=list)
    """Weight of the pull towards the prototypes, for methods with a `lam`; empty: the method's own. Of several each
    newcomer takes the one that is best on a quarter of its shots, held back to choose by; of equally good ones the
    first."""


@dataclass(frozen=True)
class ModelChoice:
    """One architecture of the [model] section, with its fields."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Tells apart two choices of one model with different fields."""
        usual = {key: default for key, (_, default) in schema.fields(MODELS[self.name]).items()} if self.known else {}
        given = {key: value for key, value in self.options.items() if key not in usual or value != usual[key]}
        return self.name + (f"({', '.join(f'{k}={v}' for k, v in given.items())})" if given else "")

    @property
    def known(self) -> bool:
        """Whether it comes with protofed."""
        return self.name in MODELS

    def __call__(self, shape: tuple[int, ...], classes: int, sample: torch.Tensor | None = None) -> torch.nn.Module:
        """The module; one of the user's own is looked into with a sample of the inputs (B, ...)."""
        if self.known:
            return MODELS[self.name](shape, classes, **self.options)
        return own.build(self.name, self.options, shape, classes, sample)


@dataclass(frozen=True)
class Scalars:
    """The keys outside of any section."""

    seed: Annotated[int, Ge(0)] = 0
    """Every random number of the run follows from it."""
    rounds: Annotated[int, Ge(1)] = 50
    """Communication rounds."""
    clients: Annotated[int, Ge(1), Le(1_000_000)] = 20
    """How many there are."""
    held_out_clients: Annotated[int, Ge(0)] = 0
    """So many of them, drawn by the seed, take part in no round: they join after the last, as [join] says."""
    participation: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the clients that take part in a round, at least one, drawn anew each round."""
    local_epochs: Annotated[int, Ge(1)] = 1
    """Passes over its data that a client trains in a round."""
    batch_size: Annotated[int, Ge(1)] = 8
    """Samples in a training step."""
    drop_last: bool = False
    """Leave out a last batch that is not full (the papers' code does); a client's only batch always stays."""
    device: Annotated[str, AfterValidator(_device)] = "auto"
    """auto, cpu, cuda or cuda:N."""
