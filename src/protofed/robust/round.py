"""A round's uploads, between the clients and the method's `aggregate`: who attacks, and how they are combined."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from protofed.config.sections import Attack, Robust
from protofed.errors import UserError
from protofed.method import Tree
from protofed.ops import random
from protofed.robust.attacks import attacked
from protofed.robust.combine import Centres, combine


def attackers(attack: Attack, seed: int, samples: dict[int, int]) -> frozenset[int]:
    """The clients that attack; `samples`: each client's number of training samples."""
    if not attack.on:
        return frozenset()
    numbers = sorted(samples)
    order = [numbers[i] for i in random.permutation(random.key(seed, "attackers"), len(numbers)).tolist()]
    if attack.who != "any":
        order.sort(key=lambda number: samples[number] * (1 if attack.who == "smallest" else -1))
    return frozenset(order[: max(1, round(attack.share * len(numbers)))])


class Uploads(NamedTuple):
    """How a run combines the uploads of a round."""

    robust: Robust
    attack: Attack
    seed: int
    classes: int
    attackers: Collection[int] = ()

    def together(self, rows: Tree, cohort: Sequence[int], round: int, before: Centres) -> tuple[Tree, Centres]:
        """Combine uploads with an axis of clients for `aggregate`; also returns the centres for the next round."""
        up, centres = combine(self.robust, self.sent(rows, cohort, round, before), before)
        return up, centres if self.remembers else {}

    def sent(self, rows: Tree, cohort: Sequence[int], round: int, before: Centres) -> Tree:
        """Uploads with an axis of clients as the clients send them: the attackers' are replaced."""
        if not self.attack.uploads:
            return rows
        keys = [random.key(self.seed, "attack", round, n) if n in self.attackers else None for n in cohort]
        pair = random.permutation(random.key(self.seed, "swap"), max(2, self.classes))[:2].tolist()
        return attacked(self.attack, rows, before, keys, self.classes, pair)

    @property
    def remembers(self) -> bool:
        """Whether the rule or the attack uses the last round's centres."""
        lies = self.attack.uploads and self.attack.kind in ("sign_flip", "backdoor")
        return lies or self.robust.rule in ("clip", "centred_clip")


def refuse_elsewhere(attack: Attack) -> None:
    """Refuse an attack in a real federation."""
    if attack.kind != "none":
        raise UserError(
            f"attack.kind = {attack.kind!r} is for simulations, and this is a real federation. Remove [attack] from "
            "the experiment; [robust] may stay."
        )
