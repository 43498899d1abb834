"""The figures of the report, in its order: one file each, with a function `make(groups) -> Figure`."""

from collections.abc import Callable, Iterator, Sequence

from protofed.report.figure import Figure
from protofed.report.figures import (
    accuracy,
    clients,
    confusion,
    drift,
    embeddings,
    leaks,
    partition,
    similarity,
    theory,
    time,
    traffic,
)
from protofed.report.groups import Group

FIGURES = (accuracy, clients, partition, embeddings, similarity, drift, confusion, traffic, time, theory, leaks)


def figures(groups: Sequence[Group], tell: Callable[[int, int], None] | None = None) -> Iterator[Figure]:
    """All figures; a figure says so if no run has its numbers."""
    for done, kind in enumerate(FIGURES):
        if tell is not None:
            tell(done, len(FIGURES))
        yield kind.make(groups)
