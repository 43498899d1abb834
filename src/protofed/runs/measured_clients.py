"""Which clients are measured: those that do not attack, and evenly spaced ones if there are very many."""

from collections.abc import Iterator, Sequence

from protofed.config.experiment import Experiment
from protofed.engines import Engine
from protofed.runs.robustness import attackers_of
from protofed.runs.setup import Prepared
from protofed.runs.watch import Watch

SAMPLED = 1000  # clients of computed data that are measured after the last round, unless evaluate.clients says so


def honest_of(experiment: Experiment, engine: Engine, cohort: Sequence[int]) -> Sequence[int]:
    """The clients among these that do not attack."""
    if not experiment.attack.on:
        return cohort
    bad = attackers_of(experiment, engine.samples(range(experiment.clients)))
    return [number for number in cohort if number not in bad]


def spaced(clients: int, most: int) -> set[int]:
    """At most this many of the clients, evenly spaced; 0: all."""
    many = min(most or clients, clients)
    return {i * clients // many for i in range(many)}


def measured_at_end(experiment: Experiment, prepared: Prepared, there: Sequence[int]) -> Sequence[int]:
    """The clients that are measured after the last round."""
    most = experiment.evaluate.clients or (0 if prepared.domains[0].computed is None else SAMPLED)
    return there if not most or most >= len(there) else [there[i] for i in sorted(spaced(len(there), most))]


def together_measured(everyone: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """Clients that are measured together: ten, or one hundredth if there are very many, up to a hundred, if `most`
    allows."""
    size = max(1, min(100, max(10, len(everyone) // 100), most))
    return (everyone[i : i + size] for i in range(0, len(everyone), size))


def say_who_is_measured(
    watch: Watch, many: tuple[int, int, int], everyone: Sequence[int], participations: dict[str, int]
) -> None:
    """Notes on which clients these numbers are about, if some take part without being measured, attack, or never took
    part."""
    there, honest, chosen = many
    if len(everyone) < there:
        watch.note(
            f"measured after the last round: {len(everyone)} of {there} clients, evenly spaced (evaluate.clients)"
        )
    if new := sum(str(number) not in participations for number in everyone):
        watch.note(f"{new} clients never took part and are measured as they began")
    if chosen < honest:
        watch.note(
            f"PM(V) and PM(L), the clients' own models on the whole test set, are over {chosen} of {honest} "
            "clients, evenly spaced (evaluate.pm_clients = 0: all)"
        )
