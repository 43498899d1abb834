"""Which clients take part: in the run and in each round."""

from collections.abc import Sequence

from protofed.config.experiment import Experiment
from protofed.ops import random


def held_out(experiment: Experiment) -> list[int]:
    """The clients that take part in no round and join after the last one, drawn by the seed."""
    order = random.permutation(random.key(experiment.seed, "held out"), experiment.clients)
    return sorted(order[: experiment.held_out_clients].tolist())


def taking_part(experiment: Experiment) -> Sequence[int]:
    """All other clients."""
    if not experiment.held_out_clients:
        return range(experiment.clients)
    return sorted(set(range(experiment.clients)) - set(held_out(experiment)))


def cohort_size(experiment: Experiment) -> int:
    """How many clients take part in a round."""
    return max(1, int(experiment.participation * len(taking_part(experiment)) + 1e-9))


def draw_cohort(experiment: Experiment, round: int) -> list[int]:
    """The clients of a round, from seed and round alone, so that every method trains the same ones."""
    there, size = taking_part(experiment), cohort_size(experiment)
    if size == len(there):
        return list(there)
    order = random.first_drawn(random.key(experiment.seed, "cohort", round), len(there), size)
    return sorted(there[i] for i in order.tolist())
