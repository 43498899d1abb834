"""Uploads as the vectors that are noised: of a client, or of each of its samples."""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from protofed.config.experiment import Experiment
from protofed.engines.reference import ReferenceEngine
from protofed.method import Batch, Client, LocalData, Spec, Tree
from protofed.ops import random
from protofed.ops.trees import deal
from protofed.privacy.release import Layout
from protofed.privacy.worth import Statistics

Choose = Callable[[Statistics | None], Tensor]  # of samples, or of nobody -> dimensions (D,)


class SampleSum(NamedTuple):
    """A client's samples as one vector."""

    vector: Tensor
    lengths: list[float]  # of samples' values, before they were clipped
    chosen: Tensor | None  # the dimensions that were clipped apart


def layout_of(experiment: Experiment, engine: ReferenceEngine, server: Tree = None) -> Layout:
    """How this method's uploads are noised; for models, around what the server has now."""
    spec = engine.specs()[0]
    if server is None:
        server = experiment.method.init_server(spec)
    return layout_around(experiment, engine, 0, spec, download(experiment, engine, 0, server))


def layout_around(experiment: Experiment, engine: ReferenceEngine, number: int, spec: Spec, down: Tree) -> Layout:
    """The same, by a client that was sent `down`."""
    trains = bool(experiment.method.phases())
    return Layout(experiment.privacy, blank_upload(experiment, engine, number, spec, down), trains)


def download(experiment: Experiment, engine: ReferenceEngine, number: int, server: Tree) -> Tree:
    """What a client is sent."""
    device = engine.federation.device
    here = tree_map(lambda tensor: tensor.to(device), server)
    return deal(experiment.method.broadcast(here, torch.tensor([number], device=device)), 0)


def blank_upload(experiment: Experiment, engine: ReferenceEngine, number: int, spec: Spec, down: Tree) -> Tree:
    """What a new client without samples would send, had it downloaded and not trained: nothing in it is private."""
    method, data = experiment.method, no_samples(engine, number)
    client = _new_client(experiment, engine, number, spec, down, data)
    return method.upload(engine.model(number), client, data, down)[0]


def no_samples(engine: ReferenceEngine, number: int) -> LocalData:
    """The data of a client without samples: one that is masked, so that sums have their shapes."""
    device = engine.federation.device
    x, y = engine.federation.blank(number, 1).to(device), torch.zeros(1, dtype=torch.int64, device=device)
    batch = Batch(x, y, torch.zeros(1, device=device))
    return LocalData([batch], torch.ones(engine.federation.classes, device=device), random.key(0).to(device))


def _new_client(
    experiment: Experiment, engine: ReferenceEngine, number: int, spec: Spec, down: Tree, data: LocalData
) -> Client:
    """A new client that has downloaded."""
    method, device = experiment.method, engine.federation.device
    client = tree_map(lambda tensor: tensor.to(device), method.init_client(spec))
    return method.receive(engine.model(number), client, data, down)


def upload_alone(
    experiment: Experiment,
    engine: ReferenceEngine,
    number: int,
    down: Tree,
    key: Tensor,
    trained: Client | None = None,
) -> Callable[[Tensor, Tensor], Tree]:
    """The upload of a client that was sent `down`, has one sample only and has trained nothing, or of one that is
    `trained`."""
    method, model, classes = experiment.method, engine.model(number), engine.federation.classes
    spec = next(s for s in engine.specs() if s.architecture == engine.architectures[number])
    none = no_samples(engine, number)._replace(key=key)
    counts = torch.zeros_like(none.counts)
    client = trained or _new_client(experiment, engine, number, spec, down, none._replace(counts=counts))

    def upload(x: Tensor, y: Tensor) -> Tree:
        counts = (torch.arange(classes, device=y.device) == y).to(none.counts)
        mine = LocalData([Batch(x[None], y[None], counts.new_ones(1))], counts, key)
        return method.upload(model, client, mine, down)[0]

    return upload


def sends_of_samples(layout: Layout, experiment: Experiment, engine: ReferenceEngine) -> bool:
    """Whether anything that a client sends is computed from its samples after training; nothing private is looked at,
    and all samples count alike."""
    server = experiment.method.init_server(engine.specs()[0])
    (blank,) = no_samples(engine, 0).batches
    down = download(experiment, engine, 0, server)
    upload = upload_alone(experiment, engine, 0, down, random.key(0).to(blank.x.device))
    vectors, _ = layout.vectors(vmap(upload)(blank.x, blank.y))
    return bool(vectors[:, layout.values :].any())


def vector_of_samples(
    layout: Layout,
    experiment: Experiment,
    engine: ReferenceEngine,
    number: int,
    round: int,
    server: Tree,
    trained: Mapping[int, Client] | None = None,
    choose: Choose | None = None,
) -> SampleSum:
    """The sum of a client's clipped samples, and how long their values were: each sample's part is the upload of a
    client that has only this one and has trained nothing. `trained`: clients that were trained in steps with noise.
    `choose`: which dimensions are clipped apart from the others, by the statistics of all samples."""
    down = download(experiment, engine, number, server)
    client = trained[number] if trained else None
    return vector_around(layout, experiment, engine, number, round, down, client, choose)


def vector_around(
    layout: Layout,
    experiment: Experiment,
    engine: ReferenceEngine,
    number: int,
    round: int,
    down: Tree,
    trained: Client | None = None,
    choose: Choose | None = None,
) -> SampleSum:
    """The same, by a client that was sent `down`."""
    chosen = None
    words = experiment, engine, number, round, down, trained
    if choose is not None:
        parts = [layout.statistics(rows) for rows in _of_single_samples(*words)]
        chosen = choose(functools.reduce(operator.add, parts) if parts else None)
    whole = torch.zeros(layout.size, dtype=torch.float64, device=engine.federation.device)
    lengths: list[float] = []
    for rows in _of_single_samples(*words):
        vectors, length = layout.vectors(rows, chosen)
        whole += vectors.sum(0)
        lengths += length.tolist()
    return SampleSum(whole, lengths, chosen)


def _of_single_samples(
    experiment: Experiment,
    engine: ReferenceEngine,
    number: int,
    round: int,
    down: Tree,
    trained: Client | None,
) -> Iterator[Tree]:
    """The uploads of clients with one sample each, batch by batch."""
    data = engine.federation.local(number, round)
    upload = upload_alone(experiment, engine, number, down, data.key, trained)
    for batch in data.batches:
        if len(batch.y):
            yield vmap(upload)(batch.x, batch.y)
