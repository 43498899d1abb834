"""Members of a secure sum that contradict each other: of each pair one lies at least, and at times it shows which."""

from collections.abc import Iterable, Set


class Disputes:
    """Pairs of members of which at least one lies, as far as each says or as their shares show."""

    def __init__(self, doubt: int) -> None:
        """`doubt`: how many members may lie together; who is at odds with more lies."""
        self.doubt = doubt
        self.pairs: set[tuple[int, int]] = set()
        self.caught: set[int] = set()  # whatever the others do

    def add(self, one: int, other: int) -> None:
        """These two contradict each other."""
        if one != other:
            self.pairs.add((min(one, other), max(one, other)))

    def liars(self) -> set[int]:
        """Who lies, if no more members lie together than are doubted."""
        found = set(self.caught)
        for number in {number for pair in self.pairs for number in pair}:
            found |= {number} if sum(number in pair for pair in self.pairs) > self.doubt else set()
        return found

    def unsettled(self, named: Iterable[int] = ()) -> list[tuple[int, int]]:
        """Pairs of which nobody can tell who lies, each member in one of them at most: without all of these, nobody is
        at odds with anybody but `named` ones and known liars."""
        taken: set[int] = {*named, *self.liars()}
        found = []
        for pair in sorted(self.pairs):
            if taken.isdisjoint(pair):
                found.append(pair)
                taken |= set(pair)
        return found


def doubted(members: int, threshold: int) -> int:
    """How many members may lie together without being believed: as many as a sum can do without, and one always."""
    return max(1, members - threshold)


class Suspects:
    """Who may have spoilt sums that did not open. A member that adds other masks than it shared shows in no single sum,
    so from round to round some are left out."""

    def __init__(self) -> None:
        self.among: list[int] = []  # one of these at least, if always the same one lies

    def spoilt(self, members: Set[int]) -> None:
        """A sum over these did not open."""
        self.among = [number for number in self.among if number in members] or sorted(members)

    def opened(self, members: Set[int]) -> None:
        """A sum over these opened."""
        self.among = [number for number in self.among if number not in members]

    def aside(self, members: Set[int], spare: int) -> set[int]:
        """Who is left out of the next sum: half of the suspects, or as many as it can do without."""
        here = [number for number in self.among if number in members]
        return set(here[: max(0, min(spare, -(-len(here) // 2)))])
