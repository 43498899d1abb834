"""FeSEM: several global models; every client belongs to the nearest one, by expectation-maximisation.

Multi-Center Federated Learning: Clients Clustering for Better Personalization
    Long et al., World Wide Web 2023. https://arxiv.org/abs/2005.01026
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils._pytree import tree_map

from protofed.errors import UserError
from protofed.method import Batch, Client, Each, LocalData, Method, Model, Spec, Tree
from protofed.ops.checks import same_shapes
from protofed.ops.losses import cross_entropy
from protofed.ops.sharing import Weighting, shared, take, weight
from protofed.ops.trees import under


@dataclass(frozen=True)
class FeSEM(Method):
    """Cluster the clients by their models; average within each cluster."""

    paper = "Long et al., World Wide Web 2023, arXiv 2005.01026"
    losses = ("CE(F(w; x), y)", "sum over clients of |w_i - nearest centre|^2, Eq. 3, by expectation-maximisation")
    presets = {
        "paper": {"grouping": "em", "weighting": "uniform"},
        "official": {"grouping": "size", "centres": 2, "weighting": "uniform"},
    }

    centres: Annotated[int, Ge(1)] = 3
    """Global models; 1 is FedAvg."""
    grouping: Literal["em", "size"] = "em"
    """Clients go to the nearest centre (the paper), or into two groups, those with fewer samples than the mean of the
    round's clients and the others (FedProto's code, where all take part and the groups are fixed)."""
    compare: str = ""
    """Prefix of the parameters that distances are taken over; empty: all. The authors' code takes one layer."""
    weighting: Weighting = "samples"
    """Clients count by their number of samples (the authors' code), or all alike (the paper, FedProto's code)."""

    def check(self, specs: Sequence[Spec]) -> None:
        same_shapes("fesem", specs)
        if not under(specs[0].params, self.compare):
            there = ", ".join(specs[0].params)
            raise UserError(f"method.compare = {self.compare!r} begins no parameter's name. There are {there}.")

    def init_server(self, spec: Spec) -> Tree:
        several = tree_map(lambda t: t.repeat(self.centres, *[1] * t.ndim), shared(spec))
        members = torch.randint(self.centres, (spec.clients,), generator=spec.generator())
        return {"centres": several, "members": members}

    def broadcast(self, server: Tree, cohort: Tensor) -> Tree:
        mine = server["members"][cohort]
        return Each(tree_map(lambda centre: centre[mine], server["centres"]))

    def receive(self, model: Model, client: Client, data: LocalData, down: Tree) -> Client:
        return take(client, down)

    def loss(self, model: Model, client: Client, batch: Batch, down: Tree) -> Tensor:
        _, logits = model(client, batch.x)
        return batch.mean(cross_entropy(logits, batch.y))

    def upload(self, model: Model, client: Client, data: LocalData, down: Tree) -> tuple[Tree, Client]:
        up = {"model": Each(shared(client)), "weight": Each(weight(data, self.weighting))}
        return up | ({"size": Each(data.counts.sum())} if self.grouping == "size" else {}), client

    def aggregate(self, server: Tree, up: Tree, cohort: Tensor) -> Tree:
        models, counts = up["model"].rows, up["weight"].rows
        before = server["members"][cohort]
        if self.grouping == "em":
            mine = self._nearest(models["params"], server["centres"]["params"], before)  # E-step
        else:
            sizes = up["size"].rows
            usual = sizes.sum() / (sizes > 0).sum()  # the mean over the round's clients that have samples
            mine = (sizes >= usual).long().clamp(max=self.centres - 1)
        share = torch.nn.functional.one_hot(mine, self.centres).to(counts.dtype) * counts[:, None]  # (K, M)
        total = share.sum(0)

        def mean(rows: Tensor, old: Tensor) -> Tensor:  # M-step; a centre without members stays
            new = torch.tensordot(share.T, rows, 1) / _like(total, old)  # NaN for a centre without members
            return torch.where(_like(total > 0, old), new, old)

        centres = tree_map(mean, models, server["centres"])
        return {"centres": centres, "members": server["members"].index_copy(0, cohort, mine)}

    def _nearest(self, models: Tree, centres: Tree, before: Tensor) -> Tensor:
        """The centre (K,) with the smallest squared distance; in a tie, the client's previous centre."""
        names = under(models, self.compare)
        distance = torch.stack([((models[n].unsqueeze(1) - centres[n]) ** 2).flatten(2).sum(2) for n in names]).sum(0)
        best = distance.min(1)
        return torch.where(distance.gather(1, before[:, None])[:, 0] <= best.values, before, best.indices)


def _like(weights: Tensor, rows: Tensor) -> Tensor:
    return weights.reshape((-1, *[1] * (rows.ndim - 1)))
