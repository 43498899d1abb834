"""A secure sum whose members are all in this process: the same steps as in a federation, without messages."""

from collections.abc import Sequence
from typing import NamedTuple

from torch.utils._pytree import tree_map

from protofed.errors import UserError
from protofed.method import Tree
from protofed.privacy import Privacy
from protofed.privacy.collector import SumCollector
from protofed.privacy.fixed import CHECKS, Grid, Opened, means_of
from protofed.privacy.graph import degree, needed
from protofed.privacy.keys import PUBLIC, Identity, lasting_keys
from protofed.privacy.member import SEALED, SumMember
from protofed.privacy.shares import SECRET


class Traffic(NamedTuple):
    """Numbers and bytes of a sum, of all members together."""

    numbers: int
    up: int
    down: int


class SimulatedSums:
    """The members of a simulation, with lasting keys that are made when they first take part."""

    def __init__(self, privacy: Privacy, cohort: int) -> None:
        self.privacy, self.threshold = privacy, needed(privacy.threshold, cohort)
        self._identities: dict[int, Identity] = {}

    def sum(
        self, rows: Tree, cohort: Sequence[int], round: int, caps: tuple[float, ...], grid: Grid | None = None
    ) -> tuple[Opened, Traffic]:
        """The sum of trees of Means with an axis of clients, and what it takes to send. `grid`: for whole numbers, if
        privacy.range does not say it."""
        if len(cohort) < self.threshold:
            raise UserError(
                f"a secure sum needs privacy.threshold = {self.threshold} clients, and {len(cohort)} take part. Use "
                "more clients, a larger participation or a lower threshold."
            )
        if not set(cohort) <= self._identities.keys():
            self._identities = lasting_keys(sorted({*self._identities, *cohort}))
        grid = grid or Grid(self.privacy.bits, self.privacy.range, len(cohort), caps)
        ups = {number: tree_map(lambda t, row=row: t[row], rows) for row, number in enumerate(cohort)}
        form = ups[cohort[0]]
        context = f"simulation/{round}".encode()
        collector = SumCollector(context, self.threshold, grid, grid.size(form))
        members = {number: SumMember(self._identities[number], context, self.threshold) for number in cohort}
        for number, member in members.items():
            collector.advertise(number, member.public)
        collector.begin()
        for number, member in members.items():
            collector.share(number, list(member.shares(collector.adverts).values()))
        for number, member in members.items():
            received = collector.for_member(number)
            masked = member.masked(received, collector.shared.keys(), grid.encode(ups[number]), grid)
            collector.add(number, masked.commitment, masked.vector)
        for number, member in members.items():
            collector.open_with(number, member.unmask(set(collector.survivors)))
        return grid.decode(collector.total(), form, len(cohort)), _traffic(collector)


def sizes_of(privacy: Privacy, up: Tree, cohort: int, loss: bool = True) -> tuple[int, int]:
    """Bytes that one client sends in a sum of so many: its masked numbers, with the loss if that is sent, and its keys
    and shares."""
    grid = Grid(privacy.bits, privacy.range, cohort, (1.0,) * len(means_of(up)))
    vector = (grid.size(up) + (2 if loss else 0)) * privacy.bits // 8
    return vector, PUBLIC + SECRET + degree(cohort) * SEALED + (degree(cohort) + 1) * SECRET


def _traffic(collector: SumCollector) -> Traffic:
    """What a federation would send for this sum, besides what the method broadcasts."""
    many, edges = len(collector.adverts), sum(map(len, collector.near.values()))
    listed = -(-many // 8)  # bytes that say who is left
    vector = collector.size * collector.grid.bits // 8
    up = many * (PUBLIC + SECRET + vector + SECRET) + edges * (SEALED + SECRET)
    return Traffic(many * (collector.size - 1 - CHECKS), up, many * (many * PUBLIC + 2 * listed) + edges * SEALED)
