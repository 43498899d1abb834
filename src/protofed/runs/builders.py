"""How each client's model is built: those of protofed, the user's own, and what comes behind a frozen encoder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from protofed.config.experiment import Experiment
from protofed.config.registry import ModelChoice
from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.errors import UserError
from protofed.models.adapted import Adapted
from protofed.models.functional import fresh
from protofed.models.own import Handed
from protofed.ops import random
from protofed.runs.frozen import embedded

SAMPLES = 3  # that a module of the user's own is looked into with
Builder = tuple[str, Callable[[tuple[int, ...], int], nn.Module]]  # a name, and input shape, classes -> module


@dataclass(frozen=True, eq=False)
class Shown:
    """Builds a user's own module, which is inspected with some of its client's samples."""

    build: Any
    federation: Federation
    client: int
    own_weights: bool = False
    name: str = ""  # of the client, where it has one

    def __call__(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        samples = _telling(self.federation.train(self.client).x).cpu()
        try:
            module: nn.Module = self.build(self.federation.shape(self.client), classes, samples)
        except UserError as error:
            raise UserError(f"{self.name or f'client {self.client}'}: {error}") from None
        return module


def _telling(x: Tensor) -> Tensor:
    """A few samples; of tokens also those with the highest and the lowest, which an embedding must have."""
    if x.is_floating_point() or not x.numel():
        return x[:SAMPLES]
    flat = x.flatten(1)
    return torch.cat([x[:SAMPLES], x[[int(flat.amax(1).argmax()), int(flat.amin(1).argmin())]]])


def builders_of(
    experiment: Experiment, federation: Federation, modules: Sequence[Handed] | None, names: Sequence[str] = ()
) -> Sequence[Builder]:
    """For each client, the name of its model and how to build it: as given, or as the experiment says."""
    if modules is not None:
        return tuple(
            (one.label, Shown(one.build, federation, number, one.own_weights, names[number]))
            for number, one in enumerate(modules)
        )
    labels = {id(choice): choice.label for choice in experiment.model}

    def built(number: int) -> Builder:
        choice = experiment.model_of(number)
        return labels[id(choice)], choice if choice.known else Shown(choice, federation, number)

    return federation.of_each(built)


def behind_frozen(
    experiment: Experiment,
    federation: Federation,
    domains: list[Domain],
    split: Split,
    builders: Sequence[Builder],
    tell: Callable[[str], None],
) -> tuple[Sequence[Builder], tuple[str, ...], tuple[list[Domain], Split] | None]:
    """The builders of what is trained, notes about the modules, and, if bodies are frozen, the data with their
    embeddings in place of inputs."""
    seed = random.seed(experiment.seed, "init", "common")
    first: dict[Any, nn.Module] = {}
    for client in federation.examples:
        label, build = builders[client]
        shape = federation.shape(client)
        if may_be_frozen(build) and (label, shape) not in first:
            first[label, shape] = fresh(partial(build, shape, federation.classes), seed)
    notes = tuple(
        f"{label}: {module.origin.told}" + (", frozen: computed once" if module.frozen else "")
        for (label, _), module in first.items()
        if isinstance(module, Adapted)
    )
    frozen = {key for key, module in first.items() if isinstance(module, Adapted) and module.frozen}
    if not frozen:
        return builders, notes, None
    if domains[0].computed is not None:
        raise UserError(
            f"a frozen encoder embeds all samples before the run, but those of {domains[0].name} are computed when "
            "their client is drawn. Use a model that is trained."
        )
    if experiment.data.augment:
        raise UserError(
            f"data.augment = {experiment.data.augment!r} changes inputs in every epoch, but a frozen encoder sees "
            "them once. Use data.augment = []."
        )
    bodies: list[nn.Module | None] = []
    light: list[Builder] = []
    for client, (label, build) in enumerate(builders):
        key = (label, federation.shape(client))
        if key not in frozen:
            bodies.append(None)
            light.append((label, build))
            continue
        if isinstance(build, ModelChoice):
            bodies.append(first[key].body)  # type: ignore[arg-type]
            light.append((label, build.trained_part))
            continue
        assert isinstance(build, Shown)
        whole = fresh(partial(build, key[1], federation.classes), seed) if build.own_weights else first[key]
        bodies.append(whole.body)  # type: ignore[arg-type]
        light.append((label, partial(_behind, build)))
    return tuple(light), notes, embedded(federation, domains, split, bodies, tell)


def may_be_frozen(build: Any) -> bool:
    """Whether what it builds may have a body that is not trained."""
    return isinstance(build, Shown) or (isinstance(build, ModelChoice) and build.frozen)


def _behind(build: Shown, shape: tuple[int, ...], classes: int) -> nn.Module:
    """What is trained on top of a frozen body, whose embeddings are its inputs."""
    whole = build(shape, classes)
    assert isinstance(whole, Adapted)
    return whole.without_body()
