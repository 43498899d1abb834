"""FedPAC: one body, and for each client the mixture of all heads that suits its classes best.

Personalized Federated Learning with Feature Alignment and Classifier Collaboration
    Xu et al., ICLR 2023. https://arxiv.org/abs/2306.11867
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from protofed.method import Batch, Client, Each, LocalData, Mean, Method, Model, Params, Phase, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.losses import cross_entropy
from protofed.ops.prototypes import class_sums, distance_to_own, no_prototypes, one_each, refresh
from protofed.ops.sharing import send, shared, take
from protofed.ops.simplex import best_mixtures
from protofed.ops.trees import total, under

HEAD = ("head.",)


@dataclass(frozen=True)
class FedPAC(Method):
    """Average bodies that are pulled towards global prototypes; mix a head for each client out of all clients'."""

    paper = "Xu et al., ICLR 2023, arXiv 2306.11867"
    losses = (
        "CE(F(w; x), y) for the head",
        "CE(F(w; x), y) + lam * mse(f(x), P[y]) for the body, from the second round on",
        "a'(diag(V) + D)a over mixtures a of heads, for each client on the server",
    )
    presets = {
        "paper": {"least": 0.0},
        "official": {"least": 0.001},
    }

    lam: Annotated[float, Ge(0)] = 1.0
    """Weight of the body's pull towards the global prototypes."""
    head_epochs: Annotated[int, Ge(1)] = 1
    """Epochs of the head before the body is trained."""
    head_lr: Annotated[float, Gt(0)] = 0.1
    """Step size of the head."""
    smallest: Annotated[float, Ge(0)] = 0.0
    """The server's matrices lose eigenvalues below this; 0 keeps all. The authors' code drops those below 0.01, but
    only of a matrix that has a negative one, which only rounding gives."""
    least: Annotated[float, Ge(0)] = 0.001
    """A client's mixture leaves out heads with a smaller weight than this (the authors' code), and the others are
    divided by their sum."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("fedpac", specs)

    def init_server(self, spec: Spec) -> Tree:
        heads = Mean(torch.zeros(1, len(_flat(spec.params))), torch.zeros(1))  # of nobody yet
        none = {"heads": heads, "owners": torch.tensor([-1])}
        return {"body": shared(spec, HEAD), "prototypes": no_prototypes(spec.classes, spec.dim), **none}

    def broadcast(self, server: Tree, cohort: Tensor) -> Tree:
        owners = server["owners"]
        same = (cohort.to(owners.device)[:, None] == owners).to(torch.int64)
        heads = Mean(*(part[same.argmax(1)] for part in server["heads"]))
        heads = heads._replace(weight=heads.weight * same.amax(1))
        return {"body": server["body"], "prototypes": server["prototypes"], "head": Each(heads)}

    def newcomer(self, server: Tree) -> Tree:
        nothing = Mean(torch.zeros_like(server["heads"].total[0]), torch.zeros_like(server["heads"].weight[0]))
        return {"body": server["body"], "prototypes": server["prototypes"], "head": nothing}

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        mixed: Mean = down["head"]
        head = torch.where(mixed.weight > 0, mixed.total, _flat(client.params))
        client = take(client, down["body"])
        client = client._replace(params=client.params | _head(head, client.params))
        classes = len(data.counts)
        pairs = [(model.embed(client, b.x), b) for b in data.batches]
        own = total(class_sums(z, b, classes) for z, b in pairs)
        squares = total(class_sums((z**2).sum(1, keepdim=True), b, classes) for z, b in pairs)
        n = data.counts.sum().clamp(min=1)
        share = data.counts / n
        spread = (share * squares.value[:, 0] - share**2 * (own.value**2).sum(1)).sum() / n
        return client._replace(memory={"own": own.value, "spread": spread, "means": share[:, None] * own.value})

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(HEAD, epochs=self.head_epochs, lr=self.head_lr), Phase(("body.",), self.body_loss))

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        return batch.mean(cross_entropy(model(client, batch.x)[1], batch.y))

    def body_loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        z, logits = model(client, batch.x)
        others: Mean = down["prototypes"]
        later = (others.weight > 0).any().to(z.dtype)  # 0 in the first round, which has no prototypes
        rows = torch.where((others.weight > 0)[:, None], others.value, client.memory["own"])
        pull = distance_to_own(z, batch.y, Mean(rows, torch.ones_like(others.weight)), "mse")
        return batch.mean(cross_entropy(logits, batch.y) + self.lam * later * pull)

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        own = total(class_sums(model.embed(client, b.x), b, len(data.counts)) for b in data.batches)
        told = {"head": under(client.params, HEAD), "spread": client.memory["spread"], "means": client.memory["means"]}
        there = (data.counts.sum() > 0).to(data.counts.dtype)
        up = {"body": send(client, data, "samples", HEAD), "prototypes": own, "head": Each(told | {"there": there})}
        return up, client._replace(memory={})

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        rows = up["head"].rows
        mixed = mixtures(rows["spread"], rows["means"], rows["there"] > 0, self.smallest)
        mixed = mixed * (mixed >= self.least)
        mixed = mixed / mixed.sum(1, keepdim=True).clamp(min=1e-12)
        heads = torch.cat([value.flatten(1) for value in rows["head"].values()], 1)
        there = (rows["there"] > 0) & (mixed.sum(1) > 0)  # a client without samples keeps the head it has
        owners, new = cohort.to(there.device)[there], Mean.of(mixed[there] @ heads, rows["there"][there])
        absent = ~torch.isin(server["owners"], owners)  # they get theirs when they are drawn again
        owners, order = torch.cat([server["owners"][absent], owners]).sort()
        return {
            "body": up["body"].otherwise(server["body"]),
            "prototypes": refresh(server["prototypes"], up["prototypes"]),
            "heads": Mean(*(torch.cat([a[absent], b])[order] for a, b in zip(server["heads"], new, strict=True))),
            "owners": owners,
        }

    def prototypes(self, server: Tree) -> Mean:
        return one_each(server["prototypes"])


def mixtures(spread: Tensor, means: Tensor, there: Tensor, smallest: float) -> Tensor:
    """How much of each client's head (K, K) a client's own new head takes: a row for each client.

    A head costs by how uncertain its client's statistics are, `spread` (K,), and by how far its class means weighted
    by class shares, `means` (K, C, D), are from the client's.
    """
    apart = (means[:, None] - means).flatten(2)  # (K, K, C * D): client i's, less client j's
    quadratic = torch.diag(spread) + apart @ apart.mT
    if smallest:
        values, vectors = torch.linalg.eigh(quadratic)
        values = values.masked_fill(values < smallest, 0)
        quadratic = (vectors * values[:, None]) @ vectors.mT
    return best_mixtures(quadratic, there)


def _flat(params: Params) -> Tensor:
    """A model's head as one vector."""
    return torch.cat([value.flatten() for value in under(params, HEAD).values()])


def _head(vector: Tensor, params: Params) -> Params:
    """The head that a vector stands for, in the shapes of this model's."""
    named = under(params, HEAD)
    parts = torch.split(vector, [value.numel() for value in named.values()])
    return {name: part.reshape(value.shape) for (name, value), part in zip(named.items(), parts, strict=True)}
