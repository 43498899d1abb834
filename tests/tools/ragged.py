"""Whole rounds in double precision on ragged clients: by a method and the library, and by loops over single samples."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from protofed.local import local_update
from protofed.method import Batch, Client, LocalData, Method, Params, Spec, Tree
from protofed.models import Net, chain
from protofed.models.functional import FunctionalModel
from protofed.ops import random
from protofed.ops.optim import Optimizer
from protofed.ops.trees import alone, deal, merge

Sample = tuple[Tensor, int]
CLASSES, FEATURES, DIM = 5, 4, 3
LR, EPOCHS = 0.2, 2
LABELS = (  # by client, in batches; nobody has class 4
    [[0, 1, 2], [0, 0, 1], [2, 1, 0]],
    [[1]],
    [[3, 3, 3], [3, 3]],
    [[0, 1], [3, 2]],
    [],
)
COHORTS = ((0, 1, 2, 3), (3, 0, 4), (2, 3, 1))
MODEL = FunctionalModel(Net(chain(fc=nn.Linear(FEATURES, DIM), tanh=nn.Tanh()), chain(fc=nn.Linear(DIM, CLASSES)), DIM))


def samples(client: int) -> list[list[Sample]]:
    """A client's samples, batch by batch."""
    generator = torch.Generator().manual_seed(client)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return [
        [(centres[y] + 0.7 * torch.randn(FEATURES, generator=generator, dtype=torch.float64), y) for y in labels]
        for labels in LABELS[client]
    ]


def listed(client: int) -> list[Sample]:
    return [sample for batch in samples(client) for sample in batch]


def first_params() -> Params:
    generator = torch.Generator().manual_seed(7)
    shapes = {"body.fc.weight": (DIM, FEATURES), "body.fc.bias": (DIM,)}
    shapes |= {"head.fc.weight": (CLASSES, DIM), "head.fc.bias": (CLASSES,)}
    return {n: torch.randn(*shape, generator=generator, dtype=torch.float64) for n, shape in shapes.items()}


def spec() -> Spec:
    return Spec("tiny", CLASSES, DIM, first_params(), {}, seed=3, clients=len(LABELS))


def batches(client: int) -> list[Batch]:
    """The same as tensors; the last batch of a client ends with padding, which is all that one without samples has."""
    made = []
    for batch in samples(client) or [[]]:
        x, y = [x for x, _ in batch], [y for _, y in batch]
        made.append((torch.stack(x) if x else torch.zeros(0, FEATURES, dtype=torch.float64), torch.tensor(y).long()))
    x, y = made[-1]
    padded = torch.cat([x, torch.full((1, FEATURES), 9.0, dtype=torch.float64)]), torch.cat([y, torch.tensor([0])])
    made[-1] = padded
    found = [Batch(x, y, torch.ones(len(y), dtype=torch.float64)) for x, y in made]
    found[-1].mask[-1] = 0
    return found


def local_data(client: int, round: int) -> LocalData:
    counts = torch.bincount(torch.tensor([y for _, y in listed(client)]).long(), minlength=CLASSES).double()
    return LocalData(batches(client), counts, random.key("ragged", round, client))


@contextmanager
def doubles() -> Iterator[None]:
    """New tensors have double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def newcomer(method: Method) -> Client:
    """A client before its first round."""
    with doubles():
        return doubled(method.init_client(spec()))


@dataclass
class Played:
    """What a method's rounds left."""

    server: Tree
    clients: dict[int, Client] = field(default_factory=dict)
    servers: list[Tree] = field(default_factory=list)  # as each round found it


def doubled(tree: Tree) -> Tree:
    return tree_map(lambda t: t.double() if t.is_floating_point() else t, tree)


def play(method: Method, cohorts: Sequence[Sequence[int]] = COHORTS) -> Played:
    """Rounds by the method's own functions and the library's training."""
    with doubles():
        played = Played(doubled(method.init_server(spec())))
        for round, cohort in enumerate(cohorts):
            played.servers.append(played.server)
            down, ups = method.broadcast(played.server, torch.tensor(cohort)), []
            for place, number in enumerate(cohort):
                client = played.clients.get(number) or newcomer(method)
                passes: Any = (lambda epoch, n=number: batches(n)) if LABELS[number] else (lambda epoch: [])
                data = local_data(number, round)
                update = local_update(
                    method, MODEL, Optimizer(lr=LR), client, data, passes, deal(down, place), LR, EPOCHS
                )
                played.clients[number] = update.client
                ups.append(alone(update.up))
            up = ups[0]
            for other in ups[1:]:
                up = merge(up, other)
            played.server = method.aggregate(played.server, up, torch.tensor(cohort))
        return played


# the same in loops


def embedding(p: Params, x: Tensor) -> Tensor:
    rows = [(p["body.fc.weight"][d] * x).sum() + p["body.fc.bias"][d] for d in range(DIM)]
    return torch.stack([torch.tanh(row) for row in rows])


def logits(p: Params, z: Tensor) -> Tensor:
    return torch.stack([(p["head.fc.weight"][c] * z).sum() + p["head.fc.bias"][c] for c in range(CLASSES)])


def entropy(scores: Tensor, y: int) -> Tensor:
    """Cross-entropy of one sample."""
    return torch.log(sum((torch.exp(s - scores[y]) for s in scores), torch.zeros((), dtype=torch.float64)))


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum() / torch.sqrt((a**2).sum() * (b**2).sum())


def trained(
    p: Params,
    client: int,
    loss: Callable[[Params, list[Sample]], Tensor],
    trains: tuple[str, ...] = ("",),
    epochs: int = EPOCHS,
    lr: float = LR,
) -> Params:
    """Plain steps down the slope of a batch's loss."""
    for _ in range(epochs):
        for batch in samples(client):
            leaves = {n: v.clone().requires_grad_(n.startswith(trains)) for n, v in p.items()}
            value = loss(leaves, batch)
            if value.requires_grad:
                value.backward()  # type: ignore[no-untyped-call]
            p = {n: v.detach() - lr * v.grad if v.grad is not None else v.detach() for n, v in leaves.items()}
    return p


def mean_by(models: Sequence[tuple[float, Params]], old: Params) -> Params:
    """The weighted mean of models."""
    whole = sum(weight for weight, _ in models)
    if not whole:
        return old
    return {n: torch.stack([weight * p[n] for weight, p in models]).sum(0) / whole for n in models[0][1]}


def class_means(pairs: Sequence[tuple[Tensor, int]]) -> dict[int, Tensor]:
    """The mean of the vectors of each class that has any."""
    return {c: torch.stack(rows).mean(0) for c in range(CLASSES) if (rows := [z for z, y in pairs if y == c])}


def close(got: Any, expected: Any, what: str = "") -> None:
    """Equal up to 1e-9."""
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, msg=lambda said: f"{what}: {said}")
