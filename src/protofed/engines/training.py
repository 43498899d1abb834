"""A round of one group of clients: they receive, train and upload together."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from protofed.data.stacked import LazyBatches
from protofed.engines import Trained
from protofed.engines.cache import Steps
from protofed.engines.groups import Group, Sizes, Work
from protofed.engines.lanes import LaneTraining
from protofed.engines.members import Members
from protofed.engines.stacks import along, deal_to, finite_rows, join, pick
from protofed.engines.sums import summed
from protofed.engines.wire import measure_down, measure_up
from protofed.method import Client, LocalData, Method, Tree


class GroupTraining:
    """The whole of a group's round, by functions of one client."""

    def __init__(self, members: Members, sizes: Sizes, steps: Steps, lanes: LaneTraining, ordered: bool) -> None:
        """`ordered`: uploads stay one by one, to be summed in the order of the cohort."""
        self.members, self.sizes, self.steps, self.lanes, self.ordered = members, sizes, steps, lanes, ordered
        self.clock, self.federation = members.reference.clock, members.federation
        self._looks: dict[Method, bool] = {}  # whether a method's upload looks at the samples

    def train(
        self,
        method: Method,
        group: Group,
        states: Mapping[int, Client],
        down: Tree,
        round: int,
        last: bool,
        at_once: int,
    ) -> Trained:
        """A round, or the last phases; so many threads do so at once."""
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
        copy = 1 < many < self.federation.clients  # a view would keep the others of its round alive
        return Trained(
            up=up if self.ordered else summed(up),
            clients=dict(zip(group.numbers, self.members.unstack(group.numbers, client, copy), strict=True)),
            loss=loss,
            finite=finite_rows((loss.total, client.params, up), many),
            sent=measure_up(up, many),
            received=measure_down(pick(down, group.places), many),
        )

    def _upload(self, work: Work, client: Client, seen: Tree) -> tuple[Tree, Client]:
        """What all clients send and keep; where they look at their samples again, some clients at a time."""
        method, group = work.method, work.group
        looks = self._looks.get(method, True)
        pieces = self.sizes.pieces(group, self._sizes(group))
        if not looks or len(pieces) == 1:
            made: tuple[Tree, Client] = self._apply(method.upload, work, client, seen)
            return made
        found = []
        for piece in pieces:
            index = self.members.ids(piece)
            at, key, saw = along(index, (client, work.key, seen))
            mine = along(index, work.down, work.dims)
            found.append(
                self._apply(method.upload, work._replace(group=group.some(piece), key=key, down=mine), at, saw)
            )
        order = self.members.ids([i for piece in pieces for i in piece]).argsort()
        made = along(order, join(found))
        return made  # noqa: RET504

    def _apply(self, function: Callable[..., Any], work: Work, client: Client, seen: Tree) -> Any:
        """function(model, client, data, down) for all clients at once."""
        group, dims = work.group, work.dims
        samples = self.members.samples(group.architecture)
        parts = samples.parts(group.numbers, self.sizes.at_once(group))
        model = self.members.model(group.numbers[0])

        def one(client: Client, parts: Any, counts: Tensor, key: Tensor, seen: Tree, down: Tree) -> Any:
            batches = LazyBatches(samples.train, parts)
            made = function(model, client, LocalData(batches, counts, key, seen), down)
            if function.__name__ == "upload":
                self._looks[function.__self__] = batches.looked  # type: ignore[attr-defined]
            return made

        mapped = self.sizes.mapped(group, self._sizes(group))(one, in_dims=(0, 0, 0, 0, 0, dims))
        name = (group.architecture, function.__func__, function.__self__, str(dims))  # type: ignore[attr-defined]
        counts = self.federation.counts[group.numbers]
        return self.steps.passed(name, mapped, client, parts, counts, work.key, seen, work.down)

    def _sizes(self, group: Group) -> list[int]:
        """Samples of each client."""
        return [len(self.federation.train_rows(i)) for i in group.numbers]
