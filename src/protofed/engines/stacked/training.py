"""A round of one group of clients: they receive, train and upload together."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from protofed.engines import Trained
from protofed.engines.stacked.cache import Steps
from protofed.engines.stacked.data import LazyBatches
from protofed.engines.stacked.groups import ClientGroup, Sizes, Work
from protofed.engines.stacked.lanes import LaneTraining
from protofed.engines.stacked.members import Members
from protofed.engines.stacks import along, deal_to, finite_rows, join_groups, pick_clients
from protofed.engines.sums import summed
from protofed.engines.wire import measure_down, measure_up
from protofed.method import Client, LocalData, Method, Tree


class GroupTraining:
    """A group's whole round, from functions of one client."""

    def __init__(self, members: Members, sizes: Sizes, steps: Steps, lanes: LaneTraining, ordered: bool) -> None:
        """`ordered`: keep uploads separate, to be summed in cohort order."""
        self.members, self.sizes, self.steps, self.lanes, self.ordered = members, sizes, steps, lanes, ordered
        self.clock, self.federation = members.reference.clock, members.federation
        self._looks: dict[Method, bool] = {}  # whether a method's upload reads the samples

    def train(
        self,
        method: Method,
        states: Mapping[int, Client],
        down: Tree,
        round: int,
        last: bool,
        at_once: int,
        group: ClientGroup,
    ) -> Trained:
        """A round, or the last phases; `at_once` threads do so at the same time."""
        many = len(group.numbers)
        key = self.members.samples(group.architecture).keys("train", round, group.numbers)
        work = Work(method, group, round, key, *deal_to(down, group.places))
        client = self.members.stack(group.numbers, states)
        client = self._apply(method.last_receive if last else method.receive, work, client, ())
        with self.clock.part("train", at_once):
            client, loss, seen = self.lanes.train(work, method.last_phases() if last else method.phases(), client)
        up: Tree = {}
        if not last:
            with self.clock.part("upload", at_once):
                up, client = self._upload(work, client, seen)
        copy = 1 < many < self.federation.clients  # a view would keep the other clients' states of its round alive
        return Trained(
            up=up if self.ordered else summed(up),
            clients=dict(zip(group.numbers, self.members.unstack(group.numbers, client, copy), strict=True)),
            loss=loss,
            finite=finite_rows((loss.total, client.params, up), many),
            sent=measure_up(up, many),
            received=measure_down(pick_clients(down, group.places), many),
        )

    def _upload(self, work: Work, client: Client, seen: Tree) -> tuple[Tree, Client]:
        """What all clients send and keep; if they read their samples again, a few clients at a time."""
        method, group = work.method, work.group
        looks = self._looks.get(method, True)
        looked = partial(self._looks.__setitem__, method)
        pieces = self.sizes.pieces(group, self._sizes(group))
        if not looks or len(pieces) == 1:
            made: tuple[Tree, Client] = self._apply(method.upload, work, client, seen, looked)
            return made
        found = []
        for piece in pieces:
            index = self.members.ids(piece)
            at, key, saw = along(index, (client, work.key, seen))
            mine = along(index, work.down, work.dims)
            found.append(
                self._apply(method.upload, work._replace(group=group.some(piece), key=key, down=mine), at, saw, looked)
            )
        order = self.members.ids([i for piece in pieces for i in piece]).argsort()
        made = along(order, join_groups(found))
        return made  # noqa: RET504

    def _apply(
        self,
        function: Callable[..., Any],
        work: Work,
        client: Client,
        seen: Tree,
        looked: Callable[[bool], None] = lambda looked: None,
    ) -> Any:
        """function(model, client, data, down) for all clients at once; when the function is traced, `looked` is told
        whether it reads samples."""
        group, dims = work.group, work.dims
        samples = self.members.samples(group.architecture)
        parts = samples.parts(group.numbers, self.sizes.at_once(group))
        model = self.members.model(group.numbers[0])

        def one(client: Client, parts: Any, counts: Tensor, key: Tensor, seen: Tree, down: Tree) -> Any:
            batches = LazyBatches(samples.train, parts)
            made = function(model, client, LocalData(batches, counts, key, seen), down)
            looked(batches.looked)
            return made

        mapped = self.sizes.mapped(group, self._sizes(group))(one, in_dims=(0, 0, 0, 0, 0, dims))
        name = (group.architecture, function.__func__, function.__self__, str(dims))  # type: ignore[attr-defined]
        counts = self.federation.counts_now(group.numbers)
        return self.steps.passed(name, mapped, client, parts, counts, work.key, seen, work.down)

    def _sizes(self, group: ClientGroup) -> list[int]:
        """The number of samples of each client."""
        return [len(self.federation.train_rows(i)) for i in group.numbers]
