"""A data set: two pairs of arrays, the names of its classes, and the owner of each sample."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from protofed.data.computed import Computed


@dataclass(frozen=True, repr=False)
class Domain:
    """One data set. Images are (N, channels, height, width), anything else (N, ...); labels are 0 .. classes-1."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    class_names: tuple[str, ...]
    ids: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """Natural owners: a column name to one id per train sample and one per test sample."""
    scale: tuple[np.ndarray, np.ndarray] | None = None
    """Mean and deviation to normalise by, if the data is part of something larger; otherwise its own are used."""
    computed: "Computed | None" = None
    """What computes a client's samples when it is drawn; there are no training samples here then."""

    def __repr__(self) -> str:
        """No samples: it may end up in a log."""
        many = f"{len(self.y_train)} training and {len(self.y_test)} test samples"
        return f"<Domain {self.name}: {many} of shape {self.shape}, {self.classes} classes>"

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x_train.shape[1:])

    def as_numbers(self) -> "Domain":
        """Whole numbers (tokens) as float32; pixels and floats unchanged."""
        if self.x_train.dtype.kind not in "iu" or self.x_train.dtype == np.uint8:
            return self
        return replace(self, x_train=self.x_train.astype(np.float32), x_test=self.x_test.astype(np.float32))


def has_gaps(x: np.ndarray) -> bool:
    """Whether values of a table (N, features) are missing (NaN)."""
    return x.ndim == 2 and x.dtype.kind == "f" and bool(np.isnan(x).any())


def client_names(domains: Sequence[Domain], owned: np.ndarray) -> list[str]:
    """Clients' names, given the number of each client's domain: the names of their data if each has its own, otherwise
    client 0, client 1, ..."""
    if 1 < len(domains) == len(owned) == len(set(owned.tolist())):
        return [domains[number].name for number in owned.tolist()]
    return [f"client {number}" for number in range(len(owned))]
