"""How much epsilon an attack proves: a lower bound, which must not exceed what the run claims."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protofed.leaks.scores import LowerBound, epsilon_bound
from protofed.leaks.uploads import Clients
from protofed.leaks.views import View
from protofed.ops import random
from protofed.privacy import accounting
from protofed.privacy.ledger import LEDGER
from protofed.privacy.noise import seeded
from protofed.privacy.release import Layout, noised_sum
from protofed.runs.lines import read_lines

TRIALS = 4000  # releases with the unit, and as many without it
NUMBERS = 4e7  # drawn for them at most, in all
CONFIDENCE = 0.95


class Trials(NamedTuple):
    """How far releases point in the direction of one unit's vector."""

    there: Tensor  # (N,) the unit is in the release
    absent: Tensor  # (N,) it is not


def play(layout: Layout, vector: Tensor, noise: float, trials: int, draw: Callable[[int, int], Tensor]) -> Trials:
    """Release one unit's vector (P + R,), and nothing, again and again, and look in its direction.

    The attacker knows the vector and all other units', so it can take these off: nobody tells the two worlds apart
    better. `draw(number, many)`: normal numbers.
    """
    direction = (vector / vector.norm().clamp(min=1e-300)).cpu()

    def release(unit: Tensor, number: int) -> Tensor:
        released, _, _ = noised_sum(layout, [unit], noise, lambda place, many: draw(number, many))
        return torch.dot(released.cpu(), direction)

    there = [release(vector, 2 * number) for number in range(trials)]
    absent = [release(torch.zeros_like(vector), 2 * number + 1) for number in range(trials)]
    return Trials(torch.stack(there), torch.stack(absent))


def per_attacker(scores: Tensor, times: int) -> Tensor:
    """The scores of attackers who each see this many releases of one unit."""
    return scores[: len(scores) // times * times].reshape(-1, times).sum(1)


def audited(view: View, clients: Clients, seed: int) -> dict[str, Any] | None:
    """Claimed epsilon and lower bound; None for a run without a budget."""
    layout, privacy = view.layout, view.privacy
    if layout is None:
        return None
    vector = _longest(view, layout, clients)
    trials = int(max(200, min(TRIALS, NUMBERS / (2 * layout.size))))
    key = random.key(view.saved.experiment.seed, "leaks", "audit", seed)
    found = play(layout, vector, view.noise, trials, lambda number, many: seeded(random.fold(key, number), many))
    times = releases_of_one(view)
    one = epsilon_bound(found.there, found.absent, privacy.delta, CONFIDENCE)
    every = epsilon_bound(
        per_attacker(found.there, times), per_attacker(found.absent, times), privacy.delta, CONFIDENCE
    )
    return {
        "unit": privacy.unit,
        "where": privacy.where,
        "delta": privacy.delta,
        "noise": view.noise,
        "clip": privacy.clip,
        "length": float(vector.norm()),
        "confidence": CONFIDENCE,
        "one_release": _told(one, accounting.spent(view.noise, 1, privacy.delta), trials),
        "all_releases": {"releases": times, **_told(every, spent_of(view, times), trials // times)},
    }


def spent_of(view: View, times: int) -> float:
    """The epsilon that the run claims after this many releases."""
    return accounting.spent(view.noise, times, view.privacy.delta, view.steps)


def releases_of_one(view: View) -> int:
    """How many releases any unit's data are in by the saved round, by the run's ledger."""
    times: dict[int, int] = {}
    for line in read_lines(view.saved.folder.file(LEDGER)):
        for number in line["clients"] if line["round"] <= view.saved.state.round else ():
            times[number] = times.get(number, 0) + 1
    return max(times.values(), default=1)


def _longest(view: View, layout: Layout, clients: Clients) -> Tensor:
    """The longest clipped vector of a unit: of a client, or of a sample of the first clients."""
    if view.privacy.unit == "client":
        vectors = torch.stack([view.vector(layout, number, None) for number in clients.numbers])
    else:
        first = clients.numbers[0]
        samples = view.engine.federation.train(first)
        vectors = view.sample_vectors(layout, first, type(samples)(samples.x[:64], samples.y[:64]))
    return vectors[vectors.norm(dim=1).argmax()]


def _told(bound: LowerBound, claimed: float, trials: int) -> dict[str, Any]:
    return {
        "claimed": claimed,
        "lower_bound": bound.epsilon,
        "tpr": bound.tpr,
        "fpr": bound.fpr,
        "trials": trials,
    }
