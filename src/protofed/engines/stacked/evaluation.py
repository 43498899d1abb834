"""Testing a group of clients: their right answers are counted together."""

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from protofed.engines.stacked.cache import Steps
from protofed.engines.stacked.groups import ClientGroup, Sizes
from protofed.engines.stacked.members import Members
from protofed.engines.stacks import along, deal_to, rows_of
from protofed.method import Client, Method, Tree
from protofed.metrics import Tally, add, tally


class GroupEvaluation:
    """Counts right answers of groups of clients, or of the global model in their place."""

    def __init__(self, members: Members, sizes: Sizes, steps: Steps) -> None:
        self.members, self.sizes, self.steps, self.federation = members, sizes, steps, members.federation

    def evaluate(
        self,
        method: Method,
        states: Mapping[int, Client],
        whole: Client | None,
        down: Tree,
        on: str,
        confusion: str,
        group: ClientGroup,
    ) -> list[Tally]:
        """Test clients of similar size at a time, or, on the global test set, those of one domain; `whole`: the global
        model, if it is the one tested."""
        tallies: dict[int, Tally] = {}
        if on == "global":
            domains = [self.federation.domain(i) for i in group.numbers]
            pieces = [[i for i, d in enumerate(domains) if d == domain] for domain in sorted(set(domains))]
        else:
            pieces = self.sizes.pieces(group, [len(self.federation.test_rows(i, on)) for i in group.numbers])
        together = whole or self.members.stack(group.numbers, states)
        for piece in pieces:
            clients = together if whole or len(pieces) == 1 else along(self.members.ids(piece), together)
            counted = self._piece(method, group.some(piece), clients, whole is not None, down, on, confusion)
            tallies |= dict(zip(piece, counted, strict=True))
        return [tallies[i] for i in range(len(group.numbers))]

    @torch.no_grad()
    def _piece(
        self, method: Method, group: ClientGroup, clients: Client, whole: bool, down: Tree, on: str, confusion: str
    ) -> list[Tally]:
        samples = self.members.samples(group.architecture)
        mine, dims = deal_to(down, group.places)
        own = self.federation.class_counts(group.numbers) > 0
        shared = None if on == "global" else 0  # the global test set is the same for all of them
        if on != "global":
            rows, sizes = samples.test_rows(group.numbers, on)
            mask = torch.arange(rows.shape[1], device=rows.device) < sizes[:, None]
        else:
            rows = samples.global_rows(group.numbers[0])
            mask = torch.ones_like(rows, dtype=torch.bool)

        wide = max(1, self.sizes.at_once(group) // len(group.numbers))
        mapped, model = self.sizes.mapped(group, [rows.shape[-1]]), self.members.model(group.numbers[0])

        def count(client: Client, x: Tensor, y: Tensor, mask: Tensor, own: Tensor, down: Tree) -> Tally:
            return tally(method.predict(model, client, x, down), y, own, mask, confusion)

        def work(client: Client, rows: Tensor, mask: Tensor, own: Tensor, down: Tree) -> Tally:
            counted = mapped(count, in_dims=(None if whole else 0, shared, shared, shared, 0, dims))
            parts = zip(torch.split(rows, wide, -1), torch.split(mask, wide, -1), strict=True)
            return reduce(add, [counted(client, samples.test.x[r], samples.test.y[r], m, own, down) for r, m in parts])

        name = ("evaluate", group.architecture, method, on, whole, str(dims), confusion)
        counted = self.steps.passed(name, work, clients, rows, mask, own, mine)
        return rows_of(tree_map(torch.Tensor.cpu, counted), copy=False)
